"""A model and its tokenizer from disk, and the attention of its layers on a text."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AttentionError, BadValue
from ..formatting import visible
from ..functional.ambient import capture_call
from ..functional.explain import explain_problem
from ..nn.token_ids import known_ids
from ..trace import Trace
from .gguf_file import ABOUT, converted, is_gguf
from .inspect_model import calls_interface, not_answered
from .register import NAME, quiet_transformers, register, transformers
from .token_text import TokenTexts, Vocabulary

# Names of folders that say nothing about the model.
_NAMELESS = {"", ".", "model", "models", "checkpoint", "snapshot"}


class Checkpoint:
    """A model and its tokenizer from a folder on disk, or from a GGUF file, whose weights are
    dequantised once and cached. Nothing is downloaded, no code in it is run.

    `path` is what was passed, and `folder` has the files: the same, or a folder of the cache.
    `model` gives a vector for each token; `predictor` is the same model with the head that makes
    logits of the next token of them, None if it was not trained with one.

    Raises `BadValue` if the folder is not there, is damaged, or does not hold a checkpoint with
    safetensors of a kind that is part of transformers; for a GGUF file that transformers reads
    otherwise than llama.cpp.
    """

    def __init__(self, path: str | Path):
        library = transformers()
        self.path = Path(path)
        self.folder = converted(self.path) if is_gguf(path) else self.path
        if not (self.folder / "config.json").is_file():
            raise BadValue(
                f"{str(path)!r} is not a checkpoint folder.",
                "a Hugging Face checkpoint is a folder with config.json, model.safetensors and "
                "tokenizer files; a GGUF file will do, too.",
                "check the path; a model on the hub must be downloaded first.",
            )
        self._check_weights()
        register()
        with quiet_transformers():  # what matters of a loading is told below
            trained, loaded = self._load(library)
        self._check_vocabulary()
        self._check_implementation(trained)
        # A pooler makes one vector of a text, and attention comes before it.
        if drawn := sorted(name for name in loaded["missing_keys"] if "pooler" not in name):
            warnings.warn(
                f"the checkpoint in {str(self.path)!r} lacks {len(drawn)} of the model's "
                f"weights, which are drawn at random: {', '.join(drawn[:5])}",
                stacklevel=2,
            )
        if loaded["mismatched_keys"]:
            name, found, expected = min(loaded["mismatched_keys"])
            raise self._damaged(
                f"{name} is {tuple(found)} in its weights and {tuple(expected)} by its config.json."
            )
        trained.eval()
        self.predictor: nn.Module | None = None
        self.model = trained
        if _loader(library, trained.config) is library.AutoModelForCausalLM:
            self.predictor, self.model = trained, trained.base_model

    def _load(self, library: Any) -> tuple[Any, dict[str, Any]]:
        """Load the tokenizer; return the model, and what transformers reports of its weights."""
        try:
            config = library.AutoConfig.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False
            )
            use_clearhead(config)
            self.tokenizer = library.AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False
            )
            trained, loaded = _loader(library, config).from_pretrained(
                self.folder,
                config=config,
                attn_implementation=NAME,
                local_files_only=True,
                trust_remote_code=False,  # left out, transformers asks on standard input
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # told by the caller, with names and sizes
                output_loading_info=True,
            )
            return trained, loaded
        except Exception as error:  # a damaged file raises whatever its reader happens to
            # How transformers says that it has no such implementation for this model. A path may
            # hold our name too.
            if f'attn_implementation="{NAME}"' in str(error) or str(error) == repr(NAME):
                raise not_answered(f"The {config.model_type} in {str(self.path)!r}") from error
            raise self._damaged(
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            ) from error

    def _check_weights(self) -> None:
        """Raise `BadValue` if the folder has no safetensors."""
        if any(self.folder.glob("*.safetensors")):
            return
        if pickles := sorted(file.name for file in self.folder.glob("*.bin")):
            raise self._damaged(
                f"it has no *.safetensors, only {pickles[0]}.",
                "load it with transformers, and write it with model.save_pretrained(folder).",
            )
        raise self._damaged(
            "it has no *.safetensors.", "copy all files of the checkpoint into the folder."
        )

    def _check_vocabulary(self) -> None:
        """Raise `BadValue` for a tokenizer without words: transformers makes one where the files of
        the tokenizer are missing, and every word would become the unknown token."""
        special = {*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()}
        if special.issuperset(self.tokenizer.get_vocab()):
            raise self._damaged(
                "its tokenizer has no vocabulary.",
                "save the tokenizer into the folder too: tokenizer.save_pretrained(folder).",
            )

    def _check_implementation(self, model: nn.Module) -> None:
        """Raise `BadValue` if a layer that asks transformers for its attention gets another's."""
        for name, module in model.named_modules():
            if not calls_interface(type(module)):
                continue
            used = getattr(getattr(module, "config", None), "_attn_implementation", NAME)
            if used != NAME:
                raise BadValue(
                    f"{name or 'The model'} in {str(self.path)!r} runs on {used!r}, as "
                    "_attn_implementation of its configuration says.",
                    f"a checkpoint runs on attn_implementation={NAME!r} in all its layers.",
                    "remove the key _attn_implementation from config.json.",
                )

    def _damaged(
        self,
        why: str,
        hint: str = "try transformers.AutoModel.from_pretrained on the folder to see more.",
    ) -> BadValue:
        return BadValue(
            f"The checkpoint in {str(self.path)!r} cannot be loaded: {why}",
            "config, safetensors and tokenizer fit together; code in a folder is never run.",
            hint,
        )

    @property
    def name(self) -> str:
        """The name of the folder or file; for one such as "model", the name in its configuration,
        or its kind. Remarks follow it: how the weights of a GGUF file are quantised, and whether
        only the encoder of an encoder and decoder is run."""
        about = self._about
        quantization = about.get("quantization")
        name = self.path.resolve().name
        if self.path != self.folder:
            name = name.removesuffix(".gguf")
            if quantization and name.lower().endswith(str(quantization).lower()):
                name = name[: -len(quantization)].rstrip(".-_")
        if name.lower() in _NAMELESS:
            config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
            written = str(about.get("name") or config.get("_name_or_path") or "")
            known = written.replace("\\", "/").rstrip("/").rpartition("/")[2]
            name = str(config.get("model_type") or name) if known.lower() in _NAMELESS else known
        remarks = [f"{quantization}, dequantised"] if quantization else []
        remarks += ["its encoder"] if self.has_decoder else []
        return f"{name} ({', '.join(remarks)})" if remarks else name

    @property
    def _about(self) -> dict[str, Any]:
        """The name and the quantisation in the metadata of a GGUF file."""
        if self.path == self.folder:
            return {}
        written = json.loads((self.folder / ABOUT).read_text(encoding="utf-8"))
        return dict(written)

    @property
    def has_decoder(self) -> bool:
        """Is it an encoder and a decoder? Then only the encoder is run."""
        return bool(getattr(self.model.config, "is_encoder_decoder", False))

    @cached_property
    def words(self) -> Sequence[str]:
        """The token of each id, as `Token`."""
        return Vocabulary(TokenTexts(self.tokenizer))

    @property
    def longest(self) -> int | None:
        """The most tokens the model has positions for; None if it does not say."""
        for name, module in self.model.named_modules():
            if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
                # RoBERTa and its relatives count positions from padding_idx + 1.
                skipped = 0 if module.padding_idx is None else module.padding_idx + 1
                return module.num_embeddings - skipped
        most = getattr(self.model.config, "max_position_embeddings", None)
        return most if most is not None and most > 0 else None  # XLNet says -1

    @property
    def depth(self) -> int | None:
        """How many layers there are; None if the config does not say."""
        return getattr(self.model.config, "num_hidden_layers", None)

    def tokens_and_inputs(self, text: str) -> tuple[list[str], dict[str, Tensor]]:
        """The tokens of a text as it was written, each a `Token`, and the inputs of the model."""
        # verbose=False: a text that is too long is an error below, and needs no warning above it.
        is_fast = getattr(self.tokenizer, "is_fast", False)
        encoded = self.tokenizer(
            text, return_tensors="pt", verbose=False, return_offsets_mapping=is_fast
        )
        ids = encoded["input_ids"]
        if not ids.numel() and text.strip():
            raise BadValue(
                f"The tokenizer of {str(self.path)!r} finds no tokens in {text!r}.",
                "a checkpoint is read with the tokenizer whose files lie beside its weights.",
                "save the tokenizer into the folder too: tokenizer.save_pretrained(folder).",
            )
        special = {*self.tokenizer.all_special_ids} - {self.tokenizer.unk_token_id}
        if special.issuperset(ids.flatten().tolist()):
            raise BadValue(
                f"The text {text!r} has no tokens of its own.",
                "a text has at least one token beside those that the tokenizer puts around it.",
                "pass some words.",
            )
        if self.longest is not None and ids.shape[1] > self.longest:
            raise BadValue(
                f"The text has {ids.shape[1]} tokens.",
                f"this model has positions for at most {self.longest} tokens.",
                "pass a shorter text.",
            )
        offsets = encoded["offset_mapping"][0].tolist() if is_fast else None
        tokens: list[str] = [*TokenTexts(self.tokenizer).tokens(text, ids[0].tolist(), offsets)]
        given = {n: encoded[n] for n in ("input_ids", "attention_mask") if n in encoded}
        if getattr(self.model.config, "use_cache", False) and not self.has_decoder:
            # No next token is generated, so keys and values need not be kept: 270 MB at 32k tokens.
            given["use_cache"] = False
        return tokens, given

    @property
    def module(self) -> nn.Module:
        """What is run on a text: the model, of an encoder and decoder the encoder."""
        module = self.model.get_encoder() if self.has_decoder else self.model
        assert isinstance(module, nn.Module)
        return module

    def run(self, given: dict[str, Tensor], *, predict: bool = False) -> Any:
        """Run the model on a text, for those who listen to it, and return what it gives; with
        `predict` the `predictor`, if there is one."""
        module = self.predictor if predict and self.predictor is not None else self.module
        try:
            with torch.no_grad(), known_ids(module):
                return module(**given)
        except AttentionError:
            raise
        except Exception as error:  # an input that is missing, or a config that makes no sense
            raise BadValue(
                f"The model in {str(self.path)!r} cannot be run on a text: {error}",
                "it is given the tokens of the text and nothing else, no image and no sound.",
                "run it yourself on all its inputs: report(model, inputs), or inside of "
                "watch(model).",
            ) from error

    is_small = False

    def annotate(self, report: Any) -> Any:
        """The report with the positions of tokens that the vocabulary lacks."""
        unknown = TokenTexts(self.tokenizer).unknown(report.tokens)
        return replace(report, unknown=unknown)

    def remarks(self, text: str) -> tuple[()]:
        """None: the report says everything."""
        return ()

    def explain(self, text: str, layer: int = 0) -> Trace:
        """The `Trace` of one layer on a text.

        Raises `BadValue` for a layer that the model does not have.
        """
        tokens, given = self.tokens_and_inputs(text)
        call, count = capture_call(lambda: self.run(given), layer)
        if call is None:
            raise BadValue(
                f"layer {layer} was asked for.",
                f"{'its encoder' if self.has_decoder else 'this model'} has {count} layers that "
                "call attention, numbered from 0.",
                f"pass a layer from 0 to {count - 1}."
                if count
                else "use a model that goes through transformers' attention interface.",
            )
        trace = explain_problem(*call, tokens=tokens)
        kind = visible(str(getattr(self.model.config, "model_type", "model")), 60)
        part = " encoder" if self.has_decoder else ""
        return replace(trace, about=f"{kind}{part}, layer {layer}: {trace.about}")


def use_clearhead(config: Any) -> None:
    """Write the implementation into a configuration and its parts. A key `_attn_implementation` in
    config.json would win over the argument, and may name a kernel that transformers downloads; so
    may the key for the experts."""
    config._attn_implementation = NAME
    config._experts_implementation = None
    for part in vars(config).values():
        if isinstance(part, transformers().PreTrainedConfig):
            use_clearhead(part)


def _loader(library: Any, config: Any) -> Any:
    """The class of transformers that loads this model: with the head that predicts the next token,
    if it was trained with one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    (name, *_) = config.architectures or [""]
    predicts = name.endswith(("ForCausalLM", "LMHeadModel"))
    known = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return library.AutoModelForCausalLM if predicts and known else library.AutoModel

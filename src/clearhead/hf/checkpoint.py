"""Load a model and its tokenizer from disk, and run it on a text: `Checkpoint`."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import AttentionError, BadType, BadValue, as_path
from ..core.formatting import visible
from ..core.functional.ambient import capture_call
from ..core.functional.explain import explain_problem
from ..core.functional.trace import Trace
from ..nn.token_ids import known_ids
from .gguf_file import ABOUT, converted, is_gguf
from .inspect_model import calls_interface, not_answered
from .register import NAME, quiet_transformers, register, transformers
from .token_text import TokenTexts, Vocabulary

# Names of folders that do not identify the model.
_NAMELESS = {"", ".", "model", "models", "checkpoint", "snapshot"}


class Checkpoint:
    """A model and its tokenizer from a folder on disk, or from a GGUF file.

    The weights of a GGUF file are dequantised once and cached. Nothing is downloaded, and no code
    in the folder is run.

    Attributes:
        path: the path that was passed.
        folder: the folder with the files: `path`, or a folder of the cache for a GGUF file.
        model: returns a vector for each token.
        predictor: the same model with the head that computes logits of the next token; None if it
            was not trained with one.

    Raises `BadValue` if the folder is missing or damaged, or is not a checkpoint with safetensors
    of an architecture in transformers, and for a GGUF file that transformers reads differently than
    llama.cpp.
    """

    def __init__(self, path: str | Path):
        library = transformers()
        self.path = as_path("Checkpoint", path)
        self.folder = converted(self.path) if is_gguf(path) else self.path
        if not (self.folder / "config.json").is_file():
            what = "is not a checkpoint folder" if self.path.exists() else "does not exist"
            rule = "a checkpoint is a GGUF file, or config.json, safetensors and tokenizer files."
            hint = "check the path; a model on the hub must be downloaded first."
            raise BadValue(f"{str(path)!r} {what}.", rule, hint)
        self._check_weights()
        register()
        with quiet_transformers():  # the checks below report what matters
            trained, loaded = self._load(library)
        self._check_vocabulary()
        self._check_implementation(trained)
        # A pooler comes after attention, so missing weights there do not matter.
        if drawn := sorted(name for name in loaded["missing_keys"] if "pooler" not in name):
            warnings.warn(
                f"the checkpoint in {str(self.path)!r} lacks {len(drawn)} of the model's "
                f"weights, which are therefore random: {', '.join(drawn[:5])}",
                stacklevel=2,
            )
        if loaded["mismatched_keys"]:
            name, stored, expected = min(loaded["mismatched_keys"])
            raise self._damaged(
                f"{name} is {tuple(stored)} in its weights and {tuple(expected)} in config.json."
            )
        trained.eval()
        self.predictor: nn.Module | None = None
        self.model = trained
        if _loader(library, trained.config) is library.AutoModelForCausalLM:
            self.predictor, self.model = trained, trained.base_model

    def _load(self, library: Any) -> tuple[Any, dict[str, Any]]:
        """Load the tokenizer; return the model and transformers' loading report."""
        # Without the second, transformers prompts on standard input.
        source = {"local_files_only": True, "trust_remote_code": False}
        try:
            config = library.AutoConfig.from_pretrained(self.folder, **source)
            use_clearhead(config)
            self._load_reader(library, source)
            trained, loaded = _loader(library, config).from_pretrained(
                self.folder,
                **source,
                config=config,
                attn_implementation=NAME,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # the caller raises, with names and sizes
                output_loading_info=True,
            )
            return trained, loaded
        except Exception as error:  # the reader of a damaged file may raise anything
            # transformers' messages for a model without this implementation. A path may contain
            # the name, too.
            if f'attn_implementation="{NAME}"' in str(error) or str(error) == repr(NAME):
                raise not_answered(f"The {config.model_type} in {str(self.path)!r}") from error
            hint = "if it is a vision model, pass an image to report or to clearhead look."
            hints = [hint] * (self.folder / "preprocessor_config.json").is_file()
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise self._damaged(why, *hints) from error

    def _load_reader(self, library: Any, source: dict[str, Any]) -> None:
        self.tokenizer = library.AutoTokenizer.from_pretrained(self.folder, **source)

    def _check_weights(self) -> None:
        """Raise `BadValue` if the folder has no safetensors."""
        if any(self.folder.glob("*.safetensors")):
            return
        why, hint = "it has no *.safetensors", "copy all files of the checkpoint into the folder."
        if pickles := sorted(file.name for file in self.folder.glob("*.bin")):
            why += f", only {pickles[0]}"
            hint = "load it with transformers, and write it with model.save_pretrained(folder)."
        raise self._damaged(f"{why}.", hint)

    def _check_vocabulary(self) -> None:
        """Raise `BadValue` for a tokenizer without vocabulary.

        transformers creates one if the tokenizer's files are missing, and every word would become
        the unknown token.
        """
        special = {*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()}
        if special.issuperset(self.tokenizer.get_vocab()):
            hint = "save the tokenizer into the folder too: tokenizer.save_pretrained(folder)."
            raise self._damaged("its tokenizer has no vocabulary.", hint)

    def _check_implementation(self, model: nn.Module) -> None:
        """Raise `BadValue` if a layer uses another attention implementation than clearhead."""
        for name, module in model.named_modules():
            if not calls_interface(type(module)):
                continue
            used = getattr(getattr(module, "config", None), "_attn_implementation", NAME)
            if used != NAME:
                gave = f"{name or 'The model'} in {str(self.path)!r} runs on {used!r}."
                rule = f"a checkpoint runs on attn_implementation={NAME!r} in all its layers."
                hint = "remove the key _attn_implementation from config.json."
                raise BadValue(gave, rule, hint)

    def _damaged(
        self,
        why: str,
        hint: str = "try transformers.AutoModel.from_pretrained on the folder to see more.",
    ) -> BadValue:
        gave = f"The checkpoint in {str(self.path)!r} cannot be loaded: {why}"
        rule = "config, safetensors and tokenizer belong together; code in a folder is never run."
        return BadValue(gave, rule, hint)

    @property
    def name(self) -> str:
        """The name of the folder or file; for a generic one such as "model", the name in its
        configuration, or its type.

        Remarks follow in parentheses: the quantisation of a GGUF file, and whether only the encoder
        of an encoder-decoder runs.
        """
        about = self._about
        quantization = about.get("quantization")
        path = self.path.resolve()
        name = path.name
        if path.parent.name == "snapshots":  # of the cache of the hub: models--ORGANISATION--NAME
            name = path.parents[1].name.rpartition("--")[2]
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
        """The metadata of a GGUF file; empty for a folder."""
        if self.path == self.folder:
            return {}
        written = json.loads((self.folder / ABOUT).read_text(encoding="utf-8"))
        return dict(written)

    @property
    def has_decoder(self) -> bool:
        """Whether it is an encoder-decoder, of which only the encoder runs."""
        return bool(getattr(self.model.config, "is_encoder_decoder", False))

    @cached_property
    def words(self) -> Sequence[str]:
        """The token of each id, as `Token`."""
        return Vocabulary(TokenTexts(self.tokenizer))

    @property
    def longest(self) -> int | None:
        """The number of positions of the model; None if unlimited or unknown."""
        for name, module in self.model.named_modules():
            if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
                # RoBERTa and similar models count positions from padding_idx + 1.
                skipped = 0 if module.padding_idx is None else module.padding_idx + 1
                return module.num_embeddings - skipped
        most = getattr(self.model.config, "max_position_embeddings", None)
        return most if most is not None and most > 0 else None  # XLNet has -1

    @property
    def depth(self) -> int | None:
        """The number of layers; None if the configuration does not have it."""
        return getattr(self.model.config, "num_hidden_layers", None)

    def tokens_and_inputs(self, text: str | Tensor) -> tuple[list[str], dict[str, Tensor]]:
        """Return the tokens of a text as written, each a `Token`, and the inputs of the model.

        In place of the text, its ids may be passed, (T,) or (1, T). No token is added to them.

        Raises `BadValue` for a text without tokens or with special tokens alone, one that is too
        long for the model, and ids that it lacks; `BadType` for ids that are not integers.
        """
        if isinstance(text, Tensor):
            ids = self._checked_ids(text)
            return self._tokens_and_inputs(None, {"input_ids": ids}, None)
        # verbose=False: a text that is too long raises an error below.
        is_fast = getattr(self.tokenizer, "is_fast", False)
        encoded = self.tokenizer(
            text, return_tensors="pt", verbose=False, return_offsets_mapping=is_fast
        )
        ids = encoded["input_ids"]
        if not ids.numel() and text.strip():
            gave = f"The tokenizer of {str(self.path)!r} finds no tokens in {text!r}."
            hint = "save the tokenizer into the folder too: tokenizer.save_pretrained(folder)."
            raise BadValue(gave, "a checkpoint is read with the tokenizer in its folder.", hint)
        special = {*self.tokenizer.all_special_ids} - {self.tokenizer.unk_token_id}
        if special.issuperset(ids.flatten().tolist()):
            rule = "a text has at least one token that the tokenizer does not add itself."
            raise BadValue(f"The text {text!r} has only special tokens.", rule, "pass some words.")
        offsets = encoded["offset_mapping"][0].tolist() if is_fast else None
        return self._tokens_and_inputs(text, encoded, offsets)

    def _tokens_and_inputs(
        self, text: str | None, encoded: Any, offsets: list[tuple[int, int]] | None
    ) -> tuple[list[str], dict[str, Tensor]]:
        ids = encoded["input_ids"]
        if self.longest is not None and ids.shape[1] > self.longest:
            rule = f"this model has positions for at most {self.longest} tokens."
            raise BadValue(f"The text has {ids.shape[1]} tokens.", rule, "pass a shorter text.")
        tokens: list[str] = [*TokenTexts(self.tokenizer).tokens(text, ids[0].tolist(), offsets)]
        inputs = {n: encoded[n] for n in ("input_ids", "attention_mask") if n in encoded}
        if getattr(self.model.config, "use_cache", False) and not self.has_decoder:
            # No token is generated, so a KV cache would be useless: 270 MB at 32k tokens.
            inputs["use_cache"] = False
        return tokens, inputs

    def _checked_ids(self, ids: Tensor) -> Tensor:
        """Token ids as (1, T). Raises `BadType` for other numbers, `BadValue` for other shapes and
        for an id that the model lacks."""
        words = self.model.get_input_embeddings().num_embeddings
        rule = f"token ids are whole numbers from 0 to {words - 1}, of shape (T,) or (1, T)."
        hint = 'pass for example tokenizer(text, return_tensors="pt")["input_ids"].'
        if ids.dtype not in (torch.int64, torch.int32):
            raise BadType(f"The ids are of {ids.dtype}.", rule, hint)
        if ids.dim() not in (1, 2) or not ids.numel() or ids.shape[:-1].numel() != 1:
            raise BadValue(f"The ids are of shape {tuple(ids.shape)}.", rule, hint)
        if int(ids.min()) < 0 or int(ids.max()) >= words:
            raise BadValue(f"The ids go from {int(ids.min())} to {int(ids.max())}.", rule, hint)
        return ids.reshape(1, -1)

    @property
    def module(self) -> nn.Module:
        """The module that runs on a text: the model, or the encoder of an encoder-decoder."""
        module = self.model.get_encoder() if self.has_decoder else self.model
        assert isinstance(module, nn.Module)
        return module

    def run(self, inputs: dict[str, Tensor], *, predict: bool = False) -> Any:
        """Run `module` on a text, or with `predict` the `predictor` if there is one.

        Raises `BadValue` if the model needs more than the tokens, or an id has no embedding.
        """
        module = self.predictor if predict and self.predictor is not None else self.module
        try:
            with torch.no_grad(), known_ids(module):
                return module(**inputs)
        except AttentionError:
            raise
        except Exception as error:  # an input is missing, or the configuration is wrong
            gave = f"The model in {str(self.path)!r} cannot run on a text: {error}"
            rule = "its only input is the tokens of the text, without images or sound."
            hint = "run it on all its inputs: report(model, inputs), or inside watch(model)."
            raise BadValue(gave, rule, hint) from error

    is_small = False

    def annotate(self, report: Any) -> Any:
        """Return the report with the positions of tokens that are not in the vocabulary."""
        unknown = TokenTexts(self.tokenizer).unknown(report.tokens)
        return replace(report, unknown=unknown)

    def remarks(self, text: str) -> tuple[()]:
        """Return no remarks."""
        return ()

    def explain(self, text: str, layer: int = 0) -> Trace:
        """Return the `Trace` of one layer on a text.

        Raises `BadValue` for a layer that the model does not have.
        """
        tokens, inputs = self.tokens_and_inputs(text)
        call, count = capture_call(lambda: self.run(inputs), layer)
        if call is None:
            own = "its encoder" if self.has_decoder else "this model"
            rule = f"{own} has {count} layers that call attention, numbered from 0."
            other = "use a model that uses transformers' attention interface."
            hint = f"pass a layer from 0 to {count - 1}." if count else other
            raise BadValue(f"layer {layer} was requested.", rule, hint)
        trace = explain_problem(*call, tokens=tokens)
        kind = str(getattr(self.model.config, "model_type", "model"))
        name = f"{kind} encoder" if self.has_decoder else kind
        if self._about.get("quantization"):
            name = self.name  # which has the quantisation
        return replace(trace, about=f"{visible(name, 200)}, layer {layer}: {trace.about}")


def use_clearhead(config: Any) -> None:
    """Set the attention implementation in a configuration and its parts.

    A key `_attn_implementation` in config.json would override the argument, and may name a kernel
    that transformers downloads, like the key for the experts.
    """
    config._attn_implementation = NAME
    config._experts_implementation = None
    for part in vars(config).values():
        if isinstance(part, transformers().PreTrainedConfig):
            use_clearhead(part)


def _loader(library: Any, config: Any) -> Any:
    """Return the transformers class that loads this model, with its next-token head if it was
    trained with one, or writes what it hears."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.model_type == "whisper":
        return library.AutoModelForSpeechSeq2Seq
    (name, *_) = config.architectures or [""]
    predicts = name.endswith(("ForCausalLM", "LMHeadModel"))
    known = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return library.AutoModelForCausalLM if predicts and known else library.AutoModel

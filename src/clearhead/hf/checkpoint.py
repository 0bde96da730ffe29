"""A model from a folder on disk, and what its layers do with a text."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..api.explain import explain_problem
from ..api.hooks import capture_call
from ..errors import AttentionError, BadValue
from ..results.trace import Trace
from ..views.escape import visible
from .register import NAME, register, transformers

# What a folder is called when nobody named it, and what "no name" looks like.
_NAMELESS = {"", ".", "model", "models", "checkpoint", "snapshot"}


class Checkpoint:
    """A model and its tokenizer from a folder on disk; nothing is fetched, no code in it is run.

    Raises `BadValue` if the folder is not there or does not hold a checkpoint with safetensors that
    transformers knows by itself.
    """

    def __init__(self, folder: str | Path):
        library = transformers()
        self.folder = Path(folder)
        if not (self.folder / "config.json").is_file():
            raise BadValue(
                f"{str(folder)!r} is not a checkpoint folder.",
                "a Hugging Face checkpoint is a folder with config.json, model.safetensors and "
                "tokenizer files.",
                "check the path; a model on the hub must be downloaded first.",
            )
        register()
        library.utils.logging.disable_progress_bar()
        try:
            self.tokenizer = library.AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False
            )
            self.model = library.AutoModel.from_pretrained(
                self.folder,
                attn_implementation=NAME,
                local_files_only=True,
                trust_remote_code=False,  # left out, transformers asks on standard input
                use_safetensors=True,
            ).eval()
        except (OSError, ValueError, KeyError, ImportError) as error:
            # Their words for a name that they do not know; a path may hold it, too.
            if f'attn_implementation="{NAME}"' in str(error) or str(error) == repr(NAME):
                raise _answers_itself(str(folder)) from error
            raise BadValue(
                f"The checkpoint in {str(folder)!r} cannot be loaded: {error}",
                "config, safetensors and tokenizer fit together; code in a folder is never run.",
                "try transformers.AutoModel.from_pretrained on the folder to see more.",
            ) from error

    @property
    def name(self) -> str:
        """The folder's name; where that says nothing, the one it was trained under, or its kind.
        Of an encoder and decoder it says that the encoder is read with."""
        folder = self.folder.resolve().name
        if folder.lower() in _NAMELESS:
            config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
            trained = str(config.get("_name_or_path") or "").replace("\\", "/").rstrip("/")
            known = trained.rpartition("/")[2]
            folder = (
                str(config.get("model_type") or folder) if known.lower() in _NAMELESS else known
            )
        return f"{folder} (its encoder)" if self.has_decoder else folder

    @property
    def has_decoder(self) -> bool:
        """Has it an encoder and a decoder beside it, which stays silent?"""
        return bool(getattr(self.model.config, "is_encoder_decoder", False))

    @property
    def longest(self) -> int | None:
        """The most tokens the model has positions for; None if it does not say."""
        for name, module in self.model.named_modules():
            if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
                # RoBERTa and its kin count positions from the one after that of padding.
                skipped = 0 if module.padding_idx is None else module.padding_idx + 1
                return module.num_embeddings - skipped
        most = getattr(self.model.config, "max_position_embeddings", None)
        return most if most is not None and most > 0 else None  # XLNet says -1

    def read(self, text: str) -> tuple[list[str], dict[str, Tensor]]:
        """The tokens of a text, and what the model is called with for it."""
        encoded = self.tokenizer(text, return_tensors="pt")
        ids = encoded["input_ids"]
        if not ids.numel() and text.strip():
            raise BadValue(
                f"The tokenizer of {str(self.folder)!r} finds no tokens in {text!r}.",
                "a checkpoint is read with the tokenizer whose files lie beside its weights.",
                "save the tokenizer into the folder too: tokenizer.save_pretrained(folder).",
            )
        if not ids.numel():
            raise BadValue(
                f"The text {text!r} has no tokens.",
                "attention needs at least one token.",
                "pass some words.",
            )
        if self.longest is not None and ids.shape[1] > self.longest:
            raise BadValue(
                f"The text has {ids.shape[1]} tokens.",
                f"this model has positions for at most {self.longest} tokens.",
                "pass a shorter text.",
            )
        tokens = [str(t) for t in self.tokenizer.convert_ids_to_tokens(ids[0].tolist())]
        return tokens, {n: encoded[n] for n in ("input_ids", "attention_mask") if n in encoded}

    def run(self, given: dict[str, Tensor]) -> None:
        """Run the model; of an encoder and decoder, the encoder. Whoever listens hears it."""
        model = self.model.get_encoder() if self.has_decoder else self.model
        try:
            with torch.no_grad():
                model(**given)
        except AttentionError:
            raise
        except (AttributeError, TypeError, ValueError) as error:
            raise BadValue(
                f"The model in {str(self.folder)!r} cannot be run on a text: {error}",
                "it is given the tokens of the text and nothing else, no image and no sound.",
                "run it yourself on all its inputs: report(model, inputs), or inside of "
                "watch(model).",
            ) from error

    def explain(self, text: str, layer: int = 0) -> Trace:
        """The `Trace` of one layer on a text.

        Raises `BadValue` for a layer that the model does not have.
        """
        tokens, given = self.read(text)
        asked, count = capture_call(lambda: self.run(given), layer)
        if asked is None:
            raise BadValue(
                f"layer {layer} was asked for.",
                f"{'its encoder' if self.has_decoder else 'this model'} has {count} layers that "
                "ask for attention, numbered from 0.",
                f"pass a layer from 0 to {count - 1}."
                if count
                else "use a model that goes through transformers' attention interface.",
            )
        trace = explain_problem(*asked, tokens=tokens)
        kind = visible(str(getattr(self.model.config, "model_type", "model")), 60)
        part = " encoder" if self.has_decoder else ""
        return replace(trace, about=f"{kind}{part}, layer {layer}: {trace.about}")


def _answers_itself(folder: str) -> BadValue:
    kind = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("model_type")
    return BadValue(
        f"The {kind or 'model'} in {folder!r} computes its attention itself.",
        "clearhead answers models that hand their attention to transformers' interface.",
        "use one that does, for example a BERT, GPT-2, Llama, Mistral, Qwen or Gemma.",
    )

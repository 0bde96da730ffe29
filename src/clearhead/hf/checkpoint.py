"""A model from a folder on disk, and what its layers do with a text."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import attend
from ..errors import BadValue
from ..masks import dense
from ..trace import Trace
from .attention import Asked, listening
from .register import NAME, register, transformers


class Checkpoint:
    """A model and its tokenizer from a folder on disk; nothing is fetched.

    Raises `BadValue` if the folder is not there or does not hold a checkpoint with safetensors.
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
                self.folder, local_files_only=True
            )
            self.model = library.AutoModel.from_pretrained(
                self.folder,
                attn_implementation=NAME,
                local_files_only=True,
                use_safetensors=True,
            ).eval()
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise BadValue(
                f"The checkpoint in {str(folder)!r} cannot be loaded: {error}",
                "config, weights (safetensors) and tokenizer must fit together.",
                "try transformers.AutoModel.from_pretrained on the folder to see more.",
            ) from error

    @property
    def longest(self) -> int | None:
        """The most tokens the model has positions for; None if it does not say."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def read(self, text: str) -> tuple[list[str], list[Asked]]:
        """The tokens of a text, and every attention question the model asked about it, in order."""
        encoded = self.tokenizer(text, return_tensors="pt")
        ids = encoded["input_ids"]
        if self.longest is not None and ids.shape[1] > self.longest:
            raise BadValue(
                f"The text has {ids.shape[1]} tokens.",
                f"this model has positions for at most {self.longest} tokens.",
                "pass a shorter text.",
            )
        tokens = [str(t) for t in self.tokenizer.convert_ids_to_tokens(ids[0].tolist())]
        model = self.model
        if getattr(model.config, "is_encoder_decoder", False):
            model = model.get_encoder()
        with torch.no_grad(), listening(model) as asked:
            model(input_ids=ids, attention_mask=encoded.get("attention_mask"))
        return tokens, asked

    def explain(self, text: str, layer: int = 0, head: int | None = None) -> Trace:
        """The `Trace` of one layer on a text; `head=None` keeps every head.

        Raises `BadValue` for a layer or head that the model does not have.
        """
        tokens, asked = self.read(text)
        if not asked:
            raise BadValue(
                f"The model in {str(self.folder)!r} did not ask for attention.",
                "clearhead sees attention that goes through transformers' attention interface.",
                "use a model that does, such as BERT, GPT-2 or Llama.",
            )
        _within("layer", layer, len(asked))
        (q, k, v), keywords = asked[layer].tensors, asked[layer].keywords
        H, G = q.shape[1], k.shape[1]
        if head is not None:
            _within("head", head, H)
            q, k, v = (
                x[:, i : i + 1] for x, i in ((q, head), (k, head * G // H), (v, head * G // H))
            )
            keywords = {n: _one_head(n, x, head, H) for n, x in keywords.items()}
        trace = attend.explain(q, k, v, tokens=tokens, **keywords)
        where = f"{self.folder.name}, layer {layer}" + ("" if head is None else f", head {head}")
        return Trace(
            trace.steps, trace.queries, trace.keys, f"{where}: {trace.about}", trace.settings
        )


def _one_head(name: str, value: Any, head: int, H: int) -> Any:
    """The part of a keyword that belongs to one head."""
    if name == "bias" and isinstance(value, Tensor) and value.dim() == 4 and value.shape[1] == H:
        return value[:, head : head + 1]
    if name == "sinks" and isinstance(value, Tensor):
        return value[head : head + 1]
    if name == "mask" and getattr(value, "bits", None) is not None:
        bits = value.bits
        return dense(keep=bits[:, head : head + 1]) if bits.shape[1] == H else value
    return value


def _within(name: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise BadValue(
            f"{name} {index} was asked for.",
            f"this model has {count} {name}s, numbered from 0.",
            f"pass a {name} from 0 to {count - 1}.",
        )

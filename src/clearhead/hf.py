"""Plugs into Hugging Face transformers: the attention function and the mask function, together.

transformers asks two functions by one name: one makes the mask, the other attends. With only the
second, the mask arrives as None and causality is lost without a word, so `register` sets both.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import attend
from .errors import BadType, BadValue
from .masks import Mask, causal, dense, everything
from .trace import Trace

NAME = "clearhead"

# What is passed along although it has been applied before: positions are in the queries and keys,
# sliding windows are in the mask. Plain yes-or-no switches speak of the model, not of attention.
_ALREADY_APPLIED = {"position_ids", "cache_position", "sliding_window"}


@dataclass(frozen=True, eq=False)
class Asked:
    """One attention question that a model asked: its tensors and the keywords of `attention`."""

    layer: int
    module: str
    tensors: tuple[Tensor, Tensor, Tensor]
    keywords: dict[str, Any]


_asked: ContextVar[Callable[[torch.nn.Module, tuple[Tensor, ...], dict[str, Any]], None] | None] = (
    ContextVar("asked", default=None)
)


def register() -> None:
    """Make ``attn_implementation="clearhead"`` available to every transformers model.

    Raises `BadType` if transformers is not installed.
    """
    transformers = _transformers()
    from transformers.masking_utils import AttentionMaskInterface

    transformers.AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask as booleans (B, 1, Tq, Tk), True = may look, or None where nothing is masked."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a model calls: query (B, H, Tq, D), key and value with their own G heads, not repeated.

    Returns the output as (B, Tq, H, Dv), contiguous, and the weights (B, H, Tq, Tk) if the call
    asked for `output_attentions`, else None. The weights never carry dropout, and asking for them
    does not change the output. Raises `BadValue` for an argument whose meaning is not known here,
    rather than ignoring it.
    """
    unknown = {
        name
        for name, value in others.items()
        if not (value is None or isinstance(value, bool) or name in _ALREADY_APPLIED)
    }
    if unknown:
        raise BadValue(
            f"The model passed {', '.join(sorted(unknown))} to its attention function.",
            "clearhead answers only what it understands in full.",
            "load this model with another attn_implementation.",
        )
    bias = position_bias
    mask: Mask = everything
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        mask = dense(keep=attention_mask)
    elif attention_mask is not None:
        bias = attention_mask if bias is None else bias + attention_mask
    elif query.shape[2] > 1 and (
        getattr(module, "is_causal", False) if is_causal is None else is_causal
    ):
        mask = causal
    keywords: dict[str, Any] = {
        "mask": mask,
        "bias": bias,
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux if s_aux is None else s_aux.to(query.dtype),
        "dropout": dropout if module.training else 0.0,
    }
    listener = _asked.get()
    if listener is not None:
        listener(module, (query, key, value), keywords)
    out = attend.attention(query, key, value, **keywords)
    weights = None
    if output_attentions:
        weights = attend.matrix(query, key, **keywords).to_dense().to(query.dtype)
    return out.transpose(1, 2).contiguous(), weights


class Checkpoint:
    """A model and its tokenizer from a folder on disk; nothing is fetched.

    Raises `BadValue` if the folder is not there or does not hold a checkpoint with safetensors.
    """

    def __init__(self, folder: str | Path):
        transformers = _transformers()
        self.folder = Path(folder)
        if not (self.folder / "config.json").is_file():
            raise BadValue(
                f"{str(folder)!r} is not a checkpoint folder.",
                "a Hugging Face checkpoint is a folder with config.json, model.safetensors and "
                "tokenizer files.",
                "check the path; a model on the hub must be downloaded first.",
            )
        register()
        transformers.utils.logging.disable_progress_bar()
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True
            )
            self.model = transformers.AutoModel.from_pretrained(
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
        with torch.no_grad(), _listening(model) as asked:
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


@contextmanager
def _listening(model: torch.nn.Module) -> Iterator[list[Asked]]:
    """Collect what the model asks while it runs."""
    names = {id(module): name for name, module in model.named_modules()}
    heard: list[Asked] = []

    def hear(
        module: torch.nn.Module, tensors: tuple[Tensor, ...], keywords: dict[str, Any]
    ) -> None:
        q, k, v = tensors
        heard.append(Asked(len(heard), names.get(id(module), ""), (q, k, v), keywords))

    token = _asked.set(hear)
    try:
        yield heard
    finally:
        _asked.reset(token)


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


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise BadType(
            "transformers is not installed.",
            "reading a Hugging Face checkpoint needs it.",
            "pip install 'clearhead[hf]'",
        ) from error
    return transformers

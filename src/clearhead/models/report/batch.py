"""Report on each text of a padded batch: `report_batch`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...core.errors import BadValue
from ...core.functional.ambient import must_not_be_sharded
from ...hf import Checkpoint
from ...nn.token_ids import as_batch
from .result import Report
from .run import report


def report_batch(
    model: Checkpoint | nn.Module,
    texts: Sequence[str] | Tensor | Mapping[str, Tensor],
    *,
    tokens: Sequence[Sequence[str]] | None = None,
    decoder_tokens: Sequence[Sequence[str]] | None = None,
    name: str | None = None,
    progress: bool | None = None,
) -> list[Report]:
    """Return the `report` of each text of a batch, on the text alone, without padding.

    For a module, each text is cut out of its inputs. Padding is where `attention_mask`, (B, T), is
    0 or `key_padding_mask`, (B, T), is True; for inputs named decoder_*, the same names with this
    prefix count. These columns are left out of each tensor (B, T, ...). Padding that no input
    states stays.

    Args:
        model: a checkpoint, or any module whose attention goes through clearhead.
        texts: for a checkpoint, a list of texts, or ids; for a module its inputs, a tensor or a
            dict of tensors. Ids of one text, (T,), are a batch of one.
        tokens: for a module, the tokens of each text, without padding. None means numbers.
        decoder_tokens: the same for the decoder of a model with cross-attention, as in `report`.
        name: the name of the model in the reports. None means that of the checkpoint, or the class.
        progress: show a progress bar on stderr for each text, one step per layer. None shows it
            only in a terminal.

    Raises:
        BadValue, BadType: as `report`; a number of `tokens` that does not fit; a call inside
            `distributed.sharded`.
    """
    must_not_be_sharded("report_batch")
    own = list(_texts_alone(texts))
    none = [None] * len(own)
    for argument, lists in (("tokens", tokens), ("decoder_tokens", decoder_tokens)):
        if lists is not None and len(lists) != len(own):
            gave = f"{argument} has the tokens of {len(lists)} texts, and the batch has {len(own)}."
            rule = f"{argument} is a list for each text."
            raise BadValue(gave, rule, "pass the tokens of every text, without padding.")
    return [
        report(model, text, tokens=x, decoder_tokens=y, name=name, progress=progress)
        for text, x, y in zip(own, tokens or none, decoder_tokens or none, strict=True)
    ]


def _texts_alone(texts: Any) -> Iterator[Any]:
    """Yield the input of `report` for each text. Anything but a batch is one, which it refuses."""
    if not isinstance(texts, Tensor | Mapping):
        yield from texts if isinstance(texts, list | tuple) and texts else [texts]
        return
    inputs = as_batch(texts)
    tensors = {None: inputs} if isinstance(inputs, Tensor) else dict(inputs)
    real = {side: _real_columns(tensors, side) for side in ("", "decoder_")}
    sized = (x for x in (real[""], *tensors.values()) if isinstance(x, Tensor) and x.dim())
    B = len(next(sized, ()))
    for text in range(B):
        own = {name: _alone(x, name, text, B, real) for name, x in tensors.items()}
        yield own.get(None, own)


def _real_columns(tensors: Mapping[Any, Any], side: str) -> Tensor | None:
    """Return the columns of a batch that are not padding, (B, T), or None if it has no mask."""
    for name, is_padding in ((f"{side}attention_mask", False), (f"{side}key_padding_mask", True)):
        mask = tensors.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return (mask != 0) ^ is_padding
    return None


def _alone(x: Any, name: str | None, text: int, B: int, real: Mapping[str, Tensor | None]) -> Any:
    """Return the part of an input that belongs to one text, with a batch of one."""
    if not isinstance(x, Tensor) or not x.dim():
        return x
    if len(x) not in (1, B):
        gave = f"The input {name} is of shape {tuple(x.shape)}, and the batch has {B} texts."
        rule = "the first axis of every tensor counts the texts, or is 1."
        raise BadValue(gave, rule, "call report(model, inputs) with the inputs of each text.")
    x = x if len(x) == 1 else x[text : text + 1]
    columns = real["decoder_" if name is not None and name.startswith("decoder_") else ""]
    has_columns = columns is not None and x.dim() > 1 and x.shape[1] == columns.shape[1]
    return x[:, columns[text]] if has_columns else x  # type: ignore[index]  # it is not None

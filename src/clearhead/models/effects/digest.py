"""Compute digests of values by their content, which are the same in every run of Python."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import kind_of
from ...core.masks import Mask
from ..inspect.edits import Edit
from ..inspect.recording import Call, Recording

_PLAIN = (
    bool, int, float, complex, str, bytes, range, slice, type(None), torch.dtype, torch.device,
)  # fmt: skip
_OWN = f"{__name__.partition('.')[0]}."


class Undigested(Exception):
    """The kind of a value whose content is not known completely."""


def digest(value: Any) -> str:
    """Return the digest of numbers, texts, tensors, lists, tuples and dicts of them, and of the
    edits, masks and recordings of this package. Raises `Undigested` for anything else."""
    kind = type(value)
    is_own = kind.__module__.startswith(_OWN)
    if kind in (Tensor, nn.Parameter):
        if value.is_meta or value.layout is not torch.strided or value.is_nested:
            raise Undigested(f"a tensor {tuple(value.shape)} without a dense array of numbers")
        return _hash(Tensor, _content(value))
    if kind in _PLAIN:
        return _hash(kind, [repr(value).encode()])
    if kind in (list, tuple, torch.Size) or (is_own and isinstance(value, tuple)):
        return _hash(kind, (digest(x).encode() for x in value))
    if kind in (dict, OrderedDict):
        return _hash(kind, (digest(x).encode() for x in value.items()))
    if not is_own or not hasattr(value, "__dict__"):
        raise Undigested(kind_of(value))
    parts = vars(value)
    if isinstance(value, Edit | Mask | Recording | Call):  # private attributes follow from others
        parts = {name: x for name, x in parts.items() if name[:1] != "_"}
    return _hash(kind, [digest(parts).encode()])


def weights_digest(model: nn.Module) -> str:
    """Compute a digest of the tensors of a model by name, and of the name of its class."""
    tensors = {n: x for n, x in model.state_dict().items() if isinstance(x, Tensor)}
    names = (_hash(str, [repr(name).encode()]).encode() for name in tensors)
    contents = (_hash(type(x), _content(x)).encode() for x in tensors.values())
    items = (_hash(tuple, item).encode() for item in zip(names, contents, strict=True))
    return _hash(type(model), [_hash(OrderedDict, items).encode()])


def _hash(kind: type, parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__} ".encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def _content(x: Tensor) -> Iterator[bytes | memoryview]:
    """Yield the shape, dtype and bytes of a tensor; a meta tensor has no bytes."""
    yield f"{tuple(x.shape)} {x.dtype}".encode()
    if not x.is_meta:
        resolved = x.detach().resolve_conj().resolve_neg()
        yield resolved.cpu().reshape(-1).view(torch.uint8).numpy().data

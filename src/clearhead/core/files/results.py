"""Save results to files, load them, and convert them to data frames of pandas.

A file has the format of safetensors: the tensors of the result under the names of its attributes,
and its structure as JSON in the metadata. Only classes that are marked `loadable` are saved.
"""

import copyreg
import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import BadType, BadValue, as_path, kind_of, needs
from ..torch_state import LOADABLE
from .atomic_io import replacing

if TYPE_CHECKING:
    import pandas

KEY, VERSION_KEY, FORMAT = "clearhead", "clearhead_format", "1"


class Savable:
    """A result that can be written to a file."""

    def save(self, path: str | Path) -> Path:
        """Write this result to a file, which `clearhead.load` reads, and return its path.

        The file holds tensors as safetensors and the rest as JSON, without pickle. Other programs
        read the tensors with ``safetensors.torch.load_file``. Loaded tensors are on the CPU and
        have no gradients.

        Raises `BadValue` if the file cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        structure = _encode(self, "", tensors)
        path = as_path("save", path)
        metadata = {KEY: json.dumps(structure, allow_nan=False), VERSION_KEY: FORMAT}
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata)
        return path


def load(path: str | Path) -> Any:
    """Load a result that its `save` wrote: a `Look`, a `Recording`, a `Report` or a `Trace`.

    Raises `BadValue` for a missing file, for a file that `save` did not write, and for a file of
    another version whose results had other parts.
    """
    path = as_path("load", path)
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if metadata[VERSION_KEY] != FORMAT:
            raise KeyError(f"format {metadata[VERSION_KEY]}")
        return _decode(json.loads(metadata[KEY]), tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        rule = "load reads files that a result's save method wrote in this version of clearhead."
        hint = "check the path; safetensors.torch.load_file reads the tensors of any such file."
        raise BadValue(f"{str(path)!r} {why}.", rule, hint) from error


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a value to JSON, and put its tensors into `tensors`, by `name` and part."""

    def part(key: object, x: Any) -> Any:
        return _encode(x, f"{name}.{key}".lstrip("._"), tensors)

    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if type(value) is list:
        return [part(i, x) for i, x in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [part(i, x) for i, x in enumerate(value)]}
    if type(value) in (dict, OrderedDict):
        return {"dict": [[part("key", key), part(key, x)] for key, x in value.items()]}
    kind = type(value)
    if LOADABLE.get(kind.__name__) is not kind:
        rule = "a result can hold numbers, strings, tensors and other results of clearhead."
        hint = "save only the tensors, with safetensors.torch.save_file."
        raise BadType(f"The result holds {kind_of(value)} as {name}.", rule, hint)
    make, arguments, state = (*value.__reduce_ex__(2), None)[:3]
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]  # as in pickle
        arguments = arguments[1:]
    return {
        "class": kind.__name__,
        "arguments": [part(i, x) for i, x in enumerate(arguments)],
        "state": None if state is None else [[n, part(n, x)] for n, x in state.items()],
    }


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(x, tensors) for x in value]
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float(value["float"])
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        return tuple(_decode(x, tensors) for x in value["tuple"])
    if "dict" in value:
        return {_decode(key, tensors): _decode(x, tensors) for key, x in value["dict"]}
    kind = LOADABLE[value["class"]]
    result = kind.__new__(kind, *(_decode(x, tensors) for x in value["arguments"]))
    if value["state"] is not None:
        state = {name: _decode(x, tensors) for name, x in value["state"]}
        if set_state := getattr(kind, "__setstate__", None):
            set_state(result, state)
        else:
            result.__dict__.update(state)
        known = fields(kind) if is_dataclass(kind) else ()
        needed = [x.name for x in known if x.default is MISSING and x.default_factory is MISSING]
        if lacking := [name for name in needed if name not in state]:
            raise KeyError(f"{kind.__name__} lacks {', '.join(lacking)}")
    return result


def data_frame(rows: Sequence[Mapping[str, object]]) -> "pandas.DataFrame":
    """Return a DataFrame of pandas with these rows. Raises `Missing` without pandas."""
    with needs("pandas", "to_pandas returns a DataFrame, and clearhead does not require pandas."):
        import pandas
    return pandas.DataFrame(list(rows))

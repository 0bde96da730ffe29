"""Convert a GGUF file to a checkpoint: transformers reads it once, and safetensors are cached.

The tensors are dequantised to float32, which is exact. The cache folder is named after the content
of the file, and later runs read it.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from ..core.errors import BadValue, needs
from .gguf_settings import check_numbers, check_settings, scale_queries, scale_rotations, unreadable
from .gguf_tokenizer import check_tokens, set_tokenizer
from .register import quiet_transformers

FORMAT = 3  # of the converted folders; higher when a conversion changes
ABOUT = "clearhead.json"
_PLAIN = {"F32", "F16", "BF16", "F64"}


def is_gguf(path: str | Path) -> bool:
    """Return whether a file is one of GGUF, by its first bytes or, if it is broken, its name."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF" or str(path).lower().endswith(".gguf")
    except (OSError, ValueError):  # a null byte in the path
        return False


def cache_folder() -> Path:
    """Return the folder of cached files: CLEARHEAD_CACHE, or `clearhead` in XDG_CACHE_HOME or
    ~/.cache."""
    if named := os.environ.get("CLEARHEAD_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "clearhead"


def converted(file: Path) -> Path:
    """Return the checkpoint folder of a GGUF file, after converting the file if necessary.

    Raises `Missing` without the packages that read GGUF. Raises `BadValue` for a file that is
    damaged, or that transformers cannot read or would misread.
    """
    import transformers

    with needs("hf", "transformers reads GGUF files with the packages gguf and accelerate."):
        import accelerate  # noqa: F401  # transformers needs it
        import gguf
    with file.open("rb") as opened:
        digest = hashlib.sha256()
        while chunk := opened.read(1 << 24):
            digest.update(chunk)
    name = f"{digest.hexdigest()[:32]}-{FORMAT}-{transformers.__version__}"
    folder = cache_folder() / "gguf" / name
    if (folder / ABOUT).is_file():
        return folder
    try:
        reader = gguf.GGUFReader(file)
    except Exception as error:  # the reader of a damaged file may raise anything
        gave = f"The GGUF file {str(file)!r} is broken ({type(error).__name__}: {error})."
        rule = "a GGUF file begins with the letters GGUF, and has all bytes that its header names."
        hint = "compare its size with that of the original, and download or copy it again."
        raise BadValue(gave, rule, hint) from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    size = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    if (free := shutil.disk_usage(folder.parent).free) < size:
        gave = f"{str(file)!r} has {size / 1e9:.1f} GB of weights as float32."
        rule = f"{str(folder.parent)!r}, where they are stored, has {free / 1e9:.1f} GB free."
        raise BadValue(gave, rule, "set CLEARHEAD_CACHE to a folder with more space.")
    temporary = Path(tempfile.mkdtemp(prefix="converting-", dir=folder.parent))
    try:
        with quiet_transformers(), _without_bars():
            _convert(file, reader, temporary)
        with contextlib.suppress(OSError):  # another process was faster
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _convert(file: Path, reader: Any, folder: Path) -> None:
    """Write config, safetensors, tokenizer and `ABOUT` of a file to a folder."""
    import transformers

    about = {
        key: reader.fields[f"general.{key}"].contents()
        for key in ("architecture", "name", "file_type")
        if f"general.{key}" in reader.fields
    }
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # `check_numbers` raises, with names and sizes
    if hasattr(transformers, "GgufConfig"):  # older ones always dequantise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        config = transformers.AutoConfig.from_pretrained(file.parent, **source)
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **source)
        kind = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
        loader = getattr(transformers, kind)
        model, loaded = loader.from_pretrained(file.parent, **source, **options)
    except Exception as error:
        raise unreadable(file, f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    check_settings(file, reader, model.config)
    scale_rotations(file, reader, model.config)
    scale_queries(model.config)
    check_numbers(file, reader, model, loaded)
    _write_model(model, folder)
    set_tokenizer(file, reader, tokenizer)
    tokenizer.save_pretrained(folder)
    check_tokens(file, reader, transformers.AutoTokenizer.from_pretrained(folder))
    about["quantization"] = _quantization(reader, about.get("file_type"))
    (folder / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")


def _without_bars() -> contextlib.AbstractContextManager[object]:
    """Hide the bar of the conversion outside a terminal; transformers has no option for it."""
    if sys.stderr.isatty():
        return contextlib.nullcontext()
    return contextlib.redirect_stderr(io.StringIO())


def _write_model(model: Any, folder: Path) -> None:
    """Save the weights with a copy of the model without quantisation settings, with which
    transformers would refuse to save."""
    config = type(model.config).from_dict(
        {name: x for name, x in model.config.to_dict().items() if name != "quantization_config"}
    )
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)


def _quantization(reader: Any, file_type: Any) -> str:
    """Return the quantisation of the weights, such as "Q4_1"; "" for floating-point numbers.

    It is the file's own name for it, or the type of most of its weights.
    """
    import gguf

    sizes = Counter[str]()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    if not sizes.keys() - _PLAIN:
        return ""
    try:
        return gguf.LlamaFileType(file_type).name.removeprefix("MOSTLY_")
    except ValueError:
        return sizes.most_common(1)[0][0]

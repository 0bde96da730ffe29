"""Read the patterns of DuoAttention as edits.

Source: `load_attn_pattern`, `sparsify_attention_heads` and `generate_streaming_mask` of
github.com/mit-han-lab/duo-attention, November 2026 (Xiao et al. 2024, arXiv 2410.10819).
"""

import json
import math
from pathlib import Path

import numpy as np
from torch import nn

from ....core.errors import BadType, BadValue, as_count, as_number, as_path, why_failed
from ....core.masks import prefix, window
from .edit import Edit
from .weights import keep_only


def from_duo_attention(
    folder: str | Path,
    model: nn.Module,
    *,
    sparsity: float | None = None,
    threshold: float | None = None,
) -> list[Edit]:
    """Return the edits that make the streaming heads of a pattern of DuoAttention stream.

    A streaming head sees the first `sink_size` tokens and the last `recent_size`, the query among
    them; the other heads see all. The edits are one `keep_only` for each layer with a streaming
    head.

    Args:
        folder: ``full_attention_heads.tsv`` has a number for each KV head, a row for each layer.
            ``config.json`` has `sink_size` and `recent_size`.
        model: the model of transformers that the edits are for. Its config has the number of
            query heads that read a KV head.
        sparsity: the fraction of KV heads that stream, those with the smallest numbers. Among
            equal numbers the first ones stream, where DuoAttention draws.
        threshold: KV heads with a smaller number stream. Pass one of these two. The numbers of
            `Survey.export_duo_attention` are made for `sparsity`.

    Raises:
        BadValue, BadType: a folder without these files, or with other content; a model without a
            config; a pattern of another number of layers or KV heads; both or none of `sparsity`
            and `threshold`, or one of them outside 0 to 1.
    """
    numbers, sinks, recent = _read(as_path("from_duo_attention", folder))
    group = _group(model, numbers.shape)
    streams = _streaming(numbers, sparsity, threshold)
    mask = prefix(sinks) | window(before=recent - 1, after=0)
    return [
        keep_only(
            mask, layers=[layer], heads=[head * group + i for head in heads for i in range(group)]
        )
        for layer, row in enumerate(streams)
        if (heads := row.nonzero()[0].tolist())
    ]


def _read(folder: Path) -> tuple[np.ndarray, int, int]:
    """Return the number of each KV head, (layers, G), and the sizes of sinks and window."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        sizes = config["sink_size"], config["recent_size"]
        numbers = np.loadtxt(folder / "full_attention_heads.tsv", delimiter="\t", ndmin=2)
        if not np.isfinite(numbers).all():
            raise ValueError("some numbers are not finite")
    except (OSError, ValueError, KeyError, TypeError) as error:
        gave = f"{str(folder)!r} could not be read ({type(error).__name__}: {why_failed(error)})."
        rule = "it needs full_attention_heads.tsv, and config.json with sink_size and recent_size."
        raise BadValue(gave, rule, "pass the folder with both files.") from error
    rule, hint = "config.json has the sizes of sinks and window in tokens.", "correct config.json."
    sinks, recent = (
        as_count(name, size, rule, hint, least)
        for name, size, least in zip(("sink_size", "recent_size"), sizes, (0, 1), strict=True)
    )
    return numbers.clip(0, 1), sinks, recent


def _group(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Return how many query heads read a KV head. Raises `BadValue` for another model."""
    config = getattr(model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    heads = getattr(config, "num_attention_heads", None)
    layers = getattr(config, "num_hidden_layers", None)
    if heads is None or layers is None:
        gave = f"from_duo_attention got a {type(model).__name__} without a config of its heads."
        rule = "the config of transformers has num_attention_heads and num_hidden_layers."
        raise BadType(gave, rule, "pass the transformers model; of a Checkpoint, its module.")
    if types := getattr(config, "layer_types", None):
        layers = sum("attention" in x and "linear" not in x for x in types)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if shape != (layers, key_heads):
        gave = f"The pattern has {shape[0]} x {shape[1]} key heads, not {layers} x {key_heads}."
        rule = "a pattern has a row for each attention layer and a column for each key head."
        raise BadValue(gave, rule, "pass the pattern of this model.")
    return int(heads // key_heads)


def _streaming(numbers: np.ndarray, sparsity: float | None, threshold: float | None) -> np.ndarray:
    """Return which KV heads stream, (layers, G)."""
    if (sparsity is None) == (threshold is None):
        gave = f"from_duo_attention got {sparsity=} and {threshold=}."
        raise BadValue(gave, "one of them decides which heads stream.", "set one: sparsity=0.5.")
    name, number = ("sparsity", sparsity) if threshold is None else ("threshold", threshold)
    rule, hint = f"{name} is a number from 0 to 1.", f"pass for example {name}=0.5."
    value = as_number(name, number, rule, hint, lambda x: 0 <= x <= 1)
    if threshold is not None:
        return numbers < value
    # As many as are below numpy's quantile, which DuoAttention compares with, if all differ.
    count = numbers.size if value == 1 else math.ceil((numbers.size - 1) * value)
    streams = np.zeros(numbers.size, dtype=bool)
    streams[numbers.flatten().argsort(kind="stable")[:count]] = True
    return streams.reshape(numbers.shape)

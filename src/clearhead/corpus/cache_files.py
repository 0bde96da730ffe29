"""Write what KV heads can forget as files of other libraries: DuoAttention and KVPress.

`tests/corpus/test_kvpress.py` opens both files with KVPress 0.5.5, which reads the patterns of
DuoAttention too: with either, a tiny Llama has the logits of the masks that a survey proposes.
Source of the pattern: `load_attn_pattern` of github.com/mit-han-lab/duo-attention, November 2026.
"""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..core.errors import BadValue, as_path, writable_folder
from ..core.files import atomic_io
from ..core.formatting import quantity
from .forgetting import COPIES, RECENT, divide, error_curves, groups_of_layers, key_heads
from .long import SINKS

if TYPE_CHECKING:
    from . import Survey

RATIOS = 99  # compression ratios of KVPress: 0.01 to 0.99


def export_duo_attention(survey: "Survey", folder: str | Path, recent: int = RECENT) -> Path:
    """Write KV heads as a pattern of DuoAttention, and return the folder.

    ``full_attention_heads.tsv`` has a row for each layer, with a number from 0 to 1 for each KV
    head: 1 for a head that copies, and the error of another. Choose the fraction of streaming heads
    (`sparsity` there): the numbers are not the gates that DuoAttention trains, so its threshold 0.5
    means something else. ``config.json`` has the sizes of sinks and window.

    Raises `BadValue` for a model of one layer, or of one KV head in a layer: its pattern would be
    a row or a column, which ``numpy.loadtxt`` there reads as a list of numbers.
    """
    heads = key_heads(survey, recent)
    _must_be_regular(survey, "a pattern of DuoAttention")
    numbers = [1.0 if x.retrieval.mean > COPIES else min(x.error.mean, 1.0) for x in heads]
    count, _ = groups_of_layers(survey)[0]
    if count == 1 or len(numbers) == count:
        raise BadValue(
            f"The survey has {quantity(len(numbers) // count, 'layer')} of "
            f"{quantity(count, 'key head')}.",
            "a pattern of DuoAttention has several layers and several key heads: it reads a table.",
            "use survey.budgets(keep) or survey.export_kvpress(path).",
        )
    rows = [numbers[start : start + count] for start in range(0, len(numbers), count)]
    text = "\n".join("\t".join(f"{x:.6f}" for x in row) for row in rows)
    out = writable_folder(folder, "a pattern is")
    atomic_io.replace(out / "full_attention_heads.tsv", f"{text}\n".encode())
    atomic_io.write_json(out / "config.json", {"sink_size": SINKS, "recent_size": recent})
    return out


def export_kvpress(survey: "Survey", path: str | Path) -> Path:
    """Write budgets as a curve for `LUKVPress` of KVPress, and return the path, an .npy file.

    >>> press = LUKVPress(scorer, compression_ratio=0.5)  # doctest: +SKIP
    >>> press._budget_curves = np.load(path)  # otherwise it downloads a curve  # doctest: +SKIP

    It has the fractions of keys to drop, (99, layers, KV heads), for the total fractions 0.01 to
    0.99. Where `budgets` refuses so few keys, all heads keep equally many. KVPress chooses the keys
    of a budget by its own scores, and not by position.

    Raises `BadValue` for layers with different numbers of KV heads, for a survey without the
    metrics of `long`, and for a path that cannot be written.
    """
    _must_be_regular(survey, "a curve of KVPress")
    curves, (G, _) = error_curves(survey), groups_of_layers(survey)[0]
    context, n = survey.manifest.fixed["context"], len(curves)
    dropped = np.empty((RATIOS, n), dtype=np.float32)
    for row in range(RATIOS):
        total = round((1 - (row + 1) / (RATIOS + 1)) * context * n)
        enough = total >= sum(curve[0][0] for curve in curves)
        sizes = np.array(divide(curves, total)) if enough else np.full(n, total / n)
        dropped[row] = 1 - sizes / context
    content = BytesIO()
    np.save(content, dropped.reshape(RATIOS, -1, G))
    return atomic_io.replace(as_path("export_kvpress", path), content.getvalue())


def _must_be_regular(survey: "Survey", what: str) -> None:
    counts = {layer: count for layer, (count, _) in groups_of_layers(survey).items()}
    if len({*counts.values()}) > 1 or [*counts] != [*range(len(counts))]:
        raise BadValue(
            f"The layers {', '.join(map(str, counts))} have "
            f"{', '.join(map(str, counts.values()))} key heads.",
            f"{what} has the same number of key heads in every layer.",
            "write survey.key_heads() in a format of your own.",
        )

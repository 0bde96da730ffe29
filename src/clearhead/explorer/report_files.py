"""A report as files: the page, the pictures and the numbers."""

import json
import re
from pathlib import Path
from zlib import crc32

from ..errors import writable_folder
from ..formatting import MAP_SIDE
from ..inspection.report import Report
from . import html, plot

POOLED_NOTE = (
    "Of a text this long, maps are pooled: a cell is the mean weight of a bin of queries on a bin "
    "of keys. Exact weights of any part: clearhead look FILE --model DIR --tile "
    "LAYER:HEAD:QUERIES:KEYS, for example --tile 0:3:64-127:0-63."
)


def write(found: Report, out: str | Path, *, beside: Report | None = None) -> dict[str, Path]:
    """Write the page, the pictures and the numbers of a report to the folder `out`: files that
    begin with the name of the model. Where those of another model of this name are already, a
    checksum of the model's folder follows the name. `beside` is the report of another model, with
    which the page compares; None is none.

    Returns their paths by kind; without matplotlib there are no pictures. Raises `BadValue` for a
    folder that cannot be created.
    """
    out = writable_folder(out, "the page and the pictures are")
    stem = file_stem(found.name)
    if _folder_of(out / f"{stem}-report.json") not in (None, found.folder):
        stem += f"-{crc32(found.folder.encode()):08x}"
    note = POOLED_NOTE if len(found.tokens) > MAP_SIDE else ""
    paths = {
        "page": html.write_report(found, out / f"{stem}.html", note=note, beside=beside),
        # Not {stem}.json: beside the weights of a storyteller this is the table of `measure`.
        "numbers": out / f"{stem}-report.json",
    }
    paths["numbers"].write_text(
        json.dumps(found.to_json(), indent=1, allow_nan=False), encoding="utf-8"
    )
    if not plot.can_draw():
        return paths
    for kind, figure in (
        ("entropy", plot.entropy_by_layer(found).figure),
        ("maps", plot.model(found)),
    ):
        paths[kind] = plot.save(figure, out / f"{stem}-{kind}.png")  # type: ignore[arg-type]  # a Figure, as neither was given axes
    return paths


def file_stem(name: str) -> str:
    """A name as the beginning of a file's name.

    >>> file_stem("opus-mt (its encoder)"), file_stem("../a b")
    ('opus-mt-its-encoder', 'a-b')
    """
    return re.sub(r"[^\w.]+", "-", name).strip("-.")[:100] or "model"


def _folder_of(numbers: Path) -> str | None:
    """The folder of the model whose numbers are in this file; None if it holds none."""
    try:
        return str(json.loads(numbers.read_text(encoding="utf-8"))["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

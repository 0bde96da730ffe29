"""Write a report to files: the page, the pictures and the numbers."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from ..core.errors import must_be, writable_folder
from ..models.report import Report
from ..models.why import Why
from . import html, plot


def write(
    report: Report,
    out: str | Path,
    *,
    beside: Report | None = None,
    ahead: Report | None = None,
    why: Sequence[Why] | str = (),
) -> dict[str, Path]:
    """Write the page, the pictures and the numbers of a report to the folder `out`.

    The names of the files begin with that of the model. If the folder has files of another model
    with the same name, a checksum of the model's folder is added. `beside`, `ahead` and `why` are
    as in `html.report_page`.

    Returns the paths by kind; without matplotlib there are no pictures. Raises `BadValue` for a
    folder that cannot be created.
    """
    must_be("write", report, Report, "report(...)")
    out = writable_folder(out, "the page and the pictures are")
    stem = file_stem(report.name)
    if _folder_of(out / f"{stem}-report.json") not in (None, report.folder):
        stem += f"-{crc32(report.folder.encode()):08x}"
    page = html.write_report(report, out / f"{stem}.html", beside=beside, ahead=ahead, why=why)
    paths = {
        "page": page,
        # Not {stem}.json: beside the weights of a storyteller this is the table of `measure`.
        "numbers": out / f"{stem}-report.json",
    }
    paths["numbers"].write_text(
        json.dumps(report.to_json(), indent=1, allow_nan=False), encoding="utf-8"
    )
    if not plot.can_draw():
        return paths
    entropy = plot.entropy_by_layer(report).figure
    paths["entropy"] = plot.save(entropy, out / f"{stem}-entropy.png")  # type: ignore[arg-type]  # a Figure, as no axes were passed
    return {**paths, "maps": plot.save(plot.model(report), out / f"{stem}-maps.png")}


def file_stem(name: str) -> str:
    """Convert a name to the beginning of a file name.

    >>> file_stem("opus-mt (its encoder)"), file_stem("../a b")
    ('opus-mt-its-encoder', 'a-b')
    """
    return re.sub(r"[^\w.]+", "-", name).strip("-.")[:100] or "model"


def _folder_of(numbers: Path) -> str | None:
    """Return the folder of the model whose numbers are in this file; None if it has none."""
    try:
        return str(json.loads(numbers.read_text(encoding="utf-8"))["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

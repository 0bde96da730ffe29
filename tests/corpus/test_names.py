"""The names of the survey in docstrings, errors and the manual are those of objects."""

import re
from operator import attrgetter
from pathlib import Path

import clearhead

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(?<!from )(?<!import )\bclearhead\.((?:corpus|survey)(?:\.\w+)+)")


def test_every_dotted_name_exists():
    files = [*ROOT.glob("src/clearhead/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "CHANGELOG.md"]
    found = {name for file in files for name in NAME.findall(file.read_text())}
    linked = re.findall(r"\[`(corpus\.[\w.]+)`\]", (ROOT / "docs/reference/models.md").read_text())
    assert {"corpus.Metric", "survey.Needles", "corpus.tables.SCHEMA"} <= found and linked
    for name in {*found, *linked}:
        attrgetter(name)(clearhead)

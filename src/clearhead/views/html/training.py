"""Write the page of a training: a film of all heads, over the steps that a monitor logged."""

import html
from pathlib import Path

import torch

from ...core.errors import must_be
from ...core.formatting import evenly
from ...models.monitor.history import History
from . import schema
from .document import INKS, encoded, filled, table, write

MOST_STEPS = 600


def training_page(history: History, *, title: str = "Training") -> str:
    """Return the HTML document of a training: findings, lines, a heat map, and heads at each step.

    It shows at most 600 of the logged steps, evenly spaced; findings and alarms are those of all.
    Raises `BadType` for anything else.
    """
    must_be("training_page", history, History, "ch.monitor.read(folder)")
    drawn = evenly(len(history.steps), MOST_STEPS)
    findings = history.findings()
    data: schema.TrainingPage = {
        "inks": INKS,
        "steps": [history.steps[i] for i in drawn],
        "heads": history.heads,
        "values": {m: encoded(torch.from_numpy(x[drawn]), "f4") for m, x in history.values.items()},
        "findings": [*findings],
    }
    about = repr(history).split("\n")[0]
    if len(drawn) < len(history.steps):
        about += f"; the page shows {len(drawn)} of these steps"
    texts = {"title": title, "about": about, "caption": "What happened"}
    rows = [[html.escape(finding.sentence)] for finding in findings]
    return filled("training", ("page.css", "training.css"), data, texts, table(rows), None)


def write_training(history: History, path: str | Path, *, title: str = "Training") -> Path:
    """Write the page of a training to `path`. Raises `BadValue` if it cannot."""
    return write(training_page(history, title=title), path)

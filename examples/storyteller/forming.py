"""Train a storyteller, and measure along its training what its heads look at.

    python -m examples.storyteller.forming --out out/forming
    clearhead monitor out/forming --out film.html

Each hundred steps are in the folder, with the numbers of `ch.monitor` and the rates of `measure`:
how often each head looks at the word before, the subject and the antecedent in held-out stories.
`forming.json` is `--table` of such a run: the rates alone.
"""

import argparse
import json
from pathlib import Path

import torch

import clearhead as ch

from .data import Stories, stories
from .measure import hit_rates
from .train import Recipe, Training, commit, run

EVERY, HELD_OUT = 100, 200  # steps between two checkpoints, and stories that measure one
Rates = dict[str, list[list[float]]]  # of each relation: (L, H)


def train_and_measure(
    out: Path, recipe: Recipe, *, every: int = EVERY, held_out: int = HELD_OUT
) -> dict[int, Rates]:
    """Train, and write the numbers of heads to the folder `out`. Returns the rates by step."""
    training, measured = Training(recipe, Stories(recipe.seed)), dict[int, Rates]()
    texts, write = stories(recipe.seed, held_out, "held-out"), ch.monitor.parquet(out)

    def log(row: dict[str, float], step: int) -> None:
        rates = hit_rates(training.model.eval(), training.source.vocabulary, texts)
        training.model.train()
        measured[step] = {label: rate.tolist() for label, (rate, _) in rates.items()}
        write(row | _row(measured[step]), step)

    log({}, 0)
    with ch.monitor(training.model, every=every, log=log, start=1) as monitor:
        run(training, after=lambda done: monitor.step())
    return measured


def _row(rates: Rates) -> dict[str, float]:
    return {
        f"attention/L{layer}/H{head}/{label.replace(' ', '_')}": rate
        for label, of_label in rates.items()
        for layer, of_layer in enumerate(of_label)
        for head, rate in enumerate(of_layer)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/forming"))
    parser.add_argument("--table", type=Path, help="write the rates as JSON")
    chosen, recipe = parser.parse_args(), Recipe()
    torch.set_num_threads(1)
    measured = train_and_measure(chosen.out, recipe)
    if chosen.table:
        command = f"python -m examples.storyteller.forming --table {chosen.table.name}"
        rates = {
            label: [[[round(x, 3) for x in row] for row in of[label]] for of in measured.values()]
            for label in measured[0]
        }
        head = {"command": command, "commit": commit(), "seed": recipe.seed, "stories": HELD_OUT}
        parts = {**head, "steps": [*measured], "rates": rates}
        lines = (f" {json.dumps(name)}: {json.dumps(part)}" for name, part in parts.items())
        chosen.table.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()

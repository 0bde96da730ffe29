"""Measure which keys a real model can forget, and what it costs to forget them.

A survey of SmolLM2-135M-Instruct (Q4_1, dequantised) with the metrics `long` proposes how many keys
each KV head keeps: the first 4 and the most recent ones. The program masks the others, and prints
the loss and how well the model predicts the digits of a pass key, beside equal budgets of the same
total size.

    python examples/forget_keys.py

The texts are from Python's standard library. The survey reads modules and the manual of the
language, and the losses are of other modules and other chapters.
"""

import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import clearhead as ch
from clearhead.corpus.forgetting import Budgets
from clearhead.hf import Checkpoint
from clearhead.models.progress import progress_bar

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.smollm2 import fetch

CONTEXT, FRACTIONS = 1024, (0.5, 0.25, 0.1)
SURVEYED = "argparse tarfile typing subprocess difflib heapq statistics random".split()
HELD_OUT = "shutil inspect pathlib zipfile".split()
CHAPTERS = 40_000  # characters of the manual between two texts
NEEDLE, QUESTION = " The pass key is {}. Remember it.\n", "\nWhat is the pass key? The pass key is"
ANSWER = 5  # digits


class Trial(NamedTuple):
    """A context with a pass key, which ends with the question for it and the digits of the key."""

    ids: Tensor
    text: slice  # the tokens before the question


class Scores(NamedTuple):
    """The mean loss of the tokens before the question, and the fraction of digits predicted."""

    loss: float
    recall: float


def texts(modules: list[str], first: int) -> list[str]:
    """Return the beginnings of modules, and as many texts of the manual, from `first` on."""
    library = Path(sysconfig.get_paths()["stdlib"])
    manual = (library / "pydoc_data" / "topics.py").read_text(encoding="utf-8")
    code = [(library / f"{name}.py").read_text(encoding="utf-8")[:7500] for name in modules]
    starts = range(first, first + CHAPTERS * len(modules), CHAPTERS)
    return code + [manual[start : start + 9000] for start in starts]


def trials(checkpoint: Checkpoint) -> Iterator[Trial]:
    """Yield a context for each held-out text, with a pass key at an even depth."""
    drawn = random.Random(0)

    def ids(text: str) -> list[int]:
        return list(checkpoint.tokenizer(text, add_special_tokens=False)["input_ids"])

    opening = checkpoint.tokenizer("")["input_ids"]  # [BOS], if the model has one
    question = ids(QUESTION)
    held_out = texts(HELD_OUT, CHAPTERS // 2)
    for number, text in enumerate(held_out):
        key = f" {drawn.randrange(10 ** (ANSWER - 1), 10**ANSWER)}"
        needle = ids(NEEDLE.format(key.strip()))
        size = CONTEXT - len(opening) - len(needle) - len(question) - len(ids(key))
        body = ids(text)[:size]
        at = size * (2 * number + 1) // (2 * len(held_out))
        body = [*opening, *body[:at], *needle, *body[at:]]
        yield Trial(torch.tensor([[*body, *question, *ids(key)]]), slice(0, len(body)))


@torch.no_grad()
def scores(checkpoint: Checkpoint, edits: Sequence[ch.edits.Edit]) -> Scores:
    """Return the scores of the model with these edits."""
    model, losses, hits = checkpoint.predictor, [], []
    assert model is not None
    with ch.intervene(model, edits):
        for trial in trials(checkpoint):
            logits = model(trial.ids, use_cache=False).logits[0]
            part, target = logits[trial.text][:-1], trial.ids[0, trial.text][1:]
            losses.append(torch.nn.functional.cross_entropy(part, target))
            best = logits[-ANSWER - 1 : -1].argmax(-1)
            hits.append((best == trial.ids[0, -ANSWER:]).float().mean())
    return Scores(float(torch.stack(losses).mean()), float(torch.stack(hits).mean()))


def main() -> None:
    checkpoint = Checkpoint(fetch())
    out = Path("out") / "forget"
    survey = ch.survey(checkpoint, texts(SURVEYED, 0), out=out, context=CONTEXT, metrics="long")
    survey.export_duo_attention(out / "duo-attention")
    survey.export_kvpress(out / "kvpress.npy")
    kinds = [head.kind() for head in survey.key_heads()]
    print(survey)
    print(", ".join(f"{kinds.count(kind)} KV heads {kind}" for kind in sorted({*kinds})))
    cases: list[tuple[str, Budgets | None]] = [("all keys", None)]
    for fraction in FRACTIONS:
        budgets = survey.budgets(fraction)
        cases.append((f"{fraction:.0%}, of the survey", budgets))
        cases.append((f"{fraction:.0%}, equal", budgets.uniform()))
    print(f"{'keys':20} {'loss':>6} {'recall':>7}")
    with progress_bar("Evaluating", len(cases), None) as advance:
        for name, case in cases:
            loss, recall = scores(checkpoint, [] if case is None else case.edits())
            advance()
            print(f"{name:20} {loss:6.3f} {recall:7.0%}", flush=True)


if __name__ == "__main__":
    main()

"""Train with one loss (the next word), one optimiser, and checkpoints.

The seed and the number of a step determine the step. So a training that is killed and started again
ends with the same weights, bit for bit, on the same machine with the same number of threads.
"""

import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.optim import AdamW

from clearhead.core.errors import BadValue, as_count, as_number, writable_folder
from clearhead.core.files import atomic_io
from clearhead.demo.model import Config, Decoder, untrained
from clearhead.demo.storyteller import Storyteller

from .data import SKIP, Batch, Source, Stories, TextFile
from .grammar import LONGEST
from .plots import draw_losses

WARM_UP = 50  # steps until the learning rate is reached
# The learning rate of `RelativePositions` relative to other parameters. Each of its numbers is a
# full score, while other scores are sums of many products. After 400 steps the best head looked at
# the previous word for 96 % of words, and with the common rate for 52 %.
RELATIVE_RATE = 4.0


@dataclass(frozen=True)
class Recipe:
    """The settings that, with the source, determine the weights. `sizes` are those of `Config`."""

    seed: int = 1
    steps: int = 4000
    batch: int = 8
    rate: float = 2.5e-3
    sizes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rule = "a training has at least one step, of at least one story."
        for name in ("steps", "batch"):
            as_count(name, getattr(self, name), rule, f"pass a larger {name}.", least=1)
        rule = "a learning rate is a finite number."
        as_number("rate", self.rate, rule, "pass a rate such as 2.5e-3.")


@dataclass
class Training:
    """A model in training, with its steps and checkpoints."""

    recipe: Recipe
    source: Source
    model: Decoder = field(init=False)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = Config(len(self.source.vocabulary), **self.recipe.sizes)
        self.model = untrained(config, self.recipe.seed)
        parameters = dict(self.model.named_parameters())
        relative = [parameters.pop(name) for name in list(parameters) if "relative" in name]
        groups = [{"params": list(parameters.values()), "factor": 1.0}]
        if relative:
            groups.append({"params": relative, "factor": RELATIVE_RATE})
        self.optimiser = AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01)

    def step(self) -> float:
        """Train one step, and return its loss."""
        recipe, number = self.recipe, len(self.losses)
        warm_up = min(1.0, (number + 1) / WARM_UP)
        decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * number / recipe.steps))
        for group in self.optimiser.param_groups:
            group["lr"] = recipe.rate * warm_up * decay * group["factor"]
        loss = next_word_loss(self.model, self.source.batch(number, recipe.batch))
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        if not math.isfinite(loss.item()):
            raise BadValue(
                f"After {number} steps the loss is {loss.item()}.",
                "training needs a finite loss; this one has diverged.",
                f"train again with a lower rate than {recipe.rate:g}, in another folder.",
            )
        self.losses.append(loss.item())
        return self.losses[-1]

    def save(self, path: Path) -> None:
        tensors = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        for number, state in self.optimiser.state_dict()["state"].items():
            tensors |= {f"adam.{number}.{name}": t for name, t in state.items()}
        tensors["losses"] = torch.tensor(self.losses, dtype=torch.float64)
        atomic_io.write(path, tensors, self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a checkpoint must have in common with this training."""
        return {"recipe": asdict(self.recipe), "source": self.source.identity}

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint. Raises `BadValue` if it is from another training."""
        tensors, settings = atomic_io.read(path)
        if settings != self.settings:
            raise BadValue(
                f"{str(path)!r} is of another training: {_differences(settings, self.settings)}.",
                "training continues only with its first settings.",
                "pass another folder, or the first settings.",
            )
        states: dict[int, dict[str, Tensor]] = {}
        for name, t in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "adam":
                number, _, what = rest.partition(".")
                states.setdefault(int(number), {})[what] = t
        self.model.load_state_dict(
            {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
        )
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": states, "param_groups": groups})
        self.losses = tensors["losses"].tolist()


def train(
    out: str | Path,
    *,
    text: str | Path | None = None,
    seed: int = 1,
    steps: int = 4000,
    batch: int = 8,
    rate: float = 2.5e-3,
    d: int = 128,
    layers: int = 2,
    heads: int = 8,
    context: int = 128,
    every: int = 250,
    picture: bool = True,
    progress: bool = True,
    command: str = "",
) -> Storyteller:
    """Train a storyteller on the stories of the grammar, or on a `text` file.

    Writes to the folder `out`: ``checkpoint.safetensors`` every `every` steps, and at the end
    ``model.safetensors`` and, with matplotlib and if `picture` is true, ``loss.png``. It continues
    from a checkpoint of this training in the folder. `command` is stored with the weights, so that
    they can be reproduced.

    Raises `BadValue` for a file that cannot be read, a folder that cannot be written, a checkpoint
    of another training, and sizes that do not fit each other.
    """
    rule = "a checkpoint is written after every so many steps, 1 or more."
    as_count("every", every, rule, "pass a larger every.", least=1)
    if text is None and context < LONGEST:
        raise BadValue(
            f"context is {context}.",
            f"the stories of the grammar have up to {LONGEST} words, and are not cut.",
            f"pass a context of {LONGEST} or more, or a text of your own.",
        )
    rule = "a word is guessed from those before it, so at least 2 are read at a time."
    as_count("context", context, rule, "pass a larger context.", least=2)
    sizes = {"d": d, "layers": layers, "heads": heads, "context": context}
    recipe = Recipe(seed, steps, batch, rate, sizes)
    source = Stories(seed) if text is None else TextFile(text, seed, context)
    training = Training(recipe, source)
    directory, code = writable_folder(out, "checkpoints, weights and pictures are"), commit()
    saved = directory / "checkpoint.safetensors"
    if saved.exists():
        training.resume(saved)
    started, first = time.perf_counter(), len(training.losses)

    def after(done: int) -> None:
        if done % every == 0 or done == steps:
            training.save(saved)

    run(training, after=after, progress=progress)
    held_out_loss = evaluate(training.model, source.held_out(100))
    made = {
        "command": command or f"examples.storyteller.train({str(out)!r}, ...)",
        "commit": code,
        "source": source.name,
        **{name: value for name, value in asdict(recipe).items() if name != "sizes"},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seconds": round(time.perf_counter() - started) if first == 0 else None,
        "held_out_loss": round(held_out_loss, 4),
    }
    teller = Storyteller(training.model.eval(), source.vocabulary, made)
    teller.save(directory / "model.safetensors")
    if picture:
        curves = {"training": training.losses}
        draw_losses(curves, directory / "loss.png", held_out=held_out_loss)
    return teller


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Describe the differences of settings: ``steps 10 there and 20 here``."""
    parts = []
    for name, own in ours.items():
        other = theirs.get(name)
        if isinstance(own, dict) and isinstance(other, dict):
            parts.append(_differences(other, own))
        elif own != other:
            parts.append(f"{name} {other} there and {own} here")
    return ", ".join(part for part in parts if part)


def run(
    training: Training,
    *,
    after: Callable[[int], None] = lambda done: None,
    progress: bool = True,
    title: str = "",
) -> None:
    """Run all remaining steps, and call `after(done)` after each."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}  loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    last = training.losses[-1] if training.losses else math.nan
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task(
            title or f"Reading {training.source.name}",
            total=training.recipe.steps,
            completed=len(training.losses),
            loss=last,
        )
        while len(training.losses) < training.recipe.steps:
            loss = training.step()
            bar.update(task, advance=1, loss=loss)
            after(len(training.losses))


def next_word_loss(model: Decoder, batch: Batch) -> Tensor:
    """Compute the mean of -log p(next word), in nats."""
    logits = model(batch.ids)
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=SKIP)


def evaluate(model: Decoder, batch: Batch) -> float:
    with torch.no_grad():
        return next_word_loss(model, batch).item()


def commit() -> str:
    """Return the git commit of this code, with a plus if files have changed since.

    Returns "unknown" without git, or if the repository around the code does not track it.
    """
    folder = Path(__file__).parent
    try:
        _, head, changed = (
            subprocess.run(
                ["git", "-C", str(folder), *command],
                capture_output=True, text=True, check=True, timeout=10,
            ).stdout.strip()
            for command in (
                ["ls-files", "--error-unmatch", Path(__file__).name],
                ["rev-parse", "--short=12", "HEAD"],
                ["status", "--porcelain", ".."],
            )
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("+" if changed else "")

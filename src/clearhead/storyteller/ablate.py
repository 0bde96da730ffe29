"""What each part is for: train without it, and see what becomes of the loss and of the heads.

Every variant has the same seed and reads the same stories in the same order. The training is
shorter than that of the shipped model, so the numbers are to be compared with each other only.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import folder
from . import checkpoint
from .data import Stories, tell
from .measure import guess, heads
from .model import Decoder, untrained
from .plots import draw_ablation, draw_losses
from .train import Recipe, Training, run

VARIANTS: dict[str, dict[str, Any]] = {
    "everything": {},
    "without scaling": {"scaled": False},
    "without positions": {"positions": False},
    "without causal mask": {"causal": False},
    "with one head": {"heads": 1},
}


@dataclass(frozen=True)
class Variant:
    """One model: what it was trained without, and what it came to.

    `seen` is its held-out loss as it was trained. Without the causal mask it sees the word that it
    guesses; `hidden` is its loss when the future is hidden from it, as it is from a reader.
    """

    name: str
    seen: float
    hidden: float
    accuracy: float
    rates: dict[str, float]


@dataclass(frozen=True)
class Ablation:
    """What `ablate` found; prints itself."""

    steps: int
    batch: int
    variants: tuple[Variant, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        labels = list(self.variants[0].rates)
        lines = [
            f"Each trained for {self.steps} steps of {self.batch} stories; held-out stories.",
            "",
            f"{'':<21}{'loss':>7}{'hidden':>8}{'right':>8}" + "".join(f"{x:>15}" for x in labels),
        ]
        for v in self.variants:
            lines.append(
                f"{v.name:<21}{v.seen:>7.3f}{v.hidden:>8.3f}{v.accuracy:>8.1%}"
                + "".join(f"{v.rates[x]:>15.1%}" for x in labels)
            )
        lines += ["", "loss: as it was trained; hidden, right: with the future hidden from it."]
        return "\n".join(lines)


def ablate(
    out: str | Path,
    *,
    steps: int = 1500,
    batch: int = 8,
    seed: int = 1,
    search: int = 100,
    report: int = 200,
    variants: Sequence[str] = tuple(VARIANTS),
    progress: bool = True,
    **sizes: Any,
) -> Ablation:
    """Train the `variants` for `steps` steps each and measure them like the shipped model.

    Writes ``ablation.json`` and, if matplotlib is there, ``ablation.png`` and
    ``ablation_losses.png`` to the folder `out`. `sizes` are those of `Config`.
    Raises `BadValue` for a folder that cannot be written, and for sizes that do not fit.
    """
    place = folder(out, "checkpoints, weights and pictures are")
    known, fresh = tell(seed, search, "train"), tell(seed, report, "held-out")
    done, curves = [], {}
    for name in variants:
        recipe = Recipe(seed, steps, batch, sizes={**sizes, **VARIANTS[name]})
        training = Training(recipe, Stories(seed))
        run(training, progress=progress, title=name)
        done.append(_judge(name, training, known, fresh))
        curves[name] = training.losses
    ablation = Ablation(steps, batch, tuple(done))
    checkpoint.write_json(place / "ablation.json", ablation.as_dict())
    rates = {label: [v.rates[label] for v in done] for label in done[0].rates}
    draw_ablation([v.name for v in done], [v.hidden for v in done], rates, place / "ablation.png")
    draw_losses(curves, place / "ablation_losses.png")
    return ablation


def _judge(name: str, training: Training, known: list[Any], fresh: list[Any]) -> Variant:
    vocabulary = training.source.vocabulary
    model = training.model.eval()
    rates = {h["label"]: h["rate"] for h in heads(model, vocabulary, known, fresh)}
    seen = guess(model, vocabulary, fresh)
    hidden = seen if model.config.causal else guess(_hiding(model), vocabulary, fresh)
    return Variant(name, seen.loss, hidden.loss, hidden.accuracy, rates)


def _hiding(model: Decoder) -> Decoder:
    """The same weights, with the causal mask that they were trained without."""
    masked = untrained(replace(model.config, causal=True))
    masked.load_state_dict(model.state_dict())
    return masked.eval()

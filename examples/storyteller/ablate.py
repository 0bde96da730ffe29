"""Train without one part of the model, and measure the loss and the heads.

Every variant has the same seed and reads the same stories in the same order. The training is
shorter than that of the included model, so compare these numbers only with each other.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from clearhead.core.errors import writable_folder
from clearhead.core.files import atomic_io
from clearhead.demo.model import Decoder, untrained

from .data import Stories, stories
from .grammar import Story
from .measure import best_heads, next_word_scores
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
    """One model: the part it was trained without, its losses, its accuracy and its heads' rates.

    `as_trained` is its held-out loss in the way it was trained: without the causal mask it sees the
    word that it predicts. `causal` and `accuracy` are its held-out loss and accuracy with the
    causal mask.
    """

    name: str
    as_trained: float
    causal: float
    accuracy: float
    rates: dict[str, float]


@dataclass(frozen=True)
class Ablation:
    """The results of `ablate`, which print as a table."""

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
                f"{v.name:<21}{v.as_trained:>7.3f}{v.causal:>8.3f}{v.accuracy:>8.1%}"
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

    Writes ``ablation.json`` and, with matplotlib, ``ablation.png`` and ``ablation_losses.png`` to
    the folder `out`. `sizes` are those of `Config`. Raises `BadValue` for a folder that cannot be
    written, and for sizes that do not fit.
    """
    directory = writable_folder(out, "checkpoints, weights and pictures are")
    training_stories, held_out = stories(seed, search, "train"), stories(seed, report, "held-out")
    done, curves = [], {}
    for name in variants:
        recipe = Recipe(seed, steps, batch, sizes={**sizes, **VARIANTS[name]})
        training = Training(recipe, Stories(seed))
        run(training, progress=progress, title=name)
        done.append(_measured(name, training, training_stories, held_out))
        curves[name] = training.losses
    ablation = Ablation(steps, batch, tuple(done))
    atomic_io.write_json(directory / "ablation.json", ablation.as_dict())
    rates = {label: [v.rates[label] for v in done] for label in done[0].rates}
    names, losses = [v.name for v in done], [v.causal for v in done]
    draw_ablation(names, losses, rates, directory / "ablation.png")
    draw_losses(curves, directory / "ablation_losses.png")
    return ablation


def _measured(
    name: str, training: Training, training_stories: list[Story], held_out: list[Story]
) -> Variant:
    vocabulary, model = training.source.vocabulary, training.model.eval()
    heads = best_heads(model, vocabulary, training_stories, held_out)
    rates = {head["label"]: head["rate"] for head in heads}
    as_trained = causal = next_word_scores(model, vocabulary, held_out)
    if not model.config.causal:
        causal = next_word_scores(_with_causal_mask(model), vocabulary, held_out)
    return Variant(name, as_trained.loss, causal.loss, causal.accuracy, rates)


def _with_causal_mask(model: Decoder) -> Decoder:
    """Return the model with the causal mask that it was trained without."""
    masked = untrained(replace(model.config, causal=True))
    masked.load_state_dict(model.state_dict())
    return masked.eval()

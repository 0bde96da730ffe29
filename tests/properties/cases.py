"""What is drawn: a model, its inputs, and how it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, StaticCache

import clearhead as ch

from .by_hand import Edit, short_repr
from .models import HEADS, KIND, MODELS, PADDING, WORDS, build, layers_of

IGNORED = -100  # a label that does not count
PATCHES = 10  # of an image, and a token before them


@dataclass(frozen=True)
class Case:
    """A model and how it is run. `draw` makes one from a seed."""

    seed: int
    model: str
    batch: int
    tokens: int  # of the longest text, after those in the cache
    padding: str = "none"  # "left" or "right"
    position_ids: bool = False
    labels: str = "none"  # "all", or "some" where others are -100
    cache: str = "none"  # "dynamic" or "static"
    past: int = 0  # tokens in the cache
    checkpoints: str = "none"  # "reentrant" or "not reentrant"
    compiled: str = "no"  # else the backend and what is compiled: "eager model", "aot_eager layer"
    metric: str = "loss"
    at_once: int | None = None
    edits: tuple[Edit, ...] = ()

    __repr__ = short_repr

    @property
    def kind(self) -> str:
        return KIND[self.model]

    @property
    def trains(self) -> bool:
        """Are gradients compared? Models checkpoint in training alone."""
        return self.checkpoints != "none"

    @property
    def real(self) -> Tensor:
        """Which tokens are not padding, (B, past + tokens): one text is whole, each of the others
        lacks one token more."""
        T = PATCHES if self.kind == "vision" else self.past + self.tokens
        column, lacks = torch.arange(T), torch.arange(self.batch).unsqueeze(-1)
        if self.padding == "none":
            lacks = torch.zeros_like(lacks)
        return column < T - lacks if self.padding == "right" else column >= lacks

    def inputs(self, text: int = 0) -> dict[str, Any]:
        """The model's arguments, for one of several texts. A cache is a new one for each call."""
        seed = torch.Generator().manual_seed(100 * self.seed + text)
        if self.kind == "vision":
            given = {"pixel_values": torch.randn(self.batch, 3, 6, 6, generator=seed)}
            if self.labels != "none":
                given["labels"] = torch.randint(0, 5, (self.batch,), generator=seed)
            return given
        real = self.real
        ids = torch.randint(3, WORDS, real.shape, generator=seed).where(real, PADDING)
        given = {"input_ids": ids[:, self.past :]}
        if self.padding != "none":
            given["attention_mask"] = real.long()
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        if self.position_ids:
            given["position_ids"] = positions[:, self.past :]
        if self.cache != "none":
            given["past_key_values"] = self._cache(ids[:, : self.past], real, positions)
        elif self.kind == "decoder":
            given["use_cache"] = False
        labels = ids[:, self.past :].where(real[:, self.past :], IGNORED)
        if self.kind == "encoder-decoder":  # texts of another length
            labels = torch.randint(3, WORDS, (self.batch, self.tokens - 2), generator=seed)
        if self.labels == "some":
            labels = labels.masked_fill(torch.rand(labels.shape, generator=seed) < 0.4, IGNORED)
            labels[:, -1] = 3
        if self.labels != "none":
            given["labels"] = labels
        elif self.kind == "encoder-decoder":
            given["decoder_input_ids"] = labels
        return given

    def _cache(self, ids: Tensor, real: Tensor, positions: Tensor) -> DynamicCache | StaticCache:
        """The keys and values of the past, as eager attention computes them."""
        model = build(self.model)
        cache = DynamicCache(config=model.config)
        if self.cache == "static":
            cache = StaticCache(config=model.config, max_cache_len=self.past + self.tokens)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            model(
                input_ids=ids,
                attention_mask=real[:, : self.past].long(),
                position_ids=positions[:, : self.past],
                past_key_values=cache,
            )
        model.set_attn_implementation("clearhead")
        return cache

    @property
    def has_loss(self) -> bool:
        """Is it known what the metric "loss" is of?"""
        return self.metric != "loss" or self.labels != "none" or self.kind == "decoder"

    def measure(self, output: Any) -> Tensor:
        """The metric of a model's output."""
        assert self.has_loss, "nobody knows of what"
        if self.metric != "loss":
            return METRICS[self.metric](output)
        if self.labels != "none":
            return output.loss
        ids = self.inputs()["input_ids"]
        real = self.real[:, self.past :]
        losses = F.cross_entropy(output.logits[:, :-1].mT, ids[:, 1:], reduction="none")
        counts = real[:, :-1] & real[:, 1:]
        return (losses * counts).sum() / counts.sum()


METRICS: dict[str, Callable[[Any], Tensor]] = {
    "own loss": lambda output: output.loss,
    "last logits": lambda output: output.logits.flatten(1)[:, -1].mean(),
    "not a mean": lambda output: output.logits.flatten(1)[:, :3].square().sum().sqrt(),
    "difference": ch.logit_difference(5, 7),
}


def draw(seed: int, kind: str, compiled: str = "no") -> Case:
    """The case of a seed, of this kind of model."""
    random = Random(f"{kind} {seed}")
    model = random.choice([name for name in MODELS if KIND[name] == kind])
    batch, tokens = random.randint(1, 3), random.randint(5, 8)
    labels = random.choice(["none", "all", "some"])
    checkpoints = random.choice(["none", "none", "none", "reentrant", "not reentrant"])
    cache = "none"
    if kind == "decoder" and checkpoints == "none":
        cache = random.choice(["none", "none", "dynamic", "static"])
    past = 0 if cache == "none" else random.randint(3, 7)
    metrics = ["loss", "last logits", "not a mean"]
    metrics += ["own loss"] * (labels != "none") + ["difference"] * (kind != "vision")
    return Case(
        seed=seed,
        model=model,
        batch=batch,
        tokens=tokens,
        padding=random.choice(["none", "left", "right"]) if kind != "vision" else "none",
        position_ids=kind == "decoder" and random.random() < 0.7,
        labels=labels,
        cache=cache,
        past=past,
        checkpoints=checkpoints,
        compiled=compiled,
        metric=random.choice(metrics),
        at_once=random.choice([None, 1, 3]),
        edits=tuple(_edit(random, model, batch, past) for _ in range(random.randint(0, 2))),
    )


def _edit(random: Random, model: str, batch: int, past: int) -> Edit:
    whats = ["knock out prefix", "ablate", "scale", "patch", "freeze"]
    whats += ["keep window"] * (KIND[model] == "decoder")
    what = random.choice(whats)
    amount: float | None = None
    if what in ("knock out prefix", "keep window"):
        amount = random.randint(1, 3)
    if what == "scale":
        amount = random.choice([-0.5, 2.0])
    layers = (random.randrange(layers_of(model)),)
    heads = tuple(random.sample(range(HEADS), random.randint(1, 3)))
    rows = tuple(random.sample([-1, *range(past, past + 5)], random.randint(1, 3)))
    texts = [range(batch), range(batch - 1, -1, -1), range(1), range(1, batch + 1)]
    return Edit(
        what,
        amount,
        layers if what in ("patch", "freeze") else random.choice([None, layers]),
        random.choice([None, heads]),
        random.choice([None, None, rows]),
        random.choice([None, None, *texts]),
    )

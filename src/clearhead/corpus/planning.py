"""Predict what a survey of many tokens costs, from a probe: its model reads a few of its texts.

The probe is a survey of two shards, in a folder that is deleted. The time of a token is that of the
last shard. The totals of a state grow with its tokens by the power by which they grow in the probe;
sums of texts grow with the number of texts. Folding takes as long for each byte of totals and each
text as in the probe, and the tables take as long as there.
"""

import math
import resource
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ..core.errors import BadType, BadValue
from ..core.files import atomic_io
from ..core.formatting import aligned, quantity, si
from . import corpus, state, steps
from .corpus import AT_ONCE
from .cuts import SHARDS
from .fold import GROUP, Fold
from .merge import merge
from .random_tokens import Needles, RandomRepeats
from .steps import Setup
from .texts import Sources, read_texts, sizes_of

LEAST, RANKS = 2048, (1, 8, 64)  # tokens of a shard of the probe
SAMPLE = 10_000  # characters of a text from which the number of tokens follows
COPIES = 2  # of the sums of texts, while a state is written


class Plan(NamedTuple):
    """What a survey needs: sizes are in bytes, times in seconds.

    Attributes:
        tokens, texts, shards, shard_tokens: its size.
        speed: the tokens that one rank reads in a second, in the probe.
        memory: of one rank.
        disk: of tokens, states and folded states.
        seconds: for each number of `RANKS`, to cut, to compute and to merge.
    """

    tokens: int
    texts: int
    shards: int
    shard_tokens: int
    speed: float
    memory: float
    disk: float
    seconds: dict[int, tuple[float, float, float]]

    def __str__(self) -> str:
        rows = [["ranks", "cut", "compute", "merge", "sum"]]
        for ranks, parts in self.seconds.items():
            rows.append([f"{ranks}", *map(_duration, (*parts, sum(parts)))])
        texts = f"{quantity(self.tokens, 'token')} of about {quantity(self.texts, 'text')}"
        shards = f"{quantity(self.shards, 'shard')} of {self.shard_tokens:,} tokens"
        speed = f"{self.speed:.0f} tokens a second and rank"
        memory = f"{si(self.memory)}B of memory for each rank, {si(self.disk)}B on disk"
        return "\n".join([f"{texts}, in {shards}", f"{speed}, {memory}", *aligned(rows)])


class Probe(NamedTuple):
    """What two shards of a survey took: sizes are in bytes, times in seconds.

    Attributes:
        tokens, texts: of the texts that it read.
        shards: the tokens of each shard, with those around each context.
        totals: the totals of the state of each shard.
        folded: the totals of both.
        of_texts: the tokens and sums of texts that are stored.
        sums: the sums of texts in memory, of both shards.
        memory: the peak of the process.
        cutting, computing, folding, reading, tables: to cut the texts, to compute the last shard,
            to fold the totals, to read the texts for their deviations, and to write the tables.
    """

    tokens: int
    texts: int
    shards: list[int]
    totals: list[int]
    folded: int
    of_texts: int
    sums: int
    memory: int
    cutting: float
    computing: float
    folding: float
    reading: float
    tables: float

    def totals_of(self, tokens: int) -> float:
        """Predict the bytes of the totals of a shard."""
        growth = math.log(self.folded / self.totals[0])
        power = growth / math.log(sum(self.shards) / self.shards[0])
        return float(self.totals[0] * (tokens / self.shards[0]) ** power)

    def plan(self, tokens: int, shard: int) -> Plan:
        """Predict a survey of so many tokens of texts, in shards of so many tokens."""
        times = tokens / self.tokens  # the survey is so much larger than the probe
        shards = math.ceil(times * sum(self.shards) / shard)
        states = shards * self.totals_of(shard)
        in_groups = shards / GROUP * self.totals_of(GROUP * shard)
        per_token = self.computing / self.shards[-1]
        folding = self.folding / sum(self.totals) * states + self.reading * times
        sums = self.sums * shard / sum(self.shards)
        seconds = {
            ranks: (
                self.cutting * times / min(ranks, math.ceil(shards / SHARDS)),
                per_token * shard * math.ceil(shards / ranks),
                folding / min(ranks, math.ceil(shards / GROUP)) + self.tables,
            )
            for ranks in RANKS
        }
        disk = times * self.of_texts + states + in_groups
        memory = self.memory + COPIES * sums
        texts = round(times * self.texts)
        return Plan(tokens, texts, shards, shard, 1 / per_token, memory, disk, seconds)


def plan(
    model: Any, texts: steps.Texts, *, tokens: int | None = None, shard_tokens: int | None = None,
    threads: int = 1, **options: Any,
) -> Plan:  # fmt: skip
    """Predict the cost of a survey of `tokens` tokens, of which the texts may be a sample.

    None means those of the texts. The options are those of `survey`. Raises `BadType` for random
    tokens, `BadValue` for texts that are shorter than the probe, and what `survey` raises.
    """
    if isinstance(texts, (RandomRepeats, Needles)):
        rule = "a plan is of a survey of texts; one of random tokens has few."
        raise BadType(f"A plan of {type(texts).__name__} was requested.", rule, "pass texts.")
    setup = steps.make_setup(model, threads=threads, **options)
    with TemporaryDirectory() as folder, steps.torch_threads(threads):
        probe = _probe(setup, texts, Path(folder))
    every = tokens or _tokens_of(setup, texts)
    return probe.plan(every, shard_tokens or steps.shard_tokens_for(every))


def _probe(setup: Setup, texts: Sources, out: Path) -> Probe:
    """Survey the first texts in two shards. Raises `BadValue` if they are too short."""
    setup.settings["shard tokens"] = size = max(LEAST, setup.settings["context"])
    setup.fixed()  # digests of the model, which are computed once
    start = time.monotonic()
    manifest = steps.prepare(setup, texts, out, tokens=2 * size)
    cutting, entries, read = time.monotonic() - start, manifest.shards, manifest.corpus
    if len(entries) < 2:
        gave = f"The texts have {quantity(read['tokens of texts'], 'token')}."
        rule = f"a plan measures {quantity(2 * size, 'token')}."
        raise BadValue(gave, rule, "survey these texts, which takes no longer than a plan.")
    fold = Fold(out, manifest)
    computing = [_seconds(steps.compute_shard, setup, out, manifest, entry) for entry in entries]
    merging = [_seconds(x) for x in (fold.share_totals, fold.share_texts, partial(merge, out))]
    files = [out / state.FOLDER / entry.state for entry in entries]
    folded = _bytes(next(fold.folder.glob("0*")), state.TOTALS)
    of_texts = sum(_bytes(file, state.TEXTS) for file in files)
    of_texts += sum((out / corpus.FOLDER / entry.corpus).stat().st_size for entry in entries)
    _, layers = next(state.read_sums(*state.file_of(out, manifest, entries[0])))
    sums = read["texts"] * sum(x.nbytes for layer in layers for x in layer)
    return Probe(
        read["tokens of texts"], read["texts"], [entry.tokens for entry in entries],
        [_bytes(file, state.TOTALS) for file in files], folded, of_texts, sums,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, cutting, computing[-1], *merging,
    )  # fmt: skip


def _tokens_of(setup: Setup, texts: Sources) -> int:
    """Estimate the tokens of texts by their size, and by the tokens of the first ones."""
    sample = [text.content[:SAMPLE] for text in islice(read_texts(texts), AT_ONCE) if text.content]
    tokens = sum(map(len, setup.reader.encode(sample)))
    return round(sizes_of(texts) * tokens / sum(len(x.encode()) for x in sample))


def _seconds(step: Callable[..., object], *arguments: object) -> float:
    start = time.monotonic()
    step(*arguments)
    return time.monotonic() - start


def _duration(seconds: float) -> str:
    """Write a time.

    >>> _duration(59), _duration(4000)
    ('59 s', '1.1 h')
    """
    return f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 3600:,.1f} h"


def _bytes(file: Path, part: str) -> int:
    return sum(tensor.nbytes for tensor in atomic_io.read(file, part)[0].values())

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
from . import corpus, state
from .corpus import AT_ONCE
from .cuts import SHARDS
from .fold import GROUP, Fold
from .merge import merge
from .random_tokens import Needles, RandomRepeats
from .steps import Texts, compute_shard, make_setup, prepare, shard_tokens_for, torch_threads
from .texts import read_texts, sizes_of

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


def plan(
    model: Any, texts: Texts, *, tokens: int | None = None, shard_tokens: int | None = None,
    threads: int = 1, **options: Any,
) -> Plan:  # fmt: skip
    """Predict the cost of a survey of `tokens` tokens, of which the texts may be a sample.

    None means those of the texts. The options are those of `survey`. Raises `BadType` for random
    tokens, `BadValue` for texts that are shorter than the probe, and what `survey` raises.
    """
    if isinstance(texts, (RandomRepeats, Needles)):
        rule = "a plan is of a survey of texts; one of random tokens has few."
        raise BadType(f"A plan of {type(texts).__name__} was requested.", rule, "pass texts.")
    setup = make_setup(model, threads=threads, **options)
    setup.settings["shard tokens"] = size = max(LEAST, setup.settings["context"])
    setup.fixed()  # digests of the model, which are computed once
    with TemporaryDirectory() as folder, torch_threads(threads):
        out, start = Path(folder), time.monotonic()
        manifest = prepare(setup, texts, out, tokens=2 * size)
        cutting, probe = time.monotonic() - start, manifest.corpus
        if len(manifest.shards) < 2:
            gave = f"The texts have {quantity(probe['tokens of texts'], 'token')}."
            rule = f"a plan measures {quantity(2 * size, 'token')}."
            raise BadValue(gave, rule, "survey these texts, which takes no longer than a plan.")
        fold, entries = Fold(out, manifest), manifest.shards
        computing = [_seconds(compute_shard, setup, out, manifest, entry) for entry in entries]
        steps = fold.share_totals, fold.share_texts, partial(merge, out)
        of_totals, of_texts, tables = [_seconds(step) for step in steps]
        files = [out / state.FOLDER / entry.state for entry in entries]
        parts = [_bytes(file, state.TOTALS) for file in files]
        both = _bytes(next(fold.folder.glob("0*")), state.TOTALS)
        texts_bytes = sum(_bytes(file, state.TEXTS) for file in files)
        stored = sum((out / corpus.FOLDER / entry.corpus).stat().st_size for entry in entries)
        _, layers = next(state.read_sums(*state.file_of(out, manifest, entries[0])))
    sample = [text.content[:SAMPLE] for text in islice(read_texts(texts), AT_ONCE) if text.content]
    of_sample = sum(map(len, setup.reader.encode(sample))) / sum(len(x.encode()) for x in sample)
    known = sum(entry.tokens for entry in entries)
    every = tokens or round(sizes_of(texts) * of_sample)
    times = every / probe["tokens of texts"]  # the survey is so much larger than the probe
    of_shard = shard_tokens or shard_tokens_for(every)
    count = math.ceil(times * known / of_shard)
    power = math.log(both / parts[0]) / math.log(known / entries[0].tokens)

    def totals(tokens: float) -> float:
        return parts[0] * (tokens / entries[0].tokens) ** power

    states, in_groups = count * totals(of_shard), count / GROUP * totals(GROUP * of_shard)
    in_memory = sum(x.nbytes for layer in layers for x in layer)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    folding = of_totals / sum(parts) * states + of_texts * times
    return Plan(
        every, round(times * probe["texts"]), count, of_shard, entries[1].tokens / computing[1],
        peak + COPIES * in_memory * probe["texts"] * of_shard / known,
        times * (stored + texts_bytes) + states + in_groups,
        {
            ranks: (
                cutting * times / min(ranks, math.ceil(count / SHARDS)),
                computing[1] / entries[1].tokens * of_shard * math.ceil(count / ranks),
                folding / min(ranks, math.ceil(count / GROUP)) + tables,
            )
            for ranks in RANKS
        },
    )  # fmt: skip


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

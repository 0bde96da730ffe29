"""Time other tiles of the Triton kernels beside the ones in use, on a GPU:

    python -m bench.tiles [QUESTION ...] [--rounds 3] [--processes 12]

`QUESTIONS` has the calls for which other tiles may be faster: of other sizes, or copied by
descriptors (TMA). Without names all are timed. Processes compile every tile first. Then those with
the results of the tile in use are timed in turns with it. A faster one has to be written into its
table by hand, with the figures in bench/LOG.md.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from clearhead.core.engines.gpu.replay import Records
from clearhead.core.functional.attention import attention
from clearhead.core.functional.look import look
from clearhead.core.masks import causal, window
from clearhead.core.stats import topk

from . import gpu
from .cases import BF16, Case

Tile = tuple[int, ...]  # as in the tables: queries, keys, warps, stages, and whether it is copied
DIFFERENCE = 8 * torch.finfo(BF16).eps  # of two results, relative to the norm


class Question(NamedTuple):
    """Which tile is the fastest for a call?

    `table` is a name in launch_forward.py or launch_backward.py, whose tile for the head size of
    the case is replaced by `others`. If `engine` is "auto", another kernel computes the output.
    """

    table: str
    case: Case
    others: list[Tile]
    stats: Sequence[Any] = ()
    engine: str = "triton"


def _case(D: int, training: bool = False, mask: Any = causal) -> Case:
    heads = 32 if D == 64 else 16
    return Case(
        f"D={D}", H=heads, G=heads, D=D, Tq=8192, Tk=8192, dtype=BF16, mask=mask, training=training
    )


WINDOW = window(before=511, after=0)
# The most important come first.
QUESTIONS: dict[str, Question] = {
    "forward-128": Question(
        "FORWARD", _case(128), [(128, 64, 8, 3, True), (128, 128, 8, 2, True)]
    ),
    "forward-64": Question("FORWARD", _case(64), [(128, 64, 4, 3, True), (128, 128, 8, 2, True)]),
    "keys-128": Question(
        "LARGEST_KEY_GRADIENTS", _case(128, training=True),
        [(32, 64, 4, 2, True), (64, 64, 4, 2, True), (64, 128, 8, 2, True)],
    ),
    "keys-64": Question(
        "LARGEST_KEY_GRADIENTS", _case(64, training=True),
        [(64, 64, 4, 2, True), (64, 128, 8, 2, True)],
    ),
    "queries-128": Question(
        "QUERY_GRADIENTS", _case(128, training=True), [(128, 64, 8, 3, True)]
    ),
    "queries-64": Question("QUERY_GRADIENTS", _case(64, training=True), [(128, 64, 8, 3, True)]),
    "topk-64": Question(
        "SWEEP", _case(64), [(128, 64, 8, 3), (128, 64, 4, 3, True)], [topk(8)], "auto"
    ),
    "sums-128": Question(
        "SWEEP", _case(128), [(64, 64, 4, 3, True), (128, 64, 8, 3, True)],
        ["lse", "max", "entropy"], "auto",
    ),
    "sums-64": Question(
        "SWEEP", _case(64), [(128, 64, 4, 3, True)], ["lse", "max", "entropy"], "auto"
    ),
    "window-128": Question(
        "CUT", _case(128, mask=WINDOW), [(64, 64, 4, 2, True), (64, 64, 4, 3, True)]
    ),
    "window-64": Question("CUT", _case(64, mask=WINDOW), [(64, 64, 4, 3, True)]),
}  # fmt: skip


def tiles_of(question: Question) -> dict[int, tuple[Tile, Tile]]:
    """Return the table's tiles for numbers of 16 bits, by head size: the first of each pair is for
    large GPUs."""
    from clearhead.core.engines.gpu.triton import launch_backward, launch_forward

    table: dict[bool, dict[int, tuple[Tile, Tile]]] = getattr(
        launch_backward, question.table, None
    ) or getattr(launch_forward, question.table)
    return table[False]


@contextmanager
def use(question: Question, tile: Tile) -> Iterator[None]:
    """Let the kernels use a tile. No call repeats the steps of one with another tile."""
    from clearhead.core.engines.gpu.triton.launch_forward import forward_tiles

    plain = mock.patch.object(Records, "call", lambda self, run, args, *others: run(*args))
    replaced = mock.patch.dict(tiles_of(question), {question.case.D: (tile, tile)})
    forward_tiles.cache_clear()
    with plain, replaced:
        yield
    forward_tiles.cache_clear()


def call_of(question: Question) -> Callable[[], list[Tensor]]:
    """Return a function that computes a question's call: the output, gradients or statistics."""
    case = question.case
    q, k, v = (x.detach().to(gpu.DEVICE).requires_grad_(case.training) for x in case.tensors())
    options: dict[str, Any] = dict(mask=case.mask, engine=question.engine)
    if question.stats:
        return lambda: _tensors(look(q, k, v, stats=question.stats, **options))
    if not case.training:
        return lambda: [attention(q, k, v, **options)]
    out = attention(q, k, v, **options)
    seed = torch.randn_like(out)
    return lambda: list(torch.autograd.grad(out, (q, k, v), seed, retain_graph=True))


def _tensors(seen: Any) -> list[Tensor]:
    """Return the output and the statistics, without the keys of `topk`."""
    results = (getattr(seen, name) for name in seen.names)
    return [seen.out, *(getattr(x, "weights", x) for x in results)]


def compile_tile(name: str, tile: Tile) -> None:
    """Compute a call with a tile once; Triton keeps the machine code in files."""
    question = QUESTIONS[name]
    with suppress(Exception), use(question, tile):  # `answer` shows the error
        call_of(question)()


def answer(question: Question, rounds: int) -> Iterator[str]:
    """Time the tile in use and others in turns, and yield a line for each."""
    in_use = tiles_of(question)[question.case.D][0]
    call = call_of(question)
    true = call()
    seconds: dict[Tile, list[float]] = {}
    for tile in dict.fromkeys([in_use, *question.others]):
        try:
            with use(question, tile):
                _refuse_other(call(), true)
            seconds[tile] = []
        except Exception as error:  # too much shared memory, or another result
            yield f"{tile!s:24} {type(error).__name__}: {error}".partition("\n")[0][:120]
    for _ in range(rounds):
        for tile, times in seconds.items():
            with use(question, tile):
                times.append(gpu.seconds_per_call(call))
    usual = statistics.median(seconds[in_use])
    for tile, times in seconds.items():
        median = statistics.median(times)
        yield f"{tile!s:24} {median * 1e6:8.0f} us {median / usual:6.3f} of the tile in use"


def _refuse_other(results: list[Tensor], true: list[Tensor]) -> None:
    for x, y in zip(results, true, strict=True):
        difference = float((x.double() - y.double()).norm() / y.double().norm())
        if not difference <= DIFFERENCE:  # NaN too
            raise ValueError(f"results differ by {difference:.1e} of their norm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=", ".join(QUESTIONS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=12)
    options = parser.parse_args()
    names = options.questions or list(QUESTIONS)
    if unknown := set(names) - set(QUESTIONS):
        parser.error(f"no question {', '.join(unknown)}; there are {', '.join(QUESTIONS)}")
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device, on which the kernels are timed")
    if torch.cuda.get_device_capability() < (9, 0):
        parser.error("the tiles to compare are for capability 9.0 and later")
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        for name in names:
            for tile in QUESTIONS[name].others:
                pool.submit(compile_tile, name, tile)
    for name in names:
        print(f"{name}: {torch.cuda.get_device_name()}", flush=True)
        for line in answer(QUESTIONS[name], options.rounds):
            print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()

"""The run: every round measures the ceiling and then every peer once.

A figure is the median over the rounds, and a share is the median of the shares within a round.
"""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..engines.cpu import core, false_level, level
from ..errors import BadValue
from ..masks import everything
from .cases import GROUPS, Case, sweep_of_threads
from .minilm import COUNTS, sentences
from .peers import PEERS, prepare
from .timing import Ceilings, once

NAMES = (*GROUPS, "threads", "minilm")


def measure(
    groups: Sequence[str] = (),
    *,
    threads: int | None = None,
    rounds: int = 5,
    peers: Sequence[str] = (),
    tell: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Time clearhead, its peers and the hardware's ceilings in one run, interleaved.

    Args:
        groups: of `NAMES`; none means all.
        threads: for every peer; None means as many as torch has.
        rounds: how often everything is timed; figures are medians.
        peers: only these, of `PEERS`; none means all. A peer that is not installed or cannot answer
            gives its reason under "declined".
        tell: is called with every result as soon as it is there.

    Returns:
        {"about": ..., "results": [...]}, ready for JSON. Rates are per second, in 10^9.

    Raises:
        BadValue: an unknown group or peer; clearhead is installed without its core.
    """
    for given, known, what in ((groups, NAMES, "group"), (peers, tuple(PEERS), "peer")):
        for name in given:
            if name not in known:
                raise BadValue(
                    f"bench was asked for the {what} {name!r}.",
                    f"there are {', '.join(map(repr, known))}.",
                    f"name one of these, or none for every {what}.",
                )
    if core is None:
        raise BadValue(
            "bench was asked to time clearhead, which is installed without its C++ core.",
            "what is timed is the core, beside ceilings that the core measures.",
            "install it where there is a C++ compiler; `clearhead doctor` says what is missing.",
        )
    if not level():
        raise BadValue(
            f"bench was asked to time the C++ core, and {false_level()}.",
            "what is timed is the core, on one of its instruction-set levels.",
            "name one of these, or unset CLEARHEAD_CPU for the widest.",
        )
    before = torch.get_num_threads()
    threads = threads or before
    ceilings = Ceilings()
    results: list[dict[str, Any]] = []

    def keep(result: dict[str, Any]) -> None:
        results.append(result)
        tell(result)

    try:
        with torch.no_grad():
            for group in groups or NAMES:
                for case in _cases(group, threads):
                    torch.set_num_threads(case.threads or threads)
                    keep({"group": group, **_one(case, ceilings, rounds, peers)})
                torch.set_num_threads(threads)
                if group == "minilm":
                    for result in sentences(rounds, threads):
                        keep({"group": group, **result})
    finally:
        torch.set_num_threads(before)
    about = {"level": level(), "threads": threads, "torch": torch.__version__,
             "machine": platform.machine(), "system": platform.platform()}  # fmt: skip
    return {"about": about, "results": results}


def how_many(groups: Sequence[str], threads: int | None) -> int:
    """The number of results that `measure` tells of."""
    each = {name: len(_cases(name, threads or torch.get_num_threads())) for name in NAMES}
    each["minilm"] = len(COUNTS)
    return sum(each.get(name, 0) for name in groups or NAMES)


def _cases(group: str, threads: int) -> list[Case]:
    return sweep_of_threads(threads) if group == "threads" else GROUPS.get(group, [])


def _one(case: Case, ceilings: Ceilings, rounds: int, peers: Sequence[str]) -> dict[str, Any]:
    threads = torch.get_num_threads()
    tensors = case.tensors()
    runs, declined = {}, {}
    for name in peers or PEERS:
        run, reason = prepare(name, case, tensors)
        if run is None:
            declined[name] = reason
        else:
            runs[name] = run
    # The same question without its mask, beside it in every round.
    whole = replace(case, mask=everything)
    beside = case.masked and "clearhead" in runs
    unmasked = prepare("clearhead", whole, tensors)[0] if beside else None
    per_pair = []
    half = case.dtype == torch.bfloat16
    ceiling = ceilings.read if case.decode else ceilings.dot if half else ceilings.fma
    work = case.bytes() if case.decode else case.flops()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    tops = []
    for _ in range(rounds):
        tops.append(ceiling(threads))
        for name, run in runs.items():
            seconds[name].append(once(run, threads))
            time.sleep(0.01)  # let a peer's threads stop spinning
            if name == "clearhead" and unmasked:
                dense = once(unmasked, threads) / whole.pairs()
                per_pair.append(seconds[name][-1] / case.pairs() / dense)
    ours = seconds.get("clearhead") or seconds.get("clearhead core")
    return {
        "case": case.name,
        "unit": "GB/s" if case.decode else "GFLOP/s",
        "ceiling": statistics.median(tops) / 1e9,
        "declined": declined,
        **({"of dense": statistics.median(per_pair)} if per_pair else {}),
        "peers": {
            name: {
                "seconds": statistics.median(times),
                "rate": work / statistics.median(times) / 1e9,
                "share": statistics.median(work / s / t for s, t in zip(times, tops, strict=True)),
                "times ours": ours
                and statistics.median(s / o for s, o in zip(times, ours, strict=True)),
            }
            for name, times in seconds.items()
        },
    }

"""Time every peer once in every round, and the ceiling before and after each peer.

A time is the median over the rounds. The fraction of the ceiling is also a median over the rounds,
in each of which the peer is compared with the ceilings before and after it. The speed of a shared
machine changes by up to two times from one second to the next.
"""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from clearhead.core.engines.cpu import core, level, level_error
from clearhead.core.errors import BadValue
from clearhead.core.masks import everything
from clearhead.core.problem.check import Options, make_problem

from .cases import GROUPS, Case, thread_cases
from .minilm import COUNTS, sentences
from .peers import PEERS, prepare
from .smollm2 import COUNT, smollm2
from .timing import Ceilings, seconds_per_call, summary

NAMES = (*GROUPS, "threads", "minilm", "smollm2")
MODELS = {"minilm": (sentences, len(COUNTS)), "smollm2": (smollm2, COUNT)}


def measure(
    groups: Sequence[str] = (),
    *,
    threads: int | None = None,
    rounds: int = 5,
    peers: Sequence[str] = (),
    on_result: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Time clearhead, its peers and the hardware's ceilings in one run, interleaved.

    Args:
        groups: names in `NAMES`; none means all.
        threads: the number of threads of every peer; None means torch's.
        rounds: how often everything is timed; figures are medians.
        peers: names in `PEERS`; none means all. The reason of a peer that is not installed, or
            cannot compute a case, is under "declined".
        on_result: a function that is called with every result as soon as it is measured.

    Returns:
        {"about": ..., "results": [...]}, ready for JSON. Rates are per second, in 10^9.

    Raises:
        BadValue: an unknown group or peer; clearhead is installed without its core.
    """
    for names, known, what in ((groups, NAMES, "group"), (peers, tuple(PEERS), "peer")):
        for name in names:
            if name not in known:
                raise BadValue(
                    f"bench got the {what} {name!r}.",
                    f"there are {', '.join(map(repr, known))}.",
                    f"name one of these, or none for every {what}.",
                )
    if core is None:
        raise BadValue(
            "clearhead is installed without its C++ core.",
            "bench times the core, and ceilings that the core measures.",
            "install clearhead with a C++ compiler; `clearhead doctor` reports what is missing.",
        )
    if not level():
        raise BadValue(
            f"bench cannot time the C++ core: {level_error()}.",
            "bench times the core on one of its instruction-set levels.",
            "name one of these, or unset CLEARHEAD_CPU for the widest.",
        )
    before = torch.get_num_threads()
    threads = threads or before
    ceilings = Ceilings()
    results: list[dict[str, Any]] = []

    def keep(result: dict[str, Any]) -> None:
        results.append(result)
        on_result(result)

    try:
        with torch.no_grad():
            for group in groups or NAMES:
                for case in _cases(group, threads):
                    torch.set_num_threads(case.threads or threads)
                    keep({"group": group, **_one(case, ceilings, rounds, peers)})
                torch.set_num_threads(threads)
                if group in MODELS:
                    for result in MODELS[group][0](rounds, threads):
                        keep({"group": group, **result})
    finally:
        torch.set_num_threads(before)
    about = {"level": level(), "threads": threads, "torch": torch.__version__,
             "machine": platform.machine(), "system": platform.platform()}  # fmt: skip
    return {"about": about, "results": results}


def count_results(groups: Sequence[str], threads: int | None) -> int:
    """Return the number of results of `measure`."""
    counts = {name: len(_cases(name, threads or torch.get_num_threads())) for name in NAMES}
    counts |= {name: count for name, (_, count) in MODELS.items()}
    return sum(counts.get(name, 0) for name in groups or NAMES)


def _cases(group: str, threads: int) -> list[Case]:
    return thread_cases(threads) if group == "threads" else GROUPS.get(group, [])


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
    problem, _ = make_problem(*tensors, Options(mask=case.mask))
    # The same case without its mask is timed in every round, immediately after it.
    unmasked = None
    if case.masked and "clearhead" in runs:
        unmasked, _ = prepare("clearhead", replace(case, mask=everything), tensors)
    times_dense = []
    half = case.dtype == torch.bfloat16
    ceiling = ceilings.read if case.decode else ceilings.dot if half else ceilings.fma
    work = case.work(problem)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    shares: dict[str, list[float]] = {name: [] for name in runs}
    tops = []
    for _ in range(rounds):
        tops.append(ceiling(threads))
        for name, run in runs.items():
            seconds[name].append(seconds_per_call(run, threads))
            time.sleep(0.01)  # let a peer's threads stop spinning
            tops.append(ceiling(threads))
            shares[name].append(work / seconds[name][-1] / statistics.mean(tops[-2:]))
            if name == "clearhead" and unmasked:
                dense = seconds_per_call(unmasked, threads) / problem.all_pairs
                times_dense.append(seconds[name][-1] / problem.pairs / dense)
    ours = seconds.get("clearhead") or seconds.get("clearhead core")
    found = summary(case, work, tops, seconds, shares, ours) | {"declined": declined}
    return found | ({"of dense": statistics.median(times_dense)} if times_dense else {})

"""Time clearhead, its peers and the hardware's ceilings in one run, interleaved.

    python bench/run.py [prefill masked decode tiny lengths] [--threads 2] [--rounds 9] [--out FILE]

Every round measures the ceiling and then every peer once; a figure is the median over the rounds,
and a share is the median of the shares within a round. Other people's work is not our time: with
one thread the clock is the processor time of this process; with more, a sample in which it did not
get its processors is thrown away and taken again, a few times.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from cases import GROUPS, Case
from peers import PEERS, prepare

from clearhead import _kernels as core
from clearhead.engines import cpu

SAMPLE_SECONDS = 0.03
TRIES = 5


def once(run, threads: int) -> float:
    """Seconds per call, from one undisturbed sample; the best of the disturbed if none was."""
    run()
    start = time.process_time()
    run()
    calls = max(1, int(SAMPLE_SECONDS / max(time.process_time() - start, 2e-6)))
    best = float("inf")
    for _ in range(TRIES):
        wall, busy = time.perf_counter(), time.process_time()
        for _ in range(calls):
            run()
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
        if threads == 1:
            return busy / calls
        best = min(best, wall / calls)
        if busy > 0.93 * wall * (threads if wall / calls > 2e-4 else 1):
            return wall / calls
        time.sleep(0.02)
    return best


class Ceilings:
    def __init__(self, threads: int):
        self.threads = threads
        self.memory = torch.ones(2**26)  # 256 MB that exist: untouched zeros would share one page

    def fma(self) -> float:
        return self._best(lambda: core.fma_ceiling(self.threads, 0.02))

    def dot(self) -> float:
        return self._best(lambda: core.dot_ceiling(self.threads, 0.02)) or self.fma()

    def read(self) -> float:
        address, size = self.memory.data_ptr(), self.memory.numel() * 4
        return self._best(lambda: core.read_ceiling(address, size, self.threads, 0.03))

    @staticmethod
    def _best(measure) -> float:
        return max(measure() for _ in range(3))  # a ceiling is what the machine can do


def bench(case: Case, ceilings: Ceilings, rounds: int, only: list[str]) -> dict:
    tensors = case.tensors()
    runs, declined = {}, {}
    for name in PEERS:
        if only and name not in only:
            continue
        run, reason = prepare(name, case, tensors)
        if run is None:
            declined[name] = reason
        else:
            runs[name] = run
    half = case.dtype == torch.bfloat16
    ceiling = ceilings.read if case.decode else ceilings.dot if half else ceilings.fma
    work = case.bytes() if case.decode else case.flops()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    tops = []
    for _ in range(rounds):
        tops.append(ceiling())
        for name, run in runs.items():
            seconds[name].append(once(run, ceilings.threads))
            time.sleep(0.01)  # let a peer's threads stop spinning
    result = {
        "case": case.name,
        "unit": "GB/s" if case.decode else "GFLOP/s",
        "ceiling": statistics.median(tops) / 1e9,
        "declined": declined,
        "peers": {},
    }
    ours = seconds.get("clearhead") or seconds.get("clearhead core")
    for name, times in seconds.items():
        result["peers"][name] = {
            "seconds": statistics.median(times),
            "rate": work / statistics.median(times) / 1e9,
            "share": statistics.median(work / s / t for s, t in zip(times, tops, strict=True)),
            "times ours": statistics.median(s / o for s, o in zip(times, ours, strict=True)),
        }
    return result


def show(result: dict) -> None:
    print(f"\n{result['case']}   (ceiling {result['ceiling']:.0f} {result['unit']})")
    for name, r in sorted(result["peers"].items(), key=lambda item: item[1]["seconds"]):
        print(
            f"  {name:<22} {r['seconds'] * 1e3:10.3f} ms {r['rate']:8.1f} {result['unit']:<7}"
            f" {r['share']:6.1%} of the ceiling   {r['times ours']:6.2f} x clearhead's time"
        )
    for name, reason in result["declined"].items():
        print(f"  {name:<22} {reason}")


def plot(results: list[dict], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure, axes = pyplot.subplots(figsize=(9, 0.5 + 0.9 * len(results)), layout="constrained")
    names = [n for n in PEERS if n != "clearhead core"]
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [n + i * height for n, r in enumerate(results) if name in r["peers"]]
        shares = [r["peers"][name]["share"] for r in results if name in r["peers"]]
        axes.barh(at, shares, height, label=name)
    axes.set_yticks([n + 0.4 for n in range(len(results))], [r["case"] for r in results])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("share of the ceiling measured in the same run")
    axes.legend(fontsize="small")
    figure.savefig(path)
    print(f"plot     {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=Path("out/bench.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ceilings = Ceilings(options.threads)
    print(f"{cpu.status()}; {options.threads} threads; torch {torch.__version__}")
    results = []
    with torch.no_grad():
        for group in options.groups:
            for case in GROUPS[group]:
                results.append(bench(case, ceilings, options.rounds, options.peers))
                show(results[-1])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    about = {"level": core.level(), "threads": options.threads, "torch": torch.__version__,
             "machine": platform.machine(), "system": platform.platform()}  # fmt: skip
    options.out.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    print(f"\nfigures  {options.out}")
    plot(results, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()

"""Show the results of a benchmark as a table, and as figures of the cases and of the sweeps."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clearhead.views.plot.canvas import new_figure, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = dict[str, Any]
SWEEPS = {
    "lengths": "tokens", "heads": "heads", "sizes": "features per head", "threads": "threads",
}  # fmt: skip


def table(result: Result) -> str:
    """Write one case: every peer, the fastest first, then those that were not timed and why."""
    unit, ceiling = result["unit"], result.get("ceiling")
    lines = [result["case"] + (f"   (ceiling {ceiling:.0f} {unit})" if ceiling else "")]
    for name, r in sorted(result["peers"].items(), key=lambda item: item[1]["seconds"]):
        share = f"{r['share']:6.1%} of the ceiling" if "share" in r else ""
        ours = f"{r['times ours']:6.2f} x clearhead's time" if r["times ours"] else ""
        time = f"{_time(r['seconds'])} {r['rate']:8.1f} {unit:<7}"
        lines.append(f"  {name:<22} {time} {share}   {ours}".rstrip())
    if "of dense" in result:
        times = f"{result['of dense']:.2f} x as long"
        lines.append(f"  a pair under the mask takes {times} as without the mask")
    if "attention" in result:
        lines += [f"  attention takes {result['attention']:.1%} of clearhead's time"]
    lines += [f"  {name:<22} {reason}" for name, reason in result["declined"].items()]
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:10.3f} ms" if seconds > 1e-3 else f"{seconds * 1e6:10.2f} us"


def figure(results: Sequence[Result]) -> "Figure":
    """Draw the fractions of the ceiling by case, and a panel for every sweep.

    Raises `BadValue` where matplotlib is not installed.
    """
    require_matplotlib()
    swept = [g for g in SWEEPS if any(r["group"] == g and r["peers"] for r in results)]
    cases = [r for r in results if r["group"] not in SWEEPS and "ceiling" in r]
    count = max(1, len(swept) + bool(cases))
    drawn = new_figure(7.0 * count, max(4.5, 0.5 * len(cases)))
    axes = drawn.subplots(1, count, squeeze=False)[0]
    if cases:
        shares(cases, axes[0])
    for group, ax in zip(swept, axes[count - len(swept) :], strict=True):
        sweep([r for r in results if r["group"] == group], SWEEPS[group], ax)
    return drawn


def shares(results: Sequence[Result], ax: "Axes") -> "Axes":
    """Draw a dot for every peer and case: its fraction of the ceiling measured beside it."""
    names = list(dict.fromkeys(name for r in results for name in r["peers"]))
    for i, name in enumerate(names):
        rows = [n for n, r in enumerate(results) if name in r["peers"]]
        share = [r["peers"][name]["share"] for r in results if name in r["peers"]]
        ax.plot(share, rows, **_mark(i, name))
    ax.set_yticks(range(len(results)), [r["case"] for r in results])
    ax.invert_yaxis()
    ax.axvline(1, color="gray", linewidth=0.8)
    ax.grid(axis="y", alpha=0.3)
    ax.set_xlabel("fraction of the ceiling measured beside it")
    ax.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    return ax


def sweep(results: Sequence[Result], over: str, ax: "Axes") -> "Axes":
    """Draw milliseconds against the swept number, both on logarithmic axes."""
    names = list(dict.fromkeys(name for r in results for name in r["peers"]))
    for i, name in enumerate(names):
        for causal, line in ((False, "-"), (True, "--")):
            points = [
                (_number(r["case"]), r["peers"][name]["seconds"] * 1e3)
                for r in results
                if name in r["peers"] and ("causal" in r["case"]) == causal
            ]
            if points:
                label = f"{name}, causal" if causal else name
                ax.loglog(*zip(*points, strict=True), **(_mark(i, label) | {"linestyle": line}))
    ticks = sorted({_number(r["case"]) for r in results})
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.minorticks_off()
    ax.set_xlabel(over)
    ax.set_ylabel("ms")
    ax.legend(fontsize="x-small")
    return ax


def _number(case: str) -> int:
    """Return the swept number, which is the last number in the name of a case."""
    return int(re.findall(r"\d+", case)[-1])


def _mark(i: int, label: str) -> dict[str, Any]:
    return {
        "color": f"C{i % 10}", "marker": "osD^vP*Xdh"[i % 10], "linestyle": "none",
        "markersize": 9 if i == 0 else 5, "label": label,
    }  # fmt: skip

"""The pictures of the README and of the documentation.

    python docs/pictures.py     # needs the extras plot and test, and Chromium

The charts show the figures in `bench/results/`, one file for an instruction set, which
`clearhead bench prefill decode training --out bench/results/LEVEL.json` wrote.
"""

import json
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure
from playwright.sync_api import sync_playwright

import clearhead as ch
from clearhead import demo
from clearhead.explorer import report_teller

ROOT = Path(__file__).parents[1]
PICTURES = Path(__file__).parent / "pictures"
STORY = (
    "Once upon a time there was a quiet queen and a young wizard. She danced in the castle because "
    "she was proud. He gave his books to her."
)
# The case in the results -> what it is called in the chart.
CASES = {
    "fp32 full": "a text of 2048 tokens, float32",
    "fp32 causal": "the same, causal",
    "bf16 full": "2048 tokens, bfloat16",
    "decode float32 B=1 H=32 G=32 Tk=4096": "decode, 4096 keys, float32",
    "decode bfloat16 B=1 H=32 G=8 Tk=65536": "decode, 65,536 keys, bfloat16",
    "training fp32 causal": "training, causal, float32",
}
PEERS = {
    "torch sdpa": "torch SDPA",
    "onnxruntime": "onnxruntime, its best",
    "torch flex": "FlexAttention",
}


def explorer(path: Path) -> None:
    """The page of the storyteller as it opens."""
    found = report_teller(demo.load(), STORY, effects=True, progress=False)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        page = ch.views.html.write_report(found, Path(folder) / "page.html")
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        tab = browser.new_page(
            reduced_motion="reduce", viewport={"width": 1280, "height": 720}, color_scheme="light"
        )
        tab.goto(page.as_uri())
        tab.wait_for_function("() => typeof clearhead !== 'undefined'")
        tab.screenshot(path=path)
        browser.close()


def mask(path: Path) -> None:
    """What `causal & (window | prefix)` leaves out, hatched."""
    torch.manual_seed(0)
    q = torch.randn(12, 8)
    rule = ch.causal & (ch.window(before=2, after=0) | ch.prefix(1))
    ch.views.plot.save(ch.views.plot.heads(ch.explain(q, q, q, mask=rule)), path)


def speed(results: Path, path: Path) -> None:
    """How many times as long the peers take, of those that can answer the case."""
    measured = json.loads(results.read_text())
    found = {result["case"]: result["peers"] for result in measured["results"]}
    drawn = Figure(figsize=(8, 4.6), layout="constrained")
    ax = drawn.subplots()
    at, ticks = 0.0, []
    for case, words in CASES.items():
        bars = {"clearhead": 1.0}
        for peer, name in PEERS.items():
            times = [x["times ours"] for who, x in found[case].items() if who.startswith(peer)]
            bars |= {name: min(times)} if times else {}
        ticks.append((at + 0.4 * (len(bars) - 1), words))
        for name, times in bars.items():
            colour = dict(
                zip(
                    ["clearhead", *PEERS.values()],
                    ("#1f6f8b", "#c8693a", "#a3a38f", "#8d7aa8"),
                    strict=True,
                )
            )[name]
            ax.barh(at, times, 0.75, color=colour, label=name)
            ax.text(times * 1.04, at, f"{times:.2g}", va="center", fontsize=8)
            at += 0.8
        at += 0.5
    ax.set_xscale("log")
    ax.set_xlim(0.5, 100)
    ax.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    ax.set_yticks([y for y, _ in ticks], [words for _, words in ticks])
    ax.invert_yaxis()
    ax.set_xlabel(f"time, as a multiple of clearhead's ({measured['about']['level']}, two threads)")
    unique = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    ax.legend(unique.values(), unique.keys(), frameon=False, fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    drawn.savefig(path, dpi=120)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    explorer(PICTURES / "explorer.png")
    mask(PICTURES / "mask.png")
    for results in sorted((ROOT / "bench" / "results").glob("*.json")):
        speed(results, PICTURES / f"speed-{results.stem}.png")


if __name__ == "__main__":
    main()

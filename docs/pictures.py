"""The pictures of the README and of the documentation.

    python -m docs.pictures     # needs the extras plot, hf, survey and test, and Chromium

The page of a survey reads 20,000 tokens with SmolLM2, which takes minutes.
The charts show the figures in `bench/results/`, one file for an instruction set, which
`clearhead bench prefill decode training --out bench/results/LEVEL.json` wrote.
"""

import html
import json
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure
from playwright.sync_api import sync_playwright

import clearhead as ch
from clearhead import demo
from clearhead.hf import Checkpoint
from clearhead.models.report import Report, summary
from docs import witch
from examples.book_and_code import files
from examples.smollm2 import cached, fetch

ROOT = Path(__file__).parents[1]
PICTURES = Path(__file__).parent / "pictures"
STORY = (
    "Once upon a time there was a quiet queen and a young wizard. She danced in the castle because "
    "she was proud. He gave his books to her."
)
SENTENCE = "When Mary and John went to the store, John gave a drink to"
SMOLLM2 = cached()
SURVEYED, BEGINNING = 20_000, 3000  # tokens, and characters of each file of source code
# The case in the results -> what it is called in the chart.
CASES = {
    "fp32 full": "2048 tokens, float32",
    "fp32 causal": "2048 tokens, causal, float32",
    "bf16 full": "2048 tokens, bfloat16",
    "decode float32 B=1 H=32 G=32 Tk=4096": "decode, 4096 keys, float32",
    "decode bfloat16 B=1 H=32 G=8 Tk=65536": "decode, 65,536 keys, bfloat16",
    "training fp32 causal": "training, causal, float32",
}
# How names of implementations begin in the results -> what the chart calls them, and their colour.
PEERS = {
    "clearhead": ("clearhead", "#1f6f8b"),
    "torch sdpa": ("torch SDPA", "#c8693a"),
    "onnxruntime": ("onnxruntime, its best", "#a3a38f"),
    "torch flex": ("FlexAttention", "#8d7aa8"),
}


def explorer(found: Report, path: Path) -> None:
    """A page as it opens."""
    with tempfile.TemporaryDirectory() as folder:
        page = ch.views.html.write_report(found, Path(folder) / "page.html")
        photograph(page.as_uri(), path, ready="typeof clearhead !== 'undefined'")


def terminal(found: Report, path: Path) -> None:
    """What `clearhead look` prints about a text."""
    command = f'$ clearhead look "{found.text}" --model {SMOLLM2.name}'
    printed = html.escape(f"{command}\n\n{summary(found)}")
    style = (
        "display: inline-block; margin: 0; padding: 18px; font: 14px/1.45 monospace; "
        "background: #fcfbf8; color: #1c2024"
    )
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "terminal.html"
        page.write_text(f'<meta charset="utf-8"><pre style="{style}">{printed}</pre>', "utf-8")
        photograph(page.as_uri(), path, part="pre")


def survey(model: Path, path: Path) -> None:
    """The page of a survey of source code, at the head with the most induction."""
    texts = [text[:BEGINNING] for text in files()]
    with tempfile.TemporaryDirectory() as folder:
        result = ch.survey(model, texts, out=folder, tokens=SURVEYED, progress=False)
        (layer, head), *_ = result.query(
            "select layer, head from heads where metric = 'induction' order by mean desc, layer"
        ).rows
        page = ch.views.html.write_survey(result, Path(folder) / "page.html")
        at = f"#layer={layer}&head={head}&metric=induction&x=first&y=induction"
        ready = "typeof clearhead !== 'undefined'"
        photograph(f"{page.as_uri()}{at}", path, ready=ready, height=1180)


def image(path: Path) -> None:
    """The page of a photograph, at a patch of the background and a head of DINOv2."""
    from examples.dinov2 import PHOTO, fetch

    found = ch.report(fetch(), PHOTO.fetch(), progress=False)
    with tempfile.TemporaryDirectory() as folder:
        page = ch.views.html.write_report(found, Path(folder) / "page.html")
        at = "#layer=6&head=3&query=58"
        photograph(f"{page.as_uri()}{at}", path, ready="typeof clearhead !== 'undefined'")


def caches(model: Path, path: Path) -> None:
    """What two formats and a window do to each head, on the beginning of a module of Python."""
    reader = Checkpoint(model)
    _, inputs = reader.tokens_and_inputs(files()[0][:BEGINNING])
    window = ch.edits.keep_only(ch.prefix(4) | ch.window(before=63, after=0))
    compared = {"q8_0": "q8_0", "q4_0": "q4_0", "the last 64 keys and 4": window}
    assert reader.predictor is not None
    damage = ch.compare_caches(reader.predictor, inputs, compared, metric=None)
    ch.views.plot.save(ch.views.plot.caches(damage), path)


def photograph(
    address: str, path: Path, ready: str = "true", part: str | None = None, height: int = 720
) -> None:
    """Save a page in a window of 1280 x `height`, or one element of it, as a picture."""
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        tab = browser.new_page(
            reduced_motion="reduce",
            viewport={"width": 1280, "height": height},
            color_scheme="light",
        )
        tab.set_default_timeout(90_000)  # milliseconds, for a machine with a high load
        tab.goto(address)
        tab.wait_for_function(f"() => {ready}")
        (tab if part is None else tab.locator(part)).screenshot(path=path)
        browser.close()


def mask(path: Path) -> None:
    """What `causal & (window | prefix)` leaves out, hatched."""
    torch.manual_seed(0)
    q = torch.randn(12, 8)
    rule = ch.causal & (ch.window(before=2, after=0) | ch.prefix(1))
    ch.views.plot.save(ch.views.plot.heads(ch.explain(q, q, q, mask=rule)), path)


def speed(results: Path, path: Path) -> None:
    """The fraction of the hardware's limit that each implementation reaches, on an axis from 0."""
    measured = json.loads(results.read_text())
    by_case = {result["case"]: result["peers"] for result in measured["results"]}
    drawn = Figure(figsize=(8, 4.6), layout="constrained")
    ax = drawn.subplots()
    at, ticks = 0.0, []
    for case, words in CASES.items():
        bars = {}
        for peer in PEERS:
            reached = [x["share"] for who, x in by_case[case].items() if _is(peer, who)]
            bars |= {peer: max(reached)} if reached else {}
        ticks.append((at + 0.4 * (len(bars) - 1), words))
        for peer, reached in bars.items():
            name, colour = PEERS[peer]
            ax.barh(at, 100 * reached, 0.75, color=colour, label=name)
            ax.text(
                100 * reached + 1, at, f"{100 * reached:.0f} %", va="center", fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )  # fmt: skip
            at += 0.8
        at += 0.5
    ax.axvline(100, color="#555", linewidth=0.8, linestyle=":")
    ax.set_xlim(0, max(118, 1.12 * ax.get_xlim()[1]))  # a peer may use wider instructions
    ax.set_yticks([y for y, _ in ticks], [words for _, words in ticks])
    ax.invert_yaxis()
    ax.set_xlabel(
        "percent of the hardware's limit, measured in the same run (arithmetic; for decode,\n"
        f"reading memory). Longer is faster. {measured['about']['level']}, two threads",
        fontsize=9,
    )
    unique = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    ax.legend(
        unique.values(), unique.keys(), frameon=False, fontsize=8, ncols=4,
        loc="lower left", bbox_to_anchor=(0, 1),
    )  # fmt: skip
    ax.spines[["top", "right"]].set_visible(False)
    drawn.savefig(path, dpi=120)


def _is(peer: str, name: str) -> bool:
    """Whether a result is of this peer: of onnxruntime the best of several operators is drawn."""
    return name.startswith(peer) if peer == "onnxruntime" else name == peer


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    witch.PICTURE.write_text(witch.draw(), "utf-8")
    told = ch.report(demo.load(), STORY, effects=True, next_token=True, progress=False)
    explorer(told, PICTURES / "explorer.png")
    real = ch.report(fetch(), SENTENCE, next_token=True, progress=False)
    explorer(real, PICTURES / "smollm2.png")
    terminal(real, PICTURES / "smollm2-terminal.png")
    survey(fetch(), PICTURES / "survey.png")
    caches(fetch(), PICTURES / "caches.png")
    image(PICTURES / "image.png")
    mask(PICTURES / "mask.png")
    for results in sorted((ROOT / "bench" / "results").glob("*.json")):
        speed(results, PICTURES / f"speed-{results.stem}.png")


if __name__ == "__main__":
    main()

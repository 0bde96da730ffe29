"""The page, opened in a real browser: it shows what the tensors hold, and nothing else runs.

Every visit to a page ends with the same four checks: no request but the file
itself, no message on the console, no script error, no dialog.
"""

import base64
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import tarfile

import pytest
import torch

from clearhead.errors import BadType, BadValue
from clearhead.results.trace import Step, Trace
from clearhead.views.escape import visible_in_browser as visible
from clearhead.views.html import page, report_page, write_page, write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-quic "
    "--no-first-run --disable-component-update --disable-sync"
).split()

AXE = "axe-core@4.14.1"

QUERIES = ("she", "sat", "down", "right", "there")
KEYS = ("The", "old", "cat", "she", "sat", "down", "there")

HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'\"`${alert(1)}`<!--",
    "\u202egnirts\u202c",
    "nul\0nul",
    "lone\ud800surrogate",
    "x" * 10_000,
    "\u2028</style>\u2029&amp;",
    "{{data}}",
    "שלום",
    "",
)


def full_trace(
    queries=QUERIES, keys=KEYS, *, B=2, H=6, G=2, D=3, Dv=11, dtype=torch.float32, about=""
):
    """A trace with every step: the last query sees the last key, and some weights are dropped."""
    Tq, Tk = len(queries), len(keys)
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(Tq, 13, generator=draw).to(dtype)
    q = torch.randn(B, H, Tq, D, generator=draw).to(dtype)
    k = torch.randn(B, G, Tk, D, generator=draw).to(dtype)
    v = torch.randn(B, G, Tk, Dv, generator=draw).to(dtype)
    scores = q @ k.repeat_interleave(H // G, 1).mT
    scaled = scores * 0.5
    capped = 3 * torch.tanh(scaled / 3)
    biased = capped + torch.linspace(-1, 1, Tk).to(dtype)
    later = torch.ones(Tq, Tk).triu(1 + Tk - Tq).bool()
    masked = biased.masked_fill(later, -math.inf)
    weights = masked.softmax(-1)
    kept = torch.rand(weights.shape, generator=draw) > 0.25
    dropped = weights * kept / 0.75
    output = dropped @ v.repeat_interleave(H // G, 1)
    steps = [
        Step("inputs", "X", "What the tokens are.", "q e", x),
        Step("query", "Q", "What each query looks for.", "b h q d", q),
        Step("key", "K", "What each key offers.", "b g k d", k),
        Step("value", "V", "What each key gives.", "b g k v", v),
        Step("scores", "Q Kᵀ", "One dot product per pair.", "b h q k", scores),
        Step("scaled", "x · 0.5", "Scores stay small.", "b h q k", scaled),
        Step("capped", "3 · tanh(x / 3)", "No score leaves the cap.", "b h q k", capped),
        Step("biased", "x + bias", "Near keys come first.", "b h q k", biased),
        Step("masked", "x or −∞", "Later keys are blocked.", "b h q k", masked),
        Step("weights", "softmax", "Rows sum to 1.", "b h q k", weights),
        Step("dropped", "weights · kept / 0.75", "Some are dropped.", "b h q k", dropped),
        Step("output", "dropped · V", "A mixture of values.", "b h q v", output),
    ]
    settings = {"mask": "causal", "scale": 0.5, "softcap": 3.0, "dropout": 0.25, "seed": 7}
    return Trace(tuple(steps), tuple(queries), tuple(keys), about, settings)


# ---- without a browser ---------------------------------------------------------------


def embedded(document):
    """The JSON that the script of a page reads."""
    return json.loads(
        re.search(r'<script type="application/json"[^>]*>(.*?)</script>', document)[1]
    )


def tensor(step, where=None):
    """One step of `embedded` as a tensor."""
    held = where or step
    data = bytearray(base64.b64decode(held["data"]))
    dtype = {"f4": torch.float32, "f8": torch.float64}[held["kind"]]
    return torch.frombuffer(data, dtype=dtype).reshape(held["stored"])


def test_every_number_survives():
    trace = full_trace()
    for step, held in zip(trace, embedded(page(trace))["steps"], strict=True):
        first = step.tensor[0] if "b" in step.axes else step.tensor
        assert torch.equal(tensor(held), first), step.name
        assert held["shape"] == [
            list(axis) for axis in zip(step.axes.split(), step.shape, strict=True)
        ]


def test_nan_and_infinity_survive():
    weights = torch.tensor([[math.nan, 1.0], [-math.inf, math.inf]])
    held = embedded(page(Trace((Step("weights", "", "", "q k", weights),))))["steps"][0]
    assert held["kind"] == "f4"
    assert torch.equal(tensor(held).nan_to_num(nan=5.0), weights.nan_to_num(nan=5.0))


@pytest.mark.parametrize("value", [1e300, 1e-300])
def test_a_number_outside_float32_is_not_rounded_to_infinity_or_zero(value):
    weights = torch.tensor([[value, 1.0]], dtype=torch.float64)
    held = embedded(page(Trace((Step("weights", "", "", "q k", weights),))))["steps"][0]
    assert tensor(held).tolist() == weights.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_opens(dtype):
    trace = full_trace(dtype=dtype)
    held = embedded(page(trace))["steps"][-1]
    assert torch.equal(tensor(held), trace["output"][0].float())


def test_a_trace_with_gradients_and_no_tokens_is_numbered():
    weights = torch.rand(2, 3, requires_grad=True)
    data = embedded(page(Trace((Step("weights", "", "", "q k", weights),))))
    assert (data["queries"], data["keys"]) == (["0", "1"], ["0", "1", "2"])


def test_a_long_text_is_pooled_by_maximum_and_keeps_some_rows():
    trace = full_trace(["q"] * 311, ["k"] * 523, B=1)
    document = page(trace)
    data = embedded(document)
    assert data["block"] == [2, 3]
    kept = data["kept"]
    assert kept[0] == 0 and kept[-1] == 310 and len(kept) < 311
    for name in ("scores", "masked", "weights"):
        held = next(step for step in data["steps"] if step["name"] == name)
        whole, pooled = trace[name][0], tensor(held, held["map"])
        assert pooled.shape == (6, 156, 175)
        assert torch.equal(pooled[:, 7, 11], whole[:, 14:16, 33:36].amax((-1, -2)))
        assert torch.equal(pooled[:, -1, -1], whole[:, 310:, 522:].amax((-1, -2)))
        assert torch.equal(tensor(held), whole[:, kept])
    assert len(document) < 18e6


def test_sizes_stay_bounded():
    weights = torch.rand(12, 1031, 1033).softmax(-1)
    assert len(page(Trace((Step("weights", "", "", "h q k", weights),)))) < 6e6


def test_no_token_can_leave_its_element():
    trace = full_trace(HOSTILE, HOSTILE, about=HOSTILE[0])
    document = page(trace, title=HOSTILE[1], note="".join(HOSTILE))
    document.encode("utf-8")
    assert document.count("<script") == document.count("</script>") == 2
    assert "<img" not in document and document.count("<!--") == 0
    assert not set("\0\u202e\u2028\u2029\ud800") & set(document)
    held = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', document)[1]
    assert held.isascii() and not set("<>&") & set(held)
    assert embedded(document)["keys"] == [visible(token) for token in HOSTILE]


def test_invisible_characters_are_written_out():
    assert [visible(token) for token in ("a\0b", "\n", " the ", "   ", "", "a b", "\u202ex")] == [
        "a␀b", "␊", "␣the␣", "␣␣␣", "∅", "a b", "⟨202E⟩x",
    ]  # fmt: skip
    assert visible("\ud800") == "⟨D800⟩" and visible("\u2028") == "⟨2028⟩"
    assert visible("👩‍💻") == "👩‍💻" and visible("שלום") == "שלום"


def test_the_policy_names_the_one_script_and_the_one_style():
    document = page(full_trace())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', document)[1]
    for kind, text in (
        ("script", re.search(r"<script>(.*?)</script>", document, re.S)[1]),
        ("style", re.search(r"<style>(.*?)</style>", document, re.S)[1]),
    ):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy


def test_the_only_url_is_the_svg_namespace():
    assert set(re.findall(r"https?://[^\s\"']*", page(full_trace()))) == {
        "http://www.w3.org/2000/svg"
    }


def test_the_same_trace_gives_the_same_bytes(tmp_path):
    trace = full_trace()
    path = write_page(trace, tmp_path / "page.html", title="a", note="b")
    assert path.read_text(encoding="utf-8") == page(trace, title="a", note="b")


def test_a_path_that_cannot_be_written(tmp_path):
    with pytest.raises(BadValue) as error:
        write_page(full_trace(), tmp_path / "nowhere" / "page.html")
    assert "could not be written" in error.value.gave and "No such file" in error.value.gave
    assert "make the folder first" in error.value.way_out
    with pytest.raises(BadValue, match="␀"):
        write_page(full_trace(), "a\0b")


def test_a_trace_with_nothing_to_draw():
    query = Step("query", "", "", "q d", torch.ones(2, 3))
    with pytest.raises(BadValue, match="no step 'weights'"):
        page(Trace((query,)))
    with pytest.raises(BadValue, match=r"empty: .q k. has shape \(0, 3\)"):
        page(Trace((Step("weights", "", "", "q k", torch.ones(0, 3)),)))


# ---- with a browser ------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    if os.environ.get("CLEARHEAD_NO_BROWSER") == "1":
        pytest.skip("CLEARHEAD_NO_BROWSER=1: the page was not opened in a browser")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.fail(
            "The page must be opened in a browser and there is none. Install Chromium (on Debian: "
            "apt-get install chromium), or set CLEARHEAD_NO_BROWSER=1 to leave this out."
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=path, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Open a trace or a report in the browser; at the end, make the four checks."""
    contexts, happened, address = [], [], (tmp_path / "page.html").as_uri()

    def open_page(shown, *, title="clearhead", note="", query=None, **options):
        if isinstance(shown, Trace):
            write_page(shown, tmp_path / "page.html", title=title, note=note, query=query)
        else:
            write_report(shown, tmp_path / "page.html", title=title, note=note)
        options = {
            "reduced_motion": "reduce",
            "viewport": {"width": 1200, "height": 900},
            **options,
        }
        contexts.append(browser.new_context(**options))
        tab = contexts[-1].new_page()
        tab.on("request", lambda it: it.url == address or happened.append(f"request {it.url}"))
        tab.on("console", lambda it: happened.append(f"console {it.text}"))
        tab.on("pageerror", lambda it: happened.append(f"error {it}"))
        tab.on("dialog", lambda it: (happened.append(f"dialog {it.message}"), it.dismiss()))
        tab.goto(address)
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert happened == []


def hover(tab, row, column, shape, canvas="#canvas"):
    box = tab.locator(canvas).bounding_box()
    x = box["x"] + (column + 0.5) * box["width"] / shape[1]
    y = box["y"] + (row + 0.5) * box["height"] / shape[0]
    tab.mouse.move(x, y)
    return x, y


def value(text):
    return float(text.replace("−", "-").replace("∞", "inf"))


def reading(tab):
    """What the readout says: its tokens, and the number of every step."""
    numbers = {
        cell.get_attribute("data-step"): value(cell.text_content())
        for cell in tab.locator("#readout dd").all()
    }
    return tab.locator("#readout bdi").all_text_contents(), numbers


def says(tab, trace, head, row, column):
    tokens, numbers = reading(tab)
    assert tokens == [trace.queries[row], trace.keys[column]]
    assert len(numbers) == 7
    for name, shown in numbers.items():
        assert shown == pytest.approx(trace[name][0, head, row, column].item(), rel=1e-5), name


def rows(tab, caption):
    """The rows of the table whose caption holds `caption`, as lists of text."""
    return tab.evaluate(
        """caption => [...document.querySelectorAll('#panel table')]
             .find(table => table.caption.textContent.includes(caption))
             .querySelectorAll('tbody tr').values()
             .map(row => [...row.cells].map(cell => cell.textContent)).toArray()""",
        caption,
    )


def open_step(tab, name):
    tab.locator("#tabs button", has_text=name).click()


def test_hovering_a_cell_reads_its_numbers(visit):
    trace = full_trace()
    tab = visit(trace)
    for row, column in ((0, 0), (0, 6), (3, 2), (4, 6)):
        hover(tab, row, column, (5, 7))
        says(tab, trace, 0, row, column)
        told_so = "may not look at" in tab.locator("#readout").text_content()
        assert told_so == trace["masked"][0, 0, row, column].isinf().item()
    assert tab.locator("#readout").get_attribute("aria-live") == "polite"
    hover(tab, 2, 3, (5, 7), "#heads button:nth-child(5) canvas")
    says(tab, trace, 4, 2, 3)


def test_a_click_keeps_the_cell_and_opens_a_head(visit):
    trace = full_trace()
    tab = visit(trace)
    tab.mouse.click(*hover(tab, 1, 2, (5, 7)))
    tab.mouse.move(0, 0)
    says(tab, trace, 0, 1, 2)
    tab.locator("#heads button").nth(3).click()
    tab.mouse.move(0, 0)
    says(tab, trace, 3, 1, 2)
    chosen = tab.locator("#heads [aria-checked=true]")
    assert chosen.text_content() == "head 3"
    assert tab.locator("#head").input_value() == "3"


def test_the_map_shows_the_step_that_is_chosen(visit):
    trace = full_trace()
    tab = visit(trace)
    pixel = """([row, column]) => {
        const copy = new OffscreenCanvas(7, 5).getContext('2d');
        copy.drawImage(document.getElementById('canvas'), 0, 0);
        return [...copy.getImageData(column, row, 1, 1).data];
    }"""
    assert tab.evaluate(pixel, [0, 6])[3] == 0, "a masked cell is left to the hatching"
    tab.get_by_role("radio", name="scores").check()
    assert tab.evaluate(pixel, [0, 6])[3] == 255, "the scores are there before the mask"
    scores = trace["scores"][0]
    top, bottom = (int(scores[0].argmax()), int(scores[0].argmin()))
    light = [sum(tab.evaluate(pixel, [at // 7, at % 7])[:3]) for at in (top, bottom)]
    assert light[0] > light[1]
    assert tab.locator("#readout .shown dt").text_content() == "scores"


def test_the_keyboard_walks_the_map(visit):
    trace = full_trace()
    tab = visit(trace)
    tab.locator("#map").focus()
    for press in ("Home", "ArrowUp", "ArrowUp", "ArrowRight", "PageDown"):
        tab.keyboard.press(press)
    says(tab, trace, 1, 2, 1)
    tab.keyboard.press("End")
    tab.keyboard.press("ArrowRight")
    says(tab, trace, 1, 2, 6)
    tab.locator("#heads [tabindex='0']").focus()
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("document.activeElement.textContent") == "head 2"


def test_the_tab_key_reaches_everything(visit):
    tab = visit(full_trace())
    reached = []
    for _ in range(40):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.id || document.activeElement.name"))
    order = ["theme", "head", "query", "key", "show", "map", "queries", "keys", "tab-0", "panel"]
    assert [name for name in reached if name in order][: len(order)] == order
    assert "next" in reached


def test_a_page_opens_at_the_requested_query(visit):
    assert visit(full_trace()).evaluate("state.query") == 4
    assert visit(full_trace(), query=1).evaluate("state.query") == 1


@pytest.mark.parametrize(("make", "other"), [(page, torch.ones(2)), (report_page, full_trace())])
def test_other_types_are_refused(make, other):
    with pytest.raises(BadType, match="page was given a T"):
        make(other)


def test_picking_a_query_draws_its_lines(visit):
    trace = full_trace()
    tab = visit(trace)
    tab.locator("#head").select_option("2")
    tab.locator("#queries [role=option]", has_text="down").click()
    weights = trace["dropped"][0, 2, 2]
    lines = [
        (int(path.get_attribute("data-key")), float(path.get_attribute("stroke-width")))
        for path in tab.locator("#curves path").all()
    ]
    given = weights.nonzero().flatten().tolist()
    assert [key for key, _ in lines] == given == [1, 2, 3, 4], "neither a masked nor a dropped one"
    for key, width in lines:
        assert width == pytest.approx(1 + 14 * min(1.0, weights[key].item()), abs=0.006)
    shown = tab.locator("#keys .figure").all_text_contents()
    assert shown[0] == "dropped" and shown[5:] == ["masked", "masked"]
    assert [float(text) for text in shown[1:5]] == pytest.approx(weights[1:5].tolist(), abs=6e-5)
    box = tab.locator("#curves path").first.bounding_box()
    middle = tab.locator("#queries [aria-selected=true]").bounding_box()
    assert abs(box["y"] + box["height"] - middle["y"] - middle["height"] / 2) < 12


def test_the_keyboard_picks_a_query_and_a_key(visit):
    tab = visit(full_trace())
    tab.locator("#queries").focus()
    tab.keyboard.press("Home")
    lines = (full_trace()["dropped"][0, 0] > 0).sum(-1).tolist()
    assert tab.locator("#curves path").count() == lines[0]
    tab.keyboard.press("ArrowDown")
    assert tab.locator("#curves path").count() == lines[1] != lines[0]
    assert tab.locator("#queries [aria-selected=true]").text_content() == "sat"
    assert tab.locator("#queries").get_attribute("aria-activedescendant") == "queries-1"
    tab.locator("#keys").focus()
    tab.keyboard.press("Home")
    assert tab.locator("#keys [aria-selected=true] bdi").text_content() == "The"
    assert tab.locator("#pinned").evaluate("it => it.style.transform").count("0") == 1


def test_stepping_through_every_step(visit):
    trace = full_trace()
    tab = visit(trace)
    for number, step in enumerate(trace, 1):
        panel = tab.locator("#panel")
        assert panel.locator("h3").text_content() == f"{number}{step.name}"
        assert panel.locator(".formula").text_content() == step.formula
        assert panel.locator(".why").text_content() == step.why
        assert panel.locator(".shape b").all_text_contents() == [str(n) for n in step.shape]
        assert panel.locator("tbody tr").count() > 0
        assert tab.locator("#turned").text_content() == f"Step {number} of 12"
        if number < len(trace):
            tab.locator("#next").click()
    assert tab.locator("#next").is_disabled()
    tab.locator("#panel").focus()
    tab.keyboard.press("ArrowLeft")
    assert tab.locator("#panel article").get_attribute("data-step") == "dropped"
    tab.keyboard.press("Home")
    assert tab.locator("#panel article").get_attribute("data-step") == "inputs"
    assert tab.locator("#previous").is_disabled()


def test_a_dot_product_is_written_out_product_by_product(visit):
    trace = full_trace()
    tab = visit(trace)
    tab.locator("#head").select_option("4")  # query head 4 of 6 reads key head 1 of 2
    tab.locator("#query").select_option("3")
    tab.locator("#key").select_option("5")
    open_step(tab, "scores")
    q, k = trace["query"][0, 4, 3], trace["key"][0, 1, 5]
    table = [[value(cell) for cell in row[1:]] for row in rows(tab, "dot product")]
    for shown, exact in zip(table, (q, k, q * k), strict=True):
        assert shown == pytest.approx(exact.tolist(), abs=6e-5)
    written = tab.locator("#panel .sum").text_content().replace("−", "-").replace(" ", "")
    terms, result = written.split("=")
    added = sum(map(float, re.findall(r"[+-]?[\d.]+", terms)))
    assert added == pytest.approx((q @ k).item(), abs=3e-4)
    assert float(result) == pytest.approx(trace["scores"][0, 4, 3, 5].item(), abs=6e-5)


def test_the_exponentials_and_their_sum_are_written_out(visit):
    trace = full_trace()
    tab = visit(trace)
    tab.locator("#head").select_option("1")
    tab.locator("#query").select_option("2")
    open_step(tab, "weights")
    scores, weights = trace["masked"][0, 1, 2], trace["weights"][0, 1, 2]
    *table, total = rows(tab, "From scores")
    powers = (scores - scores.max()).exp()
    for row, (token, *numbers) in enumerate(table):
        assert token == KEYS[row]
        exact = [scores[row], scores[row] - scores.max(), powers[row], weights[row]]
        assert [value(text) for text in numbers[:4]] == pytest.approx(
            [number.item() for number in exact], abs=6e-5
        )
    assert value(total[3]) == pytest.approx(powers.sum().item(), abs=6e-5)
    assert value(total[4]) == pytest.approx(1, abs=6e-5)


def test_the_weighted_sum_adds_up(visit):
    trace = full_trace(Dv=3)
    tab = visit(trace)
    tab.locator("#head").select_option("5")
    open_step(tab, "output")
    *table, total = rows(tab, "times its weight")
    share, values = trace["dropped"][0, 5, 4], trace["value"][0, 1]
    for row, (_, weight, *numbers) in enumerate(table):
        assert value(weight) == pytest.approx(share[row].item(), abs=6e-5)
        assert [value(text) for text in numbers[:3]] == pytest.approx(
            values[row].tolist(), abs=6e-5
        )
        assert [value(text) for text in numbers[4:]] == pytest.approx(
            (share[row] * values[row]).tolist(), abs=6e-5
        )
    exact = trace["output"][0, 5, 4].tolist()
    assert [value(text) for text in total[-3:]] == pytest.approx(exact, abs=6e-5)


def test_the_chosen_key_is_calculated_at_every_step(visit):
    trace = full_trace()
    tab = visit(trace)
    tab.locator("#key").select_option("0")
    for name, sign in (("scaled", " × 0.5 = "), ("capped", ": 3 × tanh(")):
        open_step(tab, name)
        line = tab.locator("#panel .sum").text_content()
        assert sign in line
        assert value(line.split("=")[1]) == pytest.approx(trace[name][0, 0, 4, 0].item(), abs=6e-5)


def test_hostile_text_is_only_text(visit):
    trace = full_trace(HOSTILE, HOSTILE, about=HOSTILE[1])
    tab = visit(trace, title="".join(HOSTILE[:6]), note=HOSTILE[1])
    assert tab.locator("h1").text_content().startswith("</script><script>alert(1)")
    assert tab.locator("img").count() == tab.locator("#panel script, header script").count() == 0
    for at in range(len(HOSTILE)):
        tab.locator("#query").select_option(str(at))
        tab.locator("#key").select_option(str(at))
        shown, _ = reading(tab)
        whole = visible(HOSTILE[at])
        clipped = whole if len(whole) <= 40 else whole[:40] + "…"
        assert shown == [clipped, clipped]
    long = tab.locator("#keys bdi", has_text="xxx")
    assert long.get_attribute("title") == "x" * 10_000
    for _ in trace:
        tab.locator("#next").click(force=True)
    wide = tab.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1], "a long token makes nothing wider"
    isolated = tab.evaluate(
        "[...document.querySelectorAll('.token')].map(it => getComputedStyle(it).unicodeBidi)"
    )
    assert set(isolated) == {"isolate"}


def test_a_long_text_opens_and_says_that_it_is_pooled(visit):
    trace = full_trace([f"q{i}" for i in range(311)], [f"k{i}" for i in range(523)], B=1)
    tab = visit(trace)
    assert "the largest of 2 × 3 numbers" in tab.locator("#left-out").text_content()
    hover(tab, 100, 50, (156, 175))
    tokens, numbers = reading(tab)
    assert tokens == ["q200", "q201", "k150", "k152"]
    exact = trace["weights"][0, 0, 200:202, 150:153].max().item()
    assert numbers["weights"] == pytest.approx(exact, rel=1e-5)
    query = int(tab.locator("#query").input_value())
    assert tab.locator("#keys .figure").count() >= 32
    top = trace["dropped"][0, 0, query].max().item()
    figures = tab.locator("#keys .figure").all_text_contents()
    shown = [float(text) for text in figures if text != "dropped"]
    assert max(shown) == pytest.approx(top, abs=6e-5)
    tab.locator("#map").focus()
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("ArrowRight")
    for _ in trace:
        tab.locator("#next").click(force=True)


def test_a_lone_matrix_without_heads_or_tokens(visit):
    weights = torch.tensor([[1.0, 0.0, math.nan], [0.25, 0.5, 0.25]])
    tab = visit(Trace((Step("weights", "softmax", "Shares.", "q k", weights),)))
    hover(tab, 1, 1, (2, 3))
    assert reading(tab) == (["1", "1"], {"weights": 0.5})
    assert tab.locator("#heads").is_hidden()
    assert "NaN" in tab.locator("#written").text_content()


def test_a_query_that_may_see_nothing_says_so(visit):
    masked = torch.tensor([[-math.inf, -math.inf], [0.0, 0.0]])
    steps = (
        Step("masked", "x or −∞", "Blocked.", "q k", masked),
        Step("weights", "softmax", "Shares.", "q k", torch.tensor([[0.0, 0.0], [0.5, 0.5]])),
    )
    tab = visit(Trace(steps))
    tab.locator("#query").select_option("0")
    open_step(tab, "weights")
    assert "may look at nothing" in tab.locator("#panel").text_content()
    assert tab.locator("#curves path").count() == 0


def test_the_weight_of_a_sink_is_stated(visit):
    scores, weights = torch.zeros(1, 3), torch.full((1, 3), 0.25)
    steps = (
        Step("scores", "Q Kᵀ", "Dot products.", "q k", scores),
        Step("weights", "softmax with a sink", "Shares.", "q k", weights),
    )
    tab = visit(Trace(steps))
    open_step(tab, "weights")
    assert "sum to 0.7500: a sink" in tab.locator("#panel").text_content()
    assert tab.locator("#panel .sum").text_content() == "0 exp(0) / 4.0000 = 0.2500"


def test_light_and_dark(visit):
    tab = visit(full_trace(), color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert tab.evaluate(paper) == "rgb(20, 22, 25)"
    tab.locator("#theme").click()
    assert tab.evaluate(paper) == "rgb(252, 251, 248)"
    assert tab.locator("#theme").text_content() == "Dark"


def test_printing_shows_every_step(visit):
    tab = visit(full_trace(), color_scheme="dark")
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("#panel article").count() == 12
    assert tab.locator("#next").is_hidden()
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.locator("#panel article").count() == 1


def test_a_narrow_screen_never_scrolls_sideways(visit):
    tab = visit(full_trace(), viewport={"width": 360, "height": 700})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360


def test_without_a_script_there_is_a_table(visit):
    trace = full_trace(QUERIES, [f"k{i}" for i in range(17)])
    tab = visit(trace, java_script_enabled=False)
    table = [row.split("\t") for row in tab.locator("noscript table").inner_text().split("\n")]
    assert table[0][:2] == ["query \\ key", "k0"] and table[0][6:9] == ["k5", "…", "k11"]
    assert table[1][0] == "she" and len(table) == 6
    assert float(table[1][1]) == pytest.approx(trace["weights"][0, 0, 0, 0].item(), abs=6e-5)
    assert tab.locator("#app").is_hidden()


# ---- for everybody -------------------------------------------------------------------


@pytest.fixture(scope="session")
def axe(tmp_path_factory):
    """Check a tab with axe-core: no violation, of any rule."""
    if os.environ.get("CLEARHEAD_NO_BROWSER") == "1":
        pytest.skip("CLEARHEAD_NO_BROWSER=1: the page was not opened in a browser")
    folder = tmp_path_factory.mktemp("axe")
    if shutil.which("npm") is None:
        pytest.fail(
            "The page must be checked with axe-core, which npm fetches, and there is no npm. "
            "Install it, or set CLEARHEAD_NO_BROWSER=1 to leave this out."
        )
    packed = subprocess.run(
        ["npm", "pack", "--silent", AXE], cwd=folder, capture_output=True, text=True, timeout=90
    )
    if packed.returncode:
        pytest.fail(f"npm could not fetch {AXE}: {packed.stderr.strip()}")
    with tarfile.open(folder / packed.stdout.strip().splitlines()[-1]) as package:
        script = package.extractfile("package/axe.min.js").read().decode()

    def check(tab):
        tab.evaluate(script)
        found = tab.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        assert [(it["id"], [node["html"] for node in it["nodes"]]) for it in found] == []

    return check


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 400)])
def test_axe_finds_nothing_in_the_page_of_a_trace(visit, axe, scheme, width):
    tab = visit(full_trace(), color_scheme=scheme, viewport={"width": width, "height": 900})
    for name in ("scores", "weights", "output"):
        open_step(tab, name)
        tab.wait_for_timeout(50)  # an observer finds what scrolls, one frame later
        axe(tab)

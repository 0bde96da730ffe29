"""The page, opened in a real browser: it shows what the tensors hold, and nothing else runs.

Every visit to a page begins with a check that it has drawn something, and ends
with four: no request but the file itself, no message on the console, no script
error, no dialog.
"""

import base64
import csv
import hashlib
import io
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import tarfile
import urllib.parse
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest
import torch

from clearhead.core.errors import BadType, BadValue
from clearhead.core.formatting import visible_in_browser as visible
from clearhead.core.functional.trace import Step, Trace
from clearhead.views.html import page, report_page, write_page
from tests.views.browser import must_be_drawn

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


def layer_of(document):
    """The one layer of the page of a trace."""
    [layer] = embedded(document)["layers"]
    return layer


def tensor(step, where=None):
    """One step of `embedded` as a tensor."""
    held = where or step
    data = bytearray(base64.b64decode(held["data"]))
    dtype = {"f4": torch.float32, "f8": torch.float64}[held["kind"]]
    return torch.frombuffer(data, dtype=dtype).reshape(held["stored"])


def test_every_number_survives():
    trace = full_trace()
    for step, held in zip(trace, layer_of(page(trace))["steps"], strict=True):
        first = step.tensor[0] if "b" in step.axes else step.tensor
        assert torch.equal(tensor(held), first), step.name
        assert held["shape"] == [
            list(axis) for axis in zip(step.axes.split(), step.shape, strict=True)
        ]


def test_nan_and_infinity_survive():
    weights = torch.tensor([[math.nan, 1.0], [-math.inf, math.inf]])
    held = layer_of(page(Trace((Step("weights", "", "", "q k", weights),))))["steps"][0]
    assert held["kind"] == "f4"
    assert torch.equal(tensor(held).nan_to_num(nan=5.0), weights.nan_to_num(nan=5.0))


@pytest.mark.parametrize("value", [1e300, 1e-300])
def test_a_number_outside_float32_is_not_rounded_to_infinity_or_zero(value):
    weights = torch.tensor([[value, 1.0]], dtype=torch.float64)
    held = layer_of(page(Trace((Step("weights", "", "", "q k", weights),))))["steps"][0]
    assert tensor(held).tolist() == weights.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_opens(dtype):
    trace = full_trace(dtype=dtype)
    held = layer_of(page(trace))["steps"][-1]
    assert torch.equal(tensor(held), trace["output"][0].float())


def test_a_trace_with_gradients_and_no_tokens_is_numbered():
    weights = torch.rand(2, 3, requires_grad=True)
    data = layer_of(page(Trace((Step("weights", "", "", "q k", weights),))))
    assert (data["queries"], data["keys"]) == (["0", "1"], ["0", "1", "2"])


def test_a_long_text_is_pooled_by_maximum_and_keeps_some_rows():
    trace = full_trace(["q"] * 311, ["k"] * 523, B=1)
    document = page(trace)
    data = layer_of(document)
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
    assert layer_of(document)["keys"] == [visible(token) for token in HOSTILE]


def test_invisible_characters_are_written_out():
    assert [visible(token) for token in ("a\0b", "\n", " the ", "   ", "", "a b", "\u202ex")] == [
        "a␀b", "↵", "␣the␣", "␣␣␣", "∅", "a b", "⟨202E⟩x",
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
    assert "create the folder first" in error.value.hint
    with pytest.raises(BadValue, match="null byte"):
        write_page(full_trace(), "a\0b")


def test_a_trace_with_nothing_to_draw():
    query = Step("query", "", "", "q d", torch.ones(2, 3))
    with pytest.raises(BadValue, match="no step 'weights'"):
        page(Trace((query,)))
    with pytest.raises(BadValue, match=r"empty: .q k. has shape \(0, 3\)"):
        page(Trace((Step("weights", "", "", "q k", torch.ones(0, 3)),)))


# ---- with a browser ------------------------------------------------------------------


def value(text):
    return float(text.replace("−", "-").replace("∞", "inf"))


CHANGES = itertools.count()


def address(tab, **parts):
    """Choose by the address: head, query and key by word or position, view, step."""
    given = tab.evaluate("location.hash.slice(1)")
    held = dict(urllib.parse.parse_qsl(given)) | {name: str(it) for name, it in parts.items()}
    tab.evaluate(
        """hash => new Promise(done => {
             addEventListener('hashchange', () => setTimeout(done, 0), { once: true });
             location.hash = hash;
           })""",
        urllib.parse.urlencode(held) + "&" * (1 + next(CHANGES)),  # so that it differs
    )


def words(tab, position):
    return tab.locator(f"#word-{position}")


def reading(tab):
    """What stands below the picture: the two tokens, and the number of every step."""
    numbers = {
        cell.get_attribute("data-step"): value(cell.locator("b").text_content())
        for cell in tab.locator("#reading [data-step]").all()
    }
    return tab.locator("#reading bdi").all_text_contents(), numbers


def says(tab, trace, head, row, column):
    tokens, numbers = reading(tab)
    assert tokens == [trace.queries[row], trace.keys[column]]
    masked = trace["masked"][0, head, row, column].isinf().item()
    # A masked score says something only where it differs from the score before it.
    assert set(numbers) == {
        step.name for step in trace if "q k" in step.axes and (step.name != "masked" or masked)
    }
    for name, shown in numbers.items():
        assert shown == pytest.approx(trace[name][0, head, row, column].item(), rel=6e-5), name


def map_cell(tab, row, column):
    """The middle of a cell of the map, in the window."""
    return tab.evaluate(
        """([row, column]) => {
             const box = document.getElementById('picture').getBoundingClientRect();
             const it = picture.map;
             return [box.x + it.x + (column + .5) * it.cell, box.y + it.y + (row + .5) * it.cell];
           }""",
        [row, column],
    )


def texts(tab):
    """Every text in the picture."""
    return tab.evaluate("picture.shapes.filter(it => it.kind === 'text').map(it => it.text)")


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
    tab.locator("#view-numbers").click()
    tab.locator("#options .stages button", has_text=name).click()


# ---- pointing, keeping, letting go -----------------------------------------------------


def test_pointing_shows_clicking_keeps_escape_lets_go(visit):
    trace = full_trace(KEYS, KEYS)
    tab = visit(trace)
    said = tab.locator("#sentence").text_content
    kept = said()
    weights = trace["dropped"][0, 0]

    def sentence(query):
        key = int(weights[query].argmax())
        weight = round(100 * weights[query, key].item())
        return f"Head 0: {KEYS[query]} looks at {KEYS[key]} ({weight} %)"

    assert kept.startswith(sentence(6))
    words(tab, 2).hover()
    assert said().startswith(sentence(2)) and said() != kept
    tab.mouse.move(2, 2)
    assert said() == kept, "what was pointed at goes again"
    words(tab, 2).click()
    tab.mouse.move(2, 2)
    assert said().startswith(sentence(2))
    assert words(tab, 2).get_attribute("aria-selected") == "true"
    tab.keyboard.press("Escape")
    assert said().endswith("on average over all queries.")
    assert tab.locator("#strip [aria-selected=true]").count() == 0


def test_pointing_at_a_head_shows_it_for_a_moment(visit):
    trace = full_trace()
    tab = visit(trace)
    tab.locator(".tile").nth(4).hover()
    assert tab.locator("#head-title").text_content() == "Head 4"
    says(tab, trace, 4, 4, int(trace["dropped"][0, 4, 4].argmax()))
    assert tab.evaluate("chosen.head") == 0
    tab.mouse.move(2, 2)
    assert tab.locator("#head-title").text_content() == "Head 0"
    tab.locator(".tile").nth(3).click()
    tab.mouse.move(2, 2)
    assert tab.locator("#head-title").text_content() == "Head 3"
    assert tab.locator("#grid [aria-checked=true]").get_attribute("data-place") == "0.3"


def test_the_words_are_shaded_by_the_weights(visit):
    trace = full_trace(KEYS, KEYS)
    tab = visit(trace)
    for key, weight in enumerate(trace["dropped"][0, 0, 6].tolist()):
        colour = words(tab, key).evaluate("it => it.style.background")
        expected = tab.evaluate("it => css(shareColour(it))", weight) if weight >= 0.01 else ""
        assert colour.replace(",", "") == expected
    blocked = "document.querySelectorAll('#strip .blocked').length"
    assert tab.evaluate(blocked) == 0
    words(tab, 2).click()
    assert tab.evaluate(blocked) == 4


def test_the_scale_is_the_same_for_every_number_of_tokens(visit):
    short, long = (visit(full_trace(["q"] * n, ["k"] * n)) for n in (3, 40))
    for weight in (0, 0.004, 0.25, 1):
        assert len({str(tab.evaluate(f"shareColour({weight})")) for tab in (short, long)}) == 1
    paper, ink = (short.evaluate(f"shareColour({it})") for it in (0, 1))
    assert sum(paper) > 700 and sum(ink) < 150


# ---- the map ------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_word_has_the_contrast_of_wcag_on_every_shade(visit, scheme):
    def luminance(colour):
        parts = np.array(colour) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    tab = visit(full_trace(["q"] * 3, ["k"] * 3), color_scheme=scheme)
    shades = tab.evaluate(
        """[...Array(401).keys()].map((i) => i / 400)
           .flatMap((x) => [shareColour(x), signedColour(2 * x - 1, 1)])
           .map((shade) => [shade, inkOn(shade)])"""
    )
    for shade, ink in shades:
        low, high = sorted((luminance(shade), {"#000000": 0.0, "#ffffff": 1.0}[ink]))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (shade, ink)


def test_hovering_a_cell_reads_its_numbers(visit):
    trace = full_trace()
    tab = visit(trace)
    tab.locator("#view-map").click()
    for row, column in ((0, 0), (0, 6), (3, 2), (4, 6)):
        tab.mouse.move(*map_cell(tab, row, column))
        says(tab, trace, 0, row, column)
        told_so = "may not look" in tab.locator("#reading").text_content()
        assert told_so == trace["masked"][0, 0, row, column].isinf().item()
    assert tab.locator("#reading").get_attribute("aria-live") == "polite"
    tab.mouse.click(*map_cell(tab, 1, 2))
    tab.mouse.move(2, 2)
    says(tab, trace, 0, 1, 2)


def test_the_map_shows_the_step_that_is_chosen(visit):
    trace = full_trace()
    tab = visit(trace)
    tab.locator("#view-map").click()
    colour = "cell => picture.shapes.find(it => it.kind === 'cells').colourOf(cell)"
    assert tab.evaluate(colour, 6) is None, "a masked cell is left to the hatching"
    tab.locator("#step").select_option("scores")
    assert tab.evaluate(colour, 6) is not None, "the scores are there before the mask"
    scores = trace["scores"][0]
    limit = scores.abs().max().item()
    for cell, score in enumerate(scores[0].flatten().tolist()):
        expected = tab.evaluate("([it, limit]) => signedColour(it, limit)", [score, limit])
        assert tab.evaluate(colour, cell) == pytest.approx(expected, abs=1)
    assert tab.evaluate("signedColour(0, 1)") == tab.evaluate("shareColour(0)"), "paper is none"


def test_the_keyboard_walks_the_picture(visit):
    trace = full_trace()
    tab = visit(trace)
    tab.locator("#view-map").click()
    tab.locator("#picture").focus()
    for press in ("Home", "ArrowUp", "ArrowUp", "ArrowRight"):
        tab.keyboard.press(press)
    says(tab, trace, 0, 2, 1)
    tab.keyboard.press("End")
    tab.keyboard.press("ArrowRight")
    says(tab, trace, 0, 2, 6)
    tab.locator("#grid [tabindex='0']").focus()
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("document.activeElement.dataset.place") == "0.1"
    assert tab.evaluate("chosen.head") == 1
    tab.locator("#strip").focus()
    tab.keyboard.press("Home")
    assert tab.evaluate("chosen.query") == 0
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#strip").get_attribute("aria-activedescendant") == "word-1"


def test_the_tab_key_reaches_everything(visit):
    tab = visit(full_trace())
    reached = []
    for _ in range(25):
        tab.keyboard.press("Tab")
        reached.append(
            tab.evaluate("document.activeElement.id || document.activeElement.className")
        )
    order = ["theme", "strip", "view-text", "beside", "whatif", "picture"]
    assert [name for name in reached if name in order][: len(order)] == order
    assert any("tile" in name for name in reached)


# ---- the address --------------------------------------------------------------------


def test_the_address_says_what_is_chosen_and_restores_it(visit):
    trace = full_trace(KEYS, KEYS)
    tab = visit(trace)
    tab.locator(".tile").nth(2).click()
    words(tab, 3).click()
    tab.locator("#view-lines").click()
    tab.mouse.move(2, 2)
    hash = tab.evaluate("location.hash")
    assert hash == "#layer=0&head=2&query=she&view=lines"
    again = visit(trace, hash=hash)
    chosen = "(({view, layer, head, query}) => [view, layer, head, query])(chosen)"
    assert again.evaluate(chosen) == tab.evaluate(chosen) == ["lines", 0, 2, 3]
    assert again.locator("#sentence").text_content() == tab.locator("#sentence").text_content()


MISREAD = {
    "#layer=99&head=1&query=99": "layer 99, head 1; query “99”",
    "#head=99": "head 99",
    "#layer=0&head=-1&key=7.5": "layer 0, head -1; key “7.5”",
    "#query=nobody&view=nothing": "query “nobody”; view “nothing”",
    "#with=9.9,0.1&edits={": "heads 9.9 beside; edits (not JSON)",
    "#step=guesses&text=another": "step “guesses”; another text",
    "#edits=%7B%22temperature%22%3A2%7D": "edits (temperature)",  # a trace has no model
    "#nonsense": "“nonsense”",
    "#heads=3": "“heads”",
    "?head=0": "“?head=0” (write # for ?)",
    "#picture-pane": None,
    "#&&=": None,
    "#head=0&query=none&with=&view=map": None,
}


@pytest.mark.parametrize("hash", MISREAD)
def test_an_address_says_what_of_it_the_page_does_not_have(visit, hash):
    tab = visit(full_trace(), hash=hash)
    assert tab.locator("#sentence").text_content() != ""
    assert tab.evaluate("picture.shapes.length") > 0
    note, asked = tab.locator("#misread"), MISREAD[hash]
    assert note.is_visible() == (asked is not None)
    if asked is not None:
        told = "This page does not have these parts of the address: "
        assert note.text_content() == f"{told}{asked}. It shows head 0."
        tab.evaluate("go({ head: 1 })")
        assert not note.is_visible()


def test_an_address_that_changes_is_followed_or_refused(visit):
    tab = visit(full_trace(), hash="#head=1")
    for hash, head, is_refused in (
        ("#head=2", 2, False),
        ("#head=77", 2, True),
        ("#head=0", 0, False),
    ):
        tab.evaluate(
            """hash => new Promise(done => {
                 addEventListener('hashchange', () => setTimeout(done, 0), { once: true });
                 location.hash = hash;
               })""",
            hash,
        )
        assert tab.evaluate("chosen.head") == head
        assert tab.locator("#misread").is_visible() == is_refused


def test_a_page_opens_at_the_requested_query(visit):
    assert visit(full_trace()).evaluate("chosen.query") == 4
    assert visit(full_trace(), query=1).evaluate("chosen.query") == 1
    assert visit(full_trace(), query=-1).evaluate("chosen.query") == 4
    with pytest.raises(BadValue, match="Query 5 was requested"):
        page(full_trace(), query=5)


@pytest.mark.parametrize(("make", "other"), [(page, torch.ones(2)), (report_page, full_trace())])
def test_other_types_are_refused(make, other):
    with pytest.raises(BadType, match="got a T"):
        make(other)


# ---- lines --------------------------------------------------------------------------


def lines(tab):
    """Query, key and weight of every line, and how strongly it is drawn."""
    return tab.evaluate(
        """picture.shapes.filter(it => it.kind === 'path' && it.weight !== undefined)
             .map(it => [it.query, it.key, it.weight, it.opacity])"""
    )


def test_every_query_has_its_lines_from_the_threshold_on(visit):
    trace = full_trace()
    tab = visit(trace)
    tab.locator("#view-lines").click()
    tab.keyboard.press("Escape")
    weights = trace["dropped"][0, 0]
    for threshold in (0.05, 0.31):
        tab.locator("#threshold").fill(str(threshold))
        expected = {tuple(it) for it in (weights >= threshold).nonzero().tolist()}
        drawn = lines(tab)
        assert {(query, key) for query, key, *_ in drawn} == expected
        for query, key, weight, _ in drawn:
            assert weight == pytest.approx(weights[query, key].item(), rel=1e-6)


def test_pointing_at_a_word_isolates_its_lines(visit):
    tab = visit(full_trace())
    tab.locator("#view-lines").click()
    address(tab, query=2)
    strong = {query for query, *_, opacity in lines(tab) if opacity > 0.3}
    faint = {query for query, *_, opacity in lines(tab) if opacity < 0.2}
    assert strong == {2} and faint == {0, 1, 3, 4}


def test_no_weight_under_one_percent_has_a_line(visit):
    weights = torch.tensor([[1e-13, 0.009, 0.991 - 1e-13], [0.5, 0.5, 0.0]])
    tab = visit(Trace((Step("weights", "softmax", "Shares.", "q k", weights),)))
    tab.locator("#view-lines").click()
    tab.locator("#threshold").fill("0.01")
    assert sorted((q, k) for q, k, *_ in lines(tab)) == [(0, 2), (1, 0), (1, 1)]


# ---- several heads --------------------------------------------------------------------


def test_two_heads_stand_side_by_side_and_as_a_difference(visit):
    trace = full_trace()
    tab = visit(trace)
    tab.locator("#view-map").click()
    tab.locator("#beside").click()
    tab.locator(".tile").nth(3).click()
    assert tab.evaluate("[chosen.head, chosen.others]") == [0, [[0, 3]]]
    tab.mouse.move(2, 2)
    assert tab.evaluate("picture.shapes.filter(it => it.kind === 'cells').length") == 2
    assert {"head 0", "head 3"} <= set(texts(tab))
    tab.locator("#difference").click()
    assert "head 3 minus head 0" in texts(tab)
    difference = trace["weights"][0, 3] - trace["weights"][0, 0]
    shown = tab.evaluate("[...picture.map.values]")
    assert shown == pytest.approx(difference.flatten().tolist(), abs=1e-6)
    assert "with=0.3" in tab.evaluate("location.hash")
    tab.keyboard.press("Escape")
    for _ in range(2):
        tab.keyboard.press("Escape")
    assert tab.evaluate("chosen.others") == []


@pytest.mark.parametrize("view", ["lines", "map", "text"])
def test_no_name_has_the_colour_of_a_side_in_a_difference(visit, view):
    """There the colours say more and less, and that of a side is nearly that of one of these."""
    tab = visit(full_trace(), hash=f"#with=0.1&view={view}")
    inked = """picture.shapes.filter((it) => it.kind === "text" &&
                 [0, 1].map(sideColour).includes(it.fill)).map((it) => it.text)"""
    assert tab.evaluate(inked) == ["head 0", "head 1"]
    tab.locator("#difference").click()
    assert tab.evaluate(inked) == []
    assert any(text.startswith("head 1 minus head 0") for text in texts(tab))


# ---- numbers ------------------------------------------------------------------------


def test_stepping_through_every_step(visit):
    trace = full_trace()
    tab = visit(trace)
    tab.locator("#view-numbers").click()
    tab.locator("#panel").focus()
    tab.keyboard.press("Home")
    for number, step in enumerate(trace, 1):
        panel = tab.locator("#panel")
        assert panel.locator("h3").text_content() == f"{number}{step.name}"
        assert panel.locator(".formula").text_content() == step.formula
        assert panel.locator(".why").text_content() == step.why
        assert panel.locator(".shape b").all_text_contents() == [str(n) for n in step.shape]
        assert panel.locator("tbody tr").count() > 0
        pressed = tab.locator("#options [aria-pressed=true]").text_content()
        assert pressed == f"{number}{step.name}"
        tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowLeft")
    assert tab.locator("#panel article").get_attribute("data-step") == "dropped"


def test_a_dot_product_is_written_out_product_by_product(visit):
    trace = full_trace()
    tab = visit(trace)
    open_step(tab, "scores")
    address(tab, head=4, query=3, key=5)  # query head 4 of 6 reads key head 1 of 2
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
    open_step(tab, "weights")
    address(tab, head=1, query=2)
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
    open_step(tab, "output")
    address(tab, head=5)
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
    for name, sign in (("scaled", " × 0.5 = "), ("capped", ": 3 × tanh(")):
        open_step(tab, name)
        address(tab, key=0)
        line = tab.locator("#panel .sum").text_content()
        assert sign in line
        assert value(line.split("=")[1]) == pytest.approx(trace[name][0, 0, 4, 0].item(), abs=6e-5)


def test_a_query_that_may_see_nothing_says_so(visit):
    masked = torch.tensor([[-math.inf, -math.inf], [0.0, 0.0]])
    steps = (
        Step("masked", "x or −∞", "Blocked.", "q k", masked),
        Step("weights", "softmax", "Shares.", "q k", torch.tensor([[0.0, 0.0], [0.5, 0.5]])),
    )
    tab = visit(Trace(steps), query=0)
    assert "is fully masked" in tab.locator("#sentence").text_content()
    open_step(tab, "weights")
    assert "is fully masked" in tab.locator("#panel").text_content()
    tab.locator("#view-lines").click()
    assert [it for it in lines(tab) if it[0] == 0] == []


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


# ---- the walk -----------------------------------------------------------------------


def test_the_numbers_of_the_walk_are_those_of_the_trace(visit):
    trace = full_trace()
    tab = visit(trace)
    tab.locator("#view-walk").click()
    for _ in range(12):
        tab.locator("#back").click()
    seen = []
    for _ in range(11):
        name = texts(tab)[0].split()[1]
        seen.append(name)
        if "q k" in trace.step(name).axes:
            shown = [text for text in texts(tab) if re.fullmatch(r"[−\d.e∞]+", text)][:7]
            exact = trace[name][0, 0, 4].tolist()
            assert [value(it) for it in shown] == pytest.approx(exact, abs=6e-5), name
        tab.locator("#forth").click()
    assert seen == [
        "query", "key", "scores", "scaled", "capped", "biased", "masked", "weights", "dropped",
        "value", "output",
    ]  # fmt: skip


def test_the_walk_plays_pauses_and_ends(visit):
    tab = visit(full_trace(), reduced_motion="no-preference")
    tab.locator("#view-walk").click()
    tab.locator("#speed").select_option("2")
    tab.wait_for_function("() => walk.at > 1.1")
    tab.locator("#play").click()
    assert tab.locator("#play").text_content() == "Play"
    stopped = tab.evaluate("walk.at")
    tab.wait_for_timeout(100)
    assert tab.evaluate("walk.at") == stopped < 11
    tab.locator("#scrub").fill("10.9")
    tab.locator("#play").click()
    tab.wait_for_function("() => walk.at === 11 && !walk.isPlaying")
    assert tab.locator("#play").text_content() == "Play"


def test_with_reduced_motion_nothing_moves_within_a_stage(visit):
    tab = visit(full_trace())
    tab.locator("#view-walk").click()
    assert not tab.evaluate("walk.isPlaying")
    shapes = []
    for at in ("2.2", "2.8", "3.2"):
        tab.locator("#scrub").fill(at)
        shapes.append(tab.evaluate("JSON.stringify(picture.shapes)"))
    assert shapes[0] == shapes[1] != shapes[2]


# ---- what cannot be changed, and what is saved ----------------------------------------


def test_a_file_without_its_model_says_why_nothing_can_be_changed(visit):
    tab = visit(full_trace())
    tab.locator("#whatif").click()
    assert "has numbers, but not the model" in tab.locator("#edit-why").text_content()
    controls = tab.locator("#controls input, #controls button").all()
    assert len(controls) > 6 and all(it.is_disabled() for it in controls)
    assert tab.locator("#text").is_hidden()


@pytest.mark.parametrize("view", ["text", "lines", "map", "walk"])
def test_the_picture_is_saved_as_svg_and_png(visit, view):
    tab = visit(full_trace())
    tab.locator(f"#view-{view}").click()
    for kind in ("svg", "png"):
        tab.locator("#save summary").click()
        with tab.expect_download() as saved:
            tab.locator(f"[data-save={kind}]").click()
        data = saved.value.path().read_bytes()
        assert saved.value.suggested_filename == f"attention-0.0-4-{view}.{kind}"
        if kind == "svg":
            svg = ElementTree.fromstring(data)
            held = {it.text for it in svg.iter("{http://www.w3.org/2000/svg}text")}
            assert set(texts(tab)) <= held and len(texts(tab)) > 3
            assert not [it for it in svg.iter() if "NaN" in str(it.attrib)]
        else:
            pixels = matplotlib.image.imread(io.BytesIO(data))
            assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 9, "one colour"


def test_the_numbers_are_saved_as_csv(visit):
    trace = full_trace(["=1+1", *QUERIES[1:]])
    tab = visit(trace)
    tab.keyboard.press("Escape")
    tab.locator("#save summary").click()
    with tab.expect_download() as saved:
        tab.locator("[data-save=csv]").click()
    table = list(csv.DictReader(io.StringIO(saved.value.path().read_text(encoding="utf-8"))))
    assert len(table) == 35
    assert table[0]["query"] == "'=1+1", "a spreadsheet must not compute it"
    shown = torch.tensor([float(line["value"]) for line in table]).view(5, 7)
    torch.testing.assert_close(shown, trace["weights"][0, 0])


@pytest.mark.parametrize(
    ("view", "picture", "numbers", "rows"),
    [
        ("text", "Picture", "This query's weights", 7),
        ("numbers", "Map", "This query's weights", 7),
        ("map", "Picture", "All scores", 35),
    ],
)
def test_the_menu_says_what_is_saved(visit, view, picture, numbers, rows):
    tab = visit(full_trace(), hash=f"#query=1&step=scores&view={view}")
    tab.locator("#save summary").click()
    entry = tab.locator("[data-save=csv]")
    entry.get_by_text(f"{numbers} (CSV)").wait_for()
    assert tab.locator("[data-save=png]").text_content() == f"{picture} (PNG)"
    with tab.expect_download() as saved:
        entry.click()
    name = "all" if rows == 35 else "1"
    assert saved.value.suggested_filename == f"attention-0.0-{name}-{view}.csv"
    table = list(csv.DictReader(io.StringIO(saved.value.path().read_text(encoding="utf-8"))))
    assert len(table) == rows


def test_the_words_of_the_legend_of_lines_do_not_lie_on_each_other(visit):
    tab = visit(full_trace(), hash="#with=0.1&difference=1&view=lines")
    boxes = tab.evaluate(
        """picture.shapes.filter((it) => it.kind === "text" && it.y === picture.height - 16)
             .map((it) => [it.x, it.x + widthOf(it.text, it)])"""
    )
    assert len(boxes) == 3
    assert all(a[1] < b[0] for a, b in itertools.pairwise(boxes))


@pytest.mark.parametrize("height", [600, 720])
def test_the_words_beside_a_map_do_not_lie_on_its_legend(visit, height):
    tab = visit(
        full_trace(), hash="#view=map&query=there", viewport={"width": 1280, "height": height}
    )
    tab.locator("#whatif").click()
    boxes = tab.evaluate(
        """picture.shapes.filter((it) => it.kind === "text" && !it.turn).map((it) => {
             const wide = widthOf(it.text, it), half = it.size / 2;
             const x = it.x - { left: 0, center: 0.5, right: 1 }[it.align] * wide;
             return [it.text, x, x + wide, it.y - half, it.y + half];
           })"""
    )
    [legend] = [box for box in boxes if box[0] == "may not look"]
    assert any(text == "there looks at" for text, *_ in boxes)
    for text, left, right, top, bottom in boxes:
        beside = right < legend[1] - 24 or left > legend[2] or bottom < legend[3] or top > legend[4]
        assert beside or text == "may not look", text


# ---- texts of every kind --------------------------------------------------------------


def test_hostile_text_is_only_text(visit):
    trace = full_trace(HOSTILE, HOSTILE, about=HOSTILE[1])
    tab = visit(trace, title="".join(HOSTILE[:6]), note=HOSTILE[1])
    assert tab.locator("h1").text_content().startswith("</script><script>alert(1)")
    for view in ("text", "lines", "map", "numbers", "walk"):
        tab.locator(f"#view-{view}").click()
        assert tab.locator("img").count() == tab.locator("main script, header script").count() == 0
        for at in range(len(HOSTILE)):
            words(tab, at).click()
            tab.mouse.move(2, 2)
            shown, _ = reading(tab)
            whole = visible(HOSTILE[at])
            assert shown[0] == (whole if len(whole) <= 24 else whole[:24] + "…")
    long = words(tab, HOSTILE.index("x" * 10_000)).locator("bdi")
    assert long.get_attribute("title") == "x" * 10_000
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
    tab.locator("#view-map").click()
    assert tab.evaluate("[picture.map.rows, picture.map.columns]") == [156, 175]
    exact = trace["weights"][0, 0, 200:202, 150:153].max().item()
    assert tab.evaluate("picture.map.values[100 * 175 + 50]") == pytest.approx(exact, rel=1e-5)
    for view in ("text", "lines", "numbers", "walk"):
        tab.locator(f"#view-{view}").click()
        tab.locator("#strip").focus()
        tab.keyboard.press("ArrowLeft")
    assert tab.evaluate("chosen.query") < 310


def test_a_lone_matrix_without_heads_or_tokens(visit):
    weights = torch.tensor([[1.0, 0.0, math.nan], [0.25, 0.5, 0.25]])
    tab = visit(Trace((Step("weights", "softmax", "Shares.", "q k", weights),)))
    tab.locator("#view-map").click()
    tab.mouse.move(*map_cell(tab, 1, 1))
    assert reading(tab) == (["1", "1"], {"weights": 0.5})
    assert tab.locator("#grid").is_hidden()
    assert "NaN" in texts(tab)
    for view in ("text", "lines", "numbers", "walk"):
        tab.locator(f"#view-{view}").click()


def test_light_and_dark(visit):
    tab = visit(full_trace(), color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert tab.evaluate(paper) == "rgb(20, 22, 25)" == tab.evaluate("inked('paper')")
    tab.locator("#theme").click()
    assert tab.evaluate(paper) == "rgb(252, 251, 248)" == tab.evaluate("inked('paper')")
    assert tab.locator("#theme").text_content() == "Dark"


def test_printing_shows_every_step(visit):
    tab = visit(full_trace(), color_scheme="dark")
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("#panel article").count() == 12
    assert tab.locator("#views").is_hidden()
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    tab.emulate_media(media="screen")
    assert tab.locator("#panel").is_hidden()


SCROLLS = """[...document.querySelectorAll('.pane, .view, .view *')].some(it =>
    it.scrollHeight > it.clientHeight + 1 && /auto|scroll/.test(getComputedStyle(it).overflowY))"""


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (1400, 1000), (360, 700)])
def test_it_is_one_screen_and_never_scrolls_sideways(visit, width, height):
    """A phone scrolls the page downwards, and no part of it; the picture is on its first screen."""
    tab = visit(full_trace(), viewport={"width": width, "height": height})
    for view in ("text", "lines", "map", "numbers", "walk"):
        tab.evaluate("view => chooseView(view)", view)
        across, down = tab.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        )
        assert across == width, view
        if width > 800:
            assert down == height, view
        else:
            assert not tab.evaluate(SCROLLS), view
            assert tab.locator("#view").bounding_box()["y"] <= 0.75 * height, view
        must_be_drawn(tab)
        if view != "numbers":
            sizes = "picture.shapes.filter(it => it.kind === 'text').map(it => it.size)"
            assert min(tab.evaluate(sizes)) >= 12


def test_without_a_script_there_is_a_table(visit):
    trace = full_trace(QUERIES, [f"k{i}" for i in range(17)])
    tab = visit(trace, java_script_enabled=False)
    table = [row.split("\t") for row in tab.locator("noscript table").inner_text().split("\n")]
    assert table[0][:2] == ["query \\ key", "k0"] and table[0][6:9] == ["k5", "…", "k11"]
    assert table[1][0] == "she" and len(table) == 6
    assert float(table[1][1]) == pytest.approx(trace["weights"][0, 0, 0, 0].item(), abs=6e-5)
    assert tab.locator("#app").is_hidden()


# ---- for everybody -------------------------------------------------------------------


def unpacked(package, folder):
    """An npm package, fetched into a folder."""
    if os.environ.get("CLEARHEAD_NO_BROWSER") == "1":
        pytest.skip(f"CLEARHEAD_NO_BROWSER=1: {package} was not fetched")
    if shutil.which("npm") is None:
        pytest.fail(
            f"The page must be checked with {package}, which npm fetches, and there is no npm. "
            "Install it, or set CLEARHEAD_NO_BROWSER=1 to leave this out."
        )
    packed = subprocess.run(
        ["npm", "pack", "--silent", package], cwd=folder, capture_output=True, text=True, timeout=90
    )
    if packed.returncode:
        pytest.fail(f"npm could not fetch {package}: {packed.stderr.strip()}")
    with tarfile.open(folder / packed.stdout.strip().splitlines()[-1]) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package"


@pytest.fixture(scope="session")
def axe(tmp_path_factory):
    """Check a tab with axe-core: no violation, of any rule."""
    script = (unpacked(AXE, tmp_path_factory.mktemp("axe")) / "axe.min.js").read_text()

    def check(tab):
        tab.evaluate(script)
        found = tab.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        assert [(it["id"], [node["html"] for node in it["nodes"]]) for it in found] == []

    return check


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 400)])
def test_axe_finds_nothing_in_the_page_of_a_trace(visit, axe, scheme, width):
    tab = visit(full_trace(), color_scheme=scheme, viewport={"width": width, "height": 900})
    for view in ("text", "lines", "map", "walk"):
        tab.evaluate("view => chooseView(view)", view)
        axe(tab)
    tab.locator("#whatif").click()
    for name in ("scores", "weights", "output"):
        tab.keyboard.press("Escape")
        open_step(tab, name)
        tab.wait_for_timeout(50)  # an observer finds what scrolls, one frame later
        axe(tab)

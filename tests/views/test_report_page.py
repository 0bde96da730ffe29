"""The page of a report, opened in a real browser: the model, a head, a query.

The visits end with the four checks of `test_page`: no request, no console, no error, no dialog.
"""

import re
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead import storyteller
from clearhead.errors import BadValue
from clearhead.report import Head, Layer, Link, Report, report
from clearhead.report.head_label import LABELS
from clearhead.results.report import EVENNESS
from clearhead.views import html
from clearhead.views.html.report import pool
from tests.report.models import AttentionCalls, normal
from tests.views.test_page import (  # fixtures, too
    HOSTILE,
    axe,  # noqa: F401
    browser,  # noqa: F401
    embedded,
    value,
    visit,  # noqa: F401
)


def toy_report(T, *, layers=3, H=4, G=2, D=5, tokens=None, mask=ch.causal):
    """A report of layers that differ; the last head of the last looks at the token before."""
    calls = [
        (3 * normal(1, H, T, D, seed=11 * i), normal(1, G, T, D, seed=11 * i + 1), {"mask": mask})
        for i in range(layers - 1)
    ]
    keys = torch.eye(T)
    back = torch.stack([60 * keys[max(i - 1, 0)] for i in range(T)])
    even = torch.zeros(H - 1, T, T)
    calls.append((torch.cat([even, back[None]])[None], keys.expand(1, G, T, T), {"mask": mask}))
    tokens = tokens or [f"t{i}" for i in range(T)]
    return report(AttentionCalls(*calls), torch.zeros(1), tokens=tokens, name="toy")


def dense_trace(T, layer, *, H=4, G=2, D=5):
    q, k = 3 * normal(1, H, T, D, seed=11 * layer), normal(1, G, T, D, seed=11 * layer + 1)
    return ch.explain(q, k, k, mask=ch.causal)


@cache
def large_report(L=12, H=12, T=512, D=64):
    """A report of the size of a real model of 144 heads."""
    layers, tokens = [], tuple(f"token{i}" for i in range(T))
    q, k = normal(1, 1, T, D), normal(1, 1, T, D, seed=5)
    trace = ch.explain(q, k, k)
    for n in range(L):
        draw = torch.Generator().manual_seed(n)
        weights, keys = (
            torch.rand(H, T, 8, generator=draw).sort(descending=True).values / 4,
            torch.randint(0, T, (H, T, 8), generator=draw),
        )
        links = [tuple(Link(50 * i, 7 * i, 0.9) for i in range(10)) for _ in range(H)]
        shares = dict.fromkeys(("previous", "next", "same", "first", "separators"), 0.123456)
        heads = tuple(
            Head(n, h, "mixed", 0.5 + h / 99, 3.0, 20.0, shares, links[h]) for h in range(H)
        )
        maps = torch.rand(H, 256, 256, generator=draw) / 256
        layers.append(
            Layer(n, "", False, tokens, tokens, "", T, H, 6.0, heads, maps,
                  torch.ones(256, 256, dtype=torch.bool),
                  torch.rand(H, T, generator=draw), tuple(range(T)), weights, keys.int(),
                  trace, (11,))
        )  # fmt: skip
    return Report("a model", tokens, tuple(layers))


# ---- without a browser ----------------------------------------------------------------


@pytest.mark.parametrize("T", [7, 61, 300, 1031])
@pytest.mark.parametrize("side", [256, 64, 16])
def test_pooling_a_map_again_gives_the_map_of_that_size(T, side):
    q, k = 3 * normal(2, T, 5), normal(2, T, 5, seed=5)
    whole = ch.look(q, k, k, mask=ch.causal, stats=[ch.map(256, 256)]).map
    small = ch.look(q, k, k, mask=ch.causal, stats=[ch.map(side, side)]).map
    torch.testing.assert_close(pool(whole, side, T), small, atol=1e-6, rtol=1e-5)


def test_a_page_is_bounded_by_pixels():
    page = html.report_page(large_report(), title="large")
    assert len(page.encode()) <= 3_000_000
    data = embedded(page)
    assert data["layers"][0]["bins"] == [64, 64]
    assert len(data["heads"]) == 144
    long = html.report_page(toy_report(2053, layers=2, H=2, G=1))
    assert len(long.encode()) < 1_000_000


def test_a_short_text_keeps_every_step():
    data = embedded(html.report_page(toy_report(11)))
    names = ["query", "key", "value", "scores", "scaled", "masked", "weights", "output"]
    assert [step["name"] for step in data["layers"][0]["steps"]] == names
    assert all(not step["kept"] for step in data["layers"][0]["steps"])


def test_no_token_can_leave_its_element():
    found = toy_report(len(HOSTILE), tokens=HOSTILE)
    document = html.report_page(found, title=HOSTILE[1], note=HOSTILE[0])
    assert document.count("<script") == document.count("</script>") == 2
    assert "<img" not in document and document.count("<!--") == 0
    frame = html.in_notebook(document)
    assert "<script" not in frame and '"' not in frame.split('srcdoc="')[1].split('" sandbox')[0]


def test_a_report_with_nothing_to_draw():
    with pytest.raises(BadValue, match="0 layers"):
        html.report_page(Report("", (), ()))


def test_without_a_script_there_is_a_table():
    found = toy_report(11)
    table = re.search(r"<table class=\"plain\">(.*?)</table>", html.report_page(found), re.S)[1]
    rows = [re.split("<t[hd]>", row)[1:] for row in table.split("<tr>")[1:]]
    assert len(rows) == 13 and rows[12][:2] == ["2, 3", "previous token"]
    assert float(rows[1][3]) == pytest.approx(found[0, 0].entropy, abs=0.005)


# ---- with a browser -------------------------------------------------------------------


def title(tab):
    return tab.locator("#one-title").text_content()


def figures(tab):
    """Key and weight of every line drawn from the query."""
    rows = tab.locator("#keys [role=option]").all()
    return {
        row.locator("bdi").text_content(): row.locator(".figure").text_content() for row in rows
    }


def test_it_opens_at_the_head_with_the_clearest_label(visit):  # noqa: F811
    tab = visit(toy_report(11))
    assert title(tab) == "Layer 2, head 3: previous token"
    assert "91% of its weight lies on the token before" in tab.locator("#one-lead").text_content()
    assert tab.locator("#grid .tile").count() == 12
    assert (
        tab.locator("#grid [aria-checked=true]")
        .get_attribute("aria-label")
        .startswith("layer 2, head 3: previous token 91%")
    )
    assert tab.locator("#shares dd").first.text_content() == "91%"


def test_a_large_page_opens_within_two_seconds(visit):  # noqa: F811
    found = large_report()
    start = time.monotonic()
    tab = visit(found)
    tab.wait_for_function("document.getElementById('one-title').textContent !== ''")
    spent = tab.evaluate("performance.now()") / 1000
    assert spent < 2, f"it took {spent:.1f} s, and {time.monotonic() - start:.1f} s with writing"
    assert tab.locator("#grid .tile").count() == 144


def test_the_keyboard_leads_from_the_model_to_a_query(visit):  # noqa: F811
    tab = visit(toy_report(11))
    tab.locator("#grid [tabindex='0']").focus()
    for press, place in (
        ("Home", "0, head 0"), ("ArrowRight", "0, head 1"), ("ArrowDown", "1, head 1"),
        ("ArrowLeft", "1, head 0"), ("ArrowUp", "0, head 0"), ("ArrowUp", "0, head 0"),
        ("End", "2, head 3"), ("ArrowUp", "1, head 3"),
    ):  # fmt: skip
        tab.keyboard.press(press)
        assert title(tab).startswith(f"Layer {place}"), press
        label = tab.evaluate("document.activeElement.getAttribute('aria-label')")
        assert label.startswith(f"layer {place}")
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "one-title"
    tab.locator("#links button").first.focus()
    tab.keyboard.press("Enter")
    tab.locator("#queries").focus()
    tab.keyboard.press("End")
    assert tab.locator("#queries [aria-selected=true]").text_content() == "t10"
    tab.locator("#tab-0").focus()
    for _ in range(3):
        tab.keyboard.press("ArrowRight")
    assert tab.locator("#panel article").get_attribute("data-step") == "scores"


def test_heads_are_filtered_and_ordered(visit):  # noqa: F811
    found = toy_report(11)
    tab = visit(found)
    tab.get_by_role("radio", name="previous token 1", exact=True).check()
    assert tab.locator("#grid .tile").count() == 1
    assert "1 head of 12" in tab.locator("#grid-note").text_content()
    tab.get_by_role("radio", name="all 12").check()
    for order, falling in (("sharp", False), ("spread", True)):
        tab.locator("#order").select_option(order)
        labels = tab.locator("#grid .tile").evaluate_all("it => it.map(x => x.ariaLabel)")
        shown = [float(label.split("entropy ")[1]) for label in labels]
        assert shown == sorted(shown, reverse=falling)
    tab.locator("#order").select_option("label")
    assert "previous token" in tab.locator("#grid .tile").first.get_attribute("aria-label")


def test_heads_that_were_measured_say_what_was_measured(visit):  # noqa: F811
    from clearhead import storyteller
    from clearhead.report import report_teller

    found = report_teller(storyteller.load(), "The cat sat because it was tired.")
    page = visit(found)
    lead = page.inner_text("#one-lead")
    assert "99% of held-out words have its largest weight on the word before" in lead
    shown = page.inner_text("#labels")
    assert all(label in shown for label in ("previous word", "subject", "antecedent"))
    assert "undefined" not in page.inner_text("body")


@pytest.mark.parametrize("T", [11, 311])
def test_the_numbers_of_a_query_are_those_of_its_head(visit, T):  # noqa: F811
    """Short: all weights. Long: the largest, and what the others are at most."""
    found = toy_report(T)
    tab = visit(found)
    tab.locator("#layer").select_option("1")
    tab.locator("#head").select_option("2")
    tab.locator("#query").select_option("7")
    row = dense_trace(T, 1)["weights"][0, 2, 7]
    shown = figures(tab)
    shown_weights = {key: value(text) for key, text in shown.items() if text[0].isdigit()}
    assert len(shown_weights) >= 7
    for key, weight in shown_weights.items():
        assert weight == pytest.approx(row[int(key[1:])].item(), abs=1e-4)
    assert max(shown_weights.values()) == pytest.approx(row.max().item(), abs=1e-4)


def test_the_map_of_a_long_text_is_pooled_and_says_so(visit):  # noqa: F811
    T = 700
    found = toy_report(T, layers=2, H=10)
    tab = visit(found)
    tab.locator("#layer").select_option("0")
    assert "8 largest weights" in tab.locator("#left-out").text_content()
    layer = embedded(html.report_page(found))["layers"][0]
    fine = next(s for s in layer["steps"] if s["name"] == "weights")["fine"]["head"]
    for head, side in ((fine, 256), ((fine + 1) % 10, 128)):
        tab.locator("#head").select_option(str(head))
        assert tab.evaluate("document.getElementById('canvas').width") == side
        tab.locator("#map").focus()
        for press in ("End", "ArrowUp", "Home"):
            tab.keyboard.press(press)
        row = tab.evaluate("state.row")
        whole = pool(found.layers[0].map[head], side, T)
        shown = value(tab.locator("#readout dd").text_content().removeprefix("≈ "))
        assert shown == pytest.approx(whole[row, 0].item(), abs=0.01 * whole.max().item())
        first, last = row * T // side, (row + 1) * T // side - 1
        tokens = tab.locator("#readout bdi").all_text_contents()
        assert tokens[0] == f"t{first}" and (last == first or tokens[1] == f"t{last}")


def test_of_a_longer_text_one_head_a_layer_keeps_its_steps(visit):  # noqa: F811
    T = 90
    found = toy_report(T, layers=2, D=64, H=8, G=2)
    assert len(found.layers[0].traced_heads) == 1
    tab = visit(found)
    tab.locator("#layer").select_option("0")
    [head] = found.layers[0].traced_heads
    tab.locator("#head").select_option(str((head + 1) % 8))
    tab.locator("#tabs button", has_text="scores").click()
    assert "too long to keep every step" in tab.locator("#panel").text_content()
    tab.locator("#panel").get_by_role("button", name=f"Go to head {head}").click()
    assert title(tab).startswith(f"Layer 0, head {head}")
    query, key = tab.evaluate("[state.query, trace.steps.find(s => s.name === 'key').kept.k[0]]")
    tab.locator("#key").select_option(str(key))
    exact = dense_trace(T, 0, H=8, G=2, D=64)["scores"][0, head, query, key].item()
    written = tab.locator("#panel .sum").text_content()
    assert value(written.split("=")[1]) == pytest.approx(exact, abs=6e-4)


def test_another_layer_keeps_the_place(visit):  # noqa: F811
    tab = visit(toy_report(11))
    tab.locator("#layer").select_option("0")
    tab.locator("#head").select_option("1")
    tab.locator("#query").select_option("9")
    tab.locator("#layer").select_option("1")
    assert title(tab).startswith("Layer 1, head 1")
    assert tab.locator("#query").input_value() == "9"
    shown = [value(text) for text in figures(tab).values() if text != "masked"]
    assert shown == pytest.approx(dense_trace(11, 1)["weights"][0, 1, 9, :10].tolist(), abs=6e-5)


def test_hostile_text_is_only_text(visit):  # noqa: F811
    tab = visit(
        toy_report(len(HOSTILE), tokens=HOSTILE), title="".join(HOSTILE[:6]), note=HOSTILE[1]
    )
    assert tab.locator("img").count() == tab.locator("main script").count() == 0
    for tile in tab.locator("#grid .tile").all():
        tile.click()
    wide = tab.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1]


def test_printing_shows_every_head(visit):  # noqa: F811
    tab = visit(toy_report(11), viewport={"width": 1200, "height": 200})
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate("pageData.heads.every(it => it.tile.painted)")
    assert tab.locator("#labels").is_hidden() and tab.locator("#order").is_hidden()


def test_a_narrow_screen_never_scrolls_sideways(visit):  # noqa: F811
    tab = visit(toy_report(41, H=16), viewport={"width": 360, "height": 700})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize(
    ("scheme", "T", "width"), [("light", 11, 1200), ("dark", 41, 400), ("dark", 600, 1200)]
)
def test_axe_finds_nothing(visit, axe, scheme, T, width):  # noqa: F811
    tab = visit(toy_report(T), color_scheme=scheme, viewport={"width": width, "height": 900})
    tab.locator("summary").click()
    tab.wait_for_timeout(100)  # an observer finds what scrolls, one frame later
    axe(tab)


def test_a_notebook_shows_the_same_page_in_a_frame(browser, tmp_path):  # noqa: F811
    """The frame has no origin of its own, and its script still runs."""
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><title>notebook</title>{toy_report(11)._repr_html_()}")
    tab, happened = browser.new_page(), []
    tab.on("console", lambda it: happened.append(it.text))
    tab.on("pageerror", lambda it: happened.append(str(it)))
    tab.goto(path.as_uri())
    frame = tab.frame_locator("iframe")
    assert frame.locator("#one-title").text_content() == "Layer 2, head 3: previous token"
    frame.locator("#layer").select_option("0")
    assert frame.locator("#one-title").text_content().startswith("Layer 0")
    assert happened == []
    tab.close()


def test_a_text_of_many_thousand_tokens_stays_quick(visit):  # noqa: F811
    found = toy_report(40, layers=2)
    T = 32_768
    tokens = tuple(f"token{i}" for i in range(T))
    kept = tuple(range(0, T, 64))
    layers = tuple(
        Layer(x.number, "", False, tokens, tokens, "", T, 2, 9.0,
              tuple(_spread(head) for head in x.heads), x.map,
              x.allowed, torch.rand(4, T), kept, torch.rand(4, 512, 8) / 8,
              torch.randint(0, T, (4, 512, 8)).int())
        for x in found.layers
    )  # fmt: skip
    tab = visit(Report("long", tokens, layers))
    took = "(() => { const start = performance.now(); go(%s); return performance.now() - start })()"
    for change in ("{layer: 0}", "{key: 30001}", "{query: 640}"):
        assert tab.evaluate(took % change) < 1000, change
    assert tab.locator("#key").evaluate("it => it.selectedOptions[0].text") == "30001 · token30001"
    assert tab.locator("#key option").count() <= 2050
    rows = figures(tab)
    assert rows["token30001"].startswith("≤ ") and 8 <= len(rows) <= 9


def _spread(head):
    return replace(head, links=tuple(replace(x, query=64 * x.query) for x in head.links))


def test_the_page_knows_what_every_label_and_share_means():
    script = (Path(ch.__file__).parent / "views" / "page" / "report.js").read_text()

    def keys(name: str) -> set[str]:
        body = re.search(rf"const {name} = {{(.*?)\n}};", script, re.DOTALL)[1]
        return {quoted or bare for quoted, bare in re.findall(r'(?:"([^"]+)"|(\w+)): "', body)}

    assert keys("MEANS") == {*LABELS.values(), *EVENNESS, *storyteller.storyteller.WORDS_OF}
    assert keys("SHARES") == set(LABELS)

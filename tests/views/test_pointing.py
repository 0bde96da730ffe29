"""The page under the pointer, for texts and models larger than a lesson: pointing moves nothing, a
click selects what is below it, and what the page has is exact."""

from functools import cache

import pytest

import clearhead as ch
from clearhead.hf import Checkpoint
from clearhead.models.report.opening import best_heads, opening
from clearhead.views import html
from clearhead.views.html.report import FILE, SMALL, snapshot
from tests.views.browser import free_tab, must_be_drawn, put_back
from tests.views.serve.models import save_gpt2, words
from tests.views.test_report_page import toy_report

SIZES = [(1400, 1000), (1280, 720), (390, 844)]
LENGTHS = [60, 340]

# The boxes of what must not move: panes, the heads, the words, the picture.
BOXES = """() => [...document.querySelectorAll('.pane, .tile, .word, #strip, #view, #reading')]
  .map((it) => it.getBoundingClientRect()).map((it) => [it.x, it.y, it.width, it.height])"""
IN_SIGHT = """(kind) => [...document.querySelectorAll(kind)].filter((it) => {
  const { x, y, width, height } = it.getBoundingClientRect();
  return it.contains(document.elementFromPoint(x + width / 2, y + height / 2));
}).map((it) => it.dataset.place ?? it.id)"""


@cache
def report_on(folder, T):
    model = Checkpoint(save_gpt2(folder, layers=13, heads=5, longest=512, predicts=True))
    return ch.report(model, words(T), next_token=True, progress=False)


@pytest.fixture(scope="module", params=LENGTHS)
def long_report(request, tmp_path_factory):
    return report_on(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def path(long_report, tmp_path_factory):
    return html.write_report(long_report, tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(params=SIZES, ids=str)
def tab(browser, path, request):
    width, height = request.param
    opened = free_tab(browser, viewport={"width": width, "height": height})
    opened.goto(path.as_uri())
    must_be_drawn(opened)
    yield opened
    put_back(opened)


def box_center(tab, selector):
    box = tab.locator(selector).bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_pointing_at_a_head_moves_nothing_and_a_click_selects_it(tab, every):
    def show_heads():
        tab.evaluate("byId('panes').scrollTo(9999, 0)")  # on a narrow screen

    show_heads()
    places = tab.evaluate(IN_SIGHT, ".tile")
    assert len(places) >= 10
    for place in places[::every]:
        tab.mouse.move(2, 2)
        show_heads()
        before = tab.evaluate(BOXES)
        x, y = box_center(tab, f"[data-place='{place}']")
        tab.mouse.move(x - 2, y)
        tab.mouse.move(x, y)
        assert tab.evaluate(BOXES) == before, place
        tab.mouse.down()
        tab.mouse.up()
        assert tab.evaluate("`${chosen.layer}.${chosen.head}`") == place


def test_compare_adds_the_head_that_is_clicked_and_no_other(tab):
    tab.evaluate("go({ layer: 0, head: 0 })")
    tab.locator("#beside").click()
    tab.evaluate("byId('panes').scrollTo(9999, 0)")
    places = [x for x in tab.evaluate(IN_SIGHT, ".tile") if x != "0.0"][::17][:4]
    assert len(places) >= 1
    for number, place in enumerate(places, 1):
        tab.evaluate("byId('panes').scrollTo(9999, 0)")
        tab.mouse.move(*box_center(tab, f"[data-place='{place}']"))
        tab.mouse.down()
        tab.mouse.up()
        added = tab.evaluate("chosen.others.map((it) => it.join('.'))")
        assert (
            added == places[:number] and tab.evaluate("`${chosen.layer}.${chosen.head}`") == "0.0"
        )
    tab.locator("#beside").click()


@pytest.mark.timeout(120)
def test_pointing_at_a_word_moves_nothing_and_a_click_selects_it(tab):
    ids = tab.evaluate(IN_SIGHT, ".word")
    if tab.viewport_size["width"] == 390:
        assert not ids  # the picture has the words
        return
    assert len(ids) >= 5
    for word in ids[::7]:
        tab.mouse.move(2, 2)
        before = tab.evaluate(BOXES)
        tab.mouse.move(*box_center(tab, f"#{word}"))
        assert tab.evaluate(BOXES) == before, word
        tab.mouse.down()
        tab.mouse.up()
        assert tab.evaluate("`word-${chosen.query}`") == word


def test_the_picture_stays_while_the_pointer_is_in_it(tab):
    targets = "picture.targets.filter((it) => it.changes?.query > 0 && it.changes.key === null)"
    begin = tab.evaluate("({ ...chosen })")
    words = tab.evaluate(f"{targets}.map((it) => [it.x, it.y, it.width, it.height])")
    for x, y, width, height in words[:: max(1, len(words) // 8)]:
        tab.evaluate("(begin) => go(begin)", begin)
        x0, y0 = (tab.locator("#picture").bounding_box()[name] for name in "xy")
        if y0 + y + height > tab.viewport_size["height"]:
            break
        tab.mouse.move(x0 + x + width / 2, y0 + y + height / 2)
        now = tab.evaluate(f"{targets}.map((it) => [it.x, it.y, it.width, it.height])")
        assert now == words
        query = tab.evaluate("pointed.query")
        tab.mouse.down()
        tab.mouse.up()
        assert tab.evaluate("chosen.query") == query
        tab.mouse.move(2, 2)


def test_a_word_without_stored_numbers_says_so(browser, long_report, tmp_path):
    few = SMALL._replace(all_steps=0, steps=0, largest=30_000)  # the 3 largest of some 25 queries
    path = tmp_path / "page.html"
    path.write_text(html.report_page(long_report, budget=few), encoding="utf-8")
    tab = free_tab(browser)
    tab.goto(path.as_uri())
    must_be_drawn(tab)
    query = tab.evaluate("shownTrace().queries.findIndex((_, i) => !shownTrace().isStored(0, i))")
    tab.evaluate("(query) => go({ head: 0, query, key: null })", query)
    assert tab.evaluate("chosen.query") == query >= 0
    sentence = tab.locator("#sentence").inner_text()
    word = long_report.tokens[query]
    assert f"{word}: the page does not have the weights of this token." in sentence
    put_back(tab)


def test_the_steps_that_the_page_computes_are_those_of_the_model(browser, path, long_report):
    tab = free_tab(browser)
    tab.goto(path.as_uri())
    must_be_drawn(tab)
    layer = max(long_report.layers, key=lambda x: len(x.traced_heads))
    for index, head in list(enumerate(layer.traced_heads))[-2:]:
        for step in layer.trace:
            if step.name in ("key", "value"):
                continue
            free = {"query": "d", "output": "v"}.get(step.name, "k")
            row = tab.evaluate(
                f"current.layer({layer.number}).step('{step.name}')"
                f".along('{free}', current.layer({layer.number}).at({head}, 41, 0))"
                ".map((x) => (x === -Infinity ? -1e9 : x))"
            )
            expected = step.tensor[0, index, 41].double().clamp(min=-1e9).tolist()
            assert row == pytest.approx(expected, rel=1e-4, abs=1e-6), step.name
    put_back(tab)


def test_a_file_of_a_longer_text_has_every_step_where_it_opens():
    report = toy_report(340, H=6, sharp=2000)
    page, begin = snapshot(report, FILE), opening(report).head
    best = best_heads(report)["previous token"]
    assert (begin.layer, begin.head) == (best.layer, best.head) == (2, 5)
    layer = report.layers[2]
    assert set(layer.traced_heads) < set(range(6)) and 5 in layer.traced_heads
    steps = {step["name"]: step for step in page["layers"][2]["steps"]}
    assert {"query", "key", "value", "scores", "weights", "output"} <= steps.keys()
    assert 5 in steps["weights"]["kept"]["h"]

"""The page in a browser: drawings have room, and do not overlap."""

import pytest
import torch

import clearhead as ch
from clearhead import demo as storyteller
from clearhead.views import html
from clearhead.views.html.report import SMALL
from tests.views.browser import PLAIN_NAMES, free_tab, must_be_drawn, put_back
from tests.views.test_live import STORY
from tests.views.test_report_page import toy_report

SIZES = [(1280, 720), (1400, 1000)]

# Points of every arc that are inside the letters of a word.
CROSSINGS = """() => {
  const words = picture.shapes.filter((it) => it.kind === 'text' && it.serif &&
    it.align === 'center');
  const boxes = words.map((it) => {
    const half = widthOf(it.text, it) / 2, high = 0.4 * it.size;
    return [it.x - half, it.x + half, it.y - high, it.y + high];
  });
  const arcs = picture.shapes.filter((it) => it.kind === 'path'), inside = [];
  for (const arc of arcs) {
    const path = document.createElementNS('http://www.w3.org/2000/svg', 'path');
    path.setAttribute('d', arc.d);
    for (let at = 0; at <= path.getTotalLength(); at += 2) {
      const { x, y } = path.getPointAtLength(at), wide = arc.line / 2;
      boxes.forEach(([left, right, top, end], i) => {
        const isInside = x + wide > left && x - wide < right && y + wide > top && y - wide < end;
        if (isInside) inside.push(words[i].text);
      });
    }
  }
  return [arcs.length, [...new Set(inside)]];
}"""


@pytest.fixture(scope="module")
def tab(browser, tmp_path_factory):
    """The page of the storyteller, for all tests of this file."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    html.write_report(ch.report(storyteller.load(), STORY, effects=True, progress=False), path)
    opened = free_tab(browser)
    opened.goto(path.as_uri())
    must_be_drawn(opened)
    yield opened
    put_back(opened)


@pytest.mark.parametrize("width", [1280, 900, 390])
def test_no_arc_crosses_a_word(tab, width):
    tab.set_viewport_size({"width": width, "height": 800})
    drawn = 0
    for head, query in ((0, 29), (2, 21), (7, 26), (3, 30), (7, 14), (1, 30), (4, 12), (6, 30)):
        tab.evaluate(
            f"go({{ view: 'text', layer: 0, head: {head}, query: {query}, key: null, others: [] }})"
        )
        arcs, crossed = tab.evaluate(CROSSINGS)
        assert not crossed, (head, query)
        drawn += arcs
    assert drawn >= 10


def test_arcs_between_lines_are_arrows_of_a_tenth_or_more(tab):
    """Faint lines around other words would look like frames."""
    tab.set_viewport_size({"width": 390, "height": 844})
    wrapped = []
    for head in range(8):
        tab.evaluate(
            f"go({{ view: 'text', layer: 0, head: {head}, query: 29, key: null, others: [] }})"
        )
        wrapped += tab.evaluate(
            """picture.shapes.filter((it) => it.kind === 'path' && it.d.includes('L'))
                 .map((it) => [it.weight, it.d.split('M').length - 1])"""
        )
    assert len(wrapped) >= 3
    assert all(weight >= 0.1 and parts == 2 for weight, parts in wrapped)


def test_room_below_the_words_has_the_map_of_the_head(tab):
    places = "layer: 0, head: 7, query: 14, key: null, others: []"
    for height, has_map in ((720, False), (1000, True)):
        tab.set_viewport_size({"width": 1400, "height": height})
        tab.evaluate(f"go({{ view: 'text', {places} }})")
        cells = "picture.shapes.filter((it) => it.kind === 'cells')"
        assert tab.evaluate(f"{cells}.length") == has_map
    [top, end, bottom] = tab.evaluate(
        f"(({{ y, cellHeight, rows }}) => [y, y + cellHeight * rows, picture.bottom])({cells}[0])"
    )
    assert bottom < top < end <= tab.evaluate("picture.height")


@pytest.mark.parametrize("size", SIZES)
def test_the_lists_beside_a_map_are_in_sight(tab, size):
    tab.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
    tab.evaluate("go({ view: 'map', layer: 0, head: 2, query: 14, key: null, others: [] })")
    ends = tab.evaluate(
        "picture.shapes.filter((it) => it.kind === 'text' && it.serif).map((it) => it.y + 8)"
    )
    assert len(ends) >= 6 and max(ends) <= tab.evaluate("picture.height")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", ["text", "map", "lines"])
def test_every_compared_head_is_in_sight(tab, view, size):
    tab.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
    places = "[[0, 0], [0, 3], [1, 2], [1, 7]]"
    tab.evaluate(
        f"go({{ view: '{view}', layer: 0, head: 7, query: 14, key: null, others: {places} }})"
    )
    names = tab.evaluate(
        """picture.shapes.filter((it) => it.kind === 'text' && it.bold && it.y > 0
             && it.y < byId('view').clientHeight).map((it) => it.text)"""
    )
    names = [name.split()[0] for name in names if name]
    assert {"L0H7", "L0H0", "L0H3", "L1H2", "L1H7"} <= set(names)
    assert tab.evaluate("picture.height <= byId('view').clientHeight")
    if view == "map":  # as large as five square maps can be, with 16 pixels between them
        room = tab.evaluate("[byId('view').clientWidth, byId('view').clientHeight]")
        side = max(min(room[0] / n - 16, (room[1] - 40) / -(-5 // n) - 26) for n in range(1, 6))
        assert tab.evaluate("31 * picture.map.cell") > 0.85 * side
    if view == "text":
        shown = "picture.shapes.filter((it) => it.kind === 'text' && it.text === '{}').length"
        assert tab.evaluate(shown.format("books")) == 5, "all words of every head"


def test_270_heads_are_on_one_screen(browser, tmp_path):
    html.write_report(toy_report(14, layers=30, H=9, G=3), tmp_path / "page.html")
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    for width, height in SIZES:
        page.set_viewport_size({"width": width, "height": height})
        for order in ("label", "place"):
            page.locator("#order").select_option(order)
            grid, last = page.locator("#grid"), page.locator("#grid .tile").last
            assert page.locator("#grid .tile").count() == 270
            assert grid.evaluate("it => it.scrollHeight <= it.clientHeight + 1"), (width, order)
            assert grid.evaluate("it => it.scrollWidth <= it.clientWidth"), (width, order)
            assert last.evaluate("it => it.clientWidth") >= 16
    page.close()


def test_one_order_is_a_matrix_of_layers_and_heads_with_names(browser, tmp_path):
    html.write_report(toy_report(14, layers=13, H=6, G=3), tmp_path / "page.html")
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.locator("#order").select_option("matrix")
    for width, height in [(1400, 1000), (1280, 720), (390, 844)]:
        page.set_viewport_size({"width": width, "height": height})
        page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))")
        names = page.locator("#grid .axis").all_text_contents()
        assert names == ["", *(f"H{h}" for h in range(6)), *(f"L{n}" for n in range(13))]
        box = """(it) => { const { x, y, width, height } = it.getBoundingClientRect();
          return [x + width / 2, y + height / 2]; }"""
        x, _ = page.locator("#grid .axis.column").nth(4).evaluate(box)
        _, y = page.locator("#grid .axis.row").nth(1 + 11).evaluate(box)
        tile = page.locator("#grid [data-place='11.4']").evaluate(box)
        assert tile == pytest.approx([x, y], abs=3), (width, height)
        sizes = page.locator("#grid .tile").evaluate_all("(all) => all.map((it) => it.offsetWidth)")
        assert len(sizes) == 78 and min(sizes) >= (40 if width == 390 else 14)
    page.close()


@pytest.mark.parametrize("width", [1280, 1000])
def test_labels_below_small_maps_do_not_widen_them(tab, width):
    tab.set_viewport_size({"width": width, "height": 900})
    frames = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    tab.evaluate(frames)  # the maps are drawn in the frame after
    assert tab.evaluate("byId('grid').scrollWidth <= byId('grid').clientWidth")
    assert "antecedent" in tab.locator("#grid.labelled .does").all_inner_texts()


def test_the_map_names_the_selected_key(tab):
    tab.set_viewport_size({"width": 1280, "height": 720})
    labels = """picture.shapes.filter((it) => it.kind === 'text' && it.bold && it.turn === -90)
        .map((it) => it.text)"""
    select = "go({{ view: 'map', layer: 0, head: 7, query: 14, key: {}, others: [] }})"
    for key, name in (
        ("11", "young"),
        ("null", "queen"),
    ):  # without one, that of the largest weight
        tab.evaluate(select.format(key))
        assert tab.evaluate(labels) == [name]


def test_on_a_phone_the_picture_is_first_and_targets_are_large(browser, tmp_path):
    html.write_report(ch.report(storyteller.load(), STORY, progress=False), tmp_path / "page.html")
    size = {"width": 390, "height": 844}
    context = browser.new_context(viewport=size, has_touch=True, is_mobile=True)
    context.add_init_script(PLAIN_NAMES)
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    picture = page.locator("#picture").bounding_box()
    assert 0 <= picture["x"] < 390 and picture["y"] < 600
    page.locator("#whatif").tap()
    small = page.evaluate(
        """[...document.querySelectorAll('button, select, summary, textarea, .word, form label')]
             .filter((it) => it.checkVisibility() && it.htmlFor !== 'text')
             .map((it) => [it, it.getBoundingClientRect()])
             .filter(([, { width, height }]) => width < 39.5 || height < 39.5)
             .map(([it, { width, height }]) => `${it.id || it.className} ${width} x ${height}`)"""
    )
    assert small == []
    page.locator("#whatif").tap()
    page.locator("#frame").scroll_into_view_if_needed()
    box = page.locator("#picture").bounding_box()
    word = page.evaluate("picture.targets.find((it) => it.title === 'castle')")
    page.touchscreen.tap(box["x"] + word["x"] + 9, box["y"] + word["y"] - 9)  # a finger misses
    assert page.evaluate("current.tokens[chosen.query]") == "castle"
    context.close()


def test_the_walk_explains_its_colours(tab):
    tab.set_viewport_size({"width": 1280, "height": 720})
    tab.evaluate("go({ view: 'walk', layer: 0, head: 7, query: 14, key: null, others: [] })")
    shown = tab.evaluate("picture.shapes.filter((it) => it.kind === 'text').map((it) => it.text)")
    assert any("ed below 0, blue above" in text and "Hatched" in text for text in shown)
    assert {"\u2212largest", "largest"} <= set(shown)
    assert tab.evaluate("picture.height <= byId('view').clientHeight")


def test_a_short_text_is_not_called_long(browser, tmp_path, monkeypatch):
    none = SMALL._replace(all_steps=0, steps=0)
    monkeypatch.setattr("clearhead.views.html.report.FILE", none)
    html.write_report(toy_report(14), tmp_path / "page.html")
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    left_out = page.locator("#left-out").text_content()
    assert left_out.startswith("To stay small, the page has")
    page.evaluate("clearhead.go({ view: 'numbers', layer: 0, head: 1, query: 2 })")
    assert "long" not in page.locator("main").text_content()
    page.close()


def test_the_words_of_a_low_window_leave_room_for_the_lists(browser, tmp_path):
    text = [f"{word} " + "\n" * (i % 7 == 6) for i, word in enumerate(STORY.split())]
    lines = "\n".join("".join(text).split("\n"))
    path = tmp_path / "page.html"
    html.write_report(ch.report(storyteller.load(), lines, progress=False), path)
    page = free_tab(browser)
    for width, height in [*SIZES, (390, 844)]:
        page.set_viewport_size({"width": width, "height": height})
        page.goto(path.as_uri())
        field, rows = page.locator("#text"), {720: 1, 1000: 4, 844: 2}[height]
        line = field.evaluate("it => parseFloat(getComputedStyle(it).lineHeight)")
        shown = field.evaluate(
            "it => it.clientHeight - 2 * parseFloat(getComputedStyle(it).paddingTop)"
        )
        assert rows - 0.2 < shown / line < rows + 0.8, (width, shown)
        at = "snapshot().tokens.findLastIndex((it) => it === 'she')"
        page.evaluate(f"go({{ view: 'text', layer: 0, head: 7, query: {at}, key: null }})")
        ends = page.evaluate(
            "picture.shapes.filter((it) => it.kind === 'text' && it.text.endsWith('%'))"
            ".map((it) => it.y + 8)"
        )
        box = page.locator("#view").bounding_box()
        assert len(ends) >= 4 and max(ends) <= page.evaluate("byId('view').clientHeight")
        assert width == 390 or box["height"] > 0.44 * height
    put_back(page)


def test_the_title_is_in_sight_at_any_width(browser, tmp_path):
    name = "SmolLM2-135M-Instruct (Q4_1, dequantised)"
    path = html.write_report(toy_report(14), tmp_path / "page.html", title=f"Attention in {name}")
    page = free_tab(browser)
    page.goto(path.as_uri())
    for width, height in [*SIZES, (390, 844)]:
        page.set_viewport_size({"width": width, "height": height})
        for part in ("h1", ".about"):
            fits = (
                "it => it.scrollWidth <= it.clientWidth && it.scrollHeight <= it.clientHeight + 1"
            )
            assert page.locator(part).evaluate(fits), (width, part)
        assert page.locator("#theme").bounding_box()["y"] < 80
    put_back(page)


def test_a_narrow_page_is_as_high_as_the_pane_that_it_shows(browser, tmp_path):
    path = html.write_report(toy_report(14, layers=30, H=9, G=3), tmp_path / "page.html")
    page = free_tab(browser, viewport={"width": 390, "height": 844})
    page.goto(path.as_uri())
    for pane in ("heads-pane", "picture-pane"):
        page.locator(f"#swipe [data-pane={pane}]").click()
        page.wait_for_function(
            "(id) => Math.abs(byId('panes').clientHeight - byId(id).offsetHeight) < 20", arg=pane
        )
    put_back(page)


@pytest.mark.parametrize("viewport", [(1280, 720), (390, 844)], ids=str)
def test_a_map_of_few_queries_and_many_keys_is_legible(visit, viewport):
    """As that of cross attention: its rows have room for labels, and labels of late keys fit."""
    torch.manual_seed(0)
    trace = ch.explain(torch.randn(7, 8), torch.randn(1013, 8), torch.randn(1013, 8))
    tab = visit(
        trace, hash="#view=map", viewport=dict(zip(("width", "height"), viewport, strict=True))
    )
    rows, columns, cell, tall = tab.evaluate(
        "[picture.map.rows, picture.map.columns, picture.map.cell, picture.map.tall]"
    )
    assert rows == 7 < columns and tall >= 13 > cell
    labels = tab.evaluate("picture.shapes.filter((it) => it.turn === -90).map((it) => it.text)")
    assert len(labels) > 8 and all(label.isdecimal() for label in labels)
    assert any(len(label) == 4 for label in labels) or int(labels[-1]) > 900
    right = tab.evaluate("picture.map.x + picture.map.columns * picture.map.cell")
    assert right <= tab.evaluate("picture.width")

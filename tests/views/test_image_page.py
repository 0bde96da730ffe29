"""The page of an image: its patches are where they are in the image, and what one points at."""

from dataclasses import replace

import pytest
import torch

import clearhead as ch
from clearhead.models.report import collect
from clearhead.views import html
from tests.hf.test_pictures import Neighbour, language_model, with_register
from tests.views.browser import free_tab, put_back

ROWS, COLUMNS, BEFORE = 6, 7, 1


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    return ch.report(Neighbour(), torch.rand(1, 3, 24, 28), progress=False)


@pytest.fixture(scope="module")
def tab(browser, tmp_path_factory, report):
    tab = free_tab(browser)
    page = tmp_path_factory.mktemp("page") / "image.html"
    tab.goto(html.write_report(report, page).as_uri() + "#layer=0&head=1&query=20")
    yield tab
    put_back(tab)


def targets(tab):
    """The patches of the picture: [query, x, y] of the middle of each, in order."""
    return tab.evaluate(
        "store.picture.targets.filter((it) => it.changes.query && it.width === it.height)"
        ".map((it) => [it.changes.query, it.x + it.width / 2, it.y + it.height / 2])"
    )


def test_a_click_on_a_patch_selects_it(tab):
    assert tab.locator("#view-text").text_content() == "Image"
    assert not tab.locator("#typing").is_visible()
    patches = targets(tab)
    assert [at for at, *_ in patches] == 2 * list(range(BEFORE, BEFORE + ROWS * COLUMNS))
    box = tab.locator("#picture").bounding_box()
    for row, column in ((0, 0), (2, 5), (5, 6)):
        at = BEFORE + row * COLUMNS + column
        for x, y in [(x, y) for query, x, y in targets(tab) if query == at]:
            tab.mouse.move(box["x"] + 3, box["y"] + 3)
            tab.mouse.click(box["x"] + x, box["y"] + y)
            assert tab.evaluate("chosen.query") == at
            assert f"patch {row},{column} looks at" in tab.locator("#sentence").text_content()


def test_the_image_has_its_pixels_and_the_weights_are_on_their_patches(tab, report):
    """Head 1 attends to the patch to the left."""
    query = BEFORE + 3 * COLUMNS + 4
    tab.evaluate(f"go({{ layer: 0, head: 1, query: {query}, key: null }})")
    plain, weighted = tab.evaluate(
        "store.picture.shapes.filter((it) => it.kind === 'cells').map((it) =>"
        " Array.from({ length: it.rows * it.columns }, (_, i) => it.colourOf(i)))"
    )
    pixels = report.layers[0].picture.pixels
    assert torch.equal(torch.tensor(plain).reshape(24, 28, 3), pixels.long())
    shown = torch.tensor(weighted).reshape(ROWS, 4, COLUMNS, 4, 3).float()
    grey = (pixels.float() @ torch.tensor([0.3, 0.59, 0.11])).reshape(ROWS, 4, COLUMNS, 4)
    faded = 255 + (grey - 255) * 0.45
    changed = (shown - faded.unsqueeze(-1)).abs().amax((1, 3, 4))
    assert (changed > 30).nonzero().tolist() == [[3, 3]]
    weights = report.layers[0].pooled[1, query]
    drawn = tab.evaluate("current.layer(0).drawn(1, chosen.query)")
    assert (torch.tensor(drawn) - weights).abs().max() < 0.005


def test_every_tile_shows_the_query_on_the_grid(tab):
    query = BEFORE + 2 * COLUMNS + 3
    tab.evaluate(f"go({{ layer: 0, head: 0, query: {query}, key: null }})")
    darkest = """(tile) => { const canvas = tile.querySelector('canvas');
      const { width, height } = canvas, pen = canvas.getContext('2d');
      const { data } = pen.getImageData(0, 0, width, height);
      const sums = Array.from({ length: width * height }, (_, i) => data[4 * i]);
      return [height, width, sums.indexOf(Math.min(...sums))]; }"""
    steps = [-COLUMNS, -1, COLUMNS, 1]  # above, left, below, right
    for head, step in enumerate(steps):
        found = tab.locator(f"[data-place='0.{head}']").evaluate(darkest)
        assert found == [ROWS, COLUMNS, query - BEFORE + step]


def test_several_heads_are_drawn_beside_each_other(tab):
    tab.evaluate("go({ layer: 0, head: 0, query: 20, others: [[0, 1], [0, 2], [0, 3]] })")
    assert tab.evaluate("store.picture.shapes.filter((it) => it.kind === 'cells').length") == 4
    tab.evaluate("go({ others: [] })")


def test_registers_are_marked_and_can_be_left_out(browser, tmp_path):
    model, inputs = with_register()
    report = ch.report(model, inputs, progress=False)
    row = report.layers[3].pooled[1, 7]
    tab = free_tab(browser)
    page = html.write_report(report, tmp_path / "image.html").as_uri()
    tab.goto(f"{page}#layer=3&head=1&query=7")
    legend = (
        "store.picture.shapes.map((it) => it.text).find((it) => it?.includes(' on 1 register'))"
    )
    names = "store.picture.targets.map((it) => it.title).filter((it) => it?.includes('register'))"

    def top():
        """The end of the scale, beside its 0."""
        texts = tab.evaluate("store.picture.shapes.map((it) => it.text).filter(Boolean)")
        return float(texts[texts.index("0") + 1].removesuffix(" %")) / 100

    assert abs(top() - row[14]) < 0.005
    assert tab.evaluate(legend).endswith(f", {100 * row[14]:.0f} % on 1 register")
    assert all(x.startswith("patch 2,3, a register in all but name") for x in tab.evaluate(names))
    switch = tab.locator("#shading [data-by=registers]")
    assert switch.text_content() == "without 1 register"
    switch.click()
    others = torch.cat([row[1:14], row[15:]]).max()
    assert others < row[14] / 1.5 and abs(top() - others) < 0.005
    tile = "document.querySelector('[data-place=\"3.1\"]').registers"
    assert switch.get_attribute("aria-pressed") == "true" and tab.evaluate(tile) == "left out"
    tab.goto("about:blank")
    tab.goto(f"{page}#layer=3&head=1&query=7&registers=left+out")
    assert abs(top() - others) < 0.005
    put_back(tab)


def test_many_patches_are_drawn_in_blocks(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "MOST_CELLS", 20)
    report = ch.report(Neighbour(), torch.rand(1, 3, 24, 28), progress=False)
    layer = replace(report.layers[0], trace=None, traced_heads=())
    report = replace(report, layers=(layer,))
    tab, query = free_tab(browser), BEFORE + 2 * COLUMNS + 6
    page = html.write_report(report, tmp_path / "blocks.html").as_uri()
    tab.goto(f"{page}#layer=0&head=1&query={query}")
    drawn = torch.tensor(tab.evaluate("current.layer(0).drawn(1, chosen.query)"))
    expected = report.weights_on_image(0, 1)[query]
    assert (drawn[1:].view(ROWS, COLUMNS) - expected).abs().max() < 0.005
    # Head 1 attends to the left: of a block of one column, to the block of two beside it.
    texts = tab.evaluate("store.picture.shapes.map((it) => it.text).filter(Boolean)")
    assert "patch 2,6 to 3,6 looks at" in texts and "patch 2,4 to 3,5" in texts
    titles = tab.evaluate("store.picture.targets.map((it) => it.title)")
    [title] = (x for x in titles if x.startswith("patch 2,5\n"))
    share = title.removeprefix("patch 2,5\npatch 2,4 to 3,5: ").removesuffix(" %")
    assert abs(float(share) / 100 - expected[2:4, 4:6].sum()) < 0.01
    side = tab.evaluate("store.picture.shapes.find((it) => it.stroke === 'mark')")
    assert abs((side["height"] - 2) - 2 * (side["width"] - 2)) < 1e-6
    cells = "Array.from({ length: 43 }, (_, at) => current.layer(0).blocksOf()[at])"
    assert tab.evaluate(cells) == report.layers[0].picture.cells(2).tolist()
    tab.evaluate("go({ view: 'map' })")
    tab.locator("#picture").hover(position={"x": 200, "y": 200})
    assert tab.evaluate("[store.picture.map.rows, store.picture.map.columns]") == [13, 13]
    spans = "Array.from({ length: 13 }, (_, i) => current.layer(0).rowSpan(i, 13))"
    cells = report.layers[0].picture.cells(2)
    ends = [[int(x[0]), int(x[-1])] for x in ((cells == i).nonzero().flatten() for i in range(13))]
    assert tab.evaluate(spans) == ends
    put_back(tab)


def test_the_words_of_a_language_model_are_beside_its_image(browser, tmp_path):
    model, inputs, _, rows, columns = language_model("qwen 2.5")
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    words = ["<s>", "See", *["."] * rows * columns, "a", "red", "cat"]
    report = ch.report(model, inputs, tokens=words, progress=False)
    tab, layer = free_tab(browser), len(report.layers) - 1
    page = html.write_report(report, tmp_path / "words.html").as_uri()
    tab.goto(f"{page}#layer={layer}&head=1&query=24")
    assert tab.locator("#strip .word").all_text_contents() == ["<s>", "See", "a", "red", "cat"]
    tab.locator("#word-25").click()
    assert tab.evaluate("chosen.query") == 25
    on_image = 100 * float(report.weights_on_image(layer, 1)[25].sum())
    texts = tab.evaluate("store.picture.shapes.map((it) => it.text).filter(Boolean)")
    assert f"{on_image:.0f} % is on the patches" in texts
    # A frame marks a selected patch alone, and not a word.
    framed = (
        "store.picture.shapes.filter((it) => it.kind === 'rect' && it.stroke === 'mark').length"
    )
    before = tab.evaluate(framed)
    tab.mouse.move(2, 2)
    tab.evaluate("go({ query: 3 })")
    assert (before, tab.evaluate(framed)) == (1, 2)  # of its name; of the patch, twice
    put_back(tab)

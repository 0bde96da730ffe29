"""The page of a report, opened in a real browser: the model, a head, a query.

The visits end with the four checks of `test_page`: no request, no console, no error, no dialog.
"""

import base64
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import demo as storyteller
from clearhead.core.errors import BadValue
from clearhead.demo.measured import WORDS_OF
from clearhead.models.report import Head, Layer, Link, Report, report, summary
from clearhead.models.report.findings import NextToken, Writer
from clearhead.models.roles.table import EVENNESS, LABELS, RANK
from clearhead.views import html
from clearhead.views.html.report import Budget, pool
from tests.models.report.models import AttentionCalls, normal
from tests.views.test_page import HOSTILE, address, axe, embedded, map_cell, open_step, texts, value  # noqa: F401


def toy_report(T, *, layers=3, H=4, G=2, D=5, tokens=None, mask=ch.causal, sharp=60):
    """A report of layers that differ; the last head of the last looks at the token before."""
    calls = [
        (3 * normal(1, H, T, D, seed=11 * i), normal(1, G, T, D, seed=11 * i + 1), {"mask": mask})
        for i in range(layers - 1)
    ]
    keys = torch.eye(T)
    back = torch.stack([sharp * keys[max(i - 1, 0)] for i in range(T)])
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
            Head(n, h, ("mixed",), 0.5 + h / 99, 3.0, 20.0, shares, links[h]) for h in range(H)
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
    whole = ch.look(q, k, k, mask=ch.causal, stats=[ch.pooled(256, 256)]).pooled
    small = ch.look(q, k, k, mask=ch.causal, stats=[ch.pooled(side, side)]).pooled
    torch.testing.assert_close(pool(whole, side, T), small, atol=1e-6, rtol=1e-5)


def test_a_page_is_bounded_by_pixels():
    page = html.report_page(large_report(), title="large")
    assert len(page.encode()) <= 3_000_000
    data = embedded(page)
    assert data["layers"][0]["bins"] == [64, 64]
    assert len(data["heads"]) == 144
    long = html.report_page(toy_report(2053, layers=2, H=2, G=1))
    assert len(long.encode()) < 1_000_000


def test_the_page_of_a_long_text_has_the_query_with_which_it_opens():
    long = large_report()
    stored = set(embedded(html.report_page(long))["layers"][0]["kept"])
    query = next(q for q in long.layers[0].kept_queries if q not in stored)
    data = embedded(html.report_page(replace(long, begin=(0, 1, query))))
    assert data["begin"] == {"layer": 0, "head": 1, "query": query}
    assert query in data["layers"][0]["kept"]


def test_the_largest_weights_are_those_of_the_report():
    made = toy_report(300, layers=2)
    layer, data = made.layers[0], embedded(html.report_page(made))["layers"][0]
    links = data["links"]["weights"]
    weights = np.frombuffer(base64.b64decode(links["data"]), f"<{links['kind']}")
    rows = [layer.kept_queries.index(query) for query in data["kept"]]
    expected = layer.top_weights[:, rows, : data["links"]["n"]].numpy()
    np.testing.assert_array_equal(weights.reshape(expected.shape), expected)


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
    assert len(rows) == 13 and rows[12][:2] == ["L2H3", "previous token"]
    assert float(rows[1][3]) == pytest.approx(found[0, 0].entropy, abs=0.005)


# ---- with a browser -------------------------------------------------------------------


def title(tab):
    return tab.locator("#head-title").text_content()


def figures(tab):
    """The weights of the chosen query, by key, as the page reads them."""
    return tab.evaluate(
        """Object.fromEntries(shownTrace().row(shownTrace().used, chosen.head, chosen.query)
             .map((weight, key) => [shownTrace().keys[key], weight])
             .filter(([, weight]) => weight !== undefined))"""
    )


def test_it_opens_at_the_head_with_the_clearest_label(visit):
    tab = visit(toy_report(11))
    assert title(tab) == "L2H3: previous token 1.00 over 9 tokens"
    assert "of its weight is on the token before" in tab.locator("#head-lead").text_content()
    said = tab.locator("#sentence").text_content()
    assert said.startswith("L2H3: ") and "This head looks at the token before" in said
    assert tab.locator("#grid .tile").count() == 12
    label = tab.locator("#grid [aria-checked=true]").get_attribute("aria-label")
    assert label.startswith("layer 2, head 3: previous token 100 %")


def test_the_storyteller_opens_at_whom_a_pronoun_means(visit):
    text = "There was a quiet queen and a young wizard . She danced in the castle ."
    tab = visit(ch.report(storyteller.load(), text))
    said = tab.locator("#sentence").text_content()
    assert said.startswith(
        "L0H7: She looks at queen (99 %). This head finds the antecedent of a pronoun."
    )
    assert title(tab).endswith("antecedent")
    assert "#layer=0&head=7&query=she" in tab.evaluate("go({}); location.hash")
    tab.locator("#word-4").click()
    assert tab.locator("#sentence").text_content().startswith("L0H7: queen looks at ")
    assert "antecedent of a pronoun" not in tab.locator("#sentence").text_content()


def test_it_opens_at_the_head_that_writes_the_predicted_token(visit):
    text = "Long ago there was a witch. She took her"
    report = ch.report(storyteller.load(), text, next_token=True)
    tab = visit(replace(report, begin=None, model=None))
    assert title(tab) == "L1H7: writes “potions”, subject"
    sentence = tab.locator("#sentence").text_content()
    before, after = report.next_token.probability, report.next_token.clearest.without
    assert sentence == (
        "L1H7: her looks at witch (69 %), and this head writes potions, the predicted "
        f"next token. Without this head the probability of potions is {100 * after:.0f} % instead "
        f"of {100 * before:.0f} %; from there it adds 0.93 to the logit of potions."
    )
    shown = texts(tab)
    at = shown.index("Added to the logit of potions")
    assert shown[at + 1 : at + 3] == ["L1H7 from witch", "+0.93"]
    other = report.next_token.writers[1]
    tab.evaluate(f"go({{ layer: {other.layer}, head: {other.head} }})")
    assert title(tab).startswith(f"L{other.layer}H{other.head}: writes “potions”")
    tab.evaluate("go({ query: 3 })")  # writers write the token after the last one only
    assert "writes" not in tab.locator("#sentence").text_content()


def test_what_a_model_expects_next_is_shown_word_by_word(visit):
    teller, text = storyteller.load(), "Once upon a time there was a queen ."
    tab = visit(ch.report(teller, text))
    for position, guesses in enumerate(teller.read(text, 6).guesses):
        tab.locator(f"#word-{position}").click()
        shown = texts(tab)
        first = next(i for i, it in enumerate(shown) if it.startswith("Predictions after"))
        for at, (word, share) in enumerate(guesses):
            assert shown[first + 1 + 2 * at] == word
            written = shown[first + 2 + 2 * at]
            assert (written == "<1 %") == (share < 0.005)
            assert abs(int(written.removeprefix("<").split()[0].split(".")[0]) - 100 * share) <= 1


def test_a_large_page_opens_with_little_work(visit):
    tab = visit(large_report(), prepare=count_work)
    tab.wait_for_function("() => document.getElementById('head-title').textContent !== ''")
    done = work(tab)
    assert 144 < done["elements"] < 5_000 and done["drawn"] < 10_000, done
    steps = "snapshot().read.flatMap((it) => it.steps)"
    read = tab.evaluate(f"{steps}.filter((it) => it.decoded).map((it) => it.name)")
    assert len(read) < 12, "numbers are read when they are shown"
    assert tab.locator("#grid .tile").count() == 144
    grid = tab.locator("#grid").evaluate("it => [it.scrollHeight, it.clientHeight]")
    assert grid[0] <= grid[1], "all 144 heads are visible"


def test_the_keyboard_leads_from_the_heads_to_a_query(visit):
    tab = visit(toy_report(11))
    columns = tab.evaluate("document.getElementById('grid').columns")
    tab.locator("#grid [tabindex='0']").focus()
    places = [f"{layer}.{head}" for layer in range(3) for head in range(4)]
    at = 0
    for press, by in (
        ("Home", -99), ("ArrowRight", 1), ("ArrowDown", columns), ("ArrowLeft", -1),
        ("ArrowUp", -columns), ("ArrowUp", -columns), ("End", 99), ("ArrowUp", -columns),
    ):  # fmt: skip
        tab.keyboard.press(press)
        at = max(0, min(11, at + by))
        assert tab.evaluate("document.activeElement.dataset.place") == places[at], press
        assert tab.evaluate("`${chosen.layer}.${chosen.head}`") == places[at], press
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "picture"
    tab.locator("#strip").focus()
    tab.keyboard.press("End")
    assert tab.locator("#strip [aria-selected=true]").text_content() == "t10"
    tab.locator("#view-text").focus()
    for view in ("lines", "map", "numbers"):
        tab.keyboard.press("ArrowRight")
        assert tab.evaluate("document.activeElement.id") == f"view-{view}"
    assert tab.locator("#panel article").count() == 1


def test_heads_are_filtered_and_ordered(visit):
    tab = visit(toy_report(11))
    tab.locator("#labels button", has_text="previous token").click()
    assert tab.locator("#grid .tile:not(.faded)").count() == 1
    assert tab.locator("#grid .tile").count() == 12, "the others stay in their place"
    tab.locator("#labels button", has_text="previous token").click()
    assert tab.locator("#grid .faded").count() == 0
    for order, falling in (("sharp", False), ("spread", True)):
        tab.locator("#order").select_option(order)
        labels = tab.locator("#grid .tile").evaluate_all("it => it.map(x => x.ariaLabel)")
        shown = [float(label.split("entropy ")[1]) for label in labels]
        assert shown == sorted(shown, reverse=falling)
    tab.locator("#order").select_option("label")
    assert "previous token" in tab.locator("#grid .tile").first.get_attribute("aria-label")


def test_heads_that_were_measured_say_what_was_measured(visit):
    found = ch.report(storyteller.load(), "The cat sat because it was tired.")
    page = visit(found)
    for label, words in (
        ("previous word", "held-out words look most at the word before"),
        ("antecedent", "held-out pronouns look most at their antecedent"),
    ):
        page.locator(f"#grid .tile[aria-label*=': {label}']").click()
        assert words in page.inner_text("#head-lead")
    shown = page.inner_text("#labels")
    assert all(label in shown for label in ("previous word", "subject", "antecedent"))
    assert "undefined" not in page.inner_text("body")


@pytest.mark.parametrize("T", [11, 311])
def test_the_numbers_of_a_query_are_those_of_its_head(visit, T):
    """Short: all weights. Long: the largest."""
    tab = visit(toy_report(T), hash="#layer=1&head=2&query=7")
    row = dense_trace(T, 1)["weights"][0, 2, 7]
    shown = figures(tab)
    assert len(shown) >= 7
    for key, weight in shown.items():
        assert weight == pytest.approx(row[int(key[1:])].item(), abs=1e-4)
    assert max(shown.values()) == pytest.approx(row.max().item(), abs=1e-4)


def test_the_map_of_a_long_text_is_pooled(visit):
    T = 700
    found = toy_report(T, layers=2, H=10)
    tab = visit(found, hash="#layer=0&view=map")
    assert "8 largest weights" in tab.locator("#left-out").text_content()
    layer = embedded(html.report_page(found))["layers"][0]
    fine = next(s for s in layer["steps"] if s["name"] == "weights")["fine"]["head"]
    for head, side in ((fine, 256), ((fine + 1) % 10, 128)):
        address(tab, head=head)
        assert tab.evaluate("picture.map.rows") == side
        whole = pool(found.layers[0].pooled[head], side, T)
        shown = tab.evaluate("[...picture.map.values].map(it => Math.max(0, it))")
        error = (torch.tensor(shown).view(side, side) - whole).abs().max().item()
        assert error <= 0.01 * whole.max().item()
    tab.mouse.move(*map_cell(tab, 100, 3))
    tokens = tab.locator("#reading bdi").all_text_contents()
    assert tokens == [f"t{100 * T // 128}", f"t{3 * T // 128}"]


def test_of_a_longer_text_one_head_a_layer_keeps_its_steps(visit):
    T = 300
    found = toy_report(T, layers=2, D=64, H=8, G=2)
    [head] = found.layers[0].traced_heads
    tab = visit(found, hash=f"#layer=0&head={(head + 1) % 8}&query=77&view=walk")
    assert (
        "With every step of every head this page would be large"
        in tab.locator("#panel").text_content()
    )
    tab.locator("#panel").get_by_role("button", name=f"Go to L0H{head}").click()
    assert title(tab).startswith(f"L0H{head}")
    assert tab.evaluate("picture.shapes.length") > 100
    open_step(tab, "scores")
    key, query = 41, 77
    address(tab, key=key)
    exact = dense_trace(T, 0, H=8, G=2, D=64)["scores"][0, head, query, key].item()
    written = tab.locator("#panel .sum").text_content()
    assert value(written.split("=")[1]) == pytest.approx(exact, abs=6e-4)


def test_another_layer_keeps_the_place(visit):
    tab = visit(toy_report(11), hash="#layer=0&head=1&query=9&view=lines")
    tab.locator("[data-place='1.1']").click()
    assert title(tab).startswith("L1H1")
    assert tab.evaluate("[chosen.query, chosen.view]") == [9, "lines"]
    weights = dense_trace(11, 1)["weights"][0, 1, 9].tolist()
    assert list(figures(tab).values()) == pytest.approx(weights, abs=1e-6)


def test_hostile_text_is_only_text(visit):
    tab = visit(
        toy_report(len(HOSTILE), tokens=HOSTILE), title="".join(HOSTILE[:6]), note=HOSTILE[1]
    )
    assert tab.locator("img").count() == tab.locator("main script").count() == 0
    for tile in tab.locator("#grid .tile").all():
        tile.click()
    wide = tab.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1]


def test_printing_shows_every_head(visit):
    tab = visit(toy_report(11))
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate("tiles.every(it => it.painted)")
    assert tab.locator("#grid .tile").last.is_visible()
    assert tab.locator("#labels").is_hidden() and tab.locator("#order").is_hidden()


def test_on_a_narrow_screen_choosing_a_head_slides_to_its_picture(visit):
    tab = visit(toy_report(41, H=16), viewport={"width": 390, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert 0 <= tab.locator("#picture").bounding_box()["x"] < 390
    tab.locator("#swipe button", has_text="Heads").click()
    tab.wait_for_function("() => byId('picture').getBoundingClientRect().x < 0")
    tab.locator("#grid .tile").nth(5).click()
    tab.locator("#swipe [aria-pressed=true]", has_text="Picture").wait_for()
    tab.wait_for_function("() => byId('picture').getBoundingClientRect().x >= 0")
    assert tab.locator("#picture").bounding_box()["x"] < 390


@pytest.mark.parametrize(
    ("scheme", "T", "width"), [("light", 11, 1280), ("dark", 41, 390), ("dark", 600, 1280)]
)
def test_axe_finds_nothing(visit, axe, scheme, T, width):  # noqa: F811
    tab = visit(toy_report(T), color_scheme=scheme, viewport={"width": width, "height": 800})
    tab.wait_for_timeout(100)  # an observer finds what scrolls, one frame later
    axe(tab)


def test_a_notebook_shows_the_same_page_in_a_frame(browser, tmp_path):
    """The frame has no origin of its own, and its script still runs."""
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><title>notebook</title>{toy_report(11)._repr_html_()}")
    tab, happened = browser.new_page(), []
    tab.on("console", lambda it: happened.append(it.text))
    tab.on("pageerror", lambda it: happened.append(str(it)))
    tab.goto(path.as_uri())
    frame = tab.frame_locator("iframe")
    assert frame.locator("#head-title").text_content().startswith("L2H3: previous token")
    frame.locator("[data-place='0.0']").click()
    assert frame.locator("#head-title").text_content().startswith("L0H")
    assert happened == []
    tab.close()


def count_work(tab):
    """Count the elements that a page makes, and what it measures and draws on a canvas."""
    tab.add_init_script("""
        globalThis.done = { elements: 0, drawn: 0 };
        const counted = (owner, name, what) => {
          const plain = owner[name];
          owner[name] = function (...given) { done[what]++; return plain.apply(this, given); };
        };
        counted(Document.prototype, "createElement", "elements");
        for (const name of ["fillText", "measureText", "fill", "stroke", "drawImage"]) {
          counted(CanvasRenderingContext2D.prototype, name, "drawn");
        }
    """)


def work(tab, then=None):
    """How much a page did so far, or while it does something more."""
    if then is not None:
        tab.evaluate(f"done.elements = done.drawn = 0; {then}")
    return tab.evaluate("done")


def test_a_long_text_shows_the_words_around_the_query_and_around_its_key(browser, tmp_path):
    made = toy_report(900, layers=1)
    layer = made.layers[0]
    query, key = next(
        (query, key)
        for query, key in zip(layer.kept_queries, layer.top_keys[0, :, 0].tolist(), strict=True)
        if query - key > 500
    )
    page = html.write_report(replace(made, begin=(0, 0, query)), tmp_path / "page.html")
    tab = browser.new_page(viewport={"width": 1280, "height": 720})
    tab.goto(page.as_uri())
    shapes = tab.evaluate("clearhead.store.picture.shapes.filter((it) => it.kind === 'text')")
    words = [shape["text"] for shape in shapes]
    at = {word: i for i, word in enumerate(words)}
    assert "⋯" in at
    assert at[f"t{key}"] < at[f"t{query}"] and f"t{(key + query) // 2}" not in at
    tab.close()


def test_a_text_of_many_thousand_tokens_draws_no_more_than_a_screen_holds(visit):
    found = toy_report(40, layers=2)
    T = 32_768
    tokens = tuple(f"token{i}" for i in range(T))
    kept = tuple(range(0, T, 64))
    layers = tuple(
        Layer(x.number, "", False, tokens, tokens, "", T, 2, 9.0,
              tuple(_spread(head) for head in x.heads), x.pooled,
              x.allowed, torch.rand(4, T), kept, torch.rand(4, 512, 8) / 8,
              torch.randint(0, T, (4, 512, 8)).int())
        for x in found.layers
    )  # fmt: skip
    tab = visit(Report("long", tokens, layers), prepare=count_work)
    for view in ("text", "lines", "map"):
        for change in ("layer: 1, head: 0", "key: 30001", "query: 640", "query: null"):
            done = work(tab, f"go({{view: '{view}', {change}}})")
            assert done["elements"] < 5_000 and done["drawn"] < 3_000, (view, change, done)
            assert tab.evaluate("picture.shapes.length + picture.targets.length") < 3_000
    assert 1 < tab.locator("#strip [role=option]").count() <= 2048


def _spread(head):
    return replace(head, links=tuple(replace(x, query=64 * x.query) for x in head.links))


def test_the_page_reads_the_table_of_roles():
    roles = embedded(html.report_page(toy_report(7)))["roles"]
    assert [role["label"] for role in roles] == list(RANK)
    assert {*WORDS_OF, *LABELS.values(), *EVENNESS} == {role["label"] for role in roles}
    sources = (Path(__file__).parents[2] / "page" / "src").glob("**/*.js")
    texts = {path.name: path.read_text() for path in sources if path.parent.name != "survey"}
    for label in ("first token (sink)", "duplicate token", "two before", "local window"):
        assert [name for name, text in texts.items() if label in text] == [], label


def test_heads_are_ordered_by_what_they_cause(visit):
    text = "Once upon a time there was a quiet queen and a young wizard. She danced in the castle."
    teller = storyteller.load()
    found = ch.report(teller, text, effects=True, progress=False)
    ids = torch.tensor([teller.encode(text).ids])
    with torch.no_grad():
        losses = []
        for edits in ([], [ch.edits.ablate(layers=[1], heads=[7])]):
            with ch.intervene(teller.model, edits):
                logits = teller.model(ids)
            losses.append(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item())
    assert found[1, 7].effect == pytest.approx(losses[1] - losses[0], abs=1e-5)
    tab = visit(found)
    tab.locator("#order").select_option("effect")
    first = max(found.heads, key=lambda head: abs(head.effect))
    tile = tab.locator("#grid .tile").first
    assert tile.get_attribute("data-place") == f"{first.layer}.{first.head}"
    tile.click()
    shown = tab.locator("#effect")
    assert shown.text_content().startswith("without it: loss +")
    assert "mean loss of the next token in this text grows by" in shown.get_attribute("title")
    tab.locator("#text").fill("A king slept.")  # whose effects nobody measured
    tab.wait_for_function("() => current.tokens.includes('king')")
    assert tab.locator("#order").input_value() == "place"
    assert tab.locator("#order option").last.is_hidden()
    assert "effect" in str(found) and "effect" not in str(ch.report(teller, text))


def test_why_there_are_no_effects(visit):
    found = ch.report(storyteller.load(), "cat", effects=True, progress=False)
    shown = visit(found).locator("#effect")
    assert shown.text_content() == "without it: not measured"
    assert shown.get_attribute("title") == found.effects_withheld != ""


def test_many_heads_are_grouped_by_their_leading_role(visit):
    tab = visit(toy_report(11, layers=24, H=4))
    assert tab.locator("#order").input_value() == "label"
    headings = tab.locator("#grid .label").all_text_contents()
    assert headings and sum(int(x.split(" + ")[0].split()[-1]) for x in headings) == 96
    assert tab.locator("#grid .tile").count() == 96
    width = tab.evaluate("document.getElementById('grid').scrollWidth")
    assert width <= tab.evaluate("document.getElementById('grid').clientWidth")
    tab.locator("#order").select_option("place")
    assert tab.locator("#grid .group").count() == 0


def test_page_and_terminal_count_the_same_heads(visit):
    found = toy_report(11, layers=24, H=4)
    writers = tuple(Writer(layer, 3, 1.0, 4, 0.9) for layer in (1, 23))  # 23.3 has a role
    found = replace(found, next_token=NextToken("cat", 0.5, writers))
    tab = visit(found)
    printed = " ".join(summary(found).split())
    assert 'several): 2 write "cat", 1 previous token' in printed
    shown = dict(x.rsplit(" ", 1) for x in tab.locator("#grid .label").all_text_contents())
    assert shown.pop("writes “cat”") == "2" and shown.pop("previous token 0 +") == "1"
    plain = sum(int(shown.pop(label)) for label in EVENNESS if label in shown)
    assert f"{plain} heads have no role" in printed and not shown
    heads = [
        replace(x, roles=found[23, 3].roles, labels=("previous token",))
        for x in found.layers[0].heads
    ]
    layers = (replace(found.layers[0], heads=tuple(heads)), *found.layers[1:])
    found = replace(found, layers=layers)
    tab = visit(found)
    assert "5 previous token" in " ".join(summary(found).split())
    label = tab.locator("#grid .label", has_text="previous token")
    assert label.text_content() == "previous token 4 + 1"
    assert "a role of 1 head in other groups" in label.get_attribute("title")


def test_a_file_has_the_steps_of_every_head_of_a_short_text(tmp_path):
    found = toy_report(11, layers=2, H=4)
    path = html.write_report(found, tmp_path / "page.html")
    steps = embedded(path.read_text())["layers"][0]["steps"]
    assert all("data" in step and not step["kept"] for step in steps)
    none = Budget(all_steps=0, steps=0, maps=1 << 20, largest=700_000)
    steps = embedded(html.report_page(found, budget=none))["layers"][0]["steps"]
    weights = next(step for step in steps if step["name"] == "weights")
    assert weights["kept"] == {"h": []} and "data" not in weights


def test_all_roles_of_a_head_are_in_its_title(visit):
    from dataclasses import replace

    found = toy_report(11)
    head = found[2, 3]
    second = replace(head.roles[0], name="first", label="first token (sink)")
    changed = replace(head, roles=(*head.roles, second))
    layer = found.layers[2]
    heads = (*layer.heads[:3], changed, *layer.heads[4:])
    found = replace(found, layers=(*found.layers[:2], replace(layer, heads=heads)))
    tab = visit(found)
    assert title(tab) == (
        "L2H3: previous token 1.00 over 9 tokens, first token (sink) 1.00 over 9 tokens"
    )
    tab.locator("#labels button", has_text="first token").click()
    assert "faded" not in tab.locator("#grid .tile[data-place='2.3']").get_attribute("class")

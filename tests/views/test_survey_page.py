"""The page of a survey, and its data."""

import base64
import copy
import gzip
import json
import re

import pytest
import torch

from clearhead import demo as storyteller
from clearhead.core.errors import BadValue
from clearhead.corpus import Survey, survey
from clearhead.views import html
from clearhead.views.html import schema
from examples.stories import write_stories
from tests.cli.test_cli import run  # noqa: F401  # a fixture
from tests.corpus.vision import draw, planted, save
from tests.views.test_page import embedded
from tests.views.test_page_bundle import misfit

duckdb = pytest.importorskip("duckdb", reason="a survey needs DuckDB")
STORIES = [
    "once upon a time there was a queen . she danced in the castle because she was proud .",
    "a wizard and a dog lived by the sea . he gave his books to her . they laughed .",
    "long ago there lived a poor witch . she had a cat . the cat slept .",
]

CLASSES_OF_STORIES = ("punctuation", "start", "other")  # "other" has words that are unknown


@pytest.fixture(scope="module")
def stories(tmp_path_factory) -> Survey:
    folder = tmp_path_factory.mktemp("survey")
    texts = folder / "<script><b>.txt"  # its name must not become markup
    texts.write_text(STORIES[0])
    return survey(
        storyteller.load(), [*STORIES[1:], texts], out=folder / "out", context=12, progress=False
    )


@pytest.fixture(scope="module")
def document(stories) -> str:
    return html.survey_page(stories)


def unpacked(text):
    """What the script reads when it is needed."""
    return json.loads(gzip.decompress(base64.b64decode(text)))


def close(number):
    """A number as the page has it, with five digits."""
    return None if number is None else pytest.approx(number, rel=1e-4)


def settled(page):
    """The page, when it has read what belongs to the selected head."""
    page.wait_for_selector("#one[aria-busy=false]")
    return page


def test_the_data_fit_the_schema_and_equal_the_tables(stories, document):
    data = embedded(document)
    assert misfit(data, schema.SurveyPage) is None
    for head in data["heads"]:
        assert misfit(unpacked(head["details"]), schema.SurveyDetails) is None
    for context in data["contexts"]:
        assert misfit(unpacked(context), schema.SurveyContext) is None
    assert "<script><b>" not in document
    places = [(head["layer"], head["head"]) for head in data["heads"]]
    details = [unpacked(head["details"])["metrics"] for head in data["heads"]]
    seen = 0
    for row in stories.heads.to_pylist():
        at, metric = places.index((row["layer"], row["head"])), row["metric"]
        for name in ("mean", "low", "high", "uniform"):
            assert data["numbers"][metric][name][at] == close(row[name])
        detail = details[at][metric]
        names = ("q05", "q25", "q50", "q75", "q95")
        assert detail["quantiles"] == [close(row[name]) for name in names]
        assert (sum(detail["counts"]), detail["texts"]) == (row["queries"], row["texts"])
        seen += 1
    of_heads = [x for columns in data["numbers"].values() for x in columns["mean"]]
    assert seen == sum(mean is not None for mean in of_heads) == sum(map(len, details)) > 300


def test_the_mixes_are_those_of_the_tables(stories, document):
    data = embedded(document)
    rows = stories.query("select * from mixes").to_pylist()
    shares = {(x["layer"], x["head"], x["token_class"], x["kind"]): x for x in rows}
    for head in data["heads"]:
        mixes = unpacked(head["details"])["mixes"]
        assert [mix["token_class"] for mix in mixes] == [*CLASSES_OF_STORIES, "all"]
        assert head["shares"] == [share for share, _, _ in mixes[-1]["shares"]]
        for mix in mixes:
            of = head["layer"], head["head"], mix["token_class"]
            for kind, (share, low, high) in zip(data["key_kinds"], mix["shares"], strict=True):
                row = shares.pop((*of, kind))
                assert (mix["queries"], mix["texts"]) == (row["queries"], row["texts"])
                assert (share, low, high) == pytest.approx(
                    (row["share"], row["low"], row["high"]), rel=1e-4
                )
    assert not shares


def test_examples_are_queries_of_their_texts_with_their_largest_weights(stories, document):
    data, seen = embedded(document), 0
    for head in data["heads"]:
        for example in unpacked(head["details"])["metrics"]["largest"]["examples"]:
            tokens = unpacked(data["contexts"][example["context"]])["tokens"]
            assert example["query"] < len(tokens) <= 12
            assert example["value"] == pytest.approx(example["weights"][0], abs=1e-5)
            assert example["weights"] == sorted(example["weights"], reverse=True)
            seen += 1
    assert seen > 100
    words = " ".join(data["spelling"][i] for i in unpacked(data["contexts"][0])["tokens"])
    assert any(words in text for text in STORIES)


def test_a_page_without_another_survey_has_no_differences(document, browser, tmp_path):
    path = tmp_path / "survey.html"
    path.write_text(document, encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    assert page.locator("#differences").is_hidden()
    assert page.locator("#axis-y option[value^=difference]").count() == 0
    page.close()


def test_the_page_in_a_browser(document, browser, tmp_path):
    path = tmp_path / "survey.html"
    path.write_text(document, encoding="utf-8")
    page, errors = browser.new_page(viewport={"width": 1280, "height": 720}), []
    page.on("pageerror", lambda error: errors.append(error))
    page.goto(f"{path.as_uri()}#layer=1&head=3&metric=previous&decile=9&x=entropy")
    assert page.text_content("#head-title") == "L1H3"
    assert page.text_content("#metric-title") == "previous"
    assert page.locator("#scatter circle").count() == 16
    assert page.text_content("#colour-scale") == "01"  # the layers, pale to strong
    assert "distance 2 to 3" in page.inner_text("#metrics")
    mixes = settled(page).locator("#mixes tbody tr")
    assert mixes.locator("th").all_text_contents() == [*CLASSES_OF_STORIES, "all"]
    head = next(x for x in embedded(document)["heads"] if (x["layer"], x["head"]) == (1, 3))
    shares = head["shares"]
    on_page = mixes.last.locator("td").all_text_contents()[1:]
    assert {f"{x:.0%}".replace("%", " %") for x in shares if x >= 0.01} <= set(on_page)
    assert f"{max(shares):.0%}".replace("%", " %") in page.text_content("#roles")
    assert page.text_content("#several") == ""
    page.keyboard.press("l")
    assert page.text_content("#head-title") == "L1H4"
    page.keyboard.press("m")
    page.locator("#scatter circle[aria-selected=false]").first.dispatch_event("click")
    page.locator("#metrics button", has_text="largest").click()
    page.locator("#deciles button", has_text="largest").click()
    assert "metric=largest" in page.url and "decile=10" in page.url and "x=entropy" in page.url
    shaded = settled(page).locator("#examples article").first.locator("bdi[title*=weight]")
    assert shaded.count() >= 2 and "%" in shaded.first.get_attribute("title")
    page.goto("about:blank")
    page.goto(f"{path.as_uri()}#layer=7&head=0&metric=other")
    assert page.text_content("#misread") == ("This survey does not have: L7H0, metric “other”.")
    assert not errors
    page.close()


COUNT_UNPACKED = """const Native = DecompressionStream;
globalThis.unpacked = 0;
globalThis.DecompressionStream = function (format) { unpacked++; return new Native(format); };"""


def test_a_head_is_unpacked_once_when_it_is_selected(document, browser, tmp_path):
    path = tmp_path / "survey.html"
    path.write_text(document, encoding="utf-8")
    page = browser.new_page()
    page.add_init_script(COUNT_UNPACKED)
    page.goto(path.as_uri())
    settled(page)
    first = page.evaluate("unpacked")
    assert 1 < first <= 5  # a head, and the contexts of the examples that are shown
    page.evaluate("clearhead.go({ at: 0 }); clearhead.go({ at: 1 }); clearhead.go({ at: 2 })")
    settled(page)
    assert page.text_content("#head-title") == "L0H2"
    roles = page.locator("#mixes tbody tr").last.locator("td").all_text_contents()
    share = max(embedded(document)["heads"][2]["shares"])
    assert f"{share:.0%}".replace("%", " %") in roles
    several = page.evaluate("unpacked")
    assert first + 3 <= several
    for at in (0, 1, 2):
        page.evaluate(f"clearhead.go({{ at: {at} }})")
        settled(page)
    assert page.evaluate("unpacked") <= several + 8  # contexts of examples that were passed over
    again = page.evaluate("unpacked")
    page.evaluate("clearhead.go({ at: 0 })")
    settled(page)
    assert page.evaluate("unpacked") == again
    page.close()


def test_a_browser_that_cannot_unpack_is_told(document, browser, tmp_path):
    path = tmp_path / "survey.html"
    path.write_text(document, encoding="utf-8")
    page = browser.new_page()
    page.add_init_script("delete globalThis.DecompressionStream;")
    page.goto(path.as_uri())
    settled(page)
    assert "one of 2023 or later does" in page.text_content("#no-examples")
    assert page.locator("#scatter circle").count() == 16
    page.close()


def test_the_page_opens_with_what_the_heads_do(stories, document, browser, tmp_path):
    path = tmp_path / "survey.html"
    path.write_text(document, encoding="utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(path.as_uri())
    rows = stories.query(
        "select layer, head, mean, low, high, uniform from heads where metric = 'previous' and "
        "low > uniform order by mean desc"
    ).to_pylist()
    best = page.locator("#findings-table tr", has=page.locator("th", has_text="previous"))
    cells = best.locator("td").all_text_contents()
    first = rows[0]
    assert cells[0].startswith(f"L{first['layer']}H{first['head']} {first['mean']:.2f} ")
    assert cells[0].endswith(f"{first['low']:.2f} to {first['high']:.2f}")
    shares = [max(head["shares"]) for head in embedded(document)["heads"]]
    expected = f"{sum(share > 0.5 for share in shares)} of 16 heads have most of"
    assert page.inner_text("#findings-words").startswith(expected)
    second = rows[1]
    best.locator("button").nth(1).click()
    assert page.text_content("#head-title") == f"L{second['layer']}H{second['head']}"
    assert page.input_value("#axis-y") == "previous"
    page.close()


# Pairs of names of the scatter that can be seen and cover each other.
OVERLAPPING = """() => {
  const all = [...document.querySelectorAll("#scatter text.name")];
  const seen = all.filter((it) => it.checkVisibility({ visibilityProperty: true }));
  const isOver = (a, b) => a.left < b.right && b.left < a.right
    && a.top < b.bottom && b.top < a.bottom;
  return seen.flatMap((a, i) => seen.slice(i + 1)
    .filter((b) => isOver(a.getBoundingClientRect(), b.getBoundingClientRect()))
    .map((b) => [a.textContent, b.textContent]));
}"""


def test_the_scatter_has_round_numbers_and_names(document, browser, tmp_path):
    path = tmp_path / "survey.html"
    path.write_text(document, encoding="utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(f"{path.as_uri()}#layer=0&head=5")
    for axis in page.evaluate("[...document.querySelectorAll('#axis-y option')].map(x => x.value)"):
        ticks = page.evaluate(f"clearhead.ticksOf('{axis}')")
        values = page.evaluate(
            f"clearhead.survey.heads.map((it) => clearhead.valueOn(it, '{axis}'))"
        )
        known = [x for x in values if x is not None and x == x]
        if not known:
            continue
        assert ticks[0] <= min(known) + 1e-9 and max(known) - 1e-9 <= ticks[-1], axis
        step = ticks[1] - ticks[0]
        assert float(f"{step:.1e}"[:3]) in (1, 2, 5) and 2 <= len(ticks) <= 7, (axis, ticks)
        assert abs(ticks[0] / step - round(ticks[0] / step)) < 1e-6
    names = page.locator("#scatter text.name").all_text_contents()
    assert names[0] == "L0H5"
    means = page.evaluate("clearhead.survey.heads.map((it) => it.metrics.previous.mean)")
    most = means.index(max(means))
    assert f"L{most // 8}H{most % 8}" in names
    point = page.locator("#scatter-11").bounding_box()
    page.mouse.move(point["x"] + 1, point["y"] + 3)
    page.mouse.move(point["x"] + 5, point["y"] + 5)
    assert page.text_content("#scatter .at-pointer") == "L1H3"
    page.select_option("#axis-colour", "layer")
    last = page.evaluate("Math.max(...clearhead.survey.heads.map((it) => it.layer))")
    assert page.text_content("#colour-scale") == f"0{last}"
    for at in range(16):
        page.mouse.move(0, 0)
        box = page.locator(f"#scatter-{at}").bounding_box()
        page.mouse.move(box["x"] + 3, box["y"] + 5)
        page.mouse.move(box["x"] + 5, box["y"] + 5)
        assert page.evaluate(OVERLAPPING) == [], at
    page.select_option("#axis-y", "self")
    assert page.text_content("#metric-title") == "self"
    page.close()


def test_the_largest_examples_exceed_equal_weights_most(stories):
    from clearhead.views.html.survey import Contexts, _chosen

    contexts, rows = Contexts(stories), stories.grouped("examples", "stratum, rank", "metric")
    queries = 0
    for (_, _, metric), of_head in rows.items():
        if metric != "previous":
            continue
        largest = [x for x in of_head if x["stratum"] == 10]
        chosen = [x for x in _chosen(of_head, contexts) if x["stratum"] == 10]
        assert len(chosen) == len({x["token"] for x in chosen}) == 4
        assert min(x["query"] for x in chosen) >= 4  # earlier ones have large weights in any head
        best = max(
            (x for x in largest if x["query"] >= 4), key=lambda x: x["value"] - 1 / (x["query"] + 1)
        )
        assert chosen[0] == best
        queries += 1
    assert queries == 16


def test_the_value_by_chance_is_that_of_equal_weights(stories):
    from clearhead.views.html.survey import Contexts

    contexts, seen = Contexts(stories), 0
    for row in stories.query("select * from examples where layer = 0 and head = 0").to_pylist():
        tokens, query = stories.context(row["text"], row["context"]), row["query"]
        is_copy = [tokens[k] == tokens[query] for k in range(len(tokens))]
        keys = {
            "previous": 1,
            "duplicate": sum(is_copy[1 : max(query - 1, 1)]),
            "induction": sum(is_copy[: max(query - 2, 0)]),
            "separators": sum(x in ".,!?" for x in tokens[1 : query + 1]),
        }
        if row["metric"] in keys:
            assert contexts.by_chance(row) == pytest.approx(keys[row["metric"]] / (query + 1))
            seen += row["metric"] == "separators" and keys["separators"] > 0
        elif row["metric"] == "entropy":
            assert contexts.by_chance(row) == row["value"]
    assert seen


@pytest.fixture(scope="module")
def changed(stories) -> Survey:
    """The survey of the same texts with a model whose layer 1 has other queries."""
    model = copy.deepcopy(storyteller.load())
    with torch.no_grad():
        model.module.blocks[1].attention.W_query.weight.neg_()
    texts = [*STORIES[1:], stories.folder.parent / "<script><b>.txt"]
    out = stories.folder.parent / "changed"
    return survey(model, texts, out=out, context=12, progress=False)


def test_the_page_shows_where_two_surveys_differ(stories, changed, browser, tmp_path):
    path = html.write_survey(stories, tmp_path / "compare.html", other=changed)
    data = embedded(path.read_text(encoding="utf-8"))
    assert misfit(data, schema.SurveyPage) is None
    rows = {(r["layer"], r["head"], r["metric"]): r for r in stories.compare(changed).to_pylist()}
    on_page = {
        (head["layer"], head["head"], metric): compared
        for metric, numbers in data["numbers"].items()
        for head, compared in zip(data["heads"], numbers["compared"], strict=True)
        if compared
    }
    assert on_page.keys() == rows.keys()
    for key, compared in on_page.items():
        assert compared == {name: rows[key][name] for name in compared}
        assert key[0] == 1 or (compared["difference"], compared["q"]) == (0, 1)
    sure = [row for row in rows.values() if row["q"] < 0.05]
    best = max(sure or rows.values(), key=lambda row: abs(row["effect"] or 0))
    page, errors = browser.new_page(viewport={"width": 390, "height": 720}), []
    page.on("pageerror", lambda error: errors.append(error))
    page.goto(path.as_uri())
    assert page.text_content("#head-title") == f"L1H{best['head']}"
    words = best["metric"].replace("_", " ")
    assert page.text_content("#metric-title") == words
    about = page.text_content("#differences-about")
    assert f"{len(sure)} of {len(rows)} numbers with a difference" in about
    first = page.locator("#differences-table tbody tr").first
    assert first.locator("th").text_content() == f"L1H{best['head']} {words}"
    assert page.input_value("#axis-y") == f"difference:{best['metric']}"
    assert page.locator("#scatter .axis").all_text_contents() == [
        f"{words} →",
        f"↑ difference of {words}",
    ]
    assert page.locator("#scatter .axis").last.is_visible()
    page.locator("#differences-table button").nth(1).click()
    assert page.locator("#differences-table tr.chosen").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not errors
    page.close()


def test_the_page_that_the_command_writes_opens(run, browser, tmp_path):  # noqa: F811
    """As `make survey` does, with fewer stories."""
    texts, out = write_stories(4, tmp_path / "stories.jsonl"), tmp_path / "survey"
    code, printed, errors = run("survey", texts, "--out", out)
    assert code == 0 and "storyteller: 16 heads" in printed and f"page     {out}" in errors
    page, problems = browser.new_page(), []
    page.on("pageerror", lambda error: problems.append(error))
    page.on("console", lambda message: problems.append(message.text))
    page.goto((out / "index.html").as_uri())
    assert page.locator("#scatter circle").count() == 16
    opened = page.evaluate("clearhead.chosen.at")
    means = page.evaluate("clearhead.survey.heads.map((it) => it.metrics.previous.mean)")
    assert means[opened] == max(means)
    assert page.text_content("#head-title") == f"L{opened // 8}H{opened % 8}"
    assert page.locator("#metrics tbody tr").count() > 20
    assert settled(page).locator("#examples article").count() > 0
    assert problems == []
    page.close()

    code, _, errors = run("survey", "compare", out, out)
    assert code == 0
    numbers = len(Survey.open(out).query("select 1 from heads").rows)
    assert f"0 of {numbers} numbers with a difference" in errors
    page = browser.new_page()
    page.goto((out / "compare.html").as_uri())
    assert "0 of" in page.text_content("#differences-about")
    assert page.locator("#differences-table *").count() == 0
    page.close()


def test_the_server_has_the_survey_and_the_explorer(stories):
    from starlette.testclient import TestClient

    from clearhead.views.serve.server import app

    survey_page = html.survey_page(stories, host="server")
    served = app(None, "<p>explorer</p>", "token", 8000, survey_page)
    client = TestClient(served, base_url="http://127.0.0.1:8000")
    assert client.get("/token/").text == survey_page
    assert client.get("/token/explore").text == "<p>explorer</p>"


def test_the_server_shows_where_two_surveys_differ(run, stories, changed, browser, monkeypatch):  # noqa: F811
    """The command serves both surveys, and an example opens in the explorer."""
    from clearhead.views.serve import server
    from tests.views.serve.test_served_page import opened_page

    rows = stories.compare(changed).to_pylist()
    seen = {}

    def start(served, listener):
        with opened_page(browser, served, listener) as page:
            seen["about"] = page.text_content("#differences-about")
            seen["first"] = page.locator("#differences-table tbody th").first.text_content()
            seen["axis"] = page.input_value("#axis-y")
            seen["caution"] = page.text_content("#caution")
            page.locator("#metrics button", has_text="largest").click()
            settled(page).locator("#examples a").first.click()
            page.wait_for_url("**/explore#*")

    monkeypatch.setattr(server, "start", start)
    code, _, errors = run("serve", "--survey", stories.folder, "--compare", changed.folder)
    assert code == 0, errors
    sure = [row for row in rows if row["q"] < 0.05]
    assert f"{len(sure)} of {len(rows)} numbers with a difference" in seen["about"]
    assert "storyteller, in changed" in seen["about"] and seen["caution"] == ""
    assert seen["first"] == f"L1H{rows[0]['head']} {rows[0]['metric'].replace('_', ' ')}"
    assert seen["axis"] == f"difference:{rows[0]['metric']}"
    code, _, errors = run("serve", "--compare", changed.folder)
    assert code == 2 and "--compare was passed without --survey" in errors


def test_vectors_on_the_served_page(stories, vectors_page):
    from clearhead.views.serve import Reader

    reader = Reader(storyteller.load(), stories)
    with pytest.raises(BadValue, match="has no survey"):
        Reader(reader.model).vectors(0, 0)
    exact = stories.vectors(reader.model, 1, 3)
    data = reader.vectors(1, 3)
    assert misfit(data, schema.SurveyVectors) is None
    for part in data["parts"]:
        some = exact if part["all"] else exact.without_first()
        points = torch.tensor(part["points"], dtype=torch.float64)
        torch.testing.assert_close(points, some.pca(part["name"]).points, rtol=1e-4, atol=1e-9)
    page = vectors_page
    assert page.locator("#cloud circle").count() == len(exact.examples)
    assert page.locator("#cloud-vectors option").all_text_contents() == [
        "queries", "keys", "values", "outputs, before the output projection"
    ]  # fmt: skip
    shares = exact.pca("q").shares.tolist()
    assert f"component 1 {shares[0]:.0%}".replace("%", " %") in page.text_content("#shares")
    page.locator("#cloud-0").dispatch_event("pointermove", {"movementX": 1})
    row = exact.examples.to_pylist()[0]
    words = f"“{row['query_token']}” ({row['token_class']}) looks at “{row['key_token']}”"
    assert words in page.text_content("#vectors-example")
    assert page.text_content("#vectors-example .query") == row["query_token"]
    page.locator("#legend button").first.click()
    assert 0 < page.locator("#cloud circle.dim").count() < len(exact.examples)
    page.select_option("#cloud-examples", "others")
    page.select_option("#cloud-vectors", "k")
    few = exact.without_first()
    assert page.locator("#cloud circle").count() == len(few.examples) < len(exact.examples)
    page.evaluate("clearhead.go({ at: 10 })")
    assert page.locator("#vectors").is_hidden() and "vectors=" not in page.url
    assert page.text_content("#vectors-compute") == "Compute for L1H2"
    page.go_back()
    page.wait_for_selector("#cloud circle")
    assert page.locator("#cloud circle").count() == len(few.examples)


TOUCH_BESIDE_THE_LAST = """(points, distance) => {
  const boxes = points.map((it) => it.getBoundingClientRect());
  const { right, y, width, height } = boxes.sort((a, b) => a.x - b.x).at(-1);
  const place = { clientX: right - width / 2 + distance, clientY: y + height / 2 };
  const touch = new PointerEvent("click", { ...place, pointerType: "touch" });
  points[0].closest("#cloud").dispatchEvent(touch);
}"""


@pytest.fixture
def vectors_page(stories, browser):
    """The served page of a survey, with the vectors of layer 1, head 3."""
    from clearhead.views.serve import Reader
    from clearhead.views.serve.server import app
    from clearhead_cli.serve import _listen
    from tests.views.serve.test_served_page import opened_page

    reader, listener = Reader(storyteller.load(), stories), _listen(0)
    shown = html.survey_page(stories, host="server")
    served = app(reader, "", "token", listener.getsockname()[1], shown)
    with opened_page(browser, served, listener) as page:
        page.evaluate("clearhead.go({ at: 11 })")
        page.locator("#vectors-compute").click()
        page.wait_for_selector("#cloud circle")
        yield page


def test_a_link_opens_the_view_of_vectors_again(vectors_page):
    page = vectors_page
    for name, value in (("vectors", "k"), ("examples", "others"), ("components", "1.3")):
        page.select_option(f"#cloud-{name}", value)
    page.select_option("#cloud-shade", "token_class")
    page.locator("#legend button", has_text="start").click()
    page.locator("#cloud-4").dispatch_event("click")

    def view():
        page.wait_for_selector("#cloud circle")
        return page.inner_html("#cloud"), page.inner_html("#vectors"), page.text_content("#misread")

    before, link = view(), page.url
    page.goto("about:blank")
    page.goto(link)  # which computes the vectors
    assert view() == before and before[2] == ""
    page.locator("#legend button", has_text="start").click()
    page.keyboard.press("l")
    assert page.locator("#vectors").is_hidden()
    for _ in range(2):
        page.go_back()
    assert view() == before and page.url == link
    page.go_forward()
    assert page.locator("#cloud circle.dim").count() == 0

    page.goto("about:blank")
    page.goto(link.replace("vectors=k", "vectors=k_unrotated").replace("example=", "example=9"))
    page.wait_for_selector("#cloud circle")
    known = link.split("example=")[1]
    assert page.text_content("#misread") == (
        f"This survey does not have: vectors “k_unrotated”, example “9{known}”."
    )
    assert page.input_value("#cloud-vectors") == "q"


def test_each_vector_is_reached_by_keys(vectors_page, stories):
    page, cloud = vectors_page, vectors_page.locator("#cloud")
    rows = stories.vectors(storyteller.load(), 1, 3).examples.to_pylist()
    names = dict(stories.query("select text, name from texts").rows)
    page.locator("#cloud-shade").focus()
    page.keyboard.press("Tab")
    assert cloud.evaluate("it => it === document.activeElement && it.matches(':focus-visible')")
    for row in rows:
        active = page.locator("#cloud circle.active")
        assert cloud.get_attribute("aria-activedescendant") == active.get_attribute("id")
        title = active.locator("title").text_content()
        looks_at = f"looks at “{row['key_token']}” ({row['looks_at']}), weight "
        at = f", in {names[row['text']]}, context {row['context']}, position {row['query']}"
        assert title.startswith(f"“{row['query_token']}” ({row['token_class']}) {looks_at}")
        assert title.endswith(at)
        assert page.text_content("#vectors-example").startswith(title.removesuffix(at))
        page.keyboard.press("PageDown")
    place = "it => [it.cx.baseVal.value, it.cy.baseVal.value]"
    page.keyboard.press("Home")
    steps = {"ArrowRight": (0, 1), "ArrowUp": (1, -1), "ArrowLeft": (0, -1), "ArrowDown": (1, 1)}
    moved = 0
    for key, (axis, sign) in steps.items():
        before = page.locator("#cloud circle.active").evaluate(place)
        page.keyboard.press(key)
        after = page.locator("#cloud circle.active").evaluate(place)
        along = sign * (after[axis] - before[axis])
        across = abs(after[1 - axis] - before[1 - axis])
        assert (along > 0 and across <= along) or after == before
        moved += after != before
    assert moved >= 2
    page.keyboard.press("Enter")
    selected = page.locator("#cloud circle[aria-selected=true]")
    assert "active" in selected.get_attribute("class") and "example=" in page.url
    page.keyboard.press("Tab")
    title = selected.locator("title").text_content()
    assert page.text_content("#vectors-example").startswith(title.split(", in ")[0])
    page.keyboard.press("Escape")
    assert selected.count() == 0 and "example=" not in page.url
    for distance, count in ((15, 1), (25, 0)):  # pixels from the point to a finger
        page.locator("#cloud circle").evaluate_all(TOUCH_BESIDE_THE_LAST, distance)
        assert selected.count() == count
        page.keyboard.press("Escape")


def test_a_page_without_a_server_names_the_command_for_vectors(document, browser, tmp_path):
    path = tmp_path / "survey.html"
    path.write_text(document, encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    assert "clearhead serve --model DIR --survey OUT" in page.text_content("#vectors-about")
    assert page.locator("#vectors-compute").is_hidden()
    page.goto(f"{path.as_uri()}#vectors=q&example=0.0.3&metric=next&sort=up")
    assert page.text_content("#misread") == (
        "This survey does not have: “sort”, metric “next”, vectors “q” without a server, "
        "example “0.0.3”."
    )
    page.close()


def test_a_survey_of_another_model_is_refused(stories):
    stories.must_be_of(storyteller.load())
    other = copy.deepcopy(storyteller.load())
    with torch.no_grad():
        next(other.module.parameters()).add_(1)
    with pytest.raises(BadValue, match="with these weights"):
        stories.must_be_of(other)


def test_an_example_opens_at_its_token_or_says_that_it_is_another_one(stories, browser):
    """A tokenizer reads "<unknown>", which it wrote for a word that it does not know, as others."""
    from urllib.parse import parse_qs, urlsplit

    from clearhead.views.serve import Reader
    from clearhead.views.serve.server import app
    from clearhead_cli.serve import _listen
    from tests.views.serve.test_served_page import opened_page

    reader, listener = Reader(storyteller.load()), _listen(0)
    explorer = html.report_page(reader.report(STORIES[0]), host="server")
    shown = html.survey_page(stories, host="server")
    served = app(reader, explorer, "token", listener.getsockname()[1], shown)
    known, unknown = set(), set()
    with opened_page(browser, served, listener) as page:
        for decile in page.locator("#deciles button").all():
            decile.click()
            for link in settled(page).locator("#examples a").all():
                address = link.get_attribute("href")
                of = parse_qs(urlsplit(address).fragment)
                before = of["text"][0].split()[: int(of["query"][0].split(":")[0])]
                (unknown if "<unknown>" in before else known).add(address)
        start = page.url.split("#")[0]
        for address, is_read_back in ((min(known), True), (min(unknown), False)):
            page.goto("about:blank")
            page.goto(start + address)
            of = parse_qs(urlsplit(address).fragment)
            page.wait_for_function("text => clearhead.snapshot().text === text", arg=of["text"][0])
            number, token = of["query"][0].split(":")
            if is_read_back:
                assert page.locator("#misread").is_hidden()
                assert page.evaluate("clearhead.chosen.query") == int(number)
                assert page.evaluate(f"clearhead.snapshot().tokens[{number}]") == token
            else:
                assert f"query “{number}:{token}”" in page.text_content("#misread")


def test_an_example_is_drawn_on_its_picture(tmp_path, browser):
    """Of a planted head, whose patches look at the patch to the right."""
    folder = save(planted(), tmp_path / "model", (24, 40))
    surveyed = survey(folder, draw(tmp_path / "pictures", 2), out=tmp_path / "out")
    data = embedded(html.survey_page(surveyed))
    assert misfit(data, schema.SurveyPage) is None and data["grid"] == [["[CLS]"], 3, 5]
    for stored in map(unpacked, data["contexts"]):
        assert misfit(stored, schema.SurveyContext) is None
        seen = surveyed.pixels(stored["text"], stored["context"]).permute(1, 2, 0)
        least, most = seen.amin((0, 1)), seen.amax((0, 1))
        drawn = base64.b64decode(stored["pixels"]["data"])
        drawn = torch.tensor(list(drawn)).view(24, 40, 3) / 255
        assert ((drawn - (seen - least) / (most - least)).abs() <= 0.5 / 255 + 1e-6).all()
    page, errors = browser.new_page(viewport={"width": 1280, "height": 720}), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(html.write_survey(surveyed, tmp_path / "page.html").as_uri())
    settled(page)
    assert page.locator("#metric-title").text_content() == "neighbours"
    assert page.locator("#head-title").text_content() == "L0H0"
    findings = page.text_content("#findings")
    assert "L0H1 puts 1.00 of its weight on [CLS] (equal weights: 0.06)" in findings
    for article in page.locator("#examples article").all():
        r, c = map(int, re.search(r"patch (\d),(\d)", article.text_content()).groups())
        assert f"Its largest weights: patch {r},{c + 1} 100 %" in article.text_content()
        # The frame is where the query is, and the bluest patch where it looks.
        place = article.locator(".picture").evaluate(
            """(it) => {
              const [canvas, frame] = it.children, inner = frame.getBoundingClientRect();
              const outer = canvas.getBoundingClientRect(), side = canvas.width / 5;
              const colours = [...Array(15).keys()].map((i) => canvas.getContext("2d")
                .getImageData((i % 5 + 0.5) * side, (Math.floor(i / 5) + 0.5) * side, 1, 1).data);
              const blue = colours.map(([red, , blue]) => blue - red);
              const bluest = blue.indexOf(Math.max(...blue));
              return [(inner.y - outer.y) / side, (inner.x - outer.x) / side, bluest];
            }"""
        )
        assert place == pytest.approx([r, c, 5 * r + c + 1], abs=0.05)
    assert errors == []
    page.close()

"""A file of a real model and a text of one's own: what it says about another text, and What if."""

from functools import cache

import pytest

import clearhead as ch
from clearhead import demo as storyteller
from clearhead.hf import Checkpoint
from clearhead.views import html
from tests.views.browser import free_tab, must_be_drawn, put_back
from tests.views.serve.models import save_gpt2, words


@cache
def model_in(folder):
    return Checkpoint(save_gpt2(folder, layers=3, heads=5, predicts=True))


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The report of a text, and that of the model without the heads that write the next token."""
    model = model_in(tmp_path_factory.mktemp("a model"))
    report = ch.report(model, words(23), next_token=True, progress=False)
    writers = report.next_token.writers
    off = [ch.edits.ablate(layers=[x.layer], heads=[x.head]) for x in writers]
    with ch.intervene(model.predictor, off):
        return report, ch.report(model, words(23), progress=False)


@pytest.fixture
def tab(browser, reports, tmp_path):
    report, ahead = reports
    path = html.write_report(report, tmp_path / "page.html", ahead=ahead)
    opened = free_tab(browser)
    opened.goto(path.as_uri())
    must_be_drawn(opened)
    yield opened
    put_back(opened)


def test_the_field_of_a_file_names_the_command_that_reads_another_text(tab, reports):
    tab.locator("#text").fill("it's\nnew")
    folder = reports[0].folder
    assert " " not in folder.removesuffix("a model0") and folder.endswith("a model0")
    assert tab.locator("#typed").text_content() == (
        "This file has one text. To read another, run: clearhead serve --open --model "
        f"'{folder}' 'it'\\''s\nnew'"
    )
    assert tab.locator("#command").is_visible()
    tab.locator(".tile").first.click()
    assert tab.locator("#text").input_value() == "it's\nnew"
    tab.locator("#text").fill(reports[0].text)
    assert tab.locator("#typed").text_content() == "" and tab.locator("#command").is_hidden()


def test_the_folder_of_the_user_is_not_in_a_page(reports, monkeypatch):
    from dataclasses import replace
    from pathlib import Path

    from clearhead.views.html.report import report_page

    inside = replace(reports[0], folder=str(Path.home() / "models" / "tiny"))
    assert '"folder":"~/models/tiny"' in report_page(inside)
    assert '"folder"' not in report_page(inside, host="server")


def test_a_file_has_the_run_without_the_heads_that_write_the_next_token(tab, reports):
    report, ahead = reports
    writers = [f"L{x.layer}H{x.head}" for x in report.next_token.writers]
    tab.locator("#whatif").click()
    first = tab.locator("#edit-first")
    assert first.text_content().startswith(f"Switch off {writers[0]}")
    assert first.text_content().endswith(f"which write “{report.next_token.token}”")
    assert tab.locator("#edit-off").is_hidden() and tab.locator("#edit-scale").is_hidden()
    first.click()
    tab.wait_for_function("() => edited !== null")
    word, share = ahead.guesses[-1][0]
    shown = tab.evaluate("snapshot().guesses.at(-1)[0]")
    assert shown == [word, pytest.approx(share, rel=1e-3)]
    row = tab.evaluate("snapshot().layer(2).row(snapshot().layer(2).weights, 3, 19)")
    before, after = (x.layers[2].trace["weights"][0, 3, 19].tolist() for x in reports)
    assert row == pytest.approx(after, abs=1e-6) != pytest.approx(before, abs=1e-6)
    tab.locator("#edit-none").click()
    tab.wait_for_function("() => edited === null")
    tab.evaluate("edit({ temperature: 2 })")
    tab.wait_for_function("() => byId('edit-said').textContent !== ''")
    assert "one edit of it" in tab.locator("#edit-said").text_content()


def test_a_head_that_writes_the_next_token_has_a_link_to_the_last_token(tab, reports):
    (writer, *_), last = reports[0].next_token.writers, len(reports[0].tokens) - 1
    token, key = (reports[0].tokens[i].strip() for i in (last, writer.key))
    place = f"[data-place='{writer.layer}.{writer.head}']"
    tab.evaluate("go({ query: 2, key: null })")
    tab.locator(place).click()
    assert tab.evaluate("chosen.query") == 2
    shown = tab.locator("#example").text_content()
    assert shown == f"seen at “{token}” → “{key}”"
    tab.locator("#example").click()
    assert tab.evaluate("chosen.query") == last and tab.locator("#example").is_hidden()
    texts = tab.evaluate("picture.shapes.map((it) => it.text ?? '')")
    assert f"L{writer.layer}H{writer.head} from {key}" in texts


def test_a_link_to_an_edit_shows_the_edit(tab):
    tab.locator("#whatif").click()
    tab.locator("#edit-first").click()
    tab.wait_for_function("() => edited !== null")
    outcome, address = tab.locator("#edit-outcome").text_content(), tab.url
    assert outcome
    tab.goto("about:blank")
    tab.goto(address)
    tab.wait_for_function("() => edited !== null")
    assert tab.locator("#edit-outcome").text_content() == outcome
    assert tab.locator("#edit-outcome").is_visible()
    assert tab.locator("#whatif").get_attribute("aria-expanded") == "true"


def test_the_name_of_a_row_of_heads_is_complete(tab):
    tab.locator("#order").select_option("label")
    name = tab.locator("#grid .label span").first
    is_cut = "(it) => it.scrollWidth > it.clientWidth"
    for label, expected in ("first token (sink) 128 + 21", False), ("a name " * 9, True):
        name.evaluate("(it, label) => { it.textContent = label; }", label)
        assert name.evaluate(is_cut) == expected


@pytest.mark.parametrize("size", [(1400, 1000), (1280, 720), (390, 844)], ids=str)
def test_the_field_shows_complete_lines(tab, size):
    tab.set_viewport_size({"width": size[0], "height": size[1]})
    tab.locator("#text").fill("\n".join(["some words of one line"] * 9))
    lines = tab.locator("#text").evaluate(
        "(it) => it.clientHeight / parseFloat(getComputedStyle(it).lineHeight)"
    )
    assert lines == {1400: 4, 1280: 1, 390: 2}[size[0]]


def test_the_selected_word_is_in_sight_where_one_line_is_shown(tab):
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.evaluate("go({ view: 'map', query: 20, key: null })")
    at = "(id) => [byId(id).getBoundingClientRect()].map((it) => [it.top, it.bottom])[0]"
    (top, bottom), word = (tab.evaluate(at, name) for name in ("strip", "word-20"))
    assert bottom - top < 60 and top - 1 <= word[0] and word[1] <= bottom + 1


def test_a_command_computes_it_ahead(reports, tmp_path):
    from clearhead_cli.look import _without_writers

    report, ahead = reports
    model = Checkpoint(report.folder)
    computed = _without_writers(model, report.text, report)
    assert computed.guesses == ahead.guesses != report.guesses
    assert _without_writers(model, report.text, ch.report(model, report.text)) is None


# ---- in a page that computes ----------------------------------------------------------

FIRST = "Once upon a time there was a quiet queen. She danced in the castle."
OTHER = "A young wizard gave two old books away because two witches had all the potions."


@pytest.fixture
def live(visit):
    return visit(ch.report(storyteller.load(), FIRST, progress=False))


def test_enter_inserts_no_token(live):
    live.locator("#text").focus()
    live.keyboard.press("End")
    live.keyboard.press("Enter")
    assert live.locator("#text").input_value() == FIRST
    live.keyboard.press("Shift+Enter")
    assert live.locator("#text").input_value() == f"{FIRST}\n"


def test_a_long_line_is_wrapped_in_the_field(live):
    field, size = live.locator("#text"), "it => [it.scrollWidth - it.clientWidth, it.rows]"
    field.fill(OTHER)
    assert field.evaluate(size) == [0, 1]
    field.fill(" ".join([OTHER] * 3))
    assert field.evaluate(size) == [0, 2]


def test_a_telling_token_has_more_than_one_key(live):
    places = "[...snapshot().places()].map(({ layer, head }) => tellingQuery(layer, head))"
    assert all(query > 0 for query in live.evaluate(places))


def test_another_text_without_the_chosen_word_begins_at_a_telling_one(live):
    assert live.evaluate("current.tokens.length") == 16
    live.evaluate("go({ layer: 1, head: 7, query: 8, key: 3 })")  # "queen"
    live.locator("#text").fill(OTHER)
    live.wait_for_function("() => current.tokens[0] === 'A'")
    assert live.evaluate("current.tokens.length") == 16
    chosen = live.evaluate("chosen.query")
    assert chosen == live.evaluate("tellingQuery(1, 7)") != 8
    live.evaluate("go({ query: 4, key: null })")
    live.locator("#text").fill(OTHER.replace("books", "gems"))  # the words beside it are the same
    live.wait_for_function("() => current.tokens.includes('gems(?)')")
    assert live.evaluate("chosen.query") == 4

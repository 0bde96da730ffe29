"""Words on the page: directions of writing, pieces of words, links that wrap, what is copied."""

from dataclasses import replace

import clearhead as ch
from clearhead import demo as storyteller
from tests.views.test_report_page import toy_report

MIXED = ["שלום", "hello", ",", "new", "world", "עולם", "טוב"]


def places(tab):
    """The left end of each word, in the strip and in the picture."""
    strip = tab.evaluate(
        "[...document.querySelectorAll('.word')].map((it) => it.getBoundingClientRect().x)"
    )
    picture = tab.evaluate(
        "picture.targets.filter((it) => it.changes?.query !== undefined && it.changes.key === null)"
        ".map((it) => [it.changes.query, it.x])"
    )
    return strip, [x for _, x in sorted(picture)]


def test_words_from_left_to_right_keep_their_order_in_a_line_from_right_to_left(visit):
    tab = visit(toy_report(7, tokens=MIXED), hash="#layer=2&head=3&query=4")
    for first, hello, comma, new, world, after, last in places(tab):
        assert hello < comma < new < world, "as they are read"
        assert last < after < hello and world < first, "the others from the right"


def test_the_frame_of_a_piece_is_open_where_it_touches_another(visit):
    report = toy_report(5, tokens=["a", "se", "ven", "th", "day"])
    tab = visit(report, hash="#layer=2&head=3&query=2")
    tab.evaluate("current.joined = new Set([2, 3]); fillAll(); draw()")
    frames = "picture.shapes.filter((it) => it.stroke === 'mark' && it.line === 2.5)"
    assert tab.evaluate(f"{frames}.map((it) => it.kind)") == ["path"]
    tab.evaluate("go({ query: 4 })")
    assert tab.evaluate(f"{frames}.map((it) => it.kind)") == ["rect"]


def test_links_of_a_query_use_one_side(visit):
    text = (
        "Once upon a time there was a quiet queen and a young wizard. She danced in the castle "
        "because she was proud. He gave his books to her."
    )
    report = replace(ch.report(storyteller.load(), text), model=None)
    tab = visit(report, viewport={"width": 390, "height": 844})
    tab.evaluate("chosen.threshold = 0.01")
    for query in (11, 17, 23, 27):
        for head in (0, 2, 4):
            tab.evaluate(f"go({{ layer: 0, head: {head}, query: {query}, key: null }})")
            sides = tab.evaluate(
                """picture.shapes.filter((it) => it.weight && it.d.includes('L')).map((it) => {
                  const x = [...it.d.matchAll(/Q ([\\d.]+) /g)].map((match) => Number(match[1]));
                  return Math.min(...x) <= 5 ? "left" : "right"; })"""
            )
            assert len(set(sides)) <= 1


def test_the_link_is_copied_by_a_button(visit):
    tab = visit(toy_report(7))
    tab.evaluate("navigator.clipboard.writeText = async (text) => { globalThis.copied = text; }")
    tab.locator("#link").click()
    tab.locator("#link", has_text="Copied").wait_for()
    assert tab.evaluate("copied === location.href")


def test_a_comparison_is_ended_by_its_button(visit):
    tab = visit(toy_report(7))
    assert tab.locator("#beside").text_content() == "Compare"
    tab.locator("#beside").click()
    assert tab.locator("#beside").text_content() == "Done"
    tab.locator(".tile").first.click()
    tab.locator("#beside").click()
    assert tab.locator("#beside").text_content() == "Compare"
    tab.get_by_role("button", name="End the comparison").click()
    assert tab.evaluate("chosen.others") == []


def test_a_phone_shows_what_happens_without_the_head_in_full(visit):
    text = "Long ago there was a witch. She took her"
    report = ch.report(storyteller.load(), text, next_token=True)
    page = replace(report, begin=None, model=None)
    tab = visit(page, viewport={"width": 390, "height": 844})
    sentence = tab.locator("#sentence")
    assert "Without this head the probability of potions" in sentence.inner_text()
    assert sentence.evaluate("(it) => it.scrollHeight <= it.clientHeight")
    assert tab.locator("#picture").bounding_box()["y"] < 500


def test_two_numbers_beside_a_role_are_explained(visit):
    report = toy_report(11, layers=23)
    first = report[22, 3]
    second = replace(first.roles[0], name="first", label="first token (sink)")
    layer = report.layers[22]
    heads = (*layer.heads[:3], replace(first, roles=(*first.roles, second)))
    layers = (*report.layers[:22], replace(layer, heads=heads))
    tab = visit(replace(report, layers=layers))
    assert tab.locator("#grid .label", has_text="first token").inner_text().endswith("+ 1")
    assert "in other rows that have its role" in tab.locator("#grid-note").inner_text()

"""Words on the page: directions of writing, pieces of words, links that wrap, what is copied."""

from dataclasses import replace

import pytest
import torch

import clearhead as ch
from clearhead import demo as storyteller
from clearhead.core.formatting import Token
from tests.hf.test_models import config
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


def test_the_frame_of_a_piece_has_four_sides(visit):
    """Without the side where it touches another, that of a comma was a bracket."""
    report = toy_report(5, tokens=["a", "se", "ven", "th", "day"])
    tab = visit(report, hash="#layer=2&head=3&query=2")
    tab.evaluate("current.joined = new Set([2, 3]); fillAll(); draw()")
    frames = "picture.shapes.filter((it) => it.stroke === 'mark' && it.line === 2.5)"
    for query in (1, 2, 3, 4):
        tab.evaluate(f"go({{ query: {query} }})")
        assert tab.evaluate(f"{frames}.map((it) => it.kind)") == ["rect"]
        [text] = tab.evaluate(
            f"picture.shapes.filter((it) => it.serif && it.text === '{report.tokens[query]}' && "
            "it.align === 'center')"
        )
        [frame] = tab.evaluate(frames)
        assert tab.evaluate("(it) => widthOf(it.text, it)", text) < frame["width"] + 1
        shadow = tab.locator(f"#word-{query}").evaluate("it => getComputedStyle(it).boxShadow")
        assert shadow.endswith("0px 0px 0px 2px inset"), shadow


def test_predictions_that_differ_in_the_space_before_them_are_told_apart(visit):
    report = toy_report(5, tokens=["a", "b", "c", "d", "e"])
    the, bare = Token(" the", "Ġthe", 262), Token("the", "the", 1169)
    guesses = ((bare, 0.4), (the, 0.3), (Token(" cat", "Ġcat", 3797), 0.2), (" ", 0.1))
    tab = visit(replace(report, guesses=(guesses,) * 5), hash="#layer=2&head=3&query=4")
    assert tab.locator(".guess").text_content() == "→ the 40 %"
    shown = "picture.shapes.filter((it) => it.kind === 'text' && it.serif).map((it) => it.text)"
    assert tab.evaluate(shown)[-4:] == ["the", "␣the", "cat", "␣"]
    tab.evaluate(
        """[store.before, store.edited] = [current, Object.assign(Object.create(current),
             { guesses: current.guesses.map(() => [["␣the", 0.9], ["the", 0.05]]) })]; go({});"""
    )
    assert "The next token is “␣the” (90 %) instead of “the” (40 %)" in (
        tab.locator("#edit-outcome").text_content()
    )
    assert "“␣the” goes from 30 % to 90 %" in tab.locator("#edit-outcome").text_content()
    assert {"30 % → 90 %", "40 % → 5 %"} <= set(
        tab.evaluate("picture.shapes.filter((it) => it.kind === 'text').map((it) => it.text)")
    )


def test_a_head_links_to_the_token_that_shows_its_role(visit):
    words = "Ann met Bob . Then Ann met Bob , and so Ann met".split()
    report = toy_report(len(words), tokens=words)
    tab = visit(report, hash="#layer=2&head=3&query=5")
    link = tab.locator("#example")
    assert link.is_hidden(), "this token shows it"
    tab.evaluate("go({ query: 0, key: null })")
    assert link.text_content() == "seen at “met” → “Ann”"
    link.click()
    assert tab.evaluate("chosen.query") == 1 and link.is_hidden()
    assert "This head looks at the token before." in tab.locator("#sentence").text_content()


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
    note = tab.locator("#grid-note").inner_text()
    assert note.startswith("“0 + 1”: 0 heads in this row, and 1 in other rows that has its role")


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_encoder_decoder_and_cross_attention_are_named(visit, kind):
    transformers = pytest.importorskip("transformers")
    ch.hf.register()
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(
        config(kind), attn_implementation="clearhead"
    )
    ours, theirs = [f"s{i}" for i in range(7)], [f"t{i}" for i in range(5)]
    ids = torch.arange(3, 10)[None]
    given = {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    report = ch.report(model.eval(), given, tokens=ours, decoder_tokens=theirs, progress=False)
    tab = visit(report)
    tab.locator("#order").select_option("matrix")
    short = {"encoder": "enc.", "decoder": "dec.", "cross-attention": "cross"}
    assert tab.locator("#grid .axis.row").all_text_contents()[1:] == [
        f"L{layer.number} {short[report.part_of(layer)]}" for layer in report.layers
    ]
    assert tab.evaluate("(it) => it.scrollWidth <= it.clientWidth", tab.query_selector("#grid"))
    for layer in report.layers:
        part = report.part_of(layer)
        tab.evaluate(f"go({{ layer: {layer.number}, head: 1, query: 2, key: null }})")
        place = f"L{layer.number}H1"
        assert tab.locator("#head-title").text_content().startswith(f"{place} ({part})")
        tile = tab.locator(f"[data-place='{layer.number}.1']")
        spoken = tile.get_attribute("aria-label")
        assert spoken.startswith(f"layer {layer.number}, head 1 ({part}): ")
        crosses = "its queries are the decoder's tokens, and its keys the encoder's."
        assert (crosses in tab.locator("#sentence").text_content()) == layer.cross_attention
        assert (
            tab.locator("#sentence")
            .text_content()
            .startswith(f"{place}: {'st'[layer.in_decoder]}2")
        )


def test_a_token_without_letters_is_in_quotes_in_a_sentence(visit):
    tab = visit(ch.explain_text("the cat sat"))
    assert tab.evaluate("quoted(',')") == "“,”"
    assert tab.evaluate("quoted('der')") == "der"


def test_a_token_from_the_right_does_not_turn_the_sentence_around_it(visit):
    tab = visit(ch.explain_text("the cat sat"))
    turned = "(it) => isolated(it)"
    assert tab.evaluate(turned, "cat") == "cat"
    for token in "؟", "كان", "שלום":
        assert tab.evaluate(turned, token) == f"\u2068{token}\u2069"

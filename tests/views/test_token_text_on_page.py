"""How the page writes tokens of a vocabulary: as text, pieces of a word without a gap."""

from itertools import pairwise

import pytest
import torch

import clearhead as ch
from clearhead.core.formatting import Token
from clearhead.views import html

TOKENS = [
    Token("The", "The", 464),
    Token(" un", "Ġun", 555),
    Token("believ", "believ", 11203, True),
    Token("able", "able", 540, True),
    Token("\n", "Ċ", 198, True),
    Token(" ", "Ġ", 220),
    Token("⟨E4 BD⟩", "ä½", 19526),
    Token("你", "ł", 254, True),
]


def opened(browser, tmp_path, tokens):
    q = torch.randn(1, 1, len(tokens), 4)
    trace = ch.explain(q, q, q, mask=ch.causal, tokens=tokens)
    page = html.write_page(trace, tmp_path / "page.html", query=3)
    tab = browser.new_page(viewport={"width": 1280, "height": 720})
    tab.goto(page.as_uri())
    return tab


def test_pieces_touch_and_the_pointer_shows_the_spelling(browser, tmp_path):
    tab = opened(browser, tmp_path, TOKENS)
    words = tab.locator("#strip .word")
    assert words.all_text_contents() == "The|un|believ|able|↵|␣|⟨E4 BD⟩|你".split("|")
    boxes = [words.nth(i).locator(".token").bounding_box() for i in range(len(TOKENS))]
    gaps = [b["x"] - a["x"] - a["width"] for a, b in pairwise(boxes)]
    assert boxes[5]["y"] > boxes[4]["y"], "a line end begins a line"
    for gap, token in zip(gaps, TOKENS[1:], strict=True):
        if token == " ":
            continue
        assert abs(gap) < 1 if token.joined else gap > 8, (token, gap)
    title = words.nth(1).locator(".token").get_attribute("title")
    assert title == "un\nin the vocabulary: Ġun, id 555"
    assert tab.locator("#sentence .token").first.get_attribute("title").endswith("able, id 540")
    store, box = "clearhead.store.picture", tab.locator("#picture").bounding_box()
    for view, target in (
        ("text", f"{store}.targets[2]"),
        ("lines", f"{store}.targets[2]"),
        ("map", f"({{...{store}.targets[3], width: {store}.map.cell * 5}})"),
        ("walk", f"{store}.targets[2]"),
    ):
        tab.evaluate(f"clearhead.go({{ view: '{view}' }})")
        at = tab.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({target})"
        )
        tab.mouse.move(box["x"] + at[0], box["y"] + at[1])
        box = tab.locator("#picture").bounding_box()
        tab.mouse.move(box["x"] + at[0] + 1, box["y"] + at[1])
        assert "believ\nin the vocabulary: believ, id 11203" in tab.locator(
            "#picture"
        ).get_attribute("title"), view
    tab.close()


ARABIC = [
    Token("⟨D8⟩", "Ø", 145),
    Token("ذ", "°", 108, True),
    Token("هب", "هب", 32210, True),
    Token(" إلى", "ĠØ¥", 31122),
]


def test_a_text_that_is_written_from_the_right(browser, tmp_path):
    tab = opened(browser, tmp_path, ARABIC)
    words = tab.locator("#strip .word")
    boxes = [words.nth(i).bounding_box() for i in range(len(ARABIC))]
    targets = tab.evaluate("clearhead.store.picture.targets.slice(0, 4)")
    for name, places in (("strip", boxes), ("picture", targets)):
        assert all(b["x"] + b["width"] < a["x"] + 9 for a, b in pairwise(places)), name
    assert boxes[0]["x"] > 1000 and targets[0]["x"] > 500
    tab.locator("#strip").focus()
    tab.keyboard.press("ArrowRight")  # to the word at the right, which is the one before
    assert tab.evaluate("clearhead.chosen.query") == 2
    tab.close()


@pytest.mark.parametrize("first", ["<bos>", "[CLS]", "<|im_start|>"])
def test_a_special_token_does_not_turn_a_text_from_the_right(browser, tmp_path, first):
    tokens = [Token(first, first, 2), *ARABIC[1:]]
    tab = opened(browser, tmp_path, tokens)
    words = tab.locator("#strip .word")
    boxes = [words.nth(i).bounding_box() for i in range(len(tokens))]
    assert all(b["x"] + b["width"] < a["x"] + 9 for a, b in pairwise(boxes))
    assert boxes[0]["x"] > 1000
    tab.close()


def test_each_line_has_the_direction_and_the_indent_of_its_text(browser, tmp_path):
    tokens = [
        Token("if", "if", 1),
        Token("\n   ", "Ċ  Ġ", 2, True),
        Token(" x", "Ġx", 3),
        Token("\n", "Ċ", 4, True),
        *ARABIC,
    ]
    tab = opened(browser, tmp_path, tokens)
    words = tab.locator("#strip .word")
    boxes = [words.nth(i).bounding_box() for i in range(len(tokens))]
    targets = tab.evaluate("clearhead.store.picture.targets.slice(0, 8)")
    for name, places in (("strip", boxes), ("picture", targets)):
        assert places[2]["x"] > places[0]["x"] + 15, name
        assert places[0]["x"] < places[1]["x"] and places[2]["x"] < places[3]["x"], name
        arabic = places[4:]
        assert len({place["y"] for place in arabic}) == 1, name
        assert all(b["x"] + b["width"] < a["x"] + 9 for a, b in pairwise(arabic)), name
    tab.close()

"""The model in the page computes what Python computes: numbers, guesses, edits, refusals."""

import json
import re
from dataclasses import replace

import pytest
import torch

import clearhead as ch
from clearhead import demo as storyteller
from clearhead.demo.model import untrained
from clearhead.views import html
from examples.storyteller.grammar import story
from tests.views.browser import visits
from tests.views.test_page import map_cell, texts  # a fixture, too

NONE = {"off": [], "temperature": 1, "scale": None, "mask": None, "softcap": None, "dropout": 0,
        "seed": 0}  # fmt: skip
STORY = (
    "Once upon a time there was a quiet queen and a young wizard. She danced in the castle because "
    "she was proud. He gave his books to her."
)
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 400, "height": 850}
SHE = "Once upon a time there was a quiet queen and a young wizard. She danced in the castle."


@pytest.fixture(scope="module")
def teller():
    return storyteller.load()


@pytest.fixture(scope="module")
def page_of_a_text(browser, tmp_path_factory, teller):
    with visits(browser, tmp_path_factory.mktemp("page")) as open_page:
        yield open_page(ch.report(teller, SHE, progress=False))


@pytest.fixture
def compute(page_of_a_text):
    """Read a text in the page: its steps by layer as tensors, and the snapshot without them."""

    def read(text, **edits):
        found = page_of_a_text.evaluate(
            """async ([text, edits]) => JSON.stringify(await source.compute(text, edits),
                 (_, value) => ArrayBuffer.isView(value)
                   ? Array.from(value, (x) => Number.isFinite(x) ? x : String(x)) : value)""",
            [text, {**NONE, **edits}],
        )
        snapshot = json.loads(found)
        layers = [
            {
                step["name"]: torch.tensor([float(x) for x in step["values"]]).view(step["stored"])
                for step in layer["steps"]
            }
            for layer in snapshot["layers"]
        ]
        return layers, snapshot

    return read


def stories(count):
    return [str(story(0, number)) for number in range(count)]


def test_texts_give_the_weights_of_python(compute, teller):
    texts = [*stories(4), SHE, "The zebra sang!", "It's late; Émile's café…", "雨が降る owl", "a"]
    for text in texts:
        layers, snapshot = compute(text)
        reading = teller.read(text, 6)
        assert snapshot["tokens"] == teller.encode(text).labels()
        assert snapshot["unknown"] == [i for i, unknown in enumerate(reading.unknown) if unknown]
        for number, layer in enumerate(layers):
            trace = teller.explain(text, number)
            assert list(layer) == [step.name for step in trace]
            torch.testing.assert_close(layer["weights"], trace["weights"], rtol=0, atol=5e-6)
            torch.testing.assert_close(layer["output"], trace["output"], rtol=0, atol=5e-5)
        for ours, theirs in zip(snapshot["guesses"], reading.guesses, strict=True):
            found = [p for _, p in ours]
            assert found == pytest.approx([p for _, p in theirs], abs=3e-4)


def test_a_page_with_the_model_stays_small(teller):
    page = html.report_page(ch.report(teller, SHE, progress=False))
    assert 1_000_000 < len(page) < 3_000_000


def explained(teller, **changes):
    """The weights of layer 0 by `explain` with other keywords, of the q, k and v of the text."""
    trace = teller.explain(SHE, 0)
    q, k, v = (trace[name] for name in ("query", "key", "value"))
    keywords = {"bias": trace["biased"] - trace["scaled"], "mask": ch.causal, **changes}
    return ch.explain(q, k, v, **keywords)


@pytest.mark.parametrize(
    ("edits", "changes"),
    [
        ({"scale": 1}, {"scale": 1.0}),
        ({"softcap": 0.5}, {"softcap": 0.5}),
        ({"mask": "causal & window(3, 0)"}, {"mask": ch.causal & ch.window(3, 0)}),
        (
            {"mask": "~prefix(2) | window(before=0)"},
            {"mask": ch.causal & (~ch.prefix(2) | ch.window(before=0))},
        ),
        ({"mask": "lengths(keys=4)"}, {"mask": ch.causal & ch.lengths(keys=4)}),
        ({"dropout": 0.3, "seed": 7}, {"dropout": 0.3, "seed": 7}),
        ({"dropout": 0.5, "seed": 2**40 + 1}, {"dropout": 0.5, "seed": 2**40 + 1}),
    ],
)  # fmt: skip
def test_edits_are_the_keywords_of_attention(compute, teller, edits, changes):
    layers, _ = compute(SHE, **edits)
    trace = explained(teller, **changes)
    assert list(layers[0]) == [step.name for step in trace]
    for name in ("weights", "output", *(["dropped"] if "dropout" in edits else [])):
        torch.testing.assert_close(layers[0][name], trace[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("edits", "python"),
    [
        ({"temperature": 2.5}, [ch.edits.temperature(2.5)]),
        ({"mask": "window(before=2)"}, [ch.edits.keep_only(ch.window(before=2))]),
        ({"off": [[0, 7], [0, 1]]}, [ch.edits.ablate(layers=[0], heads=[7, 1])]),
    ],
)
def test_edits_are_those_of_intervene(compute, teller, edits, python):
    layers, snapshot = compute(SHE, **edits)
    ids = torch.tensor([teller.encode(SHE).ids])
    T = ids.shape[1]
    with (
        torch.no_grad(),
        ch.intervene(teller.model, python),
        ch.watch(teller.model, stats=[], exact_rows=range(T)) as recording,
    ):
        logits = teller.model(ids)
    for layer, call in zip(layers, recording, strict=True):
        torch.testing.assert_close(layer["weights"], call.exact_rows[0], rtol=0, atol=1e-4)
    best = logits[0].softmax(-1).topk(6).values
    found = torch.tensor([[p for _, p in guesses] for guesses in snapshot["guesses"]])
    torch.testing.assert_close(found, best, rtol=0, atol=3e-4)


@pytest.mark.parametrize(
    ("text", "edits", "words"),
    [
        ("  ", {}, "has no words"),
        ("the " * 129, {}, "context of this model is 128"),
        (SHE, {"mask": "causl"}, "no mask is called 'causl'"),
        (SHE, {"mask": "window"}, "needs its numbers"),
        (SHE, {"mask": "window(x=1)"}, "'x' is not an argument"),
        (SHE, {"mask": "window(3)"}, "a window needs two numbers"),
        (SHE, {"mask": "(causal"}, "bracket is open"),
        (SHE, {"mask": "causal causal"}, "too much"),
        (SHE, {"mask": "causal &"}, "ends too early"),
    ],
)
def test_what_cannot_be_read_is_said(compute, text, edits, words):
    with pytest.raises(Exception, match=words):
        compute(text, **edits)


def test_typing_another_pronoun_shows_whom_it_means(visit, teller):
    text = "Once upon a time there was a quiet queen and a young king. She danced in the castle."
    tab = visit(ch.report(teller, text, progress=False), hash="#layer=0&head=7")
    weights = "current.layer(0).row(current.layer(0).used, 7, {})[{}]"
    for pronoun, noun in (("She", "queen"), ("He", "king")):
        words = text.replace("She", pronoun)
        tab.locator("#text").fill(words)
        tab.wait_for_function(f"() => current.tokens.includes('{pronoun}')")
        query, key = (teller.encode(words).tokens.index(word) for word in (pronoun, noun))
        weight = tab.evaluate(weights.format(query, key))
        expected = teller.explain(words, 0)["weights"][7, query, key].item()
        assert weight == pytest.approx(expected, abs=1e-4)
        assert weight > 0.85


def test_the_line_beside_the_title_and_the_query_follow_the_text(visit, teller):
    tab = visit(ch.report(teller, SHE, progress=False), hash="#layer=0&head=7&query=queen")
    tab.locator("#text").fill("A king slept. He dreamed.")
    tab.wait_for_function("() => current.tokens.includes('king')")
    assert tab.locator("#about").text_content() == "2 layers, 16 heads, 7 tokens"
    assert tab.evaluate("current.tokens[chosen.query]") == "He"  # no queen is left to be chosen


def test_the_text_field_keeps_lines(visit, teller):
    text = "The cat sat\non the mat."
    tab = visit(ch.report(teller, text))
    field = tab.locator("#text")
    assert field.input_value() == text and field.evaluate("it => it.rows") == 2
    code = "there was a queen .\n\n    she danced"
    field.fill("")
    tab.keyboard.insert_text(code)
    tab.wait_for_function("() => current.text.startsWith('there')")
    assert field.input_value() == tab.evaluate("current.text") == code


def test_typing_and_undoing_brings_labels_back(visit, teller):
    tab = visit(ch.report(teller, SHE, effects=True, progress=False))
    labels, note = "byId('labels').textContent", tab.locator("#grid-note")
    first = tab.evaluate(labels)
    assert "previous token" in first and note.text_content() == ""
    tab.locator("#text").press("End")
    tab.keyboard.insert_text(" He slept.")
    tab.wait_for_function("() => current.text.endsWith('slept.')")
    assert "previous token" not in tab.evaluate(labels)
    assert "Labels and effects" in note.text_content() or "undo to see them" in note.text_content()
    tab.keyboard.press("Control+z")
    tab.wait_for_function("() => !current.text.endsWith('slept.')")
    assert tab.evaluate(labels) == first and note.text_content() == ""


def test_page_and_report_show_the_same_digits(visit, teller):
    """Recomputed by the page, before an edit of another head, a pair has the digits of Python."""
    tab = visit(ch.report(teller, STORY), hash="#layer=0&head=7&query=14")
    shown = "[...byId('reading').querySelectorAll('[data-step] b')].map((it) => it.textContent)"
    first = tab.evaluate(shown)
    tab.evaluate("edit({ off: [[1, 0]] })")
    tab.wait_for_function("() => edited !== null")
    assert tab.evaluate(shown) == first and len(first) == 4
    trace = teller.explain(STORY, 0)
    for name, text in zip(("scores", "scaled", "biased", "weights"), first, strict=True):
        assert float(text.replace("\u2212", "-")) == float(f"{trace[name][7, 14, 8].item():.5g}")


def test_of_forty_words_every_head_keeps_its_steps(visit, teller):
    """A text of usual length: nothing has to be computed again."""
    tab = visit(ch.report(teller, " ".join(["There was a queen. She danced."] * 6)))
    tab.evaluate("go({ view: 'numbers', layer: 1, head: 5, query: 40, key: 3 })")
    assert "too long" not in tab.locator("#panel").text_content()


def test_a_text_that_is_kept_stands_beside_another(visit, teller):
    text = "Once upon a time there was a quiet queen and a young king. She danced in the castle."
    tab = visit(ch.report(teller, text, progress=False), hash="#layer=0&head=7&query=She")
    tab.get_by_role("button", name="Keep this text").click()
    tab.locator("#text").fill(text.replace("She", "He"))
    tab.wait_for_function("() => current.tokens.includes('He')")
    assert tab.evaluate("sides().map((it) => it.name)") == ["L0H7 kept", "L0H7 now"]
    query = teller.encode(text).tokens.index("She")
    largest = [
        tab.evaluate(
            f"(() => {{ const {{ trace, head, from }} = sides()[{i}];"
            f" return from.tokens[largestAt(trace.row(trace.used, head, {query}))]; }})()"
        )
        for i in (0, 1)
    ]
    assert largest == ["queen", "king"]
    tab.locator("#difference").click()
    assert tab.evaluate("chosen.difference") is True
    address = tab.evaluate("location.hash")

    tab.locator("#text").fill("He slept.")
    tab.wait_for_function("() => current.tokens.length === 3")
    assert tab.locator("#difference").count() == 0 and tab.evaluate("chosen.difference") is False
    assert tab.evaluate("sides().length") == 2
    tab.get_by_role("button", name="Remove the kept text").click()
    assert tab.evaluate("kept") is None and "kept" not in tab.evaluate("location.hash")

    again = visit(ch.report(teller, text, progress=False), hash=address)
    again.wait_for_function("() => kept !== null && sides().length === 2")
    assert again.evaluate("[kept.text, current.text]") == [text, text.replace("She", "He")]


def test_words_of_two_texts_are_the_same_ones_wherever_they_stand(visit, teller):
    """A word pointed at in one text is pointed at in the other, if it is there."""
    text = "Once upon a time there was a quiet queen. She danced."
    tab = visit(ch.report(teller, text, progress=False), hash="#layer=0&head=7&query=She")
    tab.get_by_role("button", name="Keep this text").click()
    tab.locator("#text").fill("A quiet queen slept. She danced and she sang.")
    tab.wait_for_function("() => current.tokens.includes('sang')")
    said = "((side) => [side.query, side.from.tokens[side.query]])(sides()[{}])"
    assert tab.evaluate(said.format(0)) == [10, "She"] and tab.evaluate(said.format(1)) == [
        5,
        "She",
    ]
    # A click on "queen" of the kept text, where it is word 8, chooses word 2 of the text.
    assert tab.evaluate("sides()[0].back({ query: 8, key: null })") == {"query": 2, "key": None}
    assert tab.evaluate("sides()[0].back({ query: 3, key: null })") is None  # "time"
    tab.evaluate("go({ query: 8 })")  # the second "she", which the kept text does not have
    assert tab.evaluate("[sides()[0].query, sides()[1].query]") == [None, 8]
    drawn = "picture.shapes.filter((it) => it.kind === 'text').map((it) => it.text)"
    assert "L0H7 kept: no “she”" in tab.evaluate(drawn)
    for view in ("lines", "map", "walk", "numbers"):
        tab.locator(f"#view-{view}").click()
    assert tab.evaluate("chosen.view") == "numbers"


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        ("a b c", "a b c", [0, 1, 2]),
        ("a x c", "a y c", [0, 1, 2]),  # one word for another
        ("a c", "a b c", [0, 2]),
        ("a b c", "c", [None, None, 0]),
        ("a x y c", "a z c", [0, None, None, 2]),
        ("x a", "a b", [None, 0]),
        ("x y", "z", [None, None]),
        ("", "a", []),
    ],
)
def test_the_alignment_of_two_texts(page_of_a_text, here, there, words):
    texts = here.split(), there.split()
    assert page_of_a_text.evaluate("([a, b]) => alignment(a, b)", texts) == words


def test_two_models_stand_side_by_side(visit, teller):
    torch.manual_seed(0)
    other = storyteller.Storyteller(untrained(teller.model.config).eval(), teller.vocabulary, {})
    found, beside = (ch.report(x, SHE, progress=False) for x in (teller, other))
    tab = visit(found, hash="#layer=0&head=7&query=She", beside=replace(beside, name="untrained"))
    tab.get_by_role("button", name="Beside untrained").click()
    assert tab.evaluate("sides().map((it) => it.name)") == ["L0H7 untrained", "L0H7 storyteller"]
    query, queen = (teller.encode(SHE).tokens.index(word) for word in ("She", "queen"))
    for i, model in enumerate((other, teller)):
        weight = tab.evaluate(
            f"(() => {{ const {{ trace, head }} = sides()[{i}];"
            f" return trace.row(trace.used, head, {query})[{queen}]; }})()"
        )
        assert weight == pytest.approx(
            model.explain(SHE, 0)["weights"][7, query, queen].item(), abs=1e-4
        )
    assert "kept=model" in tab.evaluate("location.hash")
    shorter = ch.report(teller, "She slept.", progress=False)
    with pytest.raises(ch.BadValue, match="have the texts 'Once upon"):
        html.report_page(found, beside=shorter)


@pytest.mark.parametrize("viewport", [WIDE, NARROW])
def test_where_the_query_looks_is_in_sight_before_and_after(visit, teller, viewport):
    found = ch.report(teller, STORY, progress=False)
    tab = visit(found, hash="#layer=0&head=7&query=his", viewport=viewport)
    tab.evaluate("document.getElementById('whatif').click()")
    tab.evaluate("document.getElementById('edit-off').click()")
    tab.wait_for_function("() => edited !== null")
    words = tab.evaluate("""picture.shapes
        .filter((it) => it.kind === 'text' && it.serif && it.align === 'center')
        .map((it) => [it.text, it.y])""")
    for word in ("his", "wizard"):
        assert [text for text, _ in words].count(word) == 2, "once in each panel"
    first = {word: next(y for text, y in words if text == word) for word in ("his", "wizard")}
    assert first["wizard"] < first["his"] < tab.evaluate("byId('view').clientHeight")
    assert sum(text == "because" for text, _ in words) == 2, "every word is drawn"
    assert "⋯" not in texts(tab)
    tab.evaluate("text => compute(text, chosen.edits)", f"{STORY} {STORY} {STORY} {STORY}")
    tab.wait_for_function("() => current.tokens.length === 124 && edited !== null")
    assert "⋯" in texts(tab) or viewport is WIDE, "what is left out is marked"


def test_words_out_of_sight_are_hinted_at(visit, teller):
    found = ch.report(teller, STORY, progress=False)
    tab = visit(found, hash="#layer=0&head=7&query=his&view=map", viewport=NARROW)
    strip = tab.locator("#strip")
    assert "more-above" in strip.get_attribute("class")
    strip.evaluate("it => { it.scrollTop = 0 }")
    tab.wait_for_function("() => !byId('strip').classList.contains('more-above')")
    assert "more-below" in strip.get_attribute("class")
    tab.set_viewport_size(WIDE)
    tab.wait_for_function("() => !byId('strip').className.includes('more')")


def test_a_word_that_is_unknown_is_explained(visit, teller):
    tab = visit(ch.report(teller, "A zebra slept.", progress=False))
    known = sum(word[0].isalpha() for word in teller.vocabulary.words)
    said = tab.locator("#unknown")
    assert said.inner_text() == (
        "(?) marks words outside the model's vocabulary, which it reads as one unknown word. "
        f"It knows {known} words."
    )
    tab.locator("#text").fill("A queen slept.")
    tab.wait_for_function("() => current.tokens.includes('queen')")
    assert said.is_hidden()


def test_while_a_text_is_refused_the_one_before_is_dimmed(visit, teller):
    tab = visit(ch.report(teller, SHE, progress=False), hash="#layer=0&head=7&query=queen")
    faded = "getComputedStyle(byId('{}')).opacity"
    long = "the " * 129
    tab.locator("#text").fill(long)
    tab.wait_for_function(
        "() => byId('typed').textContent.includes('context of this model is 128')"
    )
    for part in ("strip", "grid", "view", "reading"):
        assert float(tab.evaluate(faded.format(part))) < 0.5, part
    tab.locator("[data-place='1.7']").click()
    assert tab.locator("#text").input_value() == long, "the message is about this text"
    assert float(tab.evaluate(faded.format("grid"))) < 0.5
    tab.locator("#text").fill("A queen slept.")
    tab.wait_for_function("() => current.tokens.length === 4")
    assert tab.locator("#typed").text_content() == ""
    assert [tab.evaluate(faded.format(part)) for part in ("strip", "grid", "view")] == ["1"] * 3
    tab.evaluate("edit({ mask: 'causl' })")
    tab.wait_for_function("() => byId('typed').textContent.includes('causl')")
    assert tab.evaluate(faded.format("grid")) == "1", "what is shown is of this text"


def test_every_word_of_the_map_can_be_read(visit, teller):
    found = ch.report(teller, STORY, progress=False)
    tab = visit(found, hash="#layer=0&head=7&query=his&view=map", viewport=WIDE)
    labels = """(turn) => picture.shapes.filter((it) => it.kind === 'text' && it.turn === turn
        && it.size === 13 && !it.bold === %s && it.x < picture.map.x + picture.map.cell * 31)
        .map((it) => it.text)"""
    plain, bold = labels % "true", labels % "false"
    rows = tab.evaluate(plain, 0)
    assert [*rows, *tab.evaluate(bold, 0)] == sorted(found.tokens, key=lambda word: word == "his")
    for row, column in ((24, 11), (24, 12)):
        tab.mouse.move(*map_cell(tab, row, column))
        assert tab.evaluate(bold, -90) == [found.tokens[column]]
        assert tab.evaluate(bold, 0) == [found.tokens[row]]
    tab.set_viewport_size({"width": 1600, "height": 1100})
    tab.mouse.move(0, 0)
    tab.wait_for_function("() => byId('view').clientHeight > 600")
    labels = {*tab.evaluate(plain, -90), *tab.evaluate(bold, -90)}
    assert labels == set(found.tokens)


@pytest.mark.parametrize("viewport", [WIDE, NARROW])
def test_what_a_label_rests_on_is_written_out(visit, teller, viewport):
    found = ch.report(teller, STORY, progress=False)
    tab = visit(found, hash="#layer=0&head=7", viewport=viewport)
    lead = tab.locator("#head-lead")
    assert lead.text_content().endswith(found[0, 7].evidence)
    assert lead.evaluate(
        "it => it.scrollWidth <= it.clientWidth && it.scrollHeight <= it.clientHeight"
    )
    overlaps = "(a, b) => a.top < b.bottom && b.top < a.bottom"
    assert not lead.evaluate(
        f"it => [...it.parentElement.children].some(x => x !== it && x.offsetHeight && ({overlaps})"
        "(it.getBoundingClientRect(), x.getBoundingClientRect()))"
    )


def test_every_number_of_a_pair_is_explained(visit, teller):
    tab = visit(ch.report(teller, SHE, progress=False), hash="#layer=0&head=7&query=She")
    titles = {
        it.get_attribute("data-step"): it.get_attribute("title")
        for it in tab.locator("#reading [data-step]").all()
    }
    assert list(titles) == ["scores", "scaled", "biased", "weights"]
    line = re.sub(r"[\d.−]+", "n", tab.locator("#reading").text_content())
    assert line.endswith("score n·scaled score n·score with bias n·weight n")
    for name, words in (
        ("scores", "query times key"), ("scaled", "divided by the square root of the head size"),
        ("biased", "learned number for this distance"), ("weights", "weight of this key"),
    ):  # fmt: skip
        assert titles[name].startswith(f"{name}: ") and words in titles[name]
        assert f"{name} = " in titles[name], "its formula"


def test_who_else_looks_there_is_said_where_a_strong_label_has_a_small_effect(visit, teller):
    found = ch.report(teller, STORY, effects=True, progress=False)
    assert abs(found[0, 7].effect) < max(abs(head.effect) for head in found.heads) / 10
    tab = visit(found, hash="#layer=0&head=7&query=his")
    query, key = (found.tokens.index(word) for word in ("his", "wizard"))
    weights = [teller.explain(STORY, layer)["weights"] for layer in (0, 1)]
    there = [
        f"L{layer}H{head}"
        for layer in (0, 1)
        for head in range(8)
        if weights[layer][head, query, key] >= 0.3 and (layer, head) != (0, 7)
    ]
    said = tab.locator("#effect")
    assert len(there) == 3
    assert said.text_content().endswith(
        f"Heads {there[0]}, {there[1]} and {there[2]} look there, too."
    )
    assert "what changes without it" in said.get_attribute("title")
    tab.evaluate("go({ key: 0 })")  # where this head does not look
    assert "look" not in said.text_content()
    tab.evaluate("go({ layer: 0, head: 1, key: null })")  # whose effect is the largest
    assert (
        said.text_content().startswith("without it: loss +") and "there" not in said.text_content()
    )


def ask(tab, name, value):
    tab.locator(f"#edit-{name}").fill(value)
    tab.locator(f"#edit-{name}").blur()


def test_an_edit_that_changes_no_number_is_no_edit(visit, teller):
    tab = visit(ch.report(teller, SHE, progress=False), hash="#layer=0&head=7&view=map")
    tab.locator("#whatif").click()
    ask(tab, "seed", "5")
    tab.wait_for_function("() => chosen.edits.seed === 5")
    assert tab.evaluate("edited") is None
    assert "matters only with dropout" in tab.locator("#edit-said").text_content()
    ask(tab, "mask", "everything")
    tab.wait_for_function("() => chosen.edits.mask === 'everything'")
    assert tab.evaluate("edited") is None
    assert "changes no number" in tab.locator("#edit-said").text_content()
    ask(tab, "mask", "causal & window(3, 0)")
    tab.wait_for_function("() => edited !== null")
    assert tab.locator("#edit-said").text_content() == ""


@pytest.mark.parametrize("viewport", [{"width": 1280, "height": 720}, WIDE])
def test_the_first_edit_shows_something(visit, teller, viewport):
    """Heads that look from "She" at the queen know that she dances in a castle."""
    tab = visit(ch.report(teller, STORY), hash="#layer=0&head=7&query=14", viewport=viewport)
    tab.locator("#whatif").click()
    first = tab.locator("#edit-first")
    assert first.text_content() == (
        "Switch off L0H0, L0H3, L0H7, L1H2, which look from “She” at “queen”"
    )
    first.click()
    tab.wait_for_function("() => edited !== null")
    edits = [ch.edits.ablate(layers=[0], heads=[0, 3, 7]), ch.edits.ablate(layers=[1], heads=[2])]
    words = list(teller.words)
    ids = torch.tensor([teller.encode(STORY).ids])
    with torch.no_grad(), ch.intervene(teller.model, edits):
        logits = teller.model(ids)
    castle = logits[0, 17].softmax(-1)[words.index("castle")].item()
    outcome = tab.locator("#edit-outcome")
    assert outcome.text_content().endswith(
        f"After “the” (17), “castle” goes from 99.9 % to {100 * castle:.0f} %: the largest change."
    )
    (before,), (after,) = (
        tab.evaluate(f"{name}.guesses.at(-1).slice(0, 1)") for name in ("store.before", "edited")
    )
    assert before[0] == after[0] and f"The next token is still “{after[0]}” (" in (
        outcome.text_content()
    )
    assert tab.evaluate("byId('controls').firstElementChild.id") == "edit-outcome"
    shown = tab.evaluate(
        "picture.shapes.filter((it) => it.kind === 'text' && it.serif).map((it) => it.text)"
    )
    counts = {word: sum(text == word for text in shown) for word in ("Once", "books", "her")}
    assert set(counts.values()) == {2}, "all words, before and after"
    assert tab.evaluate("picture.height <= byId('view').clientHeight + 1")
    assert first.is_hidden()
    outcome.locator("button").click()
    assert tab.evaluate("chosen.query") == 17
    if viewport == WIDE:  # the smaller one has no room for lists below all words
        assert f"99.9 % → {100 * castle:.0f} %" in texts(tab)
        bars = tab.evaluate(
            "picture.shapes.filter((it) => it.fill === 'rule' && it.height === 10)"
            ".map((it) => [it.y + 5, it.x + it.width])"
        )
        pairs = tab.evaluate(
            "picture.shapes.filter((it) => it.kind === 'text' && it.text.includes(' → '))"
            ".map((it) => [it.y, it.x - widthOf(it.text), it.text])"
        )
        assert pairs and not any("< <" in words or "<<" in words for _, _, words in pairs)
        for y, left, words in pairs:
            assert all(right <= left for at, right in bars if at == y and right < left + 90), words


def test_an_edit_that_changes_no_prediction_says_so(visit, teller):
    tab = visit(ch.report(teller, SHE), hash="#layer=0&head=7&query=3")
    tab.locator("#whatif").click()
    tab.evaluate("edit({ temperature: 1.0001 })")
    tab.wait_for_function("() => edited !== null")
    outcome = tab.locator("#edit-outcome").text_content()
    assert outcome == "No prediction changes by 1 % or more."


def test_before_and_after_are_of_the_same_weights(visit, teller):
    """Those of the page are rounded; what an edit does not reach has a difference of exactly 0."""
    tab = visit(ch.report(teller, SHE, progress=False), hash="#layer=0&head=7&view=map")
    tab.locator("#whatif").click()
    tab.locator("#edit-off").click()
    tab.wait_for_function("() => edited !== null")
    tab.locator("#difference").click()
    assert not tab.evaluate("picture.map.values.some((it) => it !== 0)"), "the weights of layer 0"
    assert {"\u22120.01", "0.01"} <= set(texts(tab)), "the scale of no difference"

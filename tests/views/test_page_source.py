"""A page with a source: another text, and what if; before and after side by side.

The source here is Python, which the browser calls; it records what it was asked for.
"""

import json

import pytest

import clearhead as ch
from clearhead.core.errors import BadValue
from clearhead.views import html
from tests.views.test_page import embedded, texts  # a fixture, too
from tests.views.test_report_page import toy_report

EDITS = ["off", "temperature", "scale", "mask", "softcap", "dropout", "seed"]
NONE = {"off": [], "temperature": 1, "scale": None, "mask": None, "softcap": None, "dropout": 0,
        "seed": 0}  # fmt: skip
WORDS = [f"t{i}" for i in range(11)]


@pytest.fixture
def live(visit):
    """Open a report with a source that can make `edits`. Returns the tab and what it asked for."""

    def open_page(edits=EDITS, **options):
        asked = []

        def compute(text, given):
            asked.append((text, given))
            if text == "refused":
                raise BadValue("The text is refused.", "other texts are not.", "type another.")
            mask = ch.causal if given == NONE else ch.everything
            found = toy_report(len(text.split()), tokens=text.split(), mask=mask)
            return json.dumps(embedded(html.report_page(found)))

        def prepare(tab):
            tab.expose_function("computeInPython", compute)
            tab.add_init_script(
                f"""window.pageSource = () => ({{
                      can: {{ text: true, edits: {json.dumps(list(edits))} }},
                      compute: async (...asked) => JSON.parse(await computeInPython(...asked)),
                    }});"""
            )

        return visit(toy_report(11), prepare=prepare, **options), asked

    return open_page


def settled(tab, condition):
    tab.wait_for_function(f"() => {condition}")


def test_typing_shows_another_text(live):
    tab, asked = live(hash="#layer=1&head=2&query=t3&view=map")
    tab.locator("#text").fill("t0 t1 t2 t3 new t5")
    settled(tab, "current.tokens.length === 6")
    assert asked == [("t0 t1 t2 t3 new t5", NONE)]
    assert tab.locator("#strip [role=option]").all_text_contents() == "t0 t1 t2 t3 new t5".split()
    assert tab.evaluate("[chosen.layer, chosen.head, chosen.query, chosen.view]") == [
        1,
        2,
        3,
        "map",
    ]
    assert tab.evaluate("[picture.map.rows, picture.map.columns]") == [6, 6]
    assert "text=t0+t1+t2+t3+new+t5" in tab.evaluate("location.hash")


@pytest.mark.parametrize(("query", "position"), [("new", 1), ("t9", None)])
def test_an_address_with_a_text_names_words_of_that_text(live, query, position):
    tab, asked = live(hash=f"#layer=1&head=2&query={query}&text=t0+new+t5")
    settled(tab, "current.tokens.length === 3")
    assert asked == [("t0 new t5", NONE)]
    if position is not None:
        settled(tab, f"chosen.query === {position}")
    assert tab.evaluate("[chosen.layer, chosen.head]") == [1, 2]
    settled(
        tab, f"document.getElementById('misread').hidden === {str(position is not None).lower()}"
    )


def test_the_chosen_word_stays_chosen_when_words_are_added_before_it(live):
    tab, _ = live(hash="#layer=1&head=2&query=t7")
    tab.locator("#text").fill(" ".join(["and", "so", *WORDS]))
    settled(tab, "current.tokens.length === 13")
    assert tab.locator("#strip [aria-selected=true]").text_content() == "t7"


@pytest.mark.parametrize(
    ("control", "value", "edit"),
    [
        ("temperature", "1", {"temperature": 2}),
        ("scale", "0.25", {"scale": 0.25}),
        ("mask", "causal & window(3, 0)", {"mask": "causal & window(3, 0)"}),
        ("softcap", "5", {"softcap": 5}),
        ("dropout", "0.3", {"dropout": 0.3}),
    ],
)
def test_every_control_asks_for_its_edit_and_no_other(live, control, value, edit):
    tab, asked = live(hash="#layer=1&head=2&query=t3&view=lines")
    tab.locator("#whatif").click()
    tab.locator(f"#edit-{control}").fill(value)
    tab.locator(f"#edit-{control}").blur()
    settled(tab, "edited !== null")
    assert asked[-1] == (" ".join(WORDS), NONE | edit)
    assert {"L1H2 before", "L1H2 after"} <= set(texts(tab))
    assert tab.evaluate("[chosen.layer, chosen.head, chosen.query, chosen.view]") == [
        1,
        2,
        3,
        "lines",
    ]
    tab.locator("#edit-none").click()
    settled(tab, "edited === null")
    assert "L1H2 after" not in texts(tab)


def test_a_head_is_switched_off_and_on(live):
    tab, asked = live(hash="#layer=1&head=2")
    tab.locator("#whatif").click()
    tab.locator("#edit-off").click()
    settled(tab, "edited !== null")
    assert asked[-1][1] == NONE | {"off": [[1, 2]]}
    assert "off" in tab.locator("[data-place='1.2']").get_attribute("class")
    assert tab.locator("#edit-off").text_content() == "Head L1H2 is off"
    tab.locator("#edit-off").click()
    settled(tab, "edited === null")


def test_before_and_after_as_a_difference(live):
    tab, _ = live(hash="#layer=1&head=2&view=map")
    tab.locator("#whatif").click()
    tab.locator("#edit-scale").fill("1")
    tab.locator("#edit-scale").blur()
    settled(tab, "edited !== null")
    tab.locator("#difference").click()
    before, after = (
        toy_report(11, mask=mask).layers[1].trace["weights"][0, 2]
        for mask in (ch.causal, ch.everything)
    )
    shown = tab.evaluate("[...picture.map.values]")
    assert shown == pytest.approx((after - before).flatten().tolist(), abs=1e-6)


def test_the_address_restores_text_and_edits(live):
    tab, asked = live(hash="#layer=1&head=2")
    tab.locator("#text").fill("t0 t1 t2 t3")
    settled(tab, "current.tokens.length === 4")
    tab.locator("#whatif").click()
    tab.locator("#edit-softcap").fill("7")
    tab.locator("#edit-softcap").blur()
    settled(tab, "edited !== null")
    again, asked = live(hash=tab.evaluate("location.hash"))
    settled(again, "edited !== null")
    assert asked == [("t0 t1 t2 t3", NONE), ("t0 t1 t2 t3", NONE | {"softcap": 7})]
    assert again.evaluate("[chosen.layer, chosen.head]") == [1, 2]
    assert again.locator("#edit-softcap").input_value() == "7"


def test_what_a_source_cannot_do_is_disabled(live):
    tab, _ = live(edits=["scale"])
    tab.locator("#whatif").click()
    assert tab.locator("#edit-scale").is_enabled()
    for name in ("temperature", "mask", "softcap", "dropout", "seed", "off"):
        assert tab.locator(f"#edit-{name}").is_disabled(), name


def test_what_is_refused_is_said_and_the_page_stays(live):
    tab, _ = live()
    tab.locator("#text").fill("refused")
    settled(tab, "document.getElementById('typed').textContent !== ''")
    assert "The text is refused." in tab.locator("#typed").text_content()
    assert tab.locator("#strip [role=option]").count() == 11
    tab.locator("#text").fill("t0 t1")
    settled(tab, "current.tokens.length === 2")
    assert tab.locator("#typed").text_content() == ""


def test_an_older_answer_does_not_replace_a_newer_one(live):
    tab, _ = live()
    tab.evaluate("Promise.all([compute('a a a a', NO_EDITS), compute('b b', NO_EDITS)])")
    assert tab.evaluate("current.tokens") == ["b", "b"]


SLOW = """window.pageSource = () => {
  window.requests = [];
  return {
    can: { text: true, edits: EDITS },
    cancel() {},
    async compute(text, edits) {
      window.requests.push([text, edits]);
      if (text === "refused") throw new Error("The text is refused.");
      if (edits.mask === "wrong") throw new Error("The mask is refused.");
      await new Promise((resolve) => { window.answer = resolve; });
      const tokens = text.split(" ");
      return { ...pageData, tokens, text, guesses: null };
    },
  };
};""".replace("EDITS", json.dumps(EDITS))
ASKED = "requests.at(-1)"


@pytest.fixture
def slow(visit):
    """Open a page whose source answers when the test says so."""
    report = toy_report(11, tokens=WORDS)
    tab = visit(report, prepare=lambda tab: tab.add_init_script(SLOW), hash="#layer=0&head=2")
    tab.locator("#whatif").click()
    return tab


def set_field(tab, name, value):
    tab.locator(f"#edit-{name}").fill(value)
    tab.locator(f"#edit-{name}").blur()


def test_a_change_while_an_answer_is_computed_keeps_the_change_before_it(slow):
    slow.locator("#edit-off").click()
    assert slow.locator("#edit-off").text_content() == "Head L0H2 is off"
    set_field(slow, "mask", "window(before=1)")
    both = NONE | {"off": [[0, 2]], "mask": "window(before=1)"}
    assert slow.evaluate(ASKED) == [" ".join(WORDS), both]
    slow.evaluate("answer()")
    settled(slow, "chosen.edits.mask !== null")
    assert slow.evaluate("chosen.edits") == both
    set_field(slow, "mask", "")
    slow.locator("#edit-off").click()
    settled(slow, "edited === null")
    assert slow.locator("#edit-mask").input_value() == ""


def test_a_text_that_is_typed_is_kept_by_a_change_of_the_edits(slow):
    text = " ".join(reversed(WORDS))
    slow.locator("#text").fill(text)
    slow.locator("#edit-off").click()
    assert slow.locator("#text").input_value() == text
    assert slow.evaluate(ASKED)[0] == text
    slow.evaluate("answer()")
    settled(slow, "requests.at(-1)[1].off.length === 1")
    slow.evaluate("answer()")
    settled(slow, "chosen.edits.off.length === 1")
    assert slow.evaluate("[current.text, chosen.edits.off]") == [text, [[0, 2]]]


def test_what_is_refused_or_stopped_is_asked_for_no_longer(slow):
    slow.locator("#edit-off").click()
    slow.locator("#stop").click()
    assert slow.locator("#edit-off").text_content() == "Head L0H2 on"
    set_field(slow, "mask", "wrong")
    settled(slow, "byId('edit-said').textContent !== ''")
    assert slow.locator("#edit-mask").input_value() == "wrong", "it can be mended"
    set_field(slow, "softcap", "5")
    assert slow.evaluate(ASKED) == [" ".join(WORDS), NONE | {"softcap": 5}]
    assert slow.locator("#edit-mask").input_value() == ""


@pytest.mark.parametrize(
    ("control", "value", "words"),
    [
        ("softcap", "0", "The soft cap is 0. It is a positive number"),
        ("softcap", "-1", "The soft cap is -1."),
        ("seed", "1.5", "The seed is 1.5. It is a whole number"),
        ("seed", "-2", "The seed is -2."),
        ("scale", "1e40", "The scale is 1e+40."),
    ],
)
def test_a_value_that_is_no_edit_is_refused_beside_its_field(live, control, value, words):
    tab, asked = live(hash="#layer=1&head=2")
    tab.locator("#whatif").click()
    field = tab.locator(f"#edit-{control}")
    set_field(tab, control, value)
    assert words in tab.locator("#edit-said").text_content()
    assert (field.input_value(), field.get_attribute("aria-invalid")) == (value, "true")
    assert asked == []
    set_field(tab, control, "3")
    settled(tab, f"chosen.edits.{control} === 3")
    assert field.get_attribute("aria-invalid") == "false"
    assert "is a" not in tab.locator("#edit-said").text_content()


def test_every_field_of_what_if_is_explained(live):
    tab, _ = live()
    for name in EDITS[1:]:
        assert tab.locator(f"#edit-{name}").get_attribute("title").endswith("."), name


def test_masks_that_change_nothing_are_not_suggested(live):
    tab, _ = live()
    shown = tab.locator("#masks option")
    values = [it.get_attribute("value") for it in shown.all()]
    assert values == ["", "causal & window(3, 0)"], "this model is causal"

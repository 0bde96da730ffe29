"""Why on the page: its numbers are those of `ch.why`, and a link selects the head that wrote."""

import shlex
from dataclasses import replace

import pytest
import torch

import clearhead as ch
from clearhead import demo as storyteller
from clearhead.hf import Checkpoint
from clearhead.models.report.opening import opening
from clearhead.models.roles.role import Role
from clearhead.views import html
from clearhead.views.html.why import LARGEST, why_ahead
from tests.views.browser import free_tab, must_be_drawn, put_back
from tests.views.serve.models import save_gpt2, words
from tests.views.test_page import axe, full_trace, rows  # a fixture, too

assert axe
TEXT = (
    "The old lighthouse keeper climbed the stairs every evening. When the storm came, the keeper "
    "lit the lamp and waited. A ship saw the lamp and turned."
)
SELECTED = "[chosen.layer, chosen.head, chosen.query, chosen.key]"


@pytest.fixture(scope="module")
def teller():
    return storyteller.load()


@pytest.fixture(scope="module")
def report(teller):
    return ch.report(teller, TEXT, progress=False)


@pytest.fixture(scope="module")
def ahead(teller, report):
    return why_ahead(teller, report)


@pytest.fixture
def file(browser, report, tmp_path):
    """Open the file of the report, with what `why` was given of it."""
    opened = []

    def open_file(why, report=report, **options):
        path = html.write_report(report, tmp_path / "page.html", why=why)
        tab = free_tab(browser, **options)
        tab.goto(f"{path.as_uri()}#view=why")
        must_be_drawn(tab)
        opened.append(tab)
        return tab

    yield open_file
    for tab in opened:
        put_back(tab)


def reasons(teller, layer, head, query, key):
    inputs = teller.tokens_and_inputs(TEXT)[1]
    return ch.why(teller.module, inputs, layer=layer, head=head, query=query, key=key)


def signed(x):
    return "0.00" if abs(x) < 0.005 else f"{x:+.2f}".replace("-", "−")


def must_show(tab, why, labels):
    """The panel has the largest parts of both sides, the sum of the others, and the total."""
    for of, position in (("key", why.key), ("query", why.query)):
        parts = why.largest(of, len(why.components))
        *shown, total = rows(tab, f"What wrote the {of} {labels[position]} ({position})")
        if others := parts[LARGEST:]:
            *shown, rest = shown
            assert rest[0] == f"{len(others)} other{'s' * (len(others) > 1)}"
            assert rest[2] == signed(sum(part for _, part in others))
        for (component, part), row in zip(parts[:LARGEST], shown, strict=True):
            assert row[0].startswith(str(component)) and row[2] == signed(part)
        assert total == ["sums to", "", signed(why.contrast)]
    line = tab.locator("#panel").text_content()
    assert f"Weight {why.weight:.3f}" in line and "no claim about causes" in line
    assert f"contrast {signed(why.contrast)} against the mean of the other keys" in line


def test_a_file_has_why_its_first_head_looks_there(file, teller, report, ahead):
    begin = opening(report)
    why = reasons(teller, begin.head.layer, begin.head.head, begin.query, begin.key)
    tab = file(ahead)
    must_show(tab, why, report.tokens)
    sentence = tab.locator("#panel .because").text_content()
    query, key = (f"{report.tokens[at]} ({at})" for at in (begin.query, begin.key))
    assert sentence.startswith(f"L{why.layer}H{why.head} at {query} looks at {key} ")
    assert sentence.endswith(why.sentence().partition(" because ")[2])


def test_a_link_walks_to_the_head_that_wrote_the_key_and_back(file, teller, report, ahead):
    first, second = ([it.layer, it.head, it.query, it.key] for it in ahead[:2])
    why = reasons(teller, *first)
    component, _ = next(x for x in why.largest("key") if x[0].kind == "head" and x[1] > 0)
    read = why.sources(component.layer, component.head)
    assert second == [component.layer, component.head, first[3], int(read.argmax())]
    tab = file(ahead)
    tab.locator(f"#panel [data-head='{second[0]}.{second[1]}']").first.click()
    assert tab.evaluate(SELECTED) == second
    assert tab.evaluate("document.activeElement.id") == "panel"
    assert tab.locator("#grid [aria-checked=true]").get_attribute("data-place") == "0.5"
    must_show(tab, reasons(teller, *second), report.tokens)
    assert tab.locator(".trail").text_content().split(" ‹ ") == ["L1H7", "L0H5"]  # noqa: RUF001
    tab.locator(".trail button").click()
    assert tab.evaluate(SELECTED) == first and tab.locator(".trail").count() == 0
    must_show(tab, why, report.tokens)


def test_a_file_has_no_numbers_of_another_weight_but_a_command(file, ahead):
    tab = file(ahead)
    tab.evaluate("go({ query: 5, key: 3 })")
    panel = tab.locator("#panel")
    assert "this page does not have what wrote its query and its key" in panel.text_content()
    assert panel.locator("table").count() == 0
    command = panel.locator("code").text_content()
    assert shlex.split(command) == ["clearhead", "serve", "--open", TEXT]
    tab.evaluate("go({ query: 3, key: 5 })")
    assert "this query may not look at this key" in panel.text_content()
    tab.evaluate("go({ query: 5, key: 3 })")
    panel.locator("button", has_text="L1H7").click()
    assert panel.locator("table").count() == 2
    tab.locator("#text").fill("The cat sat because it was tired.")
    tab.wait_for_function("current.text.startsWith('The cat')")
    assert panel.locator("table").count() == 0


def test_a_rotation_is_shown_by_frequency_and_by_distance(file, tmp_path):
    """The frequencies sum to the contrast, and the weights are those at other distances."""
    transformers = pytest.importorskip("transformers")
    folder = save_gpt2(tmp_path / "a model")
    (folder / "config.json").unlink()
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=24, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.model.embed_tokens.weight.data.mul_(20)
    for part in ("q", "k"):
        getattr(model.model.layers[0].self_attn, f"{part}_proj").weight.data.mul_(40)
    model.eval().save_pretrained(folder)
    reader = Checkpoint(folder)
    report = ch.report(reader, words(9), progress=False)
    inputs = reader.tokens_and_inputs(words(9))[1]
    why = ch.why(reader.module, inputs, layer=0, head=1, query=8, key=3)
    assert abs(why.contrast) > 0.1
    tab = file([why], report)
    tab.evaluate("go({ layer: 0, head: 1, query: 8, key: 3 })")
    chart = tab.locator("#panel svg.frequencies")
    assert chart.locator("title").all_text_contents() == [
        f"Frequency {i}: {signed(x)}" for i, x in enumerate(why.frequencies[:-1].tolist())
    ]
    assert f"sum to {signed(why.contrast)}" in chart.get_attribute("aria-label")
    [scores, weights] = rows(tab, "If the key were further back")
    changes = why.further(2 ** torch.arange(7))
    assert scores == ["change of the score", "0.00", *map(signed, changes.tolist())]
    odds = (1 / why.weight - 1) * torch.cat([torch.zeros(1), -changes]).exp()
    assert weights == ["weight", *(f"{x:.3f}" for x in (1 / (1 + odds)).tolist())]
    assert weights[1] == f"{why.weight:.3f}"


def test_a_file_has_the_best_head_that_repeats(teller, report):
    """As if two heads were induction heads."""

    def with_role(head):
        mass = {(1, 3): 0.4, (1, 4): 0.7}.get((head.layer, head.head))
        role = Role("induction", "induction", mass or 0.0, 0.0, 1.0, 0.0, 9, 9, 9)
        return head if mass is None else replace(head, roles=(role,))

    *walked, last = why_ahead(teller, report.map_heads(with_role))
    assert len(walked) >= 1
    link = report[1, 4].links[0]
    assert (last.layer, last.head, last.query, last.key) == (1, 4, link.query, link.key)


def test_long_names_of_modules_hide_no_number(file, ahead, report):
    name = "encoder.layers.11.attention.attention.output.projection"
    long = [replace(why, components=[c._replace(kind="bias", module=name) for c in why.components])
            for why in ahead]  # fmt: skip
    tab = file(long, report, viewport={"width": 1280, "height": 800})
    hidden = "(sides) => sides.map((x) => x.scrollWidth - x.clientWidth)"
    assert tab.locator(".sides .scroll").evaluate_all(hidden) == [0, 0]


def test_a_file_states_why_it_has_none(file, report):
    withheld = why_ahead(Other(lambda: None), report)
    assert withheld.startswith("It was not computed: ") and "made no attention call" in withheld
    tab = file(withheld)
    assert withheld.split("\n")[0] in tab.locator("#panel").text_content()
    assert tab.locator("#panel table").count() == 0


def test_a_model_that_cannot_run_with_gradients_has_no_why(report):
    def fail():
        raise RuntimeError("no kernel")

    assert why_ahead(Other(fail), report) == "It was not computed: no kernel"


class Other:
    """A model without attention, whose run calls a function."""

    def __init__(self, run):
        self.module, self.run = torch.nn.Module(), run
        self.module.forward = lambda **_: run()
        self.tokens_and_inputs = storyteller.load().tokens_and_inputs


def test_a_pointer_does_not_replace_what_the_panel_shows(file, ahead):
    tab = file(ahead)
    tab.evaluate("globalThis.first = document.querySelector('#panel table')")
    tab.locator(".tile").nth(3).hover()
    assert tab.evaluate("store.pointed.head") == 3
    assert tab.evaluate("document.querySelector('#panel table') === first")


def test_why_opens_by_the_weight_the_button_and_the_key(file, ahead):
    tab = file(ahead)
    tab.evaluate("go({ view: 'map', key: 20 })")
    at = tab.evaluate(
        """() => {
          const { x, y, cell } = picture.map;
          const { left, top } = document.getElementById("picture").getBoundingClientRect();
          return [left + x + 2.5 * cell, top + y + 9.5 * cell];
        }"""
    )
    tab.mouse.click(*at)
    assert tab.evaluate("[chosen.view, chosen.query, chosen.key]") == ["map", 9, 2]
    tab.mouse.click(*at)
    assert tab.evaluate("[chosen.view, chosen.query, chosen.key]") == ["why", 9, 2]
    assert tab.locator("#why").is_hidden()
    tab.locator("#view-map").click()
    tab.locator("#why").click()
    assert tab.evaluate("[chosen.view, document.activeElement.id]") == ["why", "panel"]
    tab.keyboard.press("ArrowLeft")
    assert tab.evaluate("[chosen.query, chosen.key]") == [9, 1]
    tab.locator("#view-map").click()
    tab.locator("#picture").focus()
    tab.keyboard.press("Enter")
    assert tab.evaluate("chosen.view") == "why"


def test_the_page_of_one_call_has_no_why(visit):
    tab = visit(full_trace(), hash="#view=why")
    assert tab.locator("#view-why").count() == 0 and tab.locator("#why").is_hidden()
    assert "view “why”" in tab.locator("#misread").text_content()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing_in_why(file, ahead, axe, scheme, width):
    tab = file(ahead, color_scheme=scheme, viewport={"width": width, "height": 844})
    tab.wait_for_timeout(50)  # an observer finds what scrolls, one frame later
    axe(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.evaluate("go({ query: 21, key: 3 })")
    axe(tab)

"""The page shades the text by norm-weighted attention: weights times |v W_O|."""

import pytest
import torch

import clearhead as ch
from clearhead import demo as storyteller
from clearhead.views import html
from tests.views.browser import free_tab, put_back
from tests.views.test_live import STORY
from tests.views.test_report_page import toy_report


@pytest.fixture(scope="module")
def teller():
    return storyteller.load()


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory, teller):
    folder, tabs = tmp_path_factory.mktemp("pages"), []

    def open_page(found, name):
        tab = free_tab(browser)
        tabs.append(tab)
        tab.goto(html.write_report(found, folder / name).as_uri() + "#layer=0&head=2&query=21")
        return tab

    yield open_page
    for tab in tabs:
        put_back(tab)


@pytest.fixture(scope="module")
def tab(opened, teller):
    return opened(ch.report(teller, STORY, effects=True, progress=False), "story.html")


def norm_weighted(teller, text, layer):
    """Norm-weighted attention in float64, (H, Tq, Tk), from every step and the weights."""
    trace = teller.explain(text, layer)
    weights, values = trace["weights"].double(), trace["value"].double()
    H, _, D = values.shape
    W_O = teller.model.blocks[layer].attention.out_proj.weight.double().T.view(H, D, -1)
    parts = weights * (values @ W_O).norm(dim=-1)[:, None]
    return parts / parts.sum(-1, keepdim=True)


@pytest.mark.parametrize("text", [STORY, "There was a quiet witch. She cooked."])
def test_norm_weighted_attention_is_weights_times_what_values_write(tab, teller, text):
    """They are those of the report, and of a text that the page computes."""
    tab.locator("#text").fill(text)
    tab.wait_for_function("text => current.text === text", arg=text)
    for layer in (0, 1):
        expected = norm_weighted(teller, text, layer)
        T = expected.shape[-1]
        rows = f"Array.from({{ length: {T} }}, (_, q) => current.layer({layer}).normWeighted(h, q))"
        shown = tab.evaluate(f"Array.from({{ length: 8 }}, (_, h) => {rows})")
        torch.testing.assert_close(torch.tensor(shown).double(), expected, rtol=1e-3, atol=2e-5)
    tab.locator("#text").fill(STORY)
    tab.wait_for_function("text => current.text === text", arg=STORY)


def test_one_switch_shades_the_text_by_norm_weighted_attention(tab, teller):
    tab.evaluate("go({ view: 'text', layer: 0, head: 2, query: 21, key: null })")
    shares = norm_weighted(teller, STORY, 0)[2, 21]
    shade = "byId('word-16').style.background"
    before = tab.evaluate(shade)
    tab.locator("#shading button", has_text="norm-weighted").click()
    expected = tab.evaluate(f"css(shareColour({shares[16].item()}))")
    assert tab.evaluate(f"{shade} === {expected!r} || {shade}") in (
        True,
        expected.replace(" ", ", "),
    )
    assert tab.evaluate(shade) != before
    assert "by=norm-weighted" in tab.evaluate("location.hash")
    shown = tab.evaluate("picture.shapes.filter((it) => it.kind === 'text').map((it) => it.text)")
    assert "was by norm" in shown and f"{100 * shares.max():.0f} %" in shown
    assert "norm-weighted attention" in shown
    tab.locator("#shading button[data-by=weight]").click()
    assert tab.evaluate(shade) == before


def test_a_sentence_has_what_a_head_looks_at_writes_and_causes(tab, teller):
    tab.evaluate("go({ view: 'text', layer: 0, head: 0, query: 29, key: null })")
    weight = teller.explain(STORY, 0)["weights"][0, 29, 8].item()
    share = norm_weighted(teller, STORY, 0)[0, 29, 8].item()
    effect = ch.report(teller, STORY, effects=True, progress=False)[0, 0].effect
    words = tab.locator("#sentence").text_content()
    assert words == (
        f"L0H0: her looks at queen ({100 * weight:.0f} %). {100 * share:.0f} % of its "
        f"norm-weighted attention is there; the head saves {effect:.2g} nats of loss."
    )
    assert tab.locator("#strip .guess").text_content() == "→ one 45 %"
    tab.evaluate("go({ view: 'walk' })")
    walked = tab.evaluate("picture.shapes.filter((it) => it.kind === 'text').map((it) => it.text)")
    assert f"{100 * share:.0f} %" in walked
    cells = tab.evaluate(
        """picture.shapes.filter((it) => it.kind === 'rect' && it.fill?.startsWith('rgb'))
             .map((it) => it.height)"""
    )
    assert max(cells) / 25 > min(height for height in cells if height > 0), "scaled values"


def test_without_an_output_projection_the_switch_says_why(opened):
    tab = opened(toy_report(11), "toy.html")
    assert tab.locator("#shading button").count() == 0
    assert tab.locator("#shading").text_content() == "Shaded by weight"
    assert tab.locator("#shading").get_attribute("title").startswith("No norm-weighted attention: ")
    assert "norm-weighted" not in tab.locator("#sentence").text_content()

"""Every view of a trace or a report shows weights alone, and says what is unknown."""

import io

import pytest
import torch
from rich.console import Console

import clearhead as ch
from clearhead import BadValue
from clearhead.views import html, plot, text
from clearhead.views.cells import html_of

TOKENS = "The old cat sat on the mat".split()
KEYS = "le vieux chat est assis sur le tapis la .".split()
UNKNOWN = "Another program computed these weights. Their scores and values are unknown."


def weights(T=7, H=3):
    logits = torch.randn(1, H, T, T, generator=torch.Generator().manual_seed(5))
    return (2 * logits).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)


def cross():
    drawn = torch.randn(3, len(TOKENS), len(KEYS), generator=torch.Generator().manual_seed(6))
    return drawn.softmax(-1).numpy()


def printed(view, *args, **options):
    console = Console(file=io.StringIO(), width=100)
    view(*args, console=console, **options)
    return console.file.getvalue()


def test_the_terminal():
    trace = ch.explain_weights(cross(), tokens=TOKENS, key_tokens=KEYS)
    shown = printed(text.show, trace)
    assert UNKNOWN in shown and f"{cross()[1, 2, 3]:.4f}" in shown and "tapis" in shown
    assert "head 2" in printed(text.heat, trace)
    with pytest.raises(BadValue, match=r"no step 'query'"):
        printed(text.follow, trace, 3)


@pytest.mark.outside
def test_figures():
    trace = ch.explain_weights(cross(), tokens=TOKENS, key_tokens=KEYS)
    ax = plot.heatmap(trace, head=1)
    assert [x.get_text() for x in ax.get_yticklabels()] == TOKENS
    assert [x.get_text() for x in ax.get_xticklabels()] == KEYS
    drawn = torch.as_tensor(ax.images[0].get_array().filled(torch.nan))
    assert torch.allclose(drawn, torch.as_tensor(cross()[1]).double(), atol=1e-6)
    assert len(plot.heads(trace).axes) == 4  # three heads and the colours
    with pytest.raises(BadValue, match=r"no step 'scores'"):
        plot.steps(trace)
    report = ch.report_weights([weights(), weights()], tokens=TOKENS)
    assert len(plot.model(report).axes[0].texts) == 6


def test_a_notebook():
    assert "head 2" in html_of(ch.explain_weights(weights(), tokens=TOKENS))
    assert "<iframe" in html_of(ch.report_weights([weights()], tokens=TOKENS))


@pytest.mark.outside
def test_the_page_of_a_trace(visit):
    tab = visit(ch.explain_weights(weights(), tokens=TOKENS), hash="#head=2&query=6&view=numbers")
    assert UNKNOWN in tab.locator("#panel").text_content()
    rows = tab.locator("#panel tbody tr").count()
    assert rows == len(TOKENS)
    row = tab.evaluate("[...shownTrace().row(shownTrace().weights, 2, 6)]")
    assert row == pytest.approx(weights()[0, 2, 6].tolist())


@pytest.mark.outside
@pytest.mark.parametrize("T", [7, 600])  # every weight is on the page, or maps and some rows
def test_the_page_of_a_report(visit, T):
    tokens = [f"t{i}" for i in range(T)]
    report = ch.report_weights([weights(T, H=5)] * 2, tokens=tokens)
    tab = visit(report, hash="#layer=1&head=3&view=map")
    assert tab.evaluate("picture.map.rows") > 1
    tab.locator("#views").get_by_text("Walk").click()
    panel = tab.locator("#panel").text_content()
    assert panel == f"The walk shows queries, keys and values. {UNKNOWN}"
    assert tab.locator("#play").count() == 0
    assert "values are unknown" in tab.locator("#shading").get_attribute("title")
    tab.locator("#views").get_by_text("Text").click()
    assert tab.evaluate("picture.shapes.length") > 7


@pytest.mark.outside
def test_the_page_of_cross_attention(visit):
    report = ch.report_weights([cross()], tokens=TOKENS, key_tokens=KEYS)
    tab = visit(report, hash="#layer=0&head=1&query=2")
    assert tab.locator("#strip").text_content() == "".join(TOKENS)
    best = KEYS[int(cross()[1, 2].argmax())]
    assert f"cat looks at {best}" in tab.locator("#sentence").text_content()


def test_a_page_of_weights_alone_has_the_note_and_no_other_page_has_it():
    assert "steps_withheld" in html.page(ch.explain_weights(weights()))
    x = torch.randn(1, 2, 5, 3)
    assert '"steps_withheld"' not in html.page(ch.explain(x, x, x))

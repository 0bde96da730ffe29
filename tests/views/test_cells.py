"""What a notebook shows of a value by itself: small, without a script, and right."""

import base64
import re
import zlib

import pytest
import torch

import clearhead as ch
from clearhead.nn.explain_text import explain_text
from clearhead.views import cells

HOSTILE = "<script>alert(1)</script>\u202e"


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def recording():
    layers = torch.nn.ModuleList(ch.nn.MultiHeadAttention(12, 3) for _ in range(2))
    model = torch.nn.Sequential(*layers)
    with ch.watch(model, stats=["entropy", ch.mass({"first": ch.prefix(1)})]) as seen:
        model(normal(1, 7, 12))
    return seen


SHOWN = {
    "trace": lambda: explain_text("The cat sat on the mat."),
    "trace of a long text": lambda: ch.explain(*[normal(3, 300, 5)] * 3, mask=ch.causal),
    "look": lambda: ch.look(*[normal(2, 3, 7, 5)] * 3, stats=["entropy", ch.pooled(4, 4)]),
    "recording": recording,
    "plan": lambda: ch.plan(*[normal(2, 3, 7, 5)] * 3, mask=ch.causal),
    "mask": lambda: ch.causal & ~ch.window(before=3),
    "large mask": lambda: ch.documents([0] * 3000 + [1] * 5000),
    "mask of many heads": lambda: ch.dense(keep=normal(2, 3, 11, 13) > 0),
    "matrix": lambda: ch.matrix(*[normal(2, 3, 7, 5)] * 2),
    "matrix of a long text": lambda: ch.matrix(*[normal(12, 2000, 5)] * 2),
}


@pytest.mark.parametrize("what", SHOWN)
def test_it_is_small_and_has_no_script(what):
    shown = SHOWN[what]()._repr_html_()
    assert len(shown) < 80_000
    assert "<script" not in shown and "<iframe" not in shown
    for name in ("table", "pre", "svg", "tr"):
        assert shown.count(f"<{name}") == shown.count(f"</{name}>")


def pixels(picture):
    """The red, green and blue of each cell of a PNG that `png` wrote."""
    data = base64.b64decode(picture)
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    start = data.index(b"IDAT") + 4
    raw = zlib.decompress(data[start : start + int.from_bytes(data[start - 8 : start - 4], "big")])
    rows = [raw[i : i + 1 + 3 * width][1:] for i in range(0, len(raw), 1 + 3 * width)]
    assert len(rows) == height
    return [[tuple(row[i : i + 3]) for i in range(0, 3 * width, 3)] for row in rows]


def test_a_trace_shows_its_steps_and_a_picture_of_every_head():
    trace = ch.explain(*[normal(2, 3, 7, 5)] * 3, mask=ch.causal)
    shown = trace._repr_html_()
    assert all(f"<td>{name}</td>" in shown for name in trace.names)
    pictures = re.findall(r'alt="head (\d)".*?base64,([^"]+)"', shown)
    assert [h for h, _ in pictures] == ["0", "1", "2"]
    first = pixels(pictures[1][1])
    assert (len(first), len(first[0])) == (7, 7)
    bright = trace["weights"][0, 1].argmax()
    assert first[bright // 7][bright % 7] == (14, 32, 58)  # the first query's only key
    assert first[0][6] == (252, 251, 248)


@pytest.mark.parametrize(
    "mask",
    [
        ch.causal, ch.window(before=2, after=1), ~ch.causal | ch.prefix(2),
        ch.documents([0, 0, 0, 1, 1]), ch.dense(keep=normal(7, 11) > 0),
    ],
    ids=repr,
)  # fmt: skip
def test_a_mask_is_drawn_cell_by_cell(mask):
    shown = mask._repr_html_()
    size = [8] if not mask.sizes() else []
    allowed = mask.to_bool(*size)
    drawn = torch.zeros_like(allowed)
    for x, y, length in re.findall(r"M(\d+) (\d+)h(\d+)", shown):
        drawn[int(y), int(x) : int(x) + int(length)] = True
    assert torch.equal(drawn, allowed)
    assert f"{allowed.shape[0]} queries (down), {allowed.shape[1]} keys (across)" in shown


def test_of_a_large_mask_some_queries_are_drawn():
    shown = ch.documents([0] * 3000 + [1] * 5000)._repr_html_()
    assert "64 of 8,000 queries (down), 64 of 8,000 keys (across)" in shown
    assert {int(n) for n in re.findall(r"h(\d+)v", shown)} == {24, 40}


def test_a_recording_has_a_cell_for_each_head_of_each_layer():
    seen = recording()
    shown = seen._repr_html_()
    assert "entropy: a cell for each head" in shown and "mass.first: a cell" in shown
    assert shown.count("<span") == 2 * 2 * 3
    means = torch.cat([call.entropy.mean((0, 2)) for call in seen])
    spans = re.findall(r"background:(rgb\([^)]*\))", shown)[:6]
    assert spans[int(means.argmax())] == "rgb(14, 32, 58)"
    assert spans[int(means.argmin())] == "rgb(252, 251, 248)"
    seen.clear()
    assert seen._repr_html_() == "<pre>0 calls recorded</pre>"


def test_a_plan_is_the_table_that_it_prints():
    plan = SHOWN["plan"]()
    shown = plan._repr_html_()
    assert shown.startswith(f"<pre>{plan.problem}</pre><table>")
    assert len(re.findall("<tr>", shown)) == len(str(plan).splitlines()) - 1
    assert f"<td>answered by</td><td>{plan.engine} (" in shown


def test_a_look_shows_its_statistics():
    shown = SHOWN["look"]()._repr_html_()
    assert "<td>entropy</td><td>2 x 3 x 7</td>" in shown and shown.count("<img") == 3


def test_text_from_outside_stays_text():
    shown = cells.cell(HOSTILE, [(HOSTILE, "b"), (HOSTILE, "c" * 9000)])
    assert "<script" not in shown and "\u202e" not in shown and len(shown) < 3000
    assert shown.count("&lt;script&gt;") == 3


def test_of_a_long_table_the_middle_is_left_out():
    rows = [("number",), *((str(i),) for i in range(1000))]
    found = re.findall("<td>(.*?)</td>", cells.cell("", rows))
    assert len(found) == cells.MOST_ROWS and found[0] == "0" and found[-2:] == ["…", "999"]


def test_a_mask_without_a_size_that_fits_shows_its_formula():
    shown = (ch.documents([0, 0], queries=[0, 0, 0]) & ch.causal)._repr_html_()
    assert "(k &lt;= q)" in shown and "<svg" not in shown

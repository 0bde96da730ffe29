"""The terminal views: what they print is right, safe to print, and can be checked by hand."""

import io
import json
import math
import re
from functools import partial

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

import clearhead as ch
from clearhead.core.formatting import ends, number, visible
from clearhead.core.functional.trace import Step, Trace
from clearhead.views import text

HOSTILE = ("[red]x[/red]", "\x1b[31m", "\u202egnp\u200f", "", "a\nb", "w" * 99, "\ud800", "[/")


def printed(view, *arguments, width=None, **options) -> str:
    """What a view prints: to a pipe, or with `width` to a colour terminal of that width."""
    file = io.StringIO()
    if width is None:
        console = Console(file=file)
    else:
        console = Console(
            file=file, force_terminal=True, color_system="truecolor", width=width, height=25
        )
    view(*arguments, console=console, **options)
    return file.getvalue()


def without_colour(printed: str) -> str:
    return re.sub("\x1b\\[[0-9;]*m", "", printed)


def small(**options) -> Trace:
    """Two queries and two keys, whose weights are 1 / (1 + e) and e / (1 + e)."""
    q = torch.tensor([[0.0, 2**0.5], [2**0.5, 0.0]])
    return ch.explain(q, torch.eye(2), torch.eye(2), tokens=["we", "you"], **options)


def many(n=5, *, H=4, G=2, D=7, Dv=3, B=None, **options) -> Trace:
    draw = torch.Generator().manual_seed(11)
    lead = () if B is None else (B,)
    q = torch.randn(*lead, H, n, D, generator=draw)
    k = torch.randn(*lead, G, n, D, generator=draw)
    v = torch.randn(*lead, G, n, Dv, generator=draw)
    return ch.explain(q, k, v, **options)


EVERY_STEP = dict(
    mask=ch.causal,
    softcap=3.0,
    bias=ch.alibi(),
    sinks=torch.tensor([0.3, -1.0, 0.0, 2.0]),
    dropout=0.25,
    seed=5,
    tokens=["Once", "upon", "a", "time", "there"],
)


# ---- show ----------------------------------------------------------------------------


def test_show_prints_numbers_that_can_be_checked_by_hand():
    assert printed(text.show, small(mask=ch.causal)) == SMALL


SMALL = """\
B=1 H=1 Tq=2 Tk=2 D=2, float32 on cpu, mask causal
B sequences, H heads, Tq queries, Tk keys, D features of a head

1. query = Q
   2 queries × 2 features
   What each query looks for.

               0       1
   0 we   0.0000  1.4142
   1 you  1.4142  0.0000

2. key = K
   2 keys × 2 features
   What each key is matched by.

               0       1
   0 we   1.0000  0.0000
   1 you  0.0000  1.0000

3. value = V
   2 keys × 2 value features
   What each key contributes to a query that attends to it.

               0       1
   0 we   1.0000  0.0000
   1 you  0.0000  1.0000

4. scores = Q Kᵀ
   2 queries × 2 keys
   How well each query matches each key: one dot product per pair.

               0       1
              we     you
   0 we   0.0000  1.4142
   1 you  1.4142  0.0000

5. scaled = scores / √2 = scores · 0.7071
   2 queries × 2 keys
   A sum of D products grows like √D; scaling undoes that growth, so that softmax does not saturate.

               0       1
              we     you
   0 we   0.0000  1.0000
   1 you  1.0000  0.0000

6. masked = scaled where the mask allows, else −∞
   2 queries × 2 keys
   exp(−∞) is 0, so a masked key gets weight 0.

   ✓ may look, ✗ may not
         0 1
   0 we  ✓ ✗
   1 you ✓ ✓

               0       1
              we     you
   0 we   0.0000      −∞
   1 you  1.0000  0.0000

7. weights = softmax(masked)
   2 queries × 2 keys
   exp(x − max) / Σ exp(x − max) is positive and sums to 1. Subtracting max prevents overflow.

               0       1     row
              we     you     sum
   0 we   1.0000  0.0000  1.0000
   1 you  0.7311  0.2689  1.0000

8. output = weights · V
   2 queries × 2 value features
   Each query gets a sum of the values, weighted by its weights.

               0       1
   0 we   1.0000  0.0000
   1 you  0.7311  0.2689
"""


def test_show_prints_exactly_the_steps_of_the_trace():
    def steps(**options):
        return re.findall(r"^\d+\. (\w+)", printed(text.show, many(**options)), re.M)

    assert steps() == ["query", "key", "value", "scores", "scaled", "weights", "output"]
    assert steps(scale=1.0) == ["query", "key", "value", "scores", "weights", "output"]
    assert steps(**EVERY_STEP) == list(many(**EVERY_STEP).names)
    assert len(steps(**EVERY_STEP)) == 11


def test_show_prints_steps_before_and_after_attention():
    trace = small()
    joined = Step("joined", "", "", "q e", torch.full((2, 3), 0.125))
    ids = Step("ids", "", "", "q", torch.tensor([17, 4]))
    trace = Trace((ids, joined, *trace.steps), trace.queries, trace.keys)
    lines = printed(text.show, trace).splitlines()
    assert lines[1:3] == ["1. ids", "   2 tokens"]
    assert "   0 we   17" in lines and "   1 you   4" in lines
    assert "   2 tokens × 3 embedding features" in lines


def test_show_prints_every_head_or_the_chosen_ones():
    trace = many()
    everything = printed(text.show, trace)
    assert {int(i) for i in re.findall(r"^   head (\d)$", everything, re.M)} == {0, 1, 2, 3}
    chosen = printed(text.show, trace, heads=[3])
    assert {int(i) for i in re.findall(r"^   head (\d)$", chosen, re.M)} == {3}
    for step, row in (("query", 4), ("weights", 2)):
        numbers = "  ".join(f"{x:7.4f}" for x in trace[step][3, row])
        assert re.sub(" +", " ", numbers).strip() in re.sub(" +", " ", chosen)
    # Query head 3 of 4 reads key head 1 of 2, and that one alone is shown.
    assert "key head 1, read by heads 2 and 3" in chosen
    assert "key head 0" not in chosen and "key head 0, read by heads 0 and 1" in everything
    assert f"{trace['key'][1, 0, 0]:.4f}" in chosen and f"{trace['key'][0, 0, 0]:.4f}" not in chosen


def test_show_says_that_one_of_a_batch_is_shown():
    trace = many(B=3)
    first = Trace(
        tuple(Step(s.name, s.formula, s.why, s.axes[2:], s.tensor[0]) for s in trace), None, None
    )
    whole = printed(text.show, trace)
    assert (
        "A batch of 3: the first is shown; trace.sequence(1) is the second." in whole
        and "3 sequences × 4 heads" in whole
    )
    assert "batch" not in printed(text.show, first)
    numbers = re.compile(r"-?\d\.\d{4}")
    assert numbers.findall(whole) == numbers.findall(printed(text.show, first))
    for view in (text.heat, partial(text.follow, query=0)):
        assert "the first is shown" in printed(view, trace)
    third = trace.sequence(-1)
    assert third.about.endswith(", sequence 2") and torch.equal(
        third["weights"], trace["weights"][2:]
    )
    assert "first is shown" not in printed(text.show, third)
    assert numbers.findall(printed(text.show, third)) != numbers.findall(whole)
    with pytest.raises(ch.BadValue, match=r"Sequence 3(?s:.*)holds 3"):
        trace.sequence(3)


def test_show_elides_the_middle_and_keeps_the_ends():
    trace = many(9, H=1, G=1)
    scores = printed(text.show, Trace(trace.steps[3:4]), most=4).splitlines()
    assert [line.split()[0] for line in scores[6:]] == ["0", "1", "…", "7", "8"]
    assert scores[5].split() == ["0", "1", "…", "7", "8"]
    assert float(scores[-1].split()[-1]) == pytest.approx(float(trace["scores"][0, 8, 8]), abs=5e-5)
    assert "…" not in printed(text.show, Trace(trace.steps[3:4]), most=9)


def test_show_writes_the_requested_decimals():
    assert re.findall(r"0\.7\d*\b", printed(text.show, small(mask=ch.causal), decimals=2))[-1] == (
        "0.73"
    )
    assert "0.7310586" in printed(text.show, small(mask=ch.causal), decimals=7)


def test_a_pipe_is_never_cut_and_holds_no_escape():
    trace = many(40, **{**EVERY_STEP, "tokens": [f"token-{i}" for i in range(40)]})
    for view, arguments in ((text.show, {"most": 40}), (text.follow, {"query": 39})):
        whole = printed(view, trace, **arguments)
        assert "\x1b" not in whole
        assert max(map(len, whole.splitlines())) > 200
        assert not re.search(r" $", whole, re.M)
    assert "token-20" in printed(text.show, trace, most=40)


@pytest.mark.parametrize("width", [30, 80, 200])
def test_a_terminal_is_never_overrun(width):
    trace = many(40, H=4, **{**EVERY_STEP, "tokens": [f"token-{i}" for i in range(40)]})
    for view, arguments in (
        (text.show, {"heads": [1]}),
        (text.follow, {"query": 39}),
        (text.heat, {}),
    ):
        lines = without_colour(printed(view, trace, width=width, **arguments)).splitlines()
        assert max(map(cell_len, lines)) <= width


def test_a_terminal_cuts_no_number():
    trace = many(20, H=1, G=1)
    for width in range(20, 120):
        page = without_colour(printed(text.show, Trace(trace.steps[3:4]), width=width, most=20))
        rows = [line.split() for line in page.splitlines()[-20:]]
        numbers = [cell for row in rows for cell in row[1:] if cell != "…"]
        assert all(re.fullmatch(r"-?\d+\.\d{4}", cell) for cell in numbers) and len(numbers) >= 20
        # One more number would not have fitted.
        assert max(map(len, page.splitlines()[-20:])) > width - 2 * len(" -12.1234")


def test_weights_are_coloured_in_a_terminal_unless_colour_is_off(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[38;2;0;0;0;48;2;253;231;37m" in printed(text.show, small(), width=80)
    monkeypatch.setenv("NO_COLOR", "1")
    for view in (text.show, text.heat):
        bleak = printed(view, small(), width=80)
        assert "48;2" not in bleak and "38;2" not in bleak
    assert "█" in bleak


def test_a_page_for_a_pipe_leaves_the_console_as_it_was():
    console = Console(file=io.StringIO(), width=60)
    text.show(small(), console=console)
    assert console.width == 60


def test_heads_may_come_one_by_one(capsys):
    text.show(small(), heads=[0])
    at_once = capsys.readouterr().out
    text.show(small(), heads=iter([0]))
    assert capsys.readouterr().out == at_once


def test_heads_are_a_list_of_heads_that_are_there():
    for view in (text.show, text.heat):
        with pytest.raises(ch.BadType, match=r"heads=\[1\]"):
            view(small(), heads=1)
        with pytest.raises(ch.BadType, match="Head 'a'"):
            view(small(), heads=["a"])


@pytest.mark.parametrize("most", [0, -1, 2.5, "x"])
def test_how_much_is_written_out_is_checked_before_anything_is_printed(most):
    with pytest.raises((ch.BadValue, ch.BadType), match="1 or more"):
        text.show(small(), most=most, console=None)


def test_short_representations():
    trace = ch.explain_text("The cat sat on the mat " * 9)
    assert len(repr(trace.steps)) < 2000


def test_rules_are_printed_whatever_the_default_device():
    shown = [ch.causal, ch.prefix(3) & ch.Causal(align=[1, 2]), ch.documents([0, 0, 1])]
    naive_attention = [(str(rule), rule.why(1, 0)) for rule in shown]
    lesson = str(ch.explain_text("a b"))
    q = torch.randn(1, 2, 5, 8)
    with torch.device("meta"):
        assert [(str(rule), rule.why(1, 0)) for rule in shown] == naive_attention
        assert str(ch.explain_text("a b")) == lesson
        pooled = ch.look(q, q, q, stats=[ch.pooled(2, 2)], engine="tiled").pooled
    torch.testing.assert_close(pooled, ch.look(q, q, q, stats=[ch.pooled(2, 2)]).pooled)


# ---- tokens of strangers -------------------------------------------------------------


@pytest.mark.parametrize("width", [None, 80])
def test_hostile_tokens_are_shown_and_never_executed(width):
    n = len(HOSTILE)
    trace = many(n, mask=ch.causal)
    trace = Trace(trace.steps, HOSTILE, HOSTILE, "about [red]\x1b[31m\n", trace.settings)
    for view, arguments in (
        (text.show, {}),
        (text.follow, {"query": "\x1b[31m"}),
        (text.follow, {"query": 4}),
        (text.heat, {}),
    ):
        whole = printed(view, trace, width=width, **arguments)
        body = without_colour(whole)
        assert not set(body) & set("\x1b\r\u202e\u200f\ud800")
        whole.encode("utf-8")
        if width is None:
            for shown in ("[red]x[/red]", "␛[31m", "⟨202E⟩gnp⟨200F⟩", "∅", "a↵b", "⟨D800⟩", "[/"):
                assert shown in body
            assert "w" * 15 + "…" in body and "w" * 16 not in body


def test_columns_stand_under_one_another_whatever_the_width_of_the_letters():
    trace = many(4, H=1, G=1)
    tokens = ("大きな猫", "e\u0301", "x", "ﬁ…")
    rows = printed(text.show, Trace(trace.steps[-1:], tokens, tokens)).splitlines()[-4:]
    assert len({cell_len(row) for row in rows}) == 1


def test_visible_keeps_what_people_write():
    for token in ("there", "大きな", "naïve", "##ing", "שלום", "a b", "…"):
        assert visible(token) == token
    assert visible(" the ") == "␣the␣" and visible("\u0301") == "◌\u0301"
    assert visible("  ") == "␣␣"
    assert number(-math.inf, 2) == "−∞" and number(math.nan, 2) == "nan"
    assert ends(5, 4) == [0, 1, None, 3, 4] and ends(4, 4) == [0, 1, 2, 3] and ends(0, 4) == []


# ---- follow --------------------------------------------------------------------------


def worth(written: str) -> float:
    """The result of a line of arithmetic, computed from the numbers in it."""
    written = written.replace("−∞", "(-inf)").replace("−", "-").replace("·", "*")
    written = re.sub(r" \(the sink\)", "", written)
    return eval(written, {"inf": math.inf, "exp": math.exp, "tanh": math.tanh})


def lines_of(whole: str) -> dict[str, list[tuple[str, str]]]:
    """By step, the written sums and the results after them."""
    steps: dict[str, list[tuple[str, str]]] = {}
    for line in whole.splitlines():
        if heading := re.match(r"\d+\. (\w+)", line):
            steps[heading[1]] = []
        elif row := re.match(r"   +(?:\d+ \S+ |max|sum|feature \d+) +(.*?) += +(\S+)$", line):
            steps[list(steps)[-1]].append((row[1], row[2]))
    return steps


def test_follow_prints_numbers_that_can_be_checked_by_hand():
    assert printed(text.follow, small(mask=ch.causal), "you").startswith(YOU)


YOU = """\
The query “you” at 1, in full

4. scores = Q Kᵀ
   0 we   1.4142·1.0000 + 0.0000·0.0000 = 1.4142
   1 you  1.4142·0.0000 + 0.0000·1.0000 = 0.0000

5. scaled = scores / √2 = scores · 0.7071
   0 we   1.4142 · 0.707107 = 1.0000
   1 you  0.0000 · 0.707107 = 0.0000

6. masked = scaled where the mask allows, else −∞
   0 we   ✓ may look = 1.0000
   1 you  ✓ may look = 0.0000

7. weights = softmax(masked)
     max  the score of key 0 we = 1.0000
   0 we   exp(1.0000 − 1.0000)  = 1.0000
   1 you  exp(0.0000 − 1.0000)  = 0.3679
     sum  1.0000 + 0.3679       = 1.3679
   0 we   1.0000 / 1.3679       = 0.7311
   1 you  0.3679 / 1.3679       = 0.2689

8. output = weights · V
   feature 0  0.7311·1.0000 + 0.2689·0.0000 = 0.7311
   feature 1  0.7311·0.0000 + 0.2689·1.0000 = 0.2689

Computed in float64 and rounded for printing; no step of the trace differs by more than """


@pytest.mark.parametrize("head", range(4))
def test_every_line_of_follow_adds_up_and_agrees_with_the_trace(head):
    trace, row = many(**EVERY_STEP), 3
    steps = lines_of(printed(text.follow, trace, "time", head=head, decimals=9))
    assert list(steps) == [
        "scores", "scaled", "capped", "biased", "masked", "weights", "dropped", "output",
    ]  # fmt: skip
    for name, lines in steps.items():
        for written, result in lines:
            if "look" in written or "the score" in written or written == "dropped":
                continue
            assert worth(written) == pytest.approx(float(result), abs=3e-6), (name, written)
    for name in ("scores", "scaled", "capped", "biased", "dropped", "output"):
        results = [float(result) for _, result in steps[name]]
        assert results == pytest.approx(trace[name][head, row].tolist(), abs=2e-6), name
    marks = [written[0] for written, _ in steps["masked"]]
    assert marks == ["✓", "✓", "✓", "✓", "✗"] and steps["masked"][-1][1] == "−∞"
    weights = steps["weights"]
    assert len(weights) == 1 + 5 + 1 + 5
    assert float(weights[0][1]) == pytest.approx(float(trace["masked"][head, row].max()), abs=1e-6)
    expected = trace["weights"][head, row].tolist()
    assert [float(result) for _, result in weights[-5:]] == pytest.approx(expected, abs=1e-6)
    # The exponential of the sink is found, though the trace holds only the remaining weights.
    sink = float(re.search(r"([\d.]+) \(the sink\)", weights[6][0])[1])
    top = float(weights[0][1])
    assert sink == pytest.approx(math.exp(EVERY_STEP["sinks"][head] - top), rel=1e-4)
    zeros = [written == "dropped" for written, _ in steps["dropped"]]
    lost = (trace["dropped"][head, row] == 0) & (trace["weights"][head, row] > 0)
    assert zeros == lost.tolist()


def test_follow_states_the_largest_error_of_the_trace():
    trace = small()
    assert float(re.search(r"more than (\S+)\.$", printed(text.follow, trace, 0))[1]) < 1e-6
    steps = tuple(
        Step(s.name, s.formula, s.why, s.axes, s.tensor + 0.5) if s.name == "output" else s
        for s in trace
    )
    wrong = Trace(steps, trace.queries, trace.keys, "", trace.settings)
    assert printed(text.follow, wrong, 0).rstrip().endswith("differs by more than 5e-01.")


def test_follow_finds_a_query_by_token_position_or_written_position():
    trace = ch.explain(*[torch.eye(4)] * 3, tokens=["the", "cat", "the", "7"])
    first = printed(text.follow, trace, "the").splitlines()[0]
    assert first == "The query “the” at 0, in full (the first of several; also at 2)"
    assert printed(text.follow, trace, 2).startswith("The query “the” at 2, in full\n")
    assert printed(text.follow, trace, "7").startswith("The query “7” at 3, in full\n")
    assert printed(text.follow, trace, "1") == printed(text.follow, trace, "cat")
    assert printed(text.follow, trace, -3) == printed(text.follow, trace, "cat")
    for unknown in ("dog", 4, -5, "--3"):
        with pytest.raises(ch.BadValue) as error:
            printed(text.follow, trace, unknown)
        assert str(unknown) in error.value.gave and "0 the, 1 cat, 2 the, 3 7" in error.value.hint
    with pytest.raises(ch.BadValue, match=r"\[31m") as error:
        printed(text.follow, trace, "\x1b[31m")
    assert "\x1b" not in str(error.value)
    with pytest.raises(ch.BadValue, match="Head 1 was requested"):
        printed(text.follow, trace, 0, head=1)


def test_follow_writes_the_largest_of_many_weights_and_sums_all():
    trace = many(50, H=1, G=1, D=30, Dv=20)
    whole = printed(text.follow, trace, 7)
    steps = lines_of(whole)
    heaviest = sorted(trace["weights"][0, 7].topk(12).indices.tolist())
    rows = re.findall(r"^ +(\d+) .* = +\S+$", whole.split("5. scaled")[0], re.M)
    assert [int(row) for row in rows] == heaviest
    assert "… replaces terms that are in the sums but not printed." in whole
    outputs = [float(result) for _, result in steps["output"]]
    out = trace["output"][0, 7]
    assert outputs == pytest.approx([*out[:6].tolist(), *out[-6:].tolist()], abs=1e-4)


def test_follow_of_a_query_that_may_see_nothing():
    keep = torch.tensor([[True, True], [False, False]])
    trace = small(mask=ch.dense(keep=keep))
    whole = printed(text.follow, trace, 1)
    assert "this query is fully masked, so every weight is = 0.0000" in whole
    assert lines_of(whole)["output"][0] == ("0.0000·1.0000 + 0.0000·0.0000", "0.0000")
    assert "nan" not in whole


def test_follow_ignores_nan_in_a_blocked_key():
    q, k, v = torch.eye(3), torch.eye(3), torch.eye(3)
    k[2], v[2] = math.nan, math.inf
    whole = printed(text.follow, ch.explain(q, k, v, mask=ch.causal), 1)
    assert "nan" not in whole.split("masked")[1]
    assert [float(result) for _, result in lines_of(whole)["output"]] == pytest.approx(
        [0.3595, 0.6405, 0.0], abs=1e-4
    )


def test_follow_needs_the_settings():
    trace = small()
    with pytest.raises(ch.BadValue, match="lack 'scale'"):
        printed(text.follow, Trace(trace.steps, trace.queries, trace.keys), 0)


def test_follow_begins_at_the_embedding_of_a_text():
    trace = ch.explain_text("to be or not", size=6, heads=3)
    lines = printed(text.follow, trace, 2, head=1).splitlines()
    x, matrix, q = trace["inputs"][2], trace["W_query"][1], trace["query"][1, 2]
    assert any(line.endswith("query = X · W_query") for line in lines)
    sums = [line for line in lines if line.count("·") == 6 and "feature" in line]
    for i, line in enumerate(sums):
        assert f"{x[0]:.4f}" in line and f"{matrix[5, i]:.4f}" in line
        assert float(line.split("=")[1]) == pytest.approx(float(q[i]), abs=1e-4)
    assert len(sums) == 2
    joined = sum(trace["output"][h, 2] @ trace["W_out"][h] for h in range(3))
    torch.testing.assert_close(joined, trace["projected"][2])


# ---- heat ----------------------------------------------------------------------------


def test_heat_draws_shares_with_characters():
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.7, 0.21, 0.1]])
    masked = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1) > 0, -math.inf)
    steps = (Step("masked", "", "", "q k", masked), Step("weights", "", "", "q k", weights))
    whole = printed(text.heat, Trace(steps, ("I", "like", "it"), ("I", "like", "it")))
    assert whole.splitlines() == [
        "weights",
        "",
        "       0 1 2",
        "0 I    ██ · ·",
        "1 like ▓▓▓▓ ·",
        "2 it   ██▒▒░░",
        "",
        "░ from 0.04, ▒ 0.16, ▓ 0.36, █ 0.64; · may not look",
    ]


def test_the_legend_of_heat_says_where_each_shade_begins():
    """Also where 0 is not the smallest number; the largest begins no shade."""
    scores = torch.tensor([[-3.0, -1.0, 0.99, 1.0, 7.0]])
    trace = Trace((Step("scores", "", "", "q k", scores),))
    lines = printed(text.heat, trace, "scores").splitlines()
    assert lines[3] == "0   ░░░░▒▒██"
    assert lines[-1] == "blank from -3, ░ -1, ▒ 1, ▓ 3, █ 5"
    trace = Trace((Step("scores", "", "", "q k", torch.tensor([[0.0, 0.05, 2.0]])),))
    lines = printed(text.heat, trace, "scores").splitlines()
    assert lines[-1] == "░ from 0.08, ▒ 0.32, ▓ 0.72, █ 1.28"


def test_heat_names_the_layer():
    trace = many(H=3, G=1)
    assert "L5H2" in printed(text.heat, trace, heads=[2], layer=5).splitlines()[2]
    assert "layer 5" in printed(text.heat, small(), layer=5)
    assert "layer" not in printed(text.heat, trace)


def test_heat_draws_the_heads_side_by_side_in_one_range():
    trace = many(mask=ch.causal)
    lines = printed(text.heat, trace).splitlines()
    assert lines[2].split("  ")[-1].strip() == "head 3" and lines[2].count("head") == 4
    assert sum(line.startswith("0 ") for line in lines) == 1
    narrow = without_colour(printed(text.heat, trace, width=30)).splitlines()
    assert sum(line.startswith("0 ") for line in narrow) == 2
    chosen = printed(text.heat, trace, "scores", heads=[2]).splitlines()
    assert "head 2" in chosen[2] and "0." not in chosen[2] and "not look" not in chosen[-1]


def test_heat_pools_a_long_text_by_its_maximum_and_says_so():
    weights = torch.zeros(200, 200)
    weights[150, 20] = 1.0
    trace = Trace((Step("weights", "", "", "q k", weights),))
    lines = printed(text.heat, trace).splitlines()
    assert "Each cell is the largest of 5 queries × 5 keys." in lines
    [marked] = [line for line in lines[3:-3] if "█" in line]
    assert marked.split()[0] == "150" and marked.index("█") == len("150 ") + 2 * (20 // 5)
    tiles = printed(text.heat, trace, width=80)
    assert "▀" in tiles and "largest of 3 queries × 3 keys" in tiles


def test_the_last_cells_of_a_coloured_map_are_there_though_they_are_spaces():
    rows = without_colour(printed(text.heat, small(), width=80)).splitlines()[3:5]
    assert [cell_len(row) for row in rows] == [len("0 we  ") + 2 * 2] * 2


def test_heat_names_the_keys_where_they_are_not_the_queries():
    q, k = torch.eye(3)[:2], torch.eye(3)
    trace = ch.explain(q, k, k, tokens=["le", "chat"], key_tokens=["the", "black", "cat"])
    assert printed(text.heat, trace).splitlines()[-1] == "3 keys: 0 the, 1 black, 2 cat"


def test_heat_of_a_missing_step_lists_the_steps():
    with pytest.raises(ch.BadValue, match="query, key, value, scores, scaled, weights, output"):
        printed(text.heat, small(), "capped")


@pytest.mark.parametrize("view", [text.show, text.heat])
def test_an_empty_trace_shows_no_numbers(view):
    empty = torch.zeros(0, 3)
    whole = printed(view, ch.explain(torch.zeros(2, 3), empty, empty))
    assert "weights" in whole
    with pytest.raises(ch.BadValue, match="has none"):
        printed(text.follow, ch.explain(torch.zeros(2, 3), empty, empty), 0)


@pytest.mark.parametrize("view", [text.show, text.heat])
def test_a_head_that_is_not_there_is_refused(view):
    with pytest.raises(ch.BadValue, match="4 query heads, counted from 0"):
        printed(view, many(), heads=[4])


def test_nearly_equal_weights_differ_in_shade():
    """0.2 to 0.3 would all be one shade of a range that begins at 0."""
    weights = torch.tensor([[0.2, 0.25, 0.3, 0.25]])
    page = printed(text.heat, Trace((Step("weights", "", "", "q k", weights),)))
    assert "blank from 0.2, ░ 0.22" in page and page.count("██") == 1


# ---- to_json -------------------------------------------------------------------------


def test_json_is_strict_and_complete():
    trace = many(**EVERY_STEP)
    read = json.loads(json.dumps(text.to_json(trace), allow_nan=False))
    assert read["queries"] == read["keys"] == EVERY_STEP["tokens"]
    assert read["settings"]["dropout"] == 0.25 and read["settings"]["mask"] == "causal"
    assert [step["name"] for step in read["steps"]] == list(trace.names)
    for stored, step in zip(read["steps"], trace, strict=True):
        assert stored["axes"] == step.axes.split() and stored["shape"] == list(step.shape)
        assert stored["formula"] == step.formula and stored["why"] == step.why
        numbers = torch.tensor(
            [float(x) for x in _flat(stored["values"])], dtype=step.tensor.dtype
        ).reshape(step.shape)
        assert torch.equal(numbers, step.tensor)
    assert read["steps"][7]["values"][0][0][1] == "-inf"
    assert text.to_json(Trace((Step("x", "", "", "", torch.tensor(math.nan)),)))["steps"][0][
        "values"
    ] == ("nan")


def _flat(values):
    for value in values:
        yield from _flat(value) if isinstance(value, list) else [value]

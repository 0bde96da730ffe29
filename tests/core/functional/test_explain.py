"""`explain`: the steps that happen, named and shaped; looking at them changes nothing."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import clearhead as ch
from clearhead.core.engines.choice import ENGINES
from clearhead.core.problem.check import Options, make_problem
from tests.problems import PROBLEMS

ALWAYS = ("query", "key", "value", "scores", "weights", "output")
SHAPES = {
    "query": ("b h q d", (2, 6, 5, 4)),
    "key": ("b g k d", (2, 3, 7, 4)),
    "value": ("b g k v", (2, 3, 7, 11)),
    "scores": ("b h q k", (2, 6, 5, 7)),
    "scaled": ("b h q k", (2, 6, 5, 7)),
    "capped": ("b h q k", (2, 6, 5, 7)),
    "biased": ("b h q k", (2, 6, 5, 7)),
    "masked": ("b h q k", (2, 6, 5, 7)),
    "weights": ("b h q k", (2, 6, 5, 7)),
    "dropped": ("b h q k", (2, 6, 5, 7)),
    "output": ("b h q v", (2, 6, 5, 11)),
}


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(4)
    shapes = SHAPES["query"][1], SHAPES["key"][1], SHAPES["value"][1]
    return tuple(torch.randn(*shape, generator=source) for shape in shapes)


@pytest.mark.parametrize(
    "keywords, more",
    [
        ({}, {"scaled"}),
        ({"scale": 1.0}, set()),
        ({"scale": 1, "softcap": 2.0}, {"capped"}),
        ({"bias": torch.zeros(5, 7)}, {"scaled", "biased"}),
        ({"mask": ch.prefix(3)}, {"scaled", "masked"}),
        ({"mask": ch.everything}, {"scaled"}),
        ({"dropout": 0.5}, {"scaled", "dropped"}),
        ({"dropout": 0.5, "seed": 0, "sinks": torch.zeros(6)}, {"scaled", "dropped"}),
        (
            dict(mask=ch.prefix(3), bias=ch.alibi(align=0), softcap=3.0, dropout=0.1, scale=0.5),
            {"scaled", "capped", "biased", "masked", "dropped"},
        ),
    ],
)
def test_a_step_appears_where_it_happens(keywords, more, qkv):
    trace = ch.explain(*qkv, **keywords)
    assert trace.names == tuple(n for n in SHAPES if n in ALWAYS or n in more)
    for step in trace:
        assert (step.axes, step.shape) == SHAPES[step.name]
        assert step.formula and step.why.endswith(".") and trace[step.name] is step.tensor


@pytest.mark.parametrize("rank", [2, 3])
def test_missing_leading_dimensions_stay_missing(rank, qkv):
    q, k, v = (x[0, 0] if rank == 2 else x[0] for x in qkv)
    trace = ch.explain(q, k, v, mask=ch.Causal(align="end"))
    for step in trace:
        axes, shape = SHAPES[step.name]
        assert (step.axes.split(), step.shape) == (axes.split()[4 - rank :], shape[4 - rank :])


def test_by_hand():
    """Two keys with scores 0 and 2 · √2 / √2: weights 1/(1+e²) and e²/(1+e²)."""
    q, k = torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, math.sqrt(2)]])
    trace = ch.explain(q, k, torch.tensor([[8.0], [4.0]]))
    small = 1 / (1 + math.e**2)
    assert trace["scores"].tolist() == [[0.0, pytest.approx(2 * math.sqrt(2))]]
    assert trace["scaled"].tolist() == [[0.0, pytest.approx(2.0)]]
    assert trace["weights"].tolist() == [[pytest.approx(small), pytest.approx(1 - small)]]
    assert trace["output"].item() == pytest.approx(8 * small + 4 * (1 - small))
    assert trace.step("scaled").formula == "scores / √2 = scores · 0.7071"


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p != "large"])
def test_looking_changes_no_bit(problem):
    case = PROBLEMS[problem](torch.float32, 0)
    shown = ch.explain(*case.tensors, **case.keywords)["output"]
    assert torch.equal(shown, ch.attention(*case.tensors, engine="steps", **case.keywords))


@pytest.mark.parametrize("name", [e.name for e in ENGINES])
def test_with_a_named_engine_the_output_is_its_own(name, qkv):
    mask = ch.Causal(align="end")
    asked, _ = make_problem(*qkv, Options(mask=mask))
    if reasons := next(e for e in ENGINES if e.name == name).why_not(asked):
        pytest.skip(f"{name}: {'; '.join(reasons)}")
    trace = ch.explain(*qkv, mask=mask, engine=name)
    assert torch.equal(trace["output"], ch.attention(*qkv, mask=mask, engine=name))
    assert trace.about.endswith(f", answered by {name}") is (name != "steps")
    torch.testing.assert_close(trace["output"], ch.explain(*qkv, mask=mask)["output"])


@pytest.mark.parametrize("problem", ["lengths", "everything at once", "nobody sees anything"])
def test_rows_sum_to_1_or_to_0(problem):
    case = PROBLEMS[problem](torch.float64, 0)
    case.keywords.pop("sinks", None)
    trace = ch.explain(*case.tensors, **case.keywords)
    blind = torch.isneginf(trace["masked"]).all(-1)
    torch.testing.assert_close(trace["weights"].sum(-1), (~blind).double())


def test_masked_holds_minus_infinity_where_the_mask_blocks(qkv):
    mask = ch.Causal(align="end") & ch.lengths(keys=[7, 4])
    trace = ch.explain(*qkv, mask=mask)
    keep = mask.to_bool(5, 7).expand(2, 6, 5, 7)
    assert torch.equal(torch.isneginf(trace["masked"]), ~keep)
    assert torch.equal(trace["masked"][keep], trace["scaled"][keep])
    assert torch.equal(trace["weights"] > 0, keep)


def test_a_sink_takes_weight(qkv):
    sinks = torch.tensor([-math.inf, 0.0, 1.0, 2.0, 3.0, 50.0])
    trace = ch.explain(*qkv, sinks=sinks)
    extra = sinks.reshape(1, -1, 1, 1).expand(2, 6, 5, 1)
    expected = torch.softmax(torch.cat([trace["scaled"], extra], -1), -1)[..., :7]
    torch.testing.assert_close(trace["weights"], expected)
    assert trace.step("weights").formula.endswith("with exp(sink − max) in the sum")


def test_the_order_is_scale_cap_bias_mask(qkv):
    bias = torch.randn(5, 7)
    mask = ch.Causal(align="end")
    trace = ch.explain(*qkv, scale=0.7, softcap=1.5, bias=bias, mask=mask)
    k = qkv[1].repeat_interleave(2, 1)
    x = 0.7 * (qkv[0] @ k.mT)
    torch.testing.assert_close(trace["scaled"], x)
    x = 1.5 * torch.tanh(x / 1.5)
    torch.testing.assert_close(trace["capped"], x)
    torch.testing.assert_close(trace["biased"], x + bias)
    masked = (x + bias).masked_fill(~mask.to_bool(5, 7), -math.inf)
    torch.testing.assert_close(trace["masked"], masked)


@given(st.permutations(range(7)), st.integers(0, 99))
def test_permuting_keys_permutes_weights(order, seed):
    source = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, t, 4, dtype=torch.float64, generator=source) for t in (5, 7, 7))
    keep = torch.rand(2, 5, 7, generator=source) < 0.7
    order = torch.tensor(order)
    one = ch.explain(q, k, v, mask=ch.dense(keep=keep))
    other = ch.explain(q, k[:, order], v[:, order], mask=ch.dense(keep=keep[..., order]))
    torch.testing.assert_close(other["weights"], one["weights"][..., order])
    torch.testing.assert_close(other["output"], one["output"])


@given(st.integers(0, 99), st.floats(-100, 100))
def test_a_constant_added_to_the_scores_changes_no_weight(seed, constant):
    source = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(t, 4, dtype=torch.float64, generator=source) for t in (5, 7))
    shift = torch.full((5, 1), constant, dtype=torch.float64)
    torch.testing.assert_close(
        ch.explain(q, k, k, bias=shift)["weights"], ch.explain(q, k, k)["weights"]
    )


def test_the_steps_keep_their_gradients(qkv):
    q, k, v = (x.requires_grad_() for x in qkv)
    trace = ch.explain(q, k, v, mask=ch.Causal(align="end"))
    of_scores, of_weights, of_v = torch.autograd.grad(
        trace["output"].sum(), (trace["scores"], trace["weights"], v)
    )
    assert (of_scores[torch.isneginf(trace["masked"])] == 0).all()
    torch.testing.assert_close(of_v.sum((-1, -2)).sum(), 11 * trace["weights"].sum())
    torch.testing.assert_close(
        of_weights, v.sum(-1).repeat_interleave(2, 1)[:, :, None].expand_as(of_weights)
    )


def test_tokens_may_be_numbers_in_a_tensor():
    x = torch.randn(3, 4)
    assert ch.explain(x, x, x, tokens=torch.tensor([5, 2, 7])).queries == ("5", "2", "7")


def test_a_notebook_shows_a_trace_of_nothing_as_text():
    trace = ch.explain(torch.zeros(0, 3), torch.zeros(2, 3), torch.zeros(2, 3))
    assert trace._repr_html_().startswith("<pre>")


def test_tokens_label_queries_and_keys():
    q, k = torch.randn(3, 4), torch.randn(2, 4)
    same = ch.explain(q, q, q, tokens=["the", "cat", "sat"])
    assert same.queries == same.keys == ("the", "cat", "sat")
    assert same.labels("q", 3) == same.labels("k", 3) == ["the", "cat", "sat"]
    assert same.labels("d", 4) == ["0", "1", "2", "3"]
    cross = ch.explain(q, k, k, tokens=["the", "cat", "sat"])
    assert cross.queries == ("the", "cat", "sat") and cross.keys is None
    named = ch.explain(q, k, k, key_tokens=("le", "chat"))
    assert named.queries is None and named.keys == ("le", "chat")


def test_a_trace_describes_its_call(qkv):
    mask = ch.Causal(align="end")
    trace = ch.explain(*qkv, mask=mask, softcap=2.0, dropout=0.25, seed=7)
    assert trace.settings == {
        "mask": "Causal(align='end')",
        "scale": 0.5,
        "softcap": 2.0,
        "bias": None,
        "dropout": 0.25,
        "seed": 7,
    }
    assert trace.about == (
        "B=2 H=6 G=3 Tq=5 Tk=7 D=4 Dv=11, float32 on cpu, mask Causal(align='end'), "
        "softcap 2, dropout 0.25 by seed 7"
    )


def test_a_trace_prints_its_steps():
    trace = ch.explain(torch.randn(5, 4), torch.randn(7, 4), torch.randn(7, 3))
    assert repr(trace) == (
        "B=1 H=1 Tq=5 Tk=7 D=4 Dv=3, float32 on cpu\n"
        "  query    5 4  q d  Q\n"
        "  key      7 4  k d  K\n"
        "  value    7 3  k v  V\n"
        "  scores   5 7  q k  Q Kᵀ\n"
        "  scaled   5 7  q k  scores / √4 = scores · 0.5\n"
        "  weights  5 7  q k  softmax(scaled)\n"
        "  output   5 3  q v  weights · V"
    )
    assert len(trace) == 7 and "weights" in trace and "masked" not in trace


def test_steps_may_be_put_in_front():
    trace = ch.explain(torch.randn(5, 4), torch.randn(7, 4), torch.randn(7, 3))
    first = ch.Step("embedding", "E", "Where it starts.", "q e", torch.zeros(5, 2))
    longer = trace.before(first)
    assert longer.names == ("embedding", *trace.names) and longer.steps[0] is first
    assert longer.about == trace.about


def test_low_precision_is_shown_as_it_is_computed(qkv):
    """Scores and weights in fp32, the output in the dtype of the problem."""
    trace = ch.explain(*(x.bfloat16() for x in qkv))
    assert {s.name: s.tensor.dtype for s in trace if s.name in ("query", "weights", "output")} == {
        "query": torch.bfloat16,
        "weights": torch.float32,
        "output": torch.bfloat16,
    }


def test_an_engine_with_a_draw_of_its_own_is_not_shown_beside_other_weights():
    q, k, v = torch.randn(3, 4, 8)
    with pytest.raises(ch.errors.BadValue, match="each engine draws anew"):
        ch.explain(q, k, v, dropout=0.5, engine="sdpa")
    trace = ch.explain(q, k, v, dropout=0.5, seed=3, engine="tiled")
    torch.testing.assert_close(trace["output"], trace["dropped"] @ v)


@pytest.mark.parametrize(
    "wrong", [{"dropout": "a"}, {"dropout": True}, {"seed": "x"}, {"seed": 1.5}]
)
def test_a_wrong_kind_is_a_wrong_type(wrong):
    with pytest.raises(ch.errors.BadType):
        ch.attention(*torch.randn(3, 4, 8), **wrong)

"""Several heads: head by head as loops, and torch's own module as second opinion.

Sizes are distinct primes where heads allow it, and Tq differs from Tk.
"""

import copy

import pytest
import torch
from torch.nn.utils import prune

import clearhead as ch
from clearhead.nn import CausalAttention, MultiHeadAttention, RotaryPositions, SimpleAttention
from tests.nn.layers import draw

close = torch.testing.assert_close


def by_loops(layer, x, context, values):
    """Every batch and every head on its own, from the formula."""
    q, k, v = layer.W_query(x), layer.W_key(context), layer.W_value(values)
    D, group = layer.head_size, layer.heads // layer.kv_heads
    rows = []
    for b in range(x.shape[0]):
        heads = []
        for i in range(layer.heads):
            j = i // group
            ours, theirs = slice(i * D, (i + 1) * D), slice(j * D, (j + 1) * D)
            weights = (q[b, :, ours] @ k[b, :, theirs].T / D**0.5).softmax(-1)
            heads.append(weights @ v[b, :, theirs])
        rows.append(layer.out_proj(torch.cat(heads, -1)))
    return torch.stack(rows)


@pytest.mark.parametrize("kv_heads", [None, 6, 3, 1])
def test_heads_one_by_one(kv_heads):
    layer = MultiHeadAttention(30, 6, kv_heads=kv_heads, qkv_bias=True)
    x = draw(2, 7, 30)
    close(layer(x), by_loops(layer, x, x, x))
    close(layer(x[0]), layer(x)[0])
    assert layer.W_key.out_features == 5 * (6 if kv_heads is None else kv_heads)


def test_cross_attention_with_its_own_widths():
    layer = MultiHeadAttention(30, 6, kv_heads=2, d_context=11, d_values=13)
    x, context, values = draw(2, 5, 30), draw(2, 7, 11, seed=8), draw(2, 7, 13, seed=9)
    close(layer(x, context, values), by_loops(layer, x, context, values))
    same = MultiHeadAttention(30, 6, d_context=11)
    close(same(x, context), by_loops(same, x, context, context))
    close(same(x, context[:1]), by_loops(same, x, context[:1].expand(2, -1, -1), context[:1]
          .expand(2, -1, -1)))  # fmt: skip


def test_masks_of_the_call():
    layer = MultiHeadAttention(12, 3)
    x, context = draw(2, 5, 12), draw(2, 7, 12, seed=8)
    short = layer(x, context, mask=ch.lengths(keys=[4, 7]))
    close(short[0], layer(x[0], context[0, :4]))
    close(short[1], layer(x[1], context[1]))
    end = layer(x, context, mask=ch.Causal(align="end"))
    close(end[:, 0], layer(x[:, :1], context[:, :3])[:, 0])
    ours = MultiHeadAttention(12, 3, causal=True)
    ours.load_state_dict(layer.state_dict())
    close(ours(x), layer(x, mask=ch.causal))
    close(ours(x, mask=ch.window(before=1)), layer(x, mask=ch.causal & ch.window(before=1)))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": 5}, {"kdim": 5, "vdim": 7}, {"vdim": 7}])
def test_torch_weights(batch_first, bias, widths):
    torch.manual_seed(2)
    theirs = torch.nn.MultiheadAttention(
        12, 3, bias=bias, batch_first=batch_first, dropout=0.2, **widths
    ).eval()
    if bias:  # torch begins with zeros, which would hide a bias in the wrong place
        torch.nn.init.normal_(theirs.in_proj_bias)
        torch.nn.init.normal_(theirs.out_proj.bias)
    ours = MultiHeadAttention.from_torch(theirs)
    assert not ours.training and ours.dropout == 0.2
    x = draw(2, 5, 12)
    context, values = draw(2, 11, widths.get("kdim", 12)), draw(2, 11, widths.get("vdim", 12))
    keep = draw(5, 11, seed=4) > -0.5
    turned = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    want, _ = theirs(turned(x), turned(context), turned(values), attn_mask=~keep)
    got = ours(x, context, values, mask=ch.dense(keep=keep))
    close(got, turned(want), rtol=1e-5, atol=1e-6)


def test_torch_weights_keep_their_dtype_and_mode_and_are_copied():
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True).double()
    ours = MultiHeadAttention.from_torch(theirs)
    assert ours.training and ours.W_key.weight.dtype == torch.float64
    assert all(p.requires_grad for p in ours.parameters())
    x = draw(2, 5, 12, dtype=torch.float64)
    before = ours(x)
    torch.nn.init.zeros_(theirs.in_proj_weight)
    assert torch.equal(ours(x), before)


def test_from_torch_keeps_what_is_frozen_and_refuses_what_computes_otherwise():
    theirs = torch.nn.MultiheadAttention(8, 2)
    theirs.in_proj_weight.requires_grad_(False)
    ours = MultiHeadAttention.from_torch(theirs)
    learns = {name: p.requires_grad for name, p in ours.named_parameters()}
    assert not learns["W_query.weight"] and learns["out_proj.weight"] and learns["W_key.bias"]
    with pytest.raises(ch.BadType, match="its own forward"):
        MultiHeadAttention.from_torch(torch.ao.nn.quantizable.MultiheadAttention(8, 2))


def test_a_layer_with_tensor_parallelism():
    """Each holds the projections of some heads and its rows of the last; the answers are added."""
    layer = MultiHeadAttention(12, heads=4, kv_heads=2, causal=True, out_bias=False)
    x, parts = torch.randn(2, 5, 12), []
    for i in range(2):
        part = copy.deepcopy(layer)
        for name, width in (("W_query", 6), ("W_key", 3), ("W_value", 3)):
            projection = getattr(part, name)
            projection.weight = torch.nn.Parameter(projection.weight[i * width : (i + 1) * width])
        part.out_proj.weight = torch.nn.Parameter(part.out_proj.weight[:, i * 6 : (i + 1) * 6])
        parts.append(part(x))
    torch.testing.assert_close(sum(parts), layer(x))


def test_a_projection_may_be_wrapped():
    class Wrapped(torch.nn.Module):  # as adapters do it
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) * 2

    layer = MultiHeadAttention(8, heads=2)
    layer.W_query, x = Wrapped(layer.W_query), torch.randn(1, 3, 8)
    torch.testing.assert_close(layer.explain(x)["projected"], layer(x))


def test_a_projection_that_converts_what_it_reads_is_left_to_itself():
    """Hooks may cast, and a weight that is computed is computed once for a call."""
    layer = ch.nn.MultiHeadAttention(16, heads=2).bfloat16()
    for name in ("W_query", "W_key", "W_value"):
        getattr(layer, name).register_forward_pre_hook(lambda _, given: given[0].bfloat16())
    assert layer(torch.randn(2, 5, 16)).dtype == torch.bfloat16
    layer, calls = ch.nn.MultiHeadAttention(16, heads=2), []

    class Counted(torch.nn.Module):
        def forward(self, weight):
            calls.append(1)
            return weight

    torch.nn.utils.parametrize.register_parametrization(layer.W_query, "weight", Counted())
    calls.clear()
    layer(torch.randn(2, 5, 16))
    assert len(calls) == 1


def test_explain_is_forward_with_dropout_in_training():
    torch.manual_seed(0)
    x = draw(2, 7, 12)
    layers = [
        CausalAttention(12, 5, 7, dropout=0.4),
        MultiHeadAttention(12, 6, kv_heads=2, dropout=0.4, causal=True, rotary=RotaryPositions(2)),
    ]
    for layer in layers:
        torch.manual_seed(1)
        out = layer(x)
        torch.manual_seed(1)
        trace = layer.explain(x)
        last = trace.steps[-1].tensor.reshape(out.shape)
        close(last, out)
        assert "dropped" in trace
        assert not torch.equal(trace["dropped"], trace["weights"])


def test_what_a_trace_of_many_heads_holds():
    layer = MultiHeadAttention(12, 6, kv_heads=2, d_context=5)
    x, context = draw(2, 3, 12), draw(2, 7, 5)
    trace = layer.explain(x, list("abc"), context=context, key_tokens=list("tuvwxyz"))
    assert trace.names == (
        "inputs", "context", "query", "key", "value", "scores", "scaled", "weights", "output",
        "joined", "projected"
    )  # fmt: skip
    assert [trace.step(n).axes for n in ("inputs", "context", "key", "joined", "projected")] == [
        "b q e", "b k e", "b g k d", "b q e", "b q e"
    ]  # fmt: skip
    close(trace["joined"][:, :, 2:4], trace["output"][:, 1])
    close(trace["projected"], layer(x, context))
    assert trace.keys == tuple("tuvwxyz")
    assert layer.explain(x[0], context=context[0]).step("joined").axes == "q e"


def test_explain_asks_what_if():
    layer = MultiHeadAttention(12, 3).eval()
    x = draw(5, 12)
    assert "scaled" not in layer.explain(x, scale=1)
    dropped = layer.explain(x, dropout=0.5, seed=3)["dropped"]
    assert torch.equal(dropped, layer.explain(x, dropout=0.5, seed=3)["dropped"])
    assert not torch.equal(dropped, layer.explain(x, dropout=0.5, seed=4)["dropped"])


def test_a_trace_has_the_formulas_of_the_projections():
    x, other = torch.randn(3, 8), torch.randn(5, 8)
    layer = MultiHeadAttention(8, 2)
    formulas = [s.formula for s in layer.explain(x, context=other) if s.name in "query key value"]
    assert formulas == ["X · W_query", "C · W_key", "C · W_value"]
    assert [SimpleAttention().explain(x).step(n).formula for n in ("query", "key")] == ["X", "X"]
    turned = MultiHeadAttention(8, 2, rotary=RotaryPositions(4)).explain(x)
    assert turned.step("key").formula == "rotated(X · W_key)"


def test_weights_that_pruning_computes_are_refused():
    """They are those of the last forward, older than what was learned since."""
    theirs = torch.nn.MultiheadAttention(8, 2)
    prune.l1_unstructured(theirs, "in_proj_weight", 0.5)
    with pytest.raises(ch.BadValue, match="computes its weights from in_proj_weight_orig"):
        MultiHeadAttention.from_torch(theirs)
    prune.remove(theirs, "in_proj_weight")
    weights = MultiHeadAttention.from_torch(theirs).W_query.weight
    assert torch.equal(weights, theirs.in_proj_weight[:8])


@pytest.mark.parametrize("which", [3, -1])
def test_the_trace_of_one_head_holds_the_key_head_it_reads(which):
    trace = MultiHeadAttention(8, 4, kv_heads=2).explain(draw(5, 8))
    one = trace.head(which)
    assert one.first == {"h": 3, "g": 1} and one.labels("h", 1) == ["3"]
    for name, place in (("weights", 3), ("query", 3), ("key", 1), ("value", 1)):
        assert torch.equal(one[name], trace[name][place : place + 1])
    assert torch.equal(one["joined"], trace["joined"])
    with pytest.raises(ch.BadValue, match="this trace has 4, counted from 0"):
        trace.head(4)

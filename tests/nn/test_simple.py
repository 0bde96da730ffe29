"""Layers of one head: numbers checked by pencil."""

import math

import torch

import clearhead as ch
from clearhead.nn import CausalAttention, MultiHeadAttention, SelfAttention, SimpleAttention
from tests.nn.layers import draw

close = torch.testing.assert_close


def test_two_tokens_by_pencil():
    """Scores 1 and 0, so weights e/(1+e) and 1/(1+e)."""
    x = torch.eye(2)
    big, small = math.e / (1 + math.e), 1 / (1 + math.e)
    close(SimpleAttention()(x), torch.tensor([[big, small], [small, big]]))


def test_projections_by_pencil():
    """q = 2x, k = x, v = 3x of one feature: the score of (1, 1) is 2, and of (1, 0) it is 0."""
    one = torch.ones(1, 1)
    layer = SelfAttention.from_matrices(2 * one, one, 3 * one)
    out = layer(torch.tensor([[1.0], [0.0]]))
    close(out, torch.tensor([[3 * math.e**2 / (1 + math.e**2)], [1.5]]))


def test_matrices_are_used_from_the_right_and_copied():
    W_q, W_k, W_v = (draw(5, 3, seed=s) for s in (1, 2, 3))
    x = draw(2, 7, 5)
    layer = SelfAttention.from_matrices(W_q, W_k, W_v)
    by_hand = ((x @ W_q) @ (x @ W_k).mT / 3**0.5).softmax(-1) @ (x @ W_v)
    close(layer(x), by_hand)
    W_v.zero_()
    close(layer(x), by_hand)
    assert all(p.requires_grad for p in layer.parameters())


def test_building_from_matrices_draws_nothing():
    torch.manual_seed(3)
    SelfAttention.from_matrices(*[torch.eye(3)] * 3)
    MultiHeadAttention.from_torch(torch.nn.MultiheadAttention(4, 2))
    after = torch.rand(1)
    torch.manual_seed(3)
    torch.nn.MultiheadAttention(4, 2)
    assert torch.equal(after, torch.rand(1))


def test_projections_are_drawn_in_the_order_query_key_value():
    torch.manual_seed(5)
    layer = SelfAttention(5, 3)
    torch.manual_seed(5)
    for name in ("W_query", "W_key", "W_value"):
        assert torch.equal(getattr(layer, name).weight, torch.nn.Linear(5, 3, bias=False).weight)
    assert layer.W_key.bias is None
    assert SelfAttention(5, 3, qkv_bias=True).W_key.bias is not None


def test_the_mask_of_the_layer_and_of_the_call_both_hold():
    x = draw(2, 7, 5)
    layer = SelfAttention(5, 3, mask=ch.causal)
    both = layer.explain(x, mask=ch.lengths(keys=[3, 6]))
    free = SelfAttention.from_matrices(
        layer.W_query.weight.T, layer.W_key.weight.T, layer.W_value.weight.T
    )
    rule = ch.causal & ch.lengths(keys=[3, 6])
    close(both["output"].squeeze(1), free(x, mask=rule))
    assert not torch.equal(free(x), free(x, mask=rule))
    assert (both["weights"][0, 0, :, 3:] == 0).all() and both["weights"][1, 0, 6, 5] > 0


def test_a_batch_is_its_sequences_one_by_one():
    x = draw(3, 7, 5)
    for layer in (SimpleAttention(), SelfAttention(5, 2), CausalAttention(5, 2, 11)):
        close(layer(x), torch.stack([layer(one) for one in x]))


def test_causal_attention_does_not_see_what_comes_later():
    x = draw(2, 7, 5)
    layer = CausalAttention(5, 3, 7)
    changed = x.clone()
    changed[:, 4:] += 1
    assert torch.equal(layer(x)[:, :4], layer(changed)[:, :4])
    assert not torch.equal(layer(x)[:, 4:], layer(changed)[:, 4:])
    close(layer(x)[:, 0], layer.W_value(x[:, 0]))  # the first token sees only itself
    close(layer(x, ch.window(before=0)), layer.W_value(x))  # now everyone does


def test_dropout_acts_in_training_only():
    x = draw(2, 7, 5)
    layer = CausalAttention(5, 3, 7, dropout=0.5).eval()
    assert torch.equal(layer(x), layer(x))
    assert "dropped" not in layer.explain(x)
    layer.train()
    assert not torch.equal(layer(x), layer(x))


def test_all_dropped_is_nothing():
    assert (CausalAttention(5, 3, 7, dropout=1.0)(draw(2, 7, 5)) == 0).all()


def test_what_a_trace_of_one_head_holds():
    x = draw(5, 3)
    trace = SelfAttention(3, 2).explain(x, tokens="a b c d e".split(), mask=ch.causal)
    assert trace.names == (
        "inputs", "query", "key", "value", "scores", "scaled", "masked", "weights", "output"
    )  # fmt: skip
    assert trace["inputs"] is x and trace.step("inputs").axes == "q e"
    assert trace.queries == trace.keys == ("a", "b", "c", "d", "e")
    assert "scaled" not in SimpleAttention().explain(x)
    assert SimpleAttention().explain(draw(2, 5, 3)).step("weights").axes == "b h q k"

"""Blocks: torch's encoder layer as second opinion."""

import pytest
import torch

import clearhead as ch
from clearhead.nn import FeedForward, MultiHeadAttention, TransformerBlock
from tests.nn.layers import draw

close = torch.testing.assert_close


def torch_block(theirs, norm):
    """Our block with the weights of torch's encoder layer."""
    ours = TransformerBlock(
        12, 3, hidden=17, activation="relu", norm=norm, qkv_bias=True, dropout=theirs.dropout.p
    )
    ours.attention = MultiHeadAttention.from_torch(theirs.self_attn)
    for name, source in (("W_1", "linear1"), ("W_2", "linear2")):
        getattr(ours.feed_forward, name).load_state_dict(getattr(theirs, source).state_dict())
    for name, source in (("norm_1", "norm1"), ("norm_2", "norm2")):
        getattr(ours, name).load_state_dict(getattr(theirs, source).state_dict())
    return ours


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_block_is_torchs_encoder_layer(norm):
    torch.manual_seed(4)
    theirs = torch.nn.TransformerEncoderLayer(
        12, 3, 17, dropout=0.2, batch_first=True, norm_first=norm == "pre"
    )
    for parameter in theirs.parameters():  # norms begin at 1 and 0, biases at 0
        torch.nn.init.normal_(parameter, std=0.5)
    ours = torch_block(theirs, norm).eval()
    theirs.eval()
    x = draw(2, 7, 12)
    close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    drop = torch.ones(7, 7, dtype=torch.bool).triu(1)
    close(ours(x, mask=ch.causal), theirs(x, src_mask=drop), rtol=1e-4, atol=1e-5)
    ours.attention.causal = True
    close(ours(x), theirs(x, src_mask=drop), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_block_drops_everything_but_the_stream(norm):
    block = TransformerBlock(12, 3, dropout=1.0, norm=norm)
    x = draw(2, 7, 12)
    twice = torch.nn.functional.layer_norm(torch.nn.functional.layer_norm(x, (12,)), (12,))
    close(block(x), x if norm == "pre" else twice)


@pytest.mark.parametrize(("name", "at_one"), [
    ("gelu", 0.8413447), ("relu", 1.0), ("silu", 0.7310586)
])  # fmt: skip
def test_feed_forward_by_pencil(name, at_one):
    """Weights 1 and 2, biases 0: f(x) = 2 * activation(x); gelu(1) = Phi(1), silu(1) = e/(1+e)."""
    layer = FeedForward(1, 1, name)
    layer.load_state_dict({
        "W_1.weight": torch.ones(1, 1), "W_1.bias": torch.zeros(1),
        "W_2.weight": torch.full((1, 1), 2.0), "W_2.bias": torch.zeros(1),
    })  # fmt: skip
    close(layer(torch.ones(1, 1)), torch.tensor([[2 * at_one]]))
    assert FeedForward(5).hidden == 20
    layer = FeedForward(3, dropout=1.0)
    close(layer(draw(5, 3)), layer.W_2.bias.expand(5, 3))  # the hidden features are dropped


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("shape", [(3, 5, 14), (5, 14)])
def test_a_block_explains_what_it_computes(norm, shape):
    block = ch.nn.TransformerBlock(14, 2, norm=norm, causal=True, dropout=0.3)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    for train in (True, False):
        block.train(train)
        torch.manual_seed(11)
        expected = block(x)
        torch.manual_seed(11)
        trace = block.explain(x, list("abcde"))
        torch.testing.assert_close(trace["block"], expected)
        assert trace.names[-4:] == ("attended", "normed", "fed", "block")
        assert ch.views.text.to_json(trace)["steps"][-1]["name"] == "block"


def test_a_block_explains_a_step_of_a_cache_and_leaves_the_cache():
    block = ch.nn.TransformerBlock(14, 2, causal=True).eval()
    x = torch.randn(1, 7, 14, generator=torch.Generator().manual_seed(7))
    cache = ch.nn.KVCache(7)
    with torch.no_grad():
        block(x[:, :5], cache=cache)
        trace = block.explain(x[:, 5:], cache=cache)
        assert cache.length == 5
        torch.testing.assert_close(trace["block"], block(x[:, 5:], cache=cache))


def test_the_trace_of_a_block_has_every_formula():
    x = torch.randn(1, 3, 8)
    for norm, given in (("pre", "norm_1(stream)"), ("post", "X")):
        block = TransformerBlock(8, heads=2, norm=norm)
        trace = block.explain(x)
        assert trace.step("inputs").formula == given
        assert trace.step("fed").formula == "gelu(normed · W_1 + b) · W_2 + b"
        torch.testing.assert_close(
            trace["inputs"], block.norm_1(x) if norm == "pre" else x, rtol=0, atol=0
        )
        dropping = TransformerBlock(8, heads=2, norm=norm, dropout=0.5)
        formulas = [dropping.explain(x).step(name).formula for name in ("attended", "fed", "block")]
        assert all("dropout(" in formula for formula in formulas)
        assert "dropout(" not in dropping.eval().explain(x).step("block").formula

"""What all layers have in common: they are saved, converted, trained and printed."""

import copy
import io
from functools import partial

import pytest
import torch

import clearhead as ch
from clearhead.nn import (
    CausalAttention,
    FeedForward,
    MultiHeadAttention,
    RelativePositions,
    RotaryPositions,
    SelfAttention,
    SinusoidalPositions,
    TokenEmbedding,
    TransformerBlock,
)
from tests.nn.layers import NAMES, every_layer

close = torch.testing.assert_close


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_and_copied(name):
    layer, x = every_layer()[name]
    layer.eval()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    torch.manual_seed(99)
    other = copy.deepcopy(layer)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    if list(layer.parameters()):
        assert not torch.equal(other(x), layer(x))
    other.load_state_dict(torch.load(file), strict=True)
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("name", NAMES)
def test_double_and_half(name):
    layer, x = every_layer()[name]
    layer.eval()
    wide = copy.deepcopy(layer).double()
    narrow = copy.deepcopy(layer).to(torch.bfloat16)
    inputs = (x, x, x) if name == "tokens" else (x, x.double(), x.bfloat16())
    outs = [m(i) for m, i in zip((layer, wide, narrow), inputs, strict=True)]
    assert [o.dtype for o in outs[1:]] == [torch.float64, torch.bfloat16]
    close(outs[0].double(), outs[1], rtol=1e-4, atol=1e-5)
    close(outs[2].double(), outs[1], rtol=0.01, atol=0.01)


LEARNING = [
    partial(SelfAttention, 12, 7),
    partial(CausalAttention, 12, 7, 5),
    partial(MultiHeadAttention, 12, 6, kv_heads=3, out_bias=True),
    partial(TokenEmbedding, 13, 12),
    partial(RelativePositions, 3),
    partial(FeedForward, 12),
    partial(TransformerBlock, 12, 3),
]


@pytest.mark.parametrize("make", LEARNING, ids=lambda make: make.func.__name__)
def test_device_and_dtype_of_the_weights(make):
    here, there = make(dtype=torch.float64), make(device="meta", dtype=torch.bfloat16)
    assert {p.dtype for p in here.parameters()} == {torch.float64}
    assert {(p.device.type, p.dtype) for p in there.parameters()} == {("meta", torch.bfloat16)}
    assert {p.dtype for p in make().parameters()} == {torch.get_default_dtype()}


@pytest.mark.parametrize("name", [n for n in NAMES if n != "tokens"])
def test_gradients_by_differences(name):
    layer, x = every_layer()[name]
    layer = layer.double().eval()
    x = x[:, :3].double().requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,))
    weights = tuple(layer.parameters())[:2]
    if weights:
        grads = torch.autograd.grad(layer(x).square().sum(), weights)
        assert all(g.abs().sum() > 0 for g in grads)


@pytest.mark.parametrize("name", ["self", "causal", "many", "feed", "pre", "post"])
def test_every_parameter_learns(name):
    layer, x = every_layer()[name]
    layer(x).square().sum().backward()
    for key, parameter in layer.named_parameters():
        if "W_key.bias" not in key:  # softmax does not see what is added to a whole row
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key


@pytest.mark.outside
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_training_learns_to_copy_the_token_before(norm):
    """Only attention can move a token, and only positions can identify the one before."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({
        "embed": TokenEmbedding(5, 16), "place": SinusoidalPositions(16),
        "block": TransformerBlock(16, 2, causal=True, norm=norm, dropout=0.01),
        "read": torch.nn.Linear(16, 5),
    })  # fmt: skip
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(150):
        ids = torch.randint(5, (32, 7))
        logits = model["read"](model["block"](model["place"](model["embed"](ids))))
        loss = torch.nn.functional.cross_entropy(logits[:, 1:].flatten(0, 1), ids[:, :-1].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > 1.3 and sum(losses[-10:]) / 10 < 0.4


def test_layers_print_themselves():
    assert str(SelfAttention(3, 2, mask=ch.causal)).startswith("SelfAttention(\n  mask=causal\n")
    assert "context_length=7, dropout=0.5" in str(CausalAttention(3, 2, 7, dropout=0.5))
    assert "heads=6, kv_heads=3, dropout=0, causal=True" in str(
        MultiHeadAttention(12, 6, kv_heads=3, causal=True)
    )
    assert str(RotaryPositions(4)) == "RotaryPositions(head_size=4, base=10000, pairs='half')"
    assert str(SinusoidalPositions(5, 100.0)) == "SinusoidalPositions(d=5, base=100)"
    assert "activation='gelu'" in str(FeedForward(3))
    assert "norm='post'" in str(TransformerBlock(4, 2, norm="post"))

"""`logit_attribution` on the model that ships, on own blocks and on torch's layers."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead import demo
from clearhead.core.errors import BadType, BadValue
from tests.models.two_blocks import TwoBlocks, ids, randomised

STORY = "Long ago there lived a funny mouse and a famous witch. She always conjured in the swamp."


def norm(parts, module):
    """Each part through a layer norm whose scale is that of their sum."""
    total = sum(parts.values())
    scale = (total.var(-1, unbiased=False, keepdim=True) + module.eps).rsqrt()
    made = {n: (x - x.mean(-1, keepdim=True)) * scale * module.weight for n, x in parts.items()}
    return {**made, "bias": made["bias"] + module.bias}


def by_hand(model, text, column):
    """The parts, with softmax and sums written out, in float64."""
    model = model.double()
    x = model.embed(text)
    T = len(text)
    parts = {"embedding": x, "bias": torch.zeros_like(x)}
    for number, block in enumerate([model.first, model.second]):
        pre = block.norm == "pre"
        layer = block.attention
        given = block.norm_1(x) if pre else x
        G, D = layer.kv_heads, layer.head_size
        q = layer.W_query(given).unflatten(-1, (3, D))
        k, v = (f(given).unflatten(-1, (G, D)) for f in (layer.W_key, layer.W_value))
        for h in range(3):
            scores = q[:, h] @ k[:, h * G // 3].T / D**0.5
            scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
            z = scores.softmax(-1) @ v[:, h * G // 3]
            W = layer.out_proj.weight.T.unflatten(0, (3, D))[h]
            parts[f"{number} {h}"] = z @ W
        parts["bias"] = parts["bias"] + layer.out_proj.bias
        parts = parts if pre else norm(parts, block.norm_1)
        x = sum(parts.values())
        parts[f"{number} mlp"] = block.feed_forward(block.norm_2(x) if pre else x)
        parts = parts if pre else norm(parts, block.norm_2)
        x = sum(parts.values())
    if isinstance(model.norm, nn.LayerNorm):
        parts = norm(parts, model.norm)
    u = column(model.head.weight)
    parts = {name: (x * u).sum(-1) for name, x in parts.items()}
    return {**parts, "bias": parts["bias"] + column(model.head.bias)}


@pytest.mark.parametrize(("kind", "after"), [("pre", True), ("pre", False), ("post", False)])
def test_every_part_is_that_of_float64_by_hand(kind, after):
    model = randomised(TwoBlocks(kind, after))
    found = ch.logit_attribution(model, ids(), ch.logit_difference(3, 4))
    with torch.no_grad():
        logits = model(ids()[None])[0]
        column = lambda W: (W[3] - W[4]).expand(7, *W.shape[1:])  # noqa: E731
        parts = by_hand(model, ids(), column)
    most = 1e-5 * sum(x.abs() for x in parts.values())
    assert torch.allclose(found.logit, logits[:, 3] - logits[:, 4], atol=1e-4)
    assert found.modules == ("first.attention", "second.attention")
    for layer in range(2):
        for head in range(3):
            assert bool(((found.heads[layer, head] - parts[f"{layer} {head}"]).abs() <= most).all())
        assert bool(((found.mlps[layer] - parts[f"{layer} mlp"]).abs() <= most).all())
    assert bool(((found.embedding - parts["embedding"]).abs() <= most).all())
    assert bool(((found.bias - parts["bias"]).abs() <= most).all())


def test_the_model_that_ships():
    teller = demo.load()
    text = torch.tensor(teller.encode(STORY).ids)
    found = ch.logit_attribution(teller.model, text)
    with torch.no_grad():
        logits = teller.model(text)
    T = len(text)
    assert found.heads.shape == (2, 8, T - 1) and found.check() < 1e-5
    assert torch.allclose(found.logit, logits[torch.arange(T - 1), text[1:]], atol=1e-4)
    assert torch.equal(found.target, text[1:])
    sources = found.sources(0, 7, -1)
    assert sources.shape == (T,) and sources[-1] == 0  # a later token moves nothing
    assert torch.allclose(sources.sum(), found.heads[0, 7, -1], atol=1e-5)
    assert f"{T - 1} positions" in repr(found)


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_the_parts_are_the_same_where_gradients_are_off(without_gradients):
    model = randomised(TwoBlocks("pre"))
    expected = ch.logit_attribution(model, ids(), 4)
    with without_gradients():
        found = ch.logit_attribution(model, ids().clone(), 4)
    assert torch.equal(found.heads, expected.heads) and torch.equal(found.mlps, expected.mlps)


@pytest.mark.parametrize("target", [4, "next"])
def test_the_largest_sources_are_those_of_every_query(target):
    found = ch.logit_attribution(randomised(TwoBlocks("pre")), ids(), target)
    parts, keys = found.largest_sources(3)
    T = 7 - (target == "next")
    assert parts.shape == keys.shape == (2, 3, T, 3)
    for layer, head, query in product(range(2), range(3), range(T)):
        sources = found.sources(layer, head, query)
        want = sources.abs().argsort(descending=True)[:3]
        seen = min(3, query + 1)
        assert keys[layer, head, query].tolist() == want[:seen].tolist() + [-1] * (3 - seen)
        assert torch.allclose(parts[layer, head, query], sources[want], atol=1e-6)
    with pytest.raises(BadValue, match="n=8"):
        found.largest_sources(8)


def test_nan_is_among_the_largest_and_reaches_only_queries_that_see_it():
    found = ch.logit_attribution(randomised(TwoBlocks("pre")), ids(), 4)
    source = found._sources[0]
    source.inputs.v[:, :, 4] = torch.nan
    parts, keys = found.largest_sources(2)
    assert bool(parts[0, :, 4:, 0].isnan().all()) and bool((keys[0, :, 4:, 0] == 4).all())
    assert not parts[0, :, :4].isnan().any() and not parts[0, :, 4:, 1].isnan().any()
    assert not found.sources(0, 1, 3).isnan().any()
    assert found.sources(0, 1, 5).isnan().tolist() == [False] * 4 + [True] + [False] * 2
    found.mlps[1, -1] = torch.nan
    assert repr(found).splitlines()[1] == "      +nan  layer 1 MLP"


def test_the_run_changes_nothing():
    model = randomised(TwoBlocks("pre"))
    with torch.no_grad():
        before = model(ids()[None])
    ch.logit_attribution(model, ids())
    with torch.no_grad(), ch.watch(model) as recording:
        assert torch.equal(model(ids()[None]), before)
    assert len(recording) == 2 and all(x.grad is None for x in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_own_layers(batch_first):
    class Torch(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(19, 12), nn.Linear(12, 19)
            self.attention = nn.MultiheadAttention(12, 3, batch_first=batch_first)

        def forward(self, ids):
            x = self.embed(ids)
            x = x if batch_first else x.transpose(0, 1)
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return self.head(x if batch_first else x.transpose(0, 1))

    model = randomised(Torch())
    with ch.compat.patched():
        found = ch.logit_attribution(model, ids(), 3)
    assert found.check() < 1e-5 and found.heads.shape == (1, 3, 7)
    direction = model.head.weight[3]
    assert torch.allclose(found.embedding, model.embed(ids()) @ direction, atol=1e-4)
    bias = model.head.bias[3] + model.attention.out_proj.bias @ direction
    assert torch.allclose(found.bias, bias.expand(7), atol=1e-5)


def test_a_stream_that_is_changed_in_place():
    class InPlace(TwoBlocks):
        def forward(self, ids):
            x = self.embed(ids)
            x *= 2
            x += self.first(x) - x
            return self.head(self.norm(self.second(x)))

    model = randomised(InPlace("pre"))
    found = ch.logit_attribution(model, ids(), 3)
    model.embed.table.weight.data *= 2
    model.forward = lambda ids: TwoBlocks.forward(model, ids)
    other = ch.logit_attribution(model, ids(), 3)
    assert torch.allclose(found.heads, other.heads, atol=1e-5)
    assert torch.allclose(found.embedding, other.embedding, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant):
    class Checkpointed(TwoBlocks):
        def forward(self, ids):
            x = checkpoint(self.first, self.embed(ids), use_reentrant=reentrant)
            return self.head(self.norm(self.second(x)))

    model = randomised(Checkpointed("pre"))
    if reentrant:
        with pytest.raises(BadValue, match="use_reentrant=True runs first"):
            ch.logit_attribution(model, ids(), 4)
    else:
        found = ch.logit_attribution(model, ids(), 4)
        assert torch.equal(
            found.heads, ch.logit_attribution(randomised(TwoBlocks("pre")), ids(), 4).heads
        )


def test_a_model_without_attention_is_refused():
    model = nn.Sequential(nn.Embedding(19, 12), nn.Linear(12, 19))
    with pytest.raises(BadValue, match="made no attention call"):
        ch.logit_attribution(model, ids())


def test_what_is_no_model_and_no_text_is_refused():
    with pytest.raises(BadType, match="got a str"):
        ch.logit_attribution("model", ids())
    with pytest.raises(BadType, match="a list as ids"):
        ch.logit_attribution(randomised(TwoBlocks("pre")), [1, 2])
    with pytest.raises(BadValue, match="a text of 1 token"):
        ch.logit_attribution(randomised(TwoBlocks("pre")), ids(1))
    with pytest.raises(BadType, match=r"got pixel_values, and no input_ids[^!]*image model"):
        ch.logit_attribution(randomised(TwoBlocks("pre")), {"pixel_values": torch.ones(1, 3, 5, 5)})
    with pytest.raises(BadType, match=r"got torch.float32 numbers \(1, 3, 5, 5\) as ids"):
        ch.logit_attribution(randomised(TwoBlocks("pre")), torch.ones(1, 3, 5, 5))


class Classifier(TwoBlocks):
    def forward(self, ids):
        return super().forward(ids)[:, -1]


def test_an_error_names_no_argument_that_does_not_exist():
    with pytest.raises(BadValue, match=r"tensor of shape \(1, 19\)") as error:
        ch.logit_attribution(randomised(Classifier("pre")), ids())
    assert "metric=" not in str(error.value) and "classifier" in error.value.hint


def test_nan_in_weights_is_named_as_such():
    model = randomised(TwoBlocks("pre"))
    with torch.no_grad():
        model.second.attention.out_proj.weight[0, 0] = torch.nan
    with pytest.raises(BadValue, match="logits with NaN"):
        ch.logit_attribution(model, ids())
    with (
        pytest.raises(BadValue, match=r"weights of second\.attention\.out_proj have NaN"),
        ch.watch(model, stats=["varying"]),
    ):
        model(ids()[None])


def test_nan_of_one_token_is_no_other_projection():
    model = randomised(TwoBlocks("pre"))
    text = ids()
    position = int((text != text[0]).nonzero()[0])
    with torch.no_grad():
        model.embed.table.weight[text[position]] = torch.nan
    with ch.watch(model, stats=["varying", ch.value_weighted(groups={"first": ch.prefix(1)})]) as w:
        model(text[None])
    first = w[0].value_weighted["first"][0]
    assert first[:, :position].isfinite().all() and first[:, position].isnan().all()
    assert w[0].varying.isnan().all()

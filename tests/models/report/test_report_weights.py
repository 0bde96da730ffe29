"""A report of weights alone has the statistics and roles of the model that computed them."""

import math

import pytest
import torch

import clearhead as ch
from clearhead import BadType, BadValue, demo

TEXT = (
    "Once upon a time there was a quiet queen. She danced because she was proud. "
    "The queen had a dog. She danced."
)


def test_it_is_the_report_of_the_model():
    model = demo.load()
    _, inputs = model.tokens_and_inputs(TEXT)
    right = ch.report(model.module, inputs, tokens=model.tokens_and_inputs(TEXT)[0], progress=False)
    layers = [model.explain(TEXT, number)["weights"] for number in range(len(right.layers))]
    found = ch.report_weights(layers, tokens=right.tokens, name=right.name)
    assert any(head.roles for head in found.heads)
    for ours, theirs in zip(found.layers, right.layers, strict=True):
        assert ours.pooled.sub(theirs.pooled).abs().max() < 1e-6
        assert ours.received.sub(theirs.received).abs().max() < 1e-5
        assert ours.allowed.equal(theirs.allowed)
        assert ours.max_entropy == pytest.approx(theirs.max_entropy)
        assert ours.top_keys[..., 0].equal(theirs.top_keys[..., 0])
        assert ours.trace.names == ("weights",) and ours.value_norms is None
    for ours, theirs in zip(found.heads, right.heads, strict=True):
        assert ours.label == theirs.label and ours.evidence == theirs.evidence
        assert ours.number == pytest.approx(theirs.number, abs=1e-6)
        assert ours.entropy == pytest.approx(theirs.entropy, abs=1e-6)
        assert ours.shares == pytest.approx(theirs.shares, abs=1e-6)


@pytest.mark.outside
def test_the_attentions_of_an_eager_model_of_transformers():
    import transformers

    ch.hf.register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=24, intermediate_size=17, num_hidden_layers=3,
        num_attention_heads=3, num_key_value_heads=1, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.LlamaModel(config).eval()
    ids = torch.randint(3, 31, (2, 13))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids[:1], output_attentions=True).attentions
        batch = model(ids, output_attentions=True).attentions
    model.set_attn_implementation("clearhead")
    right = ch.report(model, ids[:1], progress=False)
    found = ch.report_weights(attentions)
    for ours, theirs in zip(found.heads, right.heads, strict=True):
        assert ours.entropy == pytest.approx(theirs.entropy, abs=1e-5)
        assert ours.shares == pytest.approx(theirs.shares, abs=1e-5)
    first = ch.report_weights([weights[:1] for weights in batch])
    assert [x.label for x in first.heads] == [x.label for x in found.heads]
    with pytest.raises(BadValue, match=r"Layer 0 has the shape \(2, 3, 13, 13\), a batch of 2"):
        ch.report_weights(batch)


def test_a_row_lacks_what_a_sink_has():
    """Weights of 3 heads with a sink logit each, as GPT-OSS returns them: without its column."""
    T, H = 13, 3
    drawn = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, H, T, 5, generator=drawn)
    sinks = torch.tensor([-20.0, 0.5, 3.0])
    keep = torch.ones(T, T).tril().bool()
    keep[7] = False  # a fully masked query
    keywords = {"mask": ch.dense(keep=keep), "sinks": sinks}
    weights = ch.explain(q, k, k, **keywords)["weights"]
    look = ch.look(q, k, k, stats=["entropy"], **keywords)
    [layer] = ch.report_weights([weights]).layers
    lacks = 1 - weights[0].double().sum(-1)
    active = keep.any(-1)
    for h, head in enumerate(layer.heads):
        assert head.shares["sink"] == pytest.approx(float(lacks[h, active].mean()), abs=1e-5)
        assert head.entropy == pytest.approx(float(look.entropy[0, h, active].mean()), abs=1e-5)
        assert head.roles[:1] == () or head.roles[0].name == "sink"
    assert [head.label for head in layer.heads][2] == "nothing (sink logit)"
    assert layer.received.sum(-1).tolist() == pytest.approx(
        weights[0].sum((-1, -2)).tolist(), rel=1e-5
    )


def test_a_head_whose_row_is_zero_where_another_looks():
    weights = torch.eye(7).repeat(2, 1, 1)
    weights[1, 3] = 0
    [layer] = ch.report_weights(weights).layers
    assert layer.heads[1].shares["same"] == pytest.approx(6 / 7)
    assert layer.heads[1].shares["sink"] == pytest.approx(1 / 7)
    assert layer.heads[0].shares["sink"] == pytest.approx(0, abs=1e-6)


def test_one_matrix_is_one_layer_of_one_head_and_half_precision_is_read():
    matrix = torch.rand(11, 11).tril().softmax(-1).bfloat16()
    found = ch.report_weights(matrix)
    assert len(found.layers) == len(found.heads) == 1
    assert found.layers[0].trace["weights"].dtype == torch.bfloat16
    exact = matrix.double() / matrix.double().sum(-1, keepdim=True)
    entropy = -(exact * exact.log()).sum(-1).mean()
    assert found.heads[0].entropy == pytest.approx(float(entropy), abs=1e-6)


def test_cross_attention_has_two_texts():
    queries, keys = list("abcde"), list("fghijkl")
    layers = [torch.randn(1, 3, 5, 7).softmax(-1).numpy() for _ in range(2)]
    found = ch.report_weights(layers, tokens=queries, key_tokens=keys)
    assert all(layer.cross_attention for layer in found.layers)
    assert found.layers[1].query_tokens == tuple(queries)
    assert found.layers[1].key_tokens == tuple(keys)
    assert "previous" not in found.heads[0].shares
    assert "Cross-attention, from one text into another: layers 0, 1." in str(found)
    with pytest.raises(BadValue, match=r"(?s)Layer 0 has the shape \(1, 3, 5, 7\).*key_tokens="):
        ch.report_weights(layers, tokens=queries)


def test_what_is_not_the_weights_of_layers_is_refused():
    layer = torch.eye(7)[None]
    for nothing in (None, [], ()):
        with pytest.raises(
            BadType, match=r"(?s)no weights of layer 0.*attn_implementation=\"eager\""
        ):
            ch.report_weights(nothing)
    with pytest.raises(BadType, match=r"(?s)no weights of layer 1.*attn_implementation=\"eager\""):
        ch.report_weights([layer, None, layer])
    with pytest.raises(BadType, match=r"Layer 0: The weights are a tuple"):  # of `generate`
        ch.report_weights([(layer, layer)])
    with pytest.raises(BadValue, match=r"Layer 1: A row of the weights sums to 2"):
        ch.report_weights([layer, 2 * layer])
    with pytest.raises(BadValue, match=r"Layer 1: tokens has 7 entries for 5 positions"):
        ch.report_weights([layer, torch.eye(5)], tokens=list("abcdefg"))
    with pytest.raises(BadValue, match=r"Layer 0 has the shape \(0, 0\)"):
        ch.report_weights(torch.zeros(0, 0))


def test_it_is_saved_and_loaded(tmp_path):
    found = ch.report_weights(torch.eye(7)[None], tokens=list("abcdefg"))
    loaded = ch.load(found.save(tmp_path / "weights.safetensors"))
    assert loaded.layers[0].trace["weights"].equal(torch.eye(7)[None])
    assert math.isclose(loaded.heads[0].shares["same"], 1.0)

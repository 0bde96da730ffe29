"""`why` against what one computes by hand with TransformerLens: `decompose_resid` and
`stack_head_results`, through norm, W_Q, W_K and rotation, and `hook_attn_scores`."""

import copy
import os

import pytest
import torch

import clearhead as ch
from tests.hf.test_why import T, built

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")
lens = pytest.importorskip("transformer_lens.model_bridge", reason="needs transformer-lens 4.3")

HEAD, QUERY, KEY, AGAINST = 3, 6, 3, 2


def cache_of(model, inputs, folder):
    """Run a copy of the model in TransformerLens, and return what it recorded."""
    words = {str(i): i for i in range(97)}
    backend = pytest.importorskip("tokenizers").Tokenizer(
        pytest.importorskip("tokenizers").models.WordLevel(words, unk_token="0")
    )
    special = dict(bos_token="1", eos_token="2", pad_token="0")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)
    bridge = lens.TransformerBridge.boot_transformers(
        str(folder), hf_model=copy.deepcopy(model), dtype=torch.float64
    )
    return bridge.run_with_cache(inputs[None])[1]


def parts_of_stream(cache, layer):
    """The parts of the stream before a layer in the scale of its norm, (T, d), by their names."""
    options = dict(layer=layer, apply_ln=True, return_labels=True)
    stream, labels = cache.decompose_resid(**options)
    heads, names = cache.stack_head_results(**options)
    known = dict(zip(names, heads[:, 0], strict=True))
    for label, part in zip(labels, stream[:, 0], strict=True):
        if "attn" not in label:
            known[f"L{label[0]} MLP" if "mlp" in label else label] = part
    return known


def projections(name, model, layer):
    """W_Q and W_K of the head behind the gain of the norm, (d, D), and the rotation."""
    if name == "gpt2":
        block = model.transformer.h[layer]
        W = (block.ln_1.weight[:, None] * block.attn.c_attn.weight).unflatten(1, (3, 4, 8))
        return W[:, 0, HEAD], W[:, 1, HEAD], lambda x: x
    block = model.model.layers[layer]
    cos, sin = model.model.rotary_emb(torch.zeros(1, T, 1).double(), torch.arange(T)[None])

    def rotated(x):
        a, b = x.chunk(2, -1)
        return x * cos[0] + torch.cat([-b, a], -1) * sin[0]

    gain = block.input_layernorm.weight
    Q = (block.self_attn.q_proj.weight * gain).unflatten(0, (4, 12))[HEAD]
    K = (block.self_attn.k_proj.weight * gain).unflatten(0, (2, 12))[HEAD // 2]
    return Q.T, K.T, rotated


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_parts_are_those_of_transformer_lens(name, tmp_path):
    model, inputs, layer = built(name)
    arguments = dict(layer=layer, head=HEAD, query=QUERY, key=KEY)
    why = ch.why(model, inputs, **arguments, against=AGAINST)
    with torch.no_grad():
        cache = cache_of(model, inputs, tmp_path)
        scores = cache[f"blocks.{layer}.attn.hook_attn_scores"][0, HEAD, QUERY]
        parts = parts_of_stream(cache, layer)
        W_Q, W_K, rotated = projections(name, model, layer)
        q, k = (cache[f"blocks.{layer}.attn.hook_{x}"][0] for x in "qk")
        q, k = (rotated(x[:, HEAD * x.shape[1] // 4]) for x in (q, k))
    largest = float(why.key_parts.abs().max().clamp(min=why.query_parts.abs().max()))
    assert abs(float(scores[KEY] - scores[AGAINST]) - why.contrast) < 1e-5 * largest
    scale = q.shape[-1] ** -0.5
    compared = set()
    for component, of_key, of_query in zip(
        why.components, why.key_parts, why.query_parts, strict=True
    ):
        label = str(component)
        if component.kind == "embedding":
            label = "pos_embed" if label.endswith("wpe") else "embed"
        if component.kind == "bias":
            continue  # TransformerLens has those of a layer in its output
        compared.add(label)
        by_key, by_query = rotated(parts[label] @ W_K), rotated(parts[label] @ W_Q)
        expected = scale * float(q[QUERY] @ (by_key[KEY] - by_key[AGAINST]))
        assert abs(expected - float(of_key)) < 1e-5 * largest
        expected = scale * float(by_query[QUERY] @ (k[KEY] - k[AGAINST]))
        assert abs(expected - float(of_query)) < 1e-5 * largest
    assert compared == {*parts}

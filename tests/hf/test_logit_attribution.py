"""`logit_attribution` on transformers models, against eager attention in float64 whose parts are
followed through the norms one by one."""

import copy
import os
from dataclasses import dataclass

import pytest
import torch

import clearhead as ch
from clearhead.core.errors import BadType, BadValue
from tests.hf.tiny_models import drawn_model as build

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")

SMALL = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
SMALL |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
GROUPED = dict(**SMALL, num_key_value_heads=2, intermediate_size=37, head_dim=12)
T = 7


@dataclass
class Names:
    """Where a model keeps its parts."""

    layers: str
    attention: str  # the projection
    mlp: str
    embeddings: tuple[str, ...]
    norm: str
    head: str = "lm_head"
    norm_of: tuple[str, str] | None = None  # after the projection, and after the MLP
    adds_one: bool = False  # to the weight of a norm


LLAMA = Names("model.layers", "self_attn.o_proj", "mlp", ("model.embed_tokens",), "model.norm")
AFTER = "post_attention_layernorm", "post_feedforward_layernorm"
MODELS = {
    "gpt2": (
        transformers.GPT2Config(
            vocab_size=97, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
        ),
        Names(
            "transformer.h", "attn.c_proj", "mlp", ("transformer.wte", "transformer.wpe"),
            "transformer.ln_f",
        ),
    ),
    "llama": (transformers.LlamaConfig(**GROUPED), LLAMA),
    "qwen3": (transformers.Qwen3Config(**GROUPED, tie_word_embeddings=True), LLAMA),
    "gemma2": (
        transformers.Gemma2Config(
            **GROUPED, sliding_window=5, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
        ),
        Names(
            "model.layers", "self_attn.o_proj", "mlp", ("model.embed_tokens",), "model.norm",
            norm_of=AFTER, adds_one=True,
        ),
    ),
    "olmo2": (
        transformers.Olmo2Config(**{k: x for k, x in GROUPED.items() if k != "head_dim"}),
        Names(
            "model.layers", "self_attn.o_proj", "mlp", ("model.embed_tokens",), "model.norm",
            norm_of=AFTER,
        ),
    ),
    "parallel": (
        transformers.GPTNeoXConfig(**SMALL, intermediate_size=37, use_parallel_residual=True),
        Names(
            "gpt_neox.layers", "attention.dense", "mlp", ("gpt_neox.embed_in",),
            "gpt_neox.final_layer_norm",
        ),
    ),
}  # fmt: skip


def ids(count=T):
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(1))


def normed(parts, module, adds_one):
    """Each part through a norm whose scale is that of their sum; the bias is a part."""
    total = sum(parts.values())
    layer_norm = isinstance(module, torch.nn.LayerNorm)
    centre = (lambda x: x - x.mean(-1, keepdim=True)) if layer_norm else (lambda x: x)
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    scale = (centre(total).square().mean(-1, keepdim=True) + eps).rsqrt()
    gain = 1 + module.weight if adds_one else module.weight
    made = {name: centre(x) * scale * gain for name, x in parts.items()}
    if layer_norm:
        made["bias"] = made.get("bias", 0) + module.bias
    return made


def values_of(seen, block):
    """The values of a layer, (T, heads, Dv), from what its modules returned."""
    if (fused := seen.get(block + "attn.c_attn")) is not None:
        return fused[1][0].chunk(3, -1)[2].unflatten(-1, (4, -1))
    if (fused := seen.get(block + "attention.query_key_value")) is not None:
        return fused[1][0].unflatten(-1, (4, 3, -1))[:, :, 2]
    v = seen[block + "self_attn.v_proj"][1][0]
    return v.unflatten(-1, (2 if v.shape[-1] < 48 else 4, -1))


def expected(model, names, text, column, split=None):
    """The parts of the logit of the unembedding's column (T, d), in float64 by eager attention;
    those of the layer and head `split` by source token."""
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    seen = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda _, given, out, name=name: seen.update({name: (given, out)})
        )
    with torch.no_grad():
        weights = model(text[None], output_attentions=True).attentions
        parts = {"embedding": sum(seen[name][1] for name in names.embeddings)[0]}
        for layer in range(2):
            block = f"{names.layers}.{layer}."
            projection = model.get_submodule(block + names.attention)
            z = seen[block + names.attention][0][0][0].unflatten(-1, (4, -1))
            W = projection.weight if type(projection).__name__ == "Conv1D" else projection.weight.T
            W = W.unflatten(0, (4, -1))
            heads = {f"{layer} {h}": z[:, h] @ W[h] for h in range(4)}
            if split is not None and layer == split[0]:
                h, v = split[1], values_of(seen, block)
                v = v[:, h * v.shape[1] // 4]
                moved = weights[layer][0, h].unsqueeze(-1) * v  # (T, T, Dv)
                heads |= {f"source {j}": moved[:, j] @ W[h] for j in range(len(text))}
                del heads[f"{layer} {h}"]
            bias = getattr(projection, "bias", None)
            if bias is not None:
                heads["bias"] = bias.expand(len(text), -1)
            mlp = seen[block + names.mlp][1][0]
            mlp = {f"{layer} mlp": mlp}
            if names.norm_of:
                first, second = (model.get_submodule(block + n) for n in names.norm_of)
                heads = normed(heads, first, names.adds_one)
                mlp = normed(mlp, second, names.adds_one)
            for name, x in {**heads, **mlp}.items():
                parts[name] = parts.get(name, 0) + x
        parts = normed(parts, model.get_submodule(names.norm), names.adds_one)
        u = column(model.get_submodule(names.head).weight)
        raw = seen[names.head][1][0]
        return {name: (x[: len(u)] * u).sum(-1) for name, x in parts.items()}, raw


@pytest.mark.parametrize("target", ["next", "id", "difference", "center"])
@pytest.mark.parametrize("kind", MODELS)
def test_every_part_is_that_of_eager_attention_in_float64(kind, target):
    config, names = MODELS[kind]
    model, text = build(config), ids()
    at = torch.arange(T)
    if target == "next":
        found = ch.logit_attribution(model, text)
        column, logit = (lambda W: W[text[1:]]), (lambda raw: raw[at[:-1], text[1:]])
    elif target == "id":
        found = ch.logit_attribution(model, text[None], 5)
        column, logit = (lambda W: W[[5] * T]), (lambda raw: raw[:, 5])
    elif target == "difference":
        found = ch.logit_attribution(model, {"input_ids": text[None]}, ch.logit_difference(5, 8))
        column = lambda W: (W[5] - W[8]).expand(T, -1)  # noqa: E731
        logit = lambda raw: raw[:, 5] - raw[:, 8]  # noqa: E731
    else:
        found = ch.logit_attribution(model, text, ids(9)[:T].flip(0), center=True)
        other = ids(9)[:T].flip(0)
        column = lambda W: W[other] - W.mean(0)  # noqa: E731
        logit = lambda raw: raw[at, other] - raw.mean(-1)  # noqa: E731
    parts, raw = expected(model, names, text, column)
    most = 1e-5 * sum(x.abs() for x in parts.values())
    assert found.heads.shape == (2, 4, T - (target == "next"))
    assert found.check() < 1e-5
    assert bool(((found.logit - logit(raw)).abs() <= most).all())
    for layer in range(2):
        for head in range(4):
            assert bool(((found.heads[layer, head] - parts[f"{layer} {head}"]).abs() <= most).all())
        assert bool(((found.mlps[layer] - parts[f"{layer} mlp"]).abs() <= most).all())
    assert bool(((found.embedding - parts["embedding"]).abs() <= most).all())
    assert bool(((found.bias - parts.get("bias", 0)).abs() <= most).all())


@pytest.mark.parametrize("kind", MODELS)
def test_sources_are_weights_times_values(kind):
    config, names = MODELS[kind]
    model, text = build(config), ids()
    found = ch.logit_attribution(model, text, 5)
    for layer, head, query in [(0, 1, 3), (1, 2, -1)]:
        column = lambda W: W[[5] * T]  # noqa: E731
        parts, _ = expected(model, names, text, column, split=(layer, head))
        want = torch.stack([parts[f"source {j}"][query] for j in range(T)])
        most = 1e-5 * sum(x.abs() for x in parts.values())[query]
        assert bool(((found.sources(layer, head, query) - want).abs() <= most).all())
        largest, keys = (x[layer, head, query, 0] for x in found.largest_sources(1))
        assert abs(largest.abs() - want.abs().max()) <= most
        assert abs(largest - want[keys]) <= most
    with pytest.raises(BadValue, match="Query 7 was requested"):
        found.sources(0, 0, T)


@torch.no_grad()
def parts_of_t5(model, inputs, token):
    """The parts of the decoder's heads by source token, (L, H, T, most keys), in float64, and the
    sum of the absolute parts of all heads."""
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    stack, seen = model.decoder, {}
    layers = [x for block in stack.block for x in (
        block.layer[0].SelfAttention, block.layer[1].EncDecAttention)]  # fmt: skip
    for layer in layers:
        layer.v.register_forward_hook(lambda module, args, out: seen.update({module: out[0]}))
    stack.final_layer_norm.register_forward_pre_hook(lambda _, args: seen.update(stream=args[0][0]))
    out = model(**inputs, output_attentions=True)
    crossed = zip(out.decoder_attentions, out.cross_attentions, strict=True)
    norm = stack.final_layer_norm
    scale = (seen["stream"].square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    tied = model.config.d_model**-0.5 if model.config.tie_word_embeddings else 1.0
    u = scale * norm.weight * model.lm_head.weight[token] * tied  # (T, d)
    parts = []
    for layer, weights in zip(layers, (x for pair in crossed for x in pair), strict=True):
        v = seen[layer.v].unflatten(-1, (4, -1)).transpose(0, 1)
        along = u @ layer.o.weight.unflatten(1, (4, -1)).movedim(1, 0)  # (H, T, Dv)
        part = weights[0] * (along @ v.mT)
        parts.append(torch.nn.functional.pad(part, (0, T - part.shape[-1])))
    return torch.stack(parts), torch.stack(parts).abs().sum((0, 1, 3))


def test_an_encoder_and_decoder_by_its_decoder():
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=12, d_ff=37, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = build(config, "AutoModelForSeq2SeqLM")
    inputs = {"input_ids": ids()[None], "decoder_input_ids": ids(5)[None]}
    found = ch.logit_attribution(model, inputs, 5)
    assert found.heads.shape == (4, 4, 5) and found.check() < 1e-5
    assert all(name.startswith("decoder") for name in found.modules)
    with torch.no_grad():
        assert torch.allclose(found.logit, model(**inputs).logits[0, :, 5], atol=1e-4)
    right, total = parts_of_t5(model, inputs, 5)
    agree = dict(rtol=0, atol=1e-5 * float(total.max()), check_dtype=False)
    torch.testing.assert_close(found.heads, right.sum(-1), **agree)
    for layer, head, query in [(0, 1, 3), (1, 2, 4), (3, 0, 0)]:  # 1 and 3 read the encoder
        sources = found.sources(layer, head, query)
        want = right[layer, head, query]
        torch.testing.assert_close(sources, want[: len(sources)], **agree)
    # The embedding is the row of the shared table, along the stream of the decoder.
    assert bool((found.embedding != 0).all())


def test_a_model_in_bfloat16():
    config, _ = MODELS["llama"]
    model = build(config)
    exact = ch.logit_attribution(model, ids(), 5)
    rounded = ch.logit_attribution(model.bfloat16(), ids(), 5)
    assert rounded.heads.dtype == torch.float32 and rounded.check() < 0.06
    assert rounded.sources(1, 2, -1).shape == (T,)
    assert torch.allclose(rounded.heads, exact.heads, atol=0.1 * float(exact.heads.abs().max()))


@pytest.mark.parametrize("kind", MODELS)
def test_under_autocast_the_parts_of_the_rounded_run_are_exact(kind):
    config, _ = MODELS[kind]
    model = build(config)
    exact = ch.logit_attribution(model, ids(), 5)
    sources = exact.sources(1, 2, -1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(exact.sources(1, 2, -1), sources)
        rounded = ch.logit_attribution(model, ids(), 5)
        assert rounded.heads.dtype == torch.float32 and rounded.check() < 0.03
        total = rounded.sources(1, 2, -1).sum()
    assert torch.allclose(rounded.heads, exact.heads, atol=0.1 * float(exact.heads.abs().max()))
    assert torch.allclose(total, rounded.heads[1, 2, -1], atol=0.03 * float(sources.abs().sum()))


def test_a_transform_before_the_unembedding_is_refused():
    config = transformers.BertConfig(**SMALL, intermediate_size=37)
    model = build(config, "AutoModelForMaskedLM")
    with pytest.raises(BadValue, match=r"do not reach the logits(.|\n)*BERT"):
        ch.logit_attribution(model, ids(), 5)


def test_a_stream_that_gets_something_else_is_refused():
    config, _ = MODELS["llama"]
    model = build(config)
    model.model.layers[0].register_forward_hook(lambda _m, _given, out: out + 1.0)
    with pytest.raises(BadValue, match="the parts miss the logit by"):
        ch.logit_attribution(model, ids(), 5)


def test_a_norm_that_is_not_known_is_refused():
    config, _ = MODELS["llama"]
    model = build(config)
    model.model.norm.register_forward_hook(lambda _m, _given, out: out.tanh())
    with pytest.raises(BadValue, match=r"The norm 'model\.norm' is not known"):
        ch.logit_attribution(model, ids(), 5)


def test_an_edited_output_has_no_sources():
    config, _ = MODELS["llama"]
    model = build(config)
    with ch.intervene(model, [ch.edits.ablate(layers=[1], heads=[2])]):
        found = ch.logit_attribution(model, ids(), 5)
    assert float(found.heads[1, 2].abs().max()) == 0 and found.check() < 1e-5
    with pytest.raises(BadValue, match="an edit of the output"):
        found.sources(1, 2, -1)
    with pytest.raises(BadValue, match=r"L1H2 miss(.|\n)*an edit of the output"):
        found.largest_sources(2)
    assert torch.allclose(found.sources(1, 1, -1).sum(), found.heads[1, 1, -1], atol=1e-5)


def test_the_largest_sources_are_those_of_edited_weights():
    config, _ = MODELS["llama"]
    model = build(config)
    with ch.intervene(model, [ch.edits.knock_out(ch.prefix(1), layers=[1], heads=[2])]):
        found = ch.logit_attribution(model, ids(), 5)
    parts, keys = found.largest_sources(T)
    assert (keys[1, 2] != 0).all() and (keys[1, 1, 1:] == 0).any(-1).all()
    assert torch.allclose(parts.sum(-1), found.heads, atol=1e-5)


@pytest.mark.parametrize("target", ["last", 97, -1, torch.zeros(3, dtype=torch.long), 1.5])
def test_targets_that_are_none_are_refused(target):
    config, _ = MODELS["llama"]
    with pytest.raises((BadValue, BadType), match="a target is 'next', an id below 97"):
        ch.logit_attribution(build(config), ids(), target)


def test_several_texts_are_refused():
    config, _ = MODELS["llama"]
    with pytest.raises(BadValue, match=r"of shape \(2, 7\)"):
        ch.logit_attribution(build(config), ids().expand(2, T), 5)


def test_a_model_in_training_with_dropout_is_refused():
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4)
    with pytest.raises(BadValue, match="draws random numbers"):
        ch.logit_attribution(build(config).train(), ids(), 5)

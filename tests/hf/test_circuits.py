"""`circuits` of transformers models, against dense matrices in float64 that are read by name."""

import copy
import os

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.core.errors import BadType, BadValue
from clearhead.core.functional.ambient import listening
from tests.hf.tiny_models import drawn_model as build

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")

SMALL = dict(vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
SMALL |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
GROUPED = dict(**SMALL, num_key_value_heads=2, intermediate_size=37, head_dim=12)
CONFIGS = {
    "gpt2": transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "llama": transformers.LlamaConfig(**GROUPED),
    "qwen3": transformers.Qwen3Config(**GROUPED, tie_word_embeddings=True),
    "gemma2": transformers.Gemma2Config(**GROUPED, sliding_window=5),
    "gpt_neox": transformers.GPTNeoXConfig(**SMALL, intermediate_size=37),
    "phi3": transformers.Phi3Config(**{k: x for k, x in GROUPED.items() if k != "head_dim"}),
}


def centred(x, dim):
    return x - x.mean(dim, keepdim=True)


def heads(weight, n):
    """Of a matrix (d, n * size) as x @ W, that of each head, (n, d, size)."""
    return weight.unflatten(-1, (n, -1)).movedim(-2, 0)


@torch.no_grad()
def by_name(kind, model):
    """The processed matrices, as the code of the model names them."""
    model = copy.deepcopy(model).double()
    if kind == "gpt2":
        body, layers, norm, head = model.transformer, model.transformer.h, "ln_f", model.lm_head
        embed = body.wte
    elif kind == "gpt_neox":
        body, layers, head = model.gpt_neox, model.gpt_neox.layers, model.lm_head
        norm, embed = "final_layer_norm", body.embed_in
    else:
        body, layers, norm, head = model.model, model.model.layers, "norm", model.lm_head
        embed = body.embed_tokens
    center = kind in ("gpt2", "gpt_neox")
    one = 1 if kind == "gemma2" else 0
    W = {name: [] for name in "QKVO"}
    for layer in layers:
        if kind == "gpt2":
            q, k, v = (heads(x, 4) for x in layer.attn.c_attn.weight.split(32, -1))
            o, gain = layer.attn.c_proj.weight, layer.ln_1.weight
        elif kind == "gpt_neox":
            fused = layer.attention.query_key_value.weight.T.unflatten(-1, (4, 3, 8))
            q, k, v = (fused[:, :, i].movedim(1, 0) for i in range(3))
            o, gain = layer.attention.dense.weight.T, layer.input_layernorm.weight
        else:
            attention, gain = layer.self_attn, layer.input_layernorm.weight
            o = attention.o_proj.weight.T
            if kind == "phi3":
                parts = attention.qkv_proj.weight.T.split([32, 16, 16], -1)
            else:
                parts = (getattr(attention, f"{x}_proj").weight.T for x in "qkv")
            q, k, v = (heads(x, n) for x, n in zip(parts, (4, 2, 2), strict=True))
            k, v = k[[0, 0, 1, 1]], v[[0, 0, 1, 1]]
            if kind == "qwen3":
                q, k = q * attention.q_norm.weight, k * attention.k_norm.weight
        for name, x in zip("QKV", (q, k, v), strict=True):
            x = x * (one + gain)[:, None]
            W[name].append(centred(x, 1) if center else x)
        o = o.unflatten(0, (4, -1))
        W["O"].append(centred(o, -1) if center else o)
    W = {name: torch.stack(x) for name, x in W.items()}
    U = head.weight.T * (one + getattr(body, norm).weight)[:, None]
    U = centred(centred(U, 0) if center else U, 1)
    E = centred(embed.weight, 1) if center else embed.weight
    return W, E, U


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_scores_are_those_of_dense_matrices(kind):
    model = build(CONFIGS[kind])
    found = ch.circuits(model)
    with torch.no_grad():
        W, E, U = by_name(kind, model)
        OV, QK = W["V"] @ W["O"], W["Q"] @ W["K"].mT
        readers = {"Q": QK, "K": QK.mT, "V": OV}
        for name, x in W.items():
            assert torch.allclose(getattr(found, f"W_{name}").double(), x, atol=1e-5)
        for reader, R in readers.items():
            scores = found.composition(reader)
            for a, b, c, e in [(0, 1, 1, 2), (0, 3, 2, 0), (1, 0, 2, 3)]:
                want = (OV[a, b] @ R[c, e]).norm() / OV[a, b].norm() / R[c, e].norm()
                assert abs(float(scores[a, b, c, e] / want) - 1) < 1e-5
            assert not scores[1, :, :2].any() and scores.shape == (3, 4, 3, 4)
        copying = found.copying()
        for layer, head in [(0, 0), (2, 3)]:
            values = torch.linalg.eigvals(E @ OV[layer, head] @ U)
            want = values.real.sum() / values.abs().sum()
            assert abs(float(copying[layer, head] - want)) < 1e-5
    assert bool(found.inexact) == (kind in ("qwen3", "gemma2"))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox"])
def test_a_rotated_qk_is_that_of_transformers_at_an_offset(kind):
    model = build(CONFIGS[kind])
    found = ch.circuits(model)
    modeling = __import__(
        f"transformers.models.{kind}.modeling_{kind}", fromlist=["apply_rotary_pos_emb"]
    )
    body = model.gpt_neox if kind == "gpt_neox" else model.model
    W, *_ = by_name(kind, model)
    positions = torch.arange(9)[None]
    with torch.no_grad():
        cos, sin = body.rotary_emb(torch.zeros(1, dtype=torch.float64), positions)

        def rotated(x, at):  # (H, d, D), every row at one position
            turns = cos[:, at].expand(1, x.shape[1], -1), sin[:, at].expand(1, x.shape[1], -1)
            return modeling.apply_rotary_pos_emb(x[None], x[None], *turns)[0][0]

        want = rotated(W["Q"][1], 8) @ rotated(W["K"][1], 5).mT
        raw = W["Q"][1] @ W["K"][1].mT
    given = found.qk(1, 2, offset=3)
    assert torch.allclose(given.dense().double(), want[2], atol=1e-5 * float(want[2].norm()))
    assert torch.allclose(found.qk(1, 2).dense().double(), raw[2], atol=1e-4)
    assert abs(given.norm() - float(want[2].norm())) < 1e-4 * given.norm()
    OV = (W["V"] @ W["O"])[0, 1]
    score = (OV @ want[2].T).norm() / OV.norm() / want[2].norm()
    assert abs(float(found.composition("K", offset=3)[0, 1, 1, 2] / score) - 1) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "gemma3", "nanochat", "cohere", "olmo2", "gpt_oss"])
def test_the_scores_of_a_run_are_those_of_the_rotated_qk(kind):
    """As far as a norm of queries and keys lets them: up to a factor for each query and key."""
    same = {k: x for k, x in GROUPED.items() if k != "head_dim"}
    config = {
        "llama": lambda: CONFIGS["llama"],
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **GROUPED, sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "nanochat": lambda: transformers.NanoChatConfig(**same),
        "cohere": lambda: transformers.CohereConfig(**same),
        "olmo2": lambda: transformers.Olmo2Config(**same),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **{**GROUPED, "intermediate_size": 32}, num_local_experts=2, num_experts_per_tok=1
        ),
    }[kind]()  # fmt: skip
    model = build(config)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("bias"):
                x.zero_()
    found = ch.circuits(model)
    calls, given = [], []
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_pre_hook(lambda _, x: given.append(x[0][0]))
    text = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), listening(calls.append):
        model(text)
    layer, head = 1, 3
    inputs, x = calls[layer][1], given[layer].double()
    norm = getattr(model.model.layers[layer], "input_layernorm", None)
    if norm is not None and getattr(norm, "weight", None) is not None:
        x = x / ((1 if kind == "gemma3" else 0) + norm.weight.detach().double())
    q, k = inputs.q[0, head].double(), inputs.k[0, head // 2].double()
    scores = q @ k.T
    want = torch.stack([
        torch.stack([x[t] @ found.qk(layer, head, offset=t - s).dense().double() @ x[s]
                     for s in range(9)])
        for t in range(9)
    ])  # fmt: skip
    ratio = (want / scores).log()  # of the factors of a query and a key: the sum of two numbers
    ratio = ratio - ratio.mean(0) - ratio.mean(1, keepdim=True) + ratio.mean()
    assert float(ratio.abs().max()) < 1e-3


def test_autocast_changes_nothing():
    model = build(CONFIGS["llama"])
    right = ch.circuits(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ch.circuits(model)
        for numbers in (
            lambda x: x.composition("K"), lambda x: x.copying(), lambda x: x.qk(1, 2, 3).dense(),
        ):  # fmt: skip
            ours = numbers(found)
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(ours, numbers(right))
        assert found.ov(0, 1).norm() == right.ov(0, 1).norm()


def test_factored_matrices():
    found = ch.circuits(build(CONFIGS["gpt2"])).ov(2, -1)
    dense = found.dense().detach().double()
    values = torch.linalg.svdvals(dense)[:8]
    assert torch.allclose(found.singular_values().double(), values, rtol=1e-4)
    eigen = torch.linalg.eigvals(dense)
    largest = eigen[eigen.abs().argsort(descending=True)][:8]
    assert torch.allclose(found.eigenvalues().abs(), largest.abs(), rtol=1e-3)


def test_the_baseline_is_that_of_random_matrices():
    config = transformers.LlamaConfig(**{**GROUPED, "hidden_size": 64})
    model = build(config)
    with torch.no_grad():
        for x in model.parameters():
            x.normal_() if x.dim() > 1 else x.fill_(1)
    found = ch.circuits(model)
    for kind in ("Q", "K", "V"):
        scores = found.composition(kind)
        scores = scores[scores > 0]
        baseline = found.baseline(kind, samples=200)
        assert abs(float(scores.mean()) - baseline.mean) < 4 * baseline.deviation / 48**0.5
        assert baseline == found.baseline(kind, samples=200)


@pytest.mark.parametrize(
    ("config", "auto", "why"),
    [
        (
            transformers.BertConfig(**SMALL, intermediate_size=37),
            "AutoModelForMaskedLM",
            "of another block",
        ),
        (
            transformers.T5Config(
                vocab_size=97, d_model=32, d_kv=8, num_layers=1, decoder_start_token_id=0
            ),
            "AutoModelForSeq2SeqLM",
            "is an encoder and a decoder",
        ),
        (
            transformers.DeepseekV3Config(
                **SMALL, intermediate_size=32, moe_intermediate_size=32, n_routed_experts=4,
                n_group=1, topk_group=1, num_experts_per_tok=1, kv_lora_rank=16, q_lora_rank=16,
                qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, first_k_dense_replace=3,
                num_key_value_heads=4,
            ),
            "AutoModelForCausalLM",
            r"MLA",
        ),
    ],
)  # fmt: skip
def test_models_without_such_circuits_are_refused(config, auto, why):
    with pytest.raises(BadValue, match=why):
        ch.circuits(build(config, auto))


def test_a_model_without_logits_has_no_copying():
    found = ch.circuits(build(CONFIGS["llama"], "AutoModel"))
    assert found.W_U is None and found.composition("V").shape == (3, 4, 3, 4)
    with pytest.raises(BadValue, match="without logits"):
        found.copying()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # gpt2 also adds positions
def test_an_adapter_beside_the_embedding_leaves_no_table(kind):
    """The rows of the table alone would give another copying score."""
    model = build(CONFIGS[kind])
    table = model.get_input_embeddings()
    rows = ch.circuits(model).W_E
    model.set_input_embeddings(Adapted(table, nn.Embedding(97, 32)))
    found = ch.circuits(model)
    assert rows is not None and found.W_E is None
    with pytest.raises(BadValue, match="merge adapters"):
        found.copying()


def test_a_change_of_the_logits_is_refused():
    model = build(CONFIGS["llama"])
    forward = model.forward

    def changed(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits.flip(-1)
        return output

    model.forward = changed
    with pytest.raises(BadValue, match="not those of its last linear module"):
        ch.circuits(model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotation_of_the_length_of_the_text_is_named(kind):
    """At 24 tokens it differs from that of 8, which the run of `circuits` has."""
    same = {k: x for k, x in GROUPED.items() if k != "head_dim"} | {"num_hidden_layers": 1}
    rope = {"rope_type": kind, "rope_theta": 1e4}
    if kind == "dynamic":
        rope |= {"factor": 4.0}
        config = transformers.LlamaConfig(**same, max_position_embeddings=16, rope_parameters=rope)
    else:
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0,
                 "original_max_position_embeddings": 16}  # fmt: skip
        config = transformers.Phi3Config(
            **same, original_max_position_embeddings=16, max_position_embeddings=64,
            rope_parameters=rope,
        )  # fmt: skip
    model = build(config)
    ids = torch.arange(3, 27)[None]
    calls = []
    with torch.no_grad(), listening(calls.append):
        model(ids[:, :8])
        model(ids)
    short, long = (call.inputs.q[0, :, 7].double() for call in calls)
    assert (short - long).abs().max() > 1e-2 * long.abs().max()
    assert f"is '{kind}'" in " ".join(ch.circuits(model).inexact)


def test_what_does_not_fit_is_refused():
    found = ch.circuits(build(CONFIGS["gpt2"]))
    with pytest.raises(BadValue, match="kind='O'"):
        found.composition("O")
    with pytest.raises(BadValue, match="does not rotate"):
        found.qk(0, 0, offset=1)
    with pytest.raises(BadValue, match="Head 4"):
        found.ov(0, 4)
    with pytest.raises(BadType, match="got a str"):
        ch.circuits("gpt2")
    assert "largest compositions" in repr(found)


class Adapted(nn.Module):
    """A module and an adapter beside it."""

    def __init__(self, base, more):
        super().__init__()
        self.base, self.more = base, more

    def forward(self, x):
        return self.base(x) + self.more(x)


def test_an_adapter_before_attention_is_refused():
    model = build(CONFIGS["llama"])
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapted(attention.q_proj, nn.Linear(32, 48))
    with pytest.raises(BadValue, match=r"The queries of model\.layers\.1\.self_attn are not"):
        ch.circuits(model)

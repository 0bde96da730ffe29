"""What is found as the output projection is what the model computes with."""

import os

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.core.errors import BadValue
from clearhead.core.functional.ambient import listening
from clearhead.hf.projections import output_projection, without_projection
from clearhead.models.follow.layers import Layers, module_hooks

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")

SMALL = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
GROUPED = dict(**SMALL, num_key_value_heads=2, intermediate_size=37, pad_token_id=0)
WIDE = dict(**GROUPED, head_dim=12)  # heads that together are wider than the model
T5 = dict(vocab_size=97, d_model=32, d_kv=12, d_ff=37, num_layers=1, num_heads=4)
# The configuration, and the projection of the first layer by name.
MODELS = {
    "gpt2": (
        transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4),
        "h.0.attn.c_proj",
    ),
    "llama": (transformers.LlamaConfig(**WIDE), "layers.0.self_attn.o_proj"),
    "mistral": (transformers.MistralConfig(**GROUPED), "layers.0.self_attn.o_proj"),
    "qwen2": (transformers.Qwen2Config(**GROUPED), "layers.0.self_attn.o_proj"),
    "qwen3": (transformers.Qwen3Config(**WIDE), "layers.0.self_attn.o_proj"),
    "gemma2": (transformers.Gemma2Config(**WIDE), "layers.0.self_attn.o_proj"),
    "gemma3": (transformers.Gemma3TextConfig(**WIDE), "layers.0.self_attn.o_proj"),
    "phi": (transformers.PhiConfig(**GROUPED), "layers.0.self_attn.dense"),
    "phi3": (transformers.Phi3Config(**GROUPED), "layers.0.self_attn.o_proj"),
    "gpt_neox": (
        transformers.GPTNeoXConfig(**SMALL, intermediate_size=37),
        "layers.0.attention.dense",
    ),
    "opt": (
        transformers.OPTConfig(**SMALL, ffn_dim=37, word_embed_proj_dim=32),
        "decoder.layers.0.self_attn.out_proj",
    ),
    "bert": (
        transformers.BertConfig(**SMALL, intermediate_size=37),
        "encoder.layer.0.attention.output.dense",
    ),
    "t5": (transformers.T5Config(**T5), "encoder.block.0.layer.0.SelfAttention.o"),
}  # fmt: skip


def ids(B=2, T=7):
    return torch.randint(3, 97, (B, T), generator=torch.Generator().manual_seed(1))


def build(config):
    ch.hf.register()
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("bias"):
                x.normal_()
    return model


def inputs_of(config):
    named = {"input_ids": ids()}
    return named | {"decoder_input_ids": ids()} if config.is_encoder_decoder else named


def calls_of(model, inputs):
    """The modules that call attention, with the problem of the call and the output of its heads."""
    found, layers = [], Layers()

    def on_call(call):
        found.append((layers.next_call()[1], call.problem, call.out))

    with torch.no_grad(), module_hooks(model, layers.enter, layers.leave), listening(on_call):
        model(**inputs)
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_the_projection_is_what_eager_attention_is_multiplied_with(kind):
    config, where = MODELS[kind]
    model, seen = build(config), {}
    for name, module in model.named_modules():
        if name.endswith(where.rpartition(".")[2]):
            module.register_forward_hook(
                lambda _, given, returned, name=name: seen.update({name: (given[0], returned)})
            )
    with torch.no_grad():
        model(**inputs_of(config))
    model.set_attn_implementation("clearhead")
    calls = calls_of(model, inputs_of(config))
    first, problem, _ = calls[0]
    assert output_projection(model, first, problem.H, problem.Dv).module == where
    for name, problem, _ in calls:
        projection = output_projection(model, name, problem.H, problem.Dv)
        given, returned = seen[projection.module]
        z = given.unflatten(-1, (problem.H, problem.Dv)).transpose(1, 2)
        written = torch.einsum("bhtv,hvd->btd", z, projection.weight)
        written = written if projection.bias is None else written + projection.bias
        assert projection.weight.shape == (4, problem.Dv, 32)
        assert torch.allclose(written, returned, atol=1e-5)
        projection.check(z, returned)
        with pytest.raises(BadValue, match="returned other numbers"):
            projection.check(z.roll(1, 1), returned)
    assert without_projection(model) is None


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_of_torchs_module(batch_first, bias):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, bias=bias, batch_first=batch_first).eval()
    if bias:
        nn.init.normal_(layer.out_proj.bias)
    model = nn.ModuleDict({"attention": layer})
    x = torch.randn(2, 5, 12)
    given = x if batch_first else x.transpose(0, 1)
    found = []
    with torch.no_grad(), ch.compat.patched(), listening(found.append):
        returned = layer(given, given, given, need_weights=False)
    problem, _, z = found[0][:3]
    projection = output_projection(model, "attention", problem.H, problem.Dv)
    assert projection.module == "attention"
    projection.check(z, returned)
    written = torch.einsum("bhtv,hvd->btd", z, projection.weight) + (
        layer.out_proj.bias if bias else 0
    )
    want = returned[0] if batch_first else returned[0].transpose(0, 1)
    assert torch.allclose(written, want, atol=1e-6)


def test_of_own_layers():
    torch.manual_seed(0)
    block = ch.nn.TransformerBlock(12, 3, kv_heads=1)
    projection = output_projection(block, "attention", 3, 4)
    assert projection.module == "attention.out_proj"
    z = torch.randn(2, 3, 5, 4)
    want = block.attention.out_proj(z.transpose(1, 2).flatten(2))
    projection.check(z, want)
    alone = output_projection(ch.nn.SelfAttention(6, 4), "", 1, 4)
    assert torch.equal(alone.weight[0], torch.eye(4)) and alone.bias is None
    alone.check(z[:, :1], z[:, 0])


def test_a_gate_before_the_projection_is_found_out():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.o_proj = nn.Linear(12, 24), nn.Linear(12, 12)

        def forward(self, x):
            q, gate = self.q_proj(x).chunk(2, -1)
            q = q.unflatten(-1, (3, 4)).transpose(1, 2)
            z = ch.attention(q, q, q)
            return self.o_proj(z.transpose(1, 2).flatten(2) * gate.sigmoid())

    torch.manual_seed(0)
    layer, found = Gated(), []
    with listening(found.append):
        returned = layer(torch.randn(2, 5, 12))
    with pytest.raises(BadValue, match=r"o_proj returned other numbers.*\n.*a gate"):
        output_projection(layer, "", 3, 4).check(found[0][2], returned)


class Attention(nn.Module):
    def __init__(self, **linears):
        super().__init__()
        for name, linear in linears.items():
            self.add_module(name, linear)


class Adapted(nn.Module):  # as peft wraps a Linear: its weight is that of the base layer alone
    def __init__(self):
        super().__init__()
        self.base_layer, self.in_features = nn.Linear(12, 12), 12

    @property
    def weight(self):
        return self.base_layer.weight


@pytest.mark.parametrize(
    ("linear", "why"),
    [
        (Adapted(), "an Adapted, is not an nn.Linear"),
        (nn.Linear(12, 12, device="meta"), "is on the meta device"),
        (nn.Linear(12, 12).to(torch.float8_e4m3fn), "quantised weights of torch.float8_e4m3fn"),
    ],
)
def test_weights_that_do_not_hold_their_numbers_are_refused(linear, why):
    with pytest.raises(BadValue, match=why):
        output_projection(Attention(o_proj=linear), "", 3, 4)


def test_sharded_weights_are_refused():
    linear = nn.Linear(12, 12)
    linear.weight.device_mesh = "(4,)"  # as a DTensor has it
    with pytest.raises(BadValue, match="is sharded over devices"):
        output_projection(Attention(out_proj=linear), "", 3, 4)


def test_packed_weights_are_refused():
    linear = nn.Linear(12, 12)
    linear.weight = nn.Parameter(torch.zeros(72, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(BadValue, match=r"quantised weights of torch\.uint8"):
        output_projection(Attention(out_proj=linear), "", 3, 4)


def test_weights_that_a_tensor_of_another_class_holds_are_refused():
    class Int8Tensor(torch.Tensor):  # as torchao quantises: its dtype is that of a product
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.detach.default:
                return args[0]
            raise NotImplementedError(func)

    linear = nn.Linear(12, 12)
    linear.weight = nn.Parameter(torch.Tensor._make_wrapper_subclass(Int8Tensor, (12, 12)))
    with pytest.raises(BadValue, match="holds its weights as Int8Tensor, which may be quantised"):
        output_projection(Attention(out_proj=linear), "", 3, 4)


@pytest.mark.parametrize(
    "linears", [{}, {"q_proj": nn.Linear(12, 12)}, {"o_proj": nn.Linear(9, 12)}]
)
def test_no_projection_says_what_was_looked_for(linears):
    with pytest.raises(
        BadValue, match=r"for the model, an Attention(.|\n)*3 x 4 = 12(.|\n)*o_proj"
    ):
        output_projection(Attention(**linears), "", 3, 4)


def test_supports_names_what_stands_between_heads_and_projection():
    settings = dict(**WIDE, linear_num_value_heads=2, linear_num_key_heads=2, num_experts=2)
    settings |= dict(layer_types=["full_attention"] * 2, num_experts_per_tok=1)
    answer = ch.hf.supports(transformers.Qwen3NextConfig(**settings))
    assert answer and "Qwen3NextAttention changes its output by the second half" in answer.reason
    answer = ch.hf.supports(transformers.BitNetConfig(**GROUPED))
    assert answer and "BitNetAttention changes its output by attn_sub_norm" in answer.reason
    assert "write" not in ch.hf.supports(transformers.LlamaConfig(**GROUPED)).reason

"""`Recording.to_hook_names` against the weights that eager transformers returns for each block.

Models, padding and sizes are drawn from a seed. Rerun a case with ``check(kind, seed)``.
"""

from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.core.errors import BadValue

transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")

WORDS, IMAGE_TOKEN, PATCHES = 61, 60, 4  # PATCHES: of an image, after pooling


@dataclass
class Model:
    """A model on clearhead, its inputs, and the weights of eager attention by hook name."""

    model: nn.Module
    inputs: dict[str, torch.Tensor]
    right: dict[str, torch.Tensor]
    real: dict[str, torch.Tensor]  # which queries are tokens, (B, T), by the first part of names
    projections: dict[str, str] = field(default_factory=dict)  # of queries, by hook name


def mask_of(draw: Random, B: int, T: int) -> torch.Tensor:
    """Padding on the left or the right, perhaps in each text."""
    side, least = draw.choice(["left", "right", "none"]), draw.choice([0, 1])
    mask = torch.ones(B, T, dtype=torch.long)
    for row in mask:
        lacks = draw.randint(least, 3) if side != "none" else 0
        row[: lacks if side == "left" else 0] = 0
        row[T - lacks if side == "right" else T :] = 0
    return mask


def build(name: str, config, implementation: str) -> nn.Module:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind._from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0.0, 0.3)
    return model


def drawn(kind: str, seed: int) -> Model:
    draw = Random(seed)
    torch.manual_seed(seed)
    B, T, H, G, D = draw.randint(1, 3), draw.randint(5, 9), 4, draw.choice([1, 2, 4]), 6
    n = draw.randint(1, 4)
    text = dict(
        vocab_size=WORDS, hidden_size=H * D, intermediate_size=17, num_hidden_layers=n,
        num_attention_heads=H, num_key_value_heads=G, head_dim=D, pad_token_id=0,
    )  # fmt: skip
    inputs = {
        "input_ids": torch.randint(3, IMAGE_TOKEN, (B, T)),
        "attention_mask": mask_of(draw, B, T),
    }
    blocks, projections = list(range(n)), {}
    if kind == "llama":
        name, config = "LlamaForCausalLM", transformers.LlamaConfig(**text)
    elif kind == "lfm2":
        types = [draw.choice(["conv", "full_attention"]) for _ in range(n)] + ["full_attention"]
        text["num_hidden_layers"] = n + 1
        name, config = "Lfm2ForCausalLM", transformers.Lfm2Config(**text, layer_types=types)
        blocks = [i for i, x in enumerate(types) if x == "full_attention"]
    elif kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_embd=H * D, n_layer=n, n_head=H, n_positions=32
        )
        name = "GPT2LMHeadModel"
        projections = {f"blocks.{i}.attn": f"transformer.h.{i}.attn.c_attn" for i in blocks}
    elif kind == "t5":
        config = transformers.T5Config(
            vocab_size=WORDS, d_model=H * D, d_kv=D, d_ff=17, num_layers=n, num_heads=H,
            num_decoder_layers=draw.randint(1, 3), decoder_start_token_id=0, pad_token_id=0,
        )  # fmt: skip
        name, stacks = "T5ForConditionalGeneration", "{0}.block.{1}.layer.{2}.q"
        layers = (
            ("encoder", "0.SelfAttention"),
            ("decoder", "0.SelfAttention"),
            ("decoder", "1.EncDecAttention"),
        )
    elif kind == "bart":
        config = transformers.BartConfig(
            vocab_size=WORDS, d_model=H * D, encoder_layers=n, decoder_layers=draw.randint(1, 3),
            encoder_attention_heads=H, decoder_attention_heads=H, encoder_ffn_dim=17,
            decoder_ffn_dim=17, max_position_embeddings=32, pad_token_id=0,
            decoder_start_token_id=2, forced_eos_token_id=None,
        )  # fmt: skip
        name, stacks = "BartForConditionalGeneration", "model.{0}.layers.{1}.{2}.q_proj"
        layers = ("encoder", "self_attn"), ("decoder", "self_attn"), ("decoder", "encoder_attn")
    else:
        vision = dict(
            hidden_size=16, intermediate_size=17, num_hidden_layers=draw.randint(1, 3),
            num_attention_heads=2, image_size=8, patch_size=2, vision_use_head=False,
        )  # fmt: skip
        config = transformers.Gemma3Config(
            text_config=dict(text, layer_types=["full_attention"] * n), vision_config=vision,
            mm_tokens_per_image=PATCHES, image_token_index=IMAGE_TOKEN,
            boi_token_index=1, eoi_token_index=2,
        )  # fmt: skip
        name = "Gemma3ForConditionalGeneration"
        images = torch.full((B, PATCHES), IMAGE_TOKEN)
        ids = torch.cat([inputs["input_ids"], images, inputs["input_ids"][:, :2]], 1)
        mask = torch.ones_like(ids)  # its text model is not passed any padding
        inputs = {"input_ids": ids, "pixel_values": torch.randn(B, 3, 8, 8)}
        inputs |= {"attention_mask": mask, "token_type_ids": (ids == IMAGE_TOKEN).long()}
    mask = inputs["attention_mask"]
    if kind in ("t5", "bart"):
        inputs["decoder_input_ids"] = torch.randint(3, WORDS, (B, 7))
    eager, model = build(name, config, "eager"), build(name, config, "clearhead")
    with torch.no_grad():
        out = eager(**inputs, output_attentions=True)
    if kind not in ("t5", "bart"):
        right = {f"blocks.{i}.attn": x for i, x in zip(blocks, out.attentions, strict=True)}
        return Model(model, inputs, right, {"blocks": mask != 0}, projections)
    right = {}
    named = "encoder_blocks.{}.attn", "decoder_blocks.{}.self_attn", "decoder_blocks.{}.cross_attn"
    weights = out.encoder_attentions, out.decoder_attentions, out.cross_attentions
    for site, several, (side, last) in zip(named, weights, layers, strict=True):
        for i, x in enumerate(several):
            right[site.format(i)] = x
            projections[site.format(i)] = stacks.format(side, i, last)
    real = {"encoder_blocks": mask != 0, "decoder_blocks": torch.ones(B, 7, dtype=torch.bool)}
    return Model(model, inputs, right, real, projections)


@torch.no_grad()
def check(kind: str, seed: int) -> None:
    m = drawn(kind, seed)
    projected = {}
    for name, linear in m.model.named_modules():
        linear.register_forward_hook(lambda _m, _a, out, name=name: projected.update({name: out}))
    # Rows count the tokens of the longest text, so a model of two texts has two recordings.
    named = {}
    for part, real in m.real.items():
        layers = {"encoder_blocks": ["*encoder.*"], "decoder_blocks": ["*decoder.*"]}.get(part)
        layers = ["*language_model.*"] if kind == "gemma3" else layers
        rows = range(int(real.sum(1).max()))
        with ch.watch(m.model, layers=layers, exact_rows=rows, outputs=True, inputs=True) as seen:
            m.model(**m.inputs)
        named |= seen.to_hook_names()
    hooks = {name.rpartition(".")[0] for name in named}
    assert hooks == {*m.right}, f"{kind} {seed}"
    for site, right in m.right.items():
        real = m.real[site.partition(".")[0]]
        pattern = named[f"{site}.hook_pattern"]
        assert pattern.shape == right.shape, f"{kind} {seed}"
        keep = real[:, None, :, None]
        torch.testing.assert_close(pattern, right * keep, rtol=1e-3, atol=1e-4)
        H = pattern.shape[1]
        rot = "rot_" if kind in ("llama", "lfm2", "gemma3") else ""
        q, k, v = (named[f"{site}.hook_{x}"] for x in (f"{rot}q", f"{rot}k", "v"))
        q, k, v = (x.transpose(1, 2).repeat_interleave(H // x.shape[2], 1) for x in (q, k, v))
        z = named[f"{site}.hook_z"].transpose(1, 2)
        torch.testing.assert_close((right @ v) * keep, z * keep, rtol=1e-3, atol=1e-4)
        if kind != "t5":  # it adds a bias
            scale = 256**-0.5 if kind == "gemma3" else q.shape[-1] ** -0.5
            scores = (q @ k.mT * scale).masked_fill(right == 0, -torch.inf).softmax(-1).nan_to_num()
            torch.testing.assert_close(scores * keep, right * keep, rtol=1e-3, atol=1e-4)
        if not rot:
            width = q.shape[1] * q.shape[3]
            straight = projected[m.projections[site]][..., :width].unflatten(-1, (H, -1))
            assert torch.equal(named[f"{site}.hook_q"], straight)


KINDS = ["llama", "lfm2", "gpt2", "t5", "bart", "gemma3"]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_those_of_the_block_in_their_name(kind):
    ch.hf.register()
    for seed in range(4):
        check(kind, seed)


@torch.no_grad()
def test_an_image_encoder_has_names_of_its_own():
    ch.hf.register()
    m = drawn("gemma3", 0)
    with ch.watch(m.model, outputs=True) as seen:
        m.model(**m.inputs)
    text, image = m.model.config.text_config, m.model.config.vision_config
    assert [*seen.to_hook_names()] == [
        *(f"vision_encoder.encoder_layers.{i}.attn.hook_z" for i in range(image.num_hidden_layers)),
        *(f"blocks.{i}.attn.hook_z" for i in range(text.num_hidden_layers)),
    ]


@torch.no_grad()
def test_names_do_not_depend_on_what_is_recorded():
    ch.hf.register()
    m = drawn("bart", 0)
    with ch.watch(m.model, layers=["*.decoder.layers.0.self_attn"], outputs=True) as seen:
        m.model(**m.inputs)
    assert [*seen.to_hook_names()] == ["decoder_blocks.0.self_attn.hook_z"]


@torch.no_grad()
def test_keys_of_a_cache_have_no_certain_name():
    ch.hf.register()
    m = drawn("llama", 0)
    with ch.watch(m.model, inputs=True) as seen:
        m.model.generate(m.inputs["input_ids"], max_new_tokens=2, do_sample=False)
    with pytest.raises(BadValue, match="names are uncertain"):
        seen.to_hook_names()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fresh_seeds(kind, fresh_seed):
    ch.hf.register()
    for seed in range(fresh_seed, fresh_seed + 40):
        check(kind, seed)

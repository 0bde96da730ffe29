"""`supports` tells beforehand what a model then does."""

import os

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.api.hooks import listening
from clearhead.errors import BadType, BadValue
from tests.hf.test_models import DECODERS, config

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")

SIZES = dict(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
WIDE = dict(**SIZES, intermediate_size=37)
# Models that compute attention themselves, and what they do with attn_implementation="clearhead".
ITSELF = {
    "MPNet": (WIDE, BadValue),
    "Bloom": (dict(vocab_size=97, hidden_size=32, n_layer=1, n_head=4), BadValue),
    "Mpt": (dict(vocab_size=97, d_model=32, n_layers=1, n_heads=4), BadValue),
    "CodeGen": (dict(vocab_size=97, n_embd=32, n_layer=1, n_head=4, rotary_dim=4), BadValue),
    "XGLM": (
        dict(vocab_size=97, d_model=32, num_layers=1, attention_heads=4, ffn_dim=37),
        BadValue,
    ),
    "Falcon": (SIZES, KeyError),
    "GPTJ": (dict(vocab_size=97, n_embd=32, n_layer=1, n_head=4, rotary_dim=4), KeyError),
    "GPTNeo": (
        dict(vocab_size=97, hidden_size=32, num_layers=1, num_heads=4)
        | dict(attention_types=[[["global"], 1]]),
        KeyError,
    ),
    "Git": (WIDE, KeyError),
}


def made(config, implementation):
    config._attn_implementation = implementation
    return transformers.AutoModel.from_config(config).eval()


@pytest.mark.parametrize("kind", [*DECODERS, "bert", "t5", "bart", "whisper", "vit"])
def test_a_model_that_is_supported_calls_clearhead(kind):
    found = ch.hf.supports(config(kind))
    assert found and found.supported and str(found).startswith("yes: ")
    model = transformers.AutoModel.from_config(config(kind))
    assert ch.hf.supports(model) == found
    assert type(model).__name__ in found.reason and "Attention" in found.reason


@pytest.mark.parametrize("kind", ITSELF)
def test_a_model_that_is_not_supported_raises_or_never_calls(kind):
    settings, raises = ITSELF[kind]
    config = getattr(transformers, f"{kind}Config")(**settings)
    found = ch.hf.supports(config)
    assert not found and str(found).startswith(f"no: {kind}Model ") and "Attention" in found.reason
    assert config._attn_implementation is None  # as it was
    with pytest.raises(raises, match="clearhead" if raises is KeyError else f"^{kind} computes"):
        made(config, "clearhead")(torch.arange(6).unsqueeze(0))


def test_blip_and_sam_are_not_supported():
    """Of several parts: one computes its attention itself, or takes it from a table."""
    found = ch.hf.supports(transformers.BlipConfig())
    assert str(found).startswith("no: BlipModel computes its attention itself (BlipAttention")
    found = ch.hf.supports(transformers.SamConfig())
    assert str(found) == (
        "no: SamModel takes its attention (SamVisionAttention) from a table of its own, where "
        "transformers raises KeyError for 'clearhead'. Load it with attn_implementation='sdpa' and "
        "run it inside of compat.patched()."
    )


def test_the_way_out_for_one_that_calls_torchs_function():
    config = transformers.FalconConfig(**SIZES)
    assert "run it inside of compat.patched()" in ch.hf.supports(config).reason
    model, ids = made(config, "sdpa"), torch.arange(6).unsqueeze(0)
    with torch.no_grad():
        want = model(ids).last_hidden_state
        with ch.compat.patched(), ch.watch(model) as seen:
            got = model(ids).last_hidden_state
    assert len(seen) == 1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_model_that_is_supported_in_part_names_the_rest():
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=37,
        image_size=8, patch_size=4,
    )  # fmt: skip
    found, calls = ch.hf.supports(vision), []
    assert found.reason == (
        "SiglipVisionModel hands over its attention in SiglipAttention; not in "
        "MultiheadAttention, where nothing is watched."
    )
    with torch.no_grad(), listening(lambda *_: calls.append(1)):
        made(vision, "clearhead")(torch.randn(1, 3, 8, 8))
    assert found and len(calls) == 1


def test_models_without_attention_and_configurations_that_make_none():
    mamba = transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1)
    assert str(ch.hf.supports(mamba)) == (
        "no: no module of MambaModel calls transformers' attention interface."
    )
    wrong = transformers.BertConfig(**WIDE)
    wrong.num_attention_heads = 5
    assert "no model can be made of this BertConfig alone" in str(ch.hf.supports(wrong))
    assert not ch.hf.supports(nn.Linear(2, 2))


def test_the_class_that_a_configuration_names_is_the_one_that_is_made():
    config = transformers.BertConfig(**WIDE, architectures=["BertForMaskedLM"])
    assert "BertForMaskedLM" in ch.hf.supports(config).reason


def test_no_random_number_is_drawn():
    state = torch.get_rng_state()
    ch.hf.supports(config("llama"))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_no_model():
    with pytest.raises(BadType) as error:
        ch.hf.supports("bert-base-uncased")
    assert str(error.value) == (
        "supports got a str.\n  Rule: it is told by a model of transformers, or by its "
        "configuration.\n  Way out: pass the model, or "
        "transformers.AutoConfig.from_pretrained(folder)."
    )

"""`supports` tells beforehand what a model then does."""

import os

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.core.errors import BadType, BadValue
from clearhead.core.functional.ambient import listening
from tests.hf.test_models import DECODERS, config
from tests.hf.tiny_models import build, tiny_model

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")

ALL_ATTENTION_FUNCTIONS = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
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
        "no: SamModel reads its attention (SamVisionAttention) from its own table, where "
        "transformers raises KeyError for 'clearhead'. Load it with attn_implementation='sdpa' and "
        "run it inside compat.patched()."
    )


def test_the_hint_for_one_that_calls_torchs_function():
    config = transformers.FalconConfig(**SIZES)
    assert "run it inside compat.patched()" in ch.hf.supports(config).reason
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
        "SiglipVisionModel uses the attention interface in SiglipAttention; not in "
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
    assert str(ch.hf.supports(nn.Linear(2, 2))).startswith("no: no module of Linear calls")


def test_where_it_cannot_tell():
    """A configuration that makes no model, and code that does not show what it calls."""
    wrong = transformers.BertConfig(**WIDE)
    wrong.num_attention_heads = 5
    found = ch.hf.supports(wrong)
    assert found.supported is None and not found
    assert str(found).startswith(
        "cannot tell: no model can be built from this BertConfig alone: Val"
    )

    class Wrapper(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part

    found = ch.hf.supports(Wrapper(nn.Linear(2, 2)))
    assert str(found).startswith("cannot tell: no module of Wrapper calls") and "Wrapper" in str(
        found
    )
    bert = transformers.AutoModel.from_config(transformers.BertConfig(**WIDE))
    assert str(ch.hf.supports(Wrapper(bert))).startswith(
        "yes: Wrapper uses the attention interface"
    )
    assert str(ch.hf.supports(torch.compile(bert, backend="eager"))).startswith(
        "no: attention in a compiled graph"
    )


ANSWERS = {
    "deepseek_v32": "no: DeepseekV32Attention passes indices to its attention function",
    "dots3_note_text": "no: Dots3NoteTextAttention passes indices to its attention function",
    "inkling2_text": "no: Inkling2SlidingAttention passes sinks to its attention function",
    "deepseek_v4": "no: DeepseekV4Model needs an additive mask",
    "nllb-moe": "no: NllbMoeEncoder needs an additive mask",
    "modernbert": "yes: ModernBertModel uses the attention interface",  # passes a switch
    "gpt_oss": "yes: GptOssModel uses the attention interface",  # passes sinks for each head
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_what_a_model_passes_is_known_before_it_runs(kind):
    config, inputs, want = tiny_model(kind)
    found = ch.hf.supports(config)
    assert str(found).startswith(ANSWERS[kind])
    model = build(config, "clearhead")
    assert str(ch.hf.supports(model)).startswith(ANSWERS[kind])
    assert str(ch.hf.supports(build(config, "eager"))).startswith(ANSWERS[kind])
    with torch.no_grad():
        if found:
            got = model(**inputs).last_hidden_state
            torch.testing.assert_close(got, want.last_hidden_state, rtol=1e-4, atol=1e-4)
        else:
            with pytest.raises(BadValue):
                model(**inputs)


class Attention(nn.Module):
    """Written by a user: what it passes depends on its settings, or on its arguments."""

    def __init__(self, sparse, config):
        super().__init__()
        self.config, self.indexer = config, nn.Linear(2, 2) if sparse else None

    def forward(self, q, indices):
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        chosen = None
        if self.indexer is not None:
            chosen = self.indexer(q)
        return attend(self, q, q, q, None, scaling=1.0, block_indices=chosen)


class Passes(Attention):
    def forward(self, q, indices):
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        return attend(self, q, q, q, None, indices=indices)


class Helped(Attention):
    """Its attention function is looked up by a function of this file."""

    def forward(self, q, indices):
        return helper(self, q)


class Hidden(Attention):
    def forward(self, q, indices):
        return self.indexer(ALL_ATTENTION_FUNCTIONS, q)


class Overridden(Attention):
    def forward(self, q, indices):
        return (q @ q.mT).softmax(-1) @ q


def helper(module, q):
    return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation](
        module, q, q, q, None
    )


@pytest.mark.parametrize(
    "kind, sparse, answer",
    [
        (Attention, False, "cannot tell: Attention passes block_indices to its attention function"),
        (Attention, True, "cannot tell: Attention passes block_indices to its attention function"),
        (Passes, False, "cannot tell: Passes passes indices to its attention function if it has"),
        (Helped, False, "yes: Helped uses the"),
        (Overridden, False, "cannot tell: no module of Overridden calls"),
        (Hidden, True, "cannot tell: the code of Hidden does not show how it calls"),
    ],
)
def test_an_attention_of_a_user(kind, sparse, answer):
    for implementation in ("eager", "clearhead"):
        config = transformers.BertConfig(attn_implementation=implementation)
        assert str(ch.hf.supports(kind(sparse, config))).startswith(answer)


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
        "supports got a str.\n  Rule: it checks a transformers model or its "
        "configuration.\n  Hint: pass the model, or "
        "transformers.AutoConfig.from_pretrained(folder)."
    )

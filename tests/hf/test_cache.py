"""`hf.cache`: the keys, tokens and logits of transformers' default cache, without its copies."""

import copy

import pytest
import torch

from clearhead import effects, hf
from clearhead.core.errors import BadType, BadValue
from clearhead.core.problem.blocks import BlockTensor

from .test_models import build, config, ids
from .tiny_models import drawn_model

KINDS = ["gpt2", "llama", "mistral", "gemma3"]  # all keys, grouped, windows, both in turn
AHEAD = 11


def generated(model, cache, tokens, **keywords):
    """Tokens and logits of every step. `cache` is None for transformers' default."""
    kept = {} if cache is None else {"past_key_values": cache}
    with torch.no_grad():
        out = model.generate(
            tokens, **kept, **keywords, max_new_tokens=12, min_new_tokens=12, do_sample=False,
            pad_token_id=0, eos_token_id=2, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


def same_as_default(model, tokens, **keywords):
    theirs, ours = (generated(model, x, tokens, **keywords) for x in (None, hf.cache(model)))
    assert ours[0].equal(theirs[0]) and ours[1].equal(theirs[1])


@pytest.mark.parametrize("implementation", ["clearhead", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_generation_with_padding_has_the_bits_of_the_default_cache(kind, implementation):
    model = build(kind, "AutoModelForCausalLM")
    model.set_attn_implementation(implementation)
    tokens = ids(T=7)
    real = torch.ones_like(tokens)
    real[1, :3] = 0
    same_as_default(model, tokens, attention_mask=real)


@pytest.mark.parametrize("kind", KINDS)
def test_a_beam_search_orders_the_stored_tokens(kind):
    model = build(kind, "AutoModelForCausalLM")
    model.set_attn_implementation("clearhead")
    same_as_default(model, ids(T=7), num_beams=3, num_return_sequences=2)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_the_decoder_of_an_encoder_and_a_decoder(kind):
    model = build(kind, "AutoModelForSeq2SeqLM")
    model.set_attn_implementation("clearhead")
    same_as_default(model, ids(), num_beams=2)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_an_assistant_that_is_often_wrong(kind):
    from transformers.cache_utils import DynamicSlidingWindowLayer

    if kind == "gemma3" and not hasattr(DynamicSlidingWindowLayer, "activate_past_recording"):
        pytest.skip("this transformers cannot remove tokens behind a full window")
    model, other = (build(kind, "AutoModelForCausalLM") for _ in range(2))
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    same_as_default(model, ids(B=1, T=7), assistant_model=other)


def keys_and_values(cache):
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_every_way_to_change_a_cache(kind, mode):
    """The same calls on both caches: everything stored and everything returned stays equal."""
    import transformers

    model, tokens = build(kind, "AutoModelForCausalLM"), ids(B=2, T=17)
    model.set_attn_implementation("clearhead")
    caches = [hf.cache(model), transformers.DynamicCache(config=model.config)]

    def step(start, stop):
        logits = [model(tokens[:, start:stop], past_key_values=x).logits for x in caches]
        assert logits[0].equal(logits[1])
        equal()

    def equal():
        ours, theirs = map(keys_and_values, caches)
        assert all(x.equal(y) for x, y in zip(ours, theirs, strict=True))
        assert caches[0].get_seq_length() == caches[1].get_seq_length()

    with mode():
        step(0, 4)
        for cache in caches:
            cache.crop(-2)  # before the window of gemma3 is full
        equal()
        step(2, 3)
        caches = [copy.deepcopy(x) if mode is torch.no_grad else x for x in caches]
        step(3, 9)
        for change in (
            lambda x: x.reorder_cache(torch.tensor([1, 0])),
            lambda x: x.batch_repeat_interleave(2),
            lambda x: x.batch_select_indices(torch.tensor([3, 0])),
        ):
            for cache in caches:
                change(cache)
            equal()
        step(9, 10)
        step(10, 17)
        for cache in caches:
            cache.reset()
        assert caches[0].get_seq_length() == 0
        assert model(tokens, past_key_values=caches[0]).logits.equal(model(tokens).logits)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_stored_tokens_are_copied_only_when_the_memory_is_full(kind, monkeypatch):
    monkeypatch.setattr("clearhead.hf.cache_layers.TOKENS_AHEAD", AHEAD)
    model = build(kind, "AutoModelForCausalLM")
    cache = hf.cache(model)
    with torch.no_grad():
        model(ids(B=1, T=7), past_key_values=cache)
        layer = cache.layers[0]
        first, stored = layer.keys, layer.keys.clone()
        memory = first.untyped_storage().data_ptr()
        copies = []
        for t in range(AHEAD + 1):
            model(torch.tensor([[t]]), past_key_values=cache)
            copies.append(layer.keys.untyped_storage().data_ptr() != memory)
    assert copies == [False] * AHEAD + [True]
    assert first.equal(stored)
    tokens = 4 if kind == "mistral" else 7 + AHEAD + 1
    room = layer.keys.untyped_storage().nbytes() // (2 * 8 * 4)
    assert layer.keys.shape == (1, 2, tokens, 8) and room <= tokens + 1 + AHEAD


def test_a_copy_and_its_original_do_not_overwrite_each_other():
    model, tokens = build("llama", "AutoModelForCausalLM"), ids(B=1, T=9)
    with torch.no_grad():
        one = hf.cache(model)
        model(tokens[:, :6], past_key_values=one)
        two = copy.copy(one)
        two.layers = [copy.copy(layer) for layer in one.layers]
        stored = [x.clone() for x in keys_and_values(two)]
        one.crop(-2)
        model(tokens[:, :4], past_key_values=one)
        assert all(x.equal(y) for x, y in zip(keys_and_values(two), stored, strict=True))
        logits = model(tokens[:, 6:], past_key_values=two).logits
    torch.testing.assert_close(logits, model(tokens).logits[:, 6:], rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_tokens_of_earlier_calls():
    model, tokens = build("llama", "AutoModelForCausalLM"), ids(B=1, T=9)
    model(tokens).logits[:, -1].square().sum().backward()
    weight = model.model.layers[0].self_attn.k_proj.weight
    expected, weight.grad = weight.grad, None
    cache = hf.cache(model)
    for part in (tokens[:, :5], tokens[:, 5:8], tokens[:, 8:]):
        logits = model(part, past_key_values=cache).logits
    logits[:, -1].square().sum().backward()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-4, atol=1e-3)


def test_inference_mode_may_begin_and_end_between_steps():
    model, tokens = build("llama", "AutoModelForCausalLM"), ids(B=1, T=9)
    cache = hf.cache(model)
    with torch.inference_mode():
        model(tokens[:, :5], past_key_values=cache)
    with torch.no_grad():
        model(tokens[:, 5:7], past_key_values=cache)
    with torch.inference_mode():
        logits = model(tokens[:, 7:], past_key_values=cache).logits
    torch.testing.assert_close(logits, model(tokens).logits[:, 7:], rtol=1e-4, atol=1e-4)


def test_effects_run_on_copies_of_a_filled_cache():
    model, tokens = build("llama", "AutoModelForCausalLM"), ids(B=1, T=9)
    model.set_attn_implementation("clearhead")

    def of(cache):
        with torch.no_grad():
            model(tokens[:, :5], past_key_values=cache)
        inputs = {"input_ids": tokens[:, 5:], "past_key_values": cache}
        measured = effects(model, inputs, metric=lambda out: out.logits[:, -1, 7])
        assert cache.get_seq_length() == 5
        return torch.tensor([effect.exact for effect in measured])

    import transformers

    ours, theirs = of(hf.cache(model)), of(transformers.DynamicCache(config=model.config))
    torch.testing.assert_close(ours, theirs)


def test_another_batch_is_refused_and_never_broadcast():
    model = build("llama", "AutoModelForCausalLM")
    cache = hf.cache(model)
    with torch.no_grad():
        model(ids(B=2, T=5), past_key_values=cache)
        with pytest.raises(BadValue, match=r"keys of shape \(1, 2, 1, 8\).*stores \(2, 2, 5, 8\)"):
            model(ids(B=1, T=1), past_key_values=cache)


def test_a_wrapped_model_has_the_cache_of_the_model_inside():
    class Wrapped(torch.nn.Module):  # as PEFT wraps a model
        def __init__(self):
            super().__init__()
            self.inside = build("gemma3", "AutoModelForCausalLM")

        def get_base_model(self):
            return self.inside

    model = Wrapped()
    kinds = [[*map(type, hf.cache(x).layers)] for x in (model, model.inside)]
    assert kinds[0] == kinds[1]


def test_models_that_it_cannot_serve():
    import transformers as t

    with pytest.raises(BadType, match="cache got a LlamaConfig"):
        hf.cache(t.LlamaConfig())
    with pytest.raises(BadValue, match="ViTModel, which does not use transformers' default cache"):
        hf.cache(build("vit", "AutoModel"))
    with torch.device("meta"):
        hybrid = t.FalconH1ForCausalLM(
            t.FalconH1Config(num_hidden_layers=1, hidden_size=32, vocab_size=9)
        )
    with pytest.raises(BadValue, match="default cache has a LinearAttentionAndFullAttentionLayer"):
        hf.cache(hybrid)


def test_a_cache_of_a_model_with_fewer_layers():
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 32}
    small, large = (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=n, **sizes))
        for n in (1, 3)
    )
    with pytest.raises(BadValue, match="of a LlamaForCausalLM with 1 layer, and has more"):
        large(torch.arange(9)[None], past_key_values=hf.cache(small))


def with_heads_of_32(kind):
    wide = config(kind)
    wide.head_dim = 32
    return drawn_model(wide)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_a_cache_in_blocks_generates_with_any_attention(kind, dtype):
    model, tokens = with_heads_of_32(kind), ids(T=7)
    for keywords in ({}, {"num_beams": 3}):
        logits = {}
        for name in ("clearhead", "sdpa", "eager"):
            model.set_attn_implementation(name)
            cache = hf.cache(model, dtype)
            logits[name] = generated(model, cache, tokens, **keywords)[1]
            stored = cache.layers[0].keys
            assert isinstance(stored, BlockTensor) and stored.stored.dtype is torch.uint8
        for name in ("sdpa", "eager"):
            torch.testing.assert_close(logits[name], logits["clearhead"], atol=1e-3, rtol=1e-3)


def test_a_cache_in_blocks_is_cut_copied_and_selected():
    model = with_heads_of_32("llama")
    tokens, cache = ids(T=9), hf.cache(model, "q8_0")
    with torch.no_grad():
        model(tokens[:, :6], past_key_values=cache)
        right = model(tokens[:, 6:7], past_key_values=copy.deepcopy(cache)).logits
        model(tokens[:, 6:], past_key_values=cache)
        cache.crop(-3)
        assert torch.equal(model(tokens[:, 6:7], past_key_values=cache).logits, right)
        cache.crop(-1)
        cache.batch_repeat_interleave(2)
        twice = model(tokens[:, 6:7].repeat_interleave(2, 0), past_key_values=cache).logits
        torch.testing.assert_close(twice[::2], right)
        assert isinstance(cache.layers[0].keys, BlockTensor)
    with pytest.raises(BadValue, match="formats of blocks"):
        hf.cache(model, "q3")

"""`compare_caches`: its local numbers against `divergence` of recorded calls, its losses against
the same model of transformers that rounds keys and values in its own eager attention."""

import copy

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.core.errors import BadType, BadValue

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.outside

WINDOW = ch.prefix(2) | ch.window(before=3, after=0)


@pytest.fixture(scope="module")
def model():
    ch.hf.register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=59, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
        attn_implementation="clearhead", pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def inputs():
    """Two texts, of 9 and 13 tokens, padded on the left."""
    ids = torch.randint(1, 59, (2, 13), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(ids)
    real[0, :4] = 0
    return {"input_ids": ids * real, "attention_mask": real}


@pytest.fixture(scope="module")
def damage(model, inputs):
    caches = {"q8_0": "q8_0", "4 bits of layer 1": ch.edits.cache(keys="q4_0", layers=[1]),
              "window": ch.edits.keep_only(WINDOW)}  # fmt: skip
    return ch.compare_caches(model, inputs, caches)


def of(damage, cache):
    return [head for head in damage.heads if head.cache == cache]


def eager_loss(model, inputs, read):
    """The mean next-token loss of the model with `read` keys and values, by its own attention."""
    from transformers.models.llama import modeling_llama

    def rounded(module, query, key, value, mask, **rest):
        return modeling_llama.eager_attention_forward(
            module, query, read(key), read(value), mask, **rest
        )

    return loss_with(model, inputs, rounded)


def loss_with(model, inputs, rounded):
    """The mean next-token loss of the model with this function as attention."""
    eager = transformers.LlamaForCausalLM(copy.deepcopy(model.config)).eval()
    eager.load_state_dict(model.state_dict())
    transformers.AttentionInterface.register("rounded", rounded)
    transformers.AttentionMaskInterface.register("rounded", transformers.masking_utils.eager_mask)
    eager.set_attn_implementation("rounded")
    ids, real = inputs["input_ids"], inputs["attention_mask"].bool()
    with torch.no_grad():
        logits = eager(**inputs).logits
    pairs = real[:, 1:] & real[:, :-1]
    return float(F.cross_entropy(logits[:, :-1][pairs], ids[:, 1:][pairs]))


def test_the_loss_is_that_of_a_model_that_reads_rounded_keys_and_values(model, inputs, damage):
    def read(x):
        parts = x.reshape(*x.shape[:-1], -1, 32)
        step = parts.abs().amax(-1, keepdim=True) / 127
        return ((parts / step).nan_to_num(0.0).round() * step.half()).reshape(x.shape)

    plain, rounded = (eager_loss(model, inputs, f) for f in (lambda x: x, read))
    assert damage.effects.baseline == pytest.approx(plain, rel=1e-5)
    change = {e.name: e.exact for e in damage.effects}["q8_0"]
    assert change == pytest.approx(rounded - plain, rel=0.02) and abs(change) > 1e-5


def test_the_loss_with_kivi_is_that_of_a_cache_that_grows(model, inputs, residual=3):
    """Query by query, in an attention function of transformers."""
    from tests.models.inspect.test_kivi import rounded as of_kivi

    def attend(module, query, key, value, mask, scaling, **rest):
        outs = []
        for i in range(query.shape[2]):
            keys, values = key[:, :, : i + 1].double(), value[:, :, : i + 1].double()
            n, m = (i + 1) // residual * residual, max(i + 1 - residual, 0)
            keys[:, :, :n] = of_kivi(key, 3, 2)[:, :, :n]
            values[:, :, :m] = of_kivi(value, 3, 3)[:, :, :m]
            keys, values = (x.repeat_interleave(2, 1) for x in (keys, values))
            weights = (query[:, :, i : i + 1].double() @ keys.mT * scaling).softmax(-1)
            outs.append((weights @ values).to(query.dtype))
        return torch.cat(outs, 2).transpose(1, 2).contiguous(), None

    text = {name: x[1:] for name, x in inputs.items()}  # without padding
    kivi = ch.edits.cache(keys="kivi2", values="kivi2", residual=residual)
    damage = ch.compare_caches(model, text, {"kivi": kivi})
    change = loss_with(model, text, attend) - damage.effects.baseline
    (effect,) = damage.effects
    assert effect.exact == pytest.approx(change, rel=1e-3) and abs(change) > 1e-3
    assert damage.bits == {"kivi": 3} and damage.all_kept
    at_once = ch.edits.cache(keys="kivi2", values="kivi2")
    worse = ch.compare_caches(model, text, {"kivi": at_once}, metric=None)
    assert damage.grid("kivi").mean() < worse.grid("kivi").mean()


def test_numbers_of_a_head_are_means_over_the_real_queries(model, inputs, damage):
    with torch.no_grad(), ch.watch(model, inputs=True) as plain:
        model(**inputs)
    with torch.no_grad(), ch.intervene(model, [ch.edits.cache(keys="q8_0", values="q8_0")]):
        with ch.watch(model, inputs=True) as rounded:
            model(**inputs)
    first = next(x for x in of(damage, "q8_0") if (x.layer, x.head) == (0, 3))
    kl = []
    for text, start in ((0, 4), (1, 0)):
        q, k, v = (getattr(plain[0], x)[text, :, start:] for x in ("query", "key", "value"))
        k2, v2 = (getattr(rounded[0], x)[text, :, start:] for x in ("key", "value"))
        kl.append(ch.divergence(q, k, v, k2, v2, mask=ch.causal).kl[3])
    assert first.kl == pytest.approx(float(torch.cat(kl).mean()), rel=1e-4)
    assert first.key_head == 1 and first.mass == pytest.approx(1.0) and first.lost == 0


def test_layers_have_exact_inputs(damage):
    """A cache of layer 1 alone has the numbers of a cache of both, and none of layer 0."""
    assert {x.layer for x in of(damage, "4 bits of layer 1")} == {1}
    assert len(of(damage, "q8_0")) == 8


def test_the_grid_has_layers_by_heads(damage):
    grid = damage.grid("4 bits of layer 1")
    assert grid.shape == (2, 4) and bool(grid[0].isnan().all())
    assert grid[1].tolist() == [x.kl for x in of(damage, "4 bits of layer 1")]
    assert float(damage.grid("window", "mass").max()) < 1


def test_a_table_with_dropped_keys_names_the_direction_that_is_finite(model, inputs, damage):
    assert "KL(w' || w)" in str(damage) and "inf" not in str(damage)
    assert "loss is" in str(damage) and "8.5" in str(damage)
    rounded = ch.compare_caches(model, inputs, "q8_0", metric=None)
    assert rounded.effects is None and "KL(w || w')" in str(rounded)
    assert of(rounded, "q8_0") == of(damage, "q8_0")


def test_a_saved_result_is_loaded(damage, tmp_path):
    assert ch.load(damage.save(tmp_path / "damage.safetensors")) == damage
    assert len(damage.to_pandas()) == len(damage.heads)


@pytest.mark.parametrize("caches, error, part", [
    (["q8"], BadValue, "did you mean 'q8_0'?"),
    ([], BadValue, "compare_caches got 0 edits"),
    ([ch.edits.ablate()], BadType, "compare_caches got 'ablate()': ablate()"),
    ({"a": [ch.edits.cache(keys="kivi2", residual=4), ch.edits.cache(values="kivi2")]}, BadValue,
     "has 2 edits"),
    ({"a": 3}, BadType, "'a': 3"),
    ({"a": []}, BadType, "'a': []"),
    ([ch.edits.cache(keys=lambda x: x), ch.edits.cache(keys=lambda x: 2 * x)], BadValue,
     "2 edits with 1 different names"),
    ({"a": ch.edits.cache(keys="bf16", layers=[2])}, BadValue, "the layers are 0 to 1"),
    ({"a": ch.edits.cache(keys="bf16", heads=[2])}, BadValue, "key heads from 0 to 1"),
])  # fmt: skip
def test_errors(model, inputs, caches, error, part):
    with pytest.raises(error) as raised:
        ch.compare_caches(model, inputs, caches)
    assert part in str(raised.value)


def test_a_model_that_draws_random_numbers_is_refused(model, inputs):
    model.config.attention_dropout, before = 0.5, model.config.attention_dropout
    try:
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        with pytest.raises(BadValue, match="random numbers"):
            ch.compare_caches(model.train(), inputs, "q8_0", metric=None)
    finally:
        model.config.attention_dropout = before
        for layer in model.eval().model.layers:
            layer.self_attn.attention_dropout = 0.0


def test_unknown_names(damage):
    for names in (("q4", "kl"), ("q8_0", "entropy")):
        with pytest.raises(BadValue, match="q8_0, 4 bits of layer 1, window, and the measures kl"):
            damage.grid(*names)

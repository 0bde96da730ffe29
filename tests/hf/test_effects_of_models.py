"""Effects on models of transformers as people use them: their own loss, padding, caches.

Held against the same weights under transformers' eager attention, with the output of one head set
to 0 by a hook where the layer projects it.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.core.errors import BadType, BadValue

transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, initializer_range=0.3,
)  # fmt: skip
GROUPED = dict(**SIZES, num_key_value_heads=2)
LOSS = "loss is one number for all rows"


def build(kind, **more):
    """The model under clearhead and under eager, and the modules that project its heads' outputs,
    in the order of the attention calls."""
    t = transformers
    ch.hf.register()
    classes = {
        "llama": (t.LlamaForCausalLM, t.LlamaConfig, GROUPED, "*.self_attn.o_proj"),
        "mistral": (t.MistralForCausalLM, t.MistralConfig, {**GROUPED, "sliding_window": 4},
                    "*.self_attn.o_proj"),
        "mixtral": (t.MixtralForCausalLM, t.MixtralConfig,
                    {**GROUPED, "num_local_experts": 4, "output_router_logits": True},
                    "*.self_attn.o_proj"),
        "gpt2": (t.GPT2LMHeadModel, t.GPT2Config,
                 dict(vocab_size=50, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3),
                 "*.attn.c_proj"),
        "opt": (t.OPTForCausalLM, t.OPTConfig,
                dict(vocab_size=50, hidden_size=32, ffn_dim=32, num_hidden_layers=2, init_std=0.3,
                     num_attention_heads=4, word_embed_proj_dim=32, max_position_embeddings=64),
                "*.self_attn.out_proj"),
        "bert": (t.BertForMaskedLM, t.BertConfig, SIZES, "*.attention.output.dense"),
        "sentence": (t.BertForSequenceClassification, t.BertConfig, {**SIZES, "num_labels": 3},
                     "*.attention.output.dense"),
        "span": (t.BertForQuestionAnswering, t.BertConfig, SIZES, "*.attention.output.dense"),
        "vit": (t.ViTForImageClassification, t.ViTConfig,
                dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_labels=5,
                     intermediate_size=32, image_size=8, patch_size=4, initializer_range=0.3),
                "*.attention.o_proj"),
        "swin": (t.SwinForImageClassification, t.SwinConfig,
                 dict(image_size=16, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 2],
                      window_size=4, num_labels=5, initializer_range=0.3), ""),
        "t5": (t.T5ForConditionalGeneration, t.T5Config,
               dict(vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4,
                    decoder_start_token_id=0, initializer_factor=3.0), "*Attention.o"),
        "bart": (t.BartForConditionalGeneration, t.BartConfig,
                 dict(vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, init_std=0.3,
                      encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32,
                      decoder_ffn_dim=32, max_position_embeddings=64), "*attn.out_proj"),
    }  # fmt: skip
    model, config, sizes, pattern = classes[kind]
    torch.manual_seed(1)
    ours = model._from_config(config(**sizes, **more), attn_implementation="clearhead").eval()
    eager = copy.deepcopy(ours)
    eager.set_attn_implementation("eager")
    return ours, eager, pattern


def value(eager, inputs, metric, module=None, head=0):
    """The metric of the eager model without a head: its part of what `module` projects is 0."""
    hooks = []
    if module is not None:
        width = next(p for p in module.parameters() if p.dim() == 2)
        size = getattr(module, "in_features", width.shape[0]) // eager_heads(eager)

        def silence(_, args):
            x = args[0].clone()
            x[..., head * size : (head + 1) * size] = 0
            return (x, *args[1:])

        hooks.append(module.register_forward_pre_hook(silence))
    try:
        with torch.no_grad():
            return float(metric(eager(**copy.deepcopy(inputs))))
    finally:
        for hook in hooks:
            hook.remove()


def eager_heads(model):
    config = model.config
    return getattr(config, "num_attention_heads", None) or config.num_heads


def check(kind, inputs, metric="loss", warns=(), right=lambda out: out.loss, **more):
    """Effects, baseline and warnings of a model, against eager."""
    ours, eager, pattern = build(kind, **more)
    before = copy.deepcopy(inputs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = ch.effects(ours, inputs, metric)
    said = [str(w.message) for w in caught]
    assert len(said) == len(warns), said
    assert all(any(part in text for text in said) for part in warns), said
    for name, x in before.items():
        if isinstance(x, torch.Tensor):
            assert torch.equal(inputs[name], x)
    right = metric if callable(metric) else right
    with torch.no_grad():
        assert found.baseline == pytest.approx(
            float(right(ours(**copy.deepcopy(inputs)))), abs=1e-6
        )
    plain = value(eager, inputs, right)
    assert found.baseline == pytest.approx(plain, abs=1e-4)
    names = dict.fromkeys(call_names(ours, inputs))
    modules = [projection(eager, name, pattern) for name in names]
    assert len(found) == len(modules) * eager_heads(eager)
    largest = 0.0
    for e in found:
        change = value(eager, inputs, right, modules[e.layer], e.head) - plain
        assert e.exact == pytest.approx(change, abs=2e-4), e.name
        largest = max(largest, abs(change))
    assert largest > 0.01
    return found


def call_names(ours, inputs):
    with torch.no_grad(), ch.watch(ours, stats=[]) as seen:
        ours(**copy.deepcopy(inputs))
    return [call.module for call in seen]


def projection(eager, name, pattern):
    """The module that projects what the attention module `name` computes."""
    last = pattern.rpartition(".")[2]
    own = eager.get_submodule(name)
    if hasattr(own, last):
        return getattr(own, last)
    return eager.get_submodule(name.rpartition(".")[0]).output.dense


def ids(B=2, T=7):
    return torch.randint(5, 50, (B, T), generator=torch.Generator().manual_seed(3))


def padded(side, B=2, T=7):
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, :3] = 0
    return mask if side == "left" else mask.flip(1)


def labels():
    answer = ids()
    answer[:, :4] = -100
    return answer


def masked_word():
    hidden = torch.full_like(ids(), -100)
    hidden[:, 3] = ids()[:, 3]
    return hidden


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        ("llama", {"input_ids": ids(), "labels": labels()}),
        ("llama", {"input_ids": ids(), "labels": labels(), "attention_mask": padded("right")}),
        ("mixtral", {"input_ids": ids(), "labels": labels()}),
        ("bert", {"input_ids": ids(), "labels": masked_word()}),
        ("sentence", {"input_ids": ids(), "labels": torch.tensor([0, 2])}),
        ("span", {"input_ids": ids(), "start_positions": torch.tensor([1, 2]),
                  "end_positions": torch.tensor([3, 6])}),
        ("t5", {"input_ids": ids(), "labels": ids(T=5)}),
        ("t5", {"input_ids": ids(), "labels": ids(), "attention_mask": padded("right")}),
        ("bart", {"input_ids": ids(), "labels": ids(T=5)}),
        ("vit", {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([1, 4])}),
    ],
)  # fmt: skip
def test_the_loss_of_labels_is_the_models_own(kind, inputs):
    found = check(kind, inputs, warns=[LOSS])
    assert found.metric == "the model's loss"


def test_labels_of_a_batch_encoding_and_of_a_model_that_returns_tuples():
    inputs = transformers.BatchEncoding({"input_ids": ids(), "labels": labels()})
    found = check("llama", inputs, warns=[LOSS])
    given = {**inputs, "return_dict": False}
    same = check("llama", given, warns=["0 is one number"], right=lambda out: out[0])
    assert [e.exact for e in same] == pytest.approx([e.exact for e in found], abs=1e-6)


def next_token(inputs):
    """The mean loss of the next token where it and the one before are real, text by text."""
    tokens, real = inputs["input_ids"], inputs.get("attention_mask")
    real = torch.ones_like(tokens) if real is None else real[:, -tokens.shape[1] :]

    def loss(out):
        losses = [
            F.cross_entropy(x[:-1], y[1:], reduction="none")[(r[1:] * r[:-1]).bool()]
            for x, y, r in zip(out.logits, tokens, real, strict=True)
        ]
        return torch.cat(losses).mean()

    return loss


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "opt"])
@pytest.mark.parametrize("side", ["left", "right", None])
def test_without_labels_a_decoders_loss_is_of_the_next_token(kind, side):
    inputs = {"input_ids": ids()}
    if side is not None:
        inputs["attention_mask"] = padded(side)
    warns = ["counts positions from the first column"] if (kind, side) == ("gpt2", "left") else []
    check(kind, inputs, right=next_token(inputs), warns=warns)


def test_positions_under_left_padding_are_said_and_not_altered():
    """GPT-2 reads padded texts at other positions; with positions it reads each as it is alone."""
    inputs = {"input_ids": ids(), "attention_mask": padded("left")}
    with pytest.warns(UserWarning, match="from the first column") as caught:
        found = ch.effects(build("gpt2")[0], inputs, exact=False)
    assert "pass position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0)" in str(
        caught[0].message
    )
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    right = check("gpt2", {**inputs, "position_ids": positions}, right=next_token(inputs))
    assert abs(right.baseline - found.baseline) > 0.1
    alone = build("gpt2")[1]
    with torch.no_grad():
        parts = [
            F.cross_entropy(alone(x).logits[0, :-1], x[0, 1:], reduction="none")
            for x in (ids()[:1], ids()[1:, 3:])
        ]
    assert right.baseline == pytest.approx(float(torch.cat(parts).mean()), abs=1e-5)
    bert = {"input_ids": ids(), "labels": masked_word(), "attention_mask": padded("left")}
    check("bert", bert, warns=["from the first column", LOSS])
    encoder = {"input_ids": ids(), "labels": ids(T=5), "attention_mask": padded("left")}
    check("bart", encoder, warns=["pad on the right, or run each text alone", LOSS])


@pytest.mark.parametrize(
    ("kind", "inputs", "error", "says"),
    [
        ("bert", {"input_ids": ids()}, BadValue, "In the BertForMaskedLM a token looks at those"),
        ("t5", {"input_ids": ids(), "decoder_input_ids": ids()}, BadValue, "an encoder-dec"),
        ("bart", {"input_ids": ids()}, BadValue, "is an encoder-decoder"),
        ("t5", {"input_ids": ids()}, BadValue, "nothing for its decoder"),
        ("vit", {"pixel_values": torch.randn(2, 3, 8, 8)}, BadType, "have no ids"),
        ("llama", {"input_ids": ids(), "logits_to_keep": 1}, BadValue, r"logits \(2, 1, 50\)"),
        ("llama", {"input_ids": ids(), "attention_mask": torch.ones(2, 1, 7, 7).tril() > 0},
         BadValue, r"attention_mask of shape \(2, 1, 7, 7\)"),
    ],
)  # fmt: skip
def test_anything_else_lists_the_choices(kind, inputs, error, says):
    with pytest.raises(error, match=says) as caught:
        ch.effects(build(kind)[0], inputs)
    assert "pass" in caught.value.hint and caught.value.rule.endswith(".")


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_outputs_with_a_cache_are_cut(kind):
    """As a decoder gives one by default."""
    ours = build(kind)[0]
    runs = []
    ours.register_forward_pre_hook(
        lambda module, args, named: runs.append(len(named["input_ids"])), with_kwargs=True
    )

    def keys(out):
        return out.past_key_values.layers[1].keys.square().mean()

    found = ch.effects(ours, {"input_ids": ids()}, keys, estimate=False)
    assert runs == [2, 2 * 9]
    first = found.effects[:4]
    eager = build(kind)[1]
    module = eager.model.layers[0].self_attn.o_proj
    for e in first:
        right = value(eager, {"input_ids": ids()}, keys, module, e.head)
        assert e.exact + found.baseline == pytest.approx(right, rel=1e-4)
    assert all(abs(e.exact) < 1e-6 for e in found.effects[4:])


def dynamic(eager):
    return transformers.DynamicCache(config=eager.config)


def static(eager):
    return transformers.StaticCache(config=eager.config, max_cache_len=12)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("cache", [dynamic, static])
@pytest.mark.parametrize("side", ["left", None])
@pytest.mark.parametrize("at_once", [1, None])
def test_a_cache_among_the_inputs(kind, cache, side, at_once):
    ours, eager, _ = build(kind)
    B, past, tokens = 2, ids(T=5), ids(T=4).flip(1)
    mask = torch.ones(B, 9, dtype=torch.long)
    if side is not None:
        mask[1, :3] = 0
    filled = cache(eager)
    with torch.no_grad():
        eager(past, past_key_values=filled, attention_mask=mask[:, :5])
    kept = [(x.keys.clone(), x.values.clone()) for x in filled.layers]
    inputs = {"input_ids": tokens, "attention_mask": mask, "past_key_values": filled}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ch.effects(ours, inputs, at_once=at_once, estimate=at_once == 1)
    assert int(filled.get_seq_length()) == 5
    for layer, (k, v) in zip(filled.layers, kept, strict=True):
        assert torch.equal(layer.keys, k) and torch.equal(layer.values, v)
    right = next_token(inputs)
    plain = value(eager, inputs, right)
    assert found.baseline == pytest.approx(plain, abs=1e-4)
    for e in found:
        module = eager.model.layers[e.layer].self_attn.o_proj
        change = value(eager, inputs, right, module, e.head) - plain
        assert e.exact == pytest.approx(change, abs=2e-4)


def test_the_cache_of_an_encoder_and_decoder():
    ours, eager, _ = build("t5")
    with torch.no_grad():
        first = eager(input_ids=ids(), decoder_input_ids=ids(T=3), use_cache=True)
    inputs = {
        "encoder_outputs": (first.encoder_last_hidden_state,),
        "past_key_values": first.past_key_values,
        "decoder_input_ids": ids(T=1),
    }

    def metric(out):
        return out.logits[:, -1, 7].sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ch.effects(ours, inputs, metric)
    assert first.past_key_values.get_seq_length() == 3
    plain = value(eager, inputs, metric)
    assert found.baseline == pytest.approx(plain, abs=1e-4)
    layers = eager.decoder.block[0].layer
    for e in found:
        module = (layers[0].SelfAttention, layers[1].EncDecAttention)[e.layer].o
        change = value(eager, inputs, metric, module, e.head) - plain
        assert e.exact == pytest.approx(change, abs=2e-4)


def test_windows_are_rows_of_other_batches():
    """Swin attends in windows, 16 of them a picture: rows of the batch are not pictures there."""
    ours = build("swin")[0]
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}

    def metric(out):
        return out.logits[:, 1].sum()

    with pytest.warns(UserWarning, match="attention calls have batches of 2, 8"):
        found = ch.effects(ours, inputs, metric)
    for e in found:
        with torch.no_grad():
            with ch.intervene(ours, [ch.edits.ablate(layers=[e.layer], heads=[e.head])]):
                edited = metric(ours(**inputs))
            assert e.exact == pytest.approx(float(edited - metric(ours(**inputs))), abs=1e-4)


def test_a_report_measures_the_models_own_loss():
    from clearhead.models.report import report

    inputs = {"input_ids": ids(B=1), "labels": ids(B=1)}
    ours, eager, _ = build("llama")
    with pytest.warns(UserWarning, match=LOSS):
        found = report(ours, inputs, effects=True)
    assert found.effect_metric == "the model's loss"
    assert "how much the model's loss changes without the head" in " ".join(str(found).split())
    plain = value(eager, inputs, lambda out: out.loss)
    without = value(eager, inputs, lambda out: out.loss, eager.model.layers[1].self_attn.o_proj, 2)
    assert found[1, 2].effect == pytest.approx(without - plain, abs=1e-4)
    bert = report(build("bert")[0], {"input_ids": ids(B=1)}, effects=True)
    assert "a token looks at those after it" in bert.effects_withheld

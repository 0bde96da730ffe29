"""transformers models with random weights: `clearhead` gives what eager gives.

Built from configurations, offline, without tokenizers. Only real (not padded) positions compare:
on padding eager gives a uniform mixture and clearhead gives 0.
"""

import os

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from clearhead import compat, hf
from clearhead.core.errors import BadValue
from clearhead.core.functional.ambient import listening
from clearhead.hf.lazy_mask import LazyMask
from clearhead.hf.masks import attention_mask

os.environ["HF_HUB_OFFLINE"] = "1"

SMALL = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
GROUPED = dict(**SMALL, num_key_value_heads=2, intermediate_size=37, pad_token_id=0)


def config(kind):
    import transformers as t

    match kind:
        case "bert":
            return t.BertConfig(**SMALL, intermediate_size=37)
        case "gpt2":
            return t.GPT2Config(
                vocab_size=97, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
            )
        case "gpt_neox":
            return t.GPTNeoXConfig(**SMALL, intermediate_size=37, use_parallel_residual=True)
        case "llama":
            return t.LlamaConfig(**GROUPED)
        case "mistral":
            return t.MistralConfig(**GROUPED, sliding_window=5)
        case "qwen3":
            return t.Qwen3Config(**GROUPED, head_dim=8)
        case "gemma2":
            return t.Gemma2Config(
                **GROUPED, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0
            )
        case "gemma3":
            return t.Gemma3TextConfig(
                **GROUPED,
                head_dim=8,
                sliding_window=5,
                layer_types=["sliding_attention", "full_attention"],
            )
        case "gpt_oss":
            return t.GptOssConfig(
                **{**GROUPED, "intermediate_size": 32},
                head_dim=8,
                sliding_window=5,
                num_local_experts=2,
                num_experts_per_tok=1,
            )
        case "t5":
            return t.T5Config(
                vocab_size=97,
                d_model=32,
                d_kv=8,
                d_ff=37,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
            )
        case "bart":
            return t.BartConfig(
                vocab_size=97,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=37,
                decoder_ffn_dim=37,
                max_position_embeddings=64,
                forced_eos_token_id=None,
            )
        case "whisper":
            return t.WhisperConfig(
                vocab_size=97,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=37,
                decoder_ffn_dim=37,
                num_mel_bins=8,
                max_source_positions=20,
                max_target_positions=64,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
            )
        case "vit":
            return t.ViTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=37,
                image_size=12,
                patch_size=4,
            )


DECODERS = ["gpt2", "llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss"]


def build(kind, auto):
    import transformers

    from clearhead.hf import register

    register()
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config(kind)).eval()
    with torch.no_grad():  # spread the weights, so that attention is far from uniform
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(4.0)
    return model


def on_clearhead(kind, auto):
    model = build(kind, auto)
    model.set_attn_implementation("clearhead")
    return model


def both(model, run):
    """What eager and clearhead give."""
    results = []
    for name in ("eager", "clearhead"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            results.append(run())
    return results


def ids(B=2, T=11):
    return torch.randint(3, 97, (B, T), generator=torch.Generator().manual_seed(1))


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_prefill(kind, side):
    model, tokens = build(kind, "AutoModelForCausalLM"), ids()
    real = torch.ones_like(tokens)
    if side != "none":
        real[1, : 4 if side == "left" else None] = 0
        if side == "right":
            real[1] = 1
            real[1, -4:] = 0
    eager, ours = both(
        model, lambda: model(tokens, attention_mask=None if side == "none" else real).logits
    )
    close(ours[real.bool()], eager[real.bool()])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", DECODERS)
def test_generation_gives_the_same_text(kind, cache):
    tokens = ids(T=7)
    model = build(kind, "AutoModelForCausalLM")
    real = torch.ones_like(tokens)
    real[1, :3] = 0
    eager, ours = both(
        model,
        lambda: model.generate(
            tokens,
            attention_mask=real,
            max_new_tokens=20,
            min_new_tokens=20,
            do_sample=False,
            cache_implementation=cache,
            pad_token_id=0,
            eos_token_id=2,
            disable_compile=True,
        ),
    )
    assert ours.shape == (2, 27) and ours.equal(eager)


@pytest.mark.parametrize("side", ["left", "right"])
def test_bert(side):
    model, tokens = build("bert", "AutoModel"), ids()
    real = torch.ones_like(tokens)
    real[1, slice(0, 4) if side == "left" else slice(-4, None)] = 0
    eager, ours = both(model, lambda: model(tokens, attention_mask=real).last_hidden_state)
    close(ours[real.bool()], eager[real.bool()])


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_and_decoder_with_cross_attention(kind):
    model, tokens = build(kind, "AutoModelForSeq2SeqLM"), ids()
    real = torch.ones_like(tokens)
    real[1, -4:] = 0
    given = dict(input_ids=tokens, attention_mask=real, decoder_input_ids=ids(2, 5))
    eager, ours = both(model, lambda: model(**given).logits)
    close(ours, eager)
    eager, ours = both(
        model,
        lambda: model.generate(
            input_ids=tokens,
            attention_mask=real,
            max_new_tokens=20,
            min_new_tokens=20,
            do_sample=False,
            num_beams=1,
        ),
    )
    assert ours.equal(eager)


def test_whisper():
    model = build("whisper", "AutoModelForSpeechSeq2Seq")
    sound = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(2))
    eager, ours = both(model, lambda: model(sound, decoder_input_ids=ids(2, 5)).logits)
    close(ours, eager)


def test_vit():
    model = build("vit", "AutoModel")
    image = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(2))
    eager, ours = both(model, lambda: model(image).last_hidden_state)
    close(ours, eager)


@pytest.mark.parametrize("kind", ["bert", "llama", "gemma2", "gpt_oss", "t5", "bart"])
def test_weights_on_request(kind):
    """output_attentions=True for one call returns the true weights, as eager does."""
    auto = {"bert": "AutoModel", "t5": "AutoModelForSeq2SeqLM", "bart": "AutoModelForSeq2SeqLM"}
    model = build(kind, auto.get(kind, "AutoModelForCausalLM"))
    given = dict(input_ids=ids(), output_attentions=True)
    if kind in ("t5", "bart"):
        given["decoder_input_ids"] = ids(2, 5)
    eager, ours = both(model, lambda: model(**given))
    for name in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        if getattr(eager, name, None) is not None:
            assert len(getattr(ours, name)) == len(getattr(eager, name))
            for a, b in zip(getattr(ours, name), getattr(eager, name), strict=True):
                close(a, b)


@pytest.mark.parametrize(
    "kind, rule",
    [
        ("llama", "Causal(align=0)"),
        ("mistral", "window(before=4, after=None, align=0) & Causal(align=0)"),
        ("bert", "everything"),
    ],
)
def test_usual_masks_are_not_written_out(kind, rule):
    """No Tq x Tk tensor is made for a mask that a `Mask` can say, padding included."""
    from clearhead.core.functional.ambient import listening

    model = build(kind, "AutoModel")
    model.set_attn_implementation("clearhead")
    left, right = (torch.ones(2, 11, dtype=torch.long) for _ in range(2))
    left[0, :3] = right[1, 9:] = 0
    masks = []
    with torch.no_grad(), listening(lambda call: masks.append(repr(call.problem.mask))):
        model(ids())
        model(ids(), attention_mask=left)
        model(ids(), attention_mask=right)
        model(ids(), attention_mask=left & right)
    before = "" if rule == "everything" else f"{rule} & "
    both = "lengths(keys=[11, 9]) & ~prefix([3, 0])"
    assert masks[:2] == [rule] * 2
    assert masks[2:4] == [f"{before}~prefix([3, 0])"] * 2
    assert masks[4:6] == [f"{before}lengths(keys=[11, 9])"] * 2
    assert masks[6:] == [f"{before}{both}"] * 2


def test_a_reentrant_checkpoint_leaves_masks_unwritten():
    """It detaches the arguments of a layer, of which GPT-2's mask is one."""
    from clearhead.core.functional.ambient import listening

    model = build("gpt2", "AutoModelForCausalLM").train()
    model.set_attn_implementation("clearhead")
    model.activation_checkpointing_enable({"use_reentrant": True})
    masks = []
    with listening(lambda call: masks.append(repr(call.problem.mask))):
        model(ids(), labels=ids(), use_cache=False).loss.backward()
    assert masks == 4 * ["Causal(align=0)"]  # two layers, and each computed again


def test_a_lazy_mask_is_written_out_when_a_model_reads_its_cells():
    from clearhead.core.masks import Causal

    mask = LazyMask.of(Causal(align=2), 3, 5, 7, torch.device("cpu"))
    cells = Causal(align=2).to_bool(5, 7)
    assert mask.shape == (3, 1, 5, 7) and mask.dtype == torch.bool
    assert mask[:, :, 1:3, :4].equal(cells[1:3, :4].expand(3, 1, 2, 4))
    assert (~mask).equal(~cells.expand(3, 1, 5, 7)) and torch.where(mask, 1, 0).sum() == 3 * 25


def test_a_lazy_mask_keeps_what_a_model_writes_into_it():
    from clearhead.core.masks import causal

    def lazy():
        return LazyMask.of(causal, 2, 4, 4, torch.device("cpu"))

    cells, hidden = causal.to_bool(4, 4), torch.arange(4) == 1
    for write in (
        lambda mask: mask.__setitem__((..., 1), False),
        lambda mask: mask.logical_and_(~hidden),
        lambda mask: mask.masked_fill_(hidden, False),
        lambda mask: mask.__iand__(~hidden),
    ):
        mask = lazy()
        write(mask)
        assert mask.any(0).squeeze(0).equal(cells & ~hidden)
        assert mask.mask.to_bool(4, 4, B=2).any(0).squeeze(0).equal(cells & ~hidden)
    wide, deep = torch.cat([lazy(), lazy()], -1), torch.stack([lazy(), lazy()])
    assert wide[0, 0].equal(cells.repeat(1, 2)) and deep[1, 1, 0].equal(cells)
    assert lazy().as_subclass(torch.Tensor)[0, 0].equal(cells)
    assert torch.logical_not(input=lazy())[0, 0].equal(~cells)
    mask = lazy()
    assert mask.requires_grad_(False).sum() == 20 and mask.mask is causal
    with pytest.raises(BadValue, match="clone the mask"):
        torch.logical_not(mask.clone(), out=mask)


@pytest.mark.parametrize("order", ["numbers + mask", "mask + numbers", "torch.add"])
def test_a_mask_that_is_added_to_numbers_hides(order):
    """As an eager model's mask of 0 and -inf does; True would count as 1."""
    from clearhead.core.masks import causal

    mask, bias = LazyMask.of(causal, 2, 4, 4, torch.device("cpu")), torch.randn(3, 4, 4)
    add = {"numbers + mask": lambda: bias + mask, "mask + numbers": lambda: mask + bias}
    both = add.get(order, lambda: torch.add(bias, mask))()
    assert type(both) is torch.Tensor and both.shape == (2, 3, 4, 4)
    assert both.equal(bias.masked_fill(~causal.to_bool(4, 4), float("-inf")).expand_as(both))
    for misread in (lambda: bias.masked_fill(mask, 0.0), lambda: bias.add_(mask)):
        with pytest.raises(BadValue, match="True where a query may look"):
            misread()


def mask_functions():
    """Those of transformers: of positions alone, and of packed documents of 9 words."""
    from transformers import masking_utils as of

    simple = {
        "causal": of.causal_mask_function,
        "everyone": of.bidirectional_mask_function,
        "window": of.sliding_window_causal_mask_function(3),
        "window both ways": of.sliding_window_bidirectional_mask_function(2),
        "chunks": of.chunked_causal_mask_function(4, torch.tensor([0, 3])),
    }
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1, 1]])
    place = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 0, 1, 2]])
    packed = {}
    for name, function in simple.items():
        alone = of.packed_sequence_mask_function(documents)
        if hasattr(of, "remap_positions_for_packed_sequence"):
            function = of.remap_positions_for_packed_sequence(function, place)
        packed[f"packed {name}"] = of.and_masks(alone, function)  # as 5.23 combines them
        packed[f"{name}, packed"] = of.and_masks(function, alone)  # as 5.18 and 5.24 do
    return simple | packed


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", mask_functions())
def test_a_mask_function_becomes_a_mask_with_the_same_cells(name, padded):
    from transformers.masking_utils import sdpa_mask

    function, real = mask_functions()[name], torch.ones(2, 9, dtype=torch.long)
    real[1, :3] = 0
    whole, last, cut = (9, 9, 0, 0), (1, 9, 8, 0), (2, 5, 7, 4)  # the last with a sliding cache
    for Tq, Tk, start, first in (whole, *([] if "packed" in name else [last, cut])):
        where = (2, Tq, Tk, start, first, function, real if padded else None)
        mask = attention_mask(*where)
        cells = sdpa_mask(*where, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        # A chunk counts from its document's beginning: no mask here says that.
        remapped = (
            "remap" in str(function.__closure__[0].cell_contents) if "packed" in name else False
        )
        cells_alone = remapped and "chunks" in name
        assert isinstance(mask, LazyMask) != cells_alone
        assert mask.contiguous() is mask or cells_alone
        assert torch.equal(mask | False, cells.expand(2, 1, Tq, Tk))


def test_a_step_of_decoding_is_masked_by_its_padding_alone():
    """The same object in every step; what is watched or edited keeps where the query stands."""
    real = torch.ones(2, 11, dtype=torch.long)
    real[1, :3] = 0
    step, next_step = (attention_mask(2, 1, T, T - 1, 0, None, real[:, :T]) for T in (10, 11))
    assert repr(step.mask) == "~prefix([0, 3])" and next_step.mask is step.mask
    assert repr(attention_mask(2, 1, 11, 9, 0, None, None).mask) == "Causal(align=9)"
    with listening(lambda *call: None):
        watched = attention_mask(2, 1, 11, 10, 0, None, real)
    assert repr(watched.mask) == "Causal(align=10) & ~prefix([0, 3])"


def test_continuous_batching_with_a_patched_forward(monkeypatch):
    """transformers takes no attention function but its own there, and a thread of its own."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model, calls = build("llama", "AutoModelForCausalLM"), []
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16)
    settings = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=-1)

    def generate():
        found = model.generate_batch(
            [[5, 6, 7, 8], [9, 10, 11]],
            generation_config=settings,
            continuous_batching_config=small,
        )
        return [one.generated_tokens for one in found.values()]

    with pytest.raises(ValueError, match="clearhead is not supported for continuous batching"):
        model.set_attn_implementation("clearhead")
        generate()
    model.set_attn_implementation("sdpa")
    want = generate()
    ours = compat.scaled_dot_product_attention
    monkeypatch.setattr(
        compat, "scaled_dot_product_attention", lambda *a, **k: (calls.append(a), ours(*a, **k))[1]
    )
    model.forward = compat.patched()(model.forward)
    assert generate() == want
    assert len(calls) >= 5 * len(model.model.layers)


def test_an_unknown_mask_function_is_written_out():
    from transformers.masking_utils import and_masks, causal_mask_function

    even = and_masks(causal_mask_function, lambda b, h, q, k: k % 2 == 0)
    mask = attention_mask(1, 11, 11, mask_function=even)
    q, k = torch.arange(11)[:, None], torch.arange(11)
    assert not isinstance(mask, LazyMask)
    assert mask[0, 0].equal((k <= q) & (k % 2 == 0))


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_layers_that_are_compiled_one_by_one(kind):
    """The mask is made outside of their graphs, so it comes to them as a lazy one."""
    model = build(kind, "AutoModel")
    model.set_attn_implementation("clearhead")
    real = torch.ones(2, 11, dtype=torch.long)
    real[0, :3] = 0

    def answers():
        return [
            model(ids()).last_hidden_state,
            model(ids(), attention_mask=real).last_hidden_state[real.bool()],
            *(model(ids()[:, :n]).last_hidden_state for n in (5, 7)),
        ]

    with torch.no_grad():
        want = answers()
        for layer in model.h if kind == "gpt2" else model.layers:
            layer.compile(backend="eager")
        for got, one in zip(answers(), want, strict=True):
            torch.testing.assert_close(got, one)


@pytest.mark.parametrize("kind", ["Bloom", "Mpt"])
def test_a_model_with_an_attention_of_its_own_is_refused(kind):
    """It would take the booleans for numbers, and see the future."""
    hf.register()
    import transformers

    sizes = {"vocab_size": 50, "hidden_size": 32, "n_layer": 1, "n_head": 4}
    if kind == "Mpt":
        sizes = {"vocab_size": 50, "d_model": 32, "n_layers": 1, "n_heads": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    config._attn_implementation = "clearhead"
    model = getattr(transformers, f"{kind}Model")(config).eval()
    with pytest.raises(BadValue, match=f"{kind} computes its attention itself"):
        model(torch.arange(6).unsqueeze(0))
    with torch.no_grad(), pytest.raises(BadValue, match=f"{kind} computes its attention itself"):
        torch.compile(model, backend="eager")(torch.arange(6).unsqueeze(0), use_cache=False)


def test_a_window_with_another_mask_function_is_not_taken_for_a_window():
    from transformers import MistralConfig
    from transformers.masking_utils import create_sliding_window_causal_mask

    hf.register()

    def together(b, h, q, k):
        return (q < 50) == (k < 50)

    def asked(name, **more):
        config = MistralConfig(sliding_window=4)
        config._attn_implementation = name
        states = torch.zeros(1, 64, 8)
        return create_sliding_window_causal_mask(config, states, None, None, **more)

    ours = asked("clearhead", and_mask_function=together)
    assert torch.equal(ours, asked("sdpa", and_mask_function=together))
    assert isinstance(asked("clearhead"), LazyMask)


def test_a_compiled_model_reads_padded_text():
    hf.register()
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    config._attn_implementation = "clearhead"
    model = LlamaModel(config).eval()
    words, real = torch.arange(24).reshape(2, 12), torch.ones(2, 12, dtype=torch.long)
    real[1, :4] = 0
    with torch.no_grad():
        want = model(input_ids=words, attention_mask=real).last_hidden_state
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        got = compiled(input_ids=words, attention_mask=real).last_hidden_state
    torch.testing.assert_close(got[real.bool()], want[real.bool()])


@pytest.mark.parametrize(
    "kind", ["Bloom", "CodeGen", "MegatronBert", "XGLM", "Canine", "NllbMoe", "DeepseekV4"]
)
def test_a_model_that_reads_its_mask_as_numbers_gets_none(kind):
    """Booleans would count as 1, or mean the opposite."""
    import transformers

    settings = getattr(transformers, f"{kind}Config")()
    with pytest.raises(BadValue, match="an additive mask"):
        attention_mask(2, 5, 5, config=settings)
    assert isinstance(attention_mask(2, 5, 5, config=config("llama")), LazyMask)


def test_what_a_trainer_adds_to_a_call_is_not_about_attention():
    model, words = build("llama", "AutoModelForCausalLM"), torch.arange(10)[None]
    model.set_attn_implementation("clearhead")
    plain = model(words, labels=words)
    counted = model(words, labels=words, num_items_in_batch=torch.tensor(9))
    torch.testing.assert_close(counted.loss, plain.loss)
    assert torch.equal(counted.logits, plain.logits)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_groups_that_leave_the_corner_open_follow_a_cache(kind):
    import transformers

    import clearhead as ch

    model, words = build("llama", "AutoModelForCausalLM"), torch.arange(12)[None]
    model.set_attn_implementation("clearhead")
    before = ch.mass({"before": ch.window(before=1) & ~ch.window(before=0)})
    with torch.no_grad(), ch.watch(model, stats=[before], layers=[1]) as whole:
        model(words)
    cache = transformers.DynamicCache(config=model.config)
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad(), ch.watch(model, stats=[before], layers=[1]) as parts:
        for part in words.split([7, 4, 1], -1):
            model(part, past_key_values=cache)
    together = torch.cat([call.mass["before"] for call in parts], -1)
    torch.testing.assert_close(together, whole[0].mass["before"])
    assert bool((together[..., 1:] > 0).all())


def test_a_report_follows_a_cache_of_fixed_size():
    import transformers

    from clearhead.models.report import report

    model, words = build("llama", "AutoModelForCausalLM"), torch.arange(12)[None]
    model.set_attn_implementation("clearhead")
    cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    tokens = [str(i) for i in range(12)]
    plain = report(model, {"input_ids": words}, tokens=tokens)
    fixed = report(model, {"input_ids": words, "past_key_values": cache}, tokens=tokens)
    for one, other in zip(plain.heads, fixed.heads, strict=True):
        assert one.shares == pytest.approx(other.shares, abs=1e-6) and one.shares["previous"] > 0


@pytest.mark.parametrize("how", [pytest.param("dynamic", marks=pytest.mark.slow), "as it comes"])
def test_a_compiled_model_has_one_graph_for_every_length(how):
    from torch._dynamo.testing import CompileCounter

    model, counter = on_clearhead("llama", "AutoModelForCausalLM"), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, dynamic=True if how == "dynamic" else None)
    with torch.no_grad():
        for T in (5, 7, 11, 13, 37):
            x = ids(T=T)
            torch.testing.assert_close(
                compiled(x, use_cache=False)[0], model(x, use_cache=False)[0]
            )
    assert counter.frame_count == (1 if how == "dynamic" else 2)


def test_a_model_is_exported_for_every_length():
    model = on_clearhead("llama", "AutoModelForCausalLM")
    auto = torch.export.Dim.AUTO
    with torch.no_grad():
        exported = torch.export.export(
            model, (ids(2, 21),), {"use_cache": False}, strict=False,
            dynamic_shapes={"input_ids": {0: auto, 1: auto}, "use_cache": None},
        )  # fmt: skip
        x = ids(3, 33)
        theirs = model(x, use_cache=False)[0]
        torch.testing.assert_close(exported.module()(x, use_cache=False)[0], theirs)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["llama", "mistral", "bert"])
@pytest.mark.parametrize("tracer", ["jit.trace", "make_fx"])
def test_a_graph_of_a_model_reads_the_padding_of_each_call(tracer, kind):
    """It does not keep the padding of the texts that it was made with."""
    model = on_clearhead(kind, "AutoModel").requires_grad_(False)
    extra = {} if kind == "bert" else {"use_cache": False}

    def call(words, real):
        hidden = model(input_ids=words, attention_mask=real, **extra).last_hidden_state
        return hidden * real.unsqueeze(-1)

    words, real = ids(), torch.ones(2, 11, dtype=torch.long)
    real[1, 7:] = 0
    with torch.no_grad():
        if tracer == "make_fx":
            graph = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(words, real)
        else:
            graph = torch.jit.trace(call, (words, real))
        for other in (real, real.flip(0), real.flip(1), torch.ones_like(real)):
            close(graph(words, other), call(words, other))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "bias", ["use_relative_position_bias", "use_shared_relative_position_bias"]
)
def test_beit_adds_its_mask_to_a_bias(bias, padded):
    import transformers

    hf.register()
    settings = transformers.BeitConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
        image_size=12, patch_size=4, **{bias: True},
    )  # fmt: skip
    model = transformers.BeitModel(settings).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "bias_table" in name:
                p.normal_()
    image = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(2))
    real = torch.ones(2, 10, dtype=torch.long)
    real[1, 7:] = 0
    given = {"attention_mask": real} if padded else {}
    eager, ours = both(model, lambda: model(image, **given).last_hidden_state)
    seen = real.bool() if padded else slice(None)
    close(ours[seen], eager[seen])


def test_weights_beyond_the_limit_of_to_dense(monkeypatch):
    """What is asked for by name is given; eager gives it too."""
    monkeypatch.setattr("clearhead.core.functional.matrix.Matrix.to_dense.__defaults__", (100,))
    model = build("bert", "AutoModel")
    eager, ours = both(model, lambda: model(ids(), output_attentions=True).attentions)
    for a, b in zip(ours, eager, strict=True):
        close(a, b)


def test_weights_that_no_memory_holds():
    from clearhead.hf.attention import _weights

    q = torch.zeros(1, 1, 1, 1).expand(1, 2, 2**22, 1)
    with pytest.raises(BadValue) as error:
        _weights(q, q, {})
    assert str(error.value) == (
        "output_attentions=True needs 1 x 2 x 4194304 x 4194304 weights, 140737.5 GB in fp32.\n"
        "  Rule: the weights of a layer need a few times this memory.\n"
        "  Hint: pass less text, or use clearhead.watch(model, stats=[...], exact_rows=[...])."
    )


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_texts_see_only_themselves(kind, use_cache):
    """As DataCollatorWithFlattening packs them: each gives what it gives alone."""
    import transformers

    model = build(kind, "AutoModelForCausalLM")
    model.set_attn_implementation("clearhead")
    texts = [ids(1, T)[0].tolist() for T in (5, 2, 7)]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": text} for text in texts], return_tensors="pt")
    assert "cu_seq_lens_q" in batch
    with torch.no_grad():
        packed = model(**batch, use_cache=use_cache).logits[0]
        alone = [model(torch.tensor([text])).logits[0] for text in texts]
    close(packed, torch.cat(alone))


def test_packed_texts_that_do_not_fit_are_refused():
    model = build("llama", "AutoModelForCausalLM")
    model.set_attn_implementation("clearhead")
    starts, wrong = torch.tensor([0, 5, 11]), torch.tensor([0, 5, 9])
    with torch.no_grad():
        model(ids(1), cu_seq_lens_q=starts, cu_seq_lens_k=starts.clone())
        for q, k in ((wrong, wrong), (starts, wrong)):
            with pytest.raises(BadValue, match="the two are equal"):
                model(ids(1), cu_seq_lens_q=q, cu_seq_lens_k=k)

"""What heads move, |v W_O|, against eager models of transformers with hooks."""

import pytest
import torch

import clearhead as ch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

T, H, G, D = 11, 6, 2, 8
SIZES = {
    "vocab_size": 99, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": H,
}  # fmt: skip
GROUPS = {"first": ch.prefix(1), "near": ch.window(2, 0)}


def _fused_gpt2(layer):
    values = layer.attn.c_attn.weight.detach()[:, -48:], layer.attn.c_attn.bias.detach()[-48:]
    return values, layer.attn.c_proj.weight.detach()


def _linear(values, output):
    bias = values.bias
    return (
        values.weight.detach().T,
        0 if bias is None else bias.detach(),
    ), output.weight.detach().T


def _fused_neox(layer):
    fused = layer.attention.query_key_value
    weight = fused.weight.detach().view(H, 3, D, 48)[:, 2].reshape(48, 48).T
    return (
        weight,
        fused.bias.detach().view(H, 3, D)[:, 2].flatten(),
    ), layer.attention.dense.weight.detach().T


# The model, its layers, the module whose input the values are made of, and how.
MODELS = {
    "gpt2": lambda **k: transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_embd=48, n_layer=2, n_head=H, vocab_size=99, bos_token_id=0, eos_token_id=0, **k)),
    "llama": lambda **k: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_key_value_heads=G, **SIZES, **k)),
    "qwen3": lambda **k: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(num_key_value_heads=G, head_dim=D, **SIZES, **k)),
    "gemma2": lambda **k: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(num_key_value_heads=G, head_dim=D, **SIZES, **k)),
    "bert": lambda **k: transformers.BertModel(transformers.BertConfig(**SIZES, **k)),
    "gpt-neox": lambda **k: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**SIZES, **k)),
}  # fmt: skip
PARTS = {
    "gpt2": lambda m: (m.transformer.h[1].attn, _fused_gpt2(m.transformer.h[1])),
    "bert": lambda m: (
        m.encoder.layer[1].attention.self,
        _linear(m.encoder.layer[1].attention.self.value, m.encoder.layer[1].attention.output.dense),
    ),
    "gpt-neox": lambda m: (m.gpt_neox.layers[1].attention, _fused_neox(m.gpt_neox.layers[1])),
}


def parts(name, model):
    if name in PARTS:
        return PARTS[name](model)
    attention = model.model.layers[1].self_attn
    return attention, _linear(attention.v_proj, attention.o_proj)


def written(values, output):
    """v W_O of every head in float64, (B, H, T, d), from values (B, T, heads x size)."""
    values = values.double().unflatten(-1, (-1, D)).transpose(1, 2)
    return values.repeat_interleave(H // values.shape[1], 1) @ output.double().view(H, D, -1)


def eager_parts(name, ids):
    """Weights of layer 1 in float64, (B, H, T, T), from transformers, and v W_O, (B, H, T, d)."""
    torch.manual_seed(0)
    model = MODELS[name](attn_implementation="eager").eval().double()
    attention, ((weight, bias), output) = parts(name, model)
    inputs = {}

    def keep(module, args, kwargs):
        inputs["x"] = args[0] if args else kwargs["hidden_states"]

    handle = attention.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[1]
    handle.remove()
    return weights, written(inputs["x"] @ weight + bias, output)


def agrees(found, right, total=1.0):
    """Is the error at most 1e-5 of the sum of absolute parts?"""
    assert bool(((found.double() - right).abs() <= 1e-5 * total).all())


BY_VALUE = [ch.value_weighted(GROUPS), ch.topk(3, by="value"), ch.received(by="value")]
RELATIVE = {"by": "relative_value"}
VARIES = [
    "varying", ch.value_weighted(GROUPS, **RELATIVE), ch.topk(3, **RELATIVE),
    ch.received(**RELATIVE),
]  # fmt: skip


def near(moved):
    """The sum over the last keys, also of a call with more keys than queries."""
    q, k = (torch.arange(n) for n in moved.shape[2:])
    return (moved * ((k <= q[:, None]) & (k >= q[:, None] - 2))).sum(-1)


def check_moved(call, moved):
    """`moved` are the norms of what each head moves from each key, (B, H, Tq, Tk)."""
    total = moved.sum(-1)
    nonzero = total.masked_fill(total == 0, 1.0)
    agrees(call.value_weighted["first"], moved[..., 0] / nonzero)
    agrees(call.value_weighted["near"], near(moved) / nonzero)
    agrees(call.topk.weights, moved.topk(3).values, total.unsqueeze(-1))
    agrees(call.received, moved.sum(2), moved.sum((2, 3)).unsqueeze(-1))


def check_varies(call, weights, written):
    o = weights @ written
    change = (o - o.mean(2, keepdim=True)).square().sum(-1)
    share = change / o.square().sum(-1).mean(-1, keepdim=True)
    agrees(call.varying, share, 1 + share)
    sources = weights.unsqueeze(-1) * (written - written[:, :, :1]).unsqueeze(2)
    torch.testing.assert_close(sources.sum(3), o - written[:, :, :1])
    check_moved(call, sources.norm(dim=-1))


@pytest.mark.parametrize("name", MODELS)
def test_what_a_head_moves_is_that_of_an_eager_model(name):
    ch.hf.register()
    ids = torch.randint(0, 99, (2, T), generator=torch.Generator().manual_seed(3))
    weights, written = eager_parts(name, ids)
    torch.manual_seed(0)
    model = MODELS[name](attn_implementation="clearhead").eval()
    with torch.no_grad(), ch.watch(model, stats=BY_VALUE) as seen:
        model(ids)
    check_moved(seen[1], weights * written.norm(dim=-1).unsqueeze(2))


@pytest.mark.parametrize("name", MODELS)
def test_what_varies_is_that_of_an_eager_model(name):
    ch.hf.register()
    ids = torch.randint(0, 99, (2, T), generator=torch.Generator().manual_seed(4))
    weights, written = eager_parts(name, ids)
    torch.manual_seed(0)
    model = MODELS[name](attn_implementation="clearhead").eval()
    with torch.no_grad(), ch.watch(model, stats=VARIES) as seen:
        model(ids)
    check_varies(seen[1], weights, written)
    assert not seen[1].value_weighted["first"].any()


@torch.no_grad()
def test_an_encoder_its_decoder_and_cross_attention():
    ch.hf.register()
    seed = torch.Generator().manual_seed(5)
    config = transformers.T5Config(
        vocab_size=99, d_model=48, d_kv=D, d_ff=64, num_layers=2, num_heads=H, pad_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    inputs = {
        "input_ids": torch.randint(1, 99, (2, T), generator=seed),
        "decoder_input_ids": torch.randint(1, 99, (2, 7), generator=seed),
    }
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.set_attn_implementation("clearhead")
    with ch.watch(model, stats=BY_VALUE) as moved, ch.watch(model, stats=VARIES) as varied:
        model(**inputs)
    model.set_attn_implementation("eager")
    decoder = model.double().decoder.block[1].layer
    attentions = {
        1: model.encoder.block[1].layer[0].SelfAttention,
        4: decoder[0].SelfAttention,
        5: decoder[1].EncDecAttention,
    }
    values = {}
    for call, attention in attentions.items():
        attention.v.register_forward_hook(
            lambda module, args, out, call=call: values.update({call: out})
        )
    out = model(**inputs, output_attentions=True)
    weights = out.encoder_attentions[1], out.decoder_attentions[1], out.cross_attentions[1]
    for (call, attention), of_call in zip(attentions.items(), weights, strict=True):
        wrote = written(values[call], attention.o.weight.T)
        check_moved(moved[call], of_call * wrote.norm(dim=-1).unsqueeze(2))
        check_varies(varied[call], of_call, wrote)


def test_a_cache_without_the_first_token_has_no_relative_values():
    ch.hf.register()
    torch.manual_seed(0)
    config = transformers.MistralConfig(num_key_value_heads=G, sliding_window=4, **SIZES)
    model = transformers.MistralForCausalLM(config).eval()
    model.set_attn_implementation("clearhead")
    ids = torch.randint(0, 99, (2, 9), generator=torch.Generator().manual_seed(7))
    cache = transformers.DynamicCache(config=config)
    stats = [ch.topk(2, by="relative_value"), ch.value_weighted(GROUPS)]
    with torch.no_grad(), ch.watch(model, stats=stats) as seen:
        model(ids[:, :3], past_key_values=cache)
        model(ids[:, 3:4], past_key_values=cache)
    with torch.no_grad(), ch.watch(model, stats=stats) as right:
        model(ids[:, :4])
    torch.testing.assert_close(seen[3].topk.weights, right[1].topk.weights[:, :, 3:])
    with pytest.raises(ch.BadValue, match="has dropped the first tokens"), torch.no_grad():
        with ch.watch(model, stats=stats):
            model(ids[:, 4:], past_key_values=cache)
    with torch.no_grad(), ch.watch(model, stats=stats[1:]):
        model(ids[:, -1:], past_key_values=cache)


def test_under_autocast_the_norms_are_those_of_the_rounded_values():
    """The call has rounded queries, keys and values; nothing else is rounded."""
    module = Gated(gated=False)
    x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(6)).bfloat16().float()
    stats = [ch.weighted("value"), "varying"]
    with torch.no_grad(), ch.watch(module, stats=stats) as right:
        module(x)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with ch.watch(module, stats=stats) as seen:
            module(x)
    torch.testing.assert_close(seen[0].weighted["all"], right[0].weighted["all"])
    torch.testing.assert_close(seen[0].varying, right[0].varying)


def test_a_constant_output_does_not_vary_and_the_gradient_is_that_of_autograd():
    x = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
    module = Gated(gated=False).double()
    with ch.watch(module, stats=["varying"]) as seen:
        module(x)
        module(x[:, :1].expand(2, 7, 12))
    heads = x.unflatten(-1, (3, 4)).transpose(1, 2)
    scores = (heads @ heads.mT / 2).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    o = (scores.softmax(-1) @ heads).unsqueeze(-2) @ module.o_proj.weight.T.view(3, 1, 4, 5)
    o = o.squeeze(-2)
    expected = (o - o.mean(2, keepdim=True)).square().sum(-1)
    expected = expected / o.square().sum(-1).mean(-1, keepdim=True)
    torch.testing.assert_close(seen[0].varying, expected)
    weight = torch.randn(expected.shape, dtype=torch.float64)
    ours, right = (torch.autograd.grad((y * weight).sum(), x, retain_graph=True)[0]
                   for y in (seen[0].varying, expected))  # fmt: skip
    torch.testing.assert_close(ours, right)
    assert float(seen[1].varying.detach().max()) < 1e-20
    with pytest.raises(ch.BadValue, match=r'stats has "varying" outside a model'):
        ch.look(heads, heads, heads, stats=["varying"])
    with pytest.raises(ch.BadValue, match="got 'relative_value' outside a model"):
        ch.look(heads, heads, heads, stats=[ch.topk(2, by="relative_value")])


def test_fully_masked_queries_have_no_part_in_what_varies():
    """The mask hides the first two tokens, so they are fully masked, without being padding."""
    x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(8))
    module = Gated(gated=False)
    with torch.no_grad(), ch.watch(module, stats=["varying"]) as seen:
        module(x[:, 2:])
        module.mask = ch.causal & ~ch.prefix(2)
        module(x)
    alone, call = seen
    torch.testing.assert_close(call.varying[:, :, 2:], alone.varying)
    assert alone.varying.max() > 0.1 and not call.varying[:, :, :2].any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_moves_nothing(side):
    ch.hf.register()
    torch.manual_seed(0)
    model = MODELS["llama"](attn_implementation="clearhead").eval()
    ids = torch.randint(0, 99, (1, 7), generator=torch.Generator().manual_seed(5))
    pad = torch.zeros(1, 4, dtype=torch.long)
    parts = (pad, ids) if side == "left" else (ids, pad)
    padded, real = (
        torch.cat(parts, 1),
        torch.cat([(x is ids) * torch.ones_like(x) for x in parts], 1),
    )
    relative = ch.weighted("relative_value")
    stats = [ch.value_weighted(GROUPS), ch.topk(2, by="value"), "varying", relative]
    stats += [ch.received(by="value"), ch.pooled(11, 11)]  # a bin for each cell
    with torch.no_grad(), ch.watch(model, stats=stats) as alone:
        model(ids)
    with torch.no_grad(), ch.watch(model, stats=stats) as seen:
        model(padded, attention_mask=real)
    columns = slice(4, 11) if side == "left" else slice(0, 7)
    for a, b in zip(alone, seen, strict=True):
        for ours, right in ((b.varying, a.varying), (b.weighted["all"], a.weighted["all"])):
            torch.testing.assert_close(ours[..., columns], right, rtol=1e-4, atol=1e-5)
        assert b.varying.count_nonzero() == a.varying.count_nonzero()
        torch.testing.assert_close(b.received[..., columns], a.received, rtol=1e-4, atol=1e-5)
        cells = b.pooled[..., columns, columns]
        torch.testing.assert_close(cells, a.pooled, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(b.pooled.sum(), cells.sum())
        for group in GROUPS:
            x = b.value_weighted[group][..., columns]
            torch.testing.assert_close(x, a.value_weighted[group], rtol=1e-4, atol=1e-5)
        assert torch.equal(b.topk.keys[..., columns, :], a.topk.keys)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "score", [ch.received("value", power=2, last=3), ch.drop_error("value", last=3)]
)
def test_the_last_queries_are_those_of_each_text(side, score):
    ch.hf.register()
    torch.manual_seed(0)
    model = MODELS["llama"](attn_implementation="clearhead").eval()
    texts = [torch.randint(0, 99, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 6)]
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(texts, batch_first=True, padding_side=side)
    real = pad([torch.ones_like(x) for x in texts], batch_first=True, padding_side=side)
    with torch.no_grad(), ch.watch(model, stats=[score]) as seen:
        model(ids, attention_mask=real)
    for text, (x, mask) in enumerate(zip(texts, real.bool(), strict=True)):
        with torch.no_grad(), ch.watch(model, stats=[score]) as alone:
            model(x[None])
        for a, b in zip(alone, seen, strict=True):
            of_text, right = getattr(b, score.name)[text], getattr(a, score.name)[0]
            torch.testing.assert_close(of_text[:, mask], right, rtol=1e-4, atol=1e-6)
            assert not of_text[:, ~mask].any() and right.any()


def test_an_edited_head_moves_what_the_model_computes():
    """The output of a head is scaled: the projection still reads what attention returned."""
    ch.hf.register()
    torch.manual_seed(0)
    model = MODELS["llama"](attn_implementation="clearhead").eval()
    ids = torch.arange(T).unsqueeze(0)
    edit = ch.edits.knock_out(ch.prefix(1), layers=[0], heads=[1], positions=[5, -1])
    with (
        torch.no_grad(),
        ch.intervene(model, [edit]),
        ch.watch(model, stats=[ch.value_weighted(GROUPS)]) as seen,
    ):
        model(ids)
    first = seen[0].value_weighted["first"][0]
    assert (first[1, [5, -1]] == 0).all() and (first[0] > 0).all() and (first[1, :5] > 0).all()


def test_weights_that_change_inside_the_block_count():
    x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(2))
    module, stats = Gated(gated=False), [ch.value_weighted(GROUPS)]
    with torch.no_grad(), ch.watch(module, stats=stats) as both:
        module(x)
        module.o_proj.weight[:, :4].mul_(torch.linspace(-3, 3, 4))
        module(x)
    with torch.no_grad(), ch.watch(module, stats=stats) as changed:
        module(x)
    before, after = (call.value_weighted["near"] for call in both)
    assert torch.equal(after, changed[0].value_weighted["near"])
    assert not torch.allclose(before[:, 0], after[:, 0])


@pytest.mark.parametrize("head", range(3))
def test_writes_that_torch_does_not_count_do(head):
    """A loop that updates `weight.data` changes no version of the weight."""
    x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(2))
    module, stats = Gated(gated=False), [ch.value_weighted(GROUPS)]
    with torch.no_grad(), ch.watch(module, stats=stats) as both:
        module(x)
        module.o_proj.weight.data[:, 4 * head : 4 * head + 4] *= torch.linspace(-3, 3, 4)
        module(x)
    with torch.no_grad(), ch.watch(module, stats=stats) as changed:
        module(x)
    assert torch.equal(both[1].value_weighted["near"], changed[0].value_weighted["near"])


def _new_parameter(module):
    module.o_proj.weight = torch.nn.Parameter(torch.randn(5, 12))


def _new_data(module):
    module.o_proj.weight.data = torch.randn(5, 12)


@pytest.mark.parametrize("replace", [_new_parameter, _new_data])
def test_weights_that_are_replaced_inside_the_block_count(replace):
    x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(2))
    module, stats = Gated(gated=False), [ch.value_weighted(GROUPS)]
    with torch.no_grad(), ch.watch(module, stats=stats) as both:
        module(x)
        replace(module)
        module(x)
    with torch.no_grad(), ch.watch(module, stats=stats) as right:
        module(x)
    assert torch.equal(both[1].value_weighted["near"], right[0].value_weighted["near"])
    with pytest.raises(ch.BadValue, match="did not run"):
        with torch.no_grad(), ch.watch(module, stats=stats):
            module(x)
            module.o_proj = torch.nn.Linear(12, 5)  # the block does not see it run
            module(x)


class Gated(torch.nn.Module):
    """Attention with a gate between the heads and their projection."""

    def __init__(self, gated=True, named="o_proj"):
        super().__init__()
        self.gated, self.named, self.mask = gated, named, ch.causal
        setattr(self, named, torch.nn.Linear(12, 5))

    def forward(self, x):
        heads = ch.attention(*[x.unflatten(-1, (3, 4)).transpose(1, 2)] * 3, mask=self.mask)
        joined = heads.transpose(1, 2).flatten(2)
        return getattr(self, self.named)(joined.sigmoid() if self.gated else joined)


@pytest.mark.parametrize(
    ("module", "match"),
    [(Gated(), "a gate"), (Gated(named="last"), "No output projection was found")],
)
def test_a_projection_that_does_not_compute_the_output_is_refused(module, match):
    x = torch.randn(2, 7, 12)
    with (
        pytest.raises(ch.BadValue, match=match),
        ch.watch(module, stats=[ch.value_weighted(GROUPS)]),
    ):
        module(x)
    with ch.watch(ok := Gated(gated=False), stats=[ch.value_weighted(GROUPS)]) as seen:
        ok(x)
    assert seen[0].value_weighted["first"].shape == (2, 3, 7)


class Functional(Gated):
    """The projection is not called as a module, so what it computed is not known."""

    def forward(self, x):
        heads = ch.attention(*[x.unflatten(-1, (3, 4)).transpose(1, 2)] * 3, mask=ch.causal)
        return torch.nn.functional.linear(heads.transpose(1, 2).flatten(2), self.o_proj.weight)


def test_a_projection_that_never_runs_is_refused():
    module = Functional()
    with (
        pytest.raises(ch.BadValue, match="did not run"),
        ch.watch(module, stats=[ch.received(by="value")]),
    ):
        module(torch.randn(2, 7, 12))


def test_a_layer_of_torch():
    x = torch.randn(2, 7, 12)
    stats = [ch.value_weighted(GROUPS)]
    layer = torch.nn.MultiheadAttention(12, 3, batch_first=True).eval()
    with torch.no_grad(), ch.compat.patched(), ch.watch(layer, stats=stats) as seen:
        layer(x, x, x, need_weights=False)
    assert seen[0].value_weighted["first"].shape == (2, 3, 7)

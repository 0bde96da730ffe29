"""Patches of transformers models: what eager attention gives with hooks on its projections.

Between a projection and attention a model treats every head and position alone: it norms and
rotates. So another run's projection, at the same position, is another run's query, key or value as
attention receives it.
"""

from contextlib import contextmanager

import pytest
import torch

import clearhead as ch
from tests.hf.test_intervene import mistral
from tests.hf.test_models import build, ids
from tests.pairs import pairs

CAUSAL = "AutoModelForCausalLM"
AUTO = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}
OF = ["query", "key", "value", "output"]
H = 4  # query heads of every model


def model_of(kind):
    if kind == "mistral":
        return mistral()
    model = build(kind, AUTO.get(kind, CAUSAL))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:  # norms of queries and keys too
                p.add_(torch.rand_like(p))
            if kind == "t5" and name.endswith(("q.weight", "k.weight")):
                p.mul_(0.3)  # it does not scale
    return model


def projection(model, kind, layer, of):
    """The module, and the columns of its output that are the heads; None if its input is."""
    at = OF.index(of)
    name, columns = "qkvo"[at], None if of == "output" else slice(None)
    if kind == "gpt2":
        attention = model.transformer.h[layer].attn
        if columns is None:
            return attention.c_proj, None
        return attention.c_attn, slice(32 * at, 32 * at + 32)
    if kind == "gpt_neox":  # the heads' queries, keys and values take turns
        attention = model.gpt_neox.layers[layer].attention
        if columns is None:
            return attention.dense, None
        return attention.query_key_value, torch.arange(96).view(H, 3, 8)[:, at].flatten()
    if kind == "bert":
        attention = model.bert.encoder.layer[layer].attention
        return attention.output.dense if columns is None else getattr(attention.self, of), columns
    if kind == "t5":  # two layers of the encoder, then self-attention and cross-attention in turn
        block = model.encoder.block[layer] if layer < 2 else model.decoder.block[(layer - 2) // 2]
        crosses = layer > 1 and layer % 2
        attention = block.layer[1].EncDecAttention if crosses else block.layer[0].SelfAttention
        return getattr(attention, name), columns
    return getattr(model.model.layers[layer].self_attn, f"{name}_proj"), columns


@contextmanager
def hooked(model, kind, layer, of, change):
    """Inside the block, `change` gets and returns the heads, (B, T, heads, size)."""
    module, columns = projection(model, kind, layer, of)
    grouped = of in ("key", "value") and hasattr(model.config, "num_key_value_heads")
    heads = model.config.num_key_value_heads if grouped else H

    def changed(x):
        x, at = x.clone(), slice(None) if columns is None else columns
        x[..., at] = change(x[..., at].unflatten(-1, (heads, -1))).flatten(2)
        return x

    if columns is None:
        hook = module.register_forward_pre_hook(lambda module, args: (changed(args[0]),))
    else:
        hook = module.register_forward_hook(lambda module, args, out: changed(out))
    try:
        yield
    finally:
        hook.remove()


def by_hooks(model, kind, layer, of, run, other, heads, columns):
    """Eager attention, with the heads of another run at these columns of each text."""
    recorded = []

    def record(x):
        recorded.append(x.clone())
        return x

    def replace(x):
        for b, at in enumerate(columns):
            for h in heads:
                x[b, at, h] = recorded[0][b, at, h]
        return x

    model.set_attn_implementation("eager")
    with hooked(model, kind, layer, of, record):
        other()
    with hooked(model, kind, layer, of, replace):
        result = run()
    model.set_attn_implementation("clearhead")
    return result


def inputs(kind, seed, padding):
    tokens = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens)
    if padding == "left":
        mask[1, :3] = 0
    if padding == "right":
        mask[1, -3:] = 0
    found = {"input_ids": tokens, "attention_mask": None if padding == "none" else mask}
    if kind == "t5":
        found["decoder_input_ids"] = ids(T=7) + seed % 2
    return found, mask.bool()


def check(logits, right, plain):
    """The edit has an effect, and the logits are right within the rounding of float32."""
    rounding = 3e-6 * right.abs().max()
    assert (plain - right).abs().max() > 50 * rounding
    assert (logits - right).abs().max() < rounding


SITES = [("gpt2", 1), ("gpt_neox", 1), ("llama", 0), ("qwen3", 1), ("gemma2", 0), ("gemma3", 1),
         ("bert", 1), ("t5", 0), ("t5", 2), ("t5", 3)]  # fmt: skip


@pytest.mark.parametrize(("site", "of", "padding"), pairs(SITES, OF, ["none", "left", "right"]))
@torch.no_grad()
def test_as_hooks_on_eager_attention(site, of, padding):
    kind, layer = site
    model = model_of(kind)
    (mine, real), (others, _) = (inputs(kind, seed, padding) for seed in (1, 2))
    positions, heads = [1, 4, -1], [1]
    length = 7 if kind == "t5" and layer > 1 and (layer == 2 or of in ("query", "output")) else 11
    columns = []
    for text in real:
        text = text if length == 11 else torch.ones(7, dtype=torch.bool)
        first, after = int(text.int().argmax()), int(text.nonzero().max()) + 1
        columns.append([first + 1, first + 4, after - 1])
    right = by_hooks(
        model,
        kind,
        layer,
        of,
        lambda: model(**mine).logits,
        lambda: model(**others),
        heads,
        columns,
    )
    with ch.watch(model, stats=[], inputs=True, outputs=True, layers=[layer]) as recording:
        model(**others)
    edit = ch.edits.patch(recording, of=of, layers=[layer], heads=heads, positions=positions)
    with ch.intervene(model, [edit]):
        logits = model(**mine).logits
    plain = model(**mine).logits
    if kind != "t5":
        plain, right, logits = (x[real] for x in (plain, right, logits))
    check(logits, right, plain)


@pytest.mark.parametrize(
    ("kind", "of", "cache"), pairs(["gpt2", "llama", "mistral"], OF, ["dynamic", "static"])
)
@torch.no_grad()
def test_in_steps_with_a_cache(kind, of, cache):
    """Both runs are made in steps; hooks see the complete texts."""
    from transformers import DynamicCache, StaticCache

    model, positions = model_of(kind), [2, 7]
    (mine, _), (others, _) = (inputs(kind, seed, "none") for seed in (1, 2))

    def steps(tokens):
        past = DynamicCache(config=model.config)
        if cache == "static":
            past = StaticCache(config=model.config, max_cache_len=13)
        parts = tokens.split([5, 1, 1, 2, 1, 1], 1)
        return torch.cat([model(part, past_key_values=past).logits for part in parts], 1)

    right = by_hooks(
        model, kind, 0, of, lambda: model(**mine, use_cache=False).logits,
        lambda: model(**others, use_cache=False), [0, 1], [positions, positions],
    )  # fmt: skip
    with ch.watch(model, stats=[], inputs=True, outputs=True) as recording:
        steps(others["input_ids"])
    edit = ch.edits.patch(recording, of=of, layers=[0], heads=[0, 1], positions=positions)
    with ch.intervene(model, [edit]):
        logits = steps(mine["input_ids"])
    check(logits, right, model(**mine).logits)


@torch.no_grad()
def test_the_last_key_is_not_in_the_room_of_a_cache():
    from transformers import StaticCache

    model = model_of("llama")
    (mine, _), (others, _) = (inputs("llama", seed, "none") for seed in (1, 2))
    right = by_hooks(
        model, "llama", 0, "value", lambda: model(**mine).logits, lambda: model(**others),
        [1], [[10], [10]],
    )  # fmt: skip
    caches = [StaticCache(config=model.config, max_cache_len=13) for _ in range(2)]
    with ch.watch(model, stats=[], inputs=True) as recording:
        model(**others, past_key_values=caches[0])
    edit = ch.edits.patch(recording, of="value", layers=[0], heads=[1], positions=[-1])
    with ch.intervene(model, [edit]):
        logits = model(**mine, past_key_values=caches[1]).logits
    check(logits, right, model(**mine).logits)

"""Edits of transformers models: what eager attention gives with a hook that edits its weights.

The hook stands in for `torch.nn.functional.softmax`, which eager attention calls once a layer.
"""

from contextlib import contextmanager

import pytest
import torch

import clearhead as ch
from tests.hf.test_models import build, ids

T = 11
KINDS = {
    "gpt2": "AutoModelForCausalLM",
    "llama": "AutoModelForCausalLM",
    "bert": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
}
LAYERS = {"gpt2": 2, "llama": 2, "bert": 2, "t5": 6}
DECODERS = ["gpt2", "llama"]
TEXT = ch.documents([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2])  # about a text of 11 tokens


@contextmanager
def weights_edited(layers, change):
    """Inside the block, `change(w, layer)` is what softmax gives."""
    softmax, calls = torch.nn.functional.softmax, []

    def edited(x, *given, **named):
        w = softmax(x, *given, **named)
        calls.append(0)
        return change(w, (len(calls) - 1) % layers)

    torch.nn.functional.softmax = edited
    try:
        yield
    finally:
        torch.nn.functional.softmax = softmax


def renormalised(w):
    return (w / w.sum(-1, keepdim=True)).nan_to_num(0.0)


def of_heads(heads, w):
    return torch.isin(torch.arange(w.shape[1]), torch.tensor(heads)).reshape(1, -1, 1, 1)


def queries(w):
    """Where the queries of a decoder stand: the last one at the last key."""
    return torch.arange(w.shape[2]).unsqueeze(-1) + w.shape[3] - w.shape[2]


def documents_of(w):
    return TEXT.to_bool()[queries(w).flatten()][:, : w.shape[3]]


# An edit, and what it does to the weights of a layer that it is about.
EDITS = {
    "prefix": (
        lambda **at: ch.edits.knock_out(ch.prefix(2), heads=[1, 3], **at),
        lambda w: renormalised(w * ~(of_heads([1, 3], w) & (torch.arange(w.shape[3]) < 2))),
    ),
    "temperature": (
        lambda **at: ch.edits.temperature(0.5, heads=[0, 2], **at),
        lambda w: torch.where(of_heads([0, 2], w), renormalised(w**2), w),
    ),
    "uniform": (
        lambda **at: ch.edits.uniform(heads=[2], **at),
        lambda w: torch.where(of_heads([2], w), renormalised((w > 0).float()), w),
    ),
    "ablate": (
        lambda **at: ch.edits.ablate(heads=[0, 3], **at),
        lambda w: torch.where(of_heads([0, 3], w), 0.0, w),
    ),
}
OF_DECODERS = {
    "window": (
        lambda **at: ch.edits.keep_only(ch.window(before=3), heads=[1], **at),
        lambda w: torch.where(
            of_heads([1], w), renormalised(w * (torch.arange(w.shape[3]) >= queries(w) - 3)), w
        ),
    ),
    "rows": (
        lambda **at: ch.edits.knock_out(ch.prefix(4), positions=[5, 8], **at),
        lambda w: renormalised(
            w * ~(((queries(w) == 5) | (queries(w) == 8)) & (torch.arange(w.shape[3]) < 4))
        ),
    ),
    "text": (
        lambda **at: ch.edits.keep_only(TEXT, heads=[0, 1], **at),
        lambda w: torch.where(of_heads([0, 1], w), renormalised(w * documents_of(w)), w),
    ),
}


def built(kind):
    model = build(kind, KINDS[kind])
    if kind == "t5":  # which does not scale: keep weights from underflowing to 0
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.mul_(0.3 if name.endswith(("q.weight", "k.weight")) else 1.0)
    return model


def run(model, kind, mask=None):
    given = {"input_ids": ids(), "attention_mask": mask}
    if kind == "t5":
        given["decoder_input_ids"] = ids(T=7)
    return model(**given).logits


def compare(model, kind, layer, name, forward):
    make, change = {**EDITS, **OF_DECODERS}[name]
    results = []
    with torch.no_grad():
        model.set_attn_implementation("eager")
        plain = forward()
        with weights_edited(LAYERS[kind], lambda w, at: change(w) if at == layer else w):
            results.append(forward())
        model.set_attn_implementation("clearhead")
        with ch.intervene(model, [make(layers=[layer])]) as done:
            results.append(forward())
    assert {at.layer for at in done.applied} == {layer}
    return plain, *results


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize(("kind", "layer"), [(k, n) for k in KINDS for n in range(LAYERS[k])])
def test_an_edit_gives_what_edited_weights_give(kind, layer, name):
    model = built(kind)
    plain, right, found = compare(model, kind, layer, name, lambda: run(model, kind))
    torch.testing.assert_close(found, right, rtol=5e-4, atol=5e-4)
    assert (plain - right).abs().max() > 5e-3  # it did something


@pytest.mark.parametrize("name", [*EDITS, *OF_DECODERS])
@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("layer", [0, 1])
def test_with_a_cache_token_by_token(kind, layer, name):
    model = build(kind, KINDS[kind])
    tokens = ids()

    def forward():
        cache, found = None, []
        for part in (tokens[:, :6], *tokens[:, 6:].split(1, 1)):
            said = model(part, past_key_values=cache, use_cache=True)
            cache, logits = said.past_key_values, said.logits
            found.append(logits)
        return torch.cat(found, 1)

    _, right, found = compare(model, kind, layer, name, forward)
    torch.testing.assert_close(found, right, rtol=2e-4, atol=2e-4)
    model.set_attn_implementation("clearhead")
    with torch.no_grad(), ch.intervene(model, [{**EDITS, **OF_DECODERS}[name][0](layers=[layer])]):
        at_once = model(tokens).logits
    torch.testing.assert_close(found, at_once, rtol=2e-4, atol=2e-4)


def mistral():
    """A model whose cache drops what its window of 5 keys has passed."""
    from transformers import AutoModelForCausalLM, MistralConfig

    build("llama", KINDS["llama"])  # which registers clearhead
    torch.manual_seed(0)
    made = MistralConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=37, sliding_window=5, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(made, attn_implementation="clearhead").eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(8.0)
    return model


def place(T):
    return torch.arange(T).expand(T, T)


T_LONG = 17
CELLS = torch.rand(T_LONG, T_LONG, generator=torch.Generator().manual_seed(3)) > 0.6
ABSOLUTE = {
    "rows": (lambda: ch.edits.scale(0.0, positions=[4, 11, 13]), None),
    "rows of a head": (lambda: ch.edits.uniform(positions=[9], heads=[1]), None),
    "prefix": (lambda: ch.edits.knock_out(ch.prefix(1)), place(T_LONG) < 1),
    "not the prefix": (lambda: ch.edits.keep_only(ch.prefix(9)), place(T_LONG) >= 9),
    "lengths": (lambda: ch.edits.keep_only(ch.lengths(keys=11)), place(T_LONG) >= 11),
    "window": (
        lambda: ch.edits.knock_out(ch.window(before=1)),
        place(T_LONG) >= place(T_LONG).mT - 1,
    ),
    "dense": (lambda: ch.edits.knock_out(ch.dense(keep=CELLS), positions=[3, 8, 12, 16]), CELLS),
    "documents": (
        lambda: ch.edits.knock_out(ch.documents([0] * 3 + [1] * 6 + [2, 1] * 4)),
        ch.documents([0] * 3 + [1] * 6 + [2, 1] * 4).to_bool(),
    ),
    "documents and a window": (
        lambda: ch.edits.keep_only(ch.documents(8 * [0] + 9 * [1]) | ch.window(before=0)),
        None,
    ),
}


@pytest.mark.parametrize("name", ABSOLUTE)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("left", [0, 2], ids=["no padding", "padding on the left"])
def test_places_in_the_text_where_a_cache_drops_keys(name, static, left):
    """In steps of several tokens and of one, what the whole text at once gives."""
    from transformers import DynamicCache, StaticCache

    model, text = mistral(), ids(T=T_LONG)
    mask = torch.ones(2, T_LONG, dtype=torch.long)
    mask[0, :left] = 0
    make, removed = ABSOLUTE[name]
    cache = DynamicCache(config=model.config)
    if static:
        cache = StaticCache(config=model.config, max_cache_len=T_LONG)
    with torch.no_grad():
        plain = model(text, attention_mask=mask, use_cache=False).logits
        with ch.intervene(model, [make()]):
            whole = model(text, attention_mask=mask, use_cache=False).logits
        parts, ends = [], [3, 7, 8, 9, 12, *range(13, T_LONG + 1)]
        with ch.intervene(model, [make()]), ch.watch(model, exact_rows=[-1], layers=[0]) as seen:
            for start, end in zip([0, *ends], ends, strict=False):
                given = {"attention_mask": mask[:, :end], "past_key_values": cache}
                parts.append(model(text[:, start:end], **given).logits)
    found = torch.cat(parts, 1)
    torch.testing.assert_close(found[mask > 0], whole[mask > 0], rtol=1e-4, atol=1e-4)
    assert (plain - whole)[mask > 0].abs().max() > 1e-2
    if removed is not None and not static:
        weights = seen[len(ends) - 1].exact_rows[1, :, 0]  # of the last token, on the last five
        assert weights.shape[-1] == 5 and not weights[:, removed[..., -1, -5:]].any()


def test_a_mask_written_out_says_where_it_stands():
    """A function of positions that is not known here, in a cache that drops keys."""
    from transformers import DynamicCache
    from transformers.masking_utils import create_sliding_window_causal_mask

    model, text = mistral(), ids(T=T_LONG)

    def even(b, h, q, k):
        return (q - k) % 3 != 1

    def run(tokens, cache):
        hidden = model.model.embed_tokens(tokens)
        mask = create_sliding_window_causal_mask(
            config=model.config, inputs_embeds=hidden, attention_mask=None,
            past_key_values=cache, and_mask_function=even,
        )  # fmt: skip
        assert type(mask).__name__ == "BooleanMask"
        layer = model.model.layers[0].self_attn
        past = 0 if cache is None else cache.get_seq_length()
        places = torch.arange(past, past + tokens.shape[1]).unsqueeze(0)
        turned = model.model.rotary_emb(hidden, places)
        return layer(hidden, turned, mask[..., : mask.shape[-1]], past_key_values=cache)[0]

    for edit in (ch.edits.scale(0.0, positions=[4, 11]), ch.edits.knock_out(ch.prefix(8))):
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), ch.intervene(model, [edit], must_apply=False):
            whole = run(text, None)
            parts = [run(part, cache) for part in text.split([3, 6, 1, 2, 1, 4], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", DECODERS)
def test_generating(kind):
    """`generate` with an edit is generating token by token with edited weights."""
    model = build(kind, KINDS[kind])
    make, change = OF_DECODERS["window"]
    said = []
    for name in ("eager", "clearhead"):
        model.set_attn_implementation(name)
        given = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        if name == "eager":
            with weights_edited(2, lambda w, at: change(w) if at == 0 else w):
                said.append(model.generate(ids(), **given))
        else:
            with ch.intervene(model, [make(layers=[0])]) as done:
                said.append(model.generate(ids(), **given))
    assert said[0].equal(said[1]) and done.times(0) == 5


def test_weights_that_transformers_returns_are_edited():
    model = build("llama", KINDS["llama"])
    model.set_attn_implementation("clearhead")
    with torch.no_grad(), ch.intervene(model, [ch.edits.knock_out(ch.prefix(3), heads=[2])]):
        weights = model(ids(), output_attentions=True).attentions
    for w in weights:
        assert not w[:, 2, 3:, :3].any() and bool((w[:, 1, :, 0] > 0).all())

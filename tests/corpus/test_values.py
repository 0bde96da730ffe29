"""What heads move equals a dense pass in float64 over eager attention and its projections."""

import copy

import pytest
import torch

import clearhead as ch
from clearhead import demo
from clearhead.corpus.basic import First

from . import dense
from .models import CONTEXT, MODELS, G, H, texts, tokenizer

MASSES = ("first", "self", "previous", "separators", "last_16")
# By layer: the module whose output ends with the values, and W_O, (in, out).
PARTS = {
    "gpt2": lambda model: [(block.attn.c_attn, block.attn.c_proj.weight) for block in model.h],
    "llama": lambda model: [
        (layer.self_attn.v_proj, layer.self_attn.o_proj.weight.T) for layer in model.layers
    ],
}


def eager_run(model, parts, ids):
    """Yield the weights of each layer, (H, T, T), and what every value writes, (H, T, d)."""
    read = []
    handles = [m.register_forward_hook(lambda _, __, out: read.append(out[0])) for m, _ in parts]
    with torch.no_grad():
        weights = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    for handle in handles:
        handle.remove()
    for of_layer, out, (_, matrix) in zip(weights, read, parts, strict=True):
        D = matrix.shape[0] // H
        heads = G if out.shape[-1] == G * D else H
        values = out[:, -heads * D :].unflatten(-1, (heads, D)).transpose(0, 1)
        yield of_layer[0], values.repeat_interleave(H // heads, 0) @ matrix.detach().view(H, D, -1)


def numbers_of(weights, written, ids, words):
    """For each metric of `values`: its numbers, (H, T), and the queries that count, (T,)."""
    T = len(ids)
    moved = weights * written.norm(dim=-1).unsqueeze(1)
    shares = moved / moved.sum(-1, keepdim=True)
    plain, after = (dense.values_of(x, ids, words, True, CONTEXT) for x in (weights, shares))
    numbers = {name: (plain[name][0], plain[name][2]) for name in MASSES}
    numbers |= {f"norm_weighted_{name}": (after[name][0], after[name][2]) for name in MASSES}
    o = weights @ written
    change = (o - o.mean(1, keepdim=True)).square().sum(-1)
    varying = change / o.square().sum(-1).mean(-1, keepdim=True)
    return numbers | {"varying": (varying, torch.full((T,), T > 1))}


@pytest.mark.parametrize("name", PARTS)
def test_what_heads_move_equals_a_dense_pass(name, tmp_path):
    around = name == "llama"
    tok, contents = tokenizer(around), texts(20)
    spelling = {i: w for w, i in tok.get_vocab().items()}
    torch.manual_seed(3)
    eager = MODELS[name](attn_implementation="eager").eval().double()
    expected = {}
    for number, content in enumerate(contents):
        ids = tok(content, add_special_tokens=False)["input_ids"]
        for context in dense.contexts_of(ids, CONTEXT, ([0], [1]) if around else ([], [])):
            words = [spelling[i] for i in context]
            for layer, part in enumerate(eager_run(eager, PARTS[name](eager), context)):
                numbers = numbers_of(*part, context, words)
                dense.add_numbers(expected, layer, number, numbers)
    torch.manual_seed(3)
    model = MODELS[name](attn_implementation="clearhead").eval()
    survey = ch.survey(
        model, contents, out=tmp_path, tokenizer=tok, context=CONTEXT, metrics="values"
    )
    heads = {(r["layer"], r["head"], r["metric"]): r for r in survey.heads.to_pylist()}
    assert heads.keys() == expected.keys()
    for key, (parts, of_text) in expected.items():
        every, row = torch.cat(parts), heads[key]
        dense.assert_row(row, dense.interval_of(every, of_text, len(contents)), 0, 1)
        assert key[2] in MASSES or row["uniform"] is None
        if key[2] == "varying":  # smaller values count in the first bin
            every = every.clamp(min=1.05e-4)
        for bar in survey.histogram(*key).to_pylist():  # a value at an edge may round
            near = 1e-4 * bar["high"] + 1e-6
            inner = ((every > bar["low"] + near) & (every < bar["high"] - near)).sum()
            outer = ((every >= bar["low"] - near) & (every <= bar["high"] + near)).sum()
            assert inner <= bar["count"] <= outer, (key, bar)


def test_two_sets_share_masses(tmp_path):
    survey = ch.survey(
        demo.load(), ["The owl saw a fox. The fox ran."], out=tmp_path, metrics="basic, values"
    )
    names = [row["metric"] for row in survey.metrics.to_pylist()]
    assert len(names) == len(set(names)) and {"evenness", "first", "norm_weighted_first"} < set(
        names
    )
    rows = survey.query(
        "select mean from heads where metric in ('varying', 'norm_weighted_first')"
    ).rows
    assert rows and all(0 < mean < 1 for (mean,) in rows)
    with pytest.raises(ch.BadValue, match="Two metrics have the name 'first'"):
        ch.survey(demo.load(), ["The owl."], out=tmp_path, metrics=[First(), "values"])


def test_a_model_without_a_projection_is_refused_before_the_texts_are_read(tmp_path):
    def no_text():
        raise AssertionError("a text was read")
        yield

    model = copy.deepcopy(MODELS["llama"](attn_implementation="clearhead").eval())
    for layer in model.layers:
        layer.self_attn.o_proj = torch.nn.Sequential(torch.nn.Sigmoid(), layer.self_attn.o_proj)
    options = {"out": tmp_path / "out", "tokenizer": tokenizer(True)}
    with pytest.raises(ch.BadValue, match="'values', which needs to know what heads") as error:
        ch.survey(model, no_text(), metrics="basic,values", **options)
    assert "returned other numbers" in str(error.value) or "No output projection" in str(error)
    assert not (tmp_path / "out").exists()
    assert ch.survey(model, ["the owl saw a fox"], **options).heads

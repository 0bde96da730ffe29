"""What heads have outside windows, and how far they copy, equals a dense pass in float64."""

import random

import pytest
import torch

import clearhead as ch

from . import dense
from .models import MODELS, WORDS, G, H, tokenizer

SINKS, CUE, NEAR, CONTEXT = 4, 4, 16, 60
# By layer: the modules whose outputs end with keys and values, or are these.
PARTS = {
    "gpt2": lambda model: [block.attn.c_attn for block in model.h],
    "llama": lambda model: [layer.self_attn.v_proj for layer in model.layers],
    "bert": lambda model: [layer.attention.self.value for layer in model.encoder.layer],
}


def texts(count):
    """Texts that repeat earlier parts, and random ones."""
    drawn = random.Random(5)
    for number in range(count):
        words = drawn.choices(WORDS, k=3 + (number * 29) % 80)
        at = drawn.randrange(len(words))
        yield " ".join(words + words[at : at + 9] + drawn.choices(WORDS, k=number % 3))


def eager_run(model, parts, ids):
    """Yield the weights of each layer, (H, T, T), and the values of each head, (H, T, Dv)."""
    read = []
    handles = [m.register_forward_hook(lambda _, __, out: read.append(out[0])) for m in parts]
    with torch.no_grad():
        weights = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    for handle in handles:
        handle.remove()
    for of_layer, out in zip(weights, read, strict=True):
        D = 48 // H
        heads = G if out.shape[-1] == G * D else H
        values = out[:, -heads * D :].unflatten(-1, (heads, D)).transpose(0, 1)
        yield of_layer[0], values.repeat_interleave(H // heads, 0)


def numbers_of(weights, values, ids, causal):
    """For each metric of `long`: its numbers, (H, T), and the queries that count, (T,)."""
    T = len(ids)
    q, k = torch.arange(T)[:, None], torch.arange(T)[None]
    allowed = k <= q if causal else torch.ones(T, T, dtype=torch.bool)
    numbers = {}
    outside = (k >= SINKS) & ((q - k).abs() >= 16) & allowed
    rest = (weights * ~outside) / (weights * ~outside).sum(-1, keepdim=True)
    z, near = weights @ values, rest @ values
    counts = outside.any(-1)
    numbers["outside_16"] = (weights * outside).sum(-1), counts
    numbers["error_16"] = (z - near).norm(dim=-1) / z.norm(dim=-1), counts
    copies = torch.zeros(T, T, dtype=torch.bool)
    for i in range(CUE - 1, T - 1):
        for j in range(CUE, i - NEAR):
            copies[i, j] = ids[j - CUE : j + 1] == ids[i - CUE + 1 : i + 2]
    largest = weights.argmax(-1)
    numbers["copied"] = (weights * copies).sum(-1), copies.any(-1)
    hits = copies[torch.arange(T), largest].double()
    numbers["retrieval"] = hits, copies.any(-1)
    return numbers


@pytest.mark.parametrize("name", PARTS)
def test_long_equals_a_dense_pass(name, tmp_path):
    around = name != "gpt2"
    tok, contents = tokenizer(around), list(texts(12))
    torch.manual_seed(3)
    eager = MODELS[name](attn_implementation="eager").eval().double()
    expected = {}
    for number, content in enumerate(contents):
        ids = tok(content, add_special_tokens=False)["input_ids"]
        for context in dense.contexts_of(ids, CONTEXT, ([0], [1]) if around else ([], [])):
            for layer, part in enumerate(eager_run(eager, PARTS[name](eager), context)):
                numbers = numbers_of(*part, context, name != "bert")
                dense.add_numbers(expected, layer, number, numbers)
    torch.manual_seed(3)
    model = MODELS[name](attn_implementation="clearhead").eval()
    survey = ch.survey(
        model, contents, out=tmp_path, tokenizer=tok, context=CONTEXT, metrics="long"
    )
    heads = {(r["layer"], r["head"], r["metric"]): r for r in survey.heads.to_pylist()}
    assert heads.keys() == expected.keys()
    for key, (parts, of_text) in expected.items():
        every, row = torch.cat(parts), heads[key]
        most = None if key[2].startswith("error") else 1
        dense.assert_row(row, dense.interval_of(every, of_text, len(contents)), 0, most)
        assert (row["uniform"] is None) == key[2].startswith(("error", "retrieval"))
    assert all(any(heads[k]["mean"] > 0 for k in heads if k[2] == m) for m in {k[2] for k in heads})


def test_a_model_of_16_bits_has_the_errors_of_its_numbers(tmp_path):
    """Rounding its output to 16 bits is not an error of forgetting."""
    drawn = torch.Generator().manual_seed(0)
    T = 40
    q, k = torch.randn(2, 1, H, T, 8, generator=drawn).bfloat16()
    v = (2 + 0.05 * torch.randn(1, G, T, 8, generator=drawn)).bfloat16()

    class Drawn(torch.nn.Module):
        def forward(self, input_ids):
            return ch.attention(q, k[:, :G], v, mask=ch.causal)

    content = " ".join(WORDS[i % len(WORDS)] for i in range(T))
    survey = ch.survey(Drawn(), [content], out=tmp_path, tokenizer=tokenizer(), metrics="long")
    keys, values = (x.double().repeat_interleave(H // G, 1)[0] for x in (k[:, :G], v))
    scores = (q[0].double() @ keys.mT / 8**0.5).masked_fill(~torch.ones(T, T).tril().bool(), -1e9)
    error, counts = numbers_of(scores.softmax(-1), values, list(range(T)), True)["error_16"]
    rows = survey.query("select mean from heads where metric = 'error_16' order by head").rows
    assert [mean for (mean,) in rows] == pytest.approx(error[:, counts].mean(-1).tolist(), 1e-3)


def test_a_short_context_is_refused(tmp_path):
    with pytest.raises(ch.BadValue, match="context=21 or more"):
        ch.survey(
            MODELS["gpt2"](), ["the owl"], out=tmp_path, tokenizer=tokenizer(), context=20,
            metrics="long",
        )  # fmt: skip

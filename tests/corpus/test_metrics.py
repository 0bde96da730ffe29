"""Every number of every metric equals a dense pass in float64 over eager attention."""

import math

import pytest
import torch

import clearhead as ch

from . import dense
from .models import CONTEXT, MODELS, texts, tokenizer


def dense_pass(name, tok, around, contents):
    """For each (layer, head, metric): the values of all texts, their uniform values and counts."""
    torch.manual_seed(3)
    model = MODELS[name](attn_implementation="eager").eval().double()
    spelling = {i: w for w, i in tok.get_vocab().items()}
    causal = name in ("gpt2", "llama")
    rows = {}
    for number, content in enumerate(contents):
        ids = tok(content, add_special_tokens=False)["input_ids"]
        for context in dense.contexts_of(ids, CONTEXT, around):
            with torch.no_grad():
                out = model(input_ids=torch.tensor([context]), output_attentions=True)
            words = [spelling[i] for i in context]
            for layer, weights in enumerate(out.attentions):
                numbers = dense.values_of(weights[0], context, words, causal, CONTEXT)
                for metric, (values, uniform, counts) in numbers.items():
                    for head in range(len(values)):
                        row = rows.setdefault((layer, head, metric), ([], [], []))
                        row[0].append((number, values[head][counts]))
                        row[1].append(None if uniform is None else uniform[counts].sum())
                        row[2].append((number, int(counts.sum())))
    return rows


@pytest.mark.parametrize("name", [
    "llama", "t5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "bert")),
])  # fmt: skip
def test_every_number_equals_a_dense_pass(name, tmp_path):
    around = name in ("bert", "llama")
    tok, contents = tokenizer(around), texts()
    torch.manual_seed(3)
    model = MODELS[name](attn_implementation="clearhead").eval()
    survey = ch.survey(
        model, contents, out=tmp_path, tokenizer=tok, context=CONTEXT, shard_tokens=200
    )
    expected = dense_pass(name, tok, ([0], [1]) if around else ([], []), contents)
    heads = {(r["layer"], r["head"], r["metric"]): r for r in survey.heads.to_pylist()}
    histograms = {}
    for bar in survey.query("select * from histograms").to_pylist():
        histograms.setdefault((bar["layer"], bar["head"], bar["metric"]), []).append(bar)
    assert survey.histogram(1, 2, "entropy").to_pylist() == histograms[1, 2, "entropy"]
    tied = {
        key[:2]: float(sum(x.sum() for _, x in expected[key][0]))
        for key in list(expected)
        if key[2] == "tied"
    }
    expected = {key: row for key, row in expected.items() if key[2] != "tied"}
    error = 1e-4 if name == "t5" else 2e-5  # T5 does not scale its scores
    counted = {key for key, (values, _, _) in expected.items() if sum(len(v) for _, v in values)}
    assert heads.keys() == counted
    for key in counted:
        values, uniform, counts = expected[key]
        sums, queries = [0.0] * len(contents), [0] * len(contents)
        for (text, x), (_, n) in zip(values, counts, strict=True):
            sums[text] += float(x.sum())
            queries[text] += n
        wanted, row = dense.interval(sums, queries), heads[key]
        for column in ("queries", "texts"):
            assert row[column] == wanted[column], (key, column)
        if key[2].startswith("looks_"):  # two nearly equal weights may change places
            slack = tied[key[:2]] / wanted["queries"]
            assert row["mean"] == pytest.approx(wanted["mean"], abs=slack + 1e-6), key
            if slack:
                continue
        for column in ("mean", "mean_of_texts", "sd_of_texts"):
            assert row[column] == pytest.approx(wanted[column], rel=error, abs=2e-6), (key, column)
        limits = {"entropy": (0, math.log(CONTEXT)), "support": (1, CONTEXT)}.get(key[2], (0, 1))
        ends = dense.ends_of(wanted, *limits)
        assert (row["low"], row["high"]) == pytest.approx(ends, rel=1e-3, abs=1e-5), key
        if uniform[0] is None:
            assert row["uniform"] is None
        else:
            baseline = float(sum(uniform)) / wanted["queries"]
            assert row["uniform"] == pytest.approx(baseline, rel=1e-5, abs=1e-6), key
        every = torch.cat([x for _, x in values])
        histogram = histograms[key]
        assert sum(b["count"] for b in histogram) == len(every)
        if not key[2].startswith("looks_"):
            for bar in histogram:  # a value at an edge may round to the other side
                near = 1e-5 * max(1, bar["high"])
                inner = ((every > bar["low"] + near) & (every < bar["high"] - near)).sum()
                outer = ((every >= bar["low"] - near) & (every <= bar["high"] + near)).sum()
                assert inner <= bar["count"] <= outer, (key, bar)
            ordered = every.sort().values
            for q in (0.05, 0.25, 0.5, 0.75, 0.95):
                exact = float(ordered[max(0, math.ceil(q * len(ordered)) - 1)])
                bars = [b for b in histogram if b["low"] - 1e-5 <= exact <= b["high"] + 1e-5]
                found = row[f"q{round(100 * q):02}"]
                assert any(b["low"] - 1e-5 <= found <= b["high"] + 1e-5 for b in bars), (key, q)

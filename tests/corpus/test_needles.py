"""A survey of needles: what it reads, and its scores from dense weights."""

import random

import pytest
import torch

import clearhead as ch
from clearhead.corpus import Needles
from clearhead.corpus.corpus import FOLDER, read_shard

from .models import MODELS, WORDS, H, tokenizer
from .test_long import CUE, NEAR, numbers_of

N, CONTEXT, COUNT = 7, 60, 5


def haystacks():
    drawn = random.Random(4)
    return [" ".join(drawn.choices(WORDS[:7], k=200)), "the owl", "fox"]


def test_scores_of_needles(tmp_path):
    torch.manual_seed(3)
    model = MODELS["llama"](attn_implementation="clearhead").eval()
    options = {"tokenizer": tokenizer(True), "context": CONTEXT, "metrics": "long", "out": tmp_path}
    ch.survey(model, Needles(haystacks(), count=2, tokens=N), **options)
    survey = ch.survey(model, Needles(haystacks(), count=COUNT, tokens=N), **options)  # adds three
    assert survey.manifest.corpus["needles"] == {"count": COUNT, "tokens": N}
    shards = [read_shard(tmp_path / FOLDER / entry.corpus) for entry in survey.manifest.shards]
    contexts = torch.cat([shard.ids for shard in shards]).long().view(COUNT, CONTEXT)
    depths = []
    for context in contexts.tolist():
        body, needle = context[1 : -1 - N], context[-1 - N : -1]
        (at,) = (i for i in range(len(body)) if body[i : i + N] == needle)
        depths.append(at)
        assert len({*needle}) == N and not {*needle} & {*body[:at], *body[at + N :], 0, 1}
        assert len(body) - at - N > NEAR
    assert len({*depths}) > 2
    torch.manual_seed(3)
    eager = MODELS["llama"](attn_implementation="eager").eval().double()
    with torch.no_grad():
        layers = eager(input_ids=contexts, output_attentions=True).attentions
    for layer, weights in enumerate(layers):
        numbers = [
            numbers_of(of, torch.ones(H, CONTEXT, 1).double(), ids, True)
            for of, ids in zip(weights, contexts.tolist(), strict=True)
        ]
        for metric in ("copied", "retrieval"):
            values = torch.cat([x[metric][0][:, x[metric][1]] for x in numbers], 1)
            assert values.shape == (H, COUNT * (N - CUE))
            rows = survey.query(
                "select mean, queries from heads where layer = ? and metric = ? order by head",
                [layer, metric],
            ).rows
            assert [mean for mean, _ in rows] == pytest.approx(values.mean(1).tolist(), rel=5e-5)
            assert [n for _, n in rows] == [values.shape[1]] * H


def test_only_needles_are_copied(tmp_path):
    """The haystack repeats 12 tokens, and the repeats are left out; a broken file is named."""
    again, broken = tmp_path / "again.txt", tmp_path / "broken.txt"
    again.write_text(" ".join(random.Random(1).choices(WORDS[:7], k=12) * 30))
    broken.write_bytes(b"\xff")
    torch.manual_seed(3)
    model = MODELS["llama"](attn_implementation="clearhead").eval()
    survey = ch.survey(
        model, Needles([broken, again], count=9, tokens=N), tokenizer=tokenizer(),
        context=CONTEXT, metrics="long", out=tmp_path / "out",
    )  # fmt: skip
    queries = "select distinct metric, queries from heads where metric in ('copied', 'retrieval')"
    assert {n for _, n in survey.query(queries).rows} == {9 * (N - CUE)}
    assert survey.manifest.corpus["skipped texts"] == [["broken.txt", "byte 0 is not UTF-8"]]


def test_needles_that_do_not_fit_are_refused(tmp_path):
    model = MODELS["gpt2"](attn_implementation="clearhead").eval()
    options = {"tokenizer": tokenizer(), "out": tmp_path}
    with pytest.raises(ch.BadValue, match=r"has 16 tokens, and a context 48"):
        ch.survey(model, Needles(haystacks()), context=48, **options)
    with pytest.raises(ch.BadValue, match=r"No text for needles has 50 tokens"):
        ch.survey(model, Needles(["the owl"], tokens=7), **options)
    with pytest.raises(ch.BadValue, match=r"leaves 11 of 18 tokens"):
        ch.survey(model, Needles(haystacks(), tokens=12), **options)
    with pytest.raises(ch.BadValue, match="tokens=4"):
        Needles("the owl", tokens=4)

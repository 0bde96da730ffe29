"""A survey of random repeated tokens: what it reads, and its scores by hand."""

import pytest
import torch

import clearhead as ch
from clearhead.corpus import RandomRepeats
from clearhead.corpus.corpus import FOLDER, read_shard

from .models import MODELS, H, tokenizer

N = 8


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_scores_of_random_repeats(name, tmp_path):
    start = int(name == "llama")  # which has <s> before, and </s> after each context
    tok = tokenizer(around=bool(start))
    options = {"tokenizer": tok, "context": 20, "shard_tokens": 40, "out": tmp_path}
    torch.manual_seed(3)
    model = MODELS[name](attn_implementation="clearhead").eval()
    ch.survey(model, RandomRepeats(texts=4, tokens=N), **options)
    survey = ch.survey(model, RandomRepeats(texts=7, tokens=N), **options)  # adds three
    assert survey.manifest.corpus["random repeats"] == {"texts": 7, "tokens": N}
    shards = [read_shard(tmp_path / FOLDER / entry.corpus) for entry in survey.manifest.shards]
    contexts = torch.cat([shard.ids for shard in shards]).long().view(7, -1)
    halves = contexts[:, start : start + 2 * N].view(7, 2, N)
    assert torch.equal(halves[:, 0], halves[:, 1])
    assert all(len(half.unique()) == N for half in halves[:, 0])
    assert len(halves[:, 0].unique(dim=0)) == 7
    assert not start or not set(halves.flatten().tolist()) & {0, 1}
    torch.manual_seed(3)
    eager = MODELS[name](attn_implementation="eager").eval().double()
    with torch.no_grad():
        layers = eager(input_ids=contexts, output_attentions=True).attentions
    q = torch.arange(N, 2 * N) + start
    copied = q[q - N > 0]  # key 0 is in no group
    for layer, weights in enumerate(layers):
        previous = weights[:, :, 1:, :-1].diagonal(dim1=2, dim2=3).mean((0, 2))
        wanted = {
            "induction": weights[:, :, q, q - N + 1].mean((0, 2)),
            "duplicate": weights[:, :, copied, copied - N].mean((0, 2)),
            "previous": previous,
        }
        for metric, means in wanted.items():
            rows = survey.query(
                "select mean, queries from heads where layer = ? and metric = ? order by head",
                [layer, metric],
            ).rows
            assert [mean for mean, _ in rows] == pytest.approx(means.tolist(), rel=2e-5), metric
            count = {"induction": N, "duplicate": len(copied), "previous": contexts.shape[1] - 1}
            assert [n for _, n in rows] == [7 * count[metric]] * H


def test_repeats_that_do_not_fit_are_refused(tmp_path):
    model = MODELS["gpt2"](attn_implementation="clearhead").eval()
    options = {"tokenizer": tokenizer(), "out": tmp_path}
    with pytest.raises(ch.BadValue, match=r"^11 random tokens.*\n.*\n.*at most 9 tokens"):
        ch.survey(model, RandomRepeats(tokens=11), context=19, **options)
    with pytest.raises(ch.BadValue, match=r"^50 random tokens.*of 18 in the vocabulary"):
        ch.survey(model, RandomRepeats(), **options)
    with pytest.raises(ch.BadValue, match="texts=0"):
        RandomRepeats(texts=0)

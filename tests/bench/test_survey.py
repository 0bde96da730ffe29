"""The eager pipeline of `bench.survey` computes what a survey computes."""

import torch

import clearhead as ch
from bench import survey
from clearhead.corpus.reader import open_reader
from tests.corpus.models import MODELS, tokenizer


def test_the_eager_pipeline_computes_the_same_state():
    ch.hf.register()
    torch.manual_seed(3)
    model = MODELS["llama"](attn_implementation="clearhead").eval()
    reader = open_reader(model, tokenizer(True))
    shard = survey.library_shard(reader, 19, 3)
    assert shard.lengths.tolist() == [19, 19, 19]
    runs = survey.runs(reader, shard, ["basic"], eager=True)
    assert runs[survey.MODEL]() is None
    own, eager = runs["`basic`"](), runs[survey.EAGER]()
    assert len(own.layers) == len(eager.layers) == 2
    for a, b in zip(own.layers, eager.layers, strict=True):
        torch.testing.assert_close(a.sums, b.sums, rtol=1e-5, atol=1e-5)
        assert a.queries.equal(b.queries) and a.counts.sum(-1).equal(b.counts.sum(-1))
        assert (a.counts - b.counts).abs().sum() <= 4  # a value at an edge may round
    assert model.config._attn_implementation == "clearhead"

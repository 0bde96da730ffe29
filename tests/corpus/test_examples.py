"""The examples that are stored are those of a plain sort of all queries; deciles are samples."""

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.core.stats import TopWeights
from clearhead.corpus import Bins, Metric
from clearhead.corpus.basic import First
from clearhead.corpus.examples import (
    BANDS,
    EXAMPLE,
    IN_DECILE,
    LARGEST,
    OF_LARGEST,
    SAMPLE,
    LayerExamples,
    Queries,
    largest,
    sampled,
)
from clearhead.corpus.metric import Batch

from .models import MODELS, tokenizer

H, SIZES = 2, [(2, 40), (1, 3), (3, 25), (2, 40), (1, 1), (2, 300)]


def collected(seeds, sizes):
    """The examples of batches of random values, and each counted query with its values."""
    layer, counted = LayerExamples(3, H, [1, 4]), []
    for number, (B, T) in zip(seeds, sizes, strict=True):
        random = torch.Generator().manual_seed(number)
        # Few different values, so that equal ones compete.
        values = [torch.randint(0, 60, (B, H, T), generator=random) / 60 for _ in range(2)]
        counts = [torch.rand(B, T, generator=random) < share for share in (0.8, 0.3)]
        keys = torch.arange(B * H * T * 4).view(B, H, T, 4)[..., :T]
        batch = Batch(
            torch.arange(B * T).view(B, T), [number] * B, list(range(B)), {}, torch.zeros(B, T) > 0
        )
        queries = Queries(7, batch, torch.full((B, T), 5))
        layer.begin(counts, queries, TopWeights(keys / 1e4, keys))
        every, where = torch.rand(6, B, H, T), torch.ones(6, B, T, dtype=torch.bool)
        every[[1, 4]], where[[1, 4]] = torch.stack(values), torch.stack(counts)
        for numbers in [slice(0, 6)] if number % 2 else [slice(0, 2), slice(2, 3), slice(3, 6)]:
            layer.add(numbers, every[numbers], where[numbers])
        layer.select()
        for column in range(2):
            for b, t in counts[column].nonzero().tolist():
                query = int(queries.hash[b, t]), number, b, t
                numbers = values[column][b, :, t].tolist()
                counted.append((column, query, numbers, keys[b, :, t].tolist()))
    return layer, counted


def test_batches_of_any_size_select_as_a_plain_sort():
    layer, counted = collected(range(6), SIZES)
    of_column = [sorted(row[1:] for row in counted if row[0] == column) for column in range(2)]
    first = [{row[0] for row in own[:SAMPLE]} for own in of_column]
    assert [len(x) for x in first] == [SAMPLE, SAMPLE]
    names = ("hash", "text", "context", "query")
    rows = {tuple(row[name] for name in names): row for row in layer.sample}
    assert set(rows) == first[0] | first[1] and list(rows) == sorted(rows)
    for column, own in enumerate(of_column):
        known = {query: (numbers, keys) for query, numbers, keys in own}
        for query, row in rows.items():
            values = row["values"][:, column]
            if query not in known:
                assert np.isnan(values).all()
                continue
            numbers, keys = known[query]
            assert values.tolist() == np.float32(numbers).tolist()
            assert [x[: len(keys[0])] for x in row["keys"].tolist()] == keys
    expected = []
    for h in range(H):
        for column, own in enumerate(of_column):
            for band, low in enumerate(BANDS):
                end = [*BANDS, 10**9][band + 1]
                of_band = [(-n[h], q) for q, n, _ in own if low <= q[3] < end]
                expected += [
                    (h, [1, 4][column], LARGEST + band, np.float32(-value), *query)
                    for value, query in sorted(of_band)[:OF_LARGEST]
                ]
    fields = ("head", "metric", "stratum", "value", *names)
    assert [tuple(row[name] for name in fields) for row in layer.largest] == expected
    assert set(layer.largest["layer"]) == {3} and set(layer.largest["token_class"]) == {5}


def test_parts_merge_to_the_whole():
    complete, _ = collected(range(6), SIZES)
    parts = [collected(range(a, b), SIZES[a:b])[0] for a, b in ((3, 6), (0, 3))]
    merged = sampled(np.concatenate([part.sample for part in parts]))
    for name in merged.dtype.names:
        assert np.array_equal(merged[name], complete.sample[name], equal_nan=name == "values")
    of_parts = largest(np.concatenate([part.largest for part in parts]))
    assert of_parts.dtype == EXAMPLE and np.array_equal(of_parts, complete.largest)


class Skewed(Metric):
    """Most queries are 0, some are 1: an example of each value would say otherwise."""

    name, bins = "skewed", Bins()

    def values(self, call):
        B, T = call.batch.ids.shape
        rare = torch.tensor(
            [
                [(text * 31 + context * 17 + t) % 29 == 0 for t in range(T)]
                for text, context in zip(call.batch.texts, call.batch.contexts, strict=True)
            ]
        )
        H = 1 if call.problem is None else call.problem.H
        return rare.double().unsqueeze(1).expand(B, H, T)


@pytest.fixture(scope="module")
def skewed(tmp_path_factory):
    model, tok = MODELS["llama"](attn_implementation="clearhead").eval(), tokenizer()
    words = sorted(tok.get_vocab())[3:]
    texts = [" ".join(words[(i * 5 + k) % len(words)] for k in range(19)) for i in range(90)]
    surveys = []
    for seed in range(3):
        out = tmp_path_factory.mktemp("skewed")
        metrics = [Skewed(), First()]
        surveys.append(
            ch.survey(model, texts, out=out, tokenizer=tok, context=19, seed=seed, metrics=metrics)
        )
    return surveys


def test_a_decile_is_a_uniform_sample(skewed):
    """Ones are 1/29 of all queries, so a third of the top decile."""
    means = []
    for survey in skewed:
        rows = survey.examples(1, 2, metric="skewed", decile=9, n=20).to_pylist()
        assert len(rows) == IN_DECILE
        means.append(sum(row["value"] for row in rows) / len(rows))
        for decile in range(8):
            lower = survey.examples(1, 2, metric="skewed", decile=decile, n=20).to_pylist()
            assert {row["value"] for row in lower} == {0.0}
    assert 0.2 < sum(means) / len(means) < 0.5


def test_no_query_is_in_two_deciles(skewed):
    for metric in ("skewed", "first"):
        rows = [
            (row["text"], row["context"], row["query"])
            for decile in range(10)
            for row in skewed[0].examples(0, 1, metric=metric, decile=decile, n=20).to_pylist()
        ]
        assert len(rows) == len(set(rows)) == SAMPLE


def test_the_largest_are_of_all_positions(skewed):
    survey = skewed[0]
    rows = survey.examples(0, 1, metric="first", n=12).to_pylist()
    bands = [sum(row["query"] >= first for first in BANDS) for row in rows]
    assert [bands.count(band) for band in (1, 2, 3)] == [4, 4, 4]
    assert [row["value"] for row in rows] == sorted((row["value"] for row in rows), reverse=True)
    late = survey.examples(0, 1, metric="first", n=5, where="query >= 16").to_pylist()
    assert len(late) == 5 and min(row["query"] for row in late) >= 16
    everything = survey.query(
        "select max(value) from examples where layer = 0 and head = 1 and metric = 'first' "
        "and query >= 16"
    )
    assert late[0]["value"] == everything.rows[0][0]


def test_examples_are_filtered_by_text_class_and_name(skewed):
    survey = skewed[0]
    condition = "token_class = 'start' and name in ('text 3', 'text 4', 'text 5')"
    rows = survey.examples(0, 1, metric="first", decile=4, n=20, where="token_class <> 'first'")
    assert len(rows)
    every = [
        row
        for decile in range(10)
        for row in survey.examples(
            0, 1, metric="first", decile=decile, n=20, where=condition
        ).to_pylist()
    ]
    assert every and {row["text"] for row in every} <= {3, 4, 5}
    for row in every:
        assert survey.context(row["text"], row["context"])[row["query"]] == row["token"]
        assert row["token_class"] == "start"
    with pytest.raises(ch.BadValue, match="The query of"):
        survey.examples(0, 1, metric="first", where="nothing > 3")
    with pytest.raises(ch.BadValue, match="n is the number of examples, 1 to 20"):
        survey.examples(0, 1, metric="first", n=21)

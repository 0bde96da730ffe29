"""The rows of examples, computed again, are those of eager attention, and of the survey."""

import pytest
import torch

import clearhead as ch
from clearhead.corpus import Bins, Table
from clearhead.corpus.basic import First

from .models import CONTEXT, MODELS, texts, tokenizer


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(3)
    model = MODELS["llama"](attn_implementation="clearhead").eval()
    eager = MODELS["llama"](attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    return model, eager


@pytest.fixture(scope="module")
def survey(models, tmp_path_factory):
    out, tok = tmp_path_factory.mktemp("survey"), tokenizer(True)
    return ch.survey(models[0], texts(20), out=out, tokenizer=tok, context=CONTEXT)


def test_rows_of_examples(survey, models):
    model, eager = models
    columns = "layer, head, text, context, query, keys, weights"
    sql = f"select {columns} from examples where metric in ('entropy', 'first') and rank = 0"
    examples = survey.query(sql)
    rows = survey.example_rows(model, examples, tokenizer=tokenizer(True))
    assert len(rows) == len(examples) > 100
    words = tokenizer(True).get_vocab()
    weights = {}
    for example, row in zip(examples.to_pylist(), rows, strict=True):
        place = example["text"], example["context"]
        if place not in weights:
            ids = torch.tensor([[words[word] for word in survey.context(*place)]])
            with torch.no_grad():
                weights[place] = eager(input_ids=ids, output_attentions=True).attentions
        exact = weights[place][example["layer"]][0, example["head"], example["query"]]
        torch.testing.assert_close(row, exact, rtol=1e-4, atol=1e-6)
        stored = torch.tensor(example["weights"])
        torch.testing.assert_close(row[example["keys"]], stored, rtol=1e-5, atol=1e-7)


def test_values_beyond_the_bins_are_in_deciles_and_not_in_quantiles(models, tmp_path):
    class Scaled(First):
        name, bins = "scaled", Bins(0.2, 0.4, bounds=(0.0, None))

    metrics, tok = [Scaled(), First()], tokenizer(True)
    survey = ch.survey(
        models[0], texts(9), out=tmp_path, tokenizer=tok, context=19, metrics=metrics
    )
    of_head = "layer = 1 and head = 2 and metric ="
    stored = survey.query(
        f"select distinct text, context, query from examples where {of_head} 'scaled'"
    )
    deciles = [survey.examples(1, 2, metric="scaled", decile=i, n=20).rows for i in range(10)]
    assert {row[6:9] for rows in deciles for row in rows} | {
        row[6:9] for row in survey.examples(1, 2, metric="scaled", n=20).rows
    } == set(stored.rows)
    assert min(row[5] for row in deciles[0]) < 0.2 and max(row[5] for row in deciles[9]) > 0.4
    names = "q05, q50, q95"
    (scaled, exact) = (
        survey.query(f"select {names} from heads where {of_head} '{name}'").rows[0]
        for name in ("scaled", "first")
    )
    for quantile, right in zip(scaled, exact, strict=True):
        assert (
            quantile is None
            if not 0.21 < right < 0.39
            else quantile == pytest.approx(right, abs=0.01)
        )
    assert None in scaled


def test_a_metric_without_a_query_has_no_examples(survey):
    for decile in (None, 0, 9):
        assert len(survey.examples(1, 2, metric="next", decile=decile)) == 0
        assert len(survey.examples(1, 2, metric="entropy", decile=decile, n=1)) == 1


def test_the_rows_of_another_model_and_of_no_example_are_refused(survey, models):
    examples = survey.examples(1, 2, metric="largest", n=2)
    assert len(survey.example_rows(models[0], examples, tokenizer=tokenizer(True))) == 2
    with pytest.raises(ch.BadValue, match=r"no column 'query'(.|\n)*layer, head, text, context"):
        few = Table(("layer", "head", "text", "context"), ((0, 0, 0, 0),))
        survey.example_rows(models[0], few, tokenizer=tokenizer(True))
    other = MODELS["llama"](attn_implementation="clearhead").eval()
    with pytest.raises(ch.BadValue, match="with these weights"):
        survey.example_rows(other, examples, tokenizer=tokenizer(True))

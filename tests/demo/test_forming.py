"""When heads of a storyteller form: the rates along a training, and what lesson 13 says of them."""

import json
import re
from pathlib import Path

import pytest
import torch

import clearhead as ch
from examples.storyteller import forming
from examples.storyteller.data import Stories, stories
from examples.storyteller.measure import hit_rates
from examples.storyteller.train import Recipe, Training, run

LESSON = Path(forming.__file__).parents[2] / "lessons" / "13-training.md"
TABLE = Path(forming.__file__).with_name("forming.json")


def test_the_rates_are_those_of_the_model_at_each_step(tmp_path):
    pytest.importorskip("duckdb", reason="the numbers of a training are in Parquet files")
    recipe = Recipe(steps=4, batch=2, sizes={"d": 32, "layers": 2, "heads": 4, "context": 128})
    measured = forming.train_and_measure(tmp_path, recipe, every=2, held_out=3)
    assert [*measured] == [0, 2, 4]
    training = Training(recipe, Stories(recipe.seed))
    run(training, progress=False)
    expected = hit_rates(
        training.model.eval(), training.source.vocabulary, stories(recipe.seed, 3, "held-out")
    )
    history = ch.monitor.read(tmp_path)
    assert history.steps == [0, 2, 4] and len(history.heads) == 8
    for label, (rates, _) in expected.items():
        torch.testing.assert_close(torch.tensor(measured[4][label]), rates)
        column = history.values[label.replace(" ", "_")]
        assert column[2].tolist() == rates.flatten().tolist()
    assert history.logged["max"].all(1).tolist() == [False, True, True]


def test_lesson_13_states_what_the_table_has():
    table, text = json.loads(TABLE.read_text()), " ".join(LESSON.read_text().split())
    assert table["steps"] == [*range(0, 4001, 100)] and "+" not in table["commit"]
    stated = re.findall(r"(L\dH\d)[^.]*? for more than half of the (\w+) from step (\d+) on", text)
    stated = dict(zip(("previous word", "subject", "antecedent"), stated, strict=True))
    for label, (head, words, step) in stated.items():
        rates = torch.tensor(table["rates"][label])  # (steps, layers, heads)
        layer, number = divmod(int(rates[-1].argmax()), rates.shape[2])
        over = [rate > 0.5 for rate in rates[:, layer, number].tolist()]
        since = len(over) - over[::-1].index(False)
        assert (head, int(step)) == (f"L{layer}H{number}", table["steps"][since])
        assert words == {"previous word": "words", "subject": "verbs"}.get(label, "pronouns")
        assert over[-1] and rates[-1, layer, number] > 0.95  # "almost 100 %"

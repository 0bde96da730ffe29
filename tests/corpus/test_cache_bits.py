"""The set `caches` has the numbers of `compare_caches`, and bits go where they help most."""

import json

import pytest
import torch

import clearhead as ch
from tests.hf.tiny_models import drawn_model

from .models import WORDS, tokenizer

TEXTS = [" ".join(WORDS[(i * j + j) % len(WORDS)] for i in range(9 + 3 * j)) for j in range(3)]


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    return drawn_model(
        transformers.LlamaConfig(
            vocab_size=len(WORDS) + 8,
            hidden_size=32,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
        )
    )


@pytest.fixture(scope="module")
def survey(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("caches")
    return ch.survey(model, TEXTS, out=out, tokenizer=tokenizer(), metrics="caches")


def test_the_means_are_those_of_compare_caches(model, survey):
    sums, queries = {}, 0
    for text in TEXTS:
        ids = torch.tensor([tokenizer()(text)["input_ids"]])
        queries += ids.shape[1] - 1  # the first query has no choice
        for head in ch.compare_caches(model, ids, ["q8_0", "q4_0"], metric=None).heads:
            key = head.layer, head.head, f"kl_{head.cache}"
            sums[key] = sums.get(key, 0.0) + head.kl * ids.shape[1]
    rows = survey.query("select layer, head, metric, mean from heads").rows
    means = {row[:3]: row[3] for row in rows}
    assert len(sums) == 16 and len(means) == 32
    for key, total in sums.items():
        assert means[key] == pytest.approx(total / queries, rel=1e-6), key
    for layer in range(2):
        for head in range(4):
            for measure in ("kl", "error"):
                fine, coarse = (means[layer, head, f"{measure}_{x}"] for x in ("q8_0", "q4_0"))
                assert 0 < 4 * fine < coarse


def test_the_heads_that_lose_most_get_more_bits(model, survey):
    half = survey.bit_budgets(6.5)
    rows = survey.query(
        "select layer, key_head, sum(case when metric = 'kl_q4_0' then mean else -mean end) "
        "from heads where metric like 'kl_%' group by layer, key_head order by 3 desc"
    ).rows
    fine = {row[:2] for row in rows[:2]}
    assert {
        (layer, n) for layer, x in half.formats.items() for n, form in enumerate(x)
        if form == "q8_0"
    } == fine  # fmt: skip
    assert half.bits == 6.5 and survey.bit_budgets(8.4).bits == 7.5
    worse = survey.bit_budgets(4.5)
    assert survey.bit_budgets(8.5).damage < half.damage < worse.damage
    ids = torch.tensor([tokenizer()(TEXTS[2])["input_ids"]])
    damage = ch.compare_caches(model, ids, {"half": half.edits()}, metric=None)
    plain = ch.compare_caches(model, ids, ["q8_0", "q4_0"], metric=None)
    for head in damage.heads:
        form = half.formats[head.layer][head.key_head]
        same = (x for x in plain.heads if x.cache == form and x[1:3] == head[1:3])
        assert next(same).kl == head.kl


def test_budgets_are_written_and_refused(survey, tmp_path):
    path = survey.bit_budgets(6.5).save(tmp_path / "bits.json")
    written = json.loads(path.read_text())
    assert written["bits"] == 6.5 and [len(x) for x in written["layers"].values()] == [2, 2]
    with pytest.raises(ch.BadValue, match=r"from 4\.5 to 8\.5"):
        survey.bit_budgets(4)


def test_heads_that_have_no_blocks_and_surveys_without_damage(tmp_path):
    model = ch.nn.TransformerBlock(8, 2, causal=True)
    embed = torch.nn.Embedding(len(WORDS) + 8, 8)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.block = embed, model

        def forward(self, input_ids):
            return self.block(self.embed(input_ids))

    options = {"tokenizer": tokenizer(), "out": tmp_path / "a"}

    def unread():
        raise AssertionError("a text was read")
        yield

    with pytest.raises(ch.BadValue, match=r"'caches'(.|\n)*blocks of 32 numbers"):
        ch.survey(Model(), unread(), **options, metrics="caches")
    assert not options["out"].exists()
    options["out"] = tmp_path / "b"
    with pytest.raises(ch.BadValue, match="no damage of caches"):
        ch.survey(Model(), TEXTS, **options).bit_budgets(6)

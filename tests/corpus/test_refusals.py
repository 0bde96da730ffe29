"""Broken texts, numbers and disks: one clear line, and nothing that was finished is lost."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead import demo
from clearhead.corpus import Mass, claims
from clearhead.corpus.basic import Entropy, First
from clearhead.corpus.texts import read_texts

from .models import MODELS, texts, tokenizer


def test_broken_texts_are_left_out_and_named(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("The owl saw a fox. The fox ran.")
    (folder / "b.txt").write_bytes(b"The owl \xff")
    (folder / "c.txt").write_text("")
    (folder / "d.txt").write_text("Owl")
    lines = [json.dumps({"text": "A fox hid."}), "{", json.dumps({"body": "no"}), '"The owl."']
    (folder / "e.jsonl").write_text("\n".join(lines))
    survey = ch.survey(demo.load(), folder, out=tmp_path / "out", metrics=[Entropy(128)])
    assert survey.manifest.corpus["skipped texts"] == [
        ["texts/b.txt", "byte 8 is not UTF-8"],
        ["texts/c.txt", "it has no token"],
        ["texts/e.jsonl:2", "the line is not JSON in UTF-8"],
        ["texts/e.jsonl:3", "the line has no string in its field 'text'"],
    ]
    names = [row["name"] for row in survey.query("select name from texts").to_pylist()]
    assert names == ["texts/a.txt", "texts/d.txt", "texts/e.jsonl:1", "texts/e.jsonl:4"]
    assert "Left out: 4 texts." in repr(survey)
    entropy = survey.query("select distinct texts from heads where metric = 'entropy'").rows
    assert entropy == ((3,),)  # a text of one token has no query with a choice


def test_rows_of_parquet(tmp_path):
    import duckdb

    file = tmp_path / "x.parquet"
    values = "(values ('The owl.'), (null), ('A fox.')) t(text)"
    duckdb.execute(f"copy (select * from {values}) to '{file}' (format parquet)")
    read = [(text.name, text.content) for text in read_texts(file)]
    assert read == [("x.parquet:0", "The owl."), ("x.parquet:1", None), ("x.parquet:2", "A fox.")]


def test_a_string_that_names_a_file_is_not_read_as_a_text(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("The owl.")
    with pytest.raises(ch.BadValue, match=r"book.txt' is the name of a file\.\n  Rule: a string"):
        list(read_texts([str(file)]))
    with pytest.raises(ch.BadValue, match="does not exist"):
        list(read_texts([Path("missing.txt")]))
    assert [text.content for text in read_texts(".")] == ["."]


def test_no_text_is_refused(tmp_path):
    with pytest.raises(
        ch.BadValue, match=r"There is no token in 2 texts\. text 0: it has no token"
    ):
        ch.survey(demo.load(), ["", " "], out=tmp_path)


def test_nan_weights_name_the_head_and_keep_finished_shards(tmp_path, monkeypatch):
    torch.manual_seed(3)
    monkeypatch.setattr(claims.secrets, "randbelow", lambda end: 0)  # from the first shard on
    model = MODELS["gpt2"](attn_implementation="clearhead").eval()
    options = {"out": tmp_path, "tokenizer": tokenizer(), "context": 19, "shard_tokens": 100}

    class Broken(Mass):
        name = "broken"

        def __init__(self, wrong):
            self.wrong = wrong

        def group(self, batch):
            return ch.prefix(1)

        def values(self, call):
            weights = super().values(call).clone()
            for row, text in enumerate(call.batch.texts):
                if text == 9 and call.layer == 1:
                    weights[row, 4, -1] = self.wrong
            return weights

    for wrong, number in ((float("inf"), "infinite"), (float("nan"), "NaN")):
        message = f"broken is {number} in layer 1, head 4, in text 9, context"
        with pytest.raises(ch.BadValue, match=message):
            ch.survey(model, texts(12), metrics=[Broken(wrong)], **options)
    assert len(list((tmp_path / "states").iterdir())) >= 1
    with torch.no_grad():
        model.wte.weight[5] = float("nan")
    with pytest.raises(ch.BadValue, match=r"entropy is NaN in layer 0, head 0, in text \d+"):
        ch.survey(model, texts(12), metrics=[Entropy(19)], **options | {"out": tmp_path / "nan"})


def test_a_full_disk_keeps_finished_shards(tmp_path, monkeypatch):
    stories = ["The owl saw a fox. The fox ran."] * 6
    options = {"out": tmp_path, "shard_tokens": 5, "metrics": [First()]}
    real, written = os.fsync, []

    def full(file):
        written.append(file)
        if len(written) > 10:  # six files of tokens, their list, the manifest, two states
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ch.BadValue, match="cannot be written: No space left on device"):
            ch.survey(demo.load(), stories, **options)
    states = tmp_path / "states"
    assert len(list(states.iterdir())) == 2  # and no temporary file
    assert ch.survey(demo.load(), stories, **options).heads


def test_a_metric_of_ten_lines(tmp_path):
    class OnCommas(Mass):
        name, formula, source = "on_commas", "weight on commas", "this test"

        def group(self, batch):
            return ch.dense(keep=batch.matches(lambda token: token == ",")[:, None, None])

    survey = ch.survey(demo.load(), ["The owl, a fox, hid."], out=tmp_path, metrics=[OnCommas()])
    assert {row["metric"] for row in survey.heads.to_pylist()} == {"on_commas"}
    assert survey.metrics.to_pylist()[0]["source"] == "this test"
    with pytest.raises(ch.BadValue, match=r"metric is 'entropy'.\n  Rule: this survey has on_comm"):
        survey.histogram(0, 0, "entropy")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"metrics": "basics"}, r"metrics has 'basics'.*\n.*\n  Hint: did you mean 'basic'"),
        ({"metrics": []}, r"metrics is \[\]"),
        ({"context": 1}, r"context=1\.\n  Rule: a context has 2 tokens or more, and the model has"),
        ({"context": 4096}, "positions for 128"),
        ({"tokens": 0}, "tokens=0"),
        ({"workers": 0}, "workers=0"),
        ({"metrics": "nowhere:Metric"}, "'nowhere:Metric' cannot be imported"),
    ],
)
def test_wrong_arguments(tmp_path, change, error):
    with pytest.raises((ch.BadValue, ch.BadType), match=error):
        ch.survey(demo.load(), ["The owl."], out=tmp_path, **change)


def test_a_module_needs_its_tokenizer_and_one_process(tmp_path):
    model = MODELS["gpt2"](attn_implementation="clearhead").eval()
    with pytest.raises(ch.BadType, match="GPT2Model without a tokenizer"):
        ch.survey(model, ["the owl"], out=tmp_path)
    with pytest.raises(ch.BadType, match="Several workers were requested for a GPT2Model"):
        ch.survey(model, ["the owl"], out=tmp_path, tokenizer=tokenizer(), workers=2)
    with pytest.raises(ch.BadValue, match="has no survey"):
        ch.Survey.open(tmp_path / "missing")

"""The rate and the time left are those of this run, also if an earlier one did a part."""

from contextlib import contextmanager

import tqdm

from clearhead import demo
from clearhead.corpus import steps, survey
from clearhead.models.progress import progress_bar
from examples.storyteller import story


def test_what_an_earlier_run_did_does_not_count_for_the_rate(monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr(tqdm.std, "time", lambda: now)
    with progress_bar("survey", 1000, True, done=900, unit=" tokens") as advance:
        now += 40
        advance(50)
        now += 40
        advance(50)
    written = capsys.readouterr().err
    assert "950/1000 [00:40<00:40,  1.25 tokens/s]" in written
    assert "1000/1000 [01:20<00:00,  1.25 tokens/s]" in written


def test_a_continued_survey_begins_with_the_tokens_that_are_done(monkeypatch, tmp_path):
    texts = [str(story(3, number)) for number in range(4)]
    first = survey(demo.load(), texts[:3], out=tmp_path, shard_tokens=100, metrics="basic")
    calls = []

    @contextmanager
    def noted(doing, total, progress, *, done=0, unit=""):
        calls.append((total, done))
        yield lambda tokens: None

    monkeypatch.setattr(steps, "progress_bar", noted)
    survey(demo.load(), texts, out=tmp_path, shard_tokens=100, progress=True)
    ((total, before),) = calls
    last = first.manifest.shards[-1]  # computed again: it has texts of the second run
    assert before >= first.manifest.corpus["tokens of texts"] - last.tokens > 0
    assert total > before


def test_to_advance_returns_nothing(monkeypatch):
    """Though tqdm returns whether it has drawn, which a forward hook must not return."""
    monkeypatch.setattr("tqdm.tqdm.update", lambda bar, n=1: True)
    with progress_bar("measuring", 2, True) as advance:
        assert advance() is None and advance(1) is None

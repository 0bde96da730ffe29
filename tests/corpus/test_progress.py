"""The rate and the time left are those of this run, also if an earlier one did a part."""

from clearhead import demo
from clearhead.corpus import progress, survey
from examples.storyteller import story


def test_tokens_of_an_earlier_run_do_not_count_for_the_rate(monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.token_progress(1000, True, before=900) as advance:
        now += 40
        advance(50)
        now += 40
        advance(50)
    assert capsys.readouterr().err == (
        "950 of 1,000 tokens, 1 tokens/s, 0:00:40 left\n"
        "1,000 of 1,000 tokens, 1 tokens/s, 0:00:00 left\n"
    )


def test_a_continued_survey_begins_with_the_tokens_that_are_done(monkeypatch, tmp_path):
    texts = [str(story(3, number)) for number in range(4)]
    first = survey(demo.load(), texts[:3], out=tmp_path, shard_tokens=100, metrics="basic")
    calls = []
    monkeypatch.setattr(
        progress, "_Lines", lambda total, before: calls.append((total, before)) or Ignored()
    )
    survey(demo.load(), texts, out=tmp_path, shard_tokens=100, progress=True)
    ((total, before),) = calls
    last = first.manifest.shards[-1]  # computed again: it has texts of the second run
    assert before >= first.manifest.corpus["tokens of texts"] - last.tokens > 0
    assert total > before


class Ignored:
    def add(self, tokens: int) -> None:
        pass

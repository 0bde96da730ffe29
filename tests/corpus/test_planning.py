"""A plan predicts what a survey costs, and its numbers are those of the survey that it predicts."""

import pytest

import clearhead as ch
from clearhead import demo
from clearhead.corpus import RandomRepeats, planning
from examples.storyteller import story

TEXTS = [str(story(3, number)) for number in range(150)]


@pytest.fixture(scope="module")
def planned():
    return planning.plan(demo.load(), TEXTS, shard_tokens=2048)


def test_sizes_are_those_of_the_survey(planned, tmp_path):
    survey = ch.survey(demo.load(), TEXTS, out=tmp_path, shard_tokens=2048)
    counts, shards = survey.manifest.corpus, survey.manifest.shards
    assert planned.tokens == pytest.approx(counts["tokens of texts"], rel=0.2)
    assert planned.texts == pytest.approx(counts["texts"], rel=0.2)
    assert planned.shards == pytest.approx(len(shards), abs=2) and len(shards) >= 5
    folders = ("corpus", "states", "merged")
    disk = sum(x.stat().st_size for name in folders for x in (tmp_path / name).iterdir())
    assert planned.disk == pytest.approx(disk, rel=0.35)


def test_ranks_divide_the_time(planned):
    large = planning.plan(demo.load(), TEXTS, tokens=1_000_000_000)
    assert large.tokens == 10**9 and large.shard_tokens == 2**20 and large.shards == 954
    assert large.disk > 1000 * planned.disk
    one, eight, many = large.seconds.values()
    assert one[0] == pytest.approx(8 * eight[0]) and one[1] == pytest.approx(954 / 120 * eight[1])
    assert many[1] == pytest.approx(15 / 954 * one[1])  # a rank has 14 or 15 shards
    assert one[2] > many[2]
    assert one[1] == pytest.approx(10**9 / large.speed, rel=0.01)


def test_a_plan_follows_from_its_probe():
    """By hand: totals grow with the square root of tokens, and a survey is 100 times the probe."""
    probe = planning.Probe(
        tokens=90, texts=3, shards=[25, 75], totals=[1000, 1700], folded=2000, of_texts=500,
        sums=64, memory=10_000, cutting=0.5, computing=15.0, folding=2.7, reading=0.25, tables=4.0,
    )  # fmt: skip
    assert probe.totals_of(25) == 1000 and probe.totals_of(100) == pytest.approx(2000)
    large = probe.plan(9000, 400)
    assert (large.tokens, large.texts, large.shards, large.shard_tokens) == (9000, 300, 25, 400)
    assert large.speed == pytest.approx(5)
    assert large.memory == 10_000 + planning.COPIES * 64 * 4
    states = 25 * 4000
    assert large.disk == pytest.approx(100 * 500 + states + 25 / 16 * 16_000)
    cut, compute, merging = large.seconds[1]
    assert (cut, compute) == (50, pytest.approx(25 * 400 / 5))
    assert merging == pytest.approx(2.7 / 2700 * states + 25 + 4)
    # 25 shards are four slices of texts, four shards for a rank at most, and two groups.
    assert large.seconds[8] == pytest.approx((50 / 4, 4 * 400 / 5, (merging - 4) / 2 + 4))


def test_the_table(planned):
    lines = str(planned).splitlines()
    assert lines[0].endswith("shards of 2,048 tokens") and len(lines) == 6
    assert lines[2].split() == ["ranks", "cut", "compute", "merge", "sum"]
    assert [line.split()[0] for line in lines[3:]] == ["1", "8", "64"]


def test_what_cannot_be_planned():
    with pytest.raises(ch.BadValue, match=r"have \d+ tokens.*\n.*a plan measures 4,096 tokens"):
        planning.plan(demo.load(), TEXTS[:9])
    with pytest.raises(ch.BadType, match="A plan of RandomRepeats was requested"):
        planning.plan(demo.load(), RandomRepeats(5, 20))

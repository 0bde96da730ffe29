"""Planted heads are found, all of them; a head of two behaviours is flagged, and no other."""

import random

import pytest
import torch
from scipy import stats

import clearhead as ch
from clearhead.corpus.basic import First
from clearhead.corpus.fold import sums_of_texts
from clearhead.corpus.inference import adjusted

from .models import tokenizer

BEHAVIOURS = (
    "first", "self", "previous", "induction", "duplicate", "separator", "two", "by class", "even",
)  # fmt: skip
DISTANCE = {"self": 0, "previous": 1}


def strongest_key(name: str, q: int, x: list[int], separators: set[int]) -> int | None:
    """The key at which a planted head looks; None for an even head."""
    if name == "two":  # by the parity of the token: half of its queries, but no other kind of text
        name = "previous" if x[q] % 2 else "duplicate"
    if name == "by class":
        name = "induction" if x[q] in separators else "previous"
    if name in DISTANCE:
        return q - DISTANCE[name]
    if name == "even":
        return None
    for k in range(q - 2, 0, -1):
        fits = {
            "induction": x[k - 1] == x[q],
            "duplicate": x[k] == x[q],
            "separator": x[k] in separators,
            "first": False,
        }
        if fits[name]:
            return k
    return 0


class Planted(torch.nn.Module):
    """One layer whose heads look at their `strongest_key`, by a bias."""

    def __init__(self, separators: set[int], names=BEHAVIOURS) -> None:
        super().__init__()
        self.separators, self.names = separators, names
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, input_ids):
        B, T = input_ids.shape
        bias = torch.zeros(B, len(self.names), T, T)
        for b, ids in enumerate(input_ids.tolist()):
            for h, name in enumerate(self.names):
                for q in range(1, T):
                    if (k := strongest_key(name, q, ids, self.separators)) is not None:
                        bias[b, h, q, k] = 9.0
        zeros = torch.zeros(B, len(self.names), T, 2)
        return ch.attention(zeros, zeros, zeros, mask=ch.causal, bias=ch.bias(bias))


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    tok = tokenizer()
    separators = {tok.convert_tokens_to_ids(mark) for mark in ".,;!"}
    drawn = random.Random(2)
    words = sorted(tok.get_vocab())[3:]
    texts = [" ".join(drawn.choices(words, k=40)) for _ in range(24)]
    model = Planted(separators)
    out = tmp_path_factory.mktemp("planted")
    return ch.survey(model, texts, out=out, tokenizer=tok), texts, tok


def test_every_planted_head_is_found(planted):
    survey, _, _ = planted
    for head, name in enumerate(BEHAVIOURS):
        roles = survey.roles(0, head)
        assert sum(part.share for part in roles.mix) == pytest.approx(1.0)
        if name == "even":
            assert roles.behaviours == ()
        elif name == "first":
            assert roles.behaviours == () and roles.mix[0].share == pytest.approx(1.0, abs=1e-9)
        elif name == "two":
            assert set(roles.behaviours) == {"previous", "duplicate"}
        elif name == "by class":
            assert roles.by_class["punctuation"][0].kind == "induction"
            assert roles.by_class["start"][0].kind == "previous"
        else:
            assert roles.behaviours == (name,)
        assert roles.does_more_than_one_thing == (name in ("two", "by class"))
    two, by_class = (survey.roles(0, BEHAVIOURS.index(name)) for name in ("two", "by class"))
    assert repr(two).endswith("; does more than one thing: previous and duplicate")
    assert two.q_differ == 1.0
    assert by_class.q_differ < 0.01
    assert set(by_class.differ) == {("punctuation", "induction"), ("start", "previous")}
    assert "induction in the class punctuation" in by_class.reason


def test_a_model_does_not_differ_from_itself_and_a_changed_head_does(planted, tmp_path):
    survey, texts, tok = planted
    same = survey.compare(survey).to_pylist()
    assert {(row["difference"], row["p"], row["q"]) for row in same} == {(0.0, 1.0, 1.0)}
    names = list(BEHAVIOURS)
    names[2] = "duplicate"  # in place of "previous"
    model = Planted({tok.convert_tokens_to_ids(mark) for mark in ".,;!"}, names)
    other = ch.survey(model, texts, out=tmp_path, tokenizer=tok)
    rows = survey.compare(other).to_pylist()
    assert {row["head"] for row in rows if row["q"] < 0.05} == {2}
    moved = next(row for row in rows if row["metric"] == "previous" and row["head"] == 2)
    assert moved["difference"] == pytest.approx(moved["mean"] - moved["other"])
    tested = next(row for row in rows if row["metric"] == "duplicate" and row["head"] == 2)
    means = [
        [float(x.sums[0][2, number] / x.queries[0][number]) for x in sums_of_texts(s.folder, m)]
        for s in (survey, other)
        for m in [s.manifest]
        for number in [[row["metric"] for row in m.metrics].index("duplicate")]
    ]
    expected = stats.ttest_rel(*means)
    assert tested["p"] == pytest.approx(expected.pvalue, rel=1e-6)
    assert (tested["low"], tested["high"]) == pytest.approx(expected.confidence_interval(), 1e-6)


def test_surveys_of_other_tokens_settings_or_versions_are_not_compared(planted, tmp_path):
    survey, texts, tok = planted
    model = Planted({tok.convert_tokens_to_ids(mark) for mark in ".,;!"}, list(BEHAVIOURS))
    options = {"tokenizer": tok, "metrics": [First()]}
    same_names = ch.survey(model, list(reversed(texts)), out=tmp_path / "reversed", **options)
    with pytest.raises(ch.BadValue, match="their tokens are not the same"):
        survey.compare(same_names)
    shorter = ch.survey(model, texts, out=tmp_path / "shorter", context=12, **options)
    with pytest.raises(ch.BadValue, match=r"has context \d+, and the other 12"):
        survey.compare(shorter)
    first = First()
    first.version = 2
    newer = ch.survey(model, texts, out=tmp_path / "newer", tokenizer=tok, metrics=[first])
    with pytest.raises(ch.BadValue, match=r"the metric first \(1, .*and the other \(2,"):
        survey.compare(newer)


def test_q_values_by_hand():
    assert adjusted([0.001, 0.02, 0.03, 0.5]) == pytest.approx([0.004, 0.04, 0.04, 0.5])

"""What a comparison of two surveys leaves out, and what it refuses."""

import warnings

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import clearhead as ch
from clearhead.explorer import html
from clearhead.survey import Mass, RandomRepeats
from clearhead.survey.basic import Distances, Entropy, First, Largest
from clearhead.survey.compare import _p_value, adjusted
from tests.explorer.test_page import embedded

from .models import SPECIAL, WORDS, tokenizer

CONTENTS = ["the owl saw a fox .", "a fox ran , and the owl hid", "then the owl slept"]


class Uneven(torch.nn.Module):
    """Layers with these numbers of heads, whose scores are the ids of the keys, and a mask."""

    def __init__(self, heads, mask=ch.causal, slope=1.0):
        super().__init__()
        self.heads, self.mask, self.slope = heads, mask, torch.nn.Parameter(torch.tensor(slope))

    def forward(self, input_ids):
        for H in self.heads:
            q = torch.full((*input_ids.shape, 1), float(self.slope))
            q = q[:, None] * torch.arange(1, H + 1).view(1, H, 1, 1)
            k = (input_ids / 10)[:, None, :, None].expand(-1, H, -1, -1)
            ch.attention(q, k, k, mask=self.mask)


def survey_of(model, out, metrics, contents=CONTENTS, **options):
    options = {"tokenizer": tokenizer(), "context": 8, **options}
    return ch.survey(model, contents, out=out, metrics=metrics, **options)


def test_what_only_one_survey_has_is_named_and_does_not_count(tmp_path):
    one = survey_of(Uneven([3, 2, 2, 5]), tmp_path / "a", [First(), Entropy(8)])
    two = survey_of(Uneven([3, 2, 4], slope=2.0), tmp_path / "b", [Largest(), First()])
    text = (
        r"Compared: 5 heads, by 1 metric.\n  Left out: layer 2, which has 2 heads in '.*a' "
        r"and 4 in '.*b'; layer 3, only in '.*a'; entropy, only in '.*a'; largest, only in '.*b'."
        r"\n  Hint: survey models of one architecture"
    )
    with pytest.warns(UserWarning, match=text):
        comparison = one.compare(two)
    rows = comparison.to_pylist()
    of = {(row["layer"], row["head"], row["metric"]) for row in rows}
    assert of == {
        (0, 0, "first"),
        (0, 1, "first"),
        (0, 2, "first"),
        (1, 0, "first"),
        (1, 1, "first"),
    }
    assert [row["q"] for row in rows] == adjusted([row["p"] for row in rows])
    assert embedded(html.survey_page(one, other=two))["caution"] == comparison.warning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one.compare(one).left_out == ()


def test_means_over_other_queries_are_not_compared(tmp_path):
    """A mask of layers: key 0 is seen by two queries of a context in place of all."""
    metrics = [First(), Distances("self", 0, 1), Distances("distance_4_7", 4, 8)]
    contents = [*CONTENTS[:2], "the owl"]
    one = survey_of(Uneven([2]), tmp_path / "a", metrics, contents)
    near = Uneven([2], ch.causal & ch.window(before=1))
    two = survey_of(near, tmp_path / "b", metrics, contents)
    with pytest.warns(UserWarning, match="first is over other queries; distance_4_7 is over other"):
        comparison = one.compare(two)
    assert {row["metric"] for row in comparison.to_pylist()} == {"self"}
    few = ["the owl saw a fox .", "the owl"]
    one, two = (
        survey_of(Uneven([2, 2], slope=x), tmp_path / f"{x}", metrics, few) for x in (1.0, 2.0)
    )
    with pytest.warns(UserWarning, match=r"Left out: distance_4_7 is of one text\."):
        assert len(one.compare(two)) == 8


def test_surveys_without_a_common_number_are_refused(tmp_path):
    one = survey_of(Uneven([1]), tmp_path / "one", [Entropy(8)])
    with pytest.raises(ch.BadType, match="compare got a str"):
        one.compare("out/other")
    one = survey_of(Uneven([2]), tmp_path / "a", [First()])
    two = survey_of(Uneven([3]), tmp_path / "b", [First()])
    with pytest.raises(ch.BadValue, match=r"nothing that can be compared: layer 0, which has 2 "):
        one.compare(two)


def test_other_machines_and_other_settings_of_a_metric(tmp_path):
    one = survey_of(Uneven([2]), tmp_path / "a", [First()])
    two = survey_of(Uneven([2]), tmp_path / "b", [First()], threads=2)
    with pytest.warns(UserWarning, match="Rounding: the surveys have threads of a worker 1 and 2"):
        comparison = one.compare(two)
    assert comparison.left_out == () and len(comparison.machines) == 1

    class Near(Mass):
        name = "near"

        def __init__(self, size):
            self.size, self.settings = size, {"size of near": size}

        def group(self, batch):
            return ch.window(before=self.size, after=0)

    one, two = (survey_of(Uneven([2]), tmp_path / f"{n}", [Near(n)]) for n in (1, 2))
    with pytest.raises(ch.BadValue, match=r"One survey has size of near 1, and the other 2\."):
        one.compare(two)


def test_one_number_for_two_words_is_refused(tmp_path):
    """Random tokens of two vocabularies of one size have the same numbers."""

    words = [*SPECIAL, *reversed(dict.fromkeys(WORDS))]
    model = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    renamed = transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")
    one, two = (
        survey_of(
            Uneven([2]), tmp_path / name, [First()], RandomRepeats(3, 8),
            context=16, tokenizer=of_model,
        )
        for name, of_model in (("a", tokenizer()), ("b", renamed))
    )  # fmt: skip
    assert one.manifest.shards == two.manifest.shards
    with pytest.raises(
        ch.BadValue, match=r"Token \d+ is '.*' in one survey, and '.*' in the other"
    ):
        one.compare(two)


def test_equal_differences_of_few_texts_are_not_sure():
    """Two of the four combinations of two signs are as extreme."""
    assert _p_value(0.5, 0.0, 1) == 0.5
    assert _p_value(0.5, 0.0, 9) == 2 / 2**10
    assert _p_value(0.0, 0.0, 9) == 1.0

"""What a comparison of two surveys leaves out, and what it refuses."""

import warnings

import numpy as np
import pytest
import torch
import transformers
from scipy import stats
from tokenizers import Tokenizer, models, pre_tokenizers

import clearhead as ch
from clearhead.corpus import Mass, RandomRepeats
from clearhead.corpus.basic import Distances, Entropy, First, Largest
from clearhead.corpus.compare import LEAST_EFFECT, _interval_and_p
from clearhead.corpus.fold import sums_of_texts
from clearhead.corpus.inference import adjusted
from clearhead.views import html
from tests.views.test_page import embedded

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
    assert [x.state for x in one.manifest.shards] == [x.state for x in two.manifest.shards]
    with pytest.raises(ch.BadValue, match=r"Token \d+ is '.*' in one, and '.*' in the other"):
        one.compare(two)


def test_rounding_is_sure_and_its_effect_is_small(tmp_path):
    """Each text has a difference of one sign between float32 and bfloat16."""
    drawn = torch.Generator().manual_seed(3)
    contents = [
        " ".join(WORDS[i] for i in torch.randint(len(WORDS), (5 + n % 3,), generator=drawn))
        for n in range(40)
    ]
    one = survey_of(Uneven([2], slope=0.3), tmp_path / "a", [Largest()], contents)
    two = survey_of(Uneven([2], slope=0.3).bfloat16(), tmp_path / "b", [Largest()], contents)
    with pytest.warns(UserWarning, match=r"have dtype 'float32' and 'bfloat16', so differences of"):
        rounding = one.compare(two)
    three = survey_of(Uneven([2], slope=2.0), tmp_path / "c", [Largest()], contents)
    effects = [abs(row["effect"]) for row in rounding.to_pylist()]
    assert (
        max(effects)
        < 0.05
        < LEAST_EFFECT
        < min(abs(row["effect"]) for row in one.compare(three).to_pylist())
    )
    means = [
        np.stack(
            [text.sums[0][:, 0] / text.queries[0] for text in sums_of_texts(x.folder, x.manifest)]
        )
        for x in (one, three)
    ]
    sd = np.sqrt(sum(x.var(0, ddof=1) for x in means) / 2)
    expected = (means[0] - means[1]).mean(0) / sd
    rows = one.compare(three).to_pylist()
    for row in rows:
        assert row["effect"] == pytest.approx(expected[row["head"]], rel=1e-6)
        limits = row["low"] / sd[row["head"]], row["high"] / sd[row["head"]]
        assert (row["effect_low"], row["effect_high"]) == pytest.approx(limits, rel=1e-6)
    assert [row["head"] for row in rows] == np.argsort(-np.abs(expected)).tolist()
    assert {row["effect"] for row in one.compare(one).to_pylist()} == {0.0}


def test_equal_differences_of_few_texts_are_not_sure():
    """Two of the four combinations of two signs are as extreme."""
    assert _interval_and_p(0.5, 0.0, 2, 1.0) == (0.5, 0.5, 0.5)
    assert _interval_and_p(0.5, 0.0, 10, None)[2] == _interval_and_p(1.0, 1e-9, 10, 1.0)[2] == 2**-9
    assert _interval_and_p(0.0, 0.0, 10, 1.0) == (0.0, 0.0, 1.0)


def test_a_difference_without_limits_has_the_paired_t_test():
    drawn = np.random.default_rng(3)
    a, b = drawn.normal(0.2, 1, 9), drawn.normal(0, 1, 9)
    test, d = stats.ttest_rel(a, b), a - b
    low, high, p = _interval_and_p(d.mean(), d.var(ddof=1) / 9, 9, None)
    assert p == pytest.approx(test.pvalue)
    assert (low, high) == pytest.approx([*test.confidence_interval()])


# The means of texts in both surveys: beta distributions with these means, and a + b = 19. How often
# the interval of their difference contains the true one, at least.
@pytest.mark.parametrize(
    ("means", "texts", "least"),
    [
        ((0.1, 0.1), 5, 0.93), ((0.1, 0.02), 5, 0.92), ((0.02, 0.001), 5, 0.79),
        ((0.98, 0.01), 5, 0.89), ((0.5, 0.5), 20, 0.93), ((0.1, 0.02), 20, 0.93),
        ((0.98, 0.01), 20, 0.90), ((0.02, 0.001), 100, 0.92),
    ],
)  # fmt: skip
def test_the_interval_contains_the_true_difference_and_p_agrees(means, texts, least):
    drawn, contained = np.random.default_rng(texts), 0
    for _ in range(1000):
        a, b = (drawn.beta(19 * mean, 19 * (1 - mean), texts) for mean in means)
        low, high, p = _interval_and_p((a - b).mean(), (a - b).var(ddof=1) / texts, texts, 1.0)
        assert -1 <= low <= high <= 1 and (p < 0.05) == (not low <= 0 <= high)
        contained += low <= means[0] - means[1] <= high
    assert contained / 1000 >= least

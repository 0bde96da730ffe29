"""A report on one screen: counts of roles, and the head and query to begin with."""

from dataclasses import replace

import pytest
import torch

import clearhead as ch
from clearhead.models.report import report, summary
from clearhead.models.report.opening import Opening, best_heads, opening
from clearhead.models.report.summary import _sentence, matter_most
from clearhead.models.roles.table import RANK
from tests.models.report.models import AttentionCalls, pointing


def many_heads():
    """On a text of two equal halves: an induction head, a previous-token head, 28 sinks."""
    T = 40
    tokens = [f"w{i % 20}" for i in range(T)]
    made = [
        pointing(T, lambda i: i - 19 if i >= 20 else 0),
        pointing(T, lambda i: max(i - 1, 0)),
        *[pointing(T, lambda i: 0)] * 28,
    ]
    q, k = (torch.stack(x)[None] for x in zip(*made, strict=True))
    calls = AttentionCalls((q, k, {"mask": ch.causal}))
    return report(calls, torch.zeros(1), tokens=tokens, name="toy")


def test_a_summary_fits_a_screen_and_counts_roles():
    result = many_heads()
    text = summary(result)
    assert len(text.splitlines()) < 24 and max(map(len, text.splitlines())) <= 80
    assert text.startswith("toy: 1 layer, 30 heads, 40 tokens")
    flat = " ".join(text.split())
    assert "1 induction, 1 previous token" in flat or "29 first token (sink)" in flat
    assert "no role" not in flat


def test_the_clearest_example_query_is_shown_in_its_sentence():
    result = many_heads()
    example = opening(result)
    assert example.head is result[0, 0]
    assert example.key == example.query - 19 and example.weight > 0.9
    flat = " ".join(summary(result).split())
    assert "Begin with L0H0: induction" in flat
    assert f"[w{example.key % 20}]" in flat and f"[w{example.query % 20}]" in flat


def test_the_example_query_is_a_word_if_one_shows_the_role():
    result = many_heads()
    [layer], first = result.layers, opening(result)

    def begin_with(text_of):
        tokens = [text_of(token) for token in layer.key_tokens]
        renamed = replace(layer, query_tokens=tokens, key_tokens=tokens)
        return opening(replace(result, layers=(renamed,)))

    word = layer.key_tokens[first.query]
    assert word[0].isalpha()
    other = begin_with(lambda it: "." if it == word else it)
    assert (other.head.layer, other.head.head) == (first.head.layer, first.head.head)
    assert layer.key_tokens[other.query] != word
    assert 0.9 < other.weight <= first.weight
    assert begin_with(lambda it: f"#{it}").query == first.query


def test_the_sentence_marks_the_words_of_the_query_and_the_key_only():
    """A line break is written out. A query after stored keys is at its position among the keys,
    and one of another text is not marked."""
    T = 6
    layer = AttentionCalls((*(x[None, None] for x in pointing(T, lambda i: max(i - 1, 0))), {}))
    tokens = ["a", "b", "\n", "c", "d", "e"]
    whole = report(layer, torch.zeros(1), tokens=tokens)

    def marked(query, key, **changes):
        changed = replace(whole, layers=(replace(whole.layers[0], **changes),))
        return _sentence(changed, Opening(changed[0, 0], query, key, 1.0))

    assert marked(3, 2) == "a b [↵] [c] d e"
    assert marked(0, 3, queries=2) == "a b [c] [d] e"
    assert marked(1, 3, cross_attention=True) == "a b [c] d e"


def test_heads_matter_by_their_effect_if_it_is_known():
    result = many_heads()
    best = list(best_heads(result))
    assert best == sorted(best, key=list(RANK).index) and "induction" in best[0]
    listed = [line.split()[0] for line in summary(result).splitlines() if " tokens" in line]
    assert {label.split()[0] for label in best} <= set(listed)
    [layer] = result.layers
    heads = tuple(replace(x, effect=float(x.head == 7)) for x in layer.heads)
    result = replace(result, layers=(replace(layer, heads=heads),), effect_metric="loss")
    assert matter_most(result)[0].head == 7 and "+1.000" in summary(result)


def test_a_report_without_roles_has_a_summary():
    q = torch.zeros(1, 2, 3, 4)
    result = report(AttentionCalls((q, q, {})), torch.zeros(1))
    assert opening(result) is None
    text = " ".join(summary(result).split())
    assert "2 heads have no role" in text and "too few to separate" in text


@pytest.mark.parametrize(
    ("tokens", "words"), [("a", "1 different token,"), ("ab", "2 different tokens,")]
)
def test_different_tokens_are_counted(tokens, words):
    q = torch.zeros(1, 2, len(tokens), 4)
    result = report(AttentionCalls((q, q, {})), torch.zeros(1), tokens=list(tokens))
    assert words in " ".join(summary(result).split())

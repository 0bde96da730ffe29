"""A label says for how many queries it speaks, and is withheld where chance explains it."""

import math

import pytest
import torch

import clearhead as ch
from clearhead.inspection.report import report
from clearhead.inspection.report.head_label import Count, chance_of, label_of
from clearhead.inspection.report.label_counts import label_counts
from tests.inspection.report.models import AttentionCalls, normal, pointing


def head_of(q, k, tokens, **keywords):
    calls = AttentionCalls((q[None, None], k[None, None], keywords))
    return report(calls, torch.zeros(1), tokens=tokens)[0, 0]


def test_queries_are_counted_as_by_hand():
    T, first, offset = 13, 1, 0
    tokens = ["<s>", *"a b , a b c , a d e f".split(), "b"]
    best = torch.randint(-1, T, (3, T), generator=torch.Generator().manual_seed(2))
    active = torch.rand(T, generator=torch.Generator().manual_seed(3)) > 0.2
    found = label_counts(best, active, tokens, first=first, offset=offset)
    repeats = [q for q in range(T) if any(tokens[k] == tokens[q] for k in range(first, q - 1))]
    for h in range(3):
        asked = [q for q in range(T) if active[q] and (best[:, q] >= 0).any()]
        key = best[h].tolist()
        expected = {
            "first": sum(key[q] == first for q in asked),
            "previous": sum(key[q] == q - 1 and q > 0 for q in asked),
            "next": sum(key[q] == q + 1 for q in asked),
            "same": sum(key[q] == q for q in asked),
            "separators": sum(tokens[key[q]] in (",", "<s>") for q in asked if key[q] >= 0),
        }
        for name, queries in expected.items():
            if name != "previous":
                assert found[h][name] == (queries, len(asked)), name
        again = [q for q in asked if q in repeats]
        copies = [q for q in again if first < key[q] < q - 1]
        assert found[h]["duplicate"] == (
            sum(tokens[key[q]] == tokens[q] for q in copies),
            len(again),
        )
        followed = sum(tokens[key[q] - 1] == tokens[q] for q in copies)
        assert found[h]["induction"] == (followed, len(again))


def test_two_texts_have_no_previous_token():
    [found] = label_counts(
        torch.zeros(1, 5).long(), torch.ones(5).bool(), None, first=0, offset=None
    )
    assert found == {"first": (5, 5)}


@pytest.mark.parametrize(("k", "n", "p"), [(7, 11, 0.3), (2, 5, 0.1), (19, 23, 0.6)])
def test_the_bound_on_chance_holds(k, n, p):
    exact = sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
    assert exact <= chance_of(Count(k, n), p) <= 12 * exact


def test_a_label_says_for_how_many_queries_it_speaks():
    T = 29
    q, k = pointing(T, lambda i: max(i - 1, 0))
    head = head_of(q, k, [f"w{i}" for i in range(T)])
    assert (head.label, head.evidence) == ("previous token", f"28 of {T} queries look there most.")
    assert head.withheld == ""


def test_much_weight_of_few_queries_gives_no_label():
    """The weight of a third of the queries is on the token before, of all others spread."""
    T = 31
    q, k = pointing(T, lambda i: max(i - 1, 0))
    q = torch.where(torch.arange(T)[:, None] % 5 < 2, q, 0)
    head = head_of(q, k, [f"w{i}" for i in range(T)])
    assert head.shares["previous"] > 0.35 and head.label != "previous token"
    assert head.withheld.startswith("Not called previous token: only 1")


def test_on_a_short_text_no_head_is_a_sink():
    heads = {}
    for T in (13, 40):
        q, k = pointing(T, lambda i: 0)
        heads[T] = head_of(q, k, [f"w{i}" for i in range(T)], mask=ch.causal)
    assert heads[40].label == "first token (sink)" and heads[13].label == "sharp"
    assert "with only 13 queries it is unknown" in heads[13].withheld


def test_random_heads_have_no_label_of_place():
    T, H = 17, 40
    q, k = 3 * normal(1, H, T, 4), normal(1, 1, T, 4, seed=1)
    calls = AttentionCalls((q, k, {"mask": ch.causal}))
    found = report(calls, torch.zeros(1), tokens=[f"w{i}" for i in range(T)])
    assert {head.label for head in found.heads} <= {"spread", "sharp", "mixed"}


def test_what_chance_may_explain_names_no_head():
    shares, uniform = {"same": 0.6}, {"same": 0.28}
    kept = label_of(shares, uniform, 0.5, {"same": Count(30, 40)})
    assert kept[:3] == ("same token", 0.6, "30 of 40 queries look there most.")
    dropped = label_of(shares, uniform, 0.5, {"same": Count(3, 4)})
    assert dropped.label == "mixed" and "may be chance" in dropped.withheld

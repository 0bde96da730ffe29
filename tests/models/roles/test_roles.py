"""Roles of heads: false ones are rare, planted ones are found, and their numbers are right.

`pytest -m slow tests/models/roles/test_roles.py` draws 2,500 to 10,000 heads a case."""

import math

import pytest
import torch

import clearhead as ch
from clearhead.models.report import report
from clearhead.models.roles.role_keys import is_separator, is_special
from clearhead.models.roles.role_tests import chance_of_column, chance_of_votes, interval, t_tail
from clearhead.models.roles.table import LABELS
from tests.models.report import simulated_heads as simulated
from tests.models.report.models import AttentionCalls, normal, pointing


def false_roles(kind: str, T: int, texts: int, heads: int, causal: bool = True) -> int:
    """How many heads without a role are given one, of texts * heads. A third of the texts have
    later sinks, of which these heads know nothing."""
    count = 0
    for seed in range(texts):
        tokens = simulated.text(T, seed, words=(50, 200)[seed % 2])
        sinks = (T // 5, T // 3) if seed % 3 == 1 else ()
        keys = simulated.keys_of(tokens, causal, sinks)
        strength = (1.0, 4.0)[seed // 2 % 2]
        for start in range(0, heads, 50):
            weights = simulated.without_role(kind, 50, keys, strength, seed * heads + start)
            count += sum(map(bool, simulated.roles_of(weights, keys)))
    return count


@pytest.mark.parametrize("kind", simulated.KINDS)
def test_heads_without_a_role_have_none(kind):
    assert false_roles(kind, 32, 8, 50) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "T, texts", [(16, 40), (32, 40), (64, 40), (128, 40), (256, 20), (512, 10)]
)
@pytest.mark.parametrize("kind", simulated.KINDS)
@pytest.mark.parametrize("causal", [True, False])
def test_of_a_thousand_heads_without_a_role_at_most_one_has_one(kind, T, texts, causal):
    count, heads = false_roles(kind, T, texts, 250, causal), 250 * texts
    print(f"{kind}, {T} tokens, {'causal' if causal else 'full'}: {count} of {heads:,}")
    assert 1000 * count <= heads


def texts_found(names: tuple[str, ...], texts: int, causal: bool) -> int:
    found = 0
    for seed in range(texts):
        sinks = (3, 9) if "sinks" in names else ()
        keys = simulated.keys_of(simulated.text(64, seed), causal, sinks)
        weights = simulated.without_role("both", 1, keys, 1.0, seed)
        weights = simulated.planted(weights, keys, names, 0.9)
        [roles] = simulated.roles_of(weights, keys)
        found += set(names) <= {role.name for role in roles}
    return found


@pytest.mark.parametrize("planted", simulated.ROLES)
def test_planted_roles_are_found(planted):
    assert texts_found(simulated.ROLES[planted], 3, True) == 3


@pytest.mark.slow
@pytest.mark.parametrize("planted", simulated.ROLES)
@pytest.mark.parametrize("causal", [True, False])
def test_planted_roles_are_found_in_99_of_100_texts(planted, causal):
    count = texts_found(simulated.ROLES[planted], 100, causal)
    print(f"{planted}, {'causal' if causal else 'full'}: {count} of 100")
    assert count >= 99


def head_of(q, k, tokens, **keywords):
    calls = AttentionCalls((q[None, None], k[None, None], keywords))
    return report(calls, torch.zeros(1), tokens=tokens)[0, 0]


def test_autocast_changes_nothing():
    q, k = normal(40, 8), normal(40, 8, seed=4)
    right = head_of(q, k, None, mask=ch.causal)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head_of(q, k, None, mask=ch.causal) == right


@pytest.mark.parametrize(("votes", "words", "p"), [(7, 11, 0.3), (2, 5, 0.1), (19, 23, 0.6)])
def test_the_bound_on_votes_holds(votes, words, p):
    exact = sum(
        math.comb(words, i) * p**i * (1 - p) ** (words - i) for i in range(votes, words + 1)
    )
    bound = float(chance_of_votes(torch.tensor([votes / words]), torch.tensor([words]), p))
    assert exact <= bound <= 12 * exact
    assert float(chance_of_votes(torch.tensor([p]), torch.tensor([words]), p)) == 1.0


@pytest.mark.parametrize("free", [1, 2, 5, 12, 39, 1000])
def test_the_tail_of_t_is_scipys_however_far(free):
    stats = pytest.importorskip("scipy.stats")
    for t in (-3.0, 0.5, 4.9, 5.1, 8.0, 64.0, 1e4):
        assert t_tail(t, free) == pytest.approx(stats.t.sf(t, free), rel=1e-8, abs=0)


def test_the_column_test_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    excess, counted = normal(3, 17).double(), torch.rand(3, 17) > 0.2
    is_role = torch.arange(17) % 5 == 0
    found = chance_of_column(excess, is_role, counted)
    for row, keep, chance in zip(excess, counted, found, strict=True):
        own, others = row[keep & is_role], row[keep & ~is_role]
        right = stats.ttest_ind(own, others, alternative="greater").pvalue
        assert float(chance) == pytest.approx(right, rel=1e-5)


def test_the_interval_counts_words_and_covers_the_mean():
    """Of 1000 heads whose masses depend on the word alone; counting queries covers far fewer."""
    words = torch.arange(25).repeat_interleave(torch.arange(25) % 4 + 1)
    of_word = torch.rand(1000, 25, generator=torch.Generator().manual_seed(1))
    mean, half = interval(of_word[:, words], words)
    covered = float(((mean - 0.5).abs() <= half).float().mean())
    assert 0.92 < covered < 0.98
    assert (interval(of_word[:, words], torch.arange(len(words)))[1] < 0.8 * half).all()


def test_a_sink_does_not_hide_what_a_head_does_with_the_rest():
    """0.89 on the first token; where a word occurred before, 0.4 on what followed it."""
    T = 33
    tokens = [f"w{i % 24}" for i in range(T)]
    weights = torch.zeros(T, T)
    weights[:, 0] = 1
    for i in range(24, T):
        weights[i, 0], weights[i, i - 23] = 0.6, 0.4
    bias = weights.clamp(min=1e-30).log()[None, None]
    q = torch.zeros(T, 4)
    head = head_of(q, q, tokens, mask=ch.causal, bias=bias)
    assert [(role.name, round(role.mass, 2)) for role in head.roles] == [
        ("induction", 0.4), ("first", 0.89)
    ]  # fmt: skip
    assert head.label == "induction" and head.number == pytest.approx(0.4, abs=0.005)
    induction, first = head.roles
    assert (induction.hits, induction.queries, induction.words) == (9, 9, 9)
    assert first.low < first.mass < first.high and induction.chance < 1e-4


def test_the_words_of_the_evidence_are_those_of_the_hits():
    keys, some = simulated.keys_of(simulated.text(67, 3, words=29), True), 0
    weights = simulated.without_role("none", 11, keys, 4.0, 3)
    weights = simulated.planted(weights, keys, ("previous",), 0.4)
    largest = weights[..., 1:].argmax(-1) + 1  # the first key is a role of its own
    for head, roles in enumerate(simulated.roles_of(weights, keys)):
        for role in (role for role in roles if role.name == "previous"):
            hits = [
                q for q in keys.tested["previous"].queries.tolist() if largest[head, q] == q - 1
            ]
            words = {int(keys.words[q]) for q in hits}
            assert (role.hits, role.words) == (len(hits), len(words))
            assert f"; {len(hits)} of {role.queries} tokens look there most, " in role.evidence
            assert role.evidence.endswith(f" {len(words)} different ones.")
            some += len(words) < len(hits) < role.queries
    assert some == 3


def test_two_before_in_a_text_of_period_three_is_not_induction():
    T = 60
    for tokens in (
        ["," if i % 3 == 2 else f"w{i}" for i in range(T)],
        [f"w{i % 3}" for i in range(T)],
    ):
        q, k = pointing(T, lambda i: max(i - 2, 0))
        head = head_of(q, k, tokens, mask=ch.causal)
        assert not {role.name for role in head.roles} & {"induction", "duplicate"}
    assert head_of(q, k, [f"w{i}" for i in range(T)], mask=ch.causal).label == "two before"


def test_weight_that_chance_may_explain_is_named_but_is_not_a_role():
    q, k = pointing(5, lambda i: max(i - 1, 0))
    head = head_of(q, k, [f"w{i}" for i in range(5)])
    assert head.roles == () and head.label == "sharp"
    assert head.withheld.startswith("Possibly previous token: 3 of 3 tokens look there most")


def test_padding_changes_no_role():
    """Left and right padding, hidden by the mask, as `hf.Checkpoint` passes it."""
    T = 40
    tokens = simulated.text(T, 1)
    q, k = pointing(T, lambda i: max(i - 1, 0))
    alone = head_of(q, k, tokens, mask=ch.causal)
    assert alone.roles[0].name == "previous"
    from clearhead.core.masks import lengths

    padded = [torch.cat([x, torch.zeros(5, T)]) for x in (q, k)]
    mask = ch.causal & lengths(queries=[T], keys=[T])
    head = head_of(*padded, [*tokens, *["<pad>"] * 5], mask=mask)
    assert [(r.name, r.hits, r.queries) for r in head.roles] == [
        (r.name, r.hits, r.queries) for r in alone.roles
    ]
    assert head.roles[0].mass == pytest.approx(alone.roles[0].mass)


def test_every_role_has_a_label():
    assert set(LABELS) >= {"first", "separators", "special", "sink", "window"}
    names = {name for roles in simulated.ROLES.values() for name in roles}
    assert {"window" if name.startswith("window") else name for name in names} <= set(LABELS)
    assert not is_separator("[SEP]") and is_special("[SEP]")

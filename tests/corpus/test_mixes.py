"""Mixes by the class of the query's token are those of eager attention, counted one by one."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

import clearhead as ch
from clearhead.corpus import mixes
from clearhead.corpus.basic import KINDS, First
from clearhead.corpus.looks import BEHAVIOURS, CLASSES, NAMES, SHAPE, token_classes
from clearhead.corpus.mixes import ALL, LEAST, TIMES_CHANCE

from .dense import PUNCTUATION, groups, kind
from .models import CONTEXT, MODELS, H, texts, tokenizer

TEXTS = texts(20)


def shares_of_texts(counts, chances):
    return mixes.shares_of(mixes.apart_of(counts, sum(counts)), sum(counts), chances)


def behaviours(q: int, k: int, ids: list[int], words: list[str]) -> set[str]:
    """All behaviours that fit a key."""
    fits = {
        "self": k == q,
        "previous": k == q - 1,
        "induction": 0 < k < q and ids[k - 1] == ids[q],
        "duplicate": k < q and ids[k] == ids[q],
        "separator": words[k] in PUNCTUATION,
        "ahead": k > q,
    }
    return {name for name, is_so in fits.items() if is_so}


def class_of(q: int, words: list[str]) -> str:
    if q == 0:
        return "first"
    if words[q] in PUNCTUATION:
        return "punctuation"
    return "other" if words[q].startswith("<") else "start"


@pytest.fixture(scope="module", params=["llama", "bert"])
def counted(request, tmp_path_factory):
    """A survey, and by head and class: [text, kind, is alone] and the chances of each query."""
    torch.manual_seed(3)
    model = MODELS[request.param](attn_implementation="clearhead").eval()
    eager = MODELS[request.param](attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    tok, causal = tokenizer(True), request.param == "llama"
    out = tmp_path_factory.mktemp("survey")
    survey = ch.survey(model, TEXTS, out=out, tokenizer=tok, context=CONTEXT)
    known, looks, chances = tok.get_vocab(), {}, {}
    for text, context in survey.query("select distinct text, context from examples").rows:
        words = survey.context(text, context)
        ids = [known[word] for word in words]
        T = len(ids)
        allowed = torch.ones(T, T).tril() if causal else torch.ones(T, T)
        uniform = {
            name: (keys * allowed).sum(-1) / allowed.sum(-1)
            for name, keys in groups(ids, words, causal, CONTEXT).items()
        }
        with torch.no_grad():
            weights = eager(input_ids=torch.tensor([ids]), output_attentions=True).attentions
        for q in range(T):
            if allowed[q].sum() < 2:
                continue
            for name in (class_of(q, words), ALL):
                of_query = [float(uniform[mass][q]) for mass in BEHAVIOURS.values()]
                chances.setdefault(name, []).append(of_query)
                for layer, of_layer in enumerate(weights):
                    for head in range(H):
                        k = int(of_layer[0, head, q].argmax())
                        alone = len(behaviours(q, k, ids, words)) == 1
                        entry = text, kind(q, k, ids, words), alone
                        looks.setdefault((layer, head, name), []).append(entry)
    return survey, looks, chances


def means_without(values: list[float], of_text: list[int]) -> np.ndarray:
    """The mean without each text."""
    numbers, texts_of = np.array(values, dtype=float), np.array(of_text)
    return np.array([numbers[texts_of != text].mean() for text in np.unique(texts_of)])


def test_the_shares_are_those_of_each_query(counted):
    survey, looks, chances = counted
    rows = survey.query("select * from mixes").to_pylist()
    assert {(x["layer"], x["head"], x["token_class"]) for x in rows} == set(looks)
    for row in rows:
        entries = looks[row["layer"], row["head"], row["token_class"]]
        of_text = [text for text, _, _ in entries]
        on_kind = [name == row["kind"] for _, name, _ in entries]
        assert (row["queries"], row["texts"]) == (len(entries), len(set(of_text)))
        assert row["share"] == pytest.approx(np.mean(on_kind))
        if row["kind"] not in BEHAVIOURS:
            assert row["alone"] is None and row["chance"] is None and row["p"] is None
            continue
        alone = [name == row["kind"] and single for _, name, single in entries]
        chance = np.mean(chances[row["token_class"]], 0)[list(BEHAVIOURS).index(row["kind"])]
        assert row["alone"] == pytest.approx(np.mean(alone))
        assert row["chance"] == pytest.approx(chance, abs=1e-6)
        n, successes, K = len(entries), sum(alone), len(set(of_text))
        without = means_without(alone, of_text)
        smoothed = (successes + 1) / (n + 2)
        variance = ((without - np.mean(alone)) ** 2).sum()
        error = math.sqrt(max(variance, smoothed * (1 - smoothed) / n))
        t = (np.mean(alone) - max(LEAST, TIMES_CHANCE * chance)) / error
        p = stats.t.sf(t, K - 1)
        assert row["p"] == (pytest.approx(p, rel=1e-5, abs=1e-12) if p <= 0.05 else 1.0)


def test_all_queries_have_the_means_of_the_table_of_heads(counted):
    survey, _, _ = counted
    pairs = survey.query(
        "select share, mean, mixes.low, heads.low, mixes.high, heads.high from mixes, heads "
        "where token_class = 'all' and metric = 'looks_' || kind "
        "and mixes.layer = heads.layer and mixes.head = heads.head"
    ).rows
    assert len(pairs) == 2 * H * len(KINDS)
    for row in pairs:
        assert row[0::2] == pytest.approx(row[1::2], abs=1e-9)
    roles = survey.roles(1, 4)
    for mix in (roles.mix, *roles.by_class.values()):
        assert sum(part.share for part in mix) == pytest.approx(1.0)
    with pytest.raises(ch.BadValue, match="Layer 7, head 0"):
        survey.roles(7, 0)


def test_the_difference_between_classes_is_that_of_the_means_without_each_text():
    drawn = np.random.default_rng(5)
    counts = [drawn.integers(0, 9, (1, *SHAPE)) for _ in range(7)]
    shares = shares_of_texts(counts, np.zeros((1, SHAPE[0], len(BEHAVIOURS))))
    a, b, v = NAMES.index("start"), NAMES.index("digit"), list(BEHAVIOURS).index("previous")
    at = list(KINDS).index("previous")

    def difference(some: list[np.ndarray]) -> float:
        total = sum(some)[0]
        return total[a, at, 0] / total[a].sum() - total[b, at, 0] / total[b].sum()

    every = difference(counts)
    without = [difference(counts[:i] + counts[i + 1 :]) for i in range(7)]
    variance = sum((x - every) ** 2 for x in without)
    of = shares.covariance[0, v]
    assert of[a, a] + of[b, b] - 2 * of[a, b] == pytest.approx(variance)


# Queries of each class in a text, and the chance of each behaviour.
CLASS_SIZES = [0, 12, 18, 6, 60, 20, 0]
CHANCE = [0.05, 0.05, 0.03, 0.04, 0.12, 0.0]


def false_or_found(heads, seeds, texts, shares_of_class):
    """The fractions of heads that do more than one thing, and whose classes differ."""
    flagged = differ = 0
    for seed in range(seeds):
        drawn = np.random.default_rng([seed, texts])
        counts = np.zeros((texts, heads, *SHAPE), dtype=np.int64)
        for text in range(texts):
            for c, n in enumerate(CLASS_SIZES):
                p = dict.fromkeys(KINDS, 0.0) | shares_of_class(NAMES[c], drawn)
                p["far"] = 1 - sum(p.values())
                counts[text, :, c, :, 0] = drawn.multinomial(n, [*p.values()], heads)
        chances = counts.sum(0).sum((-1, -2))[..., None] * np.array(CHANCE)
        shares = shares_of_texts(counts, chances)
        tests = mixes.tests_of(shares, mixes.p_of_behaviours(shares))
        rows = mixes.roles_rows([(0, head) for head in range(heads)], tests)
        flagged += sum(row["q"] < 0.05 for row in rows)
        differ += sum(row["q_differ"] < 0.05 for row in rows)
    return flagged / heads / seeds, differ / heads / seeds


def test_heads_of_one_behaviour_are_not_flagged_and_those_of_two_are():
    def one(name, drawn):  # rests where its key does not exist, which classes differ in
        rests = np.clip({"punctuation": 0.2, "start": 0.6}.get(name, 0.4) + drawn.normal(0, 0.1),
                        0.02, 0.9)  # fmt: skip
        rest = {"first": rests, "separator": 0.12 * (1 - rests) / 2}
        return rest | {"previous": 0.05 * (1 - rests), "induction": 0.8 * (1 - rests)}

    def least(name, drawn):  # a second behaviour that is exactly as frequent as it may be
        second = drawn.beta(2, 18)
        return {"induction": second, "previous": 0.6 * (1 - second)}

    def by_class(name, drawn):
        at = "previous" if name in ("start", "continuation") else "duplicate"
        return {at: 0.5 + 0.2 * drawn.random()}

    def local(name, drawn):
        at = 0.4 + 0.1 * drawn.random()
        return {"previous": at, "self": at}

    def mixture(name, drawn):
        at = 0.3 + 0.1 * drawn.random()
        return {"previous": at, "induction": at}

    for number in (6, 40):
        assert false_or_found(4, 25, number, one) == (0.0, 0.0)
        assert max(false_or_found(1, 100, number, least)) <= 0.03
        assert false_or_found(4, 5, number, local) == (0.0, 0.0)
    assert false_or_found(4, 5, 40, by_class) == (1.0, 1.0)
    assert false_or_found(4, 5, 40, mixture) == (1.0, 0.0)


def test_few_queries_that_agree_are_no_proof():
    counts = np.zeros((2, 1, *SHAPE), dtype=np.int64)  # two texts with one query of a class each
    counts[:, 0, NAMES.index("digit"), list(KINDS).index("previous"), 0] = 1
    counts[:, 0, NAMES.index("start"), list(KINDS).index("induction"), 0] = 300
    shares = shares_of_texts(counts, np.zeros((1, SHAPE[0], len(BEHAVIOURS))))
    p = mixes.p_of_behaviours(shares)
    assert p[0, NAMES.index("digit"), list(BEHAVIOURS).index("previous")] == 1.0
    assert mixes.tests_of(shares, p)[0].p == 1.0


def test_one_text_and_other_metrics(tmp_path):
    model, tok = MODELS["gpt2"](attn_implementation="clearhead").eval(), tokenizer()
    one = ch.survey(model, TEXTS[5], out=tmp_path / "one", tokenizer=tok, context=CONTEXT)
    roles = one.roles(0, 0)
    assert roles.q is None and not roles.does_more_than_one_thing and roles.surest == ()
    assert all(part.low is None and part.p is None for part in roles.mix)
    first = ch.survey(
        model, TEXTS, out=tmp_path / "first", tokenizer=tok, context=CONTEXT, metrics=[First()]
    )
    with pytest.raises(ch.BadValue, match="metric is 'self'"):
        first.roles(0, 0)
    assert first.query("select count(*) from mixes where share > 0 and p is null").rows[0][0]


def test_classes_of_tokens():
    words = ["[CLS]", " un", "happy", "'", "s", " 4th", "[SEP]", "é", "!?", "\t\n", "⟨E4 BD⟩", "x"]
    spelling = dict(enumerate(words))

    def names(ids: list[int], spaced: bool) -> list[str]:
        return [NAMES[i] for i in token_classes(torch.tensor([ids]), spelling, spaced)[0].tolist()]

    assert names([0, 1, 2, 3, 4], True) == [
        "first", "start", "continuation", "punctuation", "continuation"
    ]  # fmt: skip
    assert names([0, 5, 7, 6, 7, 8, 11], True) == [
        "first", "digit", "continuation", "other", "start", "punctuation", "start"
    ]  # fmt: skip
    assert names([1, 9, 10, 11, 2], True) == ["first", "space", "other", "start", "continuation"]
    assert names([0, 2, 2], False) == ["first", "start", "start"]
    assert len(CLASSES) == len(NAMES)


def test_a_survey_of_an_older_format_is_refused_by_name(tmp_path):
    model, tok = MODELS["gpt2"](attn_implementation="clearhead").eval(), tokenizer()
    ch.survey(model, TEXTS[:3], out=tmp_path, tokenizer=tok, context=CONTEXT)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 4}))
    with pytest.raises(ch.BadValue, match="it has format 4, and this version writes 9"):
        ch.Survey.open(tmp_path)

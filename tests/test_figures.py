"""Reproduce every figure of the five teaching documents with public functions.

There is one function for each figure, and `test_every_figure_is_shown` compares their names with
`figures.json`, which has the origin of each figure and its number of printed digits.
"""

import json
import math
import random
from pathlib import Path

import pytest
import torch

import clearhead as ch

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parent / "data" / "figures.json").read_text())["cases"]
}
FIGURES = {}


def figure(name):
    def keep(function):
        FIGURES[name] = function
        return function

    return keep


def expected(name):
    """Return the printed figure, in which null means minus infinity."""
    if name == "e-masked-h0":
        rows = CASES[name]["expected"]
        return torch.tensor([[-math.inf if x is None else x for x in row] for row in rows])
    return torch.tensor(CASES[name]["expected"])


@pytest.mark.parametrize("name", CASES)
def test_figure(name):
    shown = torch.as_tensor(FIGURES[name]()).double()
    printed = expected(name).double()
    assert shown.shape == printed.shape
    torch.testing.assert_close(shown, printed, rtol=0, atol=CASES[name]["atol"])


def test_every_figure_is_shown():
    assert len(CASES) == 42
    assert FIGURES.keys() == CASES.keys()


# ------------------------------------------- a: Once upon a time there, from embeddings to batches


def once_upon():
    torch.manual_seed(123)
    return ch.nn.TokenEmbedding(5, 4)(torch.arange(5)).detach()


def matrices(rows, columns):
    torch.manual_seed(123)
    return [torch.rand(rows, columns) for _ in range(3)]


def trace_a(**keywords):
    x = once_upon()
    layer = ch.nn.SelfAttention.from_matrices(*matrices(4, 4))
    return layer.explain(x, tokens="Once upon a time there".split(), **keywords)


figure("a-embeddings")(once_upon)
figure("a-wq")(lambda: ch.nn.SelfAttention.from_matrices(*matrices(4, 4)).W_query.weight.T)
figure("a-q")(lambda: trace_a()["query"])
figure("a-scores")(lambda: trace_a()["scores"])
figure("a-scaled")(lambda: trace_a()["scaled"])
figure("a-weights")(lambda: trace_a()["weights"])
figure("a-output")(lambda: trace_a()["output"])


@figure("a-linear")
def linear_a():
    x = once_upon()
    torch.manual_seed(123)
    return ch.nn.SelfAttention(4, 4)(x).detach()


@figure("a-masked-weights")
def masked_but_not_renormalised():
    return trace_a()["weights"] * ch.causal.to_bool(5)


@figure("a-renormalised")
def renormalised():
    """The detour (mask the weights, divide by their sums) and the straight way are one."""
    weights = masked_but_not_renormalised()
    detour = weights / weights.sum(-1, keepdim=True)
    straight = trace_a(mask=ch.causal)["weights"]
    torch.testing.assert_close(straight, detour)
    return straight


@figure("a-dropout-weights")
def dropped_weights():
    q, k, v = (trace_a()[name] for name in ("query", "key", "value"))
    torch.manual_seed(123)
    return ch.explain(q, k, v, dropout=0.2)["dropped"]


@figure("a-dropout-zeros")
def dropped_ones():
    """100 x 100 equal weights of 1/100: how many are dropped, and what the mean of 100 x w is."""
    nothing = torch.zeros(100, 1)
    torch.manual_seed(123)
    dropped = 100 * ch.explain(nothing, nothing, nothing, dropout=0.2)["dropped"]
    return torch.tensor([float((dropped == 0).sum()), float(dropped.mean())])


@figure("a-causal")
def causal_batches():
    torch.manual_seed(123)
    batch = torch.randn(2, 5, 4)
    layer = ch.nn.CausalAttention(4, 4, 5, dropout=0.2)
    assert layer.training
    return layer(batch).detach()


# ------------------------------------------------------------- b: four tokens with three features


def trace_b():
    x = torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]])
    return ch.explain(x, x, x, scale=1)


figure("b-scores")(lambda: trace_b()["scores"])
figure("b-weights")(lambda: trace_b()["weights"])
figure("b-output")(lambda: trace_b()["output"])


# --------------------------------------------------------------------------- c: the cat sat on mat


def words_c():
    torch.manual_seed(42)
    return torch.stack([torch.rand(3) for _ in range(5)])


def trace_c():
    return ch.explain(*[words_c()] * 3, tokens="the cat sat on mat".split())


figure("c-embeddings")(lambda: trace_c()["query"])
figure("c-similarity")(lambda: trace_c()["scores"])
figure("c-weights")(lambda: trace_c()["weights"])
figure("c-context")(lambda: trace_c()["output"])


# ----------------------------------------------------------- d: Your journey starts with one step


def journey():
    return torch.tensor(CASES["d-inputs"]["expected"])


def trace_d():
    return ch.nn.SimpleAttention().explain(
        journey(), tokens="Your journey starts with one step".split()
    )


def trained_d():
    return ch.nn.SelfAttention.from_matrices(*matrices(3, 2))


figure("d-inputs")(lambda: trace_d()["query"])
figure("d-scores")(lambda: trace_d()["scores"])
figure("d-weights")(lambda: trace_d()["weights"])
figure("d-context")(lambda: ch.nn.SimpleAttention()(journey()))
figure("d-scores-2")(lambda: trace_d()["scores"][1])
figure("d-sum-normalised-2")(lambda: trace_d()["scores"][1] / trace_d()["scores"][1].sum())
figure("d-weights-2")(lambda: trace_d()["weights"][1])
figure("d-context-2")(lambda: trace_d()["output"][1])
figure("d-query-2")(lambda: trained_d().explain(journey())["query"][1])
figure("d-score-22")(lambda: trained_d().explain(journey())["scores"][1, 1])
figure("d-trainable-scores-2")(lambda: trained_d().explain(journey())["scores"][1])
figure("d-trainable-weights-2")(lambda: trained_d().explain(journey())["weights"][1])
figure("d-trainable-context-2")(lambda: trained_d().explain(journey())["output"][1])
figure("d-parameter-module")(lambda: trained_d()(journey()))


@figure("d-linear-module")
def linear_d():
    torch.manual_seed(789)
    return ch.nn.SelfAttention(3, 2)(journey()).detach()


# ------------------------------------------------------------------ e: pure Python, two heads


def trace_e():
    """The document draws its tables with random.gauss; two heads of size 8."""
    source = random.Random(42)

    def draw(rows, columns):
        return torch.tensor([[source.gauss(0, 0.1) for _ in range(columns)] for _ in range(rows)])

    tokens, positions = draw(6, 16), draw(5, 16)
    W_q, W_k, W_v = ([draw(16, 8) for _ in range(2)] for _ in range(3))
    x = tokens[[1, 3, 4, 5, 2]] + positions
    q, k, v = (torch.stack([x @ W for W in heads]) for heads in (W_q, W_k, W_v))
    return ch.explain(
        q, k, v, mask=ch.causal, tokens=["<BOS>", "I", "like", "transformers", "<EOS>"]
    )


figure("e-scores-h0")(lambda: trace_e()["scores"][0])
figure("e-scaled-h0")(lambda: trace_e()["scaled"][0])
figure("e-masked-h0")(lambda: trace_e()["masked"][0])
figure("e-weights-h0")(lambda: trace_e()["weights"][0])
figure("e-weights-h1")(lambda: trace_e()["weights"][1])
figure("e-output-h0")(lambda: trace_e()["output"][0])
figure("e-output-h1")(lambda: trace_e()["output"][1])

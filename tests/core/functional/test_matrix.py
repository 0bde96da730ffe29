"""Compare parts of the attention matrix with the full matrix of `explain`."""

import importlib
import math
import re

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import clearhead as ch
from tests.problems import PROBLEMS

room = importlib.import_module(
    "clearhead.core.functional.matrix"
)  # the face has a function of that name

ASKED = [p for p in PROBLEMS if p not in ("large", "dropout by seed")]


def both(problem: str) -> tuple[ch.Matrix, Tensor, ch.Trace]:
    case = PROBLEMS[problem](torch.float64, 0)
    q, k, _ = case.tensors
    trace = ch.explain(*case.tensors, **case.keywords)
    return ch.matrix(q, k, **case.keywords), trace["weights"], trace


@pytest.fixture
def narrow_strips(monkeypatch):
    """Strips of a few queries, so that every problem has several."""
    monkeypatch.setattr(room, "STRIP_CELLS", 600)


@pytest.mark.parametrize("problem", ASKED)
def test_every_piece_is_a_piece_of_the_whole(problem, narrow_strips):
    A, weights, _ = both(problem)
    B, H, Tq, Tk = weights.shape
    assert A.shape == (B, H, Tq, Tk) and A.T.shape == (B, H, Tk, Tq) and A.T.T is A
    torch.testing.assert_close(A.to_dense(), weights)
    if min(weights.shape) == 0:
        return
    q, k = Tq - 1, Tk - 1
    torch.testing.assert_close(A.rows(q // 2), weights[:, :, q // 2 : q // 2 + 1])
    torch.testing.assert_close(A.rows([q, 0, q]), weights[:, :, [q, 0, q]])
    torch.testing.assert_close(A.cols(-1), weights[..., -1:])
    torch.testing.assert_close(A.cols([k, 0]), weights[..., [k, 0]])
    for rows, cols in (
        (slice(None), slice(1, 5)),
        (slice(2, 9, 3), slice(None, None, -2)),
        (slice(-3, None), slice(4, 4)),
        (slice(5, 2), slice(None)),
    ):
        some = torch.arange(Tq)[list(range(*rows.indices(Tq)))]
        part = weights[:, :, some][..., list(range(*cols.indices(Tk)))]
        torch.testing.assert_close(A.rows(rows), weights[:, :, some])
        torch.testing.assert_close(A.block(rows, cols), part)
    torch.testing.assert_close(A.cols(slice(0, 8, 2)), weights[..., 0:8:2])


@pytest.mark.parametrize("problem", ASKED)
def test_products(problem, narrow_strips):
    A, weights, trace = both(problem)
    case = PROBLEMS[problem](torch.float64, 0)
    torch.testing.assert_close(A @ case.v, trace["output"])
    x = torch.randn(*weights.shape[:3], 3, dtype=torch.float64)
    torch.testing.assert_close(A.T @ x, weights.mT @ x)
    every_head = torch.randn(weights.shape[0], 1, weights.shape[3], 2, dtype=torch.float64)
    if weights.shape[1] % case.k.shape[1] == 0 and case.k.shape[1] == 1:
        torch.testing.assert_close(A @ every_head, weights @ every_head)


@pytest.mark.parametrize("problem", ["full", "lengths", "sinks and fully masked queries"])
def test_log_sum_exp(problem, narrow_strips):
    A, _, trace = both(problem)
    scores = trace["masked"] if "masked" in trace else trace["scaled"]
    sinks = PROBLEMS[problem](torch.float64, 0).keywords.get("sinks")
    if sinks is not None:
        extra = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], -1)
    torch.testing.assert_close(A.lse, torch.logsumexp(scores, -1))


def test_by_hand():
    """Scores 0 and log 3: weights 1/4 and 3/4."""
    A = ch.matrix(torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]]))
    assert A.shape == (1, 2) and A.rows(0).tolist()[0] == pytest.approx([0.25, 0.75])
    assert (A @ torch.tensor([[8.0], [4.0]])).item() == pytest.approx(5.0)
    assert (A.T @ torch.tensor([[4.0]])).flatten().tolist() == pytest.approx([1.0, 3.0])
    assert A.lse.item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("rank", [2, 3])
def test_leading_dimensions_may_be_missing(rank):
    q, k = torch.randn(5, 4), torch.randn(7, 4)
    q, k = (x.reshape((1,) * (rank - 2) + tuple(x.shape)) for x in (q, k))
    A, lead = ch.matrix(q, k, mask=ch.Causal(align="end")), q.shape[:-2]
    assert A.shape == (*lead, 5, 7)
    assert A.rows(2).shape == (*lead, 1, 7) and A.cols([1, 2]).shape == (*lead, 5, 2)
    assert A.lse.shape == (*lead, 5)
    assert (A @ torch.randn(*lead, 7, 3)).shape == (*lead, 5, 3)
    assert (A.T @ torch.randn(*lead, 5, 3)).shape == (*lead, 7, 3)


def test_weights_never_carry_dropout():
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 1, 7, 4)
    dropped, undropped = ch.matrix(q, k, dropout=0.5, seed=3), ch.matrix(q, k)
    assert torch.equal(dropped.to_dense(), undropped.to_dense())


def test_an_array_of_it_is_the_matrix(monkeypatch):
    q, k = torch.randn(2, 3, 5, 4, requires_grad=True), torch.randn(2, 1, 7, 4)
    A = ch.matrix(q, k, mask=ch.Causal(align="end"))
    weights = ch.explain(q, k, k, mask=ch.Causal(align="end"))["weights"].detach().numpy()
    np.testing.assert_allclose(np.asarray(A), weights, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(np.asarray(A.T), np.asarray(A).swapaxes(-1, -2))
    assert np.asarray(A, dtype=np.float64).dtype == np.float64
    np.testing.assert_allclose(np.sum(A, -1), np.ones((2, 3, 5)), rtol=1e-6)
    with pytest.raises(ch.BadValue, match="copy=False was passed"):
        A.__array__(copy=False)
    for read in (lambda: A[0], lambda: list(A)):
        with pytest.raises(ch.BadType, match="The matrix was indexed with 0, or iterated over"):
            read()
    monkeypatch.setattr(ch.Matrix.to_dense, "__defaults__", (209,))
    with pytest.raises(ch.BadValue, match="The matrix has 210 cells"):
        np.asarray(A)


def test_half_precision_is_answered_in_fp32():
    q, k = torch.randn(1, 2, 5, 4).bfloat16(), torch.randn(1, 2, 7, 4).bfloat16()
    assert ch.matrix(q, k).rows(0).dtype == torch.float32
    torch.testing.assert_close(ch.matrix(q, k).to_dense(), ch.explain(q, k, k)["weights"])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_masked_values_do_not_leak(bad):
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 7, 4)
    mask = ch.lengths(keys=4, queries=3)
    true = ch.matrix(q, k, mask=mask)
    x, y = torch.randn(1, 2, 7, 3), torch.randn(1, 2, 5, 3)
    expected = true.to_dense(), true @ x, true.T @ y
    for tensor, place in ((k, 4), (q, 3), (x, 4), (y, 3)):
        tensor[:, :, place:] = bad
    spoiled = ch.matrix(q, k, mask=mask)
    torch.testing.assert_close((spoiled.to_dense(), spoiled @ x, spoiled.T @ y), expected)


def test_gradients_are_those_of_the_whole(narrow_strips):
    q, k = (torch.randn(1, 2, t, 4, dtype=torch.float64, requires_grad=True) for t in (13, 17))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    keywords = dict(mask=ch.Causal(align="end"), sinks=sinks)
    trace = ch.explain(q, k, k.detach(), **keywords)
    weights = trace["weights"]
    logits = torch.cat([trace["masked"], sinks.reshape(1, 2, 1, 1).expand(1, 2, 13, 1)], -1)
    A = ch.matrix(q, k, **keywords)
    with torch.no_grad():
        A.cols(3)  # looking first must not cut the graph off afterwards
    x = torch.randn(1, 2, 17, 3, dtype=torch.float64)
    for got, true in (
        (A.cols([2, 5]).square(), weights[..., [2, 5]].square()),
        (A.block(slice(3, 6), slice(0, 9)), weights[:, :, 3:6, :9]),
        ((A @ x).square(), (weights @ x).square()),
        ((A.T @ x[:, :, :13]).square(), (weights.mT @ x[:, :, :13]).square()),
        (A.lse.square(), torch.logsumexp(logits, -1).square()),
    ):
        mine = torch.autograd.grad(got.sum(), (q, k, sinks))
        theirs = torch.autograd.grad(true.sum(), (q, k, sinks), retain_graph=True)
        torch.testing.assert_close(mine, theirs)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *made])
        return out


def test_the_square_is_never_formed(monkeypatch):
    """20,000 tokens: the matrix has 400 million cells; the requested parts have 60,000."""
    T = 20_000
    q, k = torch.randn(T, 2), torch.randn(T, 2)
    A = ch.matrix(q, k, mask=ch.causal)
    with Largest() as few:
        assert A.rows([0, 7, T - 1]).shape == (3, T)
        assert A.block(slice(50, 60), slice(0, 9)).shape == (10, 9)
    assert few.numel <= 10 * T
    monkeypatch.setattr(room, "STRIP_CELLS", 2**16)
    T = 3000
    q, k = q[:T], k[:T]
    with Largest() as strips:
        mass = ch.matrix(q, k, mask=ch.causal).T @ torch.ones(T, 1)
        assert (ch.matrix(q, k) @ torch.ones(T, 1)).shape == (T, 1)
    assert strips.numel <= room.STRIP_CELLS < T * T / 100
    torch.testing.assert_close(mass.sum(), torch.tensor(float(T)), rtol=1e-4, atol=0)


def test_a_column_is_kept_cheap_after_the_first():
    """The sums of all queries are computed once; then a column costs a column."""
    A = ch.matrix(torch.randn(3000, 4), torch.randn(3000, 4))
    A.cols(1)
    with Largest() as again:
        A.cols(range(5, 8))
    assert again.numel <= 3 * 3000 * 4


def test_it_prints_what_it_is():
    A = ch.matrix(torch.randn(5, 4), torch.randn(7, 4), mask=ch.prefix(2))
    assert repr(A) == (
        "attention matrix 5 x 7 of B=1 H=1 Tq=5 Tk=7 D=4, float32 on cpu, mask prefix(2)\n"
        f"  entropy {A.entropy().mean():.3f} nats on average, at most {A.entropy().max():.3f}"
    )


ERRORS = {
    "too large": (
        lambda A: A.to_dense(most=100),
        ch.BadValue,
        """The matrix has 210 cells (0.0 GB in fp32).
  Rule: to_dense writes at most 100 cells, its argument most=.
  Hint: compute rows, cols, a block or a product, or call to_dense(most=210).""",
    ),
    "a row too far": (
        lambda A: A.rows([0, 5]),
        ch.BadValue,
        """query 5 was requested.
  Rule: there are 5, counted from 0; -1 is the last.
  Hint: pass an int, a slice or a list of ints, from -5 to 4.""",
    ),
    "a column too far back": (
        lambda A: A.cols(-8),
        ch.BadValue,
        """key -8 was requested.
  Rule: there are 7, counted from 0; -1 is the last.
  Hint: pass an int, a slice or a list of ints, from -7 to 6.""",
    ),
    "a row by its token": (
        lambda A: A.rows(["cat"]),
        ch.BadType,
        """query 'cat' was requested.
  Rule: there are 5, counted from 0; -1 is the last.
  Hint: pass an int, a slice or a list of ints, from -5 to 4.""",
    ),
    "values of another length": (
        lambda A: A @ torch.randn(2, 3, 5, 4),
        ch.BadValue,
        """A @ x got x of shape (2, 3, 5, 4) for a matrix (2, 3, 5, 7).
  Rule: x has as many dimensions as q, and one row for each of the 7 keys.
  Hint: pass x with the second-to-last size 7.""",
    ),
    "values without a batch": (
        lambda A: A.T @ torch.randn(5, 4),
        ch.BadValue,
        """A.T @ x got x of shape (5, 4) for a matrix (2, 3, 5, 7).
  Rule: x has as many dimensions as q, and one row for each of the 5 queries.
  Hint: pass x with the second-to-last size 5.""",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, kind, text = ERRORS[name]
    A = ch.matrix(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4))
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        call(A)


def test_a_product_is_attention_by_an_engine_that_can_be_named():
    q, k, x = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 2)
    assert torch.equal(ch.matrix(q, k) @ x, ch.attention(q, k, x))
    for engine in ("cpu", "sdpa", "tiled", "steps"):
        torch.testing.assert_close(ch.matrix(q, k, engine=engine) @ x, ch.attention(q, k, x))
    with pytest.raises(ch.BadValue, match="torch has no soft cap"):
        _ = ch.matrix(q, k, softcap=3.0, engine="sdpa") @ x
    with pytest.raises(ch.BadValue, match="engine='fast' is unknown"):
        ch.matrix(q, k, engine="fast")


def test_the_repr_of_the_matrix():
    """Entropy, the largest weights and a pooled map, as the weights written out have them."""
    q, k = torch.randn(2, 3, 11, 5), torch.randn(2, 3, 13, 5)
    A = ch.matrix(q, k, mask=ch.Causal(align="end"))
    weights = A.to_dense()
    torch.testing.assert_close(A.entropy(), torch.special.entr(weights).sum(-1))
    best = A.topk(2)
    torch.testing.assert_close(best.weights, weights.topk(2).values)
    assert best.keys.equal(weights.topk(2).indices)
    assert A.pool(4, 5).shape == (2, 3, 4, 5)
    torch.testing.assert_close(A.pool(1, 1), torch.ones(2, 3, 1, 1))
    assert ch.matrix(q[0, 0], k[0, 0]).topk(3).keys.shape == (11, 3)
    assert "entropy" in repr(A) and "entropy" not in repr(ch.matrix(q[:0], k[:0]))


def test_a_notebook_shows_a_thumbnail_of_every_head():
    import base64
    import io

    from PIL import Image

    q = torch.randn(2, 3, 100, 5)
    shown = ch.matrix(q, q, mask=ch.causal)._repr_html_()
    pictures = re.findall(r"base64,([^\"]+)", shown)
    assert len(pictures) == 3 and "http" not in shown
    image = Image.open(io.BytesIO(base64.b64decode(pictures[0])))
    assert image.size == (64, 64)
    assert image.getpixel((63, 0)) == (252, 251, 248) and image.getpixel((0, 0)) == (14, 32, 58)


def test_a_notebook_draws_what_is_no_number(narrow_strips):
    q, k = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 7, 4)
    k[..., 3, 0] = math.nan
    assert "<img" in ch.matrix(q, k)._repr_html_()


def test_products_have_second_derivatives():
    q, k, x = (torch.randn(5, 4) for _ in range(3))

    def squared(q):
        return (ch.matrix(q, k) @ x).square().sum()

    def dense_attention(q):
        return (torch.softmax(q @ k.T / 2, -1) @ x).square().sum()

    ours, true = (torch.autograd.functional.hessian(f, q) for f in (squared, dense_attention))
    torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-5)


def test_a_few_scattered_columns_cost_a_few_columns(monkeypatch):
    cells = []
    logits = ch.Matrix._logits
    monkeypatch.setattr(
        ch.Matrix, "_logits",
        lambda self, q, k: cells.append((q.stop - q.start) * (k.stop - k.start))
        or logits(self, q, k),
    )  # fmt: skip
    q = torch.randn(1, 1, 256, 4)
    A = ch.matrix(q, q)
    dense = A.to_dense()
    A.cols(0)  # from now on all sums are kept
    cells.clear()
    torch.testing.assert_close(A.cols([255, 0]), dense[..., [255, 0]])
    assert sum(cells) == 2 * 256
    cells.clear()
    torch.testing.assert_close(A.block([3, 9], range(0, 256, 2)), dense[:, :, [3, 9]][..., ::2])
    assert sum(cells) == 2 * 256


def test_a_position_may_come_from_argmax():
    q, k = torch.randn(2, 5, 4), torch.randn(2, 7, 4)
    A = ch.matrix(q, k)
    place = torch.tensor([0.0, 0.0, 1.0]).argmax()
    assert torch.equal(A.rows(place), A.rows(2)) and torch.equal(A.cols(place), A.cols(2))

"""Masks and biases that `expand` made take the memory of what was expanded, and mean the same."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from clearhead.core.masks.key_ranges import from_bits
from clearhead.core.torch_state import without_repeats
from tests.fresh_process import run_program
from tests.memory import needs_peak

T = 7
ROW = torch.tensor([[[[1, 0, 1, 1, 0, 1, 0]]], [[[0, 1, 1, 0, 1, 1, 1]]]]).bool()  # of two texts
COLUMN = ROW.mT
TABLE = torch.eye(T).bool() | ROW[0, 0]
EXPANDED = {
    "row": ROW.expand(2, 3, T, T),
    "column": COLUMN.expand(2, 3, T, T),
    "table": TABLE.expand(2, 3, T, T),
    "cell": torch.tensor(True).expand(T, T),
}


pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


def qkv(*, grad: bool = False) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 3, T, 8, requires_grad=grad) for _ in range(3))


@pytest.mark.parametrize("engine", ["auto", "tiled", "sdpa", "steps"])
@pytest.mark.parametrize("name", EXPANDED)
def test_a_view_means_what_its_copy_means(name, engine):
    view = EXPANDED[name]
    copy = view.contiguous()
    added = torch.zeros(copy.shape).masked_fill(~copy, float("-inf"))
    q, k, v = qkv(grad=True)

    def answers(keep: Tensor) -> list[Tensor]:
        rules = [
            {"mask": ch.dense(keep=keep)},
            {"mask": ~ch.dense(keep=keep) | ch.causal},
            {"mask": ch.dense(drop=keep) & ch.window(before=3)},
        ]
        return [ch.attention(q, k, v, engine=engine, **rule) for rule in rules]

    for got, expected in zip(answers(view), answers(copy), strict=True):
        torch.testing.assert_close(got, expected)
    # -inf in a row, and in its view
    few = torch.zeros(without_repeats(view).shape)
    few = few.masked_fill(~without_repeats(view), float("-inf")).expand(view.shape)
    got, expected = (ch.attention(q, k, v, bias=x, engine=engine) for x in (few, added))
    torch.testing.assert_close(got, expected)
    grads = [torch.autograd.grad(x.sum(), (q, k, v)) for x in (got, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", EXPANDED)
def test_a_mask_keeps_its_sizes_and_copies_what_was_expanded(name):
    view = EXPANDED[name]
    copy = view.contiguous()
    for mask, same in (
        (ch.dense(keep=view), ch.dense(keep=copy)),
        (ch.dense(drop=view), ch.dense(drop=copy)),
    ):
        assert mask.bits.untyped_storage().nbytes() == without_repeats(view).numel()
        assert mask.sizes() == same.sizes()
        assert mask == same
        written = (x.to_bool(T, T, B=2, H=3).expand(2, 3, T, T) for x in (mask, same))
        assert torch.equal(*written)


def test_the_same_for_all_keys_is_a_range():
    for bits in (COLUMN, COLUMN.expand(2, 3, T, T)):
        ranges = from_bits(bits, T, T)
        assert ranges.bits is None
        assert torch.equal(ranges.to_bool().expand(2, 3, T, T), COLUMN.expand(2, 3, T, T))


def test_each_cell_of_an_expanded_bias_that_learns_has_its_gradient():
    q, k, v = qkv()
    leaf = torch.randn(1, T).expand(T, T).requires_grad_()
    expected = leaf.detach().clone().requires_grad_()
    grads = [
        torch.autograd.grad(ch.attention(q, k, v, bias=x).square().sum(), x)[0]
        for x in (leaf, expected)
    ]
    torch.testing.assert_close(*grads)
    assert grads[0].std(0).max() > 1e-3  # queries differ
    by_func = torch.func.grad(lambda x: ch.attention(q, k, v, bias=x).square().sum())(leaf.detach())
    torch.testing.assert_close(by_func, grads[1])


def test_tangents_go_through_a_view():
    q, k, v = qkv()
    row, tangent = torch.randn(2, 1, T)

    def call(bias: Tensor) -> Tensor:
        return ch.attention(q, k, v, bias=bias)

    got = torch.func.jvp(lambda x: call(x.expand(T, T)), (row,), (tangent,))[1]
    expected = torch.func.jvp(call, (row.expand(T, T).clone(),), (tangent.expand(T, T).clone(),))[1]
    torch.testing.assert_close(got, expected)


@pytest.mark.outside  # torch compiles for seconds
def test_a_view_under_vmap_and_in_a_graph():
    q, k, v = qkv()

    def call(keep: Tensor) -> Tensor:
        return ch.attention(q, k, v, mask=ch.dense(keep=keep.expand(2, 3, T, T)))

    expected = torch.stack([call(row) for row in ROW])
    torch.testing.assert_close(torch.vmap(call)(ROW), expected)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(ROW[0]), expected[0])
    view = torch.compile(
        lambda x: ch.attention(q, k, v, mask=ch.dense(keep=x)), backend="aot_eager"
    )
    torch.testing.assert_close(view(ROW[0].expand(2, 3, T, T)), expected[0])


@pytest.mark.parametrize("shape", [(3, T, T), (2, 3, T, T), (5, 2, 3, T, T)])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_torchs_signature_takes_views(kind, shape):
    q, k, v = (torch.randn(*shape[:-1], 8) for _ in range(3))
    keep = ROW[0, 0]
    mask = keep if kind is torch.bool else torch.zeros(1, T).masked_fill(~keep, float("-inf"))
    for view in (mask.expand(shape), mask.expand(T, T), mask.expand(*shape[:-3], 1, 1, T)):
        got = ch.compat.scaled_dot_product_attention(q, k, v, view)
        torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, view))
    with pytest.raises(ch.BadValue, match="broadcasts to the scores"):
        ch.compat.scaled_dot_product_attention(q, k, v, mask.expand(T + 1, T))


MEMORY = """
import torch, clearhead as ch
from clearhead.hf.attention import _attend
from tests.memory import grown

T = 4096  # a byte for each cell is 16 MB
row = torch.rand(1, 1, 1, T) > 0.5
added = torch.zeros(1, 1, 1, T).masked_fill(~row, float("-inf"))
view, module = (1, 1, T, T), torch.nn.Module()

def calls(n):
    x = torch.randn(1, 1, n, 8)
    bits, numbers = (y[..., :n].expand(1, 1, n, n) for y in (row, added))
    ch.attention(x, x, x, mask=ch.dense(keep=bits))
    ch.attention(x, x, x, mask=~ch.dense(drop=bits) & ch.causal)
    ch.attention(x, x, x, mask=ch.dense(keep=bits.mT))
    ch.attention(x, x, x, bias=numbers)
    ch.compat.scaled_dot_product_attention(x, x, x, bits)
    ch.compat.scaled_dot_product_attention(x, x, x, numbers)
    _attend(module, x, x, x, bits)
    _attend(module, x, x, x, numbers)

calls(64)
print(grown(lambda: calls(T)))
"""


@pytest.mark.outside
@needs_peak
def test_a_view_takes_no_memory_of_its_size():
    run = run_program(MEMORY)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 8

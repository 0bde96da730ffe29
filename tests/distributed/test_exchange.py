"""The exchange of heads for sequence, with and without a ring: as exact as one machine; and what
cannot be exchanged."""

from dataclasses import replace

import pytest
import torch

import clearhead as ch
from clearhead.core.masks import Grid
from clearhead.core.problem.biases import TensorBias
from clearhead.core.problem.check import Options
from clearhead.distributed import Layout
from clearhead.distributed.attention import Call, attend
from clearhead.distributed.cut import Cut
from clearhead.distributed.exchange import of_teams
from clearhead.distributed.layouts import Positions, head_tail
from tests.core.masks.test_masks import cell_by_cell
from tests.distributed.test_ring import LAYOUTS, check
from tests.distributed.threads import on_ranks
from tests.pairs import pairs
from tests.problems import PROBLEMS, make


def can_exchange(name: str) -> bool:
    case = PROBLEMS[name](torch.float32, 0)
    return case.k.shape[1] % 2 == 0 and not isinstance(case.keywords.get("bias"), TensorBias)


EXCHANGED = [name for name in PROBLEMS if name != "no batch" and can_exchange(name)]
PER_HEAD = torch.rand(2, 6, 13, 17, generator=torch.Generator().manual_seed(1)) < 0.5
MORE = {
    "a mask for each head": make(Tq=13, Tk=17, mask=ch.dense(keep=PER_HEAD)),
    "dropout by seed": make(G=2, Tq=13, Tk=17, dropout=0.3, seed=5, mask=ch.prefix(9)),
}


@pytest.mark.parametrize(
    "problem, layout, world",
    pairs(EXCHANGED, ["contiguous", "head-tail", "all on one rank"], [2, 4]),
)  # one team, and two in a ring
def test_teams_are_as_exact_as_one_machine(problem, layout, world):
    check(world, layout, PROBLEMS[problem], torch.float32, heads=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("problem", MORE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_what_differs_between_heads(problem, layout, dtype):
    check(4, layout, MORE[problem], dtype, heads=2)


def test_four_teams_of_eight():
    problem = make(B=1, H=16, G=8, Tq=67, Tk=67, mask=ch.causal)
    check(32, "head-tail", problem, torch.float32, heads=8)


def test_a_team_holds_the_positions_of_its_ranks():
    assert of_teams(head_tail(16, 4), 2) == Layout([[range(4), range(12, 16)], [range(4, 12)]])


def test_a_mask_of_some_heads():
    whole = ch.dense(keep=PER_HEAD)
    every = (Positions((range(size),)) for size in (13, 17))
    some = Cut(whole, Grid(13, 17, 2, 6), *every, first_head=2)
    assert torch.equal(some.to_bool(13, 17, B=2, H=3), PER_HEAD[:, 2:5])
    assert some == replace(some) != replace(some, first_head=1)
    grid = Grid(13, 17, 2, 3)
    assert torch.equal(cell_by_cell(some, grid), PER_HEAD[:, 2:5])


@pytest.mark.parametrize("heads", [0, 3, 4, 2.5])
def test_teams_divide_ranks_and_heads(heads):
    x = torch.randn(1, 6, 4, 8)

    def rank(transport):
        return attend(transport, Call(heads=heads), x, x[:, :2], x[:, :2])

    with pytest.raises(ch.BadValue) as error:
        on_ranks(4, rank)
    assert error.value.gave == f"heads={heads!r}, with 4 ranks, H=6 and G=2."


def test_a_bias_tensor_is_not_exchanged():
    x = torch.randn(1, 2, 4, 8)
    call = Call(Options(bias=torch.zeros(4, 8)), heads=2)
    with pytest.raises(ch.BadValue, match="heads=2, with a bias tensor"):
        on_ranks(2, lambda transport: attend(transport, call, x, x, x))


def test_one_team_has_the_same_bits_for_any_number_of_ranks():
    draw = torch.Generator().manual_seed(9)
    q, k, v, dout = (torch.randn(1, h, 131, 16, generator=draw) for h in (8, 8, 8, 8))

    def answered(world: int) -> list[torch.Tensor]:
        layout = head_tail(131, world)

        def rank(transport):
            held = layout.positions[transport.rank]
            mine = [held.cut(x, 2).clone().requires_grad_() for x in (q, k, v)]
            call = Call(Options(ch.causal), layout, heads=world)
            out = attend(transport, call, *mine)
            return out, *torch.autograd.grad(out, mine, held.cut(dout, 2))

        return [layout.join(x, 2) for x in zip(*on_ranks(world, rank), strict=True)]

    one = answered(1)
    for world in (2, 4, 8):
        assert all(torch.equal(a, b) for a, b in zip(answered(world), one, strict=True))

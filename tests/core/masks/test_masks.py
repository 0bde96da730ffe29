"""Masks: each rule by hand, cell by cell against runs, laws of composition, exports, words."""

# ruff: noqa: E501  (error texts stand here as they are printed)

import operator
import pickle
import re
import sys
import weakref
from functools import reduce
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import clearhead as ch
from clearhead.core import torch_state
from clearhead.core.masks import And, Grid, Mask, Or, mask as mask_room, values
from clearhead.core.masks.key_group import key_groups
from clearhead.core.masks.positions import Everything
from clearhead.core.problem.check import Options, make_problem

# ------------------------------------------------------------------------------- random masks


def numbers(B: int, low: int, high: int) -> st.SearchStrategy:
    """One number, or one per batch."""
    one = st.integers(low, high)
    return one | st.lists(one, min_size=B, max_size=B)


def leaves(grid: Grid) -> st.SearchStrategy[Mask]:
    """Every kind of rule, for these sizes."""
    B, H, Tq, Tk = grid.B, grid.H, grid.Tq, grid.Tk
    aligns = st.sampled_from(["start", "end"]) | numbers(B, -3, Tk + 2)
    if Tq == Tk:
        aligns = aligns | st.none()
    sides = st.none() | st.integers(0, 4)
    batches = st.sampled_from(sorted({1, B}))

    def names(T: int) -> st.SearchStrategy:
        def rows(b: int) -> st.SearchStrategy:
            row = st.lists(st.integers(0, 3), min_size=T, max_size=T)
            return row if b == 1 else st.lists(row, min_size=b, max_size=b)

        return batches.flatmap(rows)

    def bits(shape: tuple[int, ...]) -> st.SearchStrategy[Tensor]:
        size = int(torch.tensor(shape).prod())
        cells = st.lists(st.booleans(), min_size=size, max_size=size)
        return cells.map(lambda x: torch.tensor(x).reshape(shape))

    shapes = st.tuples(*(st.sampled_from(sorted({1, n})) for n in (B, H, Tq, Tk)))
    shapes = shapes | st.just((Tq, Tk)) | st.just((H, 1, Tk)) | st.just((Tk,))
    return st.one_of(
        st.just(ch.everything),
        st.builds(ch.Causal, aligns),
        st.builds(ch.window, before=sides, after=sides, align=aligns),
        st.builds(ch.prefix, numbers(B, 0, Tk + 2)),
        st.builds(ch.lengths, keys=numbers(B, 0, Tk)),
        st.builds(ch.lengths, queries=numbers(B, 0, Tq)),
        st.builds(ch.lengths, keys=numbers(B, 0, Tk), queries=numbers(B, 0, Tq)),
        st.builds(ch.documents, names(Tk), names(Tq)),
        shapes.flatmap(bits).map(lambda x: ch.dense(keep=x)),
        shapes.flatmap(bits).map(lambda x: ch.dense(drop=x)),
    )


def masks(grid: Grid) -> st.SearchStrategy[Mask]:
    return st.recursive(
        leaves(grid),
        lambda part: st.one_of(
            st.tuples(part, part).map(lambda p: p[0] & p[1]),
            st.tuples(part, part).map(lambda p: p[0] | p[1]),
            part.map(lambda m: ~m),
        ),
        max_leaves=5,
    )


GRIDS = st.builds(
    Grid, st.integers(1, 5), st.integers(1, 7), st.sampled_from([1, 2]), st.sampled_from([1, 3])
)
ONE = GRIDS.flatmap(lambda g: st.tuples(st.just(g), masks(g)))
TWO = GRIDS.flatmap(lambda g: st.tuples(st.just(g), masks(g), masks(g)))


def cell_by_cell(mask: Mask, grid: Grid) -> Tensor:
    b, h, q, k = torch.meshgrid(
        *(torch.arange(n) for n in (grid.B, grid.H, grid.Tq, grid.Tk)), indexing="ij"
    )
    return mask.allowed(grid, b, h, q, k)


def runs(mask: Mask, grid: Grid) -> Tensor:
    return mask.key_ranges(grid).to_bool().expand(grid.B, grid.H, grid.Tq, grid.Tk)


# --------------------------------------------------------------------- ---- two forms of a rule


@given(ONE)
def test_cells_and_ranges_are_the_same(asked):
    grid, mask = asked
    keep = cell_by_cell(mask, grid)
    assert torch.equal(runs(mask, grid), keep)
    assert torch.equal(mask.key_ranges(grid).keys_per_query().expand(keep.shape[:3]), keep.sum(-1))
    sizes = dict(Tq=grid.Tq, Tk=grid.Tk, B=grid.B, H=grid.H)
    assert torch.equal(mask.to_bool(**sizes).expand_as(keep), keep)
    group = key_groups([mask], grid, None)[0].to_bool(slice(0, grid.Tq), slice(0, grid.Tk))
    assert torch.equal(group.expand_as(keep), keep)
    x = torch.empty(grid.B, grid.H, grid.Tk, 1)
    problem, _ = make_problem(torch.empty(grid.B, grid.H, grid.Tq, 1), x, x, Options(mask))
    assert torch.equal(problem.fully_masked().expand(keep.shape[:3]), ~keep.any(-1))
    if band := mask.band(grid):
        distance = torch.arange(grid.Tk) - torch.arange(grid.Tq).unsqueeze(-1)
        assert torch.equal(((-band[0] <= distance) & (distance <= band[1])).expand_as(keep), keep)


@given(ONE, st.integers(1, 3), st.integers(1, 4))
def test_tiles_are_empty_full_or_partial(asked, height, width):
    grid, mask = asked
    keep = cell_by_cell(mask, grid)
    sizes = dict(Tq=grid.Tq, Tk=grid.Tk, B=grid.B, H=grid.H)
    for q, k in product(range(0, grid.Tq, height), range(0, grid.Tk, width)):
        queries, keys = range(q, min(q + height, grid.Tq)), range(k, min(k + width, grid.Tk))
        part = keep[:, :, q : q + height, k : k + width]
        expected = "full" if part.all() else "partial" if part.any() else "empty"
        assert mask.tile(queries, keys, **sizes) == expected


@given(ONE)
def test_why_agrees_with_the_mask(asked):
    grid, mask = asked
    b, h = grid.B - 1, grid.H - 1
    keep = cell_by_cell(mask, grid)[b, h]
    for q, k in product(range(grid.Tq), range(grid.Tk)):
        reason = mask.why(q, k, Tq=grid.Tq, Tk=grid.Tk, b=b, h=h)
        may = "may look" if keep[q, k] else "may not look"
        assert reason.startswith(f"query {q} {may} at key {k}: ")


# ----------------------------------------------------------------------------------------- laws


@given(TWO)
def test_laws_of_composition(asked):
    grid, a, b = asked
    everything, nothing = ch.everything, ~ch.everything
    for left, right in (
        (~(a & b), ~a | ~b),
        (~(a | b), ~a & ~b),
        (~~a, a),
        (a & b, b & a),
        (a | b, b | a),
        (a & (a | b), a),
        (a | (a & b), a),
        (a & a, a),
        (a & ~a, nothing),
        (a | ~a, everything),
        (a & everything, a),
        (a | nothing, a),
    ):
        assert torch.equal(runs(left, grid), runs(right, grid)), (left, right)


@given(GRIDS.flatmap(lambda g: st.tuples(st.just(g), masks(g), masks(g), masks(g))))
def test_laws_of_three(asked):
    grid, a, b, c = asked
    assert torch.equal(runs(a & (b | c), grid), runs((a & b) | (a & c), grid))
    assert torch.equal(runs((a & b) & c, grid), runs(a & (b & c), grid))


def test_a_composition_holds_each_part_once():
    e, c, w = ch.everything, ch.causal, ch.window(before=2)
    assert repr(e & (e & c)) == repr((e & e) & c) == "everything & causal"
    assert repr((c & w) & (w & c)) == repr(c & w)
    assert repr(c | (w | c)) == repr(c | w) and (c | c) is c
    assert repr((c | w) & (c | w)) == repr(c | w)


@given(ONE)
def test_a_mask_prints_what_makes_it(asked):
    _, mask = asked
    names = {n: getattr(ch, n) for n in ("everything", "causal", "Causal", "window", "prefix")}
    names |= {n: getattr(ch, n) for n in ("lengths", "documents", "dense")}
    again = eval(repr(mask), names)
    assert again == mask and hash(again) == hash(mask) and repr(again) == repr(mask)


def test_rules_do_not_follow_the_tensors_they_were_made_from():
    n, keep = torch.tensor([3, 5]), torch.ones(2, 3, dtype=torch.bool)
    lengths, dense = ch.lengths(keys=n), ch.dense(keep=keep)
    n[0], keep[0] = 1, False
    assert repr(lengths) == "lengths(keys=[3, 5])" and dense.to_bool().all()


@pytest.mark.parametrize("make", [
    lambda n: ch.lengths(keys=n[:1]), lambda n: ch.documents(n), lambda n: ch.Causal(align=n[:2]),
    lambda n: ch.dense(keep=n > 0),
], ids=["lengths", "documents", "align", "dense"])  # fmt: skip
def test_a_rule_of_meta_tensors_has_no_numbers_for_others(make):
    q = torch.randn(2, 1, 4, 8)
    rule = make(torch.zeros(4, dtype=torch.long, device="meta"))
    with pytest.raises(ch.BadValue, match=r"(?s)no numbers.*tensors with numbers"):
        ch.attention(q, q, q, mask=rule)
    there = q.to("meta")
    assert "numbers" in repr(rule) or "booleans" in repr(rule)
    assert ch.attention(there, there, there, mask=rule).shape == q.shape
    with pytest.raises(ch.BadValue, match="no numbers"):
        ch.look(there, there, there, mask=rule)


@pytest.mark.parametrize("rule", [
    ch.lengths(keys=[]), ch.prefix([]), ch.Causal(align=[]),
    ch.documents(torch.zeros(3, dtype=torch.long), queries=torch.zeros(0, 3, dtype=torch.long)),
], ids=repr)  # fmt: skip
def test_a_rule_for_a_batch_of_none_prints_and_exports(rule):
    assert rule.to_bool(3, 3).shape[0] == 0 and str(rule)
    q = torch.randn(0, 1, 3, 4)
    assert ch.attention(q, q, q, mask=rule).shape == q.shape


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (3, 0), (0,), (0, 2, 1, 5)])
def test_a_mask_without_cells_prints_what_makes_it(shape):
    mask = ch.dense(keep=torch.ones(shape, dtype=torch.bool))
    again = ch.masks.parse(repr(mask))
    assert (
        again == mask
        and again.bits.shape == shape
        and eval(repr(mask), {"dense": ch.dense}) == mask
    )


@pytest.mark.parametrize(
    "given, kind", [(5, "an int"), (b"causal", "a bytes"), (ch.causal, "a Causal")]
)
def test_only_a_text_is_parsed(given, kind):
    with pytest.raises(ch.BadType, match=f"^parse got {re.escape(kind)}.\n"):
        ch.masks.parse(given)


@pytest.mark.parametrize("text, why", [
    ("prefix(n=1, n=2)", "prefix(...) has a keyword twice"),
    ("causal & window(befor=2)", "window has no 'befor' (did you mean 'before'?)"),
    ("prefix(5, of=2)", "prefix has no 'of' (it takes n)"),
    ("causal and window(before=2)", "joined by & and |, not by `and` and `or`"),
    ("windw(before=2)", "no mask is called 'windw' (did you mean 'window'?)"),
    ("window", "needs its numbers"), ("causal(3)", "takes no numbers"), ("2 + 3", "'2 + 3' is not a mask"),
    ("documents([0] * 9)", "'[0] * 9' is not a number"), ("dense(keep=x)", "'x' is not a number"),
])  # fmt: skip
def test_errors_of_parsing(text, why):
    with pytest.raises(ch.BadValue, match=re.escape(why)):
        ch.masks.parse(text)


def test_numbers_too_far_are_refused_at_either_end():
    for far in (2**41, -(2**41), -(2**63), 2**63 - 1):
        with pytest.raises(ch.BadValue, match=f"align={far}"):
            ch.Causal(align=torch.tensor([0, far]))


def test_an_array_is_no_mask_and_a_mask_no_array():
    with pytest.raises(ch.BadType, match="causal was converted to an array"):
        np.asarray(ch.causal)
    for compose in (lambda x: x & ch.causal, lambda x: ch.causal & x):
        with pytest.raises(ch.BadType, match="A mask was composed by & with ndarray"):
            compose(np.ones((3, 3), dtype=bool))


def test_the_same_rule_twice_is_the_rule():
    assert ch.causal & ch.Causal() is ch.causal and ch.causal | ch.causal is ch.causal
    assert len({ch.window(before=i) for i in range(100)} | {ch.window(before=3)}) == 100


def test_rules_made_under_another_device_hold_on_the_cpu():
    with torch.device("meta"):
        rules = [
            ch.lengths(keys=[2, 3]),
            ch.documents([0, 0, 1, 1]),
            ch.dense(keep=[[True] * 4] * 4),
            ch.window(before=1) | ch.prefix(1),
        ]
        slopes = ch.alibi([0.5, 0.25])
    q = torch.randn(2, 2, 4, 8)
    for rule in rules:
        true = ch.attention(q, q, q, mask=rule, engine="steps")
        torch.testing.assert_close(ch.attention(q, q, q, mask=rule), true)
    assert ch.attention(q, q, q, bias=slopes).isfinite().all()


def test_a_mask_of_keys_alone_is_runs_and_stays_so():
    """So are its opposite and its union with a rule: no Tq x Tk cells come of padding."""
    keys = torch.zeros(2, 1, 1, 90, dtype=torch.bool)
    keys[0, ..., :7], keys[0, ..., 40:52], keys[1, ..., 89:] = True, True, True
    padding, grid = ch.dense(keep=keys), Grid(50, 90, 2)
    for mask in (padding, ~padding, ch.window(before=3, align=0) | padding, padding & ~padding):
        assert mask.key_ranges(grid).bits is None
        cells = mask.allowed(
            grid, *torch.meshgrid(*map(torch.arange, (2, 1, 50, 90)), indexing="ij")
        )
        assert torch.equal(mask.to_bool(50, 90, B=2).expand(2, 1, 50, 90), cells)
    scattered = ch.dense(keep=torch.arange(90) % 3 == 0)
    assert scattered.key_ranges(grid).bits is not None


def test_a_composed_rule_keeps_its_runs_for_one_size_and_not_for_ever():
    mask, grid = ch.window(before=3, align=0) | ch.prefix(2), Grid(7, 9)
    first = mask.key_ranges(grid)
    assert mask.key_ranges(grid) is first
    longer = mask.key_ranges(Grid(8, 9))
    assert longer is not first and torch.equal(mask.to_bool(7, 9), longer.to_bool()[0, 0, :7])
    assert len(pickle.dumps(mask)) == len(pickle.dumps(ch.window(before=3, align=0) | ch.prefix(2)))


def test_what_a_graph_was_given_stays_as_long_as_the_mask(monkeypatch):
    """On a CPU, as during a capture: another grid must not free what each replay reads."""
    mask, unused = (ch.window(before=3, align=0) | ch.prefix(2) for _ in range(2))
    kept, freed = (weakref.ref(x.key_ranges(Grid(7, 9)).lo) for x in (mask, unused))
    monkeypatch.setattr(torch_state, "_is_captured", lambda x: True)
    for _ in range(2):
        assert mask.key_ranges(Grid(7, 9)).lo is kept()
    monkeypatch.undo()
    for x in (mask, unused):
        x.key_ranges(Grid(8, 9))
    assert kept() is not None and freed() is None
    assert len(pickle.dumps(mask)) == len(pickle.dumps(ch.window(before=3, align=0) | ch.prefix(2)))
    del mask, x
    assert kept() is None


def test_ranges_are_for_the_stream_that_made_them(monkeypatch):
    mask, grid = ch.window(before=3, align=0) | ch.prefix(2), Grid(7, 9)
    monkeypatch.setattr(mask_room, "stream_of", lambda device: stream)
    stream = 5
    first = mask.key_ranges(grid)
    assert mask.key_ranges(grid) is first
    stream = None  # under capture: it is replayed later than anything made before
    assert mask.key_ranges(grid) is first
    stream = 6
    assert mask.key_ranges(grid) is not first


def test_only_a_gpu_has_streams(monkeypatch):
    class Stream:
        cuda_stream = 77

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    cuda = torch.device("cuda", 0)
    found = []
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        found += [values.stream_of(x) for x in (None, torch.device("cpu"), cuda)]
    assert found == [None, None, 77, None, None, None]


def test_what_a_mask_holds_is_moved_once(monkeypatch):
    """The meta device replaces a GPU here."""
    monkeypatch.setattr(values, "has_values", lambda *tensors: True)
    there, x = torch.device("meta"), torch.arange(5)
    moved = values.to_device(x, there)
    assert moved.device == there and values.to_device(x, there) is moved
    assert values.to_device(x, x.device) is x and values.to_device(x, None) is x
    with torch.inference_mode():
        assert values.to_device(x, there) is moved
        made = torch.arange(5)  # torch does not count its changes, so no copy is stored
        assert values.to_device(made, there) is not values.to_device(made, there)

    streams = iter([5, 6, 6, None, 5])
    monkeypatch.setattr(values, "stream_of", lambda device: next(streams))
    a, b, *others = (values.to_device(x, there) for _ in range(5))
    assert a is not b and others[0] is b and others[1] is b and others[2] is a
    monkeypatch.setattr(values, "stream_of", lambda device: None)

    x.add_(1)
    assert values.to_device(x, there) is not b
    assert len(values._copies[x]) == 1  # the copies of what it held before are gone
    kept = weakref.ref(values.to_device(x, there))
    del x
    assert kept() is None and moved is not None


def test_nothing_moved_is_kept_while_tracing_nor_by_a_graph(monkeypatch):
    there, x = torch.device("meta"), torch.arange(5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        values.to_device(x, there)
    assert x not in values._copies
    values.to_device(x, there)  # meta has no values, like a GPU during a capture
    assert not any(copies for _, copies in values._copies[x].values())


def test_one_number_is_not_copied_from_the_host(monkeypatch):
    monkeypatch.setattr(torch, "tensor", None)
    for mask in (ch.prefix(5), ch.lengths(keys=5), ch.lengths(queries=2, keys=5)):
        ranges = mask.key_ranges(Grid(3, 9))
        assert ranges.hi.dtype == torch.long and int(ranges.hi.min()) == 5


# ---------------------------------------------------------------------------------- by pencil

PICTURES = {
    "everything": (ch.everything, (2, 3), "■ ■ ■\n■ ■ ■"),
    "causal": (ch.causal, (3, 3), "■ · ·\n■ ■ ·\n■ ■ ■"),
    "causal from the start": (ch.Causal(align="start"), (2, 5), "■ · · · ·\n■ ■ · · ·"),
    "causal to the end": (ch.Causal(align="end"), (2, 5), "■ ■ ■ ■ ·\n■ ■ ■ ■ ■"),
    "causal to the end, more queries": (ch.Causal(align="end"), (3, 2), "· ·\n■ ·\n■ ■"),
    "causal from 1": (ch.Causal(align=1), (2, 5), "■ ■ · · ·\n■ ■ ■ · ·"),
    "itself": (ch.window(before=0, after=0), (3, 3), "■ · ·\n· ■ ·\n· · ■"),
    "window": (ch.window(before=1, after=2, align="start"), (2, 5), "■ ■ ■ · ·\n■ ■ ■ ■ ·"),
    "window back": (ch.window(before=1), (3, 3), "■ ■ ■\n■ ■ ■\n· ■ ■"),
    "prefix": (ch.prefix(2), (2, 5), "■ ■ · · ·\n■ ■ · · ·"),
    "prefix model": (ch.causal | ch.prefix(2), (3, 3), "■ ■ ·\n■ ■ ·\n■ ■ ■"),
    "lengths": (ch.lengths(keys=3, queries=1), (2, 5), "■ ■ ■ · ·\n· · · · ·"),
    "documents": (ch.documents([7, 7, 4]), (3, 3), "■ ■ ·\n■ ■ ·\n· · ■"),
    "split document": (ch.documents([1, 2, 1], queries=[2, 1]), (2, 3), "· ■ ·\n■ · ■"),
    "dense": (ch.dense(keep=[[True, False, True]]), (2, 3), "■ · ■\n■ · ■"),
    "dense dropped": (ch.dense(drop=[[True], [False]]), (2, 3), "· · ·\n■ ■ ■"),
    "not": (~ch.causal, (3, 3), "· ■ ■\n· · ■\n· · ·"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_by_hand(name):
    mask, sizes, picture = PICTURES[name]
    assert mask.picture(*sizes) == picture
    keep = [[mark == "■" for mark in row.split()] for row in picture.split("\n")]
    assert mask.to_bool(*sizes).tolist() == keep


def test_a_number_for_each_batch():
    mask = ch.lengths(keys=[3, 1]) & ch.Causal(align=[0, 2])
    assert mask.to_bool(2, 4).int().tolist() == [
        [[[1, 0, 0, 0], [1, 1, 0, 0]]],
        [[[1, 0, 0, 0], [1, 0, 0, 0]]],
    ]
    assert mask.picture(2, 4) == "■ · · ·\n■ ▒ · ·"  # where batches differ, some may


SOME_MAY = "▒ some may: of the batch, the heads or that block"


def test_a_rule_and_a_padding_mask_of_keys_are_drawn_and_explained():
    """The padding fixes the number of keys; causal takes the same number of queries."""
    padding = torch.ones(2, 1, 1, 17, dtype=torch.bool)
    padding[1, ..., 11:] = False
    mask = ch.causal & ch.dense(keep=padding)
    picture = mask.picture()
    assert str(mask) == f"{mask}" == f"{mask!r}: {mask.formula}\n{picture}\n{SOME_MAY}"
    both = mask.to_bool()
    marks = {(True, True): "■", (False, False): "·", (True, False): "▒", (False, True): "▒"}
    cells = zip(both[0, 0].flatten().tolist(), both[1, 0].flatten().tolist(), strict=True)
    assert picture.split() == [marks[cell] for cell in cells] and len(picture.split("\n")) == 17
    assert mask.why(5, 3, b=1).startswith("query 5 may look at key 3")
    assert mask.why(16, 12, b=1).startswith("query 16 may not look at key 12: dense")
    assert mask.tile(range(0, 2), range(4, 8)) == "empty"
    assert ch.dense(keep=padding[:1]).why(20, 3).startswith("query 20 may look at key 3")
    with pytest.raises(ch.BadValue, match="key 17, and there are 17"):
        mask.why(3, 17)


def test_a_mask_without_a_size_that_fits_prints_its_formula():
    mask = ch.documents([0, 0], queries=[0, 0, 0]) & ch.causal
    assert str(mask) == f"{mask!r}: (document[q] == document[k]) and (k <= q)"
    meta = ch.lengths(keys=torch.ones(2, dtype=torch.long, device="meta"))
    assert str(meta) == "lengths(keys=<2 numbers>): k < keys[b]"


def test_a_large_picture_is_drawn_in_blocks():
    rows = ch.causal.picture(64).split("\n")
    assert len(rows) == 32 and rows[0] == "▒" + " ·" * 31 and rows[31] == "■ " * 31 + "▒"


def test_a_mask_prints_its_formula_and_picture():
    assert str(ch.documents([5, 5, 6]) & ch.causal) == (
        "documents([5, 5, 6]) & causal: (document[q] == document[k]) and (k <= q)\n"
        "■ · ·\n■ ■ ·\n· · ■"
    )


@pytest.mark.parametrize(
    "mask, formula",
    [
        (ch.everything, "every query may look at every key"),
        (ch.causal, "k <= q"),
        (ch.Causal(align="end"), "k <= q + Tk - Tq"),
        (ch.Causal(align=-3), "k <= q - 3"),
        (ch.Causal(align=[1, 2]), "k <= q + start[b]"),
        (ch.window(before=3, after=2, align=4), "q + 4 - 3 <= k <= q + 4 + 2"),
        (ch.window(after=2), "k <= q + 2"),
        (ch.window(), "every query may look at every key"),
        (ch.prefix([4, 5]), "k < n[b]"),
        (ch.lengths(keys=4, queries=[1, 2]), "k < 4 and q < queries[b]"),
        (ch.dense(keep=[True]), "bits[b, h, q, k]"),
        (ch.causal | ~ch.prefix(2), "(k <= q) or (not (k < 2))"),
    ],
)
def test_formulas(mask, formula):
    assert mask.formula == formula


@pytest.mark.parametrize(
    "mask, text",
    [
        (ch.causal & ch.prefix(2) & ch.prefix(3), "causal & prefix(2) & prefix(3)"),
        (ch.causal & (ch.prefix(2) & ch.prefix(3)), "causal & prefix(2) & prefix(3)"),
        (ch.causal & ch.prefix(2) | ch.prefix(3), "causal & prefix(2) | prefix(3)"),
        (ch.causal & (ch.prefix(2) | ch.prefix(3)), "causal & (prefix(2) | prefix(3))"),
        (~(ch.causal | ch.prefix(2)), "~(causal | prefix(2))"),
        (ch.window(before=3, align="end"), "window(before=3, after=None, align='end')"),
        (ch.dense(drop=[[True, False]]), "dense(keep=[[False, True]])"),
    ],
)
def test_notation(mask, text):
    assert repr(mask) == text


# ---------------------------------------------------------------------------------------- why

WHY = {
    "causal, blocked": (ch.causal, (1, 3), "causal: key position 3 is after query position 1"),
    "causal, allowed": (
        ch.Causal(align=5),
        (1, 6),
        "Causal(align=5): key position 6 is at or before query position 6",
    ),
    "window": (
        ch.window(before=2, after=1, align="start"),
        (5, 2),
        "window(before=2, after=1, align='start'): key 2 is 3 behind the query",
    ),
    "window ahead": (
        ch.window(after=1, align=2),
        (0, 4),
        "window(before=None, after=1, align=2): key 4 is 2 ahead of the query",
    ),
    "window, itself": (
        ch.window(before=0, after=0),
        (3, 3),
        "window(before=0, after=0): key 3 is at the query itself",
    ),
    "prefix": (ch.prefix(4), (0, 4), "prefix(4): key 4 is beyond the first 4"),
    "lengths": (
        ch.lengths(keys=3, queries=2),
        (1, 3),
        "lengths(keys=3, queries=2): key 3 is beyond the 3 real, query 1 is one of the 2 real",
    ),
    "documents": (
        ch.documents([8, 9]),
        (0, 1),
        "documents: query 0 is in document 8, key 1 in document 9",
    ),
    "dense": (ch.dense(keep=[[True, False]]), (0, 1), "dense: the cell holds False"),
    "everything": (ch.everything, (0, 0), "everything: nothing is masked"),
    "and names the rule that blocks": (
        ch.causal & ch.prefix(2),
        (5, 3),
        "prefix(2): key 3 is beyond the first 2",
    ),
    "and names both": (
        ch.causal & ch.prefix(2),
        (1, 3),
        "causal: key position 3 is after query position 1; prefix(2): key 3 is beyond the first 2",
    ),
    "or names the rule that allows": (
        ch.causal | ch.prefix(4),
        (1, 3),
        "prefix(4): key 3 is within the first 4",
    ),
    "not": (
        ~ch.causal,
        (1, 3),
        "the opposite of: causal: key position 3 is after query position 1",
    ),
}


@pytest.mark.parametrize("name", WHY)
def test_why_names_the_rule(name):
    mask, (q, k), reason = WHY[name]
    assert mask.why(q, k).split(": ", 1)[1] == reason


def test_why_per_batch():
    mask = ch.lengths(keys=[3, 1])
    assert mask.why(0, 2, b=0).startswith("query 0 may look at key 2")
    assert mask.why(0, 2, b=1) == (
        "query 0 may not look at key 2: lengths(keys=[3, 1]): key 2 is beyond the 1 real"
    )


# ----------------------------------------------------------------------------------- exports

EXPORTED = [
    ch.everything,
    ch.Causal(align="end"),
    ch.Causal(align=[0, 3]),
    ch.window(before=2, after=1, align="end") | ch.prefix([1, 4]),
    ch.lengths(keys=[4, 9], queries=[2, 5]),
    ~ch.documents([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0] * 9], queries=[0, 1, 2, 2, 0]),
    ch.dense(keep=torch.arange(3 * 9).reshape(3, 1, 9) % 4 > 0) & ch.Causal(align="end"),
]


@pytest.mark.parametrize("mask", EXPORTED, ids=repr)
def test_flex_attention_reads_it(mask):
    theirs = create_mask(mask.to_flex(5, 9, B=2, H=3), 2, 3, 5, 9, device="cpu")
    assert torch.equal(theirs, mask.to_bool(5, 9, B=2, H=3).expand(2, 3, 5, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_additive(dtype):
    added = ch.Causal(align="end").to_additive(2, 3, dtype=dtype)
    assert added.dtype == dtype
    assert added.tolist() == [[0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]]


def test_exports_take_the_sizes_a_rule_fixes():
    assert ch.documents([0, 0, 1]).to_bool().shape == (3, 3)
    assert ch.causal.to_bool(4).shape == (4, 4)
    assert ch.prefix(2).to_bool(2, 5).shape == (2, 5)
    assert ch.lengths(keys=[1, 2]).to_bool(3, 4).shape == (2, 1, 3, 4)
    assert ch.dense(keep=torch.ones(6, 1, 5).bool()).to_bool(3).shape == (1, 6, 3, 5)


def test_scattered_documents_become_bits_and_packed_ones_runs():
    packed, scattered = ch.documents([0] * 50 + [1] * 50), ch.documents([0, 1] * 50)
    assert packed.key_ranges(Grid(100, 100)).bits is None
    assert scattered.key_ranges(Grid(100, 100)).bits is not None
    for mask in (packed, scattered):
        assert torch.equal(runs(mask, Grid(100, 100)), cell_by_cell(mask, Grid(100, 100)))


class Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that an operation returned."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [x.nbytes for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.bytes = max(self.bytes, *made, 0)
        return result


IDS = torch.randint(0, 15, (2, 512), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("mask", [
    ch.documents(IDS[0]), ~ch.documents(IDS[0]), ch.documents(IDS[0]) & ch.documents(IDS[1]),
    ch.documents(IDS[0]) | ch.documents(IDS[1]), ch.documents(torch.arange(512) % 2),
], ids=["one", "not", "and", "or", "interleaved"])  # fmt: skip
def test_a_scattered_mask_takes_little_more_than_it_writes(mask):
    with Largest() as largest:
        keep = mask.to_bool()
    assert largest.bytes <= 4 * keep.numel()
    grid = Grid(512, 512)
    assert torch.equal(keep, cell_by_cell(mask, grid)[0, 0])


@pytest.mark.parametrize("compose, sign", [(operator.and_, "&"), (operator.or_, "|")])
def test_hundreds_of_masks_compose(compose, sign):
    parts = [ch.window(before=i, after=2 * i + 1) for i in range(250)]
    parts += [~ch.prefix(i) for i in range(250)]
    mask, grid = reduce(compose, parts), Grid(7, 7)
    again = ch.masks.parse(repr(mask))
    assert again == mask and hash(again) == hash(mask) and repr(mask).count(f" {sign} ") == 499
    assert pickle.loads(pickle.dumps(mask)) == mask and len(mask.formula) > 5000
    assert torch.equal(mask.to_bool(7), cell_by_cell(mask, grid)[0, 0])
    assert mask.why(3, 3) and mask & mask is mask and mask | mask is mask
    assert mask.with_align("end").to_bool(3, 5).shape == (3, 5)


def test_a_composition_is_flat():
    a, b, c, d = ch.causal, ch.prefix(2), ch.window(before=3), ch.lengths(keys=4)
    assert (a & b) & (c & d) == a & (b & c) & d == And((a, b, c, d))
    assert (a | b) | (c | d) == Or((a, b, c, d)) and (a & b | c) & d == And((Or((a & b, c)), d))
    assert (a & b & c).formula == "(k <= q) and (k < 2) and (q - 3 <= k)"


def test_no_tokens_at_all():
    assert ch.documents([]).to_bool().shape == (0, 0)
    assert ch.causal.picture(0) == ""


def test_equality_is_by_contents():
    assert ch.Causal() == ch.causal and ch.Causal() != ch.Causal(align="start")
    assert ch.prefix([1, 2]) == ch.prefix(torch.tensor([1, 2])) != ch.prefix([1, 3])
    assert ch.causal & ch.prefix(1) != ch.causal | ch.prefix(1)
    assert ch.causal != 3 and ch.everything == Everything()
    assert ~~ch.causal == ch.causal  # with the same repr and reasons
    assert len({ch.causal, ch.Causal(), ch.prefix(1), ch.prefix(1)}) == 2


def test_numbers_come_in_many_kinds():
    for three in (3, np.int64(3), torch.tensor(3)):
        assert ch.prefix(three) == ch.prefix(3) and ch.Causal(align=three) == ch.Causal(align=3)
    for both in ([1, 2], (1, 2), range(1, 3), iter([1, 2]), np.array([1, 2])):
        assert ch.prefix(both) == ch.prefix([1, 2])


# ------------------------------------------------------------------------------------ errors

ERRORS = {
    "corner": (
        lambda: ch.causal.to_bool(3, 10),
        """causal got Tq=3 queries and Tk=10 keys.
  Rule: if the numbers differ, align= must give the position of the queries.
  Hint: use Causal(align='end') if the last query is at the last key (a cache), or Causal(align='start') if query 0 is at key 0 (torch's is_causal).""",
    ),
    "corner of a window": (
        lambda: ch.window(before=4).to_bool(3, 10),
        """window(before=4, after=None) got Tq=3 queries and Tk=10 keys.
  Rule: if the numbers differ, align= must give the position of the queries.
  Hint: use window(before=4, after=None, align='end') if the last query is at the last key (a cache), or window(before=4, after=None, align='start') if query 0 is at key 0 (torch's is_causal).""",
    ),
    "no size": (
        lambda: ch.causal.to_bool(),
        """The sizes of causal are unknown.
  Rule: a rule over positions does not fix the numbers of queries and keys.
  Hint: pass them, for example mask.to_bool(5) or mask.to_bool(3, 10).""",
    ),
    "negative size": (
        lambda: ch.causal.to_bool(-3),
        """causal got Grid(Tq=-3, Tk=-3, B=1, H=1).
  Rule: sizes are 0 or more.
  Hint: pass the numbers of queries, keys, batches and heads.""",
    ),
    "align": (
        lambda: ch.Causal(align="left"),
        """align='left' is unknown.
  Rule: align is 'start' (query 0 at key 0), 'end' (last query at last key) or a position.
  Hint: pass align='start', align='end' or a whole number.""",
    ),
    "align of half a position": (
        lambda: ch.Causal(align=2.5),
        """a mask got align with dtype torch.float32.
  Rule: align holds counts of positions or ids of documents, which are whole numbers.
  Hint: pass integers.""",
    ),
    "negative window": (
        lambda: ch.window(before=-1),
        """window got before=-1.
  Rule: a window is a distance, 0 or more; 0 means the position itself.
  Hint: shift the window with align=, or compose two windows with & and ~.""",
    ),
    "window of half a position": (
        lambda: ch.window(after=1.5),
        """window got after=1.5.
  Rule: a window is a whole number of positions, or None for no limit.
  Hint: pass a whole number, for example after=127.""",
    ),
    "negative prefix": (
        lambda: ch.prefix([3, -1]),
        """prefix got n=-1.
  Rule: n is a count, so it is 0 or more.
  Hint: pass a number that is not negative.""",
    ),
    "prefix of letters": (
        lambda: ch.prefix("three"),
        """prefix got n='three'.
  Rule: n holds counts of positions or ids of documents, which are whole numbers.
  Hint: pass integers.""",
    ),
    "window of one bare number": (
        lambda: ch.window(3),
        """window got 3 without a keyword.
  Rule: a window takes both sides, or keywords; a side without a keyword has no limit.
  Hint: pass before=3, after=0 to look only back, or before= alone to look ahead.""",
    ),
    "window of one bare number, written": (
        lambda: ch.masks.parse("causal & window(3, align='end')"),
        """window got 3 without a keyword.
  Rule: a window takes both sides, or keywords; a side without a keyword has no limit.
  Hint: pass before=3, after=0 to look only back, or before= alone to look ahead.""",
    ),
    "more keys than there are": (
        lambda: (ch.causal & ~ch.lengths(keys=[2, 9])).to_bool(5),
        """lengths(keys=[2, 9]) counts 9 keys, and there are 5.
  Rule: a length counts real keys or queries, at most those of the call.
  Hint: cut the lengths as the texts are, or allow more keys by prefix(9).""",
    ),
    "lengths as a matrix": (
        lambda: ch.lengths(keys=[[1, 2]]),
        """lengths got keys of shape (1, 2).
  Rule: keys is one number, or one per batch, (B,).
  Hint: pass attention_mask.sum(-1) for padding on the right, or use mask=dense(keep=attention_mask.bool()[:, None, None, :]) for any padding.""",
    ),
    "lengths of nothing": (
        lambda: ch.lengths(),
        """lengths got neither keys= nor queries=.
  Rule: lengths needs the number of real keys, queries or both; the others are padding.
  Hint: pass keys=, queries= or both; use `everything` for no mask.""",
    ),
    "batches": (
        lambda: ch.lengths(keys=[1, 2, 3]).to_bool(4, B=2),
        """lengths(keys=[1, 2, 3]) has numbers for 3 batches, and there are B=2.
  Rule: each batch has one number, or all batches have the same.
  Hint: pass one number, or 2 numbers.""",
    ),
    "documents of another length": (
        lambda: ch.documents([0, 1]).to_bool(3),
        """documents has ids for 2 queries and 2 keys; the call has Tq=3 and Tk=2.
  Rule: every key and every query belongs to one document.
  Hint: pass documents(ids_of_keys, queries=ids_of_queries).""",
    ),
    "documents of three dimensions": (
        lambda: ch.documents(torch.zeros(2, 3, 4).long()),
        """documents got ids of shape (2, 3, 4).
  Rule: each position belongs to one document: (T,), or (B, T).
  Hint: pass one id per position.""",
    ),
    "documents by floats": (
        lambda: ch.documents(torch.zeros(3)),
        """documents got ids with dtype torch.float32.
  Rule: ids holds counts of positions or ids of documents, which are whole numbers.
  Hint: pass integers.""",
    ),
    "dense twice": (
        lambda: ch.dense(keep=[True], drop=[False]),
        """dense got both keep= and drop=.
  Rule: a dense mask takes one of the two, which defines its True.
  Hint: pass keep= (True = may look) or drop= (True = must not look).""",
    ),
    "dense of numbers": (
        lambda: ch.dense(drop=torch.zeros(2, 2)),
        """dense got drop= with dtype torch.float32.
  Rule: a dense mask holds booleans.
  Hint: pass drop=tensor.bool() for 0 and 1, or an additive mask (0 and -inf) as bias=.""",
    ),
    "dense of ragged rows": (
        lambda: ch.dense(keep=[[True, False], [True]]),
        """dense got keep=[[True, False], [True]].
  Rule: a dense mask is a tensor of booleans, or nested lists of one shape.
  Hint: pass a boolean tensor as keep=.""",
    ),
    "dense of five dimensions": (
        lambda: ch.dense(keep=torch.ones(1, 1, 1, 1, 1).bool()),
        """dense got a mask with 5 dimensions.
  Rule: a dense mask broadcasts to (B, H, Tq, Tk).
  Hint: pass 1 to 4 dimensions.""",
    ),
    "dense that does not fit": (
        lambda: ch.dense(keep=torch.ones(2, 3).bool()).to_bool(4, 3),
        """dense has a mask of shape (2, 3); the call has (B, H, Tq, Tk) = (1, 1, 4, 3).
  Rule: a dense mask broadcasts to (B, H, Tq, Tk).
  Hint: make each dimension that size or 1; a mask per batch is (B, 1, Tq, Tk).""",
    ),
    "and": (
        lambda: ch.causal and ch.prefix(3),
        """causal was used as a truth value, for example with `and`, `or` or `not`.
  Rule: masks compose cell by cell.
  Hint: write `a & b`, `a | b` or `~a`.""",
    ),
    "a tensor in a composition": (
        lambda: ch.causal & torch.ones(3, 3).bool(),
        """A mask was composed by & with Tensor.
  Rule: masks compose only with masks.
  Hint: wrap booleans: dense(keep=tensor) if True means may look, else dense(drop=tensor).""",
    ),
    "a tile before the first key": (
        lambda: ch.causal.tile(range(0, 2), range(-2, 0), Tq=4, Tk=4),
        """tile got the keys range(-2, 0), and there are 4.
  Rule: a tile begins at an existing position, and may extend beyond the last one.
  Hint: begin at a position from 0 to 3, or pass larger sizes.""",
    ),
    "a tile after the last query": (
        lambda: ch.prefix(2).tile(range(6, 8), range(0, 2), Tq=6),
        """tile got the queries range(6, 8), and there are 6.
  Rule: a tile begins at an existing position, and may extend beyond the last one.
  Hint: begin at a position from 0 to 5, or pass larger sizes.""",
    ),
    "dense of another shape": (
        lambda: ch.dense(keep=[True, False], shape=(3,)),
        """dense got 2 cells and shape=(3,).
  Rule: a shape has as many cells as there are booleans.
  Hint: pass a shape that fits, or leave it out.""",
    ),
    "why outside": (
        lambda: ch.causal.why(5, 1, Tq=3),
        """why got query 5, and there are 3.
  Rule: positions count from 0 and stay below the size.
  Hint: pass a query from 0 to 2, or larger sizes Tq= and Tk=.""",
    ),
    "why of a negative place": (
        lambda: ch.causal.why(0, -1),
        """why got query 0, key -1, batch 0, head 0.
  Rule: positions count from 0.
  Hint: pass numbers that are not negative.""",
    ),
}
KINDS = {
    "window of one bare number",
    "window of one bare number, written",
    "align of half a position",
    "window of half a position",
    "prefix of letters",
    "documents by floats",
    "dense of numbers",
    "dense of ragged rows",
    "and",
    "a tensor in a composition",
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_have_three_parts(name):
    call, text = ERRORS[name]
    kind = ch.BadType if name in KINDS else ch.BadValue
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        call()


@pytest.mark.parametrize("make", [
    lambda: ch.window(after=sys.maxsize), lambda: ch.Causal(align=2**63 - 1),
    lambda: ch.lengths(keys=2**70), lambda: ch.prefix([2**62]),
])  # fmt: skip
def test_distances_that_would_overflow_are_refused(make):
    with pytest.raises(ch.BadValue, match="positions and counts are at most"):
        make()


def test_causal_is_no_function():
    with pytest.raises(ch.BadType, match="already a mask"):
        ch.causal()
    assert ch.window(before=np.int64(3)).before == 3 and ch.Causal(align=np.int64(2)).align == 2

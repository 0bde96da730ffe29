"""A mask whose tensor is changed in place is what the tensor holds now, in every engine, however
often it was used before; what it was made of may change without an effect."""

import pickle

import pytest
import torch

import clearhead as ch
from clearhead import Mask
from clearhead.core.masks import Grid
from clearhead.core.masks.mask import Unchanged
from clearhead.distributed.cut import routes
from clearhead.distributed.layouts import contiguous

EYE = torch.eye(5, 7).bool()
ROW = torch.tensor([True, True, False, True, True, True, False])
# A mask of two texts, how its tensor is changed, and the mask that holds the new numbers.
CHANGES = {
    "lengths": (
        ch.lengths(keys=[2, 3]), lambda m: m.keys.add_(2), ch.lengths(keys=[4, 5])
    ),
    "queries": (
        ch.lengths(queries=[2, 3]), lambda m: m.queries.add_(2), ch.lengths(queries=[4, 5])
    ),
    "prefix": (ch.prefix([2, 3]), lambda m: m.n.fill_(1), ch.prefix([1, 1])),
    "padding": (~ch.prefix([2, 3]), lambda m: m.mask.n.sub_(2), ~ch.prefix([0, 1])),
    "causal": (
        ch.Causal(align=[0, 2]), lambda m: m.align.copy_(torch.tensor([2, 1])),
        ch.Causal(align=[2, 1]),
    ),
    "window": (
        ch.window(before=1, align=[0, 2]), lambda m: m.align.add_(1),
        ch.window(before=1, align=[1, 3]),
    ),
    "documents": (
        ch.documents([0, 0, 0, 1, 1, 1, 1], queries=[0, 0, 1, 1, 1]),
        lambda m: m.ids[:, 2].fill_(1),
        ch.documents([0, 0, 1, 1, 1, 1, 1], queries=[0, 0, 1, 1, 1]),
    ),
    "dense": (ch.dense(keep=EYE), lambda m: m.bits.logical_not_(), ch.dense(keep=~EYE)),
    "dense row": (ch.dense(keep=ROW), lambda m: m.bits.logical_not_(), ch.dense(keep=~ROW)),
    "and": (
        ch.lengths(keys=[2, 3]) & ch.Causal(align="end"), lambda m: m.parts[0].keys.add_(2),
        ch.lengths(keys=[4, 5]) & ch.Causal(align="end"),
    ),
    "or": (
        ch.window(before=1, align="end") | ch.prefix([1, 2]), lambda m: m.parts[1].n.add_(1),
        ch.window(before=1, align="end") | ch.prefix([2, 3]),
    ),
}  # fmt: skip


def copy_of(mask: Mask) -> Mask:
    return pickle.loads(pickle.dumps(mask))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_every_engine_answers_by_the_new_numbers(name, inference):
    q, k, v = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    made, change, fresh = CHANGES[name]
    with torch.inference_mode(inference):
        mask = copy_of(made)
        engines = ["auto", "auto", "cpu", "tiled", "sdpa", "steps"]
        before = [ch.attention(q, k, v, mask=mask, engine=engine) for engine in engines]
        ch.look(q, k, v, mask=mask, stats=["received"])
        change(mask)
        expected = ch.attention(q, k, v, mask=fresh, engine="steps")
        assert (expected - before[0]).abs().max() > 0.1
        for engine in engines:
            got = ch.attention(q, k, v, mask=mask, engine=engine)
            torch.testing.assert_close(got, expected)
        received = [ch.look(q, k, v, mask=m, stats=["received"]).received for m in (mask, fresh)]
        torch.testing.assert_close(*received)


def test_a_step_of_decoding_answers_by_the_new_numbers():
    q, k, v = torch.randn(2, 2, 1, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    mask = ~ch.prefix([2, 3])
    for _ in range(2):
        ch.attention(q, k, v, mask=mask)
    mask.mask.n.sub_(1)
    expected = ch.attention(q, k, v, mask=~ch.prefix([1, 2]))
    assert torch.equal(ch.attention(q, k, v, mask=mask), expected)


def test_what_a_mask_was_made_of_may_change():
    counts, bits, numbers = torch.tensor([2, 3]), EYE.clone(), [2, 3]
    masks = ch.lengths(keys=counts), ch.dense(keep=bits), ch.lengths(keys=numbers)
    before = [copy_of(mask) for mask in masks]
    counts.add_(2)
    bits.logical_not_()
    numbers[0] = 5
    assert all(a == b for a, b in zip(masks, before, strict=True))


def test_masks_made_in_inference_mode():
    q = torch.randn(2, 2, 5, 8)
    with torch.inference_mode():
        for mask in (ch.lengths(keys=torch.tensor([2, 3])), ch.dense(drop=ROW[:5])):
            expected = ch.attention(q, q, q, mask=mask, engine="steps")
            torch.testing.assert_close(ch.attention(q, q, q, mask=mask), expected)


def test_a_key_holds_as_long_as_its_mask():
    mask, equal = ch.lengths(keys=[2]), ch.lengths(keys=[2])
    key, other = Unchanged(mask), Unchanged(equal)
    assert key == other == Unchanged(mask) and hash(key) == hash(other)
    mask.keys.add_(4)
    assert key != other and key != Unchanged(mask)
    assert Unchanged(mask) == Unchanged(ch.lengths(keys=[6]))


def test_what_ranks_keep_of_a_mask_follows_it():
    mask = ch.lengths(keys=[2])
    of = Grid(8, 8, 1, 1), contiguous(8, 2), contiguous(8, 2), 0
    assert sum(map(len, routes(mask, *of).received)) == 2
    mask.keys.add_(4)
    assert sum(map(len, routes(mask, *of).received)) == 6


def test_lengths_are_checked_by_their_new_numbers():
    q = torch.randn(1, 2, 5, 8)
    mask = ch.lengths(keys=[5])
    ch.attention(q, q, q, mask=mask)
    mask.keys.add_(4)
    for other in (mask, copy_of(mask)):
        with pytest.raises(ch.BadValue, match="counts 9 keys, and there are 5"):
            ch.attention(q, q, q, mask=other)
    mask.keys.sub_(5)
    expected = ch.attention(q, q, q, mask=ch.lengths(keys=[4]))
    assert torch.equal(ch.attention(q, q, q, mask=mask), expected)


def test_a_copy_holds_the_rule_alone():
    mask = ch.lengths(keys=[2, 3]) & ch.causal
    ch.attention(*torch.randn(3, 2, 1, 4, 8), mask=mask)
    assert set(mask.__getstate__()) == {"parts"}
    assert copy_of(mask) == mask

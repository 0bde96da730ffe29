"""The plan equals what the ring does: bytes are counted in the transport, work in pairs."""

import pytest
import torch

import clearhead as ch
from clearhead.core.problem.check import Options
from clearhead.distributed import balanced, by_document, plan
from clearhead.distributed.attention import Call, attend
from clearhead.distributed.layouts import layout_of
from tests.distributed.threads import on_ranks
from tests.pairs import pairs

IDS = torch.arange(5).repeat_interleave(torch.tensor([40, 3, 17, 60, 8]))
BITS = torch.rand(128, 128, generator=torch.Generator().manual_seed(2)) < 0.01
MASKS = {
    "everything": None,
    "scattered": ch.dense(keep=BITS),
    "nobody": ~ch.everything,
    "causal": ch.causal,
    "window": ch.causal & ch.window(before=9),
    "documents": ch.causal & ch.documents(IDS),
    "sink and window": ch.causal & (ch.window(before=5) | ch.prefix(3)),
}
LAYOUTS = {
    "contiguous": "contiguous",
    "head-tail": "head-tail",
    "by document": by_document(IDS, 4),
    "balanced": balanced(MASKS["documents"], 128, 4),
}


@pytest.mark.parametrize(
    "mask, layout, inputs",
    pairs(MASKS, LAYOUTS, [(torch.float32, 1), (torch.bfloat16, 2)]),
    ids=str,
)
def test_bytes_that_are_sent_are_those_of_the_plan(mask, layout, inputs):
    dtype, heads = inputs
    q = torch.randn(2, 4, 128, 6).to(dtype)
    k, v = torch.randn(2, 2, 128, 6).to(dtype), torch.randn(2, 2, 128, 5).to(dtype)
    expected = plan(q, k, v, world=4, layout=LAYOUTS[layout], mask=MASKS[mask], heads=heads)
    held = layout_of(LAYOUTS[layout], 128, 4).positions

    def rank(transport):
        mine = [held[transport.rank].cut(x, 2).clone().requires_grad_() for x in (q, k, v)]
        call = Call(Options(MASKS[mask]), LAYOUTS[layout], heads=heads)
        out = attend(transport, call, *mine)
        forward = transport.sent
        out.float().sum().backward()
        return forward, transport.sent - forward

    forward, backward = zip(*on_ranks(4, rank), strict=True)
    assert list(forward) == expected.sent
    assert list(backward) == expected.sent_back
    assert sum(expected.sent) == sum(expected.received)
    whole = ch.plan(q, k, v, mask=MASKS[mask])
    assert (sum(expected.pairs), sum(expected.flops)) == (whole.pairs, whole.flops)


def test_a_window_sends_the_same_for_any_length_and_documents_nothing():
    def of(length: int, mask: ch.masks.Mask, layout) -> ch.distributed.Plan:
        x = torch.empty(1, 8, length, 64, device="meta")
        return plan(x, x, x, world=8, mask=mask, layout=layout, heads=1)

    window = ch.causal & ch.window(before=1023)
    assert sum(of(2**14, window, "contiguous").sent) == sum(of(2**17, window, "contiguous").sent)
    assert sum(of(2**14, window, "contiguous").sent) == 7 * 1023 * 8 * 128 * 4
    ids = torch.arange(32).repeat_interleave(512)
    packed = of(2**14, ch.documents(ids), by_document(ids, 8))
    assert sum(packed.sent) == 0 and packed.balance == 1.0
    assert "no ring" in str(packed)
    for length in (2**14, 2**17):  # chosen, because no other number of heads sends less
        x = torch.empty(1, 8, length, 64, device="meta")
        assert plan(x, x, x, world=8, mask=window).heads == 1


def test_the_plan_chooses_the_fewest_bytes():
    q, k = (torch.empty(1, h, 2**15, 64, device="meta") for h in (16, 8))
    chosen = plan(q, k, k, world=16, layout="head-tail", mask=ch.causal)
    tried = {n: plan(q, k, k, world=16, layout="head-tail", heads=n) for n in (1, 2, 4, 8)}
    most = {n: max(x.received) for n, x in tried.items()}
    assert most[chosen.heads] == min(most.values()) and chosen.heads == 8
    assert chosen.why.startswith("a rank receives 30.41 MB, and ")
    assert [f"with heads={n}" in chosen.why for n in (1, 2, 4, 8)] == [True, True, True, False]
    assert tried[4].why == "as passed"
    # Four teams of 4: 3 of 4 heads of the part are sent, and the ring of 4 brings 3 of 4 keys.
    part, row = 2**15 // 16, 64 * 4
    exchange = 3 * part * row * (2 * 16 // 4 + 2 * 8 // 4)
    ring = 3 * 4 * part * row * 2 * 8 // 4
    assert set(tried[4].received) == {exchange + ring} and set(tried[4].exchanged) == {exchange}


@pytest.mark.parametrize("world", [2, 8, 64, 512])
def test_causal_work_is_even(world):
    x = torch.empty(1, 1, 2**15, 64, device="meta")
    assert plan(x, x, x, world=world, layout="head-tail", mask=ch.causal).balance <= 1.05


def test_documents_are_even_for_any_number_of_heads():
    draw = torch.Generator().manual_seed(3)
    ids = torch.arange(400).repeat_interleave(torch.randint(1, 200, (400,), generator=draw))
    x = torch.empty(1, 4, len(ids), 64, device="meta")
    mask = ch.causal & ch.documents(ids)
    layout = balanced(mask, len(ids), 8)
    for heads in (1, 2, 4):
        found = plan(x, x, x, world=8, mask=mask, layout=layout, heads=heads)
        assert found.balance <= 1.1


def test_a_plan_prints_itself():
    q, k = (torch.empty(1, h, 4096, 64, device="meta") for h in (8, 2))
    assert str(plan(q, k, k, world=2, layout="head-tail", mask=ch.causal)) == "\n".join(
        [
            "B=1 H=8 G=2 Tq=4096 Tk=4096 D=64, float32 on meta, mask causal, on 2 ranks as "
            "Layout(0:1024, 3072:4096; 1024:3072)",
            "  scheme        heads=1: a rank receives 2.097 MB, and 5.243 MB with heads=2",
            "  work          8.592 GFLOP on the busiest rank, 1.000 of the mean",
            "  forward       2.097 MB sent by a rank at most, 2.097 MB received",
            "  backward      3.146 MB sent by a rank at most",
            "  overlap       communication of the ring is hidden if a rank computes fewer than "
            "5.463 kFLOP in the time of a byte",
            "  memory        21.36 MB on a rank at most, in forward",
        ]
    )


def test_what_cannot_be_planned():
    x = torch.empty(1, 1, 8, 4, device="meta")
    with pytest.raises(ch.BadValue, match="A layout was requested with ranks=0"):
        plan(x, x, x, world=0)

"""`plan`: who answers and why the others do not, and what it costs, before anything is computed."""

import pytest
import torch

import clearhead as ch
from clearhead.core.engines import choice as room
from clearhead.core.engines.engine import Engine
from clearhead.core.masks import Grid


class Refuses(Engine):
    name = "refuses"
    caption = "never answers"

    def why_not(self, problem):
        return ["it is too early", "it is too late"]

    def compute(self, problem, inputs):
        raise AssertionError("an engine that declined was called")


class Zeros(Engine):
    name = "zeros"
    caption = "always answers 0"

    def why_not(self, problem):
        return []

    def compute(self, problem, inputs):
        return inputs.q.new_zeros(*inputs.q.shape[:3], problem.Dv)


def only(monkeypatch, *engines: Engine) -> None:
    """These engines and no other."""
    monkeypatch.setattr(room, "ENGINES", engines)
    monkeypatch.setattr(room, "BY_NAME", engines)


@pytest.fixture
def two_engines(monkeypatch):
    only(monkeypatch, Refuses(), Zeros(), room.ENGINES[-1])


QKV = torch.randn(2, 6, 300, 8), torch.randn(2, 3, 700, 8), torch.randn(2, 3, 700, 4)


def test_the_first_that_does_not_decline_answers(two_engines):
    plan = ch.plan(*QKV)
    assert plan.engine == "zeros" and plan.not_needed == ("steps",)
    assert plan.declined == {"refuses": ["it is too early", "it is too late"]}
    assert (ch.attention(*QKV) == 0).all()


def test_only_a_named_engine_is_tried(two_engines):
    plan = ch.plan(*QKV, engine="steps")
    assert plan.engine == "steps" and plan.declined == {} and plan.not_needed == ()
    assert not (ch.attention(*QKV, engine="steps") == 0).any()


def test_a_named_engine_that_declines_never_falls_back(two_engines):
    plan = ch.plan(*QKV, engine="refuses")
    assert plan.engine is None and "answered by   no engine" in str(plan)
    with pytest.raises(ch.BadValue) as caught:
        ch.attention(*QKV, engine="refuses")
    assert str(caught.value) == (
        "engine='refuses' cannot compute this call: B=2 H=6 G=3 Tq=300 Tk=700 D=8 Dv=4, "
        "float32 on cpu.\n"
        "  Rule: an engine that is named never falls back "
        "(refuses: it is too early, it is too late).\n"
        "  Hint: omit engine= to use the fastest engine that can; plan(...) shows which one."
    )


def test_nobody_can(monkeypatch):
    only(monkeypatch, Refuses())
    assert ch.plan(*QKV).engine is None
    with pytest.raises(ch.BadValue) as caught:
        ch.attention(*QKV)
    assert str(caught.value) == (
        "No engine can compute this call: B=2 H=6 G=3 Tq=300 Tk=700 D=8 Dv=4, float32 on cpu.\n"
        "  Rule: every engine declines (refuses: it is too early, it is too late).\n"
        "  Hint: pass smaller or simpler inputs; plan(...) lists the reasons too."
    )


def test_it_prints_itself(two_engines):
    assert str(ch.plan(*QKV, mask=ch.Causal(align="end"))) == (
        "B=2 H=6 G=3 Tq=300 Tk=700 D=8 Dv=4, float32 on cpu, mask Causal(align='end')\n"
        "  answered by   zeros (always answers 0)\n"
        "  refuses declined it is too early; it is too late\n"
        "  not needed    steps (later in the order)\n"
        "  pairs         1,981,800 of 2,520,000 may look (78.6 %)\n"
        "  arithmetic    47.56 MFLOP in the two products\n"
        "  memory        374.4 kB in and out at least\n"
        "  tiles         3 full, 3 partial, 0 empty of 256 x 256; this engine computes them all"
    )


def test_torch_skips_the_tiles_of_its_own_causal_mask():
    q = torch.randn(1, 1, 600, 8)
    assert "are skipped" in str(ch.plan(q, q, q, mask=ch.causal, engine="sdpa"))


def test_costs_by_hand():
    """4 queries and 4 keys, causal: 1 + 2 + 3 + 4 pairs, in each of 2 batches and 3 heads."""
    q, k, v = torch.randn(2, 3, 4, 5), torch.randn(2, 1, 4, 5), torch.randn(2, 1, 4, 7)
    plan = ch.plan(q, k, v, mask=ch.causal)
    assert (plan.pairs, plan.all_pairs) == (60, 96)
    assert plan.flops == 2 * 60 * (5 + 7)
    assert plan.bytes == 4 * (q.numel() + k.numel() + v.numel() + 2 * 3 * 4 * 7)


PER_HEAD = torch.zeros(1, 4, 1, 6, dtype=torch.bool)
PER_HEAD[0, 0, 0, 1] = PER_HEAD[0, 1, 0, 1:3] = PER_HEAD[0, 3, 0, 5] = True


@pytest.mark.parametrize(
    "mask, keys",
    [
        (None, 2 * 2 * 6),
        (ch.Causal(align="start"), 2 * 2 * 3),
        (ch.window(before=1, after=0, align="end"), 2 * 2 * 4),
        (ch.lengths(keys=[4, 1]), 2 * 4 + 2 * 1),
        (ch.dense(keep=PER_HEAD), 2 * (2 + 1)),  # keys 1 and 2 for two heads, key 5 for one
        (ch.dense(keep=torch.eye(6)[:3] > 0), 2 * 2 * 3),
        (~ch.everything, 0),
    ],
)
def test_only_keys_that_are_seen_are_read(mask, keys):
    q, k, v = torch.randn(2, 4, 3, 5), torch.randn(2, 2, 6, 5), torch.randn(2, 2, 6, 7)
    ends = q.numel() + 2 * 4 * 3 * 7
    assert ch.plan(q, k, v, mask=mask).bytes == 4 * (ends + keys * (5 + 7))


@pytest.mark.parametrize(
    "mask, pairs",
    [
        (None, 72),
        (ch.lengths(keys=[4, 0]), 4 * 3 * 3),
        (ch.dense(keep=torch.tensor([True, False, True, False])), 36),
        (ch.dense(keep=torch.ones(2, 3, 3, 4).bool()) & ch.prefix(3), 54),
        (~ch.everything, 0),
    ],
)
def test_pairs_are_counted_over_batches_and_heads(mask, pairs):
    q, k = torch.randn(2, 3, 3, 5), torch.randn(2, 1, 4, 5)
    assert ch.plan(q, k, k, mask=mask).pairs == pairs


@pytest.mark.parametrize("empty", range(4))
def test_empty_problems_cost_nothing(empty):
    B, H, Tq, Tk = (0 if i == empty else n for i, n in enumerate((2, 3, 5, 7)))
    q, k = torch.randn(B, H, Tq, 4), torch.randn(B, H, Tk, 4)
    for mask in (None, ch.window(before=1, align=0), ch.dense(keep=torch.ones(B, 1, Tq, Tk) > 0)):
        plan = ch.plan(q, k, k, mask=mask)
        assert plan.pairs == plan.all_pairs == plan.flops == 0 and "(none)" in str(plan)


def test_tiles_are_counted():
    q = torch.empty(1, 1, 1024, 8, device="meta")
    assert ch.plan(q, q, q, mask=ch.causal).tiles == {"full": 6, "partial": 4, "empty": 6}
    assert ch.plan(q, q, q).tiles == {"full": 16, "partial": 0, "empty": 0}


def test_a_long_problem_is_planned_in_no_time():
    """65,536 tokens on the meta device: nothing is held but a few numbers for each query."""
    q = torch.empty(1, 32, 2**16, 128, device="meta", dtype=torch.bfloat16)
    plan = ch.plan(q, q, q, mask=ch.causal)
    assert plan.pairs == 32 * 2**16 * (2**16 + 1) // 2
    assert "steps" in plan.declined or "steps" in plan.not_needed


def test_the_reference_declines_what_it_cannot_hold():
    q = torch.empty(1, 8, 20000, 64, device="meta")
    reasons = ch.plan(q, q, q, engine="steps").declined["steps"]
    assert reasons == ["would hold about 6 matrices of 1x8x20000x20000 (76.8 GB, more than 4.3 GB)"]


def test_a_long_problem_in_float64_takes_no_square():
    mask = ch.window(before=64, after=0)
    for tokens, chosen in ((1000, "sdpa"), (24000, "tiled")):
        q = torch.empty(1, 1, tokens, 8, dtype=torch.float64)
        assert ch.plan(q, q, q, mask=mask).engine == chosen


def test_a_plan_of_a_million_tokens_comes_at_once():
    q = torch.zeros(()).expand(1, 1, 2**20, 8)
    plan = ch.plan(q, q, q, mask=ch.causal)
    assert plan.tiles == {"full": 4096 * 4095 // 2, "partial": 4096, "empty": 4096 * 4095 // 2}
    assert repr(plan) == str(plan)


def test_a_plan_reports_whether_empty_tiles_are_skipped():
    q = torch.randn(1, 1, 600, 8)
    skipped, computed = (
        str(ch.plan(q, q, q, mask=ch.window(before=9), engine=e)) for e in ("tiled", "sdpa")
    )
    assert "empty ones are skipped" in skipped and "computes them all" in computed


@pytest.mark.parametrize("tile", [1, 4, 7, 300])
def test_tiles_are_counted_by_the_ends_of_runs(tile):
    T, draw = 33, torch.Generator().manual_seed(1)
    rules = (
        ch.causal, ch.window(before=3) | ch.prefix(2), ~ch.window(before=5, after=5), ch.prefix(4),
        ~ch.everything, ch.documents([i // 5 for i in range(T)]),
        ch.lengths(keys=[7, 31]) & ch.causal, ch.dense(keep=torch.rand(T, T, generator=draw) > 0.5),
    )  # fmt: skip
    for rule in rules:
        reach = rule.key_ranges(Grid(T, T, 2, 3))
        some, full = reach.count_tiles(tile)
        keep = reach.to_bool().expand(2, 3, T, T).flatten(0, 1)
        cells = [keep[:, :, i : i + tile] for i in range(0, T, tile)]
        blocks = [c[:, i : i + tile] for c in cells for i in range(0, T, tile)]
        assert some == sum(bool(b.any()) for b in blocks)
        assert full == sum(bool(b.all()) for b in blocks)

"""What users with fresh eyes ran into, each held by a test."""

import contextlib
import copy
import math
import sys

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import clearhead as ch
from clearhead.engines import ENGINES


def test_rules_do_not_follow_the_tensors_they_were_made_from():
    n, keep = torch.tensor([3, 5]), torch.ones(2, 3, dtype=torch.bool)
    lengths, dense = ch.lengths(keys=n), ch.dense(keep=keep)
    n[0], keep[0] = 1, False
    assert repr(lengths) == "lengths(keys=[3, 5])" and dense.to_bool().all()


@pytest.mark.parametrize("make", [
    lambda: ch.window(after=sys.maxsize), lambda: ch.Causal(align=2**63 - 1),
    lambda: ch.lengths(keys=2**70), lambda: ch.prefix([2**62]),
])  # fmt: skip
def test_distances_that_would_overflow_are_refused(make):
    with pytest.raises(ch.BadValue, match="positions and counts stay within"):
        make()


def test_the_same_rule_twice_is_the_rule():
    assert ch.causal & ch.Causal() is ch.causal and ch.causal | ch.causal is ch.causal
    assert len({ch.window(before=i) for i in range(100)} | {ch.window(before=3)}) == 100


def test_autocast_changes_nothing_that_is_shown():
    q = torch.randn(2, 3, 7, 5)
    stats = ["lse", "entropy", ch.topk(2), ch.map(3, 3)]

    def everything():
        A = ch.matrix(q, q, mask=ch.causal)
        seen = ch.look(q, q, q, mask=ch.causal, stats=stats)
        trace = ch.explain(q, q, q, mask=ch.causal)
        return [A.rows([0, 6]), A @ q, A.T @ q, seen.out, seen.lse, seen.map, trace["output"]]

    plain = everything()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = everything()
    assert all(a.dtype == torch.float32 and a.equal(b) for a, b in zip(plain, narrow, strict=True))


@pytest.mark.parametrize("engine", ["auto", "sdpa", "tiled", "steps"])
def test_minus_infinity_in_a_bias_keeps_nan_out(engine):
    q, v = torch.randn(4, 3), torch.randn(4, 3)
    v[2] = float("nan")
    bias = torch.zeros(4, 4)
    bias[:, 2] = float("-inf")
    out = ch.attention(q, q, v, bias=bias, engine=engine)
    torch.testing.assert_close(out, ch.attention(q, q[[0, 1, 3]], v[[0, 1, 3]]))


def test_a_trace_with_a_cache_stays_as_it_was():
    layer, x, cache = ch.nn.MultiHeadAttention(8, 2, causal=True), torch.randn(1, 5, 8), None
    cache = ch.nn.KVCache(10)
    with torch.no_grad():
        layer(x[:, :3], cache=cache)
        trace = layer.explain(x[:, 3:4], cache=cache)
        before = trace["key"].clone()
        layer(x[:, 4:5], cache=cache)
    assert trace["key"].equal(before)


def test_recomputation_on_the_way_back_is_not_a_new_call():
    from torch.utils.checkpoint import checkpoint

    layer, x = ch.nn.MultiHeadAttention(8, 2), torch.randn(1, 5, 8, requires_grad=True)
    with ch.watch(layer) as seen:
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_layer_of_a_model_that_recomputes_can_be_watched(which):
    from torch.utils.checkpoint import checkpoint

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(ch.nn.TransformerBlock(8, 2) for _ in range(3))

        def forward(self, x, again):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if again else block(x)
            return x

    model, x = Model(), torch.randn(1, 5, 8)
    grads = []
    for again in (False, True):
        model.zero_grad()
        with ch.watch(model, layers=[which]) as seen:
            (model(x, again).sum() + seen[0].entropy.sum()).backward()
        assert len(seen) == 1 and seen[0].layer == which
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_what_was_made_for_inference_is_not_kept_for_training():
    q, rule = torch.randn(1, 1, 3, 4), ch.documents([0, 0, 1])
    with torch.inference_mode():
        true = ch.attention(q, q, q, mask=rule)
    got = ch.attention(q.requires_grad_(), q, q, mask=rule)
    got.sum().backward()
    torch.testing.assert_close(got.detach(), true.clone())


@pytest.mark.parametrize("name", ["bias", "slopes", "sinks"])
def test_negated_views_are_read_as_they_stand(name):
    numbers = torch.randn(2, dtype=torch.complex64).conj().imag
    assert numbers.is_neg()
    q = torch.randn(1, 2, 5, 4)
    asked = {
        "bias": {"bias": numbers.reshape(2, 1, 1)},
        "slopes": {"bias": ch.alibi(numbers)},
        "sinks": {"sinks": numbers},
    }[name]
    true = ch.attention(q, q, q, engine="steps", **asked)
    torch.testing.assert_close(ch.attention(q, q, q, **asked), true)


@pytest.mark.parametrize("name", ["bias", "sinks"])
def test_numbers_that_are_not_there_are_named(name):
    q, hollow = torch.randn(1, 2, 5, 4), torch.randn(2, 1, 1, device="meta")
    with pytest.raises(ch.BadValue, match=f"{name} is a meta tensor"):
        ch.attention(q, q, q, **{name: hollow if name == "bias" else hollow.flatten()})


def test_keys_without_memory_are_refused():
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    k.untyped_storage().resize_(0)
    with pytest.raises((ch.BadValue, RuntimeError)):
        ch.attention(q, k, q)


def test_sparse_tensors_are_named():
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(ch.BadType, match="sparse"):
        ch.attention(q, q.to_sparse(), q)


def test_unknown_statistics_are_refused_before_the_model_runs():
    with (
        pytest.raises(ch.BadValue, match="entropi"),
        ch.watch(torch.nn.Linear(2, 2), stats=["entropi"]),
    ):
        raise AssertionError("the block was entered")


@pytest.mark.parametrize("verb", [ch.look, ch.explain, lambda q, k, v: ch.matrix(q, k)])
def test_meta_tensors_have_nothing_to_look_at(verb):
    q = torch.empty(1, 2, 3, 5, device="meta")
    with pytest.raises(ch.BadValue, match="meta tensors"):
        verb(q, q, q)


def test_a_plan_of_a_million_tokens_comes_at_once():
    q = torch.zeros(()).expand(1, 1, 2**20, 8)
    plan = ch.plan(q, q, q, mask=ch.causal)
    assert plan.tiles == {"full": 4096 * 4095 // 2, "partial": 4096, "empty": 4096 * 4095 // 2}
    assert repr(plan) == str(plan)


def test_a_plan_says_whether_empty_tiles_are_skipped():
    q = torch.randn(1, 1, 600, 8)
    skipped, computed = (
        str(ch.plan(q, q, q, mask=ch.window(before=9), engine=e)) for e in ("tiled", "sdpa")
    )
    assert "empty ones are skipped" in skipped and "computes them all" in computed


def test_short_representations():
    trace = ch.explain_text("The cat sat on the mat " * 9)
    assert len(repr(trace.steps)) < 2000
    assert "mask" not in repr(ch.why_scale(4, sizes=(2,))) and "raw" in repr(
        ch.why_scale(4, sizes=(2,))
    )


BEHIND = ch.documents([0, 0, 0, 0, 1, 1])  # tokens 4 and 5 hold NaN, and those before do not see it


def spoiled(where, bad, dtype=torch.float32):
    """q, k, v of six tokens, `bad` in the keys or values of the last two."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 6, 4, dtype=dtype) for _ in range(3))
    (k if where == "k" else v)[:, :, 4:] = bad
    return [x.requires_grad_() for x in (q, k, v)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("engine", [e.name for e in ENGINES])
def test_nan_goes_back_to_those_alone_who_see_it(engine, where, bad):
    q, k, v = spoiled(where, bad)
    if ch.plan(q, k, v, mask=BEHIND, engine=engine).engine != engine:
        pytest.skip(f"{engine} declines")
    for part in (slice(0, 4), slice(0, 6)):
        out = ch.attention(q, k, v, mask=BEHIND, engine=engine)[:, :, part]
        for grad in torch.autograd.grad(out.sum(), (q, k, v)):
            assert grad[:, :, :4].isfinite().all()
    assert out[:, :, :4].isfinite().all()


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_of_a_nan_stay_with_those_who_see_it(dtype, learns):
    q, k, v = (x.detach() for x in spoiled("k", math.nan, dtype))
    stats = ["received", "entropy", ch.map(6, 6), ch.rows([0, 4])]
    seen = ch.look(q.requires_grad_(learns), k, v, mask=BEHIND, stats=stats)
    lost = torch.tensor([False] * 4 + [True] * 2)
    for x in (seen.received, seen.entropy, seen.rows[:, :, 1]):
        assert torch.equal(x.isnan().flatten(), lost)
    assert torch.equal(seen.map.isnan()[0, 0], lost.outer(lost))
    for weights in (
        ch.explain(q, k, v, mask=BEHIND)["weights"],
        ch.matrix(q, k, mask=BEHIND).to_dense(),
    ):
        assert torch.equal(weights.isnan()[0, 0], lost.outer(lost))


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("engine", ["auto", "tiled", "steps"])
def test_torch_func_and_graphs_follow_every_engine(engine):
    """A soft cap in float64 leaves `auto` to the tiles in torch."""

    def answer(x):
        return ch.attention(x, x, x, mask=BEHIND, softcap=2.0, engine=engine)

    x = torch.randn(3, 1, 6, 4, dtype=torch.float64)
    true = torch.stack([answer(one[None])[0] for one in x])
    torch.testing.assert_close(torch.func.vmap(lambda one: answer(one[None])[0])(x), true)
    by_func = torch.func.grad(lambda x: answer(x).square().sum())(x)
    x.requires_grad_()
    (by_graph,) = torch.autograd.grad(answer(x).square().sum(), x)
    torch.testing.assert_close(by_func, by_graph)
    one = x[:1].detach()
    assert torch.func.hessian(lambda x: answer(x).sum())(one).isfinite().all()
    compiled = torch.compile(answer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(one), true[:1])


def test_gauges_tell_groups_and_largest_weights():
    layer = ch.nn.MultiHeadAttention(8, 2)
    with ch.watch(layer, stats=[ch.mass({"sink": ch.prefix(1)}), ch.topk(2)]) as seen:
        layer(torch.randn(1, 4, 8))
    gauges, found = seen.gauges(), seen[0]
    assert gauges["0.mass.sink"] == pytest.approx(found.mass["sink"].mean().item())
    assert gauges["0.topk"] == pytest.approx(found.topk.weights[..., 0].mean().item())


def test_watching_what_never_asks_is_said():
    layer, x = ch.nn.MultiHeadAttention(8, 2), torch.randn(1, 4, 8)
    for model in (torch.nn.Linear(8, 8), torch.compile(layer, backend="aot_eager")):
        with pytest.raises(ch.BadValue, match="never asked"), ch.watch(model), torch.no_grad():
            model(x)
    with pytest.warns(UserWarning, match="made 1 call in a run"), ch.watch(layer, layers=[7]):
        layer(x)
    whole = torch.nn.Sequential(torch.nn.Linear(8, 8), layer)
    with ch.watch(whole) as seen:
        whole[0](x)  # the model itself did not run, so nothing was missed
    assert len(seen) == 0
    with ch.watch(whole, layers=(i for i in [np.int64(0)])) as seen:
        whole(x)
    assert len(seen) == 1
    for wrong, kind in ((1, ch.BadType), ([-1], ch.BadValue), ([True], ch.BadValue)):
        with pytest.raises(kind, match="layers"), ch.watch(layer, layers=wrong):
            raise AssertionError("the block was entered")
    with pytest.raises(ch.BadValue, match="and 1 came by"):
        seen[1]
    with pytest.raises(AttributeError, match="ask a call"):
        _ = seen.entropy


def test_autocast_narrows_what_is_mixed():
    q = torch.randn(1, 2, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert ch.attention(q, q, q.bfloat16()).dtype == torch.bfloat16
        assert ch.attention(q, q, q).dtype == torch.float32
    with pytest.raises(ch.BadType, match="dtypes"):
        ch.attention(q, q, q.bfloat16())


def test_layers_of_words_go_into_a_graph():
    embed, ids = ch.nn.TokenEmbedding(9, 4), torch.tensor([[1, 2], [3, 4]])
    compiled = torch.compile(embed, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids), embed(ids))
    assert torch.equal(torch.func.vmap(embed)(ids), embed(ids))
    block = ch.nn.TransformerBlock(8, 2, causal=True, relative=ch.nn.RelativePositions(2)).eval()
    graph = torch.compile(block, fullgraph=True, backend="aot_eager")
    for shape in ((2, 7, 8), (2, 9, 8), (3, 11, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(graph(x), block(x))
    assert block(torch.randn(2, 0, 8)).shape == (2, 0, 8)


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


def test_causal_is_no_function():
    with pytest.raises(ch.BadType, match="a rule already"):
        ch.causal()
    assert ch.window(before=np.int64(3)).before == 3 and ch.Causal(align=np.int64(2)).align == 2


def test_what_rounding_took_may_come_back_in_any_layout():
    """Hooks that keep tensors elsewhere may give them back with other strides."""

    def turned(x):
        return x.mT.contiguous().mT if x.dim() == 4 else x

    q, k, v = (torch.randn(2, 4, 333, 64).bfloat16() for _ in range(3))
    grads = []
    for hooks in (contextlib.nullcontext(), saved_tensors_hooks(lambda x: x, turned)):
        xs = [x.clone().requires_grad_() for x in (q, k, v + 10)]
        with hooks:
            out = ch.attention(*xs, engine="cpu")
        grads.append(torch.autograd.grad(out.sum(), xs))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_an_infinite_score_is_nan_in_the_statistics_of_its_row_alone():
    q = torch.randn(1, 1, 4, 8)
    bias = torch.zeros(4, 4)
    bias[2, 1] = math.inf
    seen = torch.tensor([True, True, True, False])
    for dtype, learns in ((torch.float32, False), (torch.float32, True), (torch.float64, False)):
        x = q.to(dtype, copy=True).requires_grad_(learns)
        found = ch.look(x, x, x, mask=ch.causal, bias=bias.to(dtype), stats=[
            "received", ch.rows([2]), ch.map(4, 4)])  # fmt: skip
        assert torch.equal(found.rows.isnan().flatten(), seen)
        assert torch.equal(found.received.isnan().flatten(), seen)
        assert torch.equal(found.map.isnan()[0, 0], torch.arange(4).eq(2).outer(seen))


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


def test_statistics_follow_torch_func():
    x = torch.randn(1, 2, 6, 4)
    for stats in ("entropy", "received"):

        def total(x, stats=stats):
            return getattr(ch.look(x, x, x, mask=ch.causal, stats=[stats]), stats).square().sum()

        by_func = torch.func.grad(total)(x)
        y = x.clone().requires_grad_()
        torch.testing.assert_close(by_func, torch.autograd.grad(total(y), y)[0])
    biases = torch.randn(3, 6, 6)
    got = torch.func.vmap(lambda b: ch.attention(x, x, x, bias=b))(biases)
    for a, b in zip(got, biases, strict=True):
        torch.testing.assert_close(a, ch.attention(x, x, x, bias=b))


def test_mixed_dtypes_are_named_on_any_device():
    x = torch.randn(1, 2, 4, 8, device="meta")
    with pytest.raises(ch.BadType, match="dtypes"):
        ch.attention(x, x, x.bfloat16())


def test_layers_are_built_of_the_sizes_that_were_checked():
    layer = ch.nn.MultiHeadAttention(np.int64(8), torch.tensor(2))
    sizes = layer.d, layer.heads, layer.head_size, layer.W_query.in_features
    assert all(type(size) is int for size in sizes)
    assert type(ch.nn.TokenEmbedding(torch.tensor(3), 4).table.num_embeddings) is int


def test_one_graph_serves_every_size():
    def answer(x):
        return ch.attention(x, x, x, mask=ch.causal, softcap=3.0)

    graph = torch.compile(answer, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 2, 8, 8), (2, 2, 9, 8), (3, 4, 9, 16)):
        x = torch.randn(shape)
        torch.testing.assert_close(graph(x), answer(x))


def test_rules_are_printed_whatever_the_default_device():
    shown = [ch.causal, ch.prefix(3) & ch.Causal(align=[1, 2]), ch.documents([0, 0, 1])]
    plain = [(str(rule), rule.why(1, 0)) for rule in shown]
    lesson = str(ch.explain_text("a b"))
    q = torch.randn(1, 2, 5, 8)
    with torch.device("meta"):
        assert [(str(rule), rule.why(1, 0)) for rule in shown] == plain
        assert str(ch.explain_text("a b")) == lesson
        assert ch.why_scale(8, keys=4, queries=4, sizes=[4]).sizes == [4, 8]
        pooled = ch.look(q, q, q, stats=[ch.map(2, 2)], engine="tiled").map
    torch.testing.assert_close(pooled, ch.look(q, q, q, stats=[ch.map(2, 2)]).map)


def test_torchs_signature_answers_with_shapes_alone():
    x = torch.randn(2, 4, 5, 8, device="meta")
    assert ch.compat.scaled_dot_product_attention(x, x, x).shape == (2, 4, 5, 8)


@torch.no_grad()
def test_a_cache_stays_with_its_layer():
    """What two layers write into one cache would be looked at by both."""
    blocks = [ch.nn.TransformerBlock(16, 4, causal=True) for _ in range(2)]
    x, cache = torch.randn(1, 5, 16), ch.nn.KVCache()
    blocks[0](x, cache=cache)
    with pytest.raises(ch.BadValue, match="another layer has filled"):
        blocks[1](x, cache=cache)
    assert cache.length == 5
    twin, copied = copy.deepcopy(blocks[0]), copy.deepcopy(cache)
    torch.testing.assert_close(twin(x, cache=copied), blocks[0](x, cache=cache))
    cache.reset()
    blocks[1](x, cache=cache)


def test_a_cache_begun_in_inference_mode_says_why_it_does_not_go_on():
    layer, cache = ch.nn.MultiHeadAttention(16, 4, causal=True), ch.nn.KVCache(9)
    with torch.inference_mode():
        layer(torch.randn(1, 5, 16), cache=cache)
    with torch.no_grad(), pytest.raises(ch.BadValue, match="begun under"):
        layer(torch.randn(1, 1, 16), cache=cache)
    with torch.inference_mode():
        layer(torch.randn(1, 1, 16), cache=cache)
    assert cache.length == 6


def test_what_vmap_holds_is_not_watched():
    layer = ch.nn.SelfAttention(4, 4)
    with pytest.raises(ch.BadValue, match=r"watch heard a call inside of torch\.func\.vmap"):
        with ch.watch(layer, stats=["entropy"]):
            torch.func.vmap(layer)(torch.randn(3, 5, 4))


def test_the_entropy_of_one_key_is_no_negative_zero():
    q = torch.randn(1, 1, 64, 16)
    for engine in ("tiled", "steps"):
        mask = ch.window(before=0, after=0)
        entropy = ch.look(q, q, q, mask=mask, engine=engine, stats=["entropy"]).entropy
        assert (entropy == 0).all() and not torch.signbit(entropy).any()

"""Gradients by the C++ core, on every instruction-set level, against float64 `steps`."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import clearhead as ch
from clearhead.core.engines.cpu import Cpu, backward, operator
from clearhead.core.problem.check import Options, make_problem
from tests.core.engines.cpu.test_kernels import (
    DTYPES,
    LENGTHS,
    LEVELS,
    SIZES,
    draw,
    holes,
    level as level,
    make_qkv,
    threads as threads,
)
from tests.core.engines.test_engines import forward_and_back, wanting
from tests.fresh_process import run_program
from tests.memory import needs_peak
from tests.pairs import pairs
from tests.problems import PROBLEMS, Case, naive_attention, within_yardstick

pytest.importorskip("clearhead._kernels", reason="built without a C++ compiler")


def by_core(*qkv, **keywords):
    return ch.attention(*qkv, engine="cpu", **keywords)


def by_steps(*qkv, **keywords):
    return ch.attention(*qkv, engine="steps", **keywords)


def check(case: Case, dtype: torch.dtype) -> None:
    """The errors of output and gradients are at most twice those of plain torch in this dtype."""
    for what, (got, true, ruler, size) in errors(case, dtype).items():
        fits, figures = within_yardstick(got, true, ruler, size)
        assert fits, f"{what}: {figures}"


def check_on_average(cases: list[Case], dtype: torch.dtype, times: float = 2.0) -> None:
    """The errors of gradients, averaged over many draws, since a single rounding may decide one."""
    drawn = [errors(case, dtype) for case in cases]
    for what in drawn[0].keys() - {"out"}:
        ours, theirs = (
            sum(float((one[what][i].double() - one[what][1]).square().mean()) for one in drawn)
            for i in (0, 2)
        )
        assert ours <= times**2 * theirs, f"{what}: squared error {ours:.3g}, torch's {theirs:.3g}"


def errors(case: Case, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, ...]]:
    grad_out = draw(*case.q.shape[:3], case.v.shape[-1], dtype=dtype, seed=5)
    true = forward_and_back(by_steps, wanting(case, torch.float64), grad_out)
    got = forward_and_back(by_core, wanting(case, dtype), grad_out)
    ruler = forward_and_back(naive_attention, wanting(case, dtype), grad_out)
    biggest = max(float(x.detach().abs().max()) for x in (*case.tensors, grad_out))
    mixed = biggest**2 * max(1.0, case.keywords.get("scale", 1.0))
    found = {}
    for what, a, b, c in zip(["out", *"qkv", "bias", "sinks"], got, true, ruler, strict=False):
        assert a.dtype == dtype and a.shape == b.shape
        # A gradient is a difference, so the error is relative to the terms that cancel. In 16-bit
        # types four roundings of these may let zeros pass; then it is relative to the gradient.
        largest = float(b.detach().abs().max())
        own = dtype != torch.float32 and largest
        size = biggest if what == "out" else own or max(mixed, largest)
        found[what] = *(x.detach() for x in (a, b, c)), size
    return found


@pytest.mark.parametrize(
    "name, dtype, level",
    pairs([n for n in PROBLEMS if not n.startswith("no ")], DTYPES, LEVELS),
    indirect=["level"],
    ids=str,
)
def test_every_named_problem(name, dtype, level):
    if name == "large scores" and dtype != torch.float32:
        pytest.skip("products of half precision, times 300, leave no digit to compare")
    if name == "large scores":
        return check_on_average([PROBLEMS[name](dtype, seed) for seed in range(20)], dtype)
    check(PROBLEMS[name](dtype, 0), dtype)


RULES = [
    {},
    {"mask": ch.Causal(align="end")},
    {"mask": ch.window(before=70, after=9, align="end"), "softcap": 3.0},
    {"mask": ch.window(before=30, after=0, align="end") | ch.prefix(5), "sinks": (4,)},
    {"bias": (1, 1, "Tq", "Tk"), "mask": ch.Causal(align="end"), "softcap": 5.0, "sinks": (4,)},
    {"bias": (4, 1, "Tk"), "dropout": 0.2, "seed": 3},
    {"bias": (2, 4, "Tq", 1), "sinks": (4,)},
    {"bias": (2, 1, "Tq", "Tk"), "mask": ~ch.Causal(align="start")},
]


def case_of(sizes: dict, rule: dict, dtype: torch.dtype) -> Case:
    q, k, v = make_qkv(**sizes, dtype=dtype)
    made, leaves = dict(rule), []
    for name in ("bias", "sinks"):
        if name in rule:
            x = draw(*(sizes.get(n, n) for n in rule[name]), dtype=dtype, seed=7)
            leaves.append(x)
            made[name] = ch.bias(x) if name == "bias" else x
    return Case(q, k, v, made, tuple(leaves))


@pytest.mark.parametrize(
    "lengths, rule, dtype, level",
    pairs(LENGTHS, range(len(RULES)), DTYPES, LEVELS),
    indirect=["level"],
    ids=str,
)
def test_lengths_around_tile_edges(lengths, rule, dtype, level):
    Tq, Tk = lengths
    check(case_of(dict(B=2, H=4, G=2, Tq=Tq, Tk=Tk, D=16, Dv=11), RULES[rule], dtype), dtype)


@pytest.mark.parametrize(
    "D, dtype, level", pairs(SIZES, DTYPES, LEVELS), indirect=["level"], ids=str
)
def test_every_head_size(D, dtype, level):
    rule = RULES[(1, 4)[D % 2]]
    check(case_of(dict(B=2, H=4, G=1, Tq=59, Tk=211, D=D), rule, dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("Tq", [3, 40])  # decode, prefill
def test_values_far_from_zero(Tq, dtype, level):
    """Then dP - delta is a small difference of large numbers, which the rounded output does not
    contain. The bound comes from float32, rounded at the end."""
    q, k, v = make_qkv(1, 2, 1, Tq, 70, 16)
    bias = draw(1, 2, 1, 70)
    given = [x.to(dtype) for x in (q, k, v + 10, bias)]
    dout = draw(1, 2, Tq, 16).to(dtype)

    def grads_of(attend, dtype):
        x = [x.to(dtype, copy=True).requires_grad_() for x in given]
        attend(*x[:3], bias=x[3]).backward(dout.to(dtype))
        return [x.grad for x in x]

    true = grads_of(by_steps, torch.float64)
    for a, b, c in zip(
        grads_of(by_core, dtype), true, grads_of(by_core, torch.float32), strict=True
    ):
        ours, ruler = ((x.double() - b).square().mean().sqrt() for x in (a, c.to(dtype)))
        assert ours <= 4 * ruler


SHIFTS = {"around 0": (0, 0), "keys": (8, 0), "values": (0, 8), "both": (8, 8)}


@pytest.mark.parametrize("shift", SHIFTS.values(), ids=SHIFTS)
def test_gradients_in_bfloat16_err_no_more_than_those_of_torch(shift, level):
    """With dot products of pairs, weights and gradients of logits are rounded. A common offset of
    the values must still cancel. torch loses all of dq if keys have a common offset too."""
    q, k, v = make_qkv(1, 4, 2, 311, 307, 40)
    given = [x.bfloat16() for x in (q, k + shift[0], v + shift[1])]
    dout = draw(1, 4, 311, 40).bfloat16()

    def grads_of(attend, dtype):
        x = [x.to(dtype, copy=True).requires_grad_() for x in given]
        return torch.autograd.grad(attend(*x), x, dout.to(dtype))

    def by_torch(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    true = grads_of(by_steps, torch.float64)
    for ours, right, theirs in zip(
        grads_of(by_core, torch.bfloat16), true, grads_of(by_torch, torch.bfloat16), strict=True
    ):
        error, error_of_torch = ((x.double() - right).norm() for x in (ours, theirs))
        assert error <= min(1.1 * error_of_torch, 0.03 * right.norm())


@pytest.mark.parametrize("rule", [0, 1])
def test_several_chunks_of_queries_and_stretches_of_keys(rule, level):
    """One head, so its 2100 keys are two stretches; its 800 queries are three chunks."""
    sizes = dict(B=1, H=1, G=1, Tq=800, Tk=2100, D=64)
    check(case_of(sizes, RULES[rule], torch.float32), torch.float32)


def test_scores_of_ten_thousand_and_long_rows(level):
    rule = {"scale": 1000.0, "mask": ch.Causal(align="end")}
    large = [Case(*make_qkv(Tq=60, Tk=90, D=64, seed=seed), rule) for seed in range(20)]
    # Without fused multiply-adds a dot product of such scores rounds twice as often as torch's.
    check_on_average(large, torch.float32, 4.0 if level == "scalar" else 2.0)
    long = make_qkv(H=1, G=1, Tq=12, Tk=100_000, D=8)
    check(Case(*long), torch.float32)


@pytest.mark.parametrize("Tq", [1, 7])
def test_few_rows_with_large_scores(Tq, level):
    """They are decoded, but the backward pass recomputes their scores, and its weights must sum to
    1 too. The bound comes from torch's fused function, which also stores a log-sum-exp."""
    squared = dict.fromkeys(("q", "k", "v"), (0.0, 0.0))
    for seed in range(20):
        qkv, dout = make_qkv(Tq=Tq, Tk=37, D=64, seed=seed), draw(1, 2, Tq, 64, seed=seed + 100)

        def grads_of(attend, dtype, qkv=qkv, dout=dout):
            x = [x.to(dtype, copy=True).requires_grad_() for x in qkv]
            attend(*x, scale=1.0).backward(dout.to(dtype))
            return [x.grad for x in x]

        def fused(q, k, v, scale):
            return F.scaled_dot_product_attention(q, k, v, scale=scale)

        true = grads_of(by_steps, torch.float64)
        pairs = zip(grads_of(by_core, torch.float32), grads_of(fused, torch.float32), strict=True)
        for what, (ours, theirs), right in zip("qkv", pairs, true, strict=True):
            a, b = ((x.double() - right).square().sum().item() for x in (ours, theirs))
            squared[what] = squared[what][0] + a, squared[what][1] + b
    for what, (ours, theirs) in squared.items():
        assert ours <= 4 * theirs, f"{what}: squared error {ours:.3g}, torch's {theirs:.3g}"


SHORT = {
    "everything": (9, 16, {}),
    "causal": (128, 128, {"mask": ch.Causal(align="end"), "softcap": 3.0}),
    "dropout": (16, 128, {"mask": ch.window(3, 2, align="end"), "dropout": 0.2, "seed": 3}),
    "bias": (31, 57, {"bias": ("Tq", "Tk"), "mask": ch.Causal(align="end"), "sinks": (4,)}),
    "holes": (50, 50, {"mask": ch.documents(torch.arange(50) // 7 % 3)}),
    "padding": (50, 50, {"mask": ch.Causal(align="end") & ch.lengths(keys=40, queries=20)}),
    "NaN": (50, 50, {"mask": ch.dense(keep=torch.outer(*2 * [torch.arange(50) != 12]))}),
}


@pytest.mark.parametrize("name", SHORT)
def test_unpacked_rows_give_the_bits_of_packed_ones(name, level):
    """Rows of 33 numbers are packed, and 32 are whole vectors of every level. Heads with NaN in a
    hidden row are packed too."""
    Tq, Tk, rule = SHORT[name]
    case = case_of(dict(B=2, H=4, G=2, Tq=Tq, Tk=Tk, D=32), rule, torch.float32)
    if name == "NaN":
        for x in case.tensors:
            x[:, :, 12] = torch.nan
    dout = draw(2, 4, Tq, 32, seed=5)
    grads = []
    for more in (0, 1):
        leaves = [F.pad(x, (0, more)).requires_grad_() for x in case.tensors]
        learn = [x.requires_grad_() for x in case.learn]
        out = by_core(*leaves, **case.keywords, scale=0.3)[..., :32]
        grads.append(torch.autograd.grad(out, (*leaves, *learn), dout))
    for i, (unpacked, packed) in enumerate(zip(*grads, strict=True)):
        assert unpacked.isfinite().all()
        assert torch.equal(unpacked, packed[..., :32] if i < 3 else packed)


def core_with_lse(*qkv, **keywords):
    problem, inputs = make_problem(*qkv, Options(**keywords))
    assert Cpu().why_not(problem) == []
    return operator.attend_or_record(problem, inputs, True)


@pytest.mark.parametrize("n", range(4))
def test_key_blocks_without_visible_keys(n):
    mask = list(holes(700, 1500))[n]
    check(Case(*make_qkv(H=4, G=2, Tq=700, Tk=1500, D=16), {"mask": mask}), torch.float32)


def test_the_gradient_of_a_log_sum_exp_comes_from_the_core(monkeypatch):
    case = Case(
        *make_qkv(2, 4, 2, 31, 57, 8), {"mask": ch.Causal(align="end") & ch.lengths(queries=29)}
    )
    asked = []
    core_backward = backward.core.backward
    counting = SimpleNamespace(backward=lambda *x: asked.append(1) or core_backward(*x))
    found = {}
    for engine, dtype in (("cpu", torch.float32), ("steps", torch.float64)):
        q, k, v = (x.to(dtype).requires_grad_() for x in case.tensors)
        with monkeypatch.context() as watched:
            if engine == "cpu":
                watched.setattr(backward, "core", counting)
            look = ch.look(q, k, v, stats=["lse"], engine=engine, **case.keywords)
            seen = look.lse[look.lse > -torch.inf]
            found[engine] = torch.autograd.grad((seen**2).sum() + look.out.sum(), (q, k, v))
    assert asked
    for a, b in zip(found["cpu"], found["steps"], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_a_bias_gradient_of_another_layout_is_refused(monkeypatch):
    core_backward = backward.core.backward

    def with_columns_first(*x):
        return core_backward(*x[:-1], x[-1]._replace(dbias=x[-1].dbias.mT.contiguous().mT))

    monkeypatch.setattr(backward, "core", SimpleNamespace(backward=with_columns_first))
    bias = torch.zeros(2, 3, 4, requires_grad=True)
    out = ch.attention(*make_qkv(1, 2, 2, 3, 4, 8), bias=bias, engine="cpu")
    with pytest.raises(RuntimeError, match="refused"):
        out.sum().backward()


@pytest.mark.parametrize("sinks", [False, True])
def test_the_log_sum_exp_has_a_gradient(sinks, level):
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 4, 2, 31, 57, 8))
    extra = draw(4, seed=3).requires_grad_() if sinks else None
    mask = ch.Causal(align="end") & ch.lengths(queries=29)
    out, lse = core_with_lse(q, k, v, mask=mask, sinks=extra)
    grad_out, of_lse = draw(*out.shape, seed=8), draw(*lse.shape, seed=9)
    of_lse[..., 29:] = 0  # fully masked queries have -inf there
    leaves = (q, k, v, *([extra] if sinks else []))
    got = torch.autograd.grad((out, lse), leaves, (grad_out, of_lse))

    wide = [x.detach().double().requires_grad_() for x in leaves]
    problem, inputs = make_problem(*wide[:3], Options(mask=mask))
    wq, wk, wv = problem.widen(inputs)
    x, _ = problem.logits(wq, wk, slice(None), slice(None))
    if sinks:
        x = torch.cat([x, wide[3].reshape(1, -1, 1, 1).expand(1, 4, 31, 1)], -1)
    x = x[:, :, :29]
    true = torch.autograd.grad(
        (torch.softmax(x, -1)[..., :57] @ wv, torch.logsumexp(x, -1)),
        wide, (grad_out[:, :, :29].double(), of_lse[..., :29].double()),
    )  # fmt: skip
    for a, b in zip(got, true, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


def test_only_the_log_sum_exp_may_be_used():
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 2, 2, 5, 7, 4))
    _, lse = core_with_lse(q, k, v)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True)
    assert dq.abs().max() > 0 and dk.abs().max() > 0
    assert dv is None or (dv == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 8, 2)])
@pytest.mark.parametrize("rule", [1, 4, 5, 6])
def test_threads_do_not_change_a_bit(rule, sizes, dtype, threads):
    B, H, G = sizes
    asked = (
        {n: ((1,) if n == "sinks" else x) for n, x in RULES[rule].items()}
        if H == 1
        else RULES[rule]
    )
    if "bias" in asked:
        shape = [1 if isinstance(n, int) else n for n in asked["bias"]]
        asked = {**asked, "bias": tuple(shape)}
    if "sinks" in asked:
        asked = {**asked, "sinks": (H,)}
    Tq, Tk = (130, 300) if B > 1 else (70, 2300)
    case = case_of(dict(B=B, H=H, G=G, Tq=Tq, Tk=Tk, D=24), asked, dtype)
    grad_out = draw(B, H, Tq, 24, dtype=dtype, seed=5)
    runs = []
    for n in (1, 2):
        threads(n)
        runs.append(forward_and_back(by_core, wanting(case, dtype), grad_out))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_statistics_while_training_do_not_change_a_bit():
    q, k, v = make_qkv(1, 2, 2, 40, 40, 8)
    without = by_core(q, k, v, mask=ch.causal)
    found = ch.look(q.requires_grad_(), k, v, mask=ch.causal, stats=["entropy", "lse", "received"],
                    engine="cpu")  # fmt: skip
    assert torch.equal(found.out, without)
    for name in ("entropy", "lse", "received"):
        (grad,) = torch.autograd.grad(getattr(found, name).square().sum(), q, retain_graph=True)
        assert grad.isfinite().all() and grad.abs().max() > 0, name


@needs_peak
@pytest.mark.slow
def test_backward_does_not_store_all_pairs():
    """One head of 32768 tokens: all pairs would take 4.3 GB, the gradients take 6 MB."""
    program = """if True:
        import torch, clearhead as ch
        from tests.memory import grown
        q, k, v = (torch.randn(1, 1, 32768, 16, requires_grad=True) for _ in range(3))
        ch.attention(*(x[:, :, :64] for x in (q, k, v)), engine="cpu").sum().backward()
        print(grown(lambda: ch.attention(q, k, v, mask=ch.causal, engine="cpu").sum().backward()))
    """
    run = run_program(program)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 80


# --------------------------------------------------------- operators, transforms and compilers


@pytest.mark.outside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operators_keep_torch_rules(dtype):
    q, k, v = (x.to(dtype).requires_grad_() for x in make_qkv(2, 4, 2, 5, 9, 8))
    lo = torch.zeros(1, 1, 5, 1, dtype=torch.long)
    bias, sinks = draw(1, 4, 5, 9).requires_grad_(), draw(4).requires_grad_()
    rule = (0.3, 5.0, 0, 0, lo, lo + 7, None, bias, None, 0, sinks, 0.3, torch.tensor([3]))
    torch.library.opcheck(torch.ops.clearhead.attend.default, (q, k, v, *rule, True))
    answers = torch.ops.clearhead.attend(q, k, v, *rule, True)
    back = [x.detach() if isinstance(x, torch.Tensor) else x for x in (*answers, q, k, v, *rule)]
    for dlse in (None, draw(2, 4, 5)):
        torch.library.opcheck(
            torch.ops.clearhead.attend_backward.default,
            (draw(2, 4, 5, 8).to(dtype), dlse, *back, True),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )


def loss(q, k, v):
    return by_core(q, k, v, mask=ch.causal, softcap=4.0, dropout=0.2, seed=5).square().sum()


def test_vmap_over_a_batch_of_gradients():
    qkv = make_qkv(5, 4, 2, 13, 13, 8)
    got = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*qkv)
    for i in range(5):
        one = torch.func.grad(loss, (0, 1, 2))(*(x[i] for x in qkv))
        for a, b in zip(got, one, strict=True):
            assert torch.equal(a[i], b)
    shared = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None, None))(
        qkv[0], qkv[1][0], qkv[2][0]
    )
    assert torch.equal(shared[3], torch.func.grad(loss)(qkv[0][3], qkv[1][0], qkv[2][0]))


def test_checkpoint_gives_the_same_bits():
    from torch.utils.checkpoint import checkpoint

    def answer(q, k, v):
        return by_core(q, k, v, mask=ch.causal, dropout=0.3, seed=2)

    qkv = [x.requires_grad_() for x in make_qkv(2, 4, 2, 13, 13, 8)]
    true = torch.autograd.grad(answer(*qkv).square().sum(), qkv)
    got = torch.autograd.grad(checkpoint(answer, *qkv, use_reentrant=False).square().sum(), qkv)
    assert all(torch.equal(a, b) for a, b in zip(got, true, strict=True))


def test_autocast_trains_in_bfloat16():
    layer = ch.nn.MultiHeadAttention(24, 4, causal=True)
    x = draw(2, 9, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x).float().square().sum().backward()
    got = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(x).square().sum().backward()
    for a, p in zip(got, layer.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=0.05, atol=0.05 * float(p.grad.abs().max()))


@pytest.mark.outside
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.timeout(600)  # a C++ compiler on a busy machine
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_in_one_graph_forward_and_backward(backend):
    qkv = [x.requires_grad_() for x in make_qkv(2, 4, 2, 37, 37, 16)]
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    true = torch.autograd.grad(loss(*qkv), qkv)
    got = torch.autograd.grad(compiled(*qkv), qkv)
    for a, b in zip(got, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_is_refused_with_a_hint():
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 2, 2, 5, 7, 4))
    (dq,) = torch.autograd.grad(by_core(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(ch.BadValue, match="engine='tiled'"):
        torch.autograd.grad(dq.sum(), k)


def test_other_examples_and_heads_do_not_change_a_bit():
    q, k, v = (x.requires_grad_() for x in make_qkv(3, 4, 2, 8, 4096, 32))

    def grads(n):
        return torch.autograd.grad(ch.attention(q[:n], k[:n], v[:n]).sum(), (q, k, v))

    for one, three in zip(grads(1), grads(3), strict=True):
        assert torch.equal(one[0], three[0])


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
def test_defaults_of_dtype_and_device_do_not_reach_the_core(default):
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 4, 2, 40, 40, 16))
    bias, sinks = draw(4, 40, 40).requires_grad_(), draw(4, seed=5).requires_grad_()
    leaves = (q, k, v, bias, sinks)

    def results():
        out = ch.attention(q, k, v, bias=bias, sinks=sinks, engine="cpu")
        seen = ch.look(*(x.detach() for x in (q, k, v)), stats=["entropy", ch.exact_rows([3])])
        return out, seen.exact_rows, seen.entropy, *torch.autograd.grad(out.square().sum(), leaves)

    want = results()
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with torch.device("meta"):
            got = results()
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


LEARNED = {
    "queries": lambda x: ch.attention(x, x, x),
    "bias": lambda x: ch.attention(QUERIES, QUERIES, QUERIES, bias=ch.bias(x @ x.mT)),
    "slopes": lambda x: ch.attention(QUERIES, QUERIES, QUERIES, bias=ch.alibi(x[:, 0, 0])),
    "sinks": lambda x: ch.attention(QUERIES, QUERIES, QUERIES, sinks=x[:, 0, 0]),
}
QUERIES = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", LEARNED)
def test_a_gradient_from_outside_vmap(name):
    """Inside, no tensor requires a gradient."""
    attend = LEARNED[name]
    many = torch.rand(3, 2, 5, 4, requires_grad=True)
    one_by_one = torch.stack([attend(x) for x in many.unbind()])
    [true] = torch.autograd.grad(one_by_one.square().sum(), many)
    [got] = torch.autograd.grad(torch.func.vmap(attend)(many).square().sum(), many)
    torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-5)
    composed = torch.func.grad(lambda x: torch.func.vmap(attend)(x).square().sum())(many.detach())
    torch.testing.assert_close(composed, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_bias_for_all_heads_gets_a_gradient_that_is_rounded_once(dtype):
    source = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 64, 64, 8, generator=source) for _ in range(3))
    bias = torch.randn(1, 1, 1, 64, generator=source).to(dtype).requires_grad_()
    found = {}
    for engine, kind in (("cpu", torch.float32), ("steps", torch.float64)):
        out = ch.attention(*(x.to(kind) for x in (q, k, v)), bias=ch.bias(bias), engine=engine)
        [found[engine]] = torch.autograd.grad(out.square().sum(), bias)
    error = (found["cpu"].double() - found["steps"].double()).abs().max()
    assert error <= torch.finfo(dtype).eps * found["steps"].abs().max()


@pytest.mark.parametrize("low", [-1e20, torch.finfo(torch.float32).min, 1e30])
@pytest.mark.parametrize("sizes", [(64, 64), (2, 3000)])
def test_rows_that_are_as_low_as_a_float_can_be(low, sizes):
    """With an additive mask of the lowest float, a padded query has equal weights on all keys.
    Rounding must not lose the logarithm of their number."""
    Tq, Tk = sizes
    source = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, T, 16, generator=source) for T in (Tq, Tk, Tk)]
    bias = torch.zeros(Tq, Tk)
    bias[1], bias[0, :5] = low, low
    taken = torch.randn(1, 2, Tq, 16, generator=source)

    def gradients(engine, dtype):
        asks = [x.to(dtype).requires_grad_() for x in (*tensors, bias)]
        out = ch.attention(*asks[:3], bias=asks[3], engine=engine)
        return torch.autograd.grad((out * taken.to(dtype)).sum(), asks)

    for mine, true in zip(
        gradients("cpu", torch.float32), gradients("steps", torch.float64), strict=True
    ):
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=3e-6)


@pytest.mark.parametrize("D", [64, 80, 96])
@pytest.mark.parametrize("sink", [1e9, 1e10, 3e38])
def test_a_sink_that_takes_everything_leaves_no_gradient(D, sink):
    asks = [*make_qkv(1, 2, 2, 4, 4, D), torch.full((2,), sink)]
    for x in asks:
        x.requires_grad_()
    out = ch.attention(*asks[:3], sinks=asks[3], engine="cpu")
    for gradient in torch.autograd.grad(out.sum(), asks):
        assert (gradient == 0).all()


@pytest.mark.parametrize("size", [1.0, 2.0**31, 2.0**33, 2.0**40, 1e30])
def test_a_sink_that_ties_with_large_scores(size):
    q, k, v = torch.zeros(1, 1, 3, 16), torch.zeros(1, 1, 100, 16), draw(1, 1, 100, 16)

    def gradients(engine, dtype):
        asks = [torch.full((1,), size, dtype=dtype), v.to(dtype)]
        for x in asks:
            x.requires_grad_()
        bias = torch.full((100,), size, dtype=dtype)
        out = ch.attention(
            q.to(dtype), k.to(dtype), asks[1], bias=bias, sinks=asks[0], engine=engine
        )
        return torch.autograd.grad(out.sum(), asks)

    ours, theirs = gradients("cpu", torch.float32), gradients("steps", torch.float64)
    for mine, true in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=1e-6)


def test_the_saved_rounding_error_may_have_any_strides():
    """Hooks for saved tensors may return them with other strides."""

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


def test_a_mask_and_a_bias_of_inference_mode_in_training():
    with torch.inference_mode():
        mask, bias = ch.dense(keep=torch.ones(5, 5).tril().bool()), ch.bias(torch.zeros(5, 5))
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    (there,) = torch.autograd.grad(ch.attention(x, x, x, mask=mask, bias=bias).square().sum(), x)
    (here,) = torch.autograd.grad(ch.attention(x, x, x, mask=ch.causal).square().sum(), x)
    torch.testing.assert_close(there, here)

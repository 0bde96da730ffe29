"""The C++ core under torch's tracers: inductor in one graph, and exported programs."""

import pytest
import torch

import clearhead as ch
from tests.core.engines.cpu.test_kernels import make_qkv

pytestmark = pytest.mark.outside

pytest.importorskip("clearhead._kernels", reason="built without a C++ compiler")


RULES = {
    "causal": {"mask": ch.causal},
    "window, cap": {"mask": ch.causal & ch.window(before=5, after=0), "softcap": 20.0},
    "everything": {},
}


class Layer(torch.nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def forward(self, q, k, v):
        return ch.attention(q, k, v, engine="cpu", **self.rule)


class Doubled(Layer):
    """Inductor writes and compiles C++ for the product alone, which takes ten seconds."""

    def forward(self, q, k, v):
        return super().forward(q, k, v) * 2


# Inductor uses deprecated functions of torch.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.timeout(600)  # a C++ compiler on a busy machine
@pytest.mark.parametrize("layer, rule", [
    (Layer, "window, cap"), *(pytest.param(Doubled, rule, marks=pytest.mark.slow) for rule in RULES)
])  # fmt: skip
def test_inductor_compiles_it_in_one_graph(layer, rule):
    qkv = make_qkv(2, 4, 2, 37, 37, 16)
    compiled = torch.compile(layer(RULES[rule]), fullgraph=True, backend="inductor")
    with torch.no_grad():
        assert torch.equal(compiled(*qkv), layer(RULES[rule])(*qkv))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_exported_program_holds_one_operator_and_gives_the_same_bits(rule):
    qkv, others = make_qkv(2, 4, 2, 37, 37, 16), make_qkv(2, 4, 2, 37, 37, 16, seed=9)
    with torch.no_grad():
        program = torch.export.export(Layer(rule), qkv)
        assert torch.equal(program.module()(*others), Layer(rule)(*others))
    calls = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert calls.count("clearhead.attend.default") == 1, calls
    assert not any("softmax" in call or "bmm" in call for call in calls), calls


def rule_from_input(kind):
    """Return a function that creates a rule from a tensor that is an input of the graph, and that
    tensor."""
    source = torch.Generator().manual_seed(3)
    bias = torch.randn(2, 1, 37, 37, generator=source)
    bias[0, 0, 3, 5] = -torch.inf
    keep = torch.rand(2, 1, 37, 37, generator=source) < 0.6
    outside = ch.causal | ~ch.prefix(
        30
    )  # created outside: in a graph torch supports only its own ~
    return {
        "bias": (lambda x: {"bias": x}, bias),
        "dense": (lambda x: {"mask": ch.dense(keep=x) & ch.dense(keep=~x[:, :, :1])}, keep),
        "documents": (lambda x: {"mask": ch.documents(x) & ch.causal}, torch.arange(37) // 9),
        "lengths": (lambda x: {"mask": ch.lengths(keys=x)}, torch.tensor([37, 20])),
        "prefix": (lambda x: {"mask": ch.causal | ch.prefix(x)}, torch.tensor([3, 9])),
        "outside": (lambda x: {"mask": outside, "bias": x}, bias),
        "nothing": (lambda x: {}, keep),
    }[kind]


@pytest.mark.parametrize("engine", ["auto", pytest.param("sdpa", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [
    "documents", "prefix", "outside",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bias", "dense", "lengths")),
])  # fmt: skip
def test_rules_of_tensors_are_one_graph(kind, engine):
    rule, numbers = rule_from_input(kind)
    qkv = make_qkv(2, 4, 4, 37, 37, 16)

    def call(q, k, v, x):
        return ch.attention(q, k, v, engine=engine, **rule(x))

    torch.compiler.reset()  # or torch counts every rule as a recompilation of the same function
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv, numbers), call(*qkv, numbers))
    learning = [x.clone().requires_grad_() for x in qkv]
    got = torch.autograd.grad(compiled(*learning, numbers).square().sum(), learning)
    want = torch.autograd.grad(call(*learning, numbers).square().sum(), learning)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_statistics_in_a_compiled_function_are_those_of_eager_calls():
    """The graph breaks for them; output and statistics have the bits of an eager call."""
    q, k, v = make_qkv(2, 4, 2, 37, 37, 16)

    def call(q):
        seen = ch.look(q * 2, k, v, mask=ch.causal, stats=["entropy", "received", ch.topk(2)])
        return seen.out, seen.entropy, seen.received, seen.topk.keys

    for got, want in zip(torch.compile(call, backend="aot_eager")(q), call(q), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_log_sum_exp_alone_stays_in_the_graph(dtype):
    q, k, v = (x.to(dtype) for x in make_qkv(2, 4, 2, 37, 37, 16))
    alone = torch.compile(
        lambda q: ch.look(q, k, v, stats=["lse"]).lse, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(alone(q), ch.look(q, k, v, stats=["lse"]).lse)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("engine", ["auto", "sdpa", "tiled", "steps"])
@pytest.mark.parametrize("rule", [{"mask": ch.causal}, {"mask": ch.documents([0, 1, 1, 0, 0])}])
def test_a_torchscript_trace_computes(rule, engine):
    first, second = torch.randn(2, 1, 4, 5, 8)

    def call(x):
        return ch.attention(x, x[:, :2], x[:, 2:], bias=torch.zeros(5), engine=engine, **rule)

    traced = torch.jit.trace(call, first)
    torch.testing.assert_close(traced(second), call(second))


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("kind", ["nothing", "bias", "dense", "documents", "lengths", "prefix"])
def test_graphs_drawn_by_make_fx_and_fake_tensors(kind, pre_dispatch):
    rule, numbers = rule_from_input(kind)
    q, k, v = make_qkv(2, 4, 4, 37, 37, 16)

    def call(q, x):
        return ch.attention(q, k, v, **rule(x))

    call(q, numbers)  # later calls are like an earlier one
    make_fx = torch.fx.experimental.proxy_tensor.make_fx
    drawn = make_fx(call, pre_dispatch=pre_dispatch)(q, numbers)
    torch.testing.assert_close(drawn(q + 1, numbers), call(q + 1, numbers))
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        assert call(torch.empty(2, 4, 37, 16), numbers.clone()).shape == q.shape


END = {
    "causal": {"mask": ch.Causal(align="end")},
    "window": {"mask": ch.window(before=5, after=0, align="end") & ch.Causal(align="end")},
    "alibi": {"bias": ch.alibi(align="end"), "mask": ch.Causal(align="end")},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("name, engine", [
    ("window", "auto"), ("causal", "sdpa"),
    *(pytest.param(name, "auto", marks=pytest.mark.slow) for name in ("causal", "alibi", "sinks")),
])  # fmt: skip
def test_one_graph_for_every_length(name, engine):
    """Also if queries are at the end of the keys, as with a cache that grows."""

    def call(q, k):
        return ch.attention(q, k, k, engine=engine, **END[name])

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(call, dynamic=True, fullgraph=True, backend="aot_eager")
    for length in range(20, 31, 2):
        q, k = torch.randn(2, 4, 3, 16), torch.randn(2, 2, length, 16)
        torch.testing.assert_close(compiled(q, k), call(q, k))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout"])
def test_a_number_that_changes_is_a_symbol_of_the_graph(name):
    q, k, v = make_qkv(1, 2, 2, 7, 7, 8)

    def call(number):
        return ch.attention(q, k, v, **{"dropout": 0.1, "seed": 3, name: number})

    compiled = torch.compile(call, dynamic=True, fullgraph=True, backend="aot_eager")
    for number in (0.3, 0.4):
        torch.testing.assert_close(compiled(number), call(number))


def test_a_log_sum_exp_compiles_once_for_every_length():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    call = torch.compile(
        lambda q: ch.look(q, q, q, stats=["lse"]).lse,
        dynamic=True, fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    for length in (5, 9, 14):
        q = torch.randn(1, 2, length, 8)
        assert torch.equal(call(q), ch.look(q, q, q, stats=["lse"]).lse)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_groups_of_keys_break_a_graph_no_more_often_than_other_statistics():
    """A statistic stores the sizes that it was checked for, but not while torch compiles."""

    def frames(*stats):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        look = lambda q: ch.look(q, q, q, mask=ch.causal, stats=stats).out + 1  # noqa: E731
        compiled = torch.compile(look, backend="eager", dynamic=True)
        for length in (5, 6, 7):
            q = torch.randn(1, 2, length, 8)
            assert torch.equal(compiled(q), look(q))
        return torch._dynamo.utils.counters["frames"]["total"]

    assert frames(ch.mass({"first": ch.prefix(1), "span": (0, 2)})) == frames("entropy")


def test_layers_with_a_cache_or_relative_positions_compile_for_any_length():
    layer = ch.nn.MultiHeadAttention(16, heads=2, causal=True)
    relative = ch.nn.MultiHeadAttention(
        16, heads=2, causal=True, relative=ch.nn.RelativePositions(2)
    )
    relative.relative.table.data.normal_()
    torch.compiler.reset()
    step = torch.compile(
        lambda x, cache: layer(x, cache=cache), dynamic=True, fullgraph=True, backend="aot_eager"
    )
    whole = torch.compile(relative, dynamic=True, fullgraph=True, backend="eager")
    ours, theirs = ch.nn.KVCache(40), ch.nn.KVCache(40)
    with torch.no_grad():
        for n in (5, 6, 7, 8, 13, 19):
            x = torch.randn(2, 1 if n > 5 else n, 16)
            torch.testing.assert_close(step(x, ours), layer(x, cache=theirs))
            x = torch.randn(2, n, 16)
            torch.testing.assert_close(whole(x), relative(x))
        layer(x[:, :1], cache=ours)  # a cache knows its layer, compiled or not
        with pytest.raises(ch.BadValue, match="another layer has filled"):
            relative(x[:, :1], cache=ours)


@pytest.mark.parametrize("make", [
    lambda: ch.lengths(keys=[2, 3]), lambda: ch.prefix([2, 3]), lambda: ch.Causal(align=[0, 1]),
    lambda: ch.documents([[0, 0, 1, 1, 1]] * 2), lambda: ch.dense(keep=torch.ones(5, 5).bool()),
])  # fmt: skip
def test_a_rule_of_fixed_size_in_a_graph_for_any_length(make):
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)
    torch.compiler.reset()
    step = torch.compile(
        lambda: ch.attention(q, k, v, mask=make()), dynamic=True, fullgraph=True, backend="eager"
    )
    compiled = torch.compile(
        lambda q, k, v: ch.attention(q, k, v, mask=make()),
        dynamic=True, fullgraph=True, backend="eager",
    )  # fmt: skip
    for answer in (step(), compiled(q, k, v)):
        torch.testing.assert_close(answer, ch.attention(q, k, v, mask=make()))


def test_a_mask_of_fixed_size_in_compat_in_a_graph_for_any_length():
    keep = torch.ones(5, 5).tril().bool()
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)

    def call(q, k, v):
        return ch.compat.scaled_dot_product_attention(q, k, v, keep, enable_gqa=True)

    step = torch.compile(call, dynamic=True, fullgraph=True, backend="eager")
    torch.testing.assert_close(step(q, k, v), call(q, k, v))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("layer", [
    ch.nn.SelfAttention(8, 8), ch.nn.CausalAttention(8, 8, 5), ch.nn.TransformerBlock(8, 2),
])  # fmt: skip
def test_a_layer_with_gradients_is_traced_by_the_old_tracer(layer):
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(torch.jit.trace(layer, x)(x), layer(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("engine", ["auto", "tiled", "steps"])
def test_torch_func_and_graphs_follow_every_engine(engine):
    """A soft cap in float64 leaves `auto` to the tiles in torch."""

    rule = ch.documents([0, 0, 0, 0, 1, 1])

    def answer(x):
        return ch.attention(x, x, x, mask=rule, softcap=2.0, engine=engine)

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


def test_one_graph_serves_every_size():
    def answer(x):
        return ch.attention(x, x, x, mask=ch.causal, softcap=3.0)

    graph = torch.compile(answer, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 2, 8, 8), (2, 2, 9, 8), (3, 4, 9, 16)):
        x = torch.randn(shape)
        torch.testing.assert_close(graph(x), answer(x))


def test_layers_of_words_go_into_a_graph():
    embed, ids = ch.nn.TokenEmbedding(9, 4), torch.tensor([[1, 2], [3, 4]])
    compiled = torch.compile(embed, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids), embed(ids))
    assert torch.equal(torch.func.vmap(embed)(ids), embed(ids))
    block = ch.nn.TransformerBlock(8, 2, causal=True, relative=ch.nn.RelativePositions(2)).eval()
    graph = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 7, 8)
    torch.testing.assert_close(graph(x), block(x))
    assert block(torch.randn(2, 0, 8)).shape == (2, 0, 8)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", [
    pytest.param(torch.func.grad, marks=pytest.mark.slow),
    lambda f: torch.func.vmap(torch.func.grad(f)),
    pytest.param(torch.func.jacrev, marks=pytest.mark.slow),
    lambda f: lambda x: torch.func.grad(f)(x) * 2,
], ids=["grad", "vmap of grad", "jacrev", "inside"])  # fmt: skip
def test_a_gradient_of_torch_func_goes_into_a_graph(transform):
    """The core declines, and torch computes."""

    def total(x):
        return ch.attention(x, x, x, mask=ch.causal).sin().sum()

    asked, x = transform(total), torch.randn(3, 2, 6, 8)
    graph = torch.compile(asked, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(graph(x), asked(x), rtol=1e-4, atol=1e-5)


def test_a_causal_problem_of_symbols_goes_to_torch():
    """With Tq == Tk it is torch's own causal rule, for which torch accepts only True."""

    def call(q, k):
        return ch.attention(q, k, k, mask=ch.Causal(align="end"))

    compiled = torch.compile(call, dynamic=True, fullgraph=True, backend="eager")
    for Tq, Tk in ((5, 5), (7, 7), (3, 7)):
        q, k = torch.randn(2, 4, Tq, 8).double(), torch.randn(2, 4, Tk, 8).double()
        torch.testing.assert_close(compiled(q, k), call(q, k))


def test_a_program_for_any_batch_takes_lengths():
    class Asks(torch.nn.Module):
        def forward(self, x, lengths):
            return ch.attention(x, x, x, mask=ch.lengths(keys=lengths))

    batch = torch.export.Dim("batch", min=1, max=64)
    given = torch.randn(2, 4, 5, 8), torch.tensor([3, 5])
    program = torch.export.export(Asks(), given, dynamic_shapes=({0: batch}, {0: batch}))
    other = torch.randn(3, 4, 5, 8), torch.tensor([1, 4, 5])
    torch.testing.assert_close(program.module()(*other), Asks()(*other))


def test_a_program_exported_without_gradients_has_gradients():
    block = ch.nn.TransformerBlock(16, 2, causal=True).requires_grad_(False).eval()
    program = torch.export.export(block, (torch.randn(1, 5, 16),))
    x = torch.randn(1, 5, 16, requires_grad=True)
    (asked,) = torch.autograd.grad(program.module()(x).square().sum(), x)
    (wanted,) = torch.autograd.grad(block(x).square().sum(), x)
    torch.testing.assert_close(asked, wanted)

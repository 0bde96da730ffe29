"""Attention that is changed while a model runs, against weights that are edited by hand."""

import math
from itertools import product

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.core.errors import BadType, BadValue
from clearhead.core.masks import Grid
from clearhead.core.masks.without import TextEdges, WithoutEdges
from clearhead.models.inspect.intervene import intervene
from tests.pairs import pairs

B, H, G, Tq, Tk, D, Dv = 2, 6, 3, 7, 11, 5, 4


class Asked(nn.Module):
    def __init__(self, keywords):
        super().__init__()
        self.keywords = keywords

    def forward(self, q, k, v):
        return ch.attention(q, k, v, **self.keywords)


class Model(nn.Module):
    def __init__(self, layers=2, **keywords):
        super().__init__()
        self.layers = nn.ModuleList(Asked(keywords) for _ in range(layers))

    def forward(self, q, k, v):
        return [layer(q, k, v) for layer in self.layers]


def tensors(dtype=torch.float64, seed=0, Tq=Tq):
    made = torch.Generator().manual_seed(seed)
    shapes = (B, H, Tq, D), (B, G, Tk, D), (B, G, Tk, Dv)
    return [torch.randn(s, generator=made, dtype=torch.float64).to(dtype) for s in shapes]


def few(seed=0):
    """Three queries and their keys, few enough for numerical gradients; `START` is the same."""
    q, k, v = tensors(seed=seed)
    cut = q[:1, :, -3:, :3], k[:1, :, -3 - START :, :3], v[:1, :, -3 - START :]
    return [x.contiguous() for x in cut]


CAUSAL = (torch.arange(Tk) <= torch.arange(Tq).unsqueeze(-1) + Tk - Tq).expand(B, H, Tq, Tk)
END = ch.Causal(align="end")
START = Tk - Tq


def by_hand(q, k, v, keep, *, scale=None, softcap=None, bias=None, sinks=None, logits=None):
    """Dense attention in float64; `logits` edits (x, keep, sinks) before the softmax."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
    x = q @ k.transpose(-1, -2) * (1 / math.sqrt(D) if scale is None else scale)
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    x = x if bias is None else x + bias.double()
    sink = torch.full((B, H, q.shape[2], 1), -math.inf, dtype=torch.float64)
    sink = sink if sinks is None else sinks.double().reshape(1, H, 1, 1).expand_as(sink).clone()
    if logits is not None:
        x, keep, sink = logits(x, keep, sink)
    x = torch.cat([x.masked_fill(~keep, -math.inf), sink], -1)
    return torch.softmax(x, -1).nan_to_num(0.0)[..., :-1], v


def chosen(heads=None, positions=None, batch=None, start=START):
    found = torch.ones(B, H, Tq, 1, dtype=torch.bool)
    if heads is not None:
        found &= torch.isin(torch.arange(H), torch.tensor(heads) % H).reshape(1, H, 1, 1)
    if positions is not None:
        at = torch.tensor([p - start if p >= 0 else p + Tq for p in positions])
        found &= torch.isin(torch.arange(Tq), at).reshape(1, 1, Tq, 1)
    if batch is not None:
        found &= torch.isin(torch.arange(B), torch.tensor(batch)).reshape(B, 1, 1, 1)
    return found


PLACES = [
    {},
    {"heads": [1, -1]},
    {"positions": [START + 2, -1]},
    {"heads": [0, 4], "positions": [START]},
    {"heads": [2], "batch": range(1, 2)},
]
NUMBERS = torch.randn(1, H, Tq, Tk, generator=torch.Generator().manual_seed(5)).double()
KEYWORDS = {
    "plain": {},
    "scaled": {"scale": 0.7},
    "bias": {"bias": NUMBERS},
    "a bias per key": {"bias": NUMBERS[:, :1, :1]},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 1, H).double()},
}
EDGES = {
    "prefix": (ch.prefix(2), torch.arange(Tk).expand(Tq, Tk) < 2),
    "window": (
        ch.window(before=1),  # follows the corner of the call
        torch.arange(Tk) >= torch.arange(Tq).unsqueeze(-1) + START - 1,
    ),
    "dense": (ch.dense(keep=NUMBERS[0, 0] > 0.3), NUMBERS[0, 0] > 0.3),
    "of the text": (
        ch.documents([0] * 5 + [1] * 6),
        torch.tensor([0] * 5 + [1] * 6)[START:].unsqueeze(-1) == torch.tensor([0] * 5 + [1] * 6),
    ),
    "per head": (ch.dense(keep=NUMBERS[0] > 0.0), NUMBERS[0] > 0.0),
}


def check(edit, weights, v, keywords, dtype, out=None):
    """Layer 1 is edited and gives what the weights by hand give; layer 0 is not."""
    q, k, values = tensors(dtype)
    model = Model(mask=END, **keywords)
    before = model(q, k, values)
    with (
        intervene(model, [edit]) as done,
        ch.watch(model, stats=["max"], exact_rows=range(Tq)) as seen,
    ):
        found = model(q, k, values)
    assert torch.equal(found[0], before[0])
    close = (
        {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-5}
    )
    right = weights @ v if out is None else out
    torch.testing.assert_close(found[1].double(), right, **close)
    assert done.times(0) == 1 and {a.layer for a in done.applied} == {1}
    torch.testing.assert_close(seen[1].exact_rows.double(), weights, **close)


@pytest.mark.parametrize(
    "edit, place, dtype",
    pairs(product([False, True], EDGES), PLACES, [torch.float64, torch.float32]),
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*removed no visible edge")  # row 4 sees its document alone
def test_knock_out_and_keep_only_by_hand(edit, place, dtype):
    only, edges = edit
    mask, removed = EDGES[edges]
    removed = ~removed if only else removed
    edit = (ch.edits.keep_only if only else ch.edits.knock_out)(mask, layers=[1], **place)
    q, k, v = tensors(dtype)
    weights, values = by_hand(q, k, v, CAUSAL & ~(removed & chosen(**place)))
    check(edit, weights, values, {}, dtype)


@pytest.mark.parametrize(
    "case, place, dtype",
    pairs(product(["temperature", "uniform"], KEYWORDS), PLACES, [torch.float64, torch.float32]),
    ids=str,
)
def test_temperature_and_uniform_by_hand(case, place, dtype):
    edit, name = case
    made = ch.edits.temperature(1.7, layers=[1], **place)
    if edit == "uniform":
        made = ch.edits.uniform(layers=[1], **place)
    where = chosen(**place)

    def logits(x, keep, sink):
        if edit == "uniform":
            return x.masked_fill(where, 0.0), keep, sink.masked_fill(where, -math.inf)
        t = 1 + 0.7 * where.double()
        return x / t, keep, sink / t

    q, k, v = tensors(dtype)
    by_row = "positions" in place or "batch" in place
    capped = (edit, name) == ("temperature", "softcap")
    if (name == "sinks" and by_row) or (capped and place):
        with pytest.raises(BadValue, match="cannot differ between"):
            check(made, None, None, KEYWORDS[name], dtype)
        return
    weights, values = by_hand(q, k, v, CAUSAL, **KEYWORDS[name], logits=logits)
    check(made, weights, values, KEYWORDS[name], dtype)


@pytest.mark.parametrize("name", ["alibi", "alibi of two heads"])
def test_alibi_is_scaled_by_head(name):
    heads = None if name == "alibi" else [1, 3]
    slopes = torch.linspace(0.1, 0.6, H)
    q, k, v = tensors()
    distance = (torch.arange(Tq).unsqueeze(-1) + START - torch.arange(Tk)).abs().double()
    bias = -slopes.double().reshape(1, H, 1, 1) * distance
    where = chosen(heads)
    for edit, factor in ((ch.edits.temperature(0.5, layers=[1], heads=heads), 2.0),
                         (ch.edits.uniform(layers=[1], heads=heads), 0.0)):  # fmt: skip
        f = 1 + (factor - 1) * where.double()
        edited = by_hand(q, k, v, CAUSAL, bias=bias, logits=lambda x, m, s, f=f: (x * f, m, s))
        check(edit, *edited, {"bias": ch.alibi(slopes, align="end")}, torch.float64)
    with pytest.raises(BadValue, match="a layer with ALiBi"):
        check(ch.edits.uniform(positions=[-1]), None, None, {"bias": ch.alibi(slopes, align="end")},
              torch.float64)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("kind", ["zero", "tensor", "scale"])
def test_outputs_by_hand(kind, place, dtype):
    where = chosen(**place)
    q, k, v = tensors(dtype)
    weights, values = by_hand(q, k, v, CAUSAL)
    out = weights @ values
    if kind == "scale":
        edit, new = ch.edits.scale(-1.5, layers=[1], **place), -1.5 * out
    elif kind == "zero":
        edit, new = ch.edits.ablate(layers=[1], **place), torch.zeros_like(out)
    else:
        heads = place.get("heads", range(H))
        by = torch.randn(len(heads), 1, Dv, generator=torch.Generator().manual_seed(3))
        edit = ch.edits.ablate(by=by, layers=[1], **place)
        new = torch.zeros_like(out)
        new[:, list(heads)] = by.double()
    check(edit, weights, values, {}, dtype, out=torch.where(where, new, out))


def test_edits_compose_and_blocks_nest():
    q, k, v = tensors()
    model = Model(mask=END)
    first = ch.edits.knock_out(ch.prefix(3), heads=[0, 1])
    second = ch.edits.knock_out(ch.window(before=0), heads=[1])
    third, fourth = ch.edits.temperature(2.0, heads=[1]), ch.edits.scale(3.0, heads=[1, 2])
    with intervene(model, [first, second, third, fourth]) as done:
        together = model(q, k, v)
    with intervene(model, [first, second]), intervene(model, [third, fourth]):
        nested = model(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(together, nested, strict=True))
    place = torch.arange(Tk)
    removed = (place < 3) & chosen([0, 1])
    removed |= (place >= torch.arange(Tq).unsqueeze(-1) + START) & chosen([1])
    t = torch.where(chosen([1]), 2.0, 1.0)
    weights, values = by_hand(
        q, k, v, CAUSAL & ~removed, logits=lambda x, keep, sink: (x / t, keep, sink)
    )
    right = weights @ values * torch.where(chosen([1, 2]), 3.0, 1.0)
    torch.testing.assert_close(together[0], right)
    assert [done.times(i) for i in range(4)] == [2, 2, 2, 2]
    assert "layer 1  layers.1  1x  computed by" in repr(done)
    assert "knock_out(prefix(3), heads=[0, 1])" in str(done.plan(1))
    after = model(q, k, v)
    torch.testing.assert_close(after[0], by_hand(q, k, v, CAUSAL)[0] @ values)


def test_a_query_without_edges_gives_zero_and_gradients_are_finite():
    q, k, v = (x.requires_grad_() for x in tensors(torch.float32))
    model = Model(mask=END)
    with intervene(model, [ch.edits.knock_out(ch.everything, heads=[3], positions=[START])]):
        out = model(q, k, v)[0]
    assert not out[:, 3, 0].any() and out[:, 2, 0].all()
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(bool(g.isfinite().all()) for g in grads) and not grads[0][:, 3, 0].any()


@pytest.mark.parametrize(
    "edit",
    [
        ch.edits.knock_out(ch.prefix(2), heads=[1], positions=[START + 1]),
        ch.edits.temperature(0.6, heads=[4, 5]),
        ch.edits.uniform(positions=[-1]),
        ch.edits.ablate(heads=[0]),
        ch.edits.ablate(by=torch.ones(Dv), heads=[0, 2]),
        ch.edits.scale(0.3, positions=[-2]),
    ],
    ids=repr,
)
def test_gradients_are_those_of_the_edited_attention(edit):
    model = Model(1, mask=END)
    with intervene(model, [edit]):
        leaves = [x.requires_grad_() for x in few()]
        assert torch.autograd.gradcheck(lambda *x: model(*x)[0], leaves, fast_mode=True)


def test_weights_that_are_asked_beside_the_output_are_edited():
    class Both(nn.Module):
        def forward(self, q, k, v):
            return ch.attention(q, k, v, mask=END), ch.matrix(q, k, mask=END).to_dense()

    q, k, v = tensors()
    model = Both()
    with intervene(model, [ch.edits.knock_out(ch.prefix(2), heads=[1])]) as done:
        out, weights = model(q, k, v)
    torch.testing.assert_close(out, weights @ v.repeat_interleave(H // G, 1))
    assert not weights[:, 1, :, :2].any() and done.times(0) == 1


@pytest.mark.parametrize("start", [0, 3, (2, 5), (-2, 1)])
@pytest.mark.parametrize("heads", [1, H])
def test_edited_masks_say_the_same_twice(start, heads):
    """Cell by cell, and as runs of keys."""
    made = torch.Generator().manual_seed(1)
    where = torch.rand(B, heads, Tq, generator=made) > 0.5
    grid = Grid(Tq, Tk, B, H)
    square = ch.documents([0, 0, 1, 1, 0, 2, 2, 2, 1]) & ch.window(before=3)
    rule = ch.Causal(align=START)
    for text in (square, ch.dense(keep=torch.rand(9, 9, generator=made) > 0.5)):
        for mask in (
            TextEdges(text, start, 4),
            TextEdges(~text, start, (3, -2)),
            TextEdges(text, start, (-Tk, -1)),
            TextEdges(text, start),
            WithoutEdges(rule, TextEdges(text, start), where, "words"),
        ):
            mask.check(grid)
            b, h, i, j = torch.meshgrid(*map(torch.arange, (B, H, Tq, Tk)), indexing="ij")
            cells = mask.allowed(grid, b, h, i, j)
            assert cells.equal(mask.key_ranges(grid).to_bool().expand(B, H, Tq, Tk))
    assert mask.why(3, 2, Tq=Tq, Tk=Tk) and repr(mask).endswith("words)")


def test_what_never_applied_is_an_error():
    model, (q, k, v) = Model(mask=END), tensors()
    with pytest.raises(BadValue, match=r"(?s)ablate\(layers=\[2\]\) never applied.*layers 0 to 1"):
        with intervene(model, [ch.edits.ablate(layers=[0]), ch.edits.ablate(layers=[2])]):
            model(q, k, v)
    with pytest.raises(BadValue, match=r"ablate\(layers=\[1, 2\]\) never applied in layer 2\."):
        with intervene(model, [ch.edits.ablate(layers=[1, 2])]):
            model(q, k, v)
    with pytest.raises(BadValue, match="did not run in the with block"):
        with intervene(model, [ch.edits.ablate()]):
            pass
    with pytest.raises(BadValue, match="Linear made none"):
        linear = nn.Linear(2, 2)
        with intervene(linear, [ch.edits.ablate()]):
            linear(torch.ones(2))
    with pytest.raises(BadValue, match="never applied"):
        with intervene(model, [ch.edits.ablate(positions=[Tk])]):
            model(q, k, v)
    with intervene(model, [ch.edits.ablate(positions=[Tk])], must_apply=False) as done:
        model(q, k, v)
    assert done.times(0) == 0
    with pytest.raises(ZeroDivisionError), intervene(model, [ch.edits.ablate()]):
        raise ZeroDivisionError  # the error of the block comes first


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (lambda: ch.edits.knock_out(torch.ones(2)), BadType, "knock_out got a Tensor"),
        (lambda: ch.edits.temperature(0), BadValue, "t=0"),
        (lambda: ch.edits.temperature("hot"), BadType, "t='hot'"),
        (lambda: ch.edits.scale(math.nan), BadValue, "factor=nan"),
        (lambda: ch.edits.ablate(by="median"), BadValue, "by='median'"),
        (lambda: ch.edits.ablate(layers=3), BadType, "layers is 3"),
        (lambda: ch.edits.ablate(heads=["1"]), BadType, "heads is"),
        (lambda: ch.edits.ablate(batch=1), BadType, "batch= got an int"),
        (lambda: run(ch.edits.ablate(heads=[H])), BadValue, "names head 6"),
        (lambda: run(ch.edits.ablate(layers=["*.7"])), BadValue, "matches no module"),
        (lambda: run(ch.edits.ablate(layers=[-1])), BadValue, "layers has -1"),
        (lambda: run(ch.edits.ablate(by=torch.ones(5))), BadValue, r"shape \(5,\)"),
        (lambda: run(ch.edits.knock_out(ch.dense(keep=torch.ones(3, 4) > 0))), BadValue, "dense"),
        (lambda: run("ablate"), BadType, "edits is a list"),
        (lambda: intervene("model", []).__enter__(), BadType, "intervene got a str"),
    ],
)  # fmt: skip
def test_errors_have_three_parts(wrong, kind, says):
    with pytest.raises(kind, match=says) as error:
        wrong()
    assert error.value.rule.endswith(".") and error.value.hint.endswith(".")


def run(edit):
    model = Model(mask=END)
    with intervene(model, [edit]):
        model(*tensors())


def test_one_query_that_does_not_say_where_it_stands():
    q, k, v = tensors(Tq=1)
    model = Model()
    with pytest.raises(BadValue, match="position of a single query"):
        with intervene(model, [ch.edits.ablate(positions=[0])]):
            model(q, k, v)
    with intervene(model, [ch.edits.ablate(positions=[-1])]):
        assert not model(q, k, v)[0].any()


def test_a_compiled_model_is_refused():
    compiled = torch.compile(Model(mask=END), backend="eager")
    with pytest.raises(BadValue, match="graph keeps the attention"):
        with intervene(compiled, [ch.edits.ablate()]):
            pass
    inner = Model(mask=END)
    inner.layers[1].compile(backend="eager")
    with pytest.raises(BadValue, match=r"compiled: layers\.1\."):
        with intervene(inner, [ch.edits.ablate()]):
            pass


def test_checkpointed_layers_compute_the_same_again():
    from torch.utils.checkpoint import checkpoint

    class Saves(Model):
        def forward(self, q, k, v):
            return [checkpoint(layer, q, k, v, use_reentrant=False) for layer in self.layers]

    edit = ch.edits.knock_out(ch.prefix(2), layers=[1], heads=[1])
    grads = []
    for kind in (Model, Saves):
        given = [x.requires_grad_() for x in tensors()]
        model = kind(mask=END)
        with intervene(model, [edit]) as done:
            loss = sum(x.square().sum() for x in model(*given))
            grads.append(torch.autograd.grad(loss, given))
        assert done.times(0) == 1
    torch.testing.assert_close(*grads)


class Shared(nn.Module):
    """One block that is used three times, each under a checkpoint, or all under one."""

    def __init__(self, how=None, whole=False):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.whole = how, whole
        self.block = ch.nn.TransformerBlock(15, 3, causal=True).double()
        self.other = ch.nn.TransformerBlock(15, 3, causal=True).double()

    def three(self, x):
        for _ in range(3):
            x = self.saved(self.block, x) if not self.whole else self.block(x)
        return x

    def saved(self, part, x):
        return part(x) if self.how is None else self.how(part, x)

    def forward(self, x):
        x = self.saved(self.three, x) if self.whole else self.three(x)
        return self.saved(self.other, x)


def checkpointed(use_reentrant):
    from functools import partial

    from torch.utils.checkpoint import checkpoint

    return partial(checkpoint, use_reentrant=use_reentrant)


def gradients(model, edits, around=None, runs=1):
    made = torch.Generator().manual_seed(2)
    given = torch.randn(2, 7, 15, generator=made, dtype=torch.float64).requires_grad_()
    with intervene(model, edits):
        for _ in range(runs):
            out = (model(given) if around is None else around(model, given)).square().sum()
            out.backward()
    return [given.grad, *(p.grad for p in model.parameters())]


def same_text(runs=1):
    """A recording of the block's three layers and the other one, of another text."""
    model = Shared()
    recording = ch.watch(model, outputs=True, inputs=True, exact_rows=range(7))
    with torch.no_grad(), recording as seen:
        for n in range(runs):
            made = torch.Generator().manual_seed(20 + n)
            model(torch.randn(2, 7, 15, generator=made, dtype=torch.float64))
    return seen


OF_ONE_LAYER = {
    "three": lambda: [ch.edits.scale(n, layers=[i]) for i, n in enumerate((3.0, 1.0, 5.0))],
    "one": lambda: [ch.edits.knock_out(ch.prefix(1), layers=[2], heads=[0])],
    "patch": lambda: [ch.edits.patch(same_text())],
    "keys": lambda: [ch.edits.patch(same_text(), of="key", positions=[2])],
    "freeze": lambda: [ch.edits.freeze(same_text(), heads=[1])],
    "mean": lambda: [ch.edits.ablate(by="mean", over=same_text(), positions=[3])],
}
OF_ALL_ALIKE = {
    "all": lambda: [ch.edits.scale(3.0), ch.edits.uniform(heads=[0], positions=[4])],
    "the three": lambda: [ch.edits.knock_out(ch.window(before=0), layers=[0, 1, 2], heads=[2])],
    "the module": lambda: [ch.edits.temperature(0.5, layers=["block.*"])],
    "the other": lambda: [ch.edits.patch(same_text(), layers=[3])],
    "its values": lambda: [ch.edits.patch(same_text(), of="value", layers=[3], heads=[0])],
}


def test_a_checkpoint_that_does_not_say_which_layer_it_computes_again():
    """An edit that tells them apart is refused; else gradients are those without checkpoints."""
    how = checkpointed(False)
    for name, make in OF_ONE_LAYER.items():
        with pytest.raises(BadValue, match=r"3 calls of layers=\[0, 1, 2\] differently") as error:
            gradients(Shared(how), make())
        assert error.value.rule.endswith(".") and error.value.hint.endswith("."), name
    for make in OF_ALL_ALIKE.values():
        torch.testing.assert_close(gradients(Shared(how), make()), gradients(Shared(), make()))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of inner ones
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", [*OF_ONE_LAYER, *OF_ALL_ALIKE])
def test_a_reentrant_checkpoint_computes_again_the_calls_that_it_made(name, whole):
    edits, how = {**OF_ONE_LAYER, **OF_ALL_ALIKE}[name](), checkpointed(True)
    right = gradients(Shared(), edits)
    torch.testing.assert_close(gradients(Shared(how, whole), edits), right)
    if not whole:  # checkpoints in a checkpoint
        torch.testing.assert_close(gradients(Shared(how), edits, around=how), right)


@pytest.mark.parametrize(
    "make",
    [
        lambda recording: ch.edits.freeze(recording),
        lambda recording: ch.edits.ablate(by="mean", over=recording),
        lambda _: ch.edits.temperature(0.5),
    ],
)
def test_an_edit_computes_without_autocast(make):
    """Attention keeps the dtype of three equal tensors, and so do edits."""
    model, given = Model(mask=END), tensors(torch.float32)
    recording = ch.watch(model, stats=[], exact_rows=range(Tq), outputs=True)
    with torch.no_grad(), recording as seen:
        model(*tensors(torch.float32, seed=1))
    with torch.no_grad(), intervene(model, [make(seen)]):
        right = model(*given)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert all(map(torch.equal, model(*given), right))


class Stacked(nn.Module):
    """Three blocks in one checkpoint, `outer`, each of which is in another, `inner`."""

    def __init__(self, outer, inner):
        super().__init__()
        torch.manual_seed(0)
        self.outer, self.inner = outer, inner
        blocks = (ch.nn.TransformerBlock(15, 3, causal=True) for _ in range(3))
        self.blocks = nn.ModuleList(blocks).double()

    def all(self, x):
        for block in self.blocks:
            x = self.inner(block, x)
        return x

    def forward(self, x):
        return self.outer(self.all, x)


@pytest.mark.parametrize("name", OF_ONE_LAYER)
@pytest.mark.parametrize("reentrant", [(False, True), (True, False), (False, False)])
def test_checkpoints_of_two_kinds_in_each_other(reentrant, name):
    edits = OF_ONE_LAYER[name]()
    model = Stacked(*map(checkpointed, reentrant))
    right = gradients(Stacked(*[lambda part, x: part(x)] * 2), edits)
    torch.testing.assert_close(gradients(model, edits), right)


@pytest.mark.parametrize("edit", [ch.edits.scale(3.0), ch.edits.knock_out(ch.prefix(1))])
def test_a_reentrant_checkpoint_of_a_run_before_the_block_is_not_edited(edit):
    model, unedited = Shared(checkpointed(True)), Shared()
    x, y = (
        torch.randn(2, 7, 15, dtype=torch.float64, requires_grad=True, generator=seed)
        for seed in map(torch.Generator().manual_seed, (2, 3))
    )
    before = model(x).square().sum()
    with intervene(model, [edit]):
        model(y)
        before.backward()
    right = torch.autograd.grad(unedited(x).square().sum(), [x, *unedited.parameters()])
    torch.testing.assert_close((x.grad, *(p.grad for p in model.parameters())), right)
    with intervene(model, [edit]):
        inside = model(y).square().sum()
    with pytest.raises(BadValue, match="after the with block"):
        inside.backward()


@pytest.mark.parametrize("name", OF_ALL_ALIKE)
def test_a_checkpoint_that_is_not_reentrant_recomputes_no_edited_layer_after_the_block(name):
    model = Shared(checkpointed(False))
    x = torch.randn(2, 7, 15, dtype=torch.float64, requires_grad=True)
    with intervene(model, OF_ALL_ALIKE[name]()):
        loss = model(x).square().sum()
    with pytest.raises(BadValue, match="use_reentrant=False recomputes layers after the with"):
        loss.backward()


@pytest.mark.parametrize("name", [*OF_ONE_LAYER, *OF_ALL_ALIKE])
def test_a_model_that_is_checkpointed_as_a_whole_counts_its_layers_again(name):
    edits = {**OF_ONE_LAYER, **OF_ALL_ALIKE}[name]()
    found = gradients(Shared(), edits, around=checkpointed(False))
    torch.testing.assert_close(found, gradients(Shared(), edits))


def test_a_checkpoint_around_several_layers():
    """As a function of the model, of which no module tells that it runs."""
    how = checkpointed(False)
    for make in OF_ALL_ALIKE.values():
        torch.testing.assert_close(
            gradients(Shared(how, whole=True), make()), gradients(Shared(), make())
        )
    for make in OF_ONE_LAYER.values():
        with pytest.raises(BadValue, match=r"3 calls of layers=\[0, 1, 2\] differently"):
            gradients(Shared(how, whole=True), make())


def test_call_n_of_a_recording_under_a_checkpoint():
    how = checkpointed(False)
    once, twice = (ch.edits.patch(same_text(n), layers=[3]) for n in (1, 2))
    for edit, runs in ((once, 2), (twice, 1), (ch.edits.scale(0.5, layers=[3]), 3)):
        found = gradients(Shared(how), [edit], runs=runs)
        torch.testing.assert_close(found, gradients(Shared(), [edit], runs=runs))
    with pytest.raises(BadValue, match=r"treats the 2 calls of layers=\[3\] differently"):
        gradients(Shared(how), [twice], runs=2)


class Calls(nn.Module):
    """Attention in a function of a module, which is checkpointed."""

    def __init__(self, how=None, layers=1):
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(15, 45).double()
        self.how, self.layers = how, layers

    def attend(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 3, 5)).permute(2, 0, 3, 1, 4)
        return ch.attention(q, k, v, mask=ch.causal).transpose(1, 2).flatten(2)

    def forward(self, x):
        for _ in range(self.layers):
            x = self.attend(x) if self.how is None else self.how(self.attend, x)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_function_of_a_module_is_edited_again(use_reentrant):
    how = checkpointed(use_reentrant)
    edits = [ch.edits.scale(3.0), ch.edits.uniform(heads=[1])]
    for layers in (1, 2):
        found = gradients(Calls(how, layers), edits)
        torch.testing.assert_close(found, gradients(Calls(None, layers), edits))
    edits = [ch.edits.scale(3.0, layers=[1])]
    if use_reentrant:
        torch.testing.assert_close(
            gradients(Calls(how, 2), edits), gradients(Calls(None, 2), edits)
        )
    else:
        with pytest.raises(BadValue, match=r"treats the 2 calls of layers=\[0, 1\] differently"):
            gradients(Calls(how, 2), edits)


def test_the_backward_pass_of_another_model_is_not_edited():
    edits, student = [ch.edits.scale(3.0)], Calls(checkpointed(False))
    right = gradients(student, [])
    student.zero_grad()
    x = torch.randn(2, 7, 15, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x.requires_grad_()
    with intervene(Shared(), edits, must_apply=False):
        student(x).square().sum().backward()
    torch.testing.assert_close([x.grad, *(p.grad for p in student.parameters())], right)


def test_the_backward_pass_runs_in_the_thread_of_the_block():
    before = torch._C._is_multithreading_enabled()
    with intervene(Shared(), [ch.edits.ablate()], must_apply=False):
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled() == before


def test_an_edit_with_a_large_mask_says_how_many_edges_it_is_about():
    cells = torch.zeros(12, 12, dtype=torch.bool)
    cells[7, 2] = True
    edit = ch.edits.knock_out(ch.dense(keep=cells), layers=[0])
    assert repr(edit) == "knock_out(dense(keep=<1 of 144 cells>), layers=[0])"
    ids = ch.documents([0] * 60)
    assert repr(ch.edits.keep_only(ids)).endswith("...)")


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (range(0, 5), [0, 1, 2]),
        (range(1, 7), [1, 2]),
        (range(0, 3, 2), [0, 2]),
        (range(2, -1, -2), [2, 0]),
        (range(-2, 0), [1, 2]),
        (range(-3, 2), [0, 1, 2]),
    ],
    ids=str,
)
def test_a_range_of_the_batch_is_cut_where_the_batch_ends(batch, rows):
    made = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(3, n, T, D, generator=made) for n, T in ((H, Tq), (G, Tk), (G, Tk)))
    model = Model(1, mask=END)
    plain = model(q, k, v)[0]
    with ch.watch(model, exact_rows=range(Tq)) as seen:
        model(q.flip(-1), k, v)
    frozen = seen[0].exact_rows[rows]  # row b serves text b
    by = torch.randn(len(rows), H, Tq, D, generator=made)
    removed = Model(1, mask=END & ~ch.prefix(2))(q, k, v)[0]
    for edit, right in (
        (ch.edits.scale(3.0, batch=batch), 3 * plain[rows]),
        (ch.edits.ablate(batch=batch), 0 * plain[rows]),
        (ch.edits.ablate(by=by, batch=batch), by),
        (ch.edits.knock_out(ch.prefix(2), batch=batch), removed[rows]),
        (ch.edits.freeze(seen, batch=batch), frozen @ v[rows].repeat_interleave(H // G, 1)),
    ):
        with intervene(model, [edit]) as done:
            found = model(q, k, v)[0]
        wanted = plain.clone()
        wanted[rows] = right
        torch.testing.assert_close(found, wanted, msg=repr(edit))
        assert done.times(0) == 1
    with pytest.raises(BadValue, match=r"batch=range\(3, 5\)\) never applied"):
        with intervene(model, [ch.edits.scale(3.0, batch=range(3, 5))]):
            model(q, k, v)

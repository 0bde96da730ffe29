"""`why` on own blocks: contrasts, sources, a planted circuit, checks, files and refusals."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.core.errors import BadType, BadValue
from clearhead.models.why import split
from clearhead.models.why.why import agreements
from tests.models.two_blocks import WORDS, T, TwoBlocks, ids, randomised


@pytest.fixture(scope="module")
def model():
    return randomised(TwoBlocks())


def weights_of(model, layer, head, query):
    with torch.no_grad(), ch.watch(model, exact_rows=[query]) as recording:
        model(ids()[None])
    return recording[layer].exact_rows[0, head, 0].double()


@pytest.mark.parametrize("against", ["others", "weights", "nothing", 1])
@pytest.mark.parametrize("key", [3, None])
def test_parts_sum_to_the_contrast_of_log_weights(model, key, against):
    if key is None and against == "weights":
        with pytest.raises(BadValue, match="against='weights'"):
            ch.why(model, ids(), layer=1, head=2, query=5, against=against)
        return
    why = ch.why(model, ids(), layer=1, head=2, query=5, key=key, against=against)
    for parts in (why.key_parts, why.query_parts, torch.tensor(why.terms)):
        assert abs(float(parts.sum()) - why.contrast) < 1e-5
    weights = weights_of(model, 1, 2, 5)
    assert torch.allclose(why.weights.double(), weights, atol=1e-6)
    logs = weights[:6].log()
    of = float(logs[3] if key == 3 else weights[:6] @ logs)
    visible = [j for j in range(6) if j != key]
    other = {
        "others": logs[visible].mean(), "weights": weights[:6] @ logs, 1: logs[1], "nothing": 0,
    }[against]  # fmt: skip
    if against == "nothing":
        other = of - why.score
    assert abs(why.contrast - (of - float(other))) < 1e-5


def test_sources_and_pairs_sum_to_the_parts(model):
    why = ch.why(model, ids(), layer=1, head=0, query=6, key=2)
    heads = [c for c in why.components if c.kind == "head"]
    assert [str(c) for c in heads] == ["L0H0", "L0H1", "L0H2"]
    for component in heads:
        i = why.components.index(component)
        for of, parts in (("key", why.key_parts), ("query", why.query_parts)):
            sources = why.sources(0, component.head, of)
            assert sources.shape == (T,)
            assert abs(float(sources.sum() - parts[i])) < 1e-5
    alone = ch.why(model, ids(), layer=1, head=0, query=6, key=2, against="nothing")
    assert bool(alone.sources(0, 1).abs()[3:].max() < 1e-7)  # key 2 cannot read later tokens
    pairs = why.pairs()
    assert torch.allclose(pairs.sum(0), why.key_parts, atol=1e-5)
    assert torch.allclose(pairs.sum(1), why.query_parts, atol=1e-5)


def test_parts_are_those_of_the_key_or_of_the_query(model):
    why = ch.why(model, ids(), layer=1, head=0, query=6, key=2)
    assert why.largest("query") != why.largest("key") == why.largest()
    for call in (lambda: why.largest("value"), lambda: why.sources(0, 0, "value")):
        with pytest.raises(BadValue, match="got of='value'"):
            call()
    assert [len(why.largest(n=n)) for n in (0, 2, 99)] == [0, 2, len(why.components)]
    with pytest.raises(BadValue, match=f"(?s)n=-1.*there are {len(why.components)} parts"):
        why.largest(n=-1)
    with pytest.raises(BadType, match=r"n=1\.5"):
        why.largest(n=1.5)


def test_a_run_in_another_thread_is_not_followed(model):
    """It begins and ends while a module of the explained run is running."""
    report, why = (
        ch.report(model, ids()[None]), ch.why(model, ids(), layer=1, head=2, query=5, key=3)
    )  # fmt: skip
    batch, main = ch.report_batch(model, ids()[None])[0], threading.get_ident()

    def elsewhere(module, args):
        if threading.get_ident() == main:
            thread = threading.Thread(target=lambda: model(ids()[None]))
            thread.start()
            thread.join()

    modules = [module for module in model.modules() if module is not model]
    hooks = [module.register_forward_pre_hook(elsewhere) for module in modules]
    try:
        again = ch.why(model, ids(), layer=1, head=2, query=5, key=3)
        assert ch.report(model, ids()[None]).heads == report.heads
        also = ch.report_batch(model, ids()[None])[0]
    finally:
        for hook in hooks:
            hook.remove()
    assert also.heads == batch.heads
    assert [x.module for x in also.layers] == [x.module for x in batch.layers]
    assert again.components == why.components and torch.equal(again.key_parts, why.key_parts)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_parts_of_blocks_with_either_norm(norm):
    model = randomised(TwoBlocks(norm))
    why = ch.why(model, ids(), layer=1, head=1, query=6, key=0)
    kinds = [c.kind for c in why.components]
    assert {"embedding", "head", "mlp"} <= {*kinds}
    assert abs(float(why.query_parts.sum()) - why.contrast) < 1e-5


class Layer(nn.Module):
    """Attention with plain weights, whose heads share nothing."""

    def __init__(self, d, heads, size, between=None, **options):
        super().__init__()
        self.heads, self.options, self.between = heads, options, between
        self.W_query, self.W_key, self.W_value = (nn.Linear(d, heads * size) for _ in range(3))
        self.out_proj = nn.Linear(heads * size, d)

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.W_query, self.W_key, self.W_value)
        )
        if self.between is not None:
            k = self.between(k)
        z = ch.attention(q, k, v, mask=ch.causal, **self.options)
        return self.out_proj(z.transpose(1, 2).flatten(-2))


class Two(nn.Module):
    """Two layers on tokens and learned positions, without norms."""

    def __init__(self, d=13, heads=2, size=5, first=None, second=None):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, d), nn.Embedding(11, d)
        self.first = Layer(d, heads, size, **(first or {}))
        self.second = Layer(d, heads, size, **(second or {}))

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        x = x + self.first(x)
        return x + self.second(x)


def planted():
    """Head 1 of layer 0 copies the token before. Head 0 of layer 1 looks for a key after a token
    that is the query's: an induction head. A stream is (token, position, token before)."""
    model = Two(WORDS + 11 + WORDS, 2, WORDS)
    one, before, token = torch.eye(WORDS), slice(WORDS + 11, None), slice(0, WORDS)
    with torch.no_grad():
        for x in model.parameters():
            x.zero_()
        model.tokens.weight[:, token] = one
        model.positions.weight[:, WORDS : WORDS + 11] = torch.eye(11)
        of_head_1 = slice(WORDS, WORDS + 11)
        at = slice(WORDS, WORDS + 11)
        model.first.W_query.weight[of_head_1, at] = 40 * torch.eye(11).roll(-1, 0)
        model.first.W_key.weight[of_head_1, at] = 10 * torch.eye(11)
        model.first.W_value.weight[WORDS:, token] = one
        model.first.out_proj.weight[before, WORDS:] = one
        model.second.W_query.weight[:WORDS, token] = 9 * one
        model.second.W_key.weight[:WORDS, before] = 9 * one
    return model.eval()


def test_a_planted_induction_circuit_is_read_back():
    text = torch.tensor([4, 7, 9, 2, 7])  # the query 7 looks at 9, which came after 7
    names = ["who", "what", "when", "why", "what"]
    why = ch.why(planted(), text, layer=1, head=0, query=4, key=2, tokens=names)
    assert why.weight > 0.99
    ((component, part),) = why.largest("key", 1)
    assert str(component) == "L0H1" and abs(part - why.contrast) < 1e-4 * part
    assert str(why.largest("query", 1)[0][0]) == "embedding tokens"
    assert int(why.sources(0, 1).argmax()) == 1
    assert why.sentence() == (
        f"L1H0 at *what* (4) looks at *when* (2) because L0H1 wrote there which token "
        f"came before: {part:.1f} of {part:.1f}."
    )
    first = ch.why(planted(), text, layer=0, head=1, query=4, key=3)
    assert str(first.largest("key", 1)[0][0]) == "embedding positions"
    assert why.terms.match > 0.75 * why.contrast


def test_a_part_below_half_is_one_of_several_reasons():
    why = ch.why(planted(), torch.tensor([4, 7, 9, 2, 7]), layer=1, head=0, query=4, key=2)
    assert "looks at position 2 because L0H1 wrote" in why.sentence()
    shared = replace(why, contrast=why.contrast * 2.5)
    assert (
        "looks at position 2 for several reasons, above all because L0H1 wrote" in shared.sentence()
    )


def test_pairs_are_the_bilinear_form_of_autograd_in_float64():
    """Without norms, a score is the second derivative along two parts of the stream."""
    model = randomised(Two()).double()
    layer, first = model.second, model.first
    why = ch.why(model, ids(), layer=1, head=1, query=6, key=2, against=4)
    with torch.no_grad(), ch.watch(model, outputs=True) as recording:
        model(ids()[None])
    z, W = recording[0].output[0], first.out_proj.weight.T.reshape(2, 5, 13)
    parts = {
        "embedding tokens": model.tokens.weight[ids()],
        "embedding positions": model.positions.weight[:T],
        "L0H0": z[0] @ W[0], "L0H1": z[1] @ W[1],
        "bias first.out_proj": first.out_proj.bias.expand(T, -1),
    }  # fmt: skip

    def contrast(of_query, of_key):
        q, k = layer.W_query(of_query)[6, 5:], layer.W_key(of_key)[[2, 4], 5:]
        return (k[0] - k[1]) @ q / 5**0.5

    zero = torch.zeros(T, 13, dtype=torch.float64)
    form = torch.autograd.functional.hessian(
        lambda x: contrast(x[0], x[1]), torch.stack([zero, zero])
    )[0, :, :, 1]
    names = [str(c) for c in why.components]
    largest, pairs = float(why.key_parts.abs().max()), why.pairs().double()
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            if a in parts and b in parts:
                expected = torch.einsum("td,tdse,se->", parts[a], form, parts[b]).detach()
                assert abs(float(expected - pairs[i, j])) < 1e-6 * largest
    assert {*parts} < {*names}


def test_the_distance_of_alibi_is_a_part():
    model = randomised(Two(second={"bias": ch.alibi()}))
    why = ch.why(model, ids(), layer=1, head=1, query=6, key=5)
    assert why.components[-1].kind == "distance" and float(why.key_parts[-1]) > 0
    logs = weights_of(model, 1, 1, 6).log()
    assert abs(float(logs[5] - logs[[0, 1, 2, 3, 4, 6]].mean()) - why.contrast) < 1e-4
    for parts in (why.key_parts, why.query_parts, torch.tensor(why.terms)):
        assert abs(float(parts.sum()) - why.contrast) < 1e-4


def test_the_check_puts_path_edits_beside_the_parts():
    model = planted()
    text = torch.tensor([4, 7, 9, 2, 7])
    why = ch.why(model, text, layer=1, head=0, query=4, key=2, check=True)
    by_hand = ch.edits.path(ch.edits.ablate(layers=[0], heads=[1]), (1, 0), "key")
    with torch.no_grad(), ch.intervene(model, [by_hand.as_patch(model, text[None])]):
        with ch.watch(model, exact_rows=[4]) as recording:
            model(text[None])
    edited = float(recording[1].exact_rows[0, 0, 0, 2])
    first = why.checks[0]
    assert str(first.component) == "L0H1" and first.of == "key" and first.weight == why.weight
    assert abs(first.edited - edited) < 1e-6 and abs(first.frozen - 0.2) < 1e-3
    assert abs(first.edited - first.frozen) < 1e-5  # there are no norms
    assert all(c.agrees for c in why.checks) and "by a path edit" in repr(why)


@pytest.mark.parametrize(
    ("changes", "agree"),
    [
        ([(-0.3, -0.2), (-0.1, -0.1), (0.2, 0.05)], [True, True, True]),
        ([(-0.3, -0.009), (0.2, 0.05), (0.205, 0.01)], [True, True, True]),  # within 0.01
        ([(-0.3, 0.02), (0.2, 0.05)], [False, True]),  # other signs
        ([(-0.3, -0.2), (-0.1, -0.25), (-0.6, -0.9)], [False, False, True]),  # another order
    ],
)
def test_a_check_agrees_on_sign_and_order_within_its_tolerance(changes, agree):
    assert agreements(changes) == agree


def test_a_path_from_an_mlp_is_that_of_a_run_without_it():
    model = randomised(TwoBlocks())
    text = ids()[None]
    sent = ch.edits.path("first.feed_forward", (1, 1), "key").as_patch(model, text)
    handle = model.first.feed_forward.register_forward_hook(lambda m, x, y: torch.zeros_like(y))
    with torch.no_grad(), ch.watch(model, inputs=True) as without:
        model(text)
    handle.remove()
    with torch.no_grad(), ch.watch(model, inputs=True) as plain:
        model(text)
    with torch.no_grad(), ch.intervene(model, [sent]), ch.watch(model, inputs=True) as edited:
        model(text)
    assert torch.allclose(edited[1].key[:, 1], without[1].key[:, 1], atol=1e-6)
    assert torch.equal(edited[1].key[:, [0, 2]], plain[1].key[:, [0, 2]])
    effects = ch.effects(
        model, text, lambda y: y[0, -1].sum(),
        edits={"mlp": ch.edits.path("first.feed_forward", (1, 1), "key")},
    )  # fmt: skip
    assert [abs(effect.exact) > 0 for effect in effects] == [True]


@pytest.mark.parametrize(
    ("sender", "says"),
    [("first.feed", "has no module of this name"), ("second.feed_forward", "it ran 0 times")],
)
def test_a_path_from_another_module_is_refused(model, sender, says):
    edit = ch.edits.path(sender, (1, 1), "key")
    with pytest.raises(BadValue, match=says):
        edit.as_patch(model, ids()[None])


def test_a_saved_result_prints_the_same(model, tmp_path):
    why = ch.why(model, ids(), layer=1, head=2, query=5, key=3, check=True)
    loaded = ch.load(why.save(tmp_path / "why.safetensors"))
    assert repr(loaded) == repr(why) and torch.equal(loaded.by_key, why.by_key)
    with pytest.raises(BadValue, match="loaded from a file"):
        loaded.pairs()
    table = why.to_pandas()
    assert len(table) == len(why.components) and set(table.kind) >= {"head", "mlp"}


@pytest.mark.parametrize("gate", [nn.Tanh(), nn.ReLU(), nn.Softplus()])
def test_functions_on_the_way_of_the_keys_are_refused(gate):
    """ReLU would sum, but its parts are not what runs without them lack."""
    model = randomised(Two(second={"between": gate}))
    with pytest.raises(
        BadValue, match=f"(?i){type(gate).__name__} is between the stream and the k"
    ):
        ch.why(model, ids(), layer=1, head=0, query=5, key=3)
    assert ch.why(model, ids(), layer=0, head=0, query=5, key=3).weight > 0  # not on its way


class InPlace(nn.Module):
    """Changes the first two features of the keys in a copy of them."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, k):
        changed = k * 1.0
        self.change(changed[..., :2], k[..., 2:4])
        return changed


@pytest.mark.parametrize(
    "change",
    [
        lambda view, other: view.relu_(),
        lambda view, other: view.clamp_(-100, 100),
        lambda view, other: view.mul_(other),
        lambda view, other: view.copysign_(other),
    ],
)
def test_a_function_in_place_on_a_part_of_the_keys_is_refused(change):
    model = randomised(Two(second={"between": InPlace(change)}))
    with pytest.raises(BadValue, match="a function in place on a part of a tensor is between"):
        ch.why(model, ids(), layer=1, head=0, query=5, key=3)


def test_a_copy_into_a_part_of_the_keys_is_linear():
    model = randomised(Two(second={"between": InPlace(lambda view, other: view.copy_(other))}))
    why = ch.why(model, ids(), layer=1, head=0, query=5, key=3)
    assert abs(float(why.key_parts.sum()) - why.contrast) < 1e-4


class Constant(nn.Module):
    def forward(self, x):
        return x + 0.5


def test_a_part_that_nothing_wrote_is_refused():
    model = randomised(Two(second={"between": Constant()}))
    with pytest.raises(BadValue, match=r"parts of the keys miss a score by \d"):
        ch.why(model, ids(), layer=1, head=0, query=5, key=3)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(layer=2), "Layer 2 was requested"),
        (dict(head=3), "Head 3 was requested"),
        (dict(query=7), "Query 7 was requested"),
        (dict(key=6), r"Query 5 looks at 6 keys \(0, 1, 2, 3, 4, 5\); why got key=6"),
        (dict(against="all"), "against='all'"),
        (dict(against=3), "against=3"),
        (dict(against=7), "A contrast with key 7 was requested"),
        (dict(query=0, key=0), r"Query 0 looks at 1 keys \(0\)"),
        (dict(query=None), "query=None, over=None"),
        (dict(over="rows"), "query=5, over='rows'"),
        (dict(query=None, over="columns"), "over='columns'"),
        (dict(query=None, over="rows", check=True), "over='rows' and check=True"),
        (dict(tokens=["a"]), "1 tokens for 7 keys"),
    ],
)
def test_wrong_arguments_are_refused(model, wrong, says):
    arguments = dict(layer=1, head=0, query=5, key=3) | wrong
    with pytest.raises(BadValue, match=says):
        ch.why(model, ids(), **arguments)


@pytest.mark.parametrize(
    ("key", "against"), [(None, "others"), (None, "nothing"), (0, 1), (2, "weights")]
)
def test_a_mean_over_rows_is_that_of_all_queries_one_by_one(model, key, against, monkeypatch):
    """In strips of two rows. Queries that do not see both keys are not in the mean."""
    monkeypatch.setattr(split, "STRIP_CELLS", 2 * T + 1)
    mean = ch.why(model, ids(), layer=1, head=2, over="rows", key=key, against=against)
    first = {"others": 0, "nothing": 0, 1: 1, "weights": 2}[against]
    rows = [
        ch.why(model, ids(), layer=1, head=2, query=i, key=key, against=against)
        for i in range(first, T)
    ]
    assert mean.rows == len(rows) and mean.query is None
    for name in ("weights", "score", "contrast", "terms"):
        assert_mean(getattr(mean, name), [getattr(row, name) for row in rows])
    for name in ("key_parts", "query_parts"):
        parts = [dict(zip(row.components, getattr(row, name), strict=True)) for row in rows]
        assert_mean(getattr(mean, name), [[p.get(c, 0.0) for c in mean.components] for p in parts])
    assert torch.allclose(mean.by_key.sum(1), mean.key_parts, atol=1e-5)
    assert mean.visible.tolist() == list(range(T))
    for head in range(3):
        for of in ("key", "query"):
            assert_mean(mean.sources(0, head, of), [row.sources(0, head, of) for row in rows])


def assert_mean(mean, rows):
    expected = torch.stack([torch.as_tensor(row).double() for row in rows]).mean(0)
    atol = 1e-5 * max(1.0, float(expected.abs().max()))
    assert torch.allclose(torch.as_tensor(mean).double(), expected, atol=atol)


def test_a_mean_over_no_rows_is_refused(model):
    with pytest.raises(BadValue, match="No query looks at the key and at what"):
        ch.why(model, ids(1), layer=1, head=2, over="rows", key=0)
    alone = ch.why(model, ids(1), layer=1, head=2, over="rows", key=0, against="nothing")
    assert alone.rows == 1 and alone.weight == 1.0


def test_a_mean_over_rows_prints_itself_and_has_no_pairs(model, tmp_path):
    mean = ch.why(model, ids(), layer=1, head=2, over="rows", tokens=[*"abcdefg"])
    assert mean.sentence().startswith("L1H2 over 7 queries looks at its keys, most at *a* (0), ")
    with pytest.raises(BadValue, match="a mean over 7 queries"):
        mean.pairs()
    assert repr(ch.load(mean.save(tmp_path / "mean.safetensors"))) == repr(mean)


def test_several_texts_are_refused(model):
    with pytest.raises(BadValue, match="2 texts"):
        ch.why(model, ids()[None].expand(2, -1), layer=1, head=0, query=5, key=3)


def test_a_model_without_attention_is_refused():
    with pytest.raises(BadValue, match="The Linear made no attention call"):
        ch.why(nn.Linear(T, 3), torch.ones(1, T), layer=0, head=0, query=5)

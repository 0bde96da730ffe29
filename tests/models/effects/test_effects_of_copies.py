"""Which copy of the batch a number is of: effects of copies that run together, or cannot.

Each effect is held against runs of one edit each, which the test makes itself.
"""

import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from clearhead.core.errors import BadType, BadValue
from clearhead.core.functional.ambient import computed_by
from clearhead.demo.model import Config, Decoder
from clearhead.models.follow.copies import fresh

B, T, WORDS, HEADS = 2, 7, 13, 3


def decoder(layers=1):
    torch.manual_seed(0)
    made = Decoder(Config(words=WORDS, d=12, layers=layers, heads=HEADS, context=16)).eval()
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(2.0)
    return made


def ids():
    return torch.randint(0, WORDS, (B, T), generator=torch.Generator().manual_seed(2))


class Wrapped(nn.Module):
    """A decoder whose logits (B, T, words) come out in another form."""

    def __init__(self, form):
        super().__init__()
        self.net, self.form, self.runs = decoder(), form, []

    def forward(self, input_ids):
        self.runs.append(len(input_ids))
        return self.form(self.net(input_ids))


def one_by_one(net, inputs, metric, layers=1):
    """The metric unedited, and the effect of each head."""

    def value(edits):
        with torch.no_grad(), ch.intervene(net, edits):
            return float(metric(net(inputs)))

    plain = value([])
    heads = [(layer, h) for layer in range(layers) for h in range(HEADS)]
    edits = ([ch.edits.ablate(layers=[layer], heads=[h])] for layer, h in heads)
    return plain, [value(edit) - plain for edit in edits]


def check(net, metric, inputs=None, warns="", **options):
    inputs = ids() if inputs is None else inputs
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = ch.effects(net, inputs, metric, **options)
    said = [str(w.message) for w in caught]
    assert len(said) == bool(warns) and all(warns in text for text in said), said
    plain, right = one_by_one(net, inputs, metric)
    assert max(map(abs, right)) > 1e-3
    assert found.baseline == plain
    assert [e.exact for e in found] == pytest.approx(right, abs=1e-5)
    return found


@dataclass
class Parts:
    logits: Tensor
    more: Any = None


def mean_loss(logits):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids().flatten()[: B * (T - 1)])


@pytest.mark.parametrize(
    ("form", "metric"),
    [
        (lambda x: x, lambda out: out[:, -1, 3].sum()),
        (lambda x: {"logits": x, "more": [x, (x, "text", None)]},
         lambda out: out["more"][1][0][:, 2, 5].mean()),
        (lambda x: Parts(x, {"deep": x.sum(-1)}), lambda out: out.more["deep"][:, 1].mean()),
        (lambda x: torch.return_types.max((x.amax(-1), x.argmax(-1))),
         lambda out: out.values.mean()),
        (lambda x: x.flatten(0, 1), lambda out: out[:, 4].square().mean()),  # T rows each
    ],
)  # fmt: skip
def test_outputs_with_rows_are_cut(form, metric):
    net = Wrapped(form)
    check(net, metric)
    assert net.runs[:2] == [B, (1 + HEADS) * B]  # an unedited copy, and one for each head


@pytest.mark.parametrize(
    ("form", "metric", "why"),
    [
        (lambda x: {"logits": x, "loss": x.square().mean()}, lambda out: out["loss"],
         "loss is one number for all rows"),
        (lambda x: (x.square().mean(), x), lambda out: out[1][:, 0, 3].sum(), "0 is one number"),
        (lambda x: {"logits": x, "top": float(x.max())}, lambda out: out["logits"].max(),
         "top is a float, which has no rows"),
        (lambda x: SimpleNamespace(logits=x, right=(x.argmax(-1) == 3).sum()),
         lambda out: out.right + out.logits[:, 0, 1].mean(), "right is one number for all rows"),
        (lambda x: {"logits": x, "right": int((x.argmax(-1) == 3).sum())},
         lambda out: out["logits"].max(), "right is an int, which has no rows"),
        (lambda x: x.mean(0), lambda out: out[-1, 3], r"the output is (7, 13) for 4 copies"),
        (lambda x: x.transpose(0, 1), lambda out: out[-1, :, 3].sum(),
         "the output is (7, 8, 13) for 4 copies, (7, 2, 13) for one"),
        (lambda x: [x] * (len(x) // B), lambda out: out[0][:, -1, 3].sum(),
         "the output has 4 parts, that of one copy has 1"),
    ],
)  # fmt: skip
def test_outputs_that_cannot_be_cut_are_of_one_copy_each(form, metric, why):
    check(Wrapped(form), metric, warns=why, estimate=False)


@pytest.mark.parametrize(
    ("form", "metric"),
    [
        # The shape says that rows are cut; they are not of one text each.
        (lambda x: x.transpose(0, 1).flatten(0, 1), lambda out: out[:B, 3].sum()),
        (lambda x: x - x.mean(0), lambda out: out[:, -1, 3].max()),
    ],
)
def test_rows_that_depend_on_each_other_show_in_the_unedited_copy(form, metric):
    check(Wrapped(form), metric, warns="an unedited copy gives")


@pytest.mark.parametrize("weight", [1e-1, 1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("of_batch", [lambda x: x.amax(0), lambda x: x.sum(0), lambda x: len(x)])
def test_rows_that_depend_on_each_other_weakly_show_too(of_batch, weight):
    """Also by less than 1 % of the largest effect."""
    net = Wrapped(lambda x: x - weight * of_batch(x))
    check(net, lambda out: out[:, -1, 3].sum(), warns="an unedited copy gives", estimate=False)


def test_rounding_that_depends_on_the_size_of_the_batch_does_not():
    """A kernel for large batches may round in another way; each row is then the same number."""
    net = Wrapped(lambda x: x * (1 + 1.2e-5 * (len(x) > B)))
    found = check(net, lambda out: out[:, -1, 3].sum(), estimate=False)
    assert net.runs[1:3] == [(1 + HEADS) * B] * 2 and len(found) == HEADS


def test_a_metric_that_reads_elsewhere_shows_in_the_unedited_copy():
    net, seen = Wrapped(lambda x: x), []
    net.net.register_forward_hook(lambda module, args, out: seen.append(out))
    check(net, lambda out: seen[-1][:, -1, 3].sum(), warns="beside edited ones")


def test_a_model_of_a_fixed_batch_runs_one_copy_at_a_time():
    net = Wrapped(lambda x: x.reshape(B, T, WORDS))
    check(net, lambda out: out[:, -1, 3].sum(), warns="4 copies raised RuntimeError: shape")


def test_one_copy_at_a_time_is_not_said_where_it_was_wanted():
    net = Wrapped(lambda x: {"logits": x, "loss": x.square().mean()})
    check(net, lambda out: out["loss"], at_once=1)
    assert net.runs[: 1 + HEADS] == [B] * (1 + HEADS)
    few = Wrapped(lambda x: x)
    check(few, lambda out: out[:, -1, 3].sum(), at_once=2)
    assert few.runs[:3] == [B, 2 * B, 2 * B]  # an edit beside the unedited copy, then two


class Writes(nn.Module):
    """A model that writes into its input."""

    def __init__(self):
        super().__init__()
        self.block = ch.nn.TransformerBlock(6, HEADS, causal=True)

    def forward(self, x):
        return self.block(x.add_(1.0))


def test_inputs_stay_as_they_are():
    torch.manual_seed(0)
    net, x = Writes().eval(), torch.randn(B, 5, 6)
    before = x.clone()
    found = ch.effects(net, x, lambda out: out.square().sum())
    assert torch.equal(x, before)
    with torch.no_grad():
        plain = net.block(x + 1).square().sum()
        for e in found:
            with ch.intervene(net.block, [ch.edits.ablate(heads=[e.head])]):
                edited = net.block(x + 1).square().sum()
            assert e.exact == pytest.approx(float(edited - plain), rel=1e-3)


def test_a_copy_of_an_expanded_input_stays_expanded():
    x = torch.ones(1, 1, 5).expand(3, 4, 5)
    copy = fresh({"x": [x]})["x"][0]
    assert copy.shape == x.shape and copy.stride() == x.stride() and copy.data_ptr() != x.data_ptr()


class Decodes(nn.Module):
    """Blocks that read a past from caches."""

    def __init__(self):
        super().__init__()
        blocks = (ch.nn.TransformerBlock(6, HEADS, causal=True) for _ in range(2))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x, caches):
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache=cache)
        return x


@pytest.mark.parametrize("at_once", [1, None])
@pytest.mark.parametrize("max_length", [None, 12])
@torch.no_grad()
def test_caches_among_the_inputs(at_once, max_length):
    torch.manual_seed(0)
    net, past, x = Decodes().eval(), torch.randn(B, 4, 6), torch.randn(B, 3, 6)
    caches = [ch.nn.KVCache(max_length) for _ in net.blocks]
    net(past, caches)
    kept = [(c.length, c.keys.clone(), c.values.clone()) for c in caches]

    def metric(out):
        return out.square().sum()

    given = {"x": x, "caches": caches}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ch.effects(net, given, metric, at_once=at_once, estimate=max_length is None)
    for cache, (length, k, v) in zip(caches, kept, strict=True):
        assert cache.length == length
        assert torch.equal(cache.keys, k) and torch.equal(cache.values, v)
    plain = metric(net(torch.cat([past, x], 1), [None, None])[:, 4:])
    assert found.baseline == pytest.approx(float(plain), rel=1e-5)
    for e in found:
        # Edited in the rows after the past alone, which caches hold unedited.
        edit = ch.edits.ablate(layers=[e.layer], heads=[e.head], positions=range(4, 7))
        with ch.intervene(net, [edit]):
            edited = metric(net(torch.cat([past, x], 1), [None, None])[:, 4:])
        assert e.exact == pytest.approx(float(edited - plain), rel=1e-3)


def test_dropout_by_a_seed_is_of_each_row():
    class Seeded(nn.Module):
        def forward(self, x):
            return ch.attention(x, x, x, mask=ch.causal, dropout=0.5, seed=3)

    x = torch.randn(B, HEADS, T, 4, generator=torch.Generator().manual_seed(1))
    check(Seeded(), lambda out: out.square().sum(), x, warns="dropout with a seed", estimate=False)


def dropping():
    return nn.Sequential(decoder(), nn.Dropout(0.1))


def normalising():
    return nn.Sequential(decoder(), nn.BatchNorm1d(T))


@pytest.mark.parametrize(
    ("build", "says"),
    [(dropping, "it draws random numbers"), (normalising, "in training mode 1 normalises")],
)
def test_a_model_that_does_not_compute_the_same_twice(build, says):
    def metric(out):
        return out[:, -1, 3].sum()

    net = build().train()
    with pytest.raises(BadValue, match=says) as error:
        ch.effects(net, ids(), metric)
    assert "model.eval()" in error.value.hint
    check(net.eval(), metric)


def test_what_has_no_right_number_is_refused():
    net = decoder()
    with pytest.raises(BadValue, match=r"The metric hits has no gradient(.|\n)*estimate=False"):
        ch.effects(net, ids(), hits)
    found = check(net, hits, estimate=False)
    assert found.metric == "hits"
    with torch.inference_mode(), pytest.raises(BadValue, match="has no gradient"):
        ch.effects(net, ids())
    with pytest.raises(BadValue, match="effects was called inside"):
        with computed_by(SimpleNamespace(carry=lambda: None)):
            ch.effects(net, ids())
    net.blocks[0].compile(backend="eager")
    with pytest.raises(BadValue, match="is compiled: blocks"):
        ch.effects(net, ids(), exact=False)


def hits(logits):
    return (logits.argmax(-1) == logits.argmin(-1).flip(1)).float().mean() + logits.detach().max()


def test_the_loss_is_of_a_decoder():
    plain = decoder()
    assert ch.effects(plain, ids(), exact=False).metric == "loss"

    class Encoder(nn.Module):
        def __init__(self, causal):
            super().__init__()
            self.words = nn.Embedding(WORDS, 6)
            self.block = ch.nn.TransformerBlock(6, HEADS, causal=causal)

        def forward(self, input_ids, attention_mask=None, labels=None):
            x = self.block(self.words(input_ids))
            return {"logits": x @ self.words.weight.T}

    assert ch.effects(Encoder(True).eval(), {"input_ids": ids()}, exact=False).metric == "loss"
    with pytest.raises(BadValue, match="In the Encoder a token looks at those after it") as error:
        ch.effects(Encoder(False).eval(), ids())
    assert "labels=" in error.value.hint and "logit_difference" in error.value.hint
    with pytest.raises(BadValue, match="The inputs have labels, and the Encoder returned no loss"):
        ch.effects(Encoder(True).eval(), {"input_ids": ids(), "labels": ids()})
    with pytest.raises(BadValue, match="attention_mask of shape"):
        given = {"input_ids": ids(), "attention_mask": torch.ones(B, 1, T, T)}
        ch.effects(Encoder(True).eval(), given)
    with pytest.raises(BadValue, match=r"logits \(2, 1, 13\) for ids \(2, 7\)"):
        ch.effects(Wrapped(lambda x: x[:, -1:]), ids())
    with pytest.raises(BadType, match="have no ids"):
        ch.effects(ch.nn.TransformerBlock(6, HEADS, causal=True).eval(), torch.randn(B, T, 6))


@pytest.mark.parametrize("keep", [torch.ones(T, T).tril() > 0, torch.ones(T, T) > 0])
def test_a_dense_mask_is_read_cell_by_cell(keep):
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(WORDS, 6)

        def forward(self, input_ids):
            x = self.words(input_ids).unsqueeze(1)
            return ch.attention(x, x, x, mask=ch.dense(keep=keep)).squeeze(1) @ self.words.weight.T

    if not keep.all():
        assert ch.effects(Dense(), ids()).metric == "loss"
        return
    with pytest.raises(BadValue, match="a token looks at those after it"):
        ch.effects(Dense(), ids())


def test_an_estimate_of_a_saturated_metric_is_marked():
    net = decoder()

    def margin(out):
        return out[:, -1, 3].sum()

    plain, changes = one_by_one(net, ids(), margin)
    least = min(changes)
    assert least < 0

    def saturated(out):  # flat where the margin is, and steep where it falls to
        return F.softplus(40 * (plain + least / 2 - margin(out)) / -least) + 0.01 * margin(out)

    found = check(net, saturated)
    worst = found.effects[changes.index(least)]
    assert worst.exact > 10 and worst.estimate < 0 and worst.trusted is False
    line = next(line for line in str(found).splitlines() if line.startswith(worst.name))
    assert line.endswith("?") and "estimates are not to be trusted: of the wrong sign" in str(found)
    assert found.as_dict()["effects"][worst.head]["trusted"] is False
    alone = ch.effects(net, ids(), saturated, exact=False)
    assert alone.effects[0].trusted is None and "These estimates are not checked" in str(alone)
    straight = ch.effects(net, ids(), margin)
    wrong = [e for e in straight if not 0.5 <= e.estimate / e.exact <= 2]
    assert [e for e in straight if e.trusted is False] == wrong


@pytest.mark.outside
def test_marks_are_drawn():
    pytest.importorskip("matplotlib")
    from clearhead.models.effects.effect_table import Effect, Effects

    rows = tuple(Effect(f"{h}", x, y, 0, h) for h, (x, y) in enumerate([(1, 1.5), (1, -1), (1, 3)]))
    axes = ch.views.plot.effects(Effects("loss", 1.0, rows)).axes
    points = {tuple(line.get_xdata()): line.get_markerfacecolor() for line in axes[1].lines[1:]}
    assert points[(1.0, 1.0)] == "none" and len(points[(1.0,)]) > 4
    assert axes[1].get_legend().get_texts()[0].get_text() == "not to be trusted: 2 of 3"
    alone = Effects("loss", 1.0, (Effect("0", None, 0.5, 0, 0),))
    assert ch.views.plot.effects(alone).axes[0].get_title() == "estimates, not checked"


def test_a_file_is_of_one_metric(tmp_path):
    """Metrics of one name, all 0 unedited."""
    net, file = decoder(), tmp_path / "effects.jsonl"
    with torch.no_grad():
        plain = net(ids())

    def moved(by):
        return lambda out: (out - plain).abs().mean() * by

    first = ch.effects(net, ids(), moved(1.0), to=file, estimate=False)
    assert ch.effects(net, ids(), moved(1.0), to=file, estimate=False) == first
    for other in (moved(2.0), lambda out: (out - plain).square().mean()):
        with pytest.raises(BadValue, match="has other effects"):
            ch.effects(net, ids(), other, to=file)


def test_a_file_is_of_all_inputs(tmp_path):
    torch.manual_seed(0)
    net, file, x = Decodes().eval(), tmp_path / "effects.jsonl", torch.randn(B, 3, 6)

    def given(seed):
        past = torch.randn(B, 4, 6, generator=torch.Generator().manual_seed(seed))
        caches = [ch.nn.KVCache() for _ in net.blocks]
        with torch.no_grad():
            net(past, caches)
        return {"x": x, "caches": caches}

    def nothing(out):
        return out.sum() * 0

    ch.effects(net, given(1), nothing, to=file)
    ch.effects(net, given(1), nothing, to=file)
    with pytest.raises(BadValue, match="has other effects"):
        ch.effects(net, given(2), nothing, to=file)

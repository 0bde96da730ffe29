"""What edits do to a metric: run by run, together in one batch, and estimated from gradients."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead.core.errors import BadType, BadValue
from clearhead.demo.model import Config, Decoder
from clearhead.models.effects.effect_table import Effect, Effects


def model(layers=2, heads=3, dtype=torch.float64):
    torch.manual_seed(0)
    made = Decoder(Config(words=13, d=12, layers=layers, heads=heads, context=16)).eval().to(dtype)
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(2.0)
    return made


def ids(B=2, T=7):
    return torch.randint(0, 13, (B, T), generator=torch.Generator().manual_seed(2))


def loss(net, tokens, edits=()):
    with torch.no_grad(), ch.intervene(net, edits):
        logits = net(tokens)
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()))


@pytest.mark.parametrize("at_once", [1, 4, None])
def test_every_head_by_default_run_one_by_one_or_together(at_once):
    net, tokens = model(), ids()
    found = ch.effects(net, tokens, at_once=at_once)
    plain = loss(net, tokens)
    assert found.metric == "loss" and found.baseline == pytest.approx(plain, abs=1e-6)
    assert [(e.layer, e.head) for e in found] == [(i, h) for i in (0, 1) for h in (0, 1, 2)]
    for e in found:
        edited = loss(net, tokens, [ch.edits.ablate(layers=[e.layer], heads=[e.head])])
        assert e.exact == pytest.approx(edited - plain, abs=1e-6)
    assert found.grid().shape == (2, 3) and found.grid()[1, 2] == found.effects[5].exact


def test_other_edits_and_groups_of_them():
    net, tokens = model(), ids()
    with torch.no_grad(), ch.watch(net, outputs=True, exact_rows=range(7)) as seen:
        net(ids().flip(1))
    groups = {
        "first": ch.edits.knock_out(ch.prefix(1), heads=[1]),
        "both": [ch.edits.temperature(0.5, layers=[0]), ch.edits.scale(2.0, layers=[1])],
        "uniform": ch.edits.uniform(heads=[0]),
        "patch": ch.edits.patch(seen, layers=[1], heads=[0]),
        "freeze": ch.edits.freeze(seen, layers=[0], positions=[3, 4]),
        "per text": ch.edits.knock_out(ch.dense(keep=torch.rand(2, 1, 7, 7) > 0.5)),
        "mean": ch.edits.ablate(by="mean", over=seen, heads=[2]),
    }
    found = ch.effects(net, tokens, edits=groups)
    plain = loss(net, tokens)
    assert [e.name for e in found] == list(groups)
    for e, group in zip(found, groups.values(), strict=True):
        edits = group if isinstance(group, list) else [group]
        assert e.exact == pytest.approx(loss(net, tokens, edits) - plain, abs=1e-6), e.name
    assert found.effects[3].layer == 1 and found.effects[3].head == 0
    assert found.effects[0].layer is None


def test_the_estimate_is_the_gradient_times_the_change():
    """In one layer, and for an edit so small that the metric is straight: exact."""
    net, tokens = model(layers=1), ids()
    small = [ch.edits.scale(1.0 + 1e-3, heads=[h]) for h in range(3)]
    small += [ch.edits.temperature(1.0 + 1e-3, heads=[1])]
    found = ch.effects(net, tokens, metric=lambda out: out[:, -1, 3].sum(), edits=small)
    assert [e.estimate for e in found] == pytest.approx([e.exact for e in found], rel=2e-2)
    assert found.correlation == pytest.approx(1.0)
    deep = ch.effects(model(layers=3), tokens, metric=lambda out: out[:, -1, 3].sum())
    assert deep.correlation > 0.5


class Saves(nn.Module):
    """A model whose blocks are checkpointed."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.net, self.use_reentrant = model(), use_reentrant
        for block in self.net.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant)

    def forward(self, tokens):
        return self.net(tokens)


def test_a_checkpointed_model_has_the_same_estimates():
    plain = ch.effects(model(), ids())
    found = ch.effects(Saves(use_reentrant=False), ids())
    assert [e.estimate for e in found] == pytest.approx([e.estimate for e in plain])
    assert [e.exact for e in found] == pytest.approx([e.exact for e in plain])
    with pytest.raises(BadValue, match="Layer 0 computes attention without gradients"):
        ch.effects(Saves(use_reentrant=True), ids())


def test_metrics():
    net, tokens = model(), ids()
    with torch.no_grad():
        logits = net(tokens)
    right, wrong = torch.tensor([1, 2]), 5
    found = ch.effects(net, tokens, ch.logit_difference(right, wrong), exact=False)
    by_hand = (logits[[0, 1], -1, right] - logits[:, -1, wrong]).mean()
    assert found.baseline == pytest.approx(float(by_hand)) and found.effects[0].exact is None

    class Named(nn.Module):
        def forward(self, input_ids, attention_mask):
            return {"logits": net(input_ids)}

    real = torch.ones(2, 7, dtype=torch.long)
    real[1, 4:] = 0
    from clearhead.models.effects.metrics import next_token_loss

    given = next_token_loss({"input_ids": tokens, "attention_mask": real})(logits)
    each = F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), tokens[:, 1:], reduction="none")
    assert float(given) == pytest.approx(float((each[0].sum() + each[1, :3].sum()) / 9))


@pytest.mark.outside
def test_a_transformers_model_and_its_dict_of_inputs():
    from tests.hf.test_models import build

    net = build("llama", "AutoModelForCausalLM")
    net.set_attn_implementation("clearhead")
    tokens = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    real = torch.ones(2, 9, dtype=torch.long)
    real[0, :3] = 0
    given = {"input_ids": tokens, "attention_mask": real, "use_cache": False}
    found = ch.effects(net, given, at_once=5)
    alone = ch.effects(net, given, at_once=1, estimate=False)
    assert len(found) == 8
    assert [e.exact for e in found] == pytest.approx([e.exact for e in alone], abs=1e-4)


def test_an_interrupted_call_goes_on_where_it_stopped(tmp_path):
    net, tokens, file = model(), ids(), tmp_path / "effects.jsonl"
    whole = ch.effects(net, tokens, at_once=1, to=file)
    lines = file.read_text().splitlines()
    assert len(lines) == 7 and json.loads(lines[3])["name"] == "L0H2"
    file.write_text("\n".join(lines[:4]) + "\n" + lines[4][:9])  # the last one is cut short
    runs = []
    hook = register_module_forward_pre_hook(lambda module, *_: runs.extend([1] * (module is net)))
    again = ch.effects(net, tokens, at_once=1, to=file, estimate=False)
    hook.remove()
    assert len(runs) == 1 + 2 + 3 and file.read_text().splitlines() == lines
    assert [e.exact for e in again] == [e.exact for e in whole]
    with pytest.raises(BadValue, match="has other effects"):
        ch.effects(net, ids(T=5), to=file)


def other_run(seed):
    """A recording of a text of its own."""
    net = model()
    with torch.no_grad(), ch.watch(net, outputs=True, exact_rows=range(7)) as seen:
        net(torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(seed)))
    return seen


@pytest.mark.parametrize(
    "edit",
    [
        lambda n: ch.edits.ablate(by=torch.full((4,), float(n)), layers=[1]),
        lambda n: ch.edits.ablate(by="mean", over=other_run(n), heads=[1]),
        lambda n: ch.edits.patch(other_run(n), layers=[0]),
        lambda n: ch.edits.freeze(other_run(n), layers=[1]),
        lambda n: ch.edits.knock_out(ch.dense(keep=torch.arange(49).reshape(7, 7) % 7 < n)),
    ],
)
def test_a_file_is_read_for_edits_that_hold_the_same(edit, tmp_path):
    """Whatever they print and are called."""
    net, tokens, file = model(), ids(), tmp_path / "effects.jsonl"
    first, second = edit(1), edit(5)
    kept = [ch.effects(net, tokens, edits={"it": e}, to=file, estimate=False) for e in 2 * [first]]
    assert len(file.read_text().splitlines()) == 2 and kept[0] == kept[1]
    for made in (second, edit(5), first, edit(1)):
        found = ch.effects(net, tokens, edits={"it": made}, to=file, estimate=False)
        assert found == ch.effects(net, tokens, edits={"it": made}, estimate=False)
    assert len(file.read_text().splitlines()) == 3
    assert found.effects[0].exact != ch.effects(net, tokens, edits=[second]).effects[0].exact


def test_a_file_is_of_one_models_weights(tmp_path):
    net, file = model(), tmp_path / "effects.jsonl"
    ch.effects(net, ids(), lambda logits: logits.sum() * 0, to=file)
    with torch.no_grad():
        next(net.parameters())[0, 0] += 1
    with pytest.raises(BadValue, match="has other effects"):
        ch.effects(net, ids(), lambda logits: logits.sum() * 0, to=file)


def written(content):
    """A file that effects began, and what stands after that."""

    def make(folder):
        file = folder / "effects.jsonl"
        if isinstance(content, bytes):
            file.write_bytes(content)
            return file
        ch.effects(model(), ids(), edits=[ch.edits.ablate()], to=file)
        with file.open("a") as opened:
            opened.write(content)
        return file

    return make


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "none" / "effects.jsonl", "cannot be written: No such file"),
        (lambda folder: folder, "cannot be read: Is a directory"),
        (written(b"\xff\xfe\x00\x01\n"), "has other effects"),
        (written("no JSON\n"), "Line 3 of the file .* is not an effect: no JSON"),
        (written("[1]\n"), r"Line 3 of the file .* is not an effect: \[1\]"),
        (written('\n{"name": "L0H1"}\n'), "Line 4 of the file"),
    ],
)
def test_files_that_cannot_be_continued(make, says, tmp_path):
    with pytest.raises(BadValue, match=says) as error:
        ch.effects(model(), ids(), edits=[ch.edits.ablate()], to=make(tmp_path))
    assert error.value.rule.endswith((".", "}")) and error.value.hint.endswith(".")


def test_progress(capsys):
    ch.effects(model(), ids(), progress=True)
    assert "6/6" in capsys.readouterr().err


def test_it_prints_a_table():
    rows = (
        Effect("L0H0", 0.1, 0.2, 0, 0),
        Effect("L0H1", -0.5, -0.1, 0, 1),
        Effect("L1H0", 0.1, 0.3, 1, 0),
        Effect("pair", 0.0, 0.0),
    )
    found = Effects("loss", 2.5, rows).labelled({(0, 1): "previous token"})
    assert str(found).splitlines() == [
        "loss is 2.5000 unedited; edited minus unedited:",
        "",
        "           exact    estimate",
        "L0H1     -0.5000     -0.1000 ? previous token",
        "L0H0     +0.1000     +0.2000",
        "L1H0     +0.1000     +0.3000 ?",
        "pair     +0.0000     +0.0000",
        "",
        "Estimates and exact effects: rank correlation 0.949.",
        "? 2 of 4 estimates are not to be trusted: of the wrong sign, or off by",
        "  more than a factor of 2.",
    ]
    assert found.table(2).splitlines()[5] == "... and 2 smaller ones"
    assert found.as_dict()["effects"][1]["label"] == "previous token"
    assert Effects("loss", 1.0, rows[:1]).correlation is None
    with_nan = Effects("loss", 1.0, (*rows, Effect("hot", float("nan"), None)))
    assert [effect.name for effect in with_nan.largest()[:2]] == ["hot", "L0H1"]


@pytest.mark.outside
def test_it_is_drawn():
    pytest.importorskip("matplotlib")
    found = ch.effects(model(), ids())
    figure = ch.views.plot.effects(found)
    assert [ax.get_ylabel() for ax in figure.axes[:2]] == ["layer", "estimate from gradients"]
    assert len(ch.views.plot.effects(ch.effects(model(), ids(), exact=False)).axes) == 2
    with pytest.raises(BadValue, match="These 1 effects cannot be drawn"):
        ch.views.plot.effects(Effects("loss", 1.0, (Effect("pair", 0.0, None),)))


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (lambda: ch.effects(3, ids()), BadType, "effects got an int"),
        (lambda: ch.effects(model(), "text"), BadType, "got a str for inputs"),
        (lambda: ch.effects(model(), ids(), "accuracy"), BadValue, "metric='accuracy'"),
        (lambda: ch.effects(model(), ids(), lambda out: out), BadValue, "returned .* numbers"),
        (lambda: ch.effects(model(), ids(), edits=["ablate"]), BadType, "effects got"),
        (lambda: ch.effects(model(), ids(), edits=2 * [ch.edits.ablate()]), BadValue, "unique"),
        (lambda: ch.effects(model(), ids(), edits=[]), BadValue, "0 edits"),
        (lambda: ch.effects(model(), ids(), edits=3), BadType, "effects got an int"),
        (lambda: ch.effects(model(), ids(), at_once="x"), BadType, "at_once='x'"),
        (lambda: ch.effects(model(), ids(), at_once=0), BadValue, "at_once=0"),
        (
            lambda: ch.effects(nn.Linear(2, 2), torch.ones(1, 2), torch.sum),
            BadValue,
            "The Linear made no attention call through clearhead",
        ),
        (lambda: ch.effects(nn.Linear(2, 2), torch.ones(1, 2)), BadType, "have no ids"),
        (
            lambda: ch.effects(model(), ids(), lambda out: out.sum().to(torch.complex64)),
            BadValue,
            "returned torch.complex64 numbers[^!]*one real number[^!]*take the real part",
        ),
        (
            lambda: ch.effects(nn.Embedding(9, 2), torch.ones(1, 2).long()),
            BadValue,
            "The Embedding made no attention call through clearhead",
        ),
        (lambda: ch.logit_difference("a", 1), BadType, "right='a'"),
        (lambda: ch.logit_difference(1, 2)(torch.ones(3, 3)), BadValue, "logits of the next"),
        (lambda: ch.logit_difference(torch.ones(2), 1), BadType, "right=tensor"),
        (lambda: ch.logit_difference(-1, 5), BadValue, "right=-1 and wrong=5"),
        (lambda: ch.logit_difference(5, 5), BadValue, "right=5 and wrong=5"),
        (
            lambda: ch.logit_difference(torch.tensor([1, 2]), torch.tensor([2, 2])),
            BadValue,
            "right",
        ),
        (lambda: ch.logit_difference(torch.tensor([1, 2]), torch.tensor([3, 3, 3])), BadValue, "r"),
        (lambda: ch.logit_difference(1, 9)(torch.ones(2, 3, 9)), BadValue, "(2, 3, 9)"),
        (
            lambda: ch.logit_difference(torch.tensor([1, 2]), 3)(torch.ones(3, 3, 9)),
            BadValue,
            r"\(3, 3, 9\)",
        ),
        (lambda: ch.logit_difference(1, 2, at=3)(torch.ones(2, 3, 9)), BadValue, "Position 3"),
    ],
)
def test_errors_have_three_parts(wrong, kind, says):
    with pytest.raises(kind, match=says) as error:
        wrong()
    assert error.value.rule.endswith((".", "}")) and error.value.hint.endswith(".")

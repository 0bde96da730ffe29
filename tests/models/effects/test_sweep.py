"""One edit at each layer, head and position: `effects(..., over=)`."""

from functools import partial

import pytest
import torch

import clearhead as ch
from clearhead.core.errors import BadValue
from tests.models.effects.test_effects import ids, loss, model

path = partial(ch.edits.path, of="query")
run = {"estimate": False, "progress": False}


def recording(net, tokens, **keywords):
    with torch.no_grad(), ch.watch(net, stats=[], **keywords) as found:
        net(tokens)
    return found


def test_each_layer_and_position():
    net, tokens = model(), ids(B=1)
    clean = recording(net, ids(B=1).flip(1), outputs=True)
    axes = ("layers", "positions")
    found = ch.effects(net, tokens, edits=ch.edits.patch(clean), over=axes, progress=False)
    plain = loss(net, tokens)
    for layer in (0, 1):
        for position in range(7):
            edit = ch.edits.patch(clean, layers=[layer], positions=[position])
            right = loss(net, tokens, [edit]) - plain
            assert found.grid()[layer, position] == pytest.approx(right, abs=1e-6)
    assert found.axes == ("layer", "position") and found.grid().shape == (2, 7)
    assert found.effects[8].name == "layer 1 position 1"
    estimates = found.grid("estimate")
    assert not estimates.isnan().any() and found.correlation > 0.5


@pytest.mark.parametrize(
    ("edit", "over", "names"),
    [
        (ch.edits.ablate(heads=[-1], positions=[3, -1]), ["positions"],
         ["position 3", "position -1"]),
        (ch.edits.ablate(layers=[1], positions=[2]), ["heads"], ["head 0", "head 1", "head 2"]),
        (ch.edits.scale(0.5, heads=[2]), ["layers", "heads"], ["L0H2", "L1H2"]),
        (ch.edits.ablate(layers=["*.0.*"], heads=[1]), ["heads", "layers", "positions"],
         [f"L0H1 position {p}" for p in range(7)]),
    ],
)  # fmt: skip
def test_an_axis_that_the_edit_restricts(edit, over, names):
    net = model()
    found = ch.effects(net, ids(), edits=edit, over=over, **run)
    assert [e.name for e in found] == names
    assert len(found.grid().shape) == len(found.axes)
    assert "positions" not in over or not found.grid().numel() or found.effects[0].exact


@pytest.mark.outside
@pytest.mark.parametrize("of", ["key", "output"])
def test_positions_of_padded_texts_and_key_heads(of):
    from tests.hf.test_models import build

    net = build("llama", "AutoModelForCausalLM")
    net.set_attn_implementation("clearhead")
    tokens = torch.randint(3, 97, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask}
    inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), ch.watch(net, stats=[], inputs=True, outputs=True) as other:
        net(**{**inputs, "input_ids": tokens.flip(0)})
    edit = ch.edits.patch(other, of=of, layers=[1])
    axes = ("heads", "positions")
    metric = ch.logit_difference(5, 7)
    found = ch.effects(net, inputs, metric, edit, over=axes, **run)
    heads = 2 if of == "key" else 4
    assert found.axes == ("layer", "head", "position")
    assert found.grid()[1].shape == (heads, 7)
    alone = ch.edits.patch(other, of=of, layers=[1], heads=[1], positions=[6], batch=range(1, 2))
    assert ch.effects(net, inputs, metric, [alone], **run).effects[0].exact == pytest.approx(
        float(found.grid()[1, 1, 6]), abs=1e-6
    )  # the other text ends before position 6


def test_a_sweep_is_resumed(tmp_path):
    net, tokens, file = model(), ids(B=1), tmp_path / "effects.jsonl"
    calls = 0

    def metric(output):
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return output[:, -1, 3].mean()

    sweep = {"edits": ch.edits.ablate(), "over": ("layers", "positions"), "to": file, "at_once": 1}
    with pytest.raises(KeyboardInterrupt):
        ch.effects(net, tokens, metric, **sweep, **run)
    assert len(file.read_text().splitlines()) == 1 + 4  # the first call measures the unedited run


@pytest.mark.outside
def test_it_is_drawn_with_words():
    pytest.importorskip("matplotlib")
    found = ch.effects(model(), ids(B=1), over=("layers", "positions"), **run)
    words = "a b c d e f g".split()
    (axes, *_) = ch.views.plot.effects(found, tokens=words).axes
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("layer", "position")
    assert [label.get_text() for label in axes.get_xticklabels()] == words
    with pytest.raises(BadValue, match="got 3 tokens"):
        ch.views.plot.effects(found, tokens=words[:3])
    whole = ch.effects(model(), ids(B=1), over=("layers", "heads", "positions"), **run)
    with pytest.raises(BadValue, match="cannot be drawn"):
        ch.views.plot.effects(whole)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"over": ["rows"]}, "over=\\['rows'\\]"),
        ({"over": "layers"}, "over='layers'"),
        ({"over": []}, "over=\\[\\]"),
        ({"over": ["heads"], "edits": [ch.edits.ablate()]}, "several edits and over"),
        ({"edits": ch.edits.ablate(layers=[7])}, "selects no layer"),
        ({"edits": ch.edits.ablate(positions=[50])}, r"\[50\]\) names positions[^!]*0 to 6\."),
        ({"edits": [ch.edits.scale(2.0, layers=[1], positions=[-8])]}, "names positions"),
        (
            {"edits": ch.edits.ablate(positions=[3, 50]), "over": ["positions"]},
            r"positions=\[50\]\) names positions",
        ),
        ({"edits": path(ch.edits.ablate(heads=[0], positions=[7]), (1, 0))}, "names positions"),
        ({"over": ["receivers"]}, "over=\\['receivers'\\]"),
        ({"edits": path(ch.edits.ablate(), None)}, "receiver=None"),
        ({"edits": path(ch.edits.ablate(), [(1, 0), (1, 1)])}, r"receiver=\[\(1, 0\), \(1, 1\)\]"),
        ({"edits": path(ch.edits.ablate(), (1, 0)), "over": ["heads"]}, "the sender ablate"),
        ({"edits": path(ch.edits.ablate(layers=[1]), None), "over": ["receivers"]}, "no sender"),
        ({"edits": {"one": path(ch.edits.ablate(), (1, 0))}}, "the sender ablate"),
    ],
)
def test_errors_have_three_parts(wrong, says):
    with pytest.raises(BadValue, match=says) as error:
        ch.effects(model(), ids(), **wrong)
    assert error.value.rule.endswith(".") and error.value.hint.endswith(".")

"""A file of effects is continued for the same question alone, and whatever changed is measured."""

import copy
import functools
import json

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.core.errors import BadValue
from clearhead.demo.model import Config, Decoder
from clearhead.models.effects.digest import Undigested, digest


def model():
    torch.manual_seed(0)
    made = Decoder(Config(words=13, d=12, layers=2, heads=3, context=16)).eval()
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(2.0)
    return made


def ids():
    return torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(2))


def runs_of(net, call):
    """What a call returns, and how often the model ran."""
    runs = []
    hook = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: runs.append(1) if module is net else None
    )
    try:
        return call(), len(runs)
    finally:
        hook.remove()


def total(out):
    return out[:, -1, 3].sum()


def test_equal_effects_are_read_and_the_two_largest_repeated(tmp_path):
    net, file = model(), tmp_path / "effects.jsonl"

    def call():
        return ch.effects(net, ids(), total, at_once=1, estimate=False, to=file)

    (first, many), (again, few) = runs_of(net, call), runs_of(net, call)
    assert (many, few) == (1 + 6, 1 + 2) and first == again
    lines = file.read_text().splitlines()
    assert len(lines) == 1 + 6
    file.write_text("\n".join(lines[:4]) + "\n" + lines[4][:9])  # killed while it wrote
    third, some = runs_of(net, call)
    assert third == first and some == 1 + 2 + 3


def test_an_effect_that_is_no_longer_the_same_refuses_the_file(tmp_path):
    """A metric of the same name whose unedited number is the same."""
    net, file = model(), tmp_path / "effects.jsonl"
    with torch.no_grad():
        unedited = float(total(net(ids())))

    def call(factor):
        def change(out):
            return factor * (total(out) - unedited)

        return ch.effects(net, ids(), change, at_once=1, estimate=False, to=file)

    first, text = call(2.0), file.read_text()
    assert call(2.0) == first
    with pytest.raises(BadValue, match=r"the metric with 'L\dH\d' was .*, and is "):
        call(3.0)
    assert file.read_text() == text


def test_a_line_counts_for_equal_edits_alone(tmp_path):
    net, file = model(), tmp_path / "effects.jsonl"

    def call(**edits):
        return ch.effects(net, ids(), total, edits, at_once=1, estimate=False, to=file)

    keep = torch.ones(7, 7, dtype=torch.bool).tril()
    keep[5, 2] = False
    edits = [
        ch.edits.scale(0.5, layers=[0]), ch.edits.scale(0.25, layers=[0]),
        ch.edits.scale(0.5, layers=[1]), ch.edits.knock_out(ch.prefix(1)),
        ch.edits.knock_out(ch.prefix(2)), ch.edits.keep_only(ch.dense(keep=keep)),
        ch.edits.keep_only(ch.dense(keep=keep.tril(-1) | torch.eye(7, dtype=torch.bool))),
    ]  # fmt: skip
    for edit in edits:
        (alone,) = ch.effects(net, ids(), total, {"it": edit}, estimate=False)
        (found,), runs = runs_of(net, lambda edit=edit: call(it=edit))
        assert found.exact == pytest.approx(alone.exact, abs=1e-6) and runs == 2
    assert runs_of(net, lambda: call(it=edits[0]))[1] == 2  # repeated


class Doubles(ch.edits.scale):
    """An edit of the user, whose code may change."""

    def edit_output(self, out, problem, inputs, site):
        return out * 2


class WithMore(nn.Module):
    """A model with code, an attribute, a buffer and a setting of its own."""

    def __init__(self):
        super().__init__()
        self.net, self.config, self.factor = model(), {"scale": 1.0}, 1.0
        self.register_buffer("shift", torch.zeros(()), persistent=False)

    def forward(self, input_ids, cut=None):
        return self.net(input_ids) * self.factor * self.config["scale"] + self.shift


def test_what_cannot_be_compared_is_measured_anew(tmp_path):
    file = tmp_path / "effects.jsonl"
    cases = [
        (model(), ids(), {"it": Doubles(1.0, layers=[0])}, "the edits 'it': a Doubles"),
        (WithMore().eval(), {"input_ids": ids(), "cut": total},
         {"it": ch.edits.scale(0.5, layers=[0])}, "the inputs: a function"),
    ]  # fmt: skip
    for net, inputs, edits, what in cases:
        file.unlink(missing_ok=True)
        for _ in range(2):
            says = f"does not read '.*effects.jsonl', for {what}, which cannot be compared"
            with pytest.warns(UserWarning, match=says):
                _, count = runs_of(
                    net,
                    lambda net=net, inputs=inputs, edits=edits: ch.effects(
                        net, inputs, total, edits, at_once=1, estimate=False, to=file
                    ),
                )
            assert count == 2
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["edits"] for line in lines[1:]] == [None, None]


@pytest.mark.parametrize(
    "change",
    [
        lambda net, inputs: net.config.update(scale=2.0),
        lambda net, inputs: setattr(net, "factor", 3.0),
        lambda net, inputs: net.shift.add_(1.0),
        lambda net, inputs: net.net.register_forward_hook(lambda module, args, out: out * 5.0),
        lambda net, inputs: inputs["input_ids"].add_(1).remainder_(13),
        lambda net, inputs: inputs.update(cut=4),
        lambda net, inputs: next(net.net.parameters()).data[12].add_(1.0),
    ],
)
def test_a_changed_model_or_input_is_another_question(change, tmp_path):
    net, inputs, file = WithMore().eval(), {"input_ids": ids(), "cut": 3}, tmp_path / "file"

    def call():
        return ch.effects(net, inputs, total, at_once=1, estimate=False, to=file)

    call()
    assert runs_of(net, call)[1] == 3
    change(net, inputs)
    with pytest.raises(BadValue, match="has other effects"):
        call()


def test_a_block_of_edits_around_the_call_is_another_question(tmp_path):
    net, file = model(), tmp_path / "file"

    def call(**more):
        zero = lambda out: out.sum() * 0  # noqa: E731
        return ch.effects(net, ids(), zero, at_once=1, estimate=False, **more)

    call(to=file)
    with ch.intervene(net, [ch.edits.ablate(layers=[1], heads=[2])]):
        with pytest.raises(BadValue, match="has other effects: around was"):
            call(to=file)


def test_a_file_of_something_else_is_refused(tmp_path):
    file = tmp_path / "notes.txt"
    for text in ("a note\n", "[1, 2]\n", '{"model": "Decoder"}\n'):
        file.write_text(text)
        with pytest.raises(BadValue, match="its first line is"):
            ch.effects(model(), ids(), total, estimate=False, to=file)
        assert file.read_text() == text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (3, 4), (3, 3.0), (0.0, -0.0), ("a", b"a"), (True, 1), ((1, 2), [1, 2]),
        ([[1], 2], [[1, 2]]),
        ({"a": 1}, {"a": 2}), (slice(1, 2), slice(1, 3)), (range(3), range(4)),
        (torch.zeros(2), torch.zeros(1, 2)), (torch.zeros(2), torch.zeros(2).double()),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])), (ch.window(3, 0), ch.window(4, 0)),
        (ch.causal & ch.prefix(3), ch.causal | ch.prefix(3)), (torch.float16, torch.bfloat16),
    ],
)  # fmt: skip
def test_digests_differ_with_the_content(one, other):
    assert digest(one) == digest(copy.deepcopy(one)) != digest(other)


@pytest.mark.parametrize(
    "value",
    [total, lambda: 3, object(), Doubles(1.0), {1, 2}, iter([]), torch.empty(2, device="meta")],
)
def test_what_is_not_known_completely_has_no_digest(value):
    with pytest.raises(Undigested):
        digest([value])


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (lambda: functools.partial(torch.sum, dim=None), "sum"),
        (lambda: functools.partial(lambda n, out: n * out[:, -1].sum(), 3), "<lambda>"),
        (lambda: WithMore(), "WithMore"),
    ],
)
def test_the_name_of_a_metric_has_no_address_and_no_numbers(metric, name, tmp_path):
    net, file = model(), tmp_path / "effects.jsonl"

    def call():
        with torch.no_grad():
            counted = metric()
        if isinstance(counted, nn.Module):
            counted.forward = torch.sum
        return ch.effects(net, ids(), counted, at_once=1, estimate=False, to=file)

    first, (again, count) = call(), runs_of(net, call)
    assert count == 3 and first == again and first.metric == name

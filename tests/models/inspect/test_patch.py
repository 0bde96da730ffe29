"""Queries, keys, values and outputs of another run, against attention by hand."""

import pytest
import torch

import clearhead as ch
from clearhead.core.errors import BadValue
from tests.models.inspect.test_intervene import (
    CAUSAL,
    END,
    START,
    B,
    D,
    G,
    H,
    Model,
    Tk,
    Tq,
    by_hand,
    few,
    tensors,
)

PLACES = [
    {},
    {"heads": [1, -1]},
    {"positions": [START + 2, -1]},
    {"heads": [0, 2], "positions": [START + 1], "batch": range(1, 2)},
]


def recorded(seed=9, dtype=torch.float64, runs=1, **keywords):
    """Another run: other queries, keys and values."""
    model = Model(mask=END)
    with ch.watch(model, stats=[], inputs=True, **keywords) as recording:
        for run in range(runs):
            model(*tensors(dtype, seed + run))
    return recording


def patched(x, other, heads=None, positions=None, batch=None):
    """x with the other's vectors; the last positions of queries and keys are the same."""
    result, size = x.clone(), x.shape[2]
    first = Tk - size
    columns = [p - first if p >= 0 else p + size for p in positions or range(first, Tk)]
    for b in batch or range(B):
        for h in heads or range(x.shape[1]):
            result[b, h, columns] = other[b, h, columns]
    return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("of", ["query", "key", "value"])
def test_inputs_by_hand(of, place, dtype):
    mine, others = tensors(dtype), tensors(dtype, 9)
    at = ["query", "key", "value"].index(of)
    inputs = [*mine]
    inputs[at] = patched(mine[at], others[at], **place)
    weights, values = by_hand(*inputs, CAUSAL)
    model = Model(mask=END)
    edit = ch.edits.patch(recorded(dtype=dtype), of=of, layers=[1], **place)
    with ch.intervene(model, [edit]) as done, ch.watch(model, exact_rows=range(Tq)) as seen:
        plain, out = model(*mine)
    close = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 0, "atol": 3e-5}
    torch.testing.assert_close(out.double(), weights @ values, **close)
    torch.testing.assert_close(seen[1].exact_rows.double(), weights, **close)
    assert plain.equal(model(*mine)[0]) and done.times(0) == 1


def test_a_recording_holds_what_attention_receives_after_edits():
    model, (q, k, v) = Model(mask=END), tensors()
    other = recorded()
    with ch.watch(model, inputs=True, heads=[4, 1]) as seen:
        with ch.intervene(model, [ch.edits.patch(other, of="key", heads=[2], layers=[1])]):
            model(q, k, v)
    assert seen[0].query.equal(q[:, [4, 1]]) and seen[0].key.equal(k) and seen[0].value.equal(v)
    assert seen[1].key[:, 2].equal(other[1].key[:, 2]) and seen[1].key[:, :2].equal(k[:, :2])
    k.zero_()  # as a cache of fixed size writes to its memory
    assert bool(seen[0].key.any())


def test_a_frozen_call_is_recorded_with_its_own_queries():
    """Though the problem that has its weights has none."""
    model, (q, k, v) = Model(mask=END), tensors()
    with ch.watch(model, exact_rows=range(Tq)) as other:
        model(*tensors(seed=9))
    with ch.watch(model, inputs=True) as seen, ch.intervene(model, [ch.edits.freeze(other)]):
        model(q, k, v)
    assert seen[1].query.equal(q)


def test_patched_queries_are_divided_by_a_temperature():
    q, k, v = tensors()
    weights, values = by_hand(tensors(seed=9)[0] / 2, k, v, CAUSAL)
    model = Model(mask=END)
    edits = [ch.edits.temperature(2.0), ch.edits.patch(recorded(), of="query")]
    for listed in (edits, edits[::-1]):
        with ch.intervene(model, listed):
            torch.testing.assert_close(model(q, k, v)[1], weights @ values)
    with ch.intervene(model, edits[:1], must_apply=False):
        with pytest.raises(BadValue, match="inside that of temperature"):
            ch.intervene(model, edits[1:]).__enter__()


def test_gradients_reach_the_run_and_the_recording():
    model = Model(1, mask=END)

    def forward(q, k, v, q2, k2, v2):
        with ch.watch(model, stats=[], inputs=True) as other:
            model(q2, k2, v2)
        edits = [
            ch.edits.patch(other, of="query", heads=[1]),
            ch.edits.patch(other, of="key", heads=[2], positions=[1, START]),
            ch.edits.patch(other, of="value", heads=[0, 2], positions=[2]),
        ]
        with ch.intervene(model, edits):
            return model(q, k, v)[0]

    inputs = [x.requires_grad_() for seed in (0, 9) for x in few(seed)]
    assert torch.autograd.gradcheck(forward, inputs, fast_mode=True)
    mine = [x.detach() for x in inputs[:3]]  # only the recording has gradients
    assert torch.autograd.gradcheck(lambda *x: forward(*mine, *x), inputs[3:], fast_mode=True)


def test_keys_at_named_positions_come_from_a_shorter_call():
    """As in generation, where later calls read more keys than the prompt had."""
    model, (q, k, v) = Model(mask=END), tensors()
    other = tensors(seed=9)
    with ch.watch(model, stats=[], inputs=True) as prompt:
        model(other[0][:, :, :3], other[1][:, :, :5], other[2][:, :, :5])
    edit = ch.edits.patch(prompt, of="key", positions=[0, 4])
    right = k.clone()
    right[:, :, [0, 4]] = other[1][:, :, [0, 4]]
    weights, values = by_hand(q, right, v, CAUSAL)
    with ch.intervene(model, [edit]):
        torch.testing.assert_close(model(q, k, v)[1], weights @ values)
    for wrong, message in (({"positions": [0, 5]}, r"keys \[5\], where"), ({}, r"\(Tk, D\) = \(5")):
        with pytest.raises(BadValue, match=message):
            run(ch.edits.patch(prompt, of="key", **wrong))


def run(edit):
    with ch.intervene(model := Model(mask=END), [edit]):
        return model(*tensors())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: ch.edits.patch(recorded(), of="keys"), "of='keys'"),
        (lambda: run(ch.edits.patch(recorded(), of="output")), "outputs are replaced by outputs"),
        (lambda: run(ch.edits.patch(recorded(), of="query", heads=[H])), "6 query heads"),
        (
            lambda: run(ch.edits.patch(recorded(), of="key", heads=[5])),
            r"3 key heads, numbered from 0, each for 2 query heads; query head 5 reads key head 2",
        ),
        (
            lambda: run(ch.edits.patch(recorded(heads=[0]), of="query", heads=[0, 1])),
            r"selects heads \[1\]",
        ),
    ],
)
def test_errors_have_three_parts(wrong, says):
    with pytest.raises(BadValue, match=says) as error:
        wrong()
    assert error.value.rule.endswith(".") and error.value.hint.endswith(".")


def test_inputs_are_written_to_files_and_saved(tmp_path):
    from safetensors.torch import load_file

    recording = recorded()
    again = ch.load(recording.save(tmp_path / "saved"))
    assert again[1].key.equal(recording[1].key)
    written = recorded(to=tmp_path / "folder").written
    assert load_file(written[1])["value"].equal(recording[1].value)
    assert recording[0].key.shape == (B, G, Tk, D)

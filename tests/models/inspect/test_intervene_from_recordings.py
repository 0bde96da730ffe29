"""Edits that take what another run gave: freeze, patch, and the mean of a reference set."""

import pytest
import torch

import clearhead as ch
from clearhead.core.errors import BadType, BadValue
from tests.models.inspect.test_intervene import (
    CAUSAL,
    END,
    PLACES,
    START,
    Asked,
    D,
    Dv,
    G,
    H,
    Model,
    Tk,
    Tq,
    by_hand,
    chosen,
    few,
    tensors,
)


def recorded(seed=9, dtype=torch.float64, rows=None, outputs=False, runs=1, heads=None, **keywords):
    """Another run: other queries, keys and values."""
    model = Model(mask=END, **keywords)
    with ch.watch(model, exact_rows=rows, outputs=outputs, heads=heads) as seen:
        for run in range(runs):
            model(*tensors(dtype, seed + run))
    return seen


def run(edit, dtype=torch.float64, model=None, watched=True):
    model = model or Model(mask=END)
    with ch.intervene(model, [edit]) as done:
        if not watched:
            return model(*tensors(dtype))[1], None
        with ch.watch(model, exact_rows=range(Tq), stats=["entropy"]) as seen:
            out = model(*tensors(dtype))[1]
    assert done.times(0)
    return out, seen[1].exact_rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_frozen_weights_by_hand(place, dtype):
    q, k, v = tensors(dtype, 9)
    frozen, _ = by_hand(q, k, v, CAUSAL)
    q, k, v = tensors(dtype)
    weights, values = by_hand(q, k, v, CAUSAL)
    weights = torch.where(chosen(**place), frozen, weights)
    recording = recorded(dtype=dtype, rows=range(Tq))
    if "batch" in place:  # the recording is of as many texts as are edited
        recording.calls[1].statistics["exact_rows"] = recording[1].exact_rows[1:]
    found, shown = run(ch.edits.freeze(recording, layers=[1], **place), dtype)
    close = (
        {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 3e-5, "atol": 3e-5}
    )
    torch.testing.assert_close(found.double(), weights @ values, **close)
    torch.testing.assert_close(shown.double(), weights, **close)


@pytest.mark.parametrize("frozen_first", [True, False])
def test_outputs_change_after_weights_in_whatever_order_edits_are_listed(frozen_first):
    q, k, v = tensors(seed=9)
    frozen, _ = by_hand(q, k, v, CAUSAL)
    _, values = by_hand(*tensors(), CAUSAL)
    right = torch.where(chosen([1, 3]), -2.0, 1.0) * (frozen @ values)
    edits = [ch.edits.freeze(recorded(rows=range(Tq))), ch.edits.scale(-2.0, heads=[1, 3])]
    model = Model(mask=END)
    with ch.intervene(model, edits if frozen_first else edits[::-1]) as done:
        found = model(*tensors())[1]
    torch.testing.assert_close(found, right)
    assert [done.times(number) for number in (0, 1)] == [2, 2]


def test_some_rows_and_heads_are_recorded_in_an_order_of_their_own():
    q, k, v = tensors(seed=9)
    frozen, _ = by_hand(q, k, v, CAUSAL)
    q, k, v = tensors()
    weights, values = by_hand(q, k, v, CAUSAL)
    where = chosen([4, 1], [START + 5, START + 2])
    weights = torch.where(where, frozen, weights)
    recording = recorded(rows=[5, 2, -1], heads=[4, 0, 1])
    assert recording[0].queries == (5, 2, Tq - 1)
    edit = ch.edits.freeze(recording, layers=[1], heads=[1, 4], positions=[START + 2, START + 5])
    found, shown = run(edit)
    torch.testing.assert_close(found, weights @ values)
    torch.testing.assert_close(shown, weights)


@pytest.mark.parametrize(
    "keywords",
    [
        {"sinks": torch.linspace(-1, 1, H).double()},
        {"bias": torch.linspace(-2, 2, Tk).double()},
        {"softcap": 2.0},
    ],
    ids=["sinks", "bias", "softcap"],
)
def test_frozen_weights_are_seen_as_they_are(keywords):
    """Under a sink too, which takes what they leave over; by look and by matrix too."""

    class Looks(Asked):
        def forward(self, q, k, v):
            seen = ch.look(q, k, v, stats=[ch.exact_rows(range(Tq))], **self.keywords)
            return seen.out, seen.exact_rows, ch.matrix(q, k, **self.keywords).to_dense()

    q, k, v = tensors(seed=9)
    frozen, _ = by_hand(q, k, v, CAUSAL, **keywords)
    q, k, v = tensors()
    weights, values = by_hand(q, k, v, CAUSAL, **keywords)
    weights = torch.where(chosen([2, 3]), frozen, weights)
    edit = ch.edits.freeze(recorded(rows=range(Tq), **keywords), layers=[1], heads=[2, 3])
    model = Model(mask=END, **keywords)
    found, shown = run(edit, model=model)
    torch.testing.assert_close(found, weights @ values)
    torch.testing.assert_close(shown, weights)
    model.layers[1] = Looks(model.layers[1].keywords)
    (out, rows, matrix), _ = run(edit, model=model, watched=False)
    torch.testing.assert_close(out, weights @ values)
    torch.testing.assert_close(rows, weights)
    torch.testing.assert_close(matrix, weights)


def test_matrix_outside_of_the_model_is_unedited():
    """Also after a call that was edited."""
    model, (q, k, v) = Model(mask=END), tensors()
    with ch.intervene(model, [ch.edits.freeze(recorded(rows=range(Tq)))]):
        model(q, k, v)
        found = ch.matrix(q, k, mask=END).to_dense()
    assert torch.equal(found, ch.matrix(q, k, mask=END).to_dense())


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_patched_outputs_by_hand(place):
    q, k, v = tensors(seed=9)
    weights, values = by_hand(q, k, v, CAUSAL)
    given = weights @ values
    q, k, v = tensors()
    weights, values = by_hand(q, k, v, CAUSAL)
    right = torch.where(chosen(**place), given, weights @ values)
    recording = recorded(outputs=True)
    if "batch" in place:
        object.__setattr__(recording.calls[1], "output", recording[1].output[1:])
    found, _ = run(ch.edits.patch(recording, layers=[1], **place))
    torch.testing.assert_close(found, right)


def test_call_n_takes_call_n_and_a_single_one_serves_all():
    model, edit = Model(mask=END), ch.edits.patch(recorded(outputs=True, runs=2), layers=[1])
    one = ch.edits.patch(recorded(outputs=True), layers=[1])
    for made, other in ((edit, 10), (one, 9)):
        with ch.intervene(model, [made]) as done:
            first, second = model(*tensors())[1], model(*tensors())[1]
        assert done.times(0) == 2
        torch.testing.assert_close(first, model(*tensors(seed=9))[1])
        torch.testing.assert_close(second, model(*tensors(seed=other))[1])
    with pytest.raises(BadValue, match="has 2 calls of the layer, and call n reads call n"):
        with ch.intervene(model, [edit]):
            for _ in range(3):
                model(*tensors())


def test_outputs_are_those_of_the_edited_attention():
    model = Model(mask=END)
    with ch.watch(model, outputs=True, heads=[1]) as seen:
        with ch.intervene(model, [ch.edits.scale(2.0, layers=[0])]):
            out, _ = model(*tensors())
    assert seen[0].output.equal(out[:, [1]]) and "output" not in seen.scalars()


def test_the_mean_of_a_reference_set():
    blind = END & ~ch.lengths(queries=1)  # the first query sees nothing, and does not count
    model = Model(mask=blind)
    with ch.watch(model, outputs=True) as seen:
        outs = torch.cat([model(*tensors(seed=seed))[1] for seed in (3, 4)])
    mean = outs[:, :, 1:].mean((0, 2))
    edit = ch.edits.ablate(by="mean", over=seen, layers=[1], heads=[4, 0])
    found, _ = run(edit)
    plain = Model(mask=END)(*tensors())[1]
    assert repr(edit) == "ablate(by='mean', over=<4 calls>, layers=[1], heads=[4, 0])"
    assert repr(ch.edits.mean_ablate(seen, layers=[1], heads=[4, 0])) == repr(edit)
    assert repr(ch.edits.zero_ablate(heads=[2])) == "ablate(heads=[2])"
    torch.testing.assert_close(found[:, [0, 4]], mean[[0, 4]][:, None].expand(2, 2, Tq, Dv))
    assert found[:, [1, 2, 3, 5]].equal(plain[:, [1, 2, 3, 5]])


def test_gradients_flow_through_frozen_weights_and_patched_outputs():
    with ch.watch(other := Model(mask=END), exact_rows=range(3), outputs=True) as recording:
        other(*few(seed=9))
    for edit in (
        ch.edits.freeze(recording, heads=[0, 3], positions=[START + 1]),
        ch.edits.patch(recording, heads=[2]),
        ch.edits.ablate(by="mean", over=recording, heads=[1]),
    ):

        def forward(q, k, v, edit=edit):
            model = Model(1, mask=END)
            with ch.intervene(model, [edit]):
                return model(q, k, v)[0]

        assert torch.autograd.gradcheck(
            forward, [x.requires_grad_() for x in few()], fast_mode=True
        )


@pytest.mark.outside
def test_a_model_with_its_own_weights_frozen_and_outputs_patched_is_the_same():
    from tests.hf.test_models import build, ids

    model = build("llama", "AutoModelForCausalLM")
    model.set_attn_implementation("clearhead")
    with torch.no_grad():
        with ch.watch(model, exact_rows=range(11), outputs=True) as seen:
            plain = model(ids()).logits
        for edit in (ch.edits.freeze(seen), ch.edits.patch(seen)):
            with ch.intervene(model, [edit]) as done:
                torch.testing.assert_close(model(ids()).logits, plain, rtol=1e-4, atol=1e-4)
            assert done.times(0) == 2


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (lambda: ch.edits.patch("run"), BadType, "recording= got a str"),
        (lambda: ch.edits.freeze(ch.Recording()), BadValue, "holds no calls"),
        (lambda: ch.edits.ablate(by="mean"), BadValue, "over=None"),
        (lambda: ch.edits.ablate(over=recorded(outputs=True)), BadValue, "by='zero' and over="),
        (lambda: run(ch.edits.patch(recorded())), BadValue, "without outputs"),
        (lambda: run(ch.edits.freeze(recorded())), BadValue, "without rows"),
        (lambda: run(ch.edits.freeze(recorded(rows=[1]), positions=[4])), BadValue, "were not"),
        (lambda: run(ch.edits.patch(recorded(outputs=True, heads=[1]))), BadValue, "selects heads"),
        (lambda: run(ch.edits.patch(other(Tq=5))), BadValue, r"\(Tq, Dv\) = \(5, 4\)"),
        (lambda: run(ch.edits.freeze(other(Tk=9))), BadValue, r"\(Tq, Tk\) = \(1, 9\)"),
        (lambda: run(ch.edits.freeze(other(H=3))), BadValue, r"\(H,\) = \(3,\)"),
        (lambda: run(ch.edits.patch(other(B=3))), BadValue, "a recording of 3 texts in layer 0"),
        (lambda: run(ch.edits.patch(other(layers=1))), BadValue, "recording has layers 0"),
    ],
)  # fmt: skip
def test_errors_have_three_parts(wrong, kind, says):
    with pytest.raises(kind, match=says) as error:
        wrong()
    assert error.value.rule.endswith(".") and error.value.hint.endswith(".")


def other(B=2, H=H, Tq=Tq, Tk=Tk, layers=2):
    """A recording of other sizes."""
    model = Model(layers)
    q, k, v = torch.randn(B, H, Tq, D), torch.randn(B, G, Tk, D), torch.randn(B, G, Tk, Dv)
    with ch.watch(model, exact_rows=[0], outputs=True) as seen:
        model(q, k, v)
    return seen


def test_a_recording_in_files_is_not_in_memory(tmp_path):
    model = Model(mask=END)
    with ch.watch(model, outputs=True, exact_rows=[-1], to=tmp_path / "run") as seen:
        model(*tensors())
    from safetensors.torch import load_file

    assert load_file(seen.written[0])["output"].shape == (2, H, Tq, Dv)
    assert f'"queries": [{Tq - 1}]' in (tmp_path / "run" / "index.jsonl").read_text()
    with pytest.raises(BadValue, match="keeps its calls in files"):
        ch.edits.patch(seen)

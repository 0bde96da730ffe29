"""Looking at one call and at a whole model: same bits with and without, and exact numbers."""

import copy
import functools
import json
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import clearhead as ch
from clearhead.core.engines.choice import ENGINES
from clearhead.core.errors import BadType, BadValue
from clearhead.core.problem.check import Options, make_problem
from tests.fresh_process import run_program
from tests.pairs import pairs
from tests.problems import PROBLEMS

EVERYTHING = ["lse", "max", "entropy", "effective", "received", ch.pooled(3, 4)]


def index_of(folder):
    return [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    "name, dtype, engine", pairs(PROBLEMS, DTYPES, [engine.name for engine in ENGINES]), ids=str
)
def test_looking_does_not_change_a_bit(name, dtype, engine):
    case = PROBLEMS[name](dtype, 0)
    problem, _ = make_problem(*case.tensors, Options(**case.keywords))
    reasons = next(e for e in ENGINES if e.name == engine).why_not(problem)
    if reasons:
        pytest.skip(f"{engine}: {'; '.join(reasons)}")
    unwatched = ch.attention(*case.tensors, **case.keywords, engine=engine)
    stats = [*EVERYTHING, *([ch.topk(2)] if problem.Tk > 1 else [])]
    recording = ch.look(*case.tensors, **case.keywords, engine=engine, stats=stats)
    assert torch.equal(unwatched, recording.out)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(ch.nn.TransformerBlock(12, 3, causal=True) for _ in range(2)))


def test_a_call_with_fewer_keys_than_topk_and_a_span_name():
    """A generation begins with few keys; one call with so few is refused by `look` and `matrix`."""
    layer, groups = ch.nn.SimpleAttention(), ch.mass({"title": (1, 9)})
    x = torch.randn(2, 3, 7)
    with ch.watch(layer, stats=[ch.topk(10**12), groups]) as seen:
        layer(x)
    weights = (x @ x.mT).softmax(-1)
    assert seen[0].topk.keys.shape == (2, 1, 3, 3)  # and not 10**12 wide
    torch.testing.assert_close(seen[0].topk.weights[:, 0], weights.topk(3).values)
    with ch.watch(layer, stats=[ch.topk(8), "entropy"]) as none:
        layer(x[:, :0])
    assert none[0].topk.keys.shape == (2, 1, 0, 0) and none.scalars() == {}
    torch.testing.assert_close(seen[0].mass["title"][:, 0], weights[..., 1:].sum(-1))
    for statistic in (ch.topk(4), groups):
        with pytest.raises(BadValue, match="there are 3 keys"):
            ch.look(x, x, x, stats=[statistic])
    with pytest.raises(BadValue, match="there are 3 keys"):
        ch.matrix(x, x).topk(4)


def test_every_layer_is_recorded_by_name_and_nothing_changes():
    layers, x = model().eval(), torch.randn(2, 7, 12)
    with torch.no_grad():
        unwatched = layers(x)
        with ch.watch(layers, stats=["entropy", "received", ch.topk(2)]) as recording:
            watched = layers(x)
    assert torch.equal(unwatched, watched)
    assert [call.module for call in recording] == ["0.attention", "1.attention"]
    assert [call.layer for call in recording] == [0, 1]
    trace = layers[0].attention.explain(layers[0].norm_1(x))
    weights = trace["weights"].detach()
    torch.testing.assert_close(recording["0.attention"].received, weights.sum(2))
    torch.testing.assert_close(
        recording[0].entropy, torch.special.entr(weights).sum(-1), rtol=1e-5, atol=1e-6
    )
    assert recording[0].topk.keys[..., 0].equal(weights.argmax(-1))


def test_only_the_layers_heads_and_rows_asked_for():
    layers, x = model(), torch.randn(2, 7, 12)
    with ch.watch(layers, stats=["max"], layers=["1.*"], heads=[2, 0], exact_rows=[6]) as recording:
        layers(x)
    (call,) = recording
    assert call.module == "1.attention" and call.layer == 1
    assert call.max.shape == (2, 2, 7) and call.exact_rows.shape == (2, 2, 1, 7)
    with ch.watch(layers, layers=[0]) as recording:
        layers(x)
        layers(x)
    assert [call.layer for call in recording] == [0, 0]


def test_statistics_go_to_disk_and_not_to_memory(tmp_path):
    layers, x = model(), torch.randn(2, 7, 12)
    with ch.watch(layers, stats=["entropy", ch.topk(2)]) as kept:
        layers(x)
    with ch.watch(
        layers, stats=["entropy", ch.topk(2)], to=tmp_path / "deep" / "calls"
    ) as recording:
        layers(x)
    assert len(recording) == 0
    with pytest.raises(BadValue, match=r"writes calls to files(?s:.*)00000.safetensors"):
        recording[0]
    index = index_of(tmp_path / "deep" / "calls")
    assert [call["module"] for call in index] == ["0.attention", "1.attention"]
    for told, call in zip(index, kept, strict=True):
        tensors = load_file(tmp_path / "deep" / "calls" / told["file"])
        assert tensors["entropy"].equal(call.entropy.detach())
        assert tensors["topk.keys"].equal(call.topk.keys)


def test_gauges_in_training_and_a_regulariser_in_one_line():
    layers, x = model().train(), torch.randn(2, 7, 12)
    with ch.watch(layers, stats=["entropy", "max"]) as recording:
        layers(x)
        scalars = recording.scalars()
        sum(call.entropy.mean() for call in recording).backward()
    assert scalars["0.attention.entropy"] == pytest.approx(
        float(recording[0].entropy.detach().mean())
    )
    assert scalars["1.attention.max"] == pytest.approx(float(recording[1].max.detach().max()))
    assert layers[0].attention.W_query.weight.grad.abs().sum() > 0
    recording.clear()
    assert len(recording) == 0


def test_a_folder_says_what_it_holds(tmp_path):
    layers = model()
    wanted = ["entropy", ch.topk(2), ch.mass({"before": ch.window(before=1)})]
    with (
        torch.no_grad(),
        ch.watch(layers, stats=wanted, heads=[2, 0], exact_rows=[4, -1], to=tmp_path),
    ):
        layers(torch.randn(2, 7, 12))
    line = index_of(tmp_path)[1]
    assert line["module"] == "1.attention" and line["heads"] == [2, 0]
    assert line["stats"] == [
        "entropy", "topk(n=2)", f"mass(groups={{'before': {ch.window(before=1)!r}}})",
        "exact_rows(queries=(4, -1))",
    ]  # fmt: skip
    held = load_file(tmp_path / line["file"])
    assert held["entropy"].shape == (2, 2, 7) and held["exact_rows"].shape == (2, 2, 2, 7)


def test_a_recording_prints_and_slices():
    layers = model()
    with ch.watch(layers) as recording:
        assert repr(recording) == "0 calls recorded"
        for _ in range(10):
            layers(torch.randn(2, 7, 12))
    lines = repr(recording).splitlines()
    assert lines[0] == "20 calls recorded" and len(lines) == 13 and lines[11] == "  ..."
    assert repr(recording[0]) == f"{lines[1].strip()}: lse, entropy, max"
    assert lines[1].startswith("  layer 0  0.attention  B=2 H=3") and "layer 1" in lines[-1]
    assert [call.layer for call in recording[-2:]] == [0, 1]


def test_watching_ends_with_the_block_even_when_the_model_fails():
    layers, x = model(), torch.randn(2, 7, 12)
    with pytest.raises(BadValue), ch.watch(layers) as recording:
        layers(torch.randn(2, 7, 13))
    layers(x)
    assert len(recording) == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in layers.modules())


def test_only_modules_that_may_call_attention_have_hooks():
    """With statistics of values also the others, for one of them is the output projection."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = ch.nn.SelfAttention(8, 8)
            self.replaced, self.hooked, self.plain = (torch.nn.Linear(8, 8) for _ in range(3))
            self.replaced.forward = lambda x: ch.attention(x, x, x)
            self.hooked.register_forward_hook(lambda module, args, out: ch.attention(out, out, out))

        def forward(self, x):
            return self.plain(self.hooked(self.replaced(self.attention(x))))

    model = Model()

    def count(module):
        return len(module._forward_hooks) + len(module._forward_pre_hooks)

    with ch.watch(model, stats=["entropy"]) as recording:
        assert count(model.plain) == 0 < count(model.attention)
        model(torch.randn(5, 8))
    assert [call.module for call in recording] == ["attention", "replaced", "hooked"]
    with pytest.warns(UserWarning, match="did not run"):
        with ch.watch(model, stats=[ch.topk(2, by="value")]):
            assert count(model.plain) == 2


def test_torch_modules_that_may_call_attention_later_have_hooks(monkeypatch):
    """A container may get children, and the class may have another `forward`."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.filled, self.replaced = torch.nn.Sequential(), torch.nn.Identity()

        def forward(self, x):
            return self.replaced(self.filled(x))

    class Attention(torch.nn.Module):
        def forward(self, x):
            return ch.attention(x, x, x)

    monkeypatch.setattr(torch.nn.Identity, "forward", Attention.forward)
    model = Model()
    with ch.watch(model) as recording:
        model.filled.append(Attention())
        model(torch.randn(5, 8))
    assert [call.module for call in recording] == ["filled", "replaced"]


def test_a_patch_of_a_library_that_keeps_its_name_has_hooks(monkeypatch):
    """`functools.wraps` copies the module of the function."""

    def wrapper(run):
        return functools.wraps(run)(lambda self, x: run(self, ch.attention(x, x, x)))

    monkeypatch.setattr(torch.nn.Identity, "forward", wrapper(torch.nn.Identity.forward))
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    with ch.watch(model) as recording:
        model(torch.randn(5, 8))
    assert [call.module for call in recording] == ["0", "1"]


def test_a_failing_layer_does_not_leave_its_name_behind():
    layers, x = model(), torch.randn(2, 7, 12)
    with ch.watch(layers) as recording:
        with pytest.raises(BadValue):
            layers(torch.randn(2, 7, 13))
        layers(x)
    assert [call.module for call in recording] == ["0.attention", "1.attention"]


@pytest.mark.parametrize("call, said", [
    (lambda m: ch.watch(7), "watch got an int.\n  Rule: watch records the modules of a model.\n"
     "  Hint: pass a torch.nn.Module; for one attention call, use look(...)."),
    (lambda m: ch.watch(m, heads=[3]), "head 3 was requested.\n  Rule: this layer has 3 query "
     "heads, numbered from 0.\n  Hint: pass heads from 0 to 2."),
    (lambda m: ch.watch(m, to="/dev/null/x"), "The folder '/dev/null/x' cannot be created: Not a "
     "directory.\n  Rule: statistics are written to a folder.\n  Hint: pass another folder as "
     "to=."),
])  # fmt: skip
def test_wrong_calls(call, said):
    layers = model()
    with pytest.raises((BadType, BadValue)) as error, call(layers):
        layers(torch.randn(2, 7, 12))
    assert str(error.value) == said
    assert not any(m._forward_hooks for m in layers.modules())


def test_what_would_see_nothing_or_lose_something_is_refused(tmp_path):
    model = ch.nn.TransformerBlock(16, heads=2, causal=True)
    with (
        pytest.raises(BadType, match=r"layers=\['attention'\]"),
        ch.watch(model, layers="attention"),
    ):
        pass
    with pytest.raises(BadValue, match="no module"), ch.watch(model, layers=["atention"]):
        pass
    with ch.watch(model, to=tmp_path):
        model(torch.randn(1, 3, 16))
    with pytest.raises(BadValue, match="holds an earlier recording"), ch.watch(model, to=tmp_path):
        pass


def test_a_module_that_asks_several_times_is_several_layers():
    """As in models that share weights between layers. Layers keep their numbers from run to run,
    also where a run begins in the middle, as when an encoder runs once and a decoder many times."""
    layer, tail = ch.nn.MultiHeadAttention(8, 2), ch.nn.MultiHeadAttention(8, 2)
    shared = torch.nn.Sequential(layer, layer, tail)
    x = torch.randn(2, 4, 8)
    with torch.no_grad(), ch.watch(shared) as recording:
        shared(x)
        shared(x)
        tail(x)
    assert [call.layer for call in recording] == [0, 1, 2, 0, 1, 2, 2]
    scalars = recording.scalars()
    for number in (0, 1):
        ours = [call.entropy for call in recording if call.layer == number]
        assert scalars[f"0:{number}.entropy"] == pytest.approx(float(torch.cat(ours).mean()))
    ours = [call.max for call in recording if call.layer == 2]
    assert scalars["2.max"] == pytest.approx(max(float(x.max()) for x in ours))


def test_gauges_leave_out_queries_that_see_nothing():
    layer, x = ch.nn.MultiHeadAttention(8, 2), torch.randn(2, 5, 8)
    mask = ch.lengths(queries=[5, 2])
    stats = ["entropy", "effective", ch.topk(1), ch.mass({"max": ch.prefix(1)}), "received"]
    with torch.no_grad(), ch.watch(layer, stats=stats, heads=[1]) as recording:
        layer(x, mask=mask)
    sees = (torch.arange(5) < torch.tensor([5, 2]).unsqueeze(1)).unsqueeze(1)
    scalars, call = recording.scalars(), recording[0]
    assert scalars["0.entropy"] == pytest.approx(float(call.entropy[sees].mean()))
    assert scalars["0.topk"] == pytest.approx(float(call.topk.weights[..., 0][sees].mean()))
    assert scalars["0.mass.max"] == pytest.approx(float(call.mass["max"][sees].mean()))
    assert scalars["0.received"] == pytest.approx(float(call.received.mean()))


def test_another_thread_may_run_the_model_while_hooks_are_added():
    """torch adds a hook before it notes that the hook takes keywords."""
    model, x = torch.nn.Sequential(ch.nn.MultiHeadAttention(8, 2)), torch.randn(2, 4, 8)
    with ch.watch(model) as recording:
        for module in model.modules():
            module._forward_pre_hooks_with_kwargs.clear()
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
        for module in model.modules():
            module._forward_pre_hooks_with_kwargs.update(
                dict.fromkeys(module._forward_pre_hooks, True)
            )
        model(x)
    assert len(recording) == 1


def test_only_calls_of_the_model_itself_are_recorded():
    """Not what stands outside of it, nor what another thread asks of the same model."""
    model = torch.nn.Sequential(ch.nn.MultiHeadAttention(8, 2), ch.nn.MultiHeadAttention(8, 2))
    x, going = torch.randn(2, 4, 8), threading.Event()

    def other():
        while not going.is_set():
            model(x)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        for _ in range(20):
            with torch.no_grad(), ch.watch(model[1]) as part, ch.watch(model) as whole:
                model(x)
                ch.attention(x, x, x)
            assert [(c.layer, c.module) for c in whole] == [(0, "0"), (1, "1")]
            assert [(c.layer, c.module) for c in part] == [(0, "")]
    finally:
        going.set()
        thread.join()


@pytest.mark.parametrize(
    "given",
    [{"heads": 3}, {"heads": ["a"]}, {"heads": [1.5]}, {"heads": [True]}, {"exact_rows": 3}],
)
def test_what_is_no_list_of_numbers(given):
    with pytest.raises(BadType, match=next(iter(given))), ch.watch(model(), **given):
        raise AssertionError("the block was entered")


def test_two_watchers_do_not_share_a_folder(tmp_path):
    model, x = ch.nn.MultiHeadAttention(8, 2), torch.randn(1, 3, 8)
    with ch.watch(model, to=tmp_path):
        with (
            pytest.raises(BadValue, match="holds an earlier recording"),
            ch.watch(model, to=tmp_path),
        ):
            pass
        model(x)
    assert len(index_of(tmp_path)) == 1
    with pytest.warns(UserWarning, match="did not run"), ch.watch(model, to=tmp_path / "nothing"):
        pass
    assert not (tmp_path / "nothing" / "index.jsonl").exists()


FULL = """
import resource, signal, sys, torch, clearhead as ch
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model, x = ch.nn.MultiHeadAttention(8, 2), torch.randn(1, 3, 8)
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
try:
    with ch.watch(model, to=sys.argv[1]):
        for _ in range(100):
            model(x)
except Exception as error:
    print(str(error)[:200])  # a traceback would exceed the limit
"""


def test_what_was_written_says_where(tmp_path):
    layer = ch.nn.SelfAttention(8, 8)
    with ch.watch(layer, to=tmp_path / "seen") as recording:
        layer(torch.randn(3, 8))
        layer(torch.randn(5, 8))
    assert repr(recording) == f"2 files in {tmp_path / 'seen'}, one per call"
    assert [x.name for x in recording.written] == ["00000.safetensors", "00001.safetensors"]


@pytest.mark.outside
def test_an_index_is_whole_where_the_disk_is_full(tmp_path):
    done = run_program(FULL, tmp_path)
    assert "The recording could not be written" in done.stdout, done.stderr
    calls = index_of(tmp_path)
    assert 0 < len(calls) < 100 and all((tmp_path / call["file"]).exists() for call in calls)


def test_a_model_is_saved_and_copied_while_it_is_watched(tmp_path):
    model, x = ch.nn.MultiHeadAttention(8, 2), torch.randn(1, 3, 8)
    with ch.watch(model) as recording:
        torch.save(model, tmp_path / "model.pt")
        copied = copy.deepcopy(model)
        model(x)
        assert torch.equal(copied(x), model(x)) and len(recording) == 2
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(again(x), model(x))


def test_recomputation_in_backward_is_not_a_new_call():
    from torch.utils.checkpoint import checkpoint

    layer, x = ch.nn.MultiHeadAttention(8, 2), torch.randn(1, 5, 8, requires_grad=True)
    with ch.watch(layer) as recording:
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert len(recording) == 1


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_layer_of_a_model_that_recomputes_can_be_watched(which):
    from torch.utils.checkpoint import checkpoint

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(ch.nn.TransformerBlock(8, 2) for _ in range(3))

        def forward(self, x, again):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if again else block(x)
            return x

    model, x = Model(), torch.randn(1, 5, 8)
    grads = []
    for again in (False, True):
        model.zero_grad()
        with ch.watch(model, layers=[which]) as recording:
            (model(x, again).sum() + recording[0].entropy.sum()).backward()
        assert len(recording) == 1 and recording[0].layer == which
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


class Recomputed(torch.nn.Module):
    """Two blocks, each in a checkpoint that records no gradients in the forward pass."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(ch.nn.TransformerBlock(8, 2) for _ in range(2))

    def forward(self, x, reentrant):
        from torch.utils.checkpoint import checkpoint

        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if reentrant else block(x)
        return x


@pytest.mark.parametrize("mask", [None, ch.causal])
@pytest.mark.parametrize("shape", [(7, 8), (3, 7, 8), (2, 3, 7, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_recomputes_after_the_block_what_it_recorded_in_it(dtype, shape, mask):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(torch.nn.Module):
        def forward(self, x):
            return checkpoint(self.attend, x, use_reentrant=False)

        def attend(self, x):
            return ch.attention(x.sin(), x.cos(), x, mask=mask)

    model, seed = Checkpointed(), torch.Generator().manual_seed(0)
    x = torch.randn(shape, dtype=dtype, generator=seed, requires_grad=True)
    with ch.watch(model):
        out = model(x)
    (found,) = torch.autograd.grad(out.square().sum(), x)
    (right,) = torch.autograd.grad(model.attend(x).square().sum(), x)
    assert torch.equal(found, right)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_statistics_of_a_reentrant_checkpoint_have_no_gradient_and_say_so():
    model, x = Recomputed(), torch.randn(1, 5, 8, requires_grad=True)
    stats = ["entropy", ch.topk(2), ch.mass({"first": ch.prefix(1)})]
    recordings = []
    for reentrant in (False, True):
        with ch.watch(model, stats=stats, outputs=True) as recording:
            model(x, reentrant).sum().backward()  # the backward pass itself is as ever
        recordings.append(recording)
    assert len(recordings[1]) == 2  # and what it recomputes is not recorded again
    for call, again in zip(*recordings, strict=True):
        torch.testing.assert_close(again.entropy, call.entropy)
        assert again.topk.keys.equal(call.topk.keys)
        for y in (again.entropy, again.topk.weights, again.mass["first"], again.output):
            with pytest.raises(ch.BadValue, match=f"A loss uses .* in {call.module}(.|\n)*reentr"):
                y.sum().backward()
    assert recordings[1].scalars().keys() == recordings[0].scalars().keys()
    with torch.no_grad(), ch.watch(model, stats=stats) as recording:
        model(x, True)
    assert not recording[0].entropy.requires_grad


@pytest.mark.outside  # torch compiles for seconds
def test_a_part_that_is_compiled_is_named():
    x = torch.randn(1, 5, 8)
    compilers = {
        "module": lambda m: m.compile(backend="eager"),
        "forward": lambda m: setattr(m, "forward", torch.compile(m.forward, backend="eager")),
    }
    for compile_part in compilers.values():
        model = torch.nn.Sequential(ch.nn.SelfAttention(8, 8), ch.nn.SelfAttention(8, 8))
        compile_part(model[1])
        with pytest.warns(UserWarning, match="^1 is compiled: attention calls in its graph"):
            with ch.watch(model) as recording, torch.no_grad():
                model(x)
        assert [call.module for call in recording] == ["0"]
        with pytest.raises(ch.BadValue, match="The Sequential is compiled: 1"):
            with ch.intervene(model, [ch.edits.scale(2.0)]):
                raise AssertionError("the block was entered")


def test_open_groups_stand_where_the_parts_of_a_mask_agree():
    class Asks(torch.nn.Module):
        def forward(self, q, mask):
            return ch.attention(q, q, q, mask=mask)

    q, starts = torch.randn(2, 1, 6, 4), torch.tensor([1, 0])
    group = ch.mass({"near": ch.window(before=1, after=0)})
    for align in (starts, "start", 0):
        masses = []
        for mask in (
            ch.Causal(align=align),
            ch.Causal(align=align) & ch.window(before=9, align=align),
        ):
            with ch.watch(model := Asks(), stats=[group]) as recording:
                model(q, mask)
            masses.append(recording[0].mass["near"])
        torch.testing.assert_close(*masses)
        fixed = ch.mass({"near": ch.window(before=1, after=0, align=align)})
        want = ch.look(q, q, q, mask=ch.Causal(align=align), stats=[fixed]).mass["near"]
        torch.testing.assert_close(masses[0], want)


def test_gauges_tell_groups_and_largest_weights():
    layer = ch.nn.MultiHeadAttention(8, 2)
    with ch.watch(layer, stats=[ch.mass({"sink": ch.prefix(1)}), ch.topk(2)]) as recording:
        layer(torch.randn(1, 4, 8))
    scalars, found = recording.scalars(), recording[0]
    assert scalars["0.mass.sink"] == pytest.approx(found.mass["sink"].mean().item())
    assert scalars["0.topk"] == pytest.approx(found.topk.weights[..., 0].mean().item())


@pytest.mark.outside  # torch compiles for seconds
def test_watching_what_never_asks_is_said():
    layer, x = ch.nn.MultiHeadAttention(8, 2), torch.randn(1, 4, 8)
    for model in (torch.nn.Linear(8, 8), torch.compile(layer, backend="aot_eager")):
        with (
            pytest.raises(ch.BadValue, match=r"made no attention call(.|\n)*is not compiled"),
            ch.watch(model),
            torch.no_grad(),
        ):
            model(x)
    for layers, named in (([7], 7), ([0, 7], 7), ([0, ""], None)):
        if named is None:
            with ch.watch(layer, layers=layers) as recording:
                layer(x)
            assert len(recording) == 1
            continue
        with pytest.raises(BadValue) as refused, ch.watch(layer, layers=layers):
            layer(x)
        assert refused.value.gave == f"watch got layers={layers}; {named} called no attention."
        assert refused.value.rule.endswith("has only layer 0.")
    whole = torch.nn.Sequential(torch.nn.Linear(8, 8), layer)
    with pytest.warns(UserWarning, match="the Sequential did not run"):
        with ch.watch(whole) as recording:
            whole[0](x)
    assert len(recording) == 0
    with ch.watch(whole, layers=(i for i in [np.int64(0)])) as recording:
        whole(x)
    assert len(recording) == 1
    for wrong, kind in ((1, ch.BadType), ([-1], ch.BadValue), ([True], ch.BadType)):
        with pytest.raises(kind, match="layers"), ch.watch(layer, layers=wrong):
            raise AssertionError("the block was entered")
    with pytest.raises(ch.BadValue, match="and 1 were recorded"):
        recording[1]
    with pytest.raises(AttributeError, match="use a call"):
        _ = recording.entropy


def test_what_vmap_holds_is_not_watched():
    layer = ch.nn.SelfAttention(4, 4)
    with pytest.raises(ch.BadValue, match=r"watch recorded a call inside torch\.func\.vmap"):
        with ch.watch(layer, stats=["entropy"]):
            torch.func.vmap(layer)(torch.randn(3, 5, 4))


def test_gauges_of_heads_find_the_one_that_is_dead():
    """Head 1 looks at the first token whatever it is asked."""
    q, k = torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4, 3)
    q[:, 1], k[:, 1, 0] = 10.0, 10.0

    class Two(torch.nn.Module):
        def forward(self, q, k):
            return ch.attention(q, k, k)

    model = Two()
    with ch.watch(model, stats=["entropy", ch.mass({"sink": ch.prefix(1)})]) as recording:
        model(q, k)
    frame = recording.to_pandas().set_index("head")
    assert frame["mass.sink"].tolist() == pytest.approx([0.25, 1.0])
    assert frame.loc[1, "entropy"] == pytest.approx(0.0, abs=1e-6)
    assert recording.scalars()["0.mass.sink"] == pytest.approx(0.625)
    with ch.watch(model, stats=["entropy"], heads=[1]) as recording:
        model(q, k)
    assert recording.to_pandas()["head"].tolist() == [1]
    assert recording.scalars().keys() == {"0.entropy"}


def test_two_that_watch_may_leave_in_any_order():
    model, x = ch.nn.MultiHeadAttention(8, 2), torch.randn(1, 5, 8)
    first, second = ch.watch(model), ch.watch(model, stats=["lse"])
    one, other = first.__enter__(), second.__enter__()
    model(x)
    first.__exit__(None, None, None)
    model(x)
    second.__exit__(None, None, None)
    model(x)
    assert (len(one), len(other)) == (1, 2)


def test_after_an_interrupt_layers_have_their_numbers_again():
    class Interrupted(torch.nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    attend = [ch.nn.MultiHeadAttention(8, 2) for _ in range(2)]
    model, x = torch.nn.Sequential(attend[0], Interrupted(), attend[1]), torch.randn(1, 5, 8)
    with ch.watch(model) as recording:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model[1] = torch.nn.Identity()
        model(x)
        model(x)
    assert [call.layer for call in recording] == [0, 0, 1, 0, 1]


def test_a_model_without_numbers_has_shapes_and_no_statistics():
    model, x = ch.nn.TransformerBlock(24, 3).to("meta"), torch.empty(2, 9, 24, device="meta")
    with ch.watch(model, stats=[], outputs=True) as seen:
        model(x)
    assert seen[0].output.shape == (2, 3, 9, 8)
    with (
        pytest.raises(BadValue, match="a statistic got meta tensors"),
        ch.watch(model, stats=["entropy"]),
    ):
        model(x)

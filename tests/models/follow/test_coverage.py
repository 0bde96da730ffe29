"""A model that runs where attention cannot be seen, in part or as a whole, says so."""

import asyncio
import random
import threading
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead.core.errors import BadValue
from clearhead.models.follow.coverage import attends

D = 6


class Stack(nn.Module):
    """Layers of torch's attention, of which those in `wanted` return weights."""

    def __init__(self, n, wanted=()):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(D, 3, batch_first=True) for _ in range(n))
        self.wanted = set(wanted)

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = x + layer(x, x, x, need_weights=i in self.wanted)[0]
        return x


def said_by(run):
    """Return the texts of the warnings that `run` gives."""
    with warnings.catch_warnings(record=True) as said, torch.no_grad(), ch.compat.patched():
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in said]


def watched(model, *inputs, **options):
    with ch.watch(model, stats=["entropy"], **options) as seen:
        model(*inputs)
    return seen


def edited(model, x, edits, **options):
    with ch.intervene(model, edits, **options) as done:
        model(x)
    return done


@pytest.mark.parametrize("seed", range(8))
def test_layers_of_torch_that_return_weights_are_named(seed):
    draw = random.Random(seed)
    n = draw.randint(2, 5)
    wanted = sorted(draw.sample(range(n), draw.randint(1, n - 1)))
    model, x = Stack(n, wanted).eval(), torch.randn(1, 5, D)
    named = ", ".join(f"layers.{i}" for i in wanted) + " (MultiheadAttention), which"
    runs = {
        "watch": lambda: watched(model, x),
        "intervene": lambda: edited(model, x, [ch.edits.ablate()]),
        "effects": lambda: ch.effects(model, x, lambda out: out.sum((1, 2)), progress=False),
        "report": lambda: ch.report(model, x),
        "report_batch": lambda: ch.report_batch(model, x),
    }
    for verb, run in runs.items():
        (text,) = said_by(run)
        assert text.startswith(
            f"{verb.removesuffix('_batch')} leaves out {named} computed attention without"
        ), text
    model.wanted = set()
    for run in runs.values():
        assert said_by(run) == []


def test_attention_of_transformers_is_named_by_its_class_alone():
    """No name in the code of this class is one of attention."""
    from transformers import FastSpeech2ConformerConfig
    from transformers.models.fastspeech2_conformer import modeling_fastspeech2_conformer as file

    config = FastSpeech2ConformerConfig(hidden_size=D)
    sizes = {"num_attention_heads": 3, "attention_dropout_rate": 0.0}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = file.FastSpeech2ConformerAttention(config, sizes)
            self.clearhead = ch.nn.SelfAttention(D, D)

        def forward(self, x):
            return self.clearhead(self.own(x, pos_emb=torch.randn(1, 9, D))[0])

    (text,) = said_by(lambda: watched(Model().eval(), torch.randn(1, 5, D)))
    assert text.startswith("watch leaves out own (FastSpeech2ConformerAttention), which computed")


def test_only_modules_that_are_selected_are_named():
    model, x = Stack(3, [0, 2]).eval(), torch.randn(1, 5, D)
    for layers, named in (
        (["layers.1"], None),
        (["layers.[01]"], "layers.0 (M"),
        (["*"], "layers.0, layers.2 (M"),
        ([0], "layers.0, layers.2 (M"),  # which is layers.1
    ):
        said = said_by(lambda layers=layers: watched(model, x, layers=layers))
        assert len(said) == bool(named) and all(f"leaves out {named}" in text for text in said)
        edit = ch.edits.ablate(layers=layers)
        said = said_by(lambda edit=edit: edited(model, x, [edit]))
        shown = None if layers == [0] else named
        assert len(said) == bool(shown) and all(f"leaves out {shown}" in text for text in said)
        run = lambda e=edit: ch.effects(model, x, lambda o: o.sum((1, 2)), [e], progress=False)  # noqa: E731
        assert bool([text for text in said_by(run) if text.startswith("effects")]) == bool(named)
    done = []
    assert not said_by(lambda: done.append(edited(model, x, [ch.edits.ablate()], must_apply=False)))
    assert "without clearhead: layers.0, layers.2 (MultiheadAttention)" in repr(done[0])
    model = Stack(9, range(1, 9)).eval()
    assert "layers.4, 4 more (MultiheadAttention)" in said_by(lambda: watched(model, x))[0]


def test_torchs_transformers_are_covered_in_patched_and_refused_outside():
    """Their fused paths too, which bypass the modules of attention."""
    x = torch.randn(2, 5, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 11, batch_first=True)
    both = nn.Transformer(8, 2, 1, 2, 11, batch_first=True).eval()
    cases = [
        (layer.eval(), (x,), 1),
        (nn.TransformerEncoder(layer, 3).eval(), (x,), 3),
        (both, (x, x[:, :3]), 5),
    ]
    for model, inputs, calls in cases:
        seen = []
        assert said_by(lambda m=model, i=inputs, s=seen: s.append(watched(m, *i))) == []
        assert len(seen[0]) == calls
        with pytest.raises(BadValue, match="no attention call through clearhead"), torch.no_grad():
            watched(model, *inputs)
    part = both.decoder.layers[1]
    part._mha_block = lambda x, m, *_, **__: part.multihead_attn(x, m, m)[0]
    (text,) = said_by(lambda: watched(both, x, x[:, :3]))
    assert "leaves out decoder.layers.1.multihead_attn (MultiheadAttention)" in text


class Branches(nn.Module):
    """One branch does not run, one raises an error that is caught, and one is recomputed."""

    def __init__(self, reentrant):
        super().__init__()
        self.unused, self.fails, self.again = (nn.MultiheadAttention(D, 2) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        try:
            self.fails(x, x[..., :1], x)
        except (AssertionError, RuntimeError):
            pass
        run = lambda x: self.again(x, x, x, need_weights=False)[0]  # noqa: E731
        return checkpoint(run, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_modules_that_computed_nothing_elsewhere_are_not_named(reentrant):
    model, x = Branches(reentrant), torch.randn(5, 1, D, requires_grad=True)
    with ch.compat.patched():
        with ch.watch(model, stats=["entropy"]) as seen:
            model(x).sum().backward()
        with ch.intervene(model, [ch.edits.ablate()]):
            model(x).sum().backward()
    assert [call.module for call in seen] == ["again"]


class AttentionByHand(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class ImportedAttention(nn.Module):
    def forward(self, x):
        return scaled_dot_product_attention(x, x, x)


class LinearAttention(nn.Module):
    def forward(self, x):
        return x.relu() @ (x.relu().mT @ x)


class GatedAttention(nn.Module):
    def forward(self, x):
        return x.softmax(-1) * x


class Router(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        (AttentionByHand, True),
        (ImportedAttention, True),
        (nn.MultiheadAttention, True),
        (LinearAttention, False),
        (GatedAttention, False),
        (Router, False),
        (nn.Linear, False),
        (ch.nn.MultiHeadAttention, False),  # which always calls clearhead
    ],
)
def test_the_code_of_a_class_shows_if_it_computes_attention(kind, known):
    assert attends(kind) == known
    if kind.__module__ == __name__:
        model = nn.Sequential(ch.nn.SelfAttention(D, D), kind())
        said = said_by(lambda: watched(model, torch.randn(1, 5, D)))
        assert len(said) == known and all(f"out 1 ({kind.__name__})" in text for text in said)


def in_thread(run):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def in_task(run):
    asyncio.run(asyncio.to_thread(run))  # with the context of this thread


@pytest.mark.parametrize("elsewhere", [in_thread, in_task])
def test_a_model_that_ran_in_another_thread_is_refused(elsewhere):
    model, x = nn.Sequential(ch.nn.SelfAttention(D, D)), torch.randn(1, 5, D)
    for block in (ch.watch(model), ch.intervene(model, [ch.edits.ablate()])):
        with pytest.raises(BadValue, match="ran in another thread"), block:
            elsewhere(lambda: model(x))
    for block in (ch.watch(model), ch.intervene(model, [ch.edits.ablate()])):
        with block:
            elsewhere(lambda: model(x))
            model(x)


def test_a_model_that_did_not_run():
    model = nn.Sequential(nn.Linear(D, D), ch.nn.SelfAttention(D, D))
    with pytest.warns(UserWarning, match="recorded nothing: the Sequential did not run"):
        with ch.watch(model):
            pass
    with ch.watch(model) as seen:
        model[1](torch.randn(1, 5, D))  # a part that calls attention
    assert len(seen) == 1
    outer, x = nn.Sequential(Stack(1)), torch.randn(1, 5, D)
    with pytest.warns(UserWarning, match=r"leaves out 0\.layers\.0 \(Mul"), ch.watch(outer):
        outer[0](x)
    with pytest.raises(KeyError), ch.watch(model):  # the error says what happened
        raise KeyError


class CompiledForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = ch.nn.SelfAttention(D, D)

    @torch.compile(backend="eager")
    def forward(self, x):
        return self.attention(x)


@pytest.mark.outside  # torch compiles for seconds
@pytest.mark.parametrize("before", [True, False])
def test_a_function_that_is_compiled_around_the_model(before):
    model, x = nn.Sequential(ch.nn.SelfAttention(D, D)), torch.randn(1, 5, D)
    for verb in ("watch", "intervene"):
        run = torch.compile(lambda x: model(x) * 2, backend="eager")
        with torch.no_grad():
            if before:
                run(x)
            expected = pytest.raises(BadValue, match=r"compiled graphs|graph compiled before")
            if before and verb == "watch":
                expected = pytest.warns(UserWarning, match="or ran in a compiled graph")
            edits = [ch.edits.ablate()]
            with expected, ch.watch(model) if verb == "watch" else ch.intervene(model, edits):
                run(x)
        torch._dynamo.reset()


@pytest.mark.outside  # torch compiles for seconds
def test_a_class_with_a_compiled_forward_is_named():
    model, x = nn.Sequential(ch.nn.SelfAttention(D, D), CompiledForward()), torch.randn(1, 5, D)
    with torch.no_grad():
        model(x)
        with pytest.warns(UserWarning, match="^1 is compiled"), ch.watch(model) as seen:
            model(x)
        with pytest.raises(BadValue, match="is compiled: 1"):
            with ch.intervene(model, [ch.edits.ablate()]):
                raise AssertionError("the block was entered")
    assert [call.module for call in seen] == ["0"]


@pytest.fixture
def transformers():
    library = pytest.importorskip("transformers", reason="extra `hf` is not installed")
    ch.hf.register()
    return library


SIZES = dict(hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=17)


@pytest.mark.outside
@pytest.mark.parametrize("vision", ["eager", "sdpa", "clearhead"])
@pytest.mark.parametrize("patched", [False, True])
def test_parts_of_a_transformers_model_with_other_implementations(transformers, vision, patched):
    config = transformers.CLIPConfig(
        text_config=dict(**SIZES, vocab_size=31),
        vision_config=dict(**SIZES, image_size=6, patch_size=3),
        projection_dim=7,
    )
    own = {"text_config": "clearhead", "vision_config": vision}
    model = transformers.CLIPModel._from_config(config, attn_implementation=own).eval()
    inputs = dict(input_ids=torch.randint(31, (1, 5)), pixel_values=torch.randn(1, 3, 6, 6))
    left = vision == "eager" or (vision == "sdpa" and not patched)
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        with ch.compat.patched() if patched else nullcontext(), ch.watch(model) as seen:
            model(**inputs)
    names = ", ".join(f"vision_model.encoder.layers.{i}.self_attn" for i in range(2))
    assert [str(w.message).partition(", which")[0] for w in said] == (
        [f"watch leaves out {names} (CLIPAttention)"] if left else []
    )
    assert len(seen) == (2 if left else 4)


@pytest.mark.outside
def test_hybrids_are_not_named(transformers):
    """Their layers of convolution and linear attention compute no weights."""
    rest = dict(vocab_size=31, num_key_value_heads=1, intermediate_size=20)
    hybrids = [
        (transformers.Lfm2Config, dict(SIZES | rest, layer_types=["conv", "full_attention"])),
        (
            transformers.MiniMaxConfig,
            dict(SIZES | rest, layer_types=["linear_attention", "full_attention"])
            | dict(num_local_experts=2, head_dim=4, block_size=4),
        ),
        (
            transformers.Qwen3NextConfig,
            dict(SIZES | rest, layer_types=["linear_attention", "full_attention"])
            | dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, head_dim=4)
            | dict(shared_expert_intermediate_size=8, linear_num_value_heads=2)
            | dict(linear_num_key_heads=1, linear_key_head_dim=4, linear_value_head_dim=4),
        ),
    ]
    for kind, sizes in hybrids:
        model = transformers.AutoModelForCausalLM.from_config(
            kind(**sizes), attn_implementation="clearhead"
        ).eval()
        with torch.no_grad(), ch.watch(model) as seen:
            model(torch.randint(3, 31, (1, 5)), use_cache=False)
        assert len(seen) == 1, kind

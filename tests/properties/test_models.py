"""`intervene`, `watch` and `effects` of randomly drawn models: the numbers of attention computed by
hand, or one clear error.

`cases.py` draws a model, its inputs and how it runs, and `by_hand.py` computes what is right. Where
a case may be refused, `reasons` says for what. Rerun one:

    python -m tests.properties.test_models effects decoder 17
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch

from .by_hand import Calls, Edit, by_hand
from .cases import Case, draw
from .models import HEADS, KIND, KINDS, build

# ------------------------------------------------------------------------------- running a case


@contextmanager
def running(case: Case) -> Iterator[nn.Module]:
    """The model, as the case runs it."""
    model = build(case.model)
    with ExitStack() as undo:
        if case.checkpoints != "none":
            model.train()
            undo.callback(model.eval)
            model.activation_checkpointing_enable(
                {"use_reentrant": case.checkpoints == "reentrant"}
            )
            undo.callback(model.activation_checkpointing_disable)
        if case.compiled == "no":
            yield model
            return
        undo.callback(torch._dynamo.reset)
        backend, part = case.compiled.split()
        if part == "model":
            yield torch.compile(model, backend=backend)
        else:
            layer = next(x for x in model.modules() if isinstance(x, nn.ModuleList))[0]
            layer.compile(backend=backend)
            undo.callback(setattr, layer, "_compiled_call_impl", None)
            yield model


def computed_by_hand(
    case: Case, edits: Sequence[Edit] = (), other: Calls | None = None, text: int = 0
) -> tuple[Any, Calls]:
    """The model's output, and the calls of its layers; `other` are those of another text."""
    model, inputs = build(case.model), case.inputs(text)
    with by_hand(model, edits, other or {}, case.real, case.past) as calls:
        return model(**inputs), calls


@torch.no_grad()
def other_text(case: Case) -> tuple[Calls, list[ch.edits.Edit]]:
    """The calls of another text, and the edits of the case, which may hold a recording of it."""
    model = build(case.model)
    _, other = computed_by_hand(case, text=1)
    edits = []
    for edit in case.edits:
        recording = None
        if edit.what in ("patch", "freeze"):
            rows = range(other[edit.layers[0]].logits.shape[2])
            with ch.watch(model, layers=edit.layers, exact_rows=rows, outputs=True) as recording:
                model(**case.inputs(text=1))
        edits.append(edit.for_clearhead(recording))
    return other, edits


def gradients(case: Case, number: Tensor) -> Tensor:
    """Those of all weights of the model."""
    model = build(case.model)
    model.zero_grad()
    number.backward()
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in found])


def close(found: Tensor, right: Tensor) -> None:
    """Near each other, in units of the largest number."""
    largest = max(1.0, float(right.detach().abs().max()))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-4 * largest)


# ------------------------------------------------------------------------------------- the verbs


def intervene(case: Case) -> None:
    other, edits = other_text(case)
    with torch.set_grad_enabled(case.trains):
        right, calls = computed_by_hand(case, case.edits, other)
        inputs = case.inputs()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with running(case) as model, ch.intervene(model, edits):
                logits = model(**inputs).logits
                if case.trains:
                    found = gradients(case, logits.square().sum())
        close(logits, right.logits)
        idle = ["removed no visible edge" in str(warning.message) for warning in told]
        assert sum(idle) == len(edits_without_edges(case.edits, calls))
        if case.trains:
            close(found, gradients(case, right.logits.square().sum()))


def edits_without_edges(edits: Sequence[Edit], calls: Calls) -> list[Edit]:
    """Those that remove edges, of which none was visible after the edits before them."""
    found = []
    for n, edit in enumerate(edits):
        before = [call.visible(edits[:n]) for call in calls.values()]
        after = [call.visible(edits[: n + 1]) for call in calls.values()]
        removed = any((a & ~b).any() for a, b in zip(before, after, strict=True))
        if edit.what in ("knock out prefix", "keep window") and not removed:
            found.append(edit)
    return found


def watch(case: Case) -> None:
    other, edits = other_text(case)
    stats = ["entropy", "received", ch.topk(2), ch.mass({"first": ch.prefix(2)})]
    with torch.set_grad_enabled(case.trains):
        right, calls = computed_by_hand(case, case.edits, other)
        inputs = case.inputs()
        with ExitStack() as block:
            model = block.enter_context(running(case))
            if edits:
                block.enter_context(ch.intervene(model, edits))
            seen = block.enter_context(
                ch.watch(model, stats=stats, exact_rows=[0, -1], outputs=True)
            )
            logits = model(**inputs).logits
            if case.trains and seen:
                penalty = sum(call.entropy.square().mean() for call in seen)
                if reentrant := case.checkpoints == "reentrant":
                    with pytest.raises(ch.BadValue, match="use_reentrant=True"):
                        gradients(case, penalty)
                else:
                    found = gradients(case, penalty)
        close(logits, right.logits)
        if len(seen) < len(calls):
            raise LayersMissing
        for call, expected in zip(seen, calls.values(), strict=True):
            weights, keys, real = expected.weights, expected.keys, expected.real
            close(call.output, expected.out)
            close(call.entropy, entropy(weights))
            close(call.received, (weights * real[:, None, :, None]).sum(2))
            close(call.mass["first"], (weights * (keys < 2)[:, None, None]).sum(-1))
            close(call.topk.weights, weights.topk(2).values)
            columns = call.topk.keys - keys[:, :1, None, None]
            close(weights.gather(-1, columns.clamp(min=0)) * (columns >= 0), call.topk.weights)
            ends = real.int().argmax(1), real.cumsum(1).argmax(1)  # the first and the last query
            close(call.exact_rows, torch.stack([weights[range(case.batch), :, q] for q in ends], 2))
        if case.trains and not reentrant:
            penalty = sum(entropy(call.weights).square().mean() for call in calls.values())
            close(found, gradients(case, penalty))


class LayersMissing(Exception):
    """Not all layers were recorded, which takes a warning."""


def entropy(weights: Tensor) -> Tensor:
    return -(weights * weights.clamp(min=1e-30).log()).sum(-1)


def is_nowhere(edit: Edit, calls: Calls) -> bool:
    """Has no layer of the edit a query at its rows?"""
    of_all = replace(edit, heads=None, batch=None)
    own = [call for call in calls.values() if call.has(edit)]
    queries = [call.where(of_all)[:, 0, :, 0] & call.real for call in own]
    return bool(own) and not any(bool(at.any()) for at in queries)


def effects(case: Case) -> None:
    other, edits = other_text(case)
    groups = [[edit] for edit in case.edits]
    output, calls = computed_by_hand(case)
    if not groups:  # then clearhead ablates every head
        heads = [(layer, head) for layer in calls for head in range(HEADS)]
        groups = [[Edit("ablate", layers=(layer,), heads=(head,))] for layer, head in heads]
    inputs = case.inputs()
    if case.has_loss and any(is_nowhere(edit, calls) for edit in case.edits):
        with running(case) as model, pytest.raises(ch.BadValue, match="names positions"):
            ch.effects(model, inputs, case.measure, edits, estimate=False)
        return
    with running(case) as model:
        found = ch.effects(
            model,
            inputs,
            "loss" if case.metric == "loss" else case.measure,
            {f"edit {n}": edit for n, edit in enumerate(edits)} or None,
            estimate=case.checkpoints != "reentrant",
            at_once=case.at_once,
        )
    unedited = case.measure(output)
    assert found.baseline == pytest.approx(float(unedited), abs=1e-4)
    outs = [call.out for call in calls.values()]
    slopes = torch.autograd.grad(unedited, outs, allow_unused=True)
    for effect, group in zip(found, groups, strict=True):
        with torch.no_grad():
            edited = case.measure(computed_by_hand(case, group, other)[0])
            changes = [call.attend(group, other)[1] - call.out for call in calls.values()]
        assert effect.exact == pytest.approx(float(edited - unedited), abs=2e-4)
        if effect.estimate is None:
            continue
        pairs = zip(changes, slopes, strict=True)
        estimate = sum(
            float((change * slope).sum()) for change, slope in pairs if slope is not None
        )
        assert effect.estimate == pytest.approx(estimate, abs=2e-4, rel=1e-3)


VERBS = {"intervene": intervene, "watch": watch, "effects": effects}


# ------------------------------------------------------------------------------ right, or refused


def reasons(verb: str, case: Case) -> list[str]:
    """Parts of the errors and warnings that may refuse the case."""
    found = []
    if case.compiled != "no":
        found += ["is compiled", "no attention call"]
    if verb == "effects" and not case.has_loss:
        found += ["metric"]
    if case.edits:
        _, calls = computed_by_hand(case)
        for edit in case.edits:
            if not any(call.where(edit).any() for call in calls.values() if call.has(edit)):
                found += ["never applied"]
    return found


def is_right(verb: str, case: Case) -> bool:
    """True where the numbers are right, False where the case was refused for a reason it has;
    raises `AssertionError` for anything else."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            VERBS[verb](case)
            return True
        except ch.AttentionError as error:
            wrong: Exception = error
            said = [str(error)]
        except LayersMissing as error:
            wrong, said = error, [str(warning.message) for warning in told]
        except Exception as error:
            wrong, said = error, []
    if any(reason in text for reason in reasons(verb, case) for text in said):
        return False
    again = f"python -m tests.properties.test_models {verb} {case.kind} {case.seed}"
    again += f' "{case.compiled}"' * (case.compiled != "no")
    raise AssertionError(f"{case}; rerun it: {again}") from wrong


@pytest.mark.parametrize("model", KIND)
def test_by_hand_is_what_transformers_computes(model):
    """On the tokens that are not padding: eager attention gives these another mixture of values."""
    padding = "none" if KIND[model] == "vision" else "left"
    case = Case(0, model, batch=2, tokens=7, padding=padding)
    build(model).set_attn_implementation("eager")
    with torch.no_grad():
        eager = build(model)(**case.inputs()).logits
        found = computed_by_hand(case)[0].logits
    read = case.real if KIND[model] in ("decoder", "encoder") else ...
    torch.testing.assert_close(found[read], eager[read])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", VERBS)
def test_right_or_refused(verb, kind):
    answers = [is_right(verb, draw(seed, kind)) for seed in range(10)]
    assert sum(answers) > 6


@pytest.mark.parametrize(
    "kind, compiled", [("vision", "aot_eager model"), ("decoder", "eager layer")]
)
@pytest.mark.parametrize("verb", VERBS)
def test_compiled_models(verb, kind, compiled):
    is_right(verb, draw(0, kind, compiled))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", VERBS)
def test_fresh_seeds(verb, kind, fresh_seed):
    for seed in range(fresh_seed, fresh_seed + 200):
        is_right(verb, draw(seed, kind))
    for compiled in ("eager model", "eager layer", "aot_eager model", "aot_eager layer"):
        is_right(verb, draw(fresh_seed, kind, compiled))


if __name__ == "__main__":
    verb, kind, seed, *compiled = sys.argv[1:]
    case = draw(int(seed), kind, *compiled)
    print(case, "right" if is_right(verb, case) else "refused", sep="\n")

"""`supports` says of every architecture of the installed transformers what a model of it then does,
and those that run give the numbers of eager."""

import copy
import os

import pytest
import torch

import clearhead as ch
from clearhead.core.functional.ambient import listening
from clearhead.hf.inspect_model import calls_interface
from clearhead.hf.projections import output_projection, without_projection
from clearhead.models.follow.layers import Layers, module_hooks
from tests.hf.tiny_models import NotBuilt, build, numbers, tiny_model

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers", reason="extra `hf` is not installed")
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def outcome(config, inputs):
    """The output of a model on clearhead, None if it raises; how often it called clearhead; and
    whether a module ran that uses the attention interface."""
    calls, ran = [], []
    try:
        model = build(config, "clearhead")
        for module in model.modules():
            if calls_interface(type(module)):
                module.register_forward_pre_hook(lambda *_: ran.append(1))
        with torch.no_grad(), listening(lambda *_: calls.append(1)):
            return model(**inputs), len(calls), bool(ran)
    except (ch.AttentionError, KeyError):  # KeyError: from a table of the model's own
        return None, 0, bool(ran)


@pytest.fixture(scope="module", params=sorted(CONFIG_MAPPING))
def tiny(request):
    """What `tiny_model` returns for a kind, once for all tests of it."""
    ch.hf.register()
    try:
        return tiny_model(request.param)
    except NotBuilt as error:
        pytest.skip(str(error))


def test_the_answer_is_what_happens(tiny):
    config, inputs, want = tiny
    answer = ch.hf.supports(copy.deepcopy(config))
    output, calls, ran = outcome(config, inputs)
    if answer.supported is None:
        return
    if not answer:
        assert output is None or calls == 0, answer
        return
    assert output is not None and bool(calls) == ran, answer
    for a, b in zip(numbers(output), numbers(want), strict=True):
        if b.isfinite().all():
            assert (a - b).abs().max() <= 1e-3 * b.abs().max().clamp(min=1e-6), answer


def test_what_heads_write_is_found_or_named_as_unknown(tiny):
    config, inputs, _ = tiny
    if not ch.hf.supports(copy.deepcopy(config)):
        pytest.skip("not supported")
    model = build(config, "clearhead")
    if without_projection(model) is not None:
        pytest.skip("named as unknown")
    layers, running, expected = Layers(), [], {}

    def on_call(call):
        problem, _, out = call[:3]
        projection = output_projection(model, layers.next_call()[1], problem.H, problem.Dv)
        expected[projection.module] = projection, out

    def enter(name, *given):
        running.append(name)
        layers.enter(name, *given)

    def leave(module, args, result):
        layers.leave(module, args, result)
        if (call := expected.pop(running.pop(), None)) is not None:
            call[0].check(call[1], result)

    with torch.no_grad(), module_hooks(model, enter, leave), listening(on_call):
        model(**inputs)
    assert not expected  # each projection ran after its call

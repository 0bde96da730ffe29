"""`supports` says of every architecture of the installed transformers what a model of it then does,
and those that run give the numbers of eager."""

import copy
import os

import pytest
import torch

import clearhead as ch
from clearhead.functional.ambient import listening
from clearhead.hf.inspect_model import calls_interface
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


@pytest.mark.parametrize("kind", sorted(CONFIG_MAPPING))
def test_the_answer_is_what_happens(kind):
    ch.hf.register()
    try:
        config, inputs, want = tiny_model(kind)
    except NotBuilt as error:
        pytest.skip(str(error))
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

"""KVPress reads the exports, and drops the keys that the survey proposes to forget."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

import clearhead as ch
from clearhead.corpus.long import SINKS, outside
from clearhead.models.inspect.edits import knock_out

from .models import SIZES, WORDS, tokenizer

kvpress = pytest.importorskip("kvpress", reason="KVPress is not installed")
pytestmark = pytest.mark.slow
T, LAYERS, G, GROUP, RECENT = 48, 2, 3, 2, 16


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=G, initializer_range=0.3, name_or_path="tiny"
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def survey(model, tmp_path_factory):
    drawn = random.Random(1)
    contents = [" ".join(drawn.choices(WORDS, k=20)) + " the owl" * 15 for _ in range(3)]
    model.set_attn_implementation("clearhead")
    out = tmp_path_factory.mktemp("kvpress")
    return ch.survey(model, contents, out=out, tokenizer=tokenizer(), context=T, metrics="long")


class Recent(kvpress.ScorerPress):
    """Later keys have higher scores, so that a budget keeps the sinks and the last keys."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return torch.arange(keys.shape[2]).float().expand(keys.shape[:3]).clone()


def logits_with(press, model, ids):
    """The logits of one token after a context that KVPress has compressed."""
    model.set_attn_implementation("sdpa")
    cache = transformers.DynamicCache()
    with torch.no_grad():
        with press(model):
            at = torch.arange(T)
            model(ids[:, :-1], past_key_values=cache, cache_position=at)
        return model(ids[:, -1:], past_key_values=cache).logits[:, -1]


def logits_without(keys, model, ids):
    """The same with masks. `keys` has the number of keys of each key head, by layer."""
    model.set_attn_implementation("clearhead")
    edits = [  # the token sees its own key besides
        knock_out(
            outside(size - SINKS + 1), layers=[layer], positions=[-1],
            heads=range(GROUP * head, GROUP * (head + 1)),
        )
        for layer, sizes in keys.items()
        for head, size in enumerate(sizes)
        if size < T
    ]  # fmt: skip
    with torch.no_grad(), ch.intervene(model, edits):
        return model(ids).logits[:, -1]


def test_budgets(model, survey, tmp_path):
    ids = torch.randint(3, 18, (1, T + 1), generator=torch.Generator().manual_seed(2))
    curve = np.load(survey.export_kvpress(tmp_path / "budgets.npy"))
    for ratio in (0.25, 0.45):
        press = kvpress.LUKVPress(Recent(), compression_ratio=ratio, sink=SINKS)
        press._budget_curves = curve
        expected = logits_without(survey.budgets(1 - ratio).sizes, model, ids)
        assert (logits_with(press, model, ids) - expected).abs().max() < 1e-4
        assert (logits_without({}, model, ids) - expected).abs().max() > 0.1


def test_patterns(model, survey, tmp_path, monkeypatch):
    ids = torch.randint(3, 18, (1, T + 1), generator=torch.Generator().manual_seed(2))
    folder = survey.export_duo_attention(tmp_path / "pattern", recent=RECENT)

    def get(address):
        text = (folder / address.rpartition("/")[2]).read_text()
        return SimpleNamespace(text=text, json=lambda: json.loads(text))

    from kvpress.presses import duo_attention_press

    monkeypatch.setitem(duo_attention_press.PATTERNS_DICT, "tiny", "tiny")
    monkeypatch.setattr(duo_attention_press, "requests", SimpleNamespace(get=get))
    heads = sorted(survey.key_heads(RECENT), key=lambda x: (x.retrieval.mean > 0.1, x.error.mean))
    for count in (2, LAYERS * G):
        press = kvpress.DuoAttentionPress(head_compression_ratio=count / (LAYERS * G))
        keys = {layer: [T] * G for layer in range(LAYERS)}
        for head in heads[:count]:
            keys[head.layer][head.key_head] = SINKS + RECENT
        expected = logits_without(keys, model, ids)
        assert (logits_with(press, model, ids) - expected).abs().max() < 1e-4
        assert (logits_without({}, model, ids) - expected).abs().max() > 0.1

"""Key heads that need all keys are found, and budgets mask the others."""

import json
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import demo
from clearhead.corpus.forgetting import KeyHead, Mean, divide, hull
from clearhead.corpus.long import SINKS

from .models import MODELS, WORDS, tokenizer

FAR, T = 5, 64  # two of four query heads, one of each key head in layer 1, look at key 5


class Planted(torch.nn.Module):
    """Two layers of 4 query heads and 2 key heads; head 3 of layer 1 looks at one far key."""

    layers = 2

    def __init__(self):
        super().__init__()
        drawn = torch.Generator().manual_seed(1)
        self.v = torch.randn(2, 1, 2, T, 8, generator=drawn)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def logits(self, layer):
        logits = torch.zeros(4, T, T)
        q = torch.arange(1, T)
        logits[:, q, q - 1] = 12.0
        if layer == 1:
            logits[3, FAR + 1 :, FAR] = 15.0
        return logits

    def forward(self, input_ids):
        n = input_ids.shape[1]
        outputs = []
        for layer in range(self.layers):
            q, k = torch.zeros(1, 4, n, 2), torch.zeros(1, 2, n, 2)
            bias = ch.bias(self.logits(layer)[None, :, :n, :n])
            v = self.v[layer, :, :, :n]
            outputs.append(ch.attention(q, k, v, mask=ch.causal, bias=bias))
        return outputs


@pytest.fixture(scope="module")
def survey(tmp_path_factory):
    contents = [" ".join(WORDS[(i * j) % len(WORDS)] for i in range(60 + j)) for j in (1, 2, 3)]
    out = tmp_path_factory.mktemp("budgets")
    return ch.survey(Planted(), contents, out=out, tokenizer=tokenizer(), context=T, metrics="long")


def test_a_key_head_that_reads_far_is_found(survey):
    kinds = {(x.layer, x.key_head): x.kind() for x in survey.key_heads(16)}
    assert kinds == {(0, 0): "streaming", (0, 1): "streaming", (1, 0): "streaming",
                     (1, 1): "retrieval"}  # fmt: skip
    far = survey.key_heads(16)[3]
    assert far.error.head == 3 and 0.9 < far.error.low <= far.error.mean <= far.error.high
    low, wide, none = Mean(0, 0.1, 0.05, 0.15), Mean(0, 0.1, 0.0, 0.3), Mean(0, 0.0, 0.0, 0.0)
    assert KeyHead(0, 0, low, none).kind() == "streaming"
    assert {KeyHead(0, 0, *x).kind() for x in ((wide, none), (low, wide))} == {"undecided"}
    assert KeyHead(0, 0, low, Mean(0, 0.3, 0.2, 0.4)).kind() == "retrieval"
    assert survey.query("select distinct head, key_head from heads order by head").rows == (
        (0, 0), (1, 0), (2, 1), (3, 1)
    )  # fmt: skip
    with pytest.raises(ch.BadValue, match="has windows of 16 keys"):
        survey.key_heads(64)


def test_budgets_mask_what_they_do_not_keep(survey):
    budgets = survey.budgets(0.5)
    assert sum(map(sum, budgets.sizes.values())) == 128 and budgets.sizes[1][1] == T
    assert min(map(min, budgets.sizes.values())) == 20
    assert budgets.fraction == 0.5 and budgets.uniform().sizes == {0: (32, 32), 1: (32, 32)}
    assert survey.budgets(0.332).uniform().sizes[0] == (22, 21)
    model, ids = Planted(), torch.zeros(1, T, dtype=torch.long)
    with ch.intervene(model, budgets.edits()):
        outputs = model(ids)
    q, k = torch.arange(T)[:, None], torch.arange(T)[None]
    for layer, out in enumerate(outputs):
        for head in range(4):
            size = budgets.sizes[layer][head // 2]
            kept = (k <= q) & ((k < SINKS) | (q - k < size - SINKS))
            logits = model.logits(layer)[head].double().masked_fill(~kept, -torch.inf)
            expected = logits.softmax(-1) @ model.v[layer, 0, head // 2].double()
            assert (out[0, head].double() - expected).abs().max() < 1e-5
    with pytest.raises(ch.BadValue, match=r"keep=0.2.*\n.*from 0.313 to 1"):
        survey.budgets(0.2)
    for keep in ("0.5", True):
        with pytest.raises(ch.BadType, match="keep="):
            survey.budgets(keep)


def test_a_survey_without_errors_is_refused(tmp_path):
    survey = ch.survey(demo.load(), ["The owl saw a fox."], out=tmp_path, metrics="long")
    with pytest.raises(ch.BadValue, match="no errors of windows"):
        survey.budgets(0.5)


def survey_of(name, out):
    """Texts of 30 words that do not repeat themselves."""
    contents = [" ".join(WORDS[(i * j) % len(WORDS)] for i in range(30)) for j in (1, 2, 3)]
    model = MODELS[name](attn_implementation="clearhead").eval()
    return ch.survey(
        model, contents, out=out, tokenizer=tokenizer(True), context=30, metrics="long"
    )


def test_a_model_that_looks_ahead_is_refused(tmp_path):
    """Its windows have keys on both sides, so budgets would be half of what it keeps."""
    with pytest.raises(ch.BadValue, match="BertModel looks ahead"):
        survey_of("bert", tmp_path).budgets(0.9)


def test_texts_that_do_not_repeat_themselves_give_a_warning(tmp_path):
    survey = survey_of("llama", tmp_path)
    with pytest.warns(UserWarning, match="so no head is known to copy"):
        assert survey.budgets(0.9).context == 30
    with pytest.warns(UserWarning, match="so no head is known to copy"):
        assert {x.retrieval.mean for x in survey.key_heads(16)} == {0.0}


def test_no_division_has_a_smaller_sum_of_errors():
    curves = [hull(x) for x in (
        [(2, 0.9), (4, 0.85), (8, 0.3), (16, 0.0)],
        [(2, 0.2), (4, 0.1), (8, 0.1), (16, 0.0)],
        [(2, 0.0), (4, 0.0), (8, 0.0), (16, 0.0)],
    )]  # fmt: skip

    def error(sizes):
        return sum(np.interp(s, *zip(*c, strict=True)) for s, c in zip(sizes, curves, strict=True))

    for total in (6, 9, 17, 30, 48):
        sizes = divide(curves, total)
        others = [x for x in product(range(2, 17), repeat=3) if sum(x) == total]
        assert sum(sizes) == total and error(sizes) <= min(map(error, others)) + 1e-12


def test_the_files_of_duo_attention_and_kvpress(survey, tmp_path):
    """As `load_attn_pattern` of DuoAttention and `LUKVPress` of KVPress read them."""
    folder = survey.export_duo_attention(tmp_path / "pattern", recent=16)
    pattern = np.loadtxt(folder / "full_attention_heads.tsv", dtype=float, delimiter="\t")
    assert json.loads((folder / "config.json").read_text()) == {"sink_size": 4, "recent_size": 16}
    errors = [min(x.error.mean, 1.0) for x in survey.key_heads(16)]
    assert pattern.shape == (2, 2) and pattern.flatten().tolist() == pytest.approx(errors, abs=1e-6)
    one_layer = Planted()
    one_layer.layers = 1
    one = ch.survey(
        one_layer, [" ".join(WORDS * 3)], out=tmp_path / "one", tokenizer=tokenizer(),
        context=T, metrics="long",
    )  # fmt: skip
    with pytest.raises(ch.BadValue, match="has 1 layer of 2 key heads"):  # loadtxt drops the axis
        one.export_duo_attention(tmp_path / "flat", recent=16)
    curve = np.load(survey.export_kvpress(tmp_path / "budgets.npy"))
    assert curve.shape == (99, 2, 2) and ((curve >= 0) & (curve <= 1)).all()
    assert curve.mean((1, 2)) == pytest.approx(np.arange(1, 100) / 100, abs=0.5 / 256)
    sizes = survey.budgets(0.5).sizes
    kept = [[size / T for size in sizes[layer]] for layer in (0, 1)]
    assert (1 - curve[49]) == pytest.approx(np.array(kept))


def test_an_exported_pattern_of_duo_attention_is_read_back(survey, tmp_path):
    """The streaming heads have the masks of budgets with the sizes of the pattern."""
    folder = survey.export_duo_attention(tmp_path / "pattern", recent=16)
    model = Planted()
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model.config = SimpleNamespace(**sizes)
    found = ch.edits.from_duo_attention(folder, model, sparsity=0.75)
    [[layer, key_head]] = [
        (x.layer, x.key_head) for x in survey.key_heads(16) if x.error.mean > 0.2
    ]
    keys = {number: [SINKS + 16] * 2 for number in range(2)}
    keys[layer][key_head] = T
    budgets = replace(survey.budgets(0.5), sizes={n: tuple(x) for n, x in keys.items()})
    ids = torch.zeros(1, T, dtype=torch.long)
    weights = []
    for some in (found, budgets.edits(), []):
        with ch.intervene(model, some), ch.watch(model, exact_rows=range(T)) as seen:
            model(ids)
        weights.append(torch.stack([call.exact_rows for call in seen.calls]))
    read, proposed, unedited = weights
    assert read.equal(proposed) and not read.equal(unedited)

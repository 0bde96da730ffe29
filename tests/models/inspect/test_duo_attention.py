"""Patterns of DuoAttention become edits: streaming heads see sinks and recent tokens alone."""

import json

import pytest
import torch

import clearhead as ch
from clearhead import BadType, BadValue, edits

pytestmark = pytest.mark.outside
T, LAYERS, G, GROUP, SINKS, RECENT = 23, 3, 2, 3, 2, 5
# As trained: a little below 0 too, and 1. The layer in the middle has equal numbers.
NUMBERS = [[0.9, -1e-4], [0.4, 0.4], [1.0, 0.6]]
CONFIG = {"sink_size": SINKS, "recent_size": RECENT, "lr": 0.02, "deploy_sink_size": None}


@pytest.fixture(scope="module")
def model():
    import transformers

    ch.hf.register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=48, intermediate_size=17, num_hidden_layers=LAYERS,
        num_attention_heads=G * GROUP, num_key_value_heads=G, initializer_range=0.3,
        attn_implementation="clearhead",
    )  # fmt: skip
    return transformers.LlamaModel(config).eval()


def pattern(folder, numbers=NUMBERS, config=CONFIG):
    lines = ["\t".join(f"{x:.18e}" for x in row) for row in numbers]  # as numpy.savetxt writes
    (folder / "full_attention_heads.tsv").write_text("\n".join(lines) + "\n")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def streaming(found):
    """The layers and key heads of edits, each with all of its query heads."""
    heads = {(edit.layers[0], head) for edit in found for head in edit.heads}
    by_key = {(layer, head // GROUP) for layer, head in heads}
    assert len(heads) == GROUP * len(by_key)
    return by_key


def visible(numbers):
    """The mask of a streaming head, cell by cell."""
    q, k = torch.arange(T)[:, None], torch.arange(T)
    return (k <= q) & ((k < SINKS) | (k > q - RECENT)) if numbers else k <= q


def test_streaming_heads_have_the_weights_of_the_mask(model, tmp_path):
    found = edits.from_duo_attention(pattern(tmp_path), model, threshold=0.5)
    assert [(edit.layers, edit.heads) for edit in found] == [
        ((0,), (3, 4, 5)),
        ((1,), (0, 1, 2, 3, 4, 5)),
    ]
    ids = torch.randint(3, 31, (1, T), generator=torch.Generator().manual_seed(1))
    watched = {"exact_rows": range(T)}
    with torch.no_grad(), ch.watch(model, **watched) as before:
        model(ids)
    with torch.no_grad(), ch.intervene(model, found), ch.watch(model, **watched) as after:
        model(ids)
    full, edited = (x.calls[0].exact_rows[0].double() for x in (before, after))
    for head in range(G * GROUP):  # the queries and keys of layer 0 do not change
        expected = full[head] * visible(streams := head >= GROUP)
        expected = expected / expected.sum(-1, keepdim=True)
        assert (edited[head] - expected).abs().max() < 1e-6
        assert streams == bool((full[head] - edited[head]).abs().max() > 0.01)
    for layer, streams in ((1, [True, True]), (2, [False, False])):
        for head, weights in enumerate(after.calls[layer].exact_rows[0]):
            assert (weights > 0).equal(visible(streams[head // GROUP]).expand(T, T))


def test_generation_reads_the_same_positions(model, tmp_path):
    """One token at a time with a cache has the outputs of the complete text."""
    found = edits.from_duo_attention(pattern(tmp_path), model, sparsity=0.5)
    ids = torch.randint(3, 31, (1, T), generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), ch.intervene(model, found):
        right = model(ids).last_hidden_state[:, -1]
        cache = model(ids[:, :17]).past_key_values
        for i in range(17, T):
            out = model(ids[:, i : i + 1], past_key_values=cache).last_hidden_state[:, -1]
    assert (out - right).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"threshold": 0.0}, set()),
        ({"threshold": 0.4}, {(0, 1)}),
        ({"threshold": 1}, {(0, 0), (0, 1), (1, 0), (1, 1), (2, 1)}),
        ({"sparsity": 0}, set()),
        ({"sparsity": 0.3}, {(0, 1), (1, 0)}),  # of equal numbers the first
        ({"sparsity": 0.5}, {(0, 1), (1, 0), (1, 1)}),
        ({"sparsity": 1}, {(layer, head) for layer in range(LAYERS) for head in range(G)}),
    ],
)
def test_the_heads_that_stream(model, tmp_path, chosen, expected):
    assert streaming(edits.from_duo_attention(pattern(tmp_path), model, **chosen)) == expected


@pytest.mark.parametrize(
    ("numbers", "config", "chosen", "error", "text"),
    [
        (NUMBERS, CONFIG, {}, BadValue, "got sparsity=None and threshold=None"),
        (NUMBERS, CONFIG, {"sparsity": 0.5, "threshold": 0.5}, BadValue, "got sparsity=0.5 and"),
        (NUMBERS, CONFIG, {"sparsity": 1.5}, BadValue, r"sparsity.*1\.5"),
        (NUMBERS, CONFIG, {"threshold": "a"}, BadType, "threshold"),
        (NUMBERS[:2], CONFIG, {}, BadValue, "has 2 x 2 key heads, not 3 x 2"),
        ([[0.1] * 6] * 3, CONFIG, {}, BadValue, "has 3 x 6 key heads, not 3 x 2"),
        ([[0.1, float("nan")]] * 3, CONFIG, {}, BadValue, "not finite"),
        (NUMBERS, {"sink_size": 2}, {}, BadValue, r"could not be read \(KeyError: 'recent_size'\)"),
        (NUMBERS, [], {}, BadValue, "could not be read"),
        (NUMBERS, CONFIG | {"recent_size": 0}, {}, BadValue, "recent_size=0"),
        (NUMBERS, CONFIG | {"sink_size": None}, {}, BadType, "sink_size=None"),
    ],
)
def test_other_patterns_are_refused(model, tmp_path, numbers, config, chosen, error, text):
    with pytest.raises(error, match=text):
        edits.from_duo_attention(pattern(tmp_path, numbers, config), model, **chosen)


def test_other_folders_and_models_are_refused(model, tmp_path):
    with pytest.raises(BadValue, match="could not be read"):
        edits.from_duo_attention(tmp_path / "none", model, sparsity=0.5)
    (pattern(tmp_path) / "full_attention_heads.tsv").write_text("a\tb\n")
    with pytest.raises(BadValue, match="could not be read"):
        edits.from_duo_attention(tmp_path, model, sparsity=0.5)
    with pytest.raises(BadType, match="a Linear without a config"):
        edits.from_duo_attention(pattern(tmp_path), torch.nn.Linear(2, 2), sparsity=0.5)

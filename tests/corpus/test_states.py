"""The state of a shard is small, and is read as it was written."""

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import demo
from clearhead.corpus import steps
from clearhead.corpus.collect import state_of
from clearhead.corpus.corpus import read_shard
from clearhead.corpus.state import is_state_of, read_sums, read_totals
from examples.storyteller import story


@pytest.fixture(scope="module")
def setup():
    return steps.make_setup(demo.load(), seed=5)


@pytest.fixture(scope="module")
def computed(setup, tmp_path_factory):
    """The state of one shard in memory, and its file."""
    out = tmp_path_factory.mktemp("survey")
    (entry,) = steps.prepare(setup, [str(story(3, i)) for i in range(9)], out).shards
    shard = read_shard(out / "corpus" / entry.corpus)
    state = state_of(
        setup.reader, setup.metrics, shard, seed=5, batch_tokens=4096, advance=lambda _: None
    )
    return state, state.write(out / "states" / entry.state, "origin")


def test_the_bytes_of_a_shard(computed):
    state, path = computed
    bins = sum(int((layer.counts > 0).sum()) for layer in state.layers)
    sums = sum(layer.sums.numel() + 2 * layer.sums[0].numel() for layer in state.layers)
    looks = sum(int((layer.looks > 0).sum()) for layer in state.layers)
    sampled = sum(layer.sample[["values", "keys", "weights"]].nbytes for layer in state.layers)
    names = 30_000  # the header: the tensors by name, and what zlib needs for each
    parts = 24 * len(state.examples) + 3 * len(state.linked) + 4 * sums + 2 * bins + 3 * looks
    assert len(state.examples) > 1500 and len(state.linked) > 1000 and sampled > 100_000
    assert path.stat().st_size < parts + names + 0.8 * sampled


def test_a_state_is_read_as_it_was_written(computed):
    state, path = computed
    read = read_totals(path, "origin", 5)
    for name in ("examples", "linked", "tokens"):
        assert np.array_equal(getattr(read, name), getattr(state, name)), name
    assert not np.array_equal(
        read_totals(path, "origin", 6).examples["hash"], state.examples["hash"]
    )
    for a, b in zip(read.layers, state.layers, strict=True):
        assert (a.module, a.counts.tolist()) == (b.module, b.counts.tolist())
        assert a.chances.equal(b.chances)
        for name in b.sample.dtype.names:
            assert np.array_equal(a.sample[name], b.sample[name], equal_nan=name == "values")
        torch.testing.assert_close(a.uniform, b.uniform, rtol=0, atol=0, equal_nan=True)
    texts = list(read_sums(path, "origin"))
    assert [number for number, _ in texts] == state.texts.tolist()
    for n, layer in enumerate(state.layers):
        sums, queries, looks = (
            torch.stack([layers[n][part] for _, layers in texts]) for part in range(3)
        )
        assert queries.equal(layer.queries) and looks.equal(layer.looks) and looks.any()
        assert sums.equal(layer.sums.float().double())
        total = read.layers[n]
        assert total.sums[0].equal(sums.sum(0)) and total.queries[0].equal(queries.sum(0))
        assert total.looks[0].equal(looks.sum(0))


def test_a_state_with_a_damaged_header_is_computed_again(computed, tmp_path):
    data, path = computed[1].read_bytes(), tmp_path / "state.safetensors"
    headers = b"\xff" * 7 + b"\x3f", (2).to_bytes(8, "little") + b"[]", data[:7], data[:-1]
    for header in headers:
        path.write_bytes(header)
        assert not is_state_of(path, "origin")
    path.write_bytes(data)
    assert is_state_of(path, "origin") and not is_state_of(path, "other")


def test_damage_within_a_state_is_named(computed, tmp_path):
    data = bytearray(computed[1].read_bytes())
    data[-100] ^= 0xFF
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(data)
    reads = [lambda: read_totals(damaged, "origin", 5), lambda: list(read_sums(damaged, "origin"))]
    errors = 0
    for read in reads:  # one of the two parts has the byte
        try:
            read()
        except ch.BadValue as error:
            errors += "damaged.safetensors' is damaged: its contents do not" in str(error)
    assert errors == 1

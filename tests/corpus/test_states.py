"""The state of a shard is small, and is read as it was written."""

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import demo
from clearhead.corpus import steps
from clearhead.corpus.collect import state_of
from clearhead.corpus.corpus import read_shard
from clearhead.corpus.state import is_state_of, read_state
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
    sums = sum(layer.sums.numel() for layer in state.layers)
    looks = sum(int((layer.looks > 0).sum()) for layer in state.layers)
    names = 20_000  # the header: the tensors by name, and what zlib needs for each
    parts = 24 * len(state.examples) + 3 * len(state.linked) + 4 * sums + 2 * bins + 2 * looks
    assert len(state.examples) > 3000 and len(state.linked) > 1000
    assert path.stat().st_size < parts + names


def test_a_state_is_read_as_it_was_written(computed):
    state, path = computed
    read = read_state(path, "origin", 5)
    for name in ("examples", "linked", "tokens"):
        assert np.array_equal(getattr(read, name), getattr(state, name)), name
    assert not np.array_equal(
        read_state(path, "origin", 6).examples["hash"], state.examples["hash"]
    )
    assert read.texts.equal(state.texts)
    for a, b in zip(read.layers, state.layers, strict=True):
        assert (a.module, a.counts.tolist()) == (b.module, b.counts.tolist())
        assert a.queries.equal(b.queries) and a.looks.equal(b.looks) and b.looks.any()
        assert a.chances.equal(b.chances)
        torch.testing.assert_close(a.uniform, b.uniform, rtol=0, atol=0, equal_nan=True)
        assert a.sums.equal(b.sums.float().double())


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
    with pytest.raises(ch.BadValue, match=r"damaged.safetensors' is damaged: its contents do not"):
        read_state(damaged, "origin", 5)

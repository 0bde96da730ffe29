"""Workers divide the cutting of texts, and all have the same shards."""

import os
import threading
import time

import pytest

from clearhead import demo
from clearhead.corpus import claims, cuts, steps
from clearhead.corpus.corpus import read_shard
from examples.storyteller import story

TEXTS = [str(story(3, number)) for number in range(40)]
SHARD = 40  # tokens, so a slice has a few texts


def prepared(out, texts=TEXTS, **options):
    return steps.prepare(steps.make_setup(demo.load(), shard_tokens=SHARD), texts, out, **options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("alone"))


def recorded(monkeypatch) -> list[tuple[int, int]]:
    """Record the thread and the first text of each slice that is cut; each takes a moment."""
    calls, cut = [], cuts.Cuts._cut

    def slower(self, part, name):
        calls.append((threading.get_ident(), part.first))
        time.sleep(0.02)
        cut(self, part, name)

    monkeypatch.setattr(cuts.Cuts, "_cut", slower)
    return calls


def test_a_context_is_in_one_shard_in_order(alone, tmp_path):
    prepared(tmp_path)
    shards = [read_shard(tmp_path / "corpus" / entry.corpus) for entry in alone.shards]
    contexts = [
        pair for x in shards for pair in zip(x.texts.tolist(), x.contexts.tolist(), strict=True)
    ]
    assert contexts == sorted(set(contexts)) and {text for text, _ in contexts} == {*range(40)}
    assert sum(len(shard.ids) for shard in shards) == alone.corpus["tokens of texts"]
    assert [entry.state for entry in alone.shards] == sorted(x.state_file for x in shards)


@pytest.mark.parametrize("tokens", [None, 500])
def test_each_slice_is_cut_by_one_worker(alone, tmp_path, monkeypatch, tokens):
    calls, manifests = recorded(monkeypatch), []
    threads = [
        threading.Thread(target=lambda: manifests.append(prepared(tmp_path, tokens=tokens)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, *others = manifests
    assert len(others) == 2 and all(x.digest == first.digest for x in others)
    if tokens is None:
        assert first.digest == alone.digest and first.corpus == alone.corpus
        assert len({at for _, at in calls}) == len(calls) > 3
        assert len({thread for thread, _ in calls}) == 3
    else:
        assert first.corpus["tokens of texts"] == tokens
        assert first.digest == prepared(tmp_path / "again", tokens=tokens).digest


def test_a_limit_is_raised_and_then_taken_away(alone, tmp_path):
    counts = [prepared(tmp_path, tokens=n).corpus["tokens of texts"] for n in (300, 301, 700)]
    assert counts == [300, 301, 700]
    assert prepared(tmp_path).digest == alone.digest


def test_texts_after_the_limit_are_not_read(alone, tmp_path):
    read = []

    def texts():
        for text in TEXTS:
            read.append(text)
            yield text

    assert prepared(tmp_path, texts(), tokens=100).corpus["tokens of texts"] == 100
    assert len(read) < len(TEXTS) / 2


def test_the_slice_of_a_lost_worker_is_cut(alone, tmp_path, monkeypatch):
    calls = recorded(monkeypatch)
    prepared(tmp_path / "first")
    names = sorted(path.name for path in (tmp_path / "first" / "corpus").glob("cut-*"))
    folder = tmp_path / "out" / claims.FOLDER
    folder.mkdir(parents=True)
    (folder / names[1]).write_text("elsewhere 1")
    ahead = time.time() - claims.LEASE + 1.5
    os.utime(folder / names[1], (ahead, ahead))
    calls.clear()
    assert prepared(tmp_path / "out").digest == alone.digest
    assert [at for _, at in calls][-1] == sorted(at for _, at in calls)[1]


@pytest.mark.parametrize("damage", ["", "[1]", '["a", [[], 3, 4, [], true]]', "null"])
def test_a_damaged_list_is_written_again(alone, tmp_path, damage):
    prepared(tmp_path)
    path = min((tmp_path / "corpus").glob("cut-*"))
    path.write_text(damage)
    assert prepared(tmp_path).digest == alone.digest and len(path.read_text()) > 100

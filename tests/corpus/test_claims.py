"""Workers share shards by files: none is computed twice, and none is lost with its worker."""

import os
import subprocess
import sys
import threading
import time

import pytest

from clearhead import demo
from clearhead.corpus import claims, steps
from clearhead.corpus.claims import alone, claimed
from clearhead.corpus.merge import missing_shards
from examples.storyteller import story


def test_a_claim_is_of_one_worker(tmp_path):
    with claimed(tmp_path, "a") as mine, claimed(tmp_path, "b") as other:
        assert mine and other
        with claimed(tmp_path, "a") as again:
            assert not again
    with claimed(tmp_path, "a") as mine:
        assert mine
    assert not [path for path in (tmp_path / claims.FOLDER).iterdir() if path.name != ".now"]


def ended_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.mark.outside
def test_the_claim_of_a_process_that_ended_here_is_free_at_once(tmp_path):
    path = tmp_path / claims.FOLDER / "a"
    path.parent.mkdir()
    path.write_text(f"{claims.socket.gethostname()} {ended_process()}")
    with claimed(tmp_path, "a") as mine:
        assert mine


@pytest.mark.parametrize("owner", ["elsewhere 1", ""])
def test_the_claim_of_another_machine_ends_with_its_lease(tmp_path, owner):
    path = tmp_path / claims.FOLDER / "a"
    path.parent.mkdir()
    path.write_text(owner)
    with claimed(tmp_path, "a") as mine:
        assert not mine
    old = time.time() - claims.LEASE - 1
    os.utime(path, (old, old))
    with claimed(tmp_path, "a") as mine:
        assert mine


def test_a_claim_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "LEASE", 0.12)
    renewed, path = threading.Event(), tmp_path / claims.FOLDER / "a"
    utime = os.utime
    monkeypatch.setattr(claims.os, "utime", lambda path: (utime(path), renewed.set()))
    with claimed(tmp_path, "a"):
        assert renewed.wait(30) and path.exists()


def test_a_wait_ends_with_the_claim(tmp_path):
    order = []

    def second():
        with alone(tmp_path, "a"):
            order.append(2)

    with alone(tmp_path, "a"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.5)
        order.append(1)
    thread.join()
    assert order == [1, 2]


def test_the_shard_of_a_lost_worker_is_computed(tmp_path, monkeypatch):
    """A worker waits for the claim of another one, which is lost."""
    setup = steps.make_setup(demo.load(), shard_tokens=100)
    manifest = steps.prepare(setup, [str(story(3, i)) for i in range(8)], tmp_path)
    lost = tmp_path / claims.FOLDER / manifest.shards[1].state
    lost.write_text("elsewhere 1")
    computed, compute = [], steps.compute_shard

    def counted(setup, out, manifest, entry, advance):
        if not (out / "states" / entry.state).exists():
            computed.append(entry.state)
        if len(computed) >= 3:
            old = time.time() - claims.LEASE - 1
            if lost.exists() and lost.read_text().startswith("elsewhere"):
                os.utime(lost, (old, old))
        return compute(setup, out, manifest, entry, advance)

    monkeypatch.setattr(steps, "compute_shard", counted)
    steps.work(setup, tmp_path)
    assert sorted(computed) == sorted(entry.state for entry in manifest.shards)
    assert len(computed) > 3 and not missing_shards(tmp_path, manifest)

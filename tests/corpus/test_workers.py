"""However the work is cut, interrupted and resumed, the tables have the same bytes."""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import clearhead as ch
from clearhead import demo
from clearhead.corpus import Bins, fold, state, steps
from clearhead.corpus.basic import Entropy, First
from clearhead.corpus.merge import merge
from clearhead.corpus.tables import SCHEMA
from examples.storyteller import story
from tests.fresh_process import run_program

TEXTS = [str(story(3, number)) for number in range(11)]
OPTIONS = {"shard_tokens": 200, "metrics": "basic"}


def tables(out: Path) -> dict[str, bytes]:
    return {name: (out / "tables" / f"{name}.parquet").read_bytes() for name in SCHEMA}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("alone")
    ch.survey(demo.load(), TEXTS, out=out, **OPTIONS)
    return tables(out)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    """A folder with a file for each of TEXTS, and the tables of its survey: they have its names."""
    folder = tmp_path_factory.mktemp("files")
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(text)
    out = tmp_path_factory.mktemp("alone")
    ch.survey(demo.load(), folder, out=out, **OPTIONS)
    return folder, tables(out)


@pytest.mark.parametrize("world", [2, 5])
def test_any_number_of_workers_in_any_order(alone, tmp_path, world):
    setup = steps.make_setup(demo.load(), **OPTIONS)
    steps.prepare(setup, TEXTS, tmp_path)
    ranks = list(range(world))
    random.Random(world).shuffle(ranks)
    for number in ranks:
        manifest = setup.must_fit(tmp_path)
        for entry in reversed(manifest.shards[number::world]):
            steps.compute_shard(setup, tmp_path, manifest, entry)
    merge(tmp_path)
    assert tables(tmp_path) == alone


def test_workers_fold_groups_of_shards_into_the_same_tables(tmp_path, monkeypatch):
    """With 2 shards in a group, texts continue in the next shard, and in the next group."""
    texts = [" ".join(TEXTS[number : number + 3]) for number in range(0, 9, 3)] + TEXTS
    options = {"shard_tokens": 30, "context": 20}
    ch.survey(demo.load(), texts, out=tmp_path / "sixteen", **options)
    monkeypatch.setattr(fold, "GROUP", 2)
    ch.survey(demo.load(), texts, out=tmp_path / "alone", **options)
    setup = steps.make_setup(demo.load(), **options)
    manifest, written = steps.prepare(setup, texts, tmp_path / "two"), []
    steps.work(setup, tmp_path / "two")
    write = state.write_parts

    def slower(path, *arguments):
        written.append((threading.get_ident(), path.name))
        time.sleep(0.02)
        return write(path, *arguments)

    monkeypatch.setattr(state, "write_parts", slower)
    folds = [fold.Fold(tmp_path / "two", manifest) for _ in range(2)]
    workers = [threading.Thread(target=each.share) for each in folds]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(manifest.shards) > 16 and len({worker for worker, _ in written}) == 2
    assert len({name for _, name in written}) == len(written) > len(manifest.shards)
    merge(tmp_path / "two")
    assert tables(tmp_path / "two") == tables(tmp_path / "alone")
    one, other = (ch.Survey.open(tmp_path / name) for name in ("sixteen", "alone"))
    for table in SCHEMA:  # sums in another order differ by rounding
        a, b = (x.query(f"select * from {table}") for x in (one, other))
        assert (a.columns == b.columns and len(a) == len(b) > 0) or table == "reasons"
        for row, theirs in zip(a.rows, b.rows, strict=True):
            assert list(row) == [
                pytest.approx(x, rel=1e-9, abs=1e-12) if isinstance(x, float) else x for x in theirs
            ]


def test_added_texts_compute_only_new_shards(alone, tmp_path):
    ch.survey(demo.load(), TEXTS[:9], out=tmp_path, **OPTIONS)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "states").iterdir()}
    ch.survey(demo.load(), TEXTS, out=tmp_path, **OPTIONS)
    unchanged = [p for p, when in before.items() if p.stat().st_mtime_ns == when]
    assert tables(tmp_path) == alone
    assert len(unchanged) == len(before) >= 3


def test_tables_of_fewer_texts_are_refused(alone, tmp_path):
    """Stopped after the states of new texts, before their tables."""
    ch.survey(demo.load(), TEXTS[:9], out=tmp_path, **OPTIONS)
    setup = steps.make_setup(demo.load(), **OPTIONS)
    steps.prepare(setup, TEXTS, tmp_path)
    steps.work(setup, tmp_path)
    with pytest.raises(ch.BadValue, match=r"tables of the survey in .* are not of all its texts"):
        ch.Survey.open(tmp_path)
    merge(tmp_path)
    assert ch.Survey.open(tmp_path).heads and tables(tmp_path) == alone


def test_a_changed_value_is_refused_by_name(tmp_path):
    ch.survey(demo.load(), TEXTS[:3], out=tmp_path, **OPTIONS)
    for change, name in (
        ({"context": 64}, "context 128, and this run 64"),
        ({"seed": 1}, "seed 0, and this run 1"),
        ({"threads": 2}, "threads of a worker 1, and this run 2"),
    ):
        with pytest.raises(ch.BadValue, match=name):
            ch.survey(demo.load(), TEXTS[:3], out=tmp_path, **OPTIONS, **change)
    out = tmp_path / "metrics"
    metrics = [Entropy(128), First()]
    ch.survey(demo.load(), TEXTS[:3], out=out, metrics=metrics)
    with pytest.raises(ch.BadValue, match="metric 1: metric 'entropy', and this run 'first'"):
        ch.survey(demo.load(), TEXTS, out=out, metrics=metrics[::-1])
    with pytest.raises(ch.BadValue, match=r"metrics: .* 1, and this run 'missing'"):
        ch.survey(demo.load(), TEXTS, out=out, metrics=metrics[:1])
    metrics[0].bins = Bins(0.0, 9.0)
    with pytest.raises(ch.BadValue, match=r"metric 1: high 4\.8\d+, and this run 9\.0"):
        ch.survey(demo.load(), TEXTS, out=out, metrics=metrics)
    with pytest.raises(ch.BadValue, match="metrics that were passed as objects"):
        steps.setup_of_manifest(demo.load(), out)
    with pytest.raises(ch.BadValue, match="other texts"):
        ch.survey(demo.load(), TEXTS[1:9], out=tmp_path, **OPTIONS)


def test_a_damaged_state_is_computed_again(alone, tmp_path):
    ch.survey(demo.load(), TEXTS, out=tmp_path, **OPTIONS)
    state = min((tmp_path / "states").iterdir())
    state.write_bytes(state.read_bytes()[:-7])
    with pytest.raises(ch.BadValue, match=r"lacks 1 of \d+ shards"):
        merge(tmp_path)
    ch.survey(demo.load(), TEXTS, out=tmp_path, **OPTIONS)
    assert tables(tmp_path) == alone


def command(texts: Path, out: Path, *options: str) -> list[str]:
    arguments = [str(texts), "--out", str(out), "--shard-tokens", "200", *options]
    return [sys.executable, "-m", "clearhead", "survey", *arguments]


@pytest.mark.outside
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processes_of_the_command_line(files, tmp_path):
    texts, alone = files
    subprocess.run(command(texts, tmp_path / "two", "--workers", "2"), check=True)
    assert tables(tmp_path / "two") == alone


KILLED = """
import os, random, signal, sys, time
import clearhead_cli, clearhead.demo, clearhead.corpus, duckdb  # each command is forked with them

*command, timed, out = sys.argv[1:]

def start(out):
    child = os.fork()
    if not child:
        sys.argv = ["clearhead", *command, "--out", out]
        clearhead_cli.main()  # exits
    return child

started = time.monotonic()
assert os.waitpid(start(timed), 0)[1] == 0
seconds, random_moment = time.monotonic() - started, random.Random(5)
for _ in range(20):
    child = start(out)
    time.sleep(random_moment.uniform(0.1, 1.0) * seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.outside
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_worker_loses_nothing(files, tmp_path):
    """SIGKILL at 20 random moments; then the command is run once more."""
    (texts, alone), out = files, tmp_path / "killed"
    options = "survey", texts, "--shard-tokens", 200
    ended = run_program(KILLED, *options, tmp_path / "timed", out)
    assert ended.returncode == 0, ended.stderr
    subprocess.run(command(texts, out), check=True)
    assert tables(out) == alone


@pytest.mark.outside
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_shells_and_torchrun(files, tmp_path):
    (texts, alone), children = files, []
    for task in ("7", "9"):  # of any SLURM array
        environment = os.environ | {"SLURM_ARRAY_TASK_ID": task}
        children.append(subprocess.Popen(command(texts, tmp_path / "shells"), env=environment))
    assert [child.wait() for child in children] == [0, 0]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node=2", "--no-python"]
    subprocess.run([*launcher, *command(texts, tmp_path / "torchrun")], check=True)
    for out in ("shells", "torchrun"):
        assert tables(tmp_path / out) == alone


@pytest.mark.outside
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_actors_of_ray(files, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    texts, alone = files
    subprocess.run(command(texts, tmp_path / "ray", "--ray", "local"), check=True)
    assert tables(tmp_path / "ray") == alone


# A metric whose actor is killed, as often as DEATHS allows: each death leaves a file there.
DYING = """
import os, signal
from pathlib import Path
from clearhead.corpus.basic import First

class Dying(First):
    name = "dying"

    def begin(self, batch):
        deaths = Path(os.environ["DEATHS"])
        if len(list(deaths.iterdir())) < int(os.environ["MOST_DEATHS"]):
            (deaths / f"{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.outside
@pytest.mark.slow
@pytest.mark.timeout(1800)  # Ray starts twice, which takes minutes on a machine with a high load
def test_actors_of_ray_that_are_killed(files, tmp_path):
    """Ray restarts a few. If all die again and again, the error states what to do."""
    pytest.importorskip("ray", reason="ray is not installed")
    texts, deaths = files[0], tmp_path / "deaths"
    (tmp_path / "dying.py").write_text(DYING)
    deaths.mkdir()
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "DEATHS": str(deaths)}

    def ended(out, most, *options):
        run = [*command(texts, tmp_path / out, "--metrics", "basic,dying:Dying"), *options]
        of_run = environment | {"MOST_DEATHS": str(most)}
        return subprocess.run(run, env=of_run, capture_output=True, text=True, check=False)

    assert ended("alone", 0).returncode == 0
    few = ended("ray", 2, "--ray", "local")
    assert few.returncode == 0, few.stderr
    assert len(list(deaths.iterdir())) == 2
    assert tables(tmp_path / "ray") == tables(tmp_path / "alone")
    many = ended("again", 1000, "--ray", "local")
    assert many.returncode != 0 and "Ray stopped" in many.stderr
    assert "run the same survey again" in " ".join(many.stderr.split())
    assert ended("again", 0).returncode == 0
    assert tables(tmp_path / "again") == tables(tmp_path / "alone")

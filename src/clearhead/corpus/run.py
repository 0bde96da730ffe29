"""Survey every head of a model over texts: `survey`, in this process, in several, or on Ray.

Each process is the command ``clearhead survey work OUT``, as one would start it in a shell of any
machine that has the folder. A process that ends early loses the shard that it computed; another one
computes it.

An actor of Ray holds the model. It receives the entry of a shard, and returns its number of tokens:
rows do not travel, and all machines read and write one folder. Ray restarts an actor that is lost,
and repeats its shard.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torch import nn

from ..core.errors import BadType, BadValue, as_count, as_path, needs
from ..core.formatting import quantity
from ..models.progress import progress_bar
from . import state, steps
from .claims import POLL, alone
from .connection import connect, pattern_of
from .fold import Fold
from .manifest import Manifest, ShardEntry, read_manifest
from .merge import are_merged, merge, missing_shards
from .metric import Metric
from .reader import open_reader
from .result import Survey

if TYPE_CHECKING:
    from ..models.report.text_model import TextModel


def run_workers(setup: steps.Setup, out: Path, workers: int, progress: bool | None) -> None:
    """Compute all shards in `workers` processes.

    Prints a line for each process that ends early. Raises `BadValue` if shards are missing at the
    end, with the last error of a process.
    """
    command = worker_command(setup, out)
    manifest = read_manifest(out)
    processes: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
    try:
        for _ in range(workers):
            errors: IO[bytes] = tempfile.TemporaryFile()
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=errors)
            processes.append((child, errors))
        _wait([child for child, _ in processes], out, manifest, progress)
    finally:
        for child, _ in processes:
            child.terminate()
            child.wait()
    message = ""
    for number, (child, output) in enumerate(processes):
        if child.returncode:
            output.seek(0)
            message = output.read().decode(errors="replace").strip() or message
            code = child.returncode  # of a signal, it is negative
            ended = f"signal {-code}" if code < 0 else f"code {code}"
            print(f"worker {number} ended with {ended}", file=sys.stderr)
        output.close()
    if missing := missing_shards(out, manifest):
        lacks = f"{len(missing)} of {quantity(len(manifest.shards), 'shard')}"
        last = f" The last error: {message}" if message else ""
        gave = f"All workers ended, and the survey lacks {lacks}.{last}"
        hint = "run the same survey again, which computes the others."
        raise BadValue(gave, "shards that are finished stay valid.", hint)


def worker_command(setup: steps.Setup, out: Path) -> list[str]:
    """Return the command of a worker.

    Raises `BadType` for a model in memory, and for metrics that have no name to import.
    """
    path = setup.path_for("Several workers were", "each worker is a process, which")
    if unnamed := [entry for entry in setup.entries if not isinstance(entry, str)]:
        rule = "each worker is a process, which imports metrics by name."
        hint = 'define it in a module, and pass "module:name".'
        raise BadType(f"Several workers were requested with the metric {unnamed[0]!r}.", rule, hint)
    model = [] if path is None else ["--model", str(path)]
    return [sys.executable, "-m", "clearhead", "survey", "work", str(out), *model]


def _wait(
    children: list[subprocess.Popen[bytes]], out: Path, manifest: Manifest, progress: bool | None
) -> None:
    """Wait until all processes have ended, and show how many tokens are done."""
    waiting = {entry.state: entry.tokens for entry in missing_shards(out, manifest)}
    total = sum(entry.tokens for entry in manifest.shards)
    before = total - sum(waiting.values())
    with progress_bar("survey", total, progress, done=before, unit=" tokens") as advance:
        while any([child.poll() is None for child in children]):
            for file in [name for name in waiting if (out / state.FOLDER / name).exists()]:
                advance(waiting.pop(file))
            time.sleep(POLL)


RESTARTS = 3  # of an actor that was lost, and repetitions of its shard


class Worker:
    """A worker of a survey, which becomes an actor."""

    def __init__(
        self, load: "Callable[[Path | None], TextModel]", path: Path | None, out: Path,
        metrics: "list[str | Metric]",
    ) -> None:  # fmt: skip
        self.out = out
        self.setup = steps.setup_of_manifest(load(path), out, metrics)
        self.manifest = self.setup.must_fit(out)

    def fold(self) -> None:
        """Fold the states of all shards, together with the other actors."""
        Fold(self.out, self.manifest).share()

    def compute(self, entry: ShardEntry) -> int:
        """Compute the state of a shard. Returns its number of tokens."""
        with steps.torch_threads(self.setup.threads):
            steps.compute_shard(self.setup, self.out, self.manifest, entry)
        return entry.tokens


def work_on_ray(
    setup: steps.Setup, out: Path, address: str, load: "Callable[[Path | None], TextModel]",
    progress: bool | None,
) -> None:  # fmt: skip
    """Compute all shards on a cluster, with as many actors as its CPUs allow.

    Raises `BadType` for a model in memory, and `BadValue` for a cluster that does not answer, and
    if shards are missing at the end.
    """
    with needs("ray", "a survey on a cluster needs Ray."):
        import ray
        from ray.util import ActorPool
    path, threads = setup.path_for("A cluster was", "each actor"), setup.threads
    manifest = read_manifest(out)
    entries = missing_shards(out, manifest)
    own = not ray.is_initialized()
    try:
        if own:
            ray.init(None if address == "local" else address, log_to_driver=False)
        count = max(1, min(len(entries), int(ray.cluster_resources().get("CPU", 1)) // threads))
        actor = ray.remote(num_cpus=threads, max_restarts=RESTARTS, max_task_retries=RESTARTS)(
            Worker
        )
        actors = [actor.remote(load, path, out.resolve(), setup.entries) for _ in range(count)]
        total = sum(entry.tokens for entry in entries)
        with progress_bar("survey", total, progress, unit=" tokens") as advance:
            pool = ActorPool(actors)
            for tokens in pool.map_unordered(lambda a, entry: a.compute.remote(entry), entries):
                advance(tokens)
        ray.get([actor.fold.remote() for actor in actors])
    except (ConnectionError, ray.exceptions.RayError) as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, (BadType, BadValue)):
            raise cause from error
        rule = "a survey on a cluster needs actors that run; shards that are finished stay valid."
        hint = "check the address and the cluster, and run the same survey again."
        raise BadValue(f"Ray stopped: {' '.join(str(error).split())[:500]}", rule, hint) from error
    finally:
        if own:
            ray.shutdown()


def survey(
    model: "str | Path | TextModel | nn.Module",
    texts: steps.Texts,
    *,
    out: str | Path,
    context: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
    metrics: "str | Metric | Iterable[str | Metric] | None" = None,
    tokenizer: Any = None,
    threads: int = 1,
    shard_tokens: int | None = None,
    workers: int = 1,
    ray: "tuple[str, Callable[[Path | None], TextModel]] | None" = None,
    progress: bool | None = None,
) -> Survey:
    """Survey every head of a model over texts, and return the result.

    >>> survey = ch.survey("checkpoint", Path("texts"), out="out/survey")  # doctest: +SKIP
    >>> survey.heads.to_pandas()  # doctest: +SKIP

    Every text is cut into contexts of at most `context` tokens, each with the tokens that the
    tokenizer adds around a text, such as BOS. A context never mixes texts, and the last one of a
    text is as long as it is. The folder `out` has the tokens of the texts, the state of each
    shard, and the tables; the same call continues an interrupted survey, or adds texts to it.

    A picture is a text whose tokens are its patches. The folder has the pixels that the model
    receives, so it is complete without the files.

    Several processes may compute one survey, on any machines that share the folder: start the same
    call in each, by torchrun, as any SLURM array, or by hand. A shard is computed by one of them
    (`claims`), also if others end early.

    Args:
        model: a checkpoint folder or GGUF file, a `hf.Checkpoint`, the included model, or a module
            with its `tokenizer`; or a folder or `hf.ImageCheckpoint` of a vision model.
        texts: strings, files, folders, .jsonl and .parquet files with a field "text"; or
            `clearhead.corpus.RandomRepeats`, random tokens that are repeated, or `Needles`, random
            tokens that are hidden in texts. For a vision model, the paths of pictures and of
            folders of them.
        out: the folder of the survey.
        context: the most tokens of a context; None means 1024, or fewer if the model has fewer. A
            picture is one context.
        tokens: stop after this number of tokens of texts; None reads all.
        seed: selects the examples.
        metrics: sets of metrics, and your own; see `clearhead.corpus.Metric`. None means "basic",
            and "grid" for pictures.
        threads: the threads of torch. Other threads give other rounding, so they are fixed.
        shard_tokens: the tokens of a shard, at least; an interruption loses at most one. None means
            65,536, or more for more than 1,024 shards.
        workers: the number of processes. More than one need a model that is loaded from a path, and
            metrics that are named.
        ray: the address of a Ray cluster ("local" starts one), and the function that loads the
            model from its path on each machine, such as `hf.Checkpoint`. All machines read and
            write the folder.
        progress: show the progress; None does in a terminal.

    Raises:
        BadValue: a survey in `out` of another model, of other settings, versions or texts; a text
            on which a metric is NaN; a full disk; a picture that cannot be read, and a vision model
            whose tokens are not its patches. Shards that are finished stay valid.
    """
    connect().close()  # DuckDB is needed at the end, so that a fault of it is an error now
    folder = as_path("survey", out)
    reader = open_reader(model, tokenizer)
    if shard_tokens is None:
        shard_tokens = steps.chosen_shard_tokens(reader, texts, folder, tokens)
    setup = steps.make_setup(reader, context, seed, metrics, tokenizer, threads, shard_tokens)
    workers = as_count("workers", workers, "a survey has workers.", "pass workers=2.", least=1)
    pattern_of(folder)
    manifest = steps.prepare(setup, texts, folder, tokens=tokens)
    if ray is not None:
        work_on_ray(setup, folder, *ray, progress)
    elif workers == 1:
        steps.work(setup, folder, progress=progress)
    else:
        run_workers(setup, folder, workers, progress)
    if not are_merged(folder, manifest):
        Fold(folder, manifest).share()
    with alone(folder, "merge"):
        if not are_merged(folder, manifest):
            merge(folder, manifest)
    return Survey(folder, manifest)

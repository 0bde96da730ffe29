"""Compute the shards of a survey on a cluster of Ray.

An actor holds the model. It receives the entry of a shard, and returns the name of its file: rows
do not travel, and all machines read and write one folder. Ray restarts an actor that is lost, and
repeats its shard.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import BadType, BadValue, needs
from .manifest import ShardEntry, read_manifest
from .merge import missing_shards
from .metric import Metric
from .progress import token_progress
from .steps import Setup, compute_shard, setup_of_manifest, torch_threads

if TYPE_CHECKING:
    from ..models.report.text_model import TextModel

RESTARTS = 3  # of an actor that was lost, and repetitions of its shard


class Worker:
    """A worker of a survey, which becomes an actor."""

    def __init__(
        self,
        load: "Callable[[Path | None], TextModel]",
        path: Path | None,
        out: Path,
        metrics: "list[str | Metric]",
    ) -> None:
        self.out = out
        self.setup = setup_of_manifest(load(path), out, metrics)
        self.manifest = self.setup.must_fit(out)

    def compute(self, entry: ShardEntry) -> int:
        """Compute the state of a shard. Returns its number of tokens."""
        with torch_threads(self.setup.threads):
            compute_shard(self.setup, self.out, self.manifest, entry)
        return entry.tokens


def work_on_ray(
    setup: Setup,
    out: Path,
    address: str,
    load: "Callable[[Path | None], TextModel]",
    progress: bool | None,
) -> None:
    """Compute all shards on a cluster, with as many actors as its CPUs allow.

    Raises `BadType` for a model in memory, and `BadValue` for a cluster that does not answer, and
    if shards are missing at the end.
    """
    with needs("ray", "a survey on a cluster needs Ray."):
        import ray
        from ray.util import ActorPool
    path, threads = setup.path_for("A cluster was", "each actor"), setup.threads
    manifest = read_manifest(out)
    entries = [manifest.shards[number] for number in missing_shards(out, manifest)]
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
        with token_progress(total, progress) as advance:
            pool = ActorPool(actors)
            for tokens in pool.map_unordered(lambda a, entry: a.compute.remote(entry), entries):
                advance(tokens)
    except (ConnectionError, ray.exceptions.RayError) as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, (BadType, BadValue)):
            raise cause from error
        raise BadValue(
            f"Ray stopped: {' '.join(str(error).split())[:500]}",
            "a survey on a cluster needs actors that run; shards that are finished stay valid.",
            "check the address and the cluster, and run the same survey again.",
        ) from error
    finally:
        if own:
            ray.shutdown()

"""The steps of a survey, each of which can run in another process, or on another machine.

1. `prepare` cuts the texts into shards, and writes them and the manifest.
2. `work` computes the states of shards. Any number of workers may do so at the same time.
3. `merge.merge` folds the states into the tables.

All files are written in one move. A step that was interrupted continues where it was.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..core.errors import BadType, BadValue, as_count, writable_folder
from ..core.formatting import quantity
from . import corpus, state
from .collect import state_of
from .corpus import Cutter, read_shard
from .manifest import (
    FILE,
    MOST_SKIPPED,
    Manifest,
    ShardEntry,
    describe,
    fixed_values,
    must_continue,
    must_have_added,
    read_manifest,
)
from .merge import missing_shards
from .metric import Metric
from .metric_sets import chosen_metrics, entries_of
from .needles import Needles
from .progress import token_progress
from .ranks import ALONE, Rank
from .reader import Reader, open_reader
from .repeats import RandomRepeats
from .state import is_state_of
from .texts import read_texts

if TYPE_CHECKING:
    from ..models.report.text_model import TextModel

CONTEXT = 1024  # tokens
SHARD_TOKENS, BATCH_TOKENS = 65536, 4096


class Setup(NamedTuple):
    """A model with what its survey is to measure."""

    reader: Reader
    entries: list[str | Metric]
    metrics: list[Metric]
    settings: dict[str, Any]
    threads: int

    def fixed(self) -> dict[str, Any]:
        return fixed_values(self.reader, self.metrics, self.settings, self.threads)

    def path_for(self, requested: str, worker: str) -> Path | None:
        """Return the path from which workers load the model; None for the included model.

        Raises `BadType` for a model in memory.
        """
        if self.reader.path is None and self.reader.text_model is None:
            raise BadType(
                f"{requested} requested for a {self.reader.name} in memory.",
                f"{worker} loads the model from its folder.",
                "save the model and its tokenizer into a folder, and pass the folder.",
            )
        return None if self.reader.path is None else self.reader.path.resolve()

    def must_fit(self, out: Path) -> Manifest:
        """Return the manifest of a survey that this setup can continue.

        Raises `BadValue` for another model, or other settings or versions.
        """
        manifest = read_manifest(out)
        must_continue(manifest, self.fixed(), list(map(describe, self.metrics)), out)
        return manifest


def make_setup(
    model: "str | Path | TextModel | nn.Module",
    context: int | None = None,
    seed: int = 0,
    metrics: "str | Metric | Iterable[str | Metric]" = "basic",
    tokenizer: Any = None,
    threads: int = 1,
    shard_tokens: int = SHARD_TOKENS,
) -> Setup:
    """Check the arguments of a survey. The arguments are those of `survey`."""
    reader = open_reader(model, tokenizer)
    longest = reader.longest
    most = "" if longest is None else f", and the model has positions for {longest}"
    rule = f"a context has 2 tokens or more{most}."
    default = min(CONTEXT, longest or CONTEXT)
    hint = f"pass for example context={default}."
    size = default if context is None else context
    size = as_count("context", size, rule, hint, least=2, most=longest)
    hint = "pass a whole number, 1 or more."
    threads = as_count("threads", threads, "a worker has threads of torch.", hint, least=1)
    shard = as_count("shard_tokens", shard_tokens, "a shard has tokens.", hint, least=1)
    number = as_count("seed", seed, "a seed is a whole number from 0.", "pass seed=0.")
    settings = {
        "context": size, "seed": number, "shard tokens": shard, "batch tokens": BATCH_TOKENS
    }  # fmt: skip
    entries = entries_of(metrics)
    return Setup(reader, entries, chosen_metrics(entries, reader, size), settings, threads)


def setup_of_manifest(
    model: "TextModel", out: Path, metrics: "str | Iterable[str | Metric] | None" = None
) -> Setup:
    """Return the setup of an existing survey, for a worker; None means its own metrics.

    Raises `BadValue` if these were objects, which have no names.
    """
    manifest = read_manifest(out)
    fixed, requested = manifest.fixed, manifest.requested if metrics is None else metrics
    if requested is None:
        raise BadValue(
            f"The survey in {str(out)!r} has metrics that were passed as objects.",
            "a worker imports metrics by name.",
            "pass the same metrics as --metrics basic,module:name.",
        )
    return make_setup(
        model,
        context=fixed["context"],
        seed=fixed["seed"],
        metrics=requested,
        threads=fixed["threads of a worker"],
        shard_tokens=fixed["shard tokens"],
    )


def prepare(
    setup: Setup,
    texts: "str | Path | Iterable[str | Path] | RandomRepeats | Needles",
    out: Path,
    *,
    tokens: int | None = None,
) -> Manifest:
    """Cut the texts into shards; write these and the manifest. Ranks may do so at the same time.

    Raises `BadValue` if a survey in `out` cannot be continued, and without a text that has tokens.
    """
    if tokens is not None:
        tokens = as_count("tokens", tokens, "a survey reads tokens.", "pass 1 or more.", least=1)
    writable_folder(out, "a survey is", "pass another folder as out=.")
    if (out / FILE).exists():
        setup.must_fit(out)
    for folder in (corpus.FOLDER, state.FOLDER):
        (out / folder).mkdir(exist_ok=True)
    context, seed = setup.settings["context"], setup.settings["seed"]
    cutter = Cutter(setup.reader, context, setup.settings["shard tokens"])
    if isinstance(texts, (RandomRepeats, Needles)):
        read = texts.drawn(setup.reader, context, seed)
    else:
        read = read_texts(texts)
    shards = []
    for shard in cutter.cut(read, tokens):
        shard.write(out)
        shards.append(ShardEntry(shard.state_file, shard.file, len(shard.ids), len(shard.lengths)))
    if not shards:
        raise BadValue(
            f"There is no token in {quantity(cutter.texts, 'text')}."
            + "".join(f" {name}: {reason}." for name, reason in cutter.skipped[:3]),
            "a survey needs at least one text.",
            "pass strings with words, or files of text in UTF-8.",
        )
    about = {
        "texts": cutter.texts,
        "contexts": sum(shard.contexts for shard in shards),
        "tokens of texts": cutter.tokens,
        "skipped": len(cutter.skipped),
        "skipped texts": list(map(list, cutter.skipped[:MOST_SKIPPED])),
    }
    if isinstance(texts, (RandomRepeats, Needles)):
        about |= texts.described()
    names = [entry for entry in setup.entries if isinstance(entry, str)]
    requested = names if len(names) == len(setup.entries) else None
    new = Manifest(setup.fixed(), about, list(map(describe, setup.metrics)), shards, requested)
    if (out / FILE).exists():  # which another run may have written since this one began
        must_have_added(setup.must_fit(out), new, out)
    new.write(out)
    return new


def work(setup: Setup, out: Path, *, rank: Rank = ALONE, progress: bool | None = None) -> None:
    """Compute the states of the shards of a rank, and then those that no rank has finished.

    Raises `BadValue` if the survey in `out` is of another model, or has other settings or versions.
    """
    manifest = setup.must_fit(out)
    own, others = rank.split(range(len(manifest.shards)))
    total = sum(manifest.shards[number].tokens for number in own)
    missing = set(missing_shards(out, manifest))
    waiting = [number for number in own if number in missing]
    before = total - sum(manifest.shards[number].tokens for number in waiting)
    with token_progress(total, progress, before) as advance, torch_threads(setup.threads):
        for number in waiting:
            compute_shard(setup, out, manifest, manifest.shards[number], advance)
    with torch_threads(setup.threads):
        for number in others:
            compute_shard(setup, out, manifest, manifest.shards[number])


def compute_shard(
    setup: Setup,
    out: Path,
    manifest: Manifest,
    entry: ShardEntry,
    advance: Callable[[int], None] = lambda _: None,
) -> Path:
    """Compute the state of a shard, if the folder does not have it, and return its file."""
    path, origin = out / state.FOLDER / entry.state, manifest.origin(entry)
    if is_state_of(path, origin):
        advance(entry.tokens)
        return path
    result = state_of(
        setup.reader,
        setup.metrics,
        read_shard(out / corpus.FOLDER / entry.corpus),
        seed=setup.settings["seed"],
        batch_tokens=setup.settings["batch tokens"],
        advance=advance,
    )
    return result.write(path, origin)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Use this number of threads in the `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

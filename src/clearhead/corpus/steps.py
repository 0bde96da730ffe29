"""The steps of a survey, each of which can run in another process, or on another machine.

1. `prepare` cuts the texts into shards, and writes them and the manifest.
2. `work` computes the states of shards. Any number of workers may do so at the same time.
3. `merge.merge` folds the states into the tables.

All files are written in one move. A step that was interrupted continues where it was.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn

from ..core.errors import BadType, BadValue, as_count, is_iterable, writable_folder
from ..core.formatting import quantity
from ..models.progress import progress_bar
from . import corpus, state
from .claims import alone, share
from .collect import state_of
from .corpus import read_shard
from .cuts import Cuts
from .manifest import FILE, Manifest, ShardEntry, describe, fixed_values, read_manifest
from .merge import missing_shards
from .metric import Metric
from .metric_sets import chosen_metrics, entries_of
from .pictures import read_pictures
from .random_tokens import Needles, RandomRepeats
from .reader import Reader, open_reader
from .state import is_state_of
from .texts import CHARACTERS, Sources, Text, read_texts, sizes_of

if TYPE_CHECKING:
    from ..models.report.text_model import TextModel

Texts: TypeAlias = Sources | RandomRepeats | Needles
CONTEXT = 1024  # tokens
SHARD_TOKENS, BATCH_TOKENS = 65536, 4096
PICTURE_TOKENS = 8192  # of a shard that has pixels too, several kilobytes of each token
MOST_SHARDS, MOST_SHARD_TOKENS = 1024, 2**22
MOST_SKIPPED = 1000  # texts left out that the manifest names


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
            rule = f"{worker} loads the model from its folder."
            hint = "save the model and its tokenizer into a folder, and pass the folder."
            raise BadType(f"{requested} requested for a {self.reader.name} in memory.", rule, hint)
        return None if self.reader.path is None else self.reader.path.resolve()

    def must_fit(self, out: Path) -> Manifest:
        """Return the manifest of a survey that this setup can continue.

        Raises `BadValue` for another model, or other settings or versions.
        """
        manifest = read_manifest(out)
        manifest.must_continue(self.fixed(), list(map(describe, self.metrics)), out)
        return manifest


def make_setup(
    model: "str | Path | TextModel | nn.Module | Reader", context: int | None = None, seed: int = 0,
    metrics: "str | Metric | Iterable[str | Metric] | None" = None, tokenizer: Any = None,
    threads: int = 1, shard_tokens: int = SHARD_TOKENS,
) -> Setup:  # fmt: skip
    """Check the arguments of a survey. The arguments are those of `survey`."""
    reader = open_reader(model, tokenizer)
    longest = reader.longest
    most = "" if longest is None else f", and the model has positions for {longest}"
    least = 2 if reader.pictures is None else len(reader.words)
    rule = f"a context has {least} tokens or more{most}."
    default = max(least, min(CONTEXT, longest or CONTEXT))
    hint = f"pass for example context={default}."
    size = default if context is None else context
    size = as_count("context", size, rule, hint, least=least, most=longest)
    hint = "pass a whole number, 1 or more."
    threads = as_count("threads", threads, "a worker has threads of torch.", hint, least=1)
    shard = as_count("shard_tokens", shard_tokens, "a shard has tokens.", hint, least=1)
    number = as_count("seed", seed, "a seed is a whole number from 0.", "pass seed=0.")
    settings = {
        "context": size, "seed": number, "shard tokens": shard, "batch tokens": BATCH_TOKENS
    }  # fmt: skip
    default_set = "basic" if reader.pictures is None else "grid"
    entries = entries_of(default_set if metrics is None else metrics)
    return Setup(reader, entries, chosen_metrics(entries, reader, size), settings, threads)


def chosen_shard_tokens(reader: Reader, texts: Texts, out: Path, tokens: int | None) -> int:
    """Choose the tokens of a shard: those of the survey in `out`, or by the size of the texts."""
    if (out / FILE).exists():
        return int(read_manifest(out).fixed["shard tokens"])
    if reader.pictures is not None:
        return PICTURE_TOKENS
    every = sizes_of(texts) // CHARACTERS
    return shard_tokens_for(min(every, tokens or every))


def shard_tokens_for(tokens: int) -> int:
    """Return the tokens of a shard of a survey of so many tokens.

    They are a power of 2 from `SHARD_TOKENS` to `MOST_SHARD_TOKENS`, for at most `MOST_SHARDS`
    shards, because a worker that is lost loses one shard.
    """
    size = SHARD_TOKENS
    while size * MOST_SHARDS < tokens and size < MOST_SHARD_TOKENS:
        size *= 2
    return size


def setup_of_manifest(
    model: "TextModel", out: Path, metrics: "str | Iterable[str | Metric] | None" = None
) -> Setup:
    """Return the setup of an existing survey, for a worker; None means its own metrics.

    Raises `BadValue` if these were objects, which have no names.
    """
    manifest = read_manifest(out)
    fixed, requested = manifest.fixed, manifest.requested if metrics is None else metrics
    if requested is None:
        gave = f"The survey in {str(out)!r} has metrics that were passed as objects."
        rule = "a worker imports metrics by name."
        raise BadValue(gave, rule, "pass the same metrics as --metrics basic,module:name.")
    return make_setup(
        model, fixed["context"], fixed["seed"], requested,
        threads=fixed["threads of a worker"], shard_tokens=fixed["shard tokens"],
    )  # fmt: skip


def prepare(setup: Setup, texts: Texts, out: Path, *, tokens: int | None = None) -> Manifest:
    """Cut the texts into shards; write these and the manifest.

    Several processes that do so at the same time divide the texts (`cuts`), and write the same
    manifest. What was cut before is read.

    Raises `BadValue` if a survey in `out` cannot be continued, without a text that has tokens, and
    for random tokens or a limit of them where pictures are read.
    """
    own_tokens = tokens is not None or isinstance(texts, (RandomRepeats, Needles))
    if setup.reader.pictures is not None and own_tokens:
        gave = f"A part of the tokens of pictures, or random ones, was requested: {tokens=}."
        rule = "a survey of pictures reads every patch of them."
        raise BadValue(gave, rule, "pass some of the pictures; a plan is of texts alone.")
    if tokens is not None:
        tokens = as_count("tokens", tokens, "a survey reads tokens.", "pass 1 or more.", least=1)
    writable_folder(out, "a survey is", "pass another folder as out=.")
    for folder in (corpus.FOLDER, state.FOLDER):
        (out / folder).mkdir(exist_ok=True)
    if (out / FILE).exists():
        setup.must_fit(out)
    settings = setup.settings

    def read() -> Iterator[Text]:
        if isinstance(texts, (RandomRepeats, Needles)):
            return texts.drawn(setup.reader, settings["context"], settings["seed"])
        if setup.reader.pictures is not None:
            return read_pictures(texts, settings["context"])
        return read_texts(texts)

    once = is_iterable(texts) and iter(texts) is texts
    cut = Cuts(setup.reader, settings, out, read, tokens).cut(once)
    if not cut.shards:
        skipped = "".join(f" {name}: {reason}." for name, reason in cut.skipped[:3])
        gave = f"There is no token in {quantity(cut.texts, 'text')}.{skipped}"
        hint = "pass strings with words, files of text in UTF-8, or of pictures for a vision model."
        raise BadValue(gave, "a survey needs at least one text.", hint)
    about = {
        "texts": cut.texts,
        "contexts": sum(entry.contexts for entry in cut.shards),
        "tokens of texts": cut.tokens,
        "skipped": len(cut.skipped),
        "skipped texts": cut.skipped[:MOST_SKIPPED],
    }
    if isinstance(texts, (RandomRepeats, Needles)):
        about |= texts.described()
    names = [entry for entry in setup.entries if isinstance(entry, str)]
    requested = names if len(names) == len(setup.entries) else None
    new = Manifest(setup.fixed(), about, list(map(describe, setup.metrics)), cut.shards, requested)
    with alone(out, "prepare"):
        if (out / FILE).exists():
            old = setup.must_fit(out)
            if (old.corpus, old.shards) == (about, cut.shards):
                return old
            old.must_have_added(new, out)
        new.write(out)
    return new


def work(setup: Setup, out: Path, *, progress: bool | None = None) -> None:
    """Compute the states of all shards that no other worker computes, until all are complete.

    It waits for those of the others, and computes the ones of workers that are lost (`share`).

    Raises `BadValue` if the survey in `out` is of another model, or has other settings or versions.
    """
    manifest = setup.must_fit(out)
    missing = missing_shards(out, manifest)
    total = sum(entry.tokens for entry in manifest.shards)
    before = total - sum(entry.tokens for entry in missing)
    bar = progress_bar("survey", total, progress, done=before, unit=" tokens")
    with bar as advance, torch_threads(setup.threads):

        def is_complete(entry: ShardEntry) -> bool:
            complete = is_state_of(*state.file_of(out, manifest, entry))
            if complete:
                advance(entry.tokens)
            return complete

        for entry in share(out, missing, attrgetter("state"), is_complete):
            compute_shard(setup, out, manifest, entry, advance)


def compute_shard(
    setup: Setup, out: Path, manifest: Manifest, entry: ShardEntry,
    advance: Callable[[int], None] = lambda _: None,
) -> Path:  # fmt: skip
    """Compute the state of a shard, if the folder does not have it, and return its file."""
    path, origin = state.file_of(out, manifest, entry)
    if is_state_of(path, origin):
        advance(entry.tokens)
        return path
    shard = read_shard(out / corpus.FOLDER / entry.corpus)
    seed, most = setup.settings["seed"], setup.settings["batch tokens"]
    return state_of(setup.reader, setup.metrics, shard, seed, most, advance).write(path, origin)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Use this number of threads in the `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

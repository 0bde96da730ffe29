"""Survey every head of a model over texts: `survey`."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..core.errors import as_count, as_path
from .claims import alone
from .connection import connect, pattern_of
from .merge import are_merged, merge
from .metric import Metric
from .result import Survey
from .steps import Texts, chosen_shard_tokens, make_setup, prepare, work
from .workers import run_workers, work_on_ray

if TYPE_CHECKING:
    from ..models.report.text_model import TextModel


def survey(
    model: "str | Path | TextModel | nn.Module",
    texts: Texts,
    *,
    out: str | Path,
    context: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
    metrics: "str | Metric | Iterable[str | Metric]" = "basic",
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

    Several processes may compute one survey, on any machines that share the folder: start the same
    call in each, by torchrun, as any SLURM array, or by hand. A shard is computed by one of them
    (`claims`), also if others end early.

    Args:
        model: a checkpoint folder or GGUF file, a `hf.Checkpoint`, the included model, or a module
            with its `tokenizer`.
        texts: strings, files, folders, .jsonl and .parquet files with a field "text"; or
            `clearhead.corpus.RandomRepeats`, random tokens that are repeated, or `Needles`, random
            tokens that are hidden in texts.
        out: the folder of the survey.
        context: the most tokens of a context; None means 1024, or fewer if the model has fewer.
        tokens: stop after this number of tokens of texts; None reads all.
        seed: selects the examples.
        metrics: sets of metrics, and your own; see `clearhead.corpus.Metric`.
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
            on which a metric is NaN; a full disk. Shards that are finished stay valid.
    """
    connect().close()  # DuckDB is needed at the end, so that a fault of it is an error now
    folder = as_path("survey", out)
    if shard_tokens is None:
        shard_tokens = chosen_shard_tokens(texts, folder, tokens)
    setup = make_setup(model, context, seed, metrics, tokenizer, threads, shard_tokens)
    workers = as_count("workers", workers, "a survey has workers.", "pass workers=2.", least=1)
    pattern_of(folder)
    manifest = prepare(setup, texts, folder, tokens=tokens)
    if ray is not None:
        work_on_ray(setup, folder, *ray, progress)
    elif workers == 1:
        work(setup, folder, progress=progress)
    else:
        run_workers(setup, folder, workers, progress)
    with alone(folder, "merge"):
        if not are_merged(folder, manifest):
            merge(folder, manifest)
    return Survey(folder, manifest)

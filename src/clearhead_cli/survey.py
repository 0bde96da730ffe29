"""`clearhead survey`: what every head of a model does over many texts, or pictures."""

import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import OTHER_FOLDER
from .output import say, say_loading

if TYPE_CHECKING:
    from clearhead.corpus import Needles, RandomRepeats, Survey

MOST_SHOWN = 8  # heads of the summary
FOLDERS = {"compare": ("OUT", "OTHER"), "merge": ("OUT",), "work": ("OUT",)}


def survey(
    context: typer.Context,
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXTS...",
            help="Files and folders of texts, .jsonl and .parquet files; or a text in quotes. "
            "Files and folders of pictures for a vision model. "
            "Or: work OUT, merge OUT, compare OUT OTHER.",
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A Hugging Face checkpoint, a GGUF file or a storyteller.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the survey.")] = Path("out/survey"),
    size: Annotated[
        int | None,
        typer.Option("--context", help="Most tokens of a context; default: 1024 or the model's."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Stop after this number of tokens of texts.")
    ] = None,
    repeats: Annotated[
        tuple[int, int] | None,
        typer.Option(
            metavar="TEXTS TOKENS",
            help="In place of TEXTS: random tokens that are repeated, such as 100 50.",
        ),
    ] = None,
    needles: Annotated[
        tuple[int, int] | None,
        typer.Option(
            metavar="CONTEXTS TOKENS",
            help="Hide random tokens in TEXTS, and repeat them at the end of contexts: 100 16.",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Sets of metrics, and your own as module:name, with commas; default: basic, "
            "grid for pictures, long with --needles, and those of OUT with work."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 1,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Use a Ray cluster: its address, or auto.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a worker.")] = 1,
    seed: Annotated[int, typer.Option(help="The seed of the examples.")] = 0,
    shard: Annotated[
        int | None,
        typer.Option("--shard-tokens", help="Tokens of a shard; default: chosen from TEXTS."),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Print what --tokens would cost, by the first ones of TEXTS."),
    ] = False,
) -> None:
    """Measure what every head of a model does over many texts, or pictures.

    The same command continues an interrupted survey, and adds texts to it. Several processes may
    run it at the same time, on machines that share the folder: by torchrun, as a SLURM array, or by
    hand. `work OUT` computes missing shards of a survey, and `merge OUT` writes its tables.
    `compare OUT OTHER` writes the page of a survey with its differences from another one of the
    same texts.

    \b
    Examples:
      clearhead survey book.txt --out out/book
      clearhead survey texts/ code.jsonl --model DIR --workers 2
      clearhead survey --repeats 100 50 --model DIR --out out/repeats
      clearhead survey book.txt --needles 100 16 --model DIR --out out/hidden
      clearhead survey texts/ --model DIR --tokens 1000000000 --plan
      clearhead survey photos/ --model DIR --out out/pictures
      clearhead survey merge out/survey
      clearhead survey compare out/tuned out/base
    """
    texts = texts or []
    if texts and (folders := FOLDERS.get(texts[0])):
        if len(texts) == 1 + len(folders) or not Path(texts[0]).exists():
            _on_surveys(texts[0], texts[1:], model, metrics)
            return
    say_loading(model)
    from clearhead.core.errors import writable_folder
    from clearhead.corpus import survey as run
    from clearhead.corpus.planning import plan as plan_of
    from clearhead.views import html
    from clearhead.views.load import load_text_model

    sources, load = _sources(texts, repeats, needles), partial(load_text_model, pictures=True)
    if metrics is None and needles is not None:
        metrics = "long"
    sets = None if metrics is None else metrics.split(",")
    if plan:
        options: dict[str, Any] = {"context": size, "metrics": sets, "seed": seed}
        options |= {"tokens": tokens, "shard_tokens": shard, "threads": threads}
        typer.echo(str(plan_of(load(model), sources, **options)))
        return
    writable_folder(out, "a survey is", OTHER_FOLDER)
    result = run(
        load(model), sources, out=out, context=size, tokens=tokens, seed=seed, metrics=sets,
        threads=threads, shard_tokens=shard, workers=workers,
        ray=None if ray is None else (ray, load), progress=True,
    )  # fmt: skip
    typer.echo(str(result))
    if needles is not None:
        _print_retrieval(result)
    if "long" in (sets or ()):
        _print_forgetting(result)
    if result.grid is not None:
        _print_places(result)
    for name, reason in result.manifest.corpus["skipped texts"][:MOST_SHOWN]:
        say(f"left out {name}: {reason}")
    say(f"survey   {out}")
    say(f"page     {html.write_survey(result, out / 'index.html')}")


def _on_surveys(name: str, folders: list[str], model: Path | None, metrics: str | None) -> None:
    """Run `compare`, `merge` or `work`; raise `BadValue` unless it gets its `FOLDERS`."""
    from clearhead.core.errors import BadValue

    if len(folders) != len(FOLDERS[name]):
        count = f"{len(folders)} folder{'s' * (len(folders) != 1)}"
        rule = f"it takes {' and '.join(FOLDERS[name])}, the folders of surveys."
        hint = f"write clearhead survey {name} {' '.join(FOLDERS[name])}."
        raise BadValue(f"survey {name} got {count}.", rule, hint)
    out = Path(folders[0])
    if name == "compare":
        _compare(out, Path(folders[1]))
    elif name == "merge":
        from clearhead.corpus.merge import merge

        say(f"survey   {merge(out)}")
    else:
        say_loading(model)
        from clearhead.corpus.fold import Fold
        from clearhead.corpus.steps import setup_of_manifest, work
        from clearhead.views.load import load_text_model

        setup = setup_of_manifest(load_text_model(model, pictures=True), out, metrics)
        work(setup, out)
        Fold(out, setup.must_fit(out)).share()


def _compare(folder: Path, other: Path) -> None:
    """Write the page of a survey with its differences from another one, into its folder."""
    from clearhead.core.formatting import quantity
    from clearhead.corpus import Survey
    from clearhead.corpus.compare import LEAST_EFFECT, compare
    from clearhead.corpus.inference import LEAST_Q
    from clearhead.views import html

    one, two = Survey.open(folder), Survey.open(other)
    comparison = compare(folder, other)
    rows = comparison.to_pylist()
    sure = [row for row in rows if row["q"] < LEAST_Q]
    clear = sum(abs(row["effect"] or 0.0) >= LEAST_EFFECT for row in sure)
    say(
        f"{len(sure)} of {quantity(len(rows), 'number')} with a difference (q < {LEAST_Q}), "
        f"{clear} of these with an effect of {LEAST_EFFECT} or more"
    )
    for row in sure[:MOST_SHOWN]:
        effect = "unknown"
        if row["effect"] is not None:
            effect = "{effect:.2g} ({effect_low:.2g} to {effect_high:.2g})".format_map(row)
        typer.echo(
            f"layer {row['layer']}, head {row['head']}, {row['metric']}: {row['other']:.3g} -> "
            f"{row['mean']:.3g}, effect {effect}, q {row['q']:.2g}"
        )
    if comparison.warning:
        say(comparison.warning)
    say(f"page     {html.write_survey(one, folder / 'compare.html', other=two)}")


def _print_places(result: "Survey") -> None:
    """Print the head with the most weight at each place on the grid of pictures."""
    first = "row_number() over (partition by metric order by mean desc, layer, head) = 1"
    rows = result.query(
        "select metric, layer, head, mean, uniform from heads where metric in ('self', 'row', "
        f"'column', 'neighbours') or starts_with(metric, 'on_') qualify {first} order by metric"
    ).rows
    for name, layer, head, mean, uniform in rows:
        typer.echo(f"{name:<12}L{layer}H{head}  {mean:.3f}  (equal weights: {uniform:.3f})")


def _print_retrieval(result: "Survey") -> None:
    """Print the heads that look at needles most often."""
    rows = result.query(
        "select layer, head, mean, low, high from heads where metric = 'retrieval' "
        f"order by mean desc, layer, head limit {MOST_SHOWN}"
    ).rows
    for layer, head, mean, low, high in rows:
        ends = "" if low is None else f" ({low:.3f} to {high:.3f})"
        typer.echo(f"layer {layer}, head {head}: retrieval {mean:.3f}{ends}")


def _print_forgetting(result: "Survey") -> None:
    """Print how many KV heads need all keys, and those with the largest error without them."""
    from clearhead.core.errors import AttentionError
    from clearhead.corpus.forgetting import RECENT, known_windows
    from clearhead.corpus.long import SINKS

    windows = known_windows(result)
    recent = max((size for size in windows if size <= RECENT), default=RECENT)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            heads = result.key_heads(recent)
        except AttentionError as error:
            say(f"which keys can be forgotten is unknown: {error.gave} {error.hint}")
            return
    counts = Counter(head.kind() for head in heads)
    typer.echo(
        f"{counts['retrieval']} of {len(heads)} key heads need more than the first {SINKS} and the "
        f"last {recent} keys (retrieval), {counts['streaming']} do not (streaming), and "
        f"{counts['undecided']} are undecided."
    )
    typer.echo("The largest errors of their outputs, and how often they look at a copy:")
    for head in sorted(heads, key=lambda head: -head.error.mean)[:MOST_SHOWN]:
        largest, copies = head.error, head.retrieval.mean
        typer.echo(
            f"layer {head.layer}, key head {head.key_head}: error {largest.mean:.3f} "
            f"({largest.low:.3f} to {largest.high:.3f}), retrieval {copies:.3f}, {head.kind()}"
        )
    for warning in caught:
        say(str(warning.message))


def _sources(
    texts: list[str], repeats: tuple[int, int] | None, needles: tuple[int, int] | None
) -> "list[str | Path] | RandomRepeats | Needles":
    """Return files and folders as paths, in `Needles` if these are requested; or random tokens.

    Raises `BadValue` for a path that does not exist, for numbers that are too small, and unless
    there are either texts or random ones.
    """
    from clearhead.core.errors import AttentionError, BadValue
    from clearhead.corpus import Needles, RandomRepeats

    if bool(texts or needles) == bool(repeats) or (needles and not texts):
        both = f"Both {'texts' if texts else '--needles'} and --repeats were given."
        rule = "a survey reads texts, or random tokens that are repeated."
        hint = "pass files or folders, or --repeats 100 50."
        raise BadValue(both if repeats else "No text was given.", rule, hint)
    option, numbers = ("--repeats", repeats) if repeats else ("--needles", needles)
    if numbers is None:
        return _paths(texts)
    try:
        return RandomRepeats(*numbers) if repeats else Needles(_paths(texts), *numbers)
    except AttentionError as error:
        gave, number = f"{option} {numbers[0]} {numbers[1]} was given.", 50 if repeats else 16
        raise BadValue(gave, error.rule, f"pass for example {option} 100 {number}.") from error


def _paths(texts: list[str]) -> list[str | Path]:
    """Return files and folders as paths. Raises `BadValue` for a path that does not exist."""
    from clearhead.core.errors import BadValue

    sources: list[str | Path] = []
    for text in texts:
        exists = len(text) < 1024 and "\0" not in text and Path(text).exists()
        if not exists and not any(char.isspace() for char in text):
            rule = "a survey reads files and folders; a text on the command line has a space."
            hint = "check the path."
            raise BadValue(f"{text!r} does not exist.", rule, hint)
        sources.append(Path(text) if exists else text)
    return sources

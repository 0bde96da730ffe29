"""`clearhead bench`: clearhead timed beside other implementations and the hardware's ceilings."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from .checkout import import_from_checkout
from .options import OTHER_FOLDER
from .output import check_writable, say_written


def bench(
    groups: Annotated[
        list[str] | None,
        typer.Argument(metavar="GROUP", help="What to time; left out, everything (minutes)."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads for every peer; left out, torch's number.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is timed.")] = 5,
    peers: Annotated[
        list[str] | None, typer.Option("--peer", help="Only this one; may be given again.")
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Time the GPU and torch's kernels.")] = False,
    out: Annotated[Path, typer.Option(help="Where the figures go; the plot beside it.")] = Path(
        "out/bench.json"
    ),
) -> None:
    """Time clearhead beside its peers and the hardware.

    Everything is timed in turns, in one run; the hardware's own ceilings, too.

    Groups: prefill, masked, decode, training, tiny, and the sweeps lengths, heads, sizes, dtypes,
    threads; minilm is a real model end to end. A peer that is not installed is named and skipped.
    With --gpu: prefill, masked, decode, training and look, beside torch's kernels by name.

    \b
    Examples:
      clearhead bench prefill --rounds 7
      clearhead bench decode --threads 2 --peer torch
      clearhead bench --gpu
    """
    from clearhead.errors import BadValue, writable_folder
    from clearhead.explorer import plot

    benchmark = import_from_checkout("bench")
    if gpu and (threads or peers):
        raise BadValue(
            "bench was asked for --gpu with --threads or --peer.",
            "those are for what is timed on the CPU.",
            "leave them out.",
        )
    writable_folder(out.parent, "the figures and their plot are", OTHER_FOLDER)
    check_writable(out)
    results: list[dict[str, Any]] = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        of_gpu = sum(len(benchmark.GPU_GROUPS.get(g, ())) for g in groups or benchmark.GPU_GROUPS)
        total = of_gpu if gpu else benchmark.count_results(groups or (), threads)
        task = bar.add_task("timing", total=total)

        def on_result(result: dict[str, Any]) -> None:
            typer.echo(f"{benchmark.table(result)}\n")
            results.append(result)
            # After each result, so that an interrupted run leaves a file.
            out.write_text(json.dumps({"results": results}, indent=1) + "\n")
            bar.advance(task)

        if gpu:
            done = benchmark.measure_gpu(groups or (), rounds=rounds, on_result=on_result)
        else:
            done = benchmark.measure(
                groups or (), threads=threads, rounds=rounds, peers=peers or (), on_result=on_result
            )
    out.write_text(json.dumps(done, indent=1) + "\n")
    written = {"figures": out}
    if plot.can_draw():
        figure = benchmark.figure(done["results"])
        written["plot"] = plot.save(figure, out.with_suffix(".png"))
    say_written(written)

"""`clearhead bench`: time clearhead, other implementations, and the limits of the hardware."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from clearhead.core.errors import BadValue, writable_folder
from clearhead.views import plot
from clearhead_cli.options import OTHER_FOLDER
from clearhead_cli.output import check_writable, say_written

from . import GPU_GROUPS, count_results, figure, measure, measure_gpu, table


def bench(
    groups: Annotated[
        list[str] | None,
        typer.Argument(metavar="GROUP", help="What to time; default: everything (minutes)."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of every peer; default: torch's number.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of timings of each peer.")] = 5,
    peers: Annotated[
        list[str] | None, typer.Option("--peer", help="Time only this peer; may be repeated.")
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Time the GPU and torch's kernels.")] = False,
    out: Annotated[Path, typer.Option(help="The file of results; the plot is beside it.")] = Path(
        "out/bench.json"
    ),
) -> None:
    """Time clearhead, its peers, and the limits of the hardware.

    All of them are timed in turns, in one run.

    Groups: prefill, masked, decode, training, short-training, tiny, and the sweeps lengths, heads,
    sizes, dtypes, threads; minilm and smollm2 are real models end to end. Peers that are not
    installed are listed and skipped. With --gpu: prefill, long, masked, decode, training and look,
    compared with torch's kernels.

    \b
    Examples:
      clearhead bench prefill --rounds 7
      clearhead bench decode --threads 2 --peer torch
      clearhead bench --gpu
    """
    if gpu and (threads or peers):
        raise BadValue(
            "bench got --gpu with --threads or --peer.",
            "--threads and --peer are for timings on the CPU.",
            "leave them out.",
        )
    writable_folder(out.parent, "the figures and their plot are", OTHER_FOLDER)
    check_writable(out)
    results: list[dict[str, Any]] = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        of_gpu = sum(len(GPU_GROUPS.get(g, ())) for g in groups or GPU_GROUPS)
        total = of_gpu if gpu else count_results(groups or (), threads)
        task = bar.add_task("timing", total=total)

        def on_result(result: dict[str, Any]) -> None:
            typer.echo(f"{table(result)}\n")
            results.append(result)
            # After each result, so that an interrupted run leaves a file.
            out.write_text(json.dumps({"results": results}, indent=1) + "\n")
            bar.advance(task)

        if gpu:
            done = measure_gpu(groups or (), rounds=rounds, on_result=on_result)
        else:
            done = measure(
                groups or (), threads=threads, rounds=rounds, peers=peers or (), on_result=on_result
            )
    out.write_text(json.dumps(done, indent=1) + "\n")
    written = {"figures": out}
    if plot.can_draw():
        written["plot"] = plot.save(figure(done["results"]), out.with_suffix(".png"))
    say_written(written)

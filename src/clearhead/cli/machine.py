"""Commands about the machine: who answers here, at what cost and how fast."""

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from .. import __version__, engines, masks
from ..api.plan import plan as plan_of
from ..engines import cpu
from ..errors import BadValue, folder
from ..views import plot
from . import checks
from .options import OTHER, MaskText, say

LARGEST = 2**25  # queries to plan: their runs are counted in some seconds and GB


def plan(
    batch: Annotated[int, typer.Option(help="B")] = 1,
    heads: Annotated[int, typer.Option(help="H, query heads")] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="G, key heads; default H")] = None,
    queries: Annotated[int, typer.Option(help="Tq")] = 2048,
    keys: Annotated[int | None, typer.Option(help="Tk; default Tq")] = None,
    head_size: Annotated[int, typer.Option(help="D")] = 64,
    value_size: Annotated[int | None, typer.Option(help="Dv; default D")] = None,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16")] = "float32",
    mask: MaskText = "everything",
    softcap: Annotated[float | None, typer.Option(help="Cap scores smoothly.")] = None,
    dropout: Annotated[float, typer.Option(help="Drop weights with this probability.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the dropout.")] = None,
    grad: Annotated[bool, typer.Option("--grad", help="Gradients are wanted.")] = False,
    engine: Annotated[str, typer.Option(help="auto, or an engine by name.")] = "auto",
) -> None:
    """Who would answer a question of these sizes, and its cost.

    Nothing is computed.
    """
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise BadValue(
            f"dtype {dtype!r} is unknown.",
            "a dtype is float32, float64, bfloat16 or float16.",
            "pass one of these with --dtype.",
        )
    for name, value in (("--batch", batch), ("--heads", heads), ("--queries", queries),
                        ("--head-size", head_size), ("--kv-heads", kv_heads), ("--keys", keys),
                        ("--value-size", value_size)):  # fmt: skip
        if value is not None and not 0 <= value <= LARGEST:
            raise BadValue(
                f"{name} is {value}.",
                f"a size is from 0 to {LARGEST}: what each query may look at is counted.",
                f"pass another number with {name}.",
            )
    G, Tk = heads if kv_heads is None else kv_heads, queries if keys is None else keys
    Dv = head_size if value_size is None else value_size
    shapes = ((heads, queries, head_size), (G, Tk, head_size), (G, Tk, Dv))
    # One number, seen as a tensor of each shape: nothing is allocated.
    q, k, v = (torch.zeros((), dtype=kind).expand(batch, *shape) for shape in shapes)
    if grad:
        q = q.detach().requires_grad_()
    typer.echo(
        plan_of(
            q, k, v, mask=masks.parse(mask), softcap=softcap, dropout=dropout, seed=seed,
            engine=engine,
        )
    )  # fmt: skip


def bench(
    groups: Annotated[
        list[str] | None,
        typer.Argument(metavar="[GROUP]...", help="What to time; left out, everything (minutes)."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads for everybody; left out, torch's number.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is timed.")] = 5,
    peers: Annotated[
        list[str] | None, typer.Option("--peer", help="Only this one; may be given again.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the figures go; the plot beside it.")] = Path(
        "out/bench.json"
    ),
) -> None:
    """Time clearhead beside its peers and the hardware's own ceilings, interleaved in one run.

    Groups: prefill, masked, decode, training, tiny, and the sweeps lengths, heads, sizes, dtypes,
    threads; minilm is a real model end to end. A peer that is not installed is named and skipped.
    """
    from .. import bench as benchmark

    folder(out.parent, "the figures and their plot are", OTHER)
    checks.writable(out)
    told: list[dict[str, Any]] = []

    shown = Console(stderr=True)
    with Progress(console=shown, transient=True, disable=not shown.is_terminal) as bar:
        task = bar.add_task("timing", total=benchmark.how_many(groups or (), threads))

        def tell(result: dict[str, Any]) -> None:
            typer.echo(f"{benchmark.table(result)}\n")
            told.append(result)
            out.write_text(json.dumps({"results": told}, indent=1) + "\n")  # if it is interrupted
            bar.advance(task)

        done = benchmark.measure(
            groups or (), threads=threads, rounds=rounds, peers=peers or (), tell=tell
        )
    out.write_text(json.dumps(done, indent=1) + "\n")
    say(f"figures  {out}")
    if not plot.can_draw():
        say("plot     none, without matplotlib: pip install 'clearhead[plot]'")
        return
    picture = benchmark.figure(done["results"])
    say(f"plot     {plot.save(picture, out.with_suffix('.png'))}")


def doctor() -> None:
    """What is installed here, and which engines answer."""
    rows = [
        ("clearhead", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("torch uses", torch.backends.cpu.get_cpu_capability()),
        ("gpu", torch.cuda.get_device_name() if torch.cuda.is_available() else "none"),
    ]
    rows += [(f"engine {e.name}", e.caption) for e in engines.ENGINES]
    if tiles := cpu.left_to_torch():
        rows.append(("processor", tiles))
    for package, extra, purpose in (
        ("matplotlib", "plot", "pictures"),
        ("transformers", "hf", "--model"),
    ):
        here = _installed(package)
        missing = f"missing, for {purpose}: pip install 'clearhead[{extra}]'"
        rows.append((package, missing if here is None else f"{here}, for {purpose}"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")


def _installed(package: str) -> str | None:
    """The version that is installed; None if none is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

"""`clearhead train`, `measure` and `ablate`: commands for models like the included one."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from clearhead import demo
from clearhead_cli.output import say, say_loading

from .ablate import ablate as train_variants
from .measure import measure as measure_heads
from .train import train as train_model


def train(
    text: Annotated[
        Path | None, typer.Argument(help="Your own text file; default: stories of the grammar.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The folder for checkpoints, weights and the loss curve.")
    ] = Path("out/storyteller"),
    seed: Annotated[int, typer.Option(help="The seed of weights and stories.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Number of batches.")] = 4000,
    batch: Annotated[int, typer.Option(min=1, help="Stories, or passages, per batch.")] = 8,
    rate: Annotated[float, typer.Option(min=0, help="The highest learning rate.")] = 2.5e-3,
    size: Annotated[int, typer.Option(help="Features per word.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the decoder.")] = 2,
    heads: Annotated[int, typer.Option(help="Heads per layer; must divide the size.")] = 8,
    length: Annotated[int, typer.Option("--context", help="The context, in words.")] = 128,
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 250,
) -> None:
    """Train a storyteller, on its stories or on your text.

    If it is interrupted, the same command continues from the last checkpoint, with the same final
    weights.

    \b
    Examples:
      clearhead train --out out/mine
      clearhead train book.txt --steps 2000 --size 64
    """
    storyteller = train_model(
        out, text=text, seed=seed, steps=steps, batch=batch, rate=rate, d=size, layers=layers,
        heads=heads, context=length, every=every,
        command=shlex.join(["clearhead", *sys.argv[1:]]),
    )  # fmt: skip
    typer.echo(f"held-out loss {storyteller.provenance['held_out_loss']:.3f} nats per word")
    for name in ("model.safetensors", "loss.png"):
        if (out / name).exists():
            say(f"written  {out / name}")
    if text is None:
        say(f"what its heads do: clearhead measure {shlex.quote(str(out))}")
    say(f"look at it: clearhead look TEXT --model {shlex.quote(str(out))}")


def measure(
    model: Annotated[
        Path | None,
        typer.Argument(help="A folder that train wrote; default: the included storyteller."),
    ] = None,
    search: Annotated[int, typer.Option(help="Training stories used to select heads.")] = 200,
    report: Annotated[int, typer.Option(help="Held-out stories used for the results.")] = 500,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Measure what each head does, and how well words are predicted.

    Baselines: random weights, a fixed distance, chance, and counts of words and pairs.

    \b
    Examples:
      clearhead measure
      clearhead measure out/mine --json
    """
    say_loading(model)
    storyteller = demo.load(model)
    table = measure_heads(storyteller, search=search, report=report)
    typer.echo(json.dumps(table.as_dict()) if as_json else str(table))
    if model is not None:
        say(f"table    {demo.keep_table(model, table.as_dict())}")


def ablate(
    out: Annotated[Path, typer.Option(help="The folder for the table and the pictures.")] = Path(
        "out/ablation"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Batches per variant.")] = 1500,
    seed: Annotated[int, typer.Option(help="The seed of weights and stories.")] = 1,
) -> None:
    """Train without scaling, positions, mask or heads, and compare.

    Prints and draws the loss, and what the heads look at.

    \b
    Examples:
      clearhead ablate --steps 500 --out out/ablation
    """
    typer.echo(str(train_variants(out, steps=steps, seed=seed)))
    for path in sorted(out.glob("ablation*")):
        say(f"written  {path}")

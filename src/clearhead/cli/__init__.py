"""The same verbs, from a shell."""

import json
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from .. import __version__, attend, lesson, masks
from ..engines import cpu
from ..errors import AttentionError, BadValue
from ..folder import folder
from ..plan import plan as plan_of
from ..scaling import why_scale
from ..trace import Trace
from ..views import html, plot, text as terminal
from . import checks
from .read import text_of

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

OTHER = "pass another folder with --out."

Text = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TEXT]",
        help="The text, or the path of a text file; - or nothing reads standard input.",
    ),
]
Size = Annotated[int, typer.Option(help="Features per token.")]
Heads = Annotated[int, typer.Option(help="Number of heads; must divide the size.")]
Seed = Annotated[int, typer.Option(help="What the random embeddings and projections start from.")]
MaskText = Annotated[
    str, typer.Option("--mask", help="Who may look at whom, e.g. 'causal & window(before=3)'.")
]
Positions = Annotated[bool, typer.Option(help="Add sinusoidal positions to the embeddings.")]
Model = Annotated[
    Path | None, typer.Option(help="Take tokens, Q, K and V from this Hugging Face checkpoint.")
]
Layer = Annotated[int, typer.Option(help="With --model: which layer, from 0.")]


@app.command()
def explain(
    context: typer.Context,
    text: Text = None,
    size: Size = 8,
    heads: Heads = 2,
    seed: Seed = 123,
    mask: MaskText = "everything",
    dropout: Annotated[float, typer.Option(help="Drop weights with this probability.")] = 0.0,
    scale: Annotated[
        float | None, typer.Option(help="Multiply scores by this; default 1/sqrt(head size).")
    ] = None,
    positions: Positions = True,
    model: Model = None,
    layer: Layer = 0,
    head: Annotated[int | None, typer.Option(help="Show only this head, from 0.")] = None,
    query: Annotated[
        str | None, typer.Option(help="Follow one query in full: a token, or its number.")
    ] = None,
    decimals: Annotated[int, typer.Option(min=0, max=12, help="Digits after the point.")] = 4,
    png: Annotated[
        Path | None, typer.Option(help="Also draw one head's steps, --head or 0, here.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Also write the interactive page here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """See attention computed on a text, step by step."""
    checks.explain_options(context, model)
    checks.json_options(context, as_json)
    checks.writable(png, page)
    if png is not None:
        plot.suffix_of(png)
    trace = _trace(
        text, size=size, heads=heads, seed=seed, mask=mask, dropout=dropout, scale=scale,
        positions=positions, model=model, layer=layer,
    )  # fmt: skip
    shown = 0 if head is None else checks.within("head", head, trace["weights"].shape[-3])
    if as_json:
        typer.echo(json.dumps(terminal.to_json(trace), ensure_ascii=True, allow_nan=False))
    elif query is not None:
        terminal.follow(trace, query, head=shown, decimals=decimals)
    else:
        terminal.show(trace, heads=None if head is None else [head], decimals=decimals)
    if png is not None:
        _say(f"picture: {plot.save(plot.steps(trace, head=shown), png)}")
    if page is not None:
        _say(f"page: {html.write_page(trace, page, title='clearhead', note=_note(model, seed))}")


@app.command()
def look(
    context: typer.Context,
    text: Text = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Look at this model: a Hugging Face checkpoint, or a trained storyteller."
        ),
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Look at random weights, from which training begins.")
    ] = False,
    size: Size = 32,
    heads: Heads = 4,
    seed: Seed = 123,
    mask: MaskText = "causal",
    positions: Positions = True,
    tile: Annotated[
        str | None,
        typer.Option(
            metavar="LAYER:HEAD:QUERIES:KEYS",
            help="With --model: exact weights of a part of a long text, e.g. 3:5:1024-1087:0-63.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for the pictures and the page.")] = Path(
        "out"
    ),
) -> None:
    """See what every head looks at: here, as picture, as page.

    The heads are those of a trained model: the storyteller that comes with clearhead, unless
    --model names another.
    """
    checks.look_options(context, model, random)
    if tile is not None and model is None:
        raise checks.no_tile()
    words = text_of(text)
    folder(out, "pictures and page are", OTHER)
    if random:
        trace = lesson.explain_text(
            words, size=size, heads=heads, seed=seed, mask=masks.parse(mask), positions=positions
        )
        _look_random(trace, out, seed)
        return
    from .. import report, storyteller

    if tile is not None and model is not None and storyteller.is_storyteller(model):
        raise checks.no_tile()
    if model is not None and not storyteller.is_storyteller(model):
        if tile is not None:
            trace = report.tile(model, words, *checks.tile(tile))
            typer.echo(f"{model.name}, {trace.about}")
            terminal.heat(trace)
            _say(f"picture  {plot.save(plot.heads(trace), out / 'tile.png')}")
            return
        found = report.report(model, words)
        typer.echo(str(found))
    else:
        teller = storyteller.load(model)
        found = report.report_teller(teller, words)
        typer.echo(f"After each word, what the storyteller expects next:\n\n{teller.read(words)}\n")
        typer.echo(f"{found}\n")
        for head in teller.heads:
            links = ", ".join(map(str, teller.links(words, head)))
            typer.echo(
                f"{head}; here, right or wrong:\n{links or 'no word of this text asks it'}\n"
            )
            terminal.heat(teller.explain(words, head.layer), heads=[head.head])
            typer.echo()
    for kind, path in report.write(found, out).items():
        _say(f"{kind:<8} {path}")


def _look_random(trace: Trace, out: Path, seed: int) -> None:
    terminal.heat(trace)
    note = _note(None, seed)
    _say(f"\n{note}")
    _say(f"picture  {plot.save(plot.heads(trace), out / 'heads.png')}")
    _say(f"page     {html.write_page(trace, out / 'look.html', title='clearhead', note=note)}")


@app.command()
def train(
    text: Annotated[
        Path | None,
        typer.Argument(help="A text file of your own; left out, the stories of the grammar."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The folder for checkpoints, weights and the loss curve.")
    ] = Path("out/storyteller"),
    seed: Annotated[int, typer.Option(help="What weights and stories start from.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="How many batches are read.")] = 4000,
    batch: Annotated[int, typer.Option(min=1, help="Stories, or passages, in a batch.")] = 8,
    rate: Annotated[float, typer.Option(min=0, help="The highest learning rate.")] = 2.5e-3,
    size: Annotated[int, typer.Option(help="Features per word.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the decoder.")] = 2,
    heads: Annotated[int, typer.Option(help="Heads per layer; must divide the size.")] = 8,
    length: Annotated[int, typer.Option("--context", help="Words read at a time.")] = 128,
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 250,
) -> None:
    """Train a storyteller, on its stories or on your text.

    Killed, it goes on from its last checkpoint when the same command is given again, and ends with
    the same weights.
    """
    from .. import storyteller

    teller = storyteller.train(
        out, text=text, seed=seed, steps=steps, batch=batch, rate=rate, d=size, layers=layers,
        heads=heads, context=length, every=every,
        command=shlex.join(["clearhead", *sys.argv[1:]]),
    )  # fmt: skip
    typer.echo(f"held-out loss {teller.made['held_out_loss']:.3f} nats per word")
    for name in ("model.safetensors", "loss.png"):
        if (out / name).exists():
            _say(f"written  {out / name}")
    if text is None:
        _say(f"what its heads do: clearhead measure {shlex.quote(str(out))}")
    _say(f"look at it: clearhead look TEXT --model {shlex.quote(str(out))}")


@app.command()
def measure(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A folder that train wrote; left out, the storyteller that comes here."
        ),
    ] = None,
    search: Annotated[int, typer.Option(help="Training stories that heads are found on.")] = 200,
    report: Annotated[int, typer.Option(help="Held-out stories that are reported on.")] = 500,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Measure which head does what, and how words are guessed.

    Beside it stand random weights, a fixed distance, chance, and counting words and pairs.
    """
    from .. import storyteller

    teller = storyteller.load(model)
    table = storyteller.measure(teller, search=search, report=report)
    typer.echo(json.dumps(table.as_dict()) if as_json else str(table))
    if model is not None:
        _say(f"table    {storyteller.keep_table(model, table.as_dict())}")


@app.command()
def ablate(
    out: Annotated[Path, typer.Option(help="The folder for the table and the pictures.")] = Path(
        "out/ablation"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Batches that each variant reads.")] = 1500,
    seed: Annotated[int, typer.Option(help="What weights and stories start from.")] = 1,
) -> None:
    """Take scaling, positions, mask or heads away, and train.

    What becomes of the loss, and of the heads, is printed and drawn.
    """
    from .. import storyteller

    typer.echo(str(storyteller.ablate(out, steps=steps, seed=seed)))
    for path in sorted(out.glob("ablation*")):
        _say(f"written  {path}")


@app.command()
def scale(
    size: Annotated[int, typer.Option(help="The head size d to show.")] = 256,
    keys: Annotated[int, typer.Option(help="How many random keys.")] = 32,
    seed: Annotated[int, typer.Option(help="What the random numbers start from.")] = 0,
    png: Annotated[Path | None, typer.Option(help="Also draw it to this picture.")] = None,
) -> None:
    """Why divide by sqrt(d)? Numbers with and without the scaling."""
    checks.writable(png)
    report = why_scale(size, keys=keys, seed=seed)
    typer.echo(str(report))
    if png is not None:
        _say(f"picture: {plot.save(plot.scaling(report), png)}")


@app.command()
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
        if value is not None and value < 0:
            raise BadValue(
                f"{name} is {value}.", "a size is 0 or more.", f"pass another number with {name}."
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


@app.command()
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

    with Progress(console=Console(stderr=True), transient=True) as bar:
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
    _say(f"figures  {out}")
    if _installed("matplotlib") is None:
        _say("plot     none, without matplotlib: pip install 'clearhead[plot]'")
        return
    picture = benchmark.figure(done["results"])
    _say(f"plot     {plot.save(picture, out.with_suffix('.png'))}")


@app.command()
def doctor() -> None:
    """What is installed here, and which engines answer."""
    rows = [
        ("clearhead", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("torch uses", torch.backends.cpu.get_cpu_capability()),
        ("gpu", torch.cuda.get_device_name() if torch.cuda.is_available() else "none"),
    ]
    rows += [(f"engine {e.name}", e.caption) for e in attend.ENGINES]
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


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"clearhead {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Say which this is."),
    ] = False,
) -> None:
    """Attention with a clear head: type a sentence, see attention computed."""


def main() -> None:
    """Run the command line. An error prints its three parts and exits with 2."""
    try:
        app()
    except AttentionError as error:
        _fail(error)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        _fail(
            BadValue(
                f"Reading or writing failed: {error}.",
                "what is read exists, and what is written has room.",
                "check the path, its permissions and the space left on the disk.",
            )
        )


def _fail(error: AttentionError) -> None:
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"Error: {error}")
    sys.exit(2)


def _trace(
    text: list[str] | None, *, model: Path | None, layer: int, mask: str, **options: Any
) -> Trace:
    words = text_of(text)
    if model is None:
        return lesson.explain_text(words, mask=masks.parse(mask), **options)
    from ..hf import Checkpoint

    return Checkpoint(model).explain(words, layer)


def _note(model: Path | None, seed: int) -> str:
    if model is not None:
        return f"Learned weights from {model}."
    return (
        f"The weights are random (seed {seed}): nothing has been learned yet, so the patterns mean "
        "nothing. A trained model looks at what it needs: verbs at their subjects, pronouns at "
        "their antecedents."
    )


def _say(line: str) -> None:
    typer.echo(line, err=True)

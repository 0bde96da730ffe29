"""`clearhead plan`: print the engine that would compute attention of these sizes, and its cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import MaskText, refuse
from .output import wrapped

if TYPE_CHECKING:
    import torch

LABEL_WIDTH = 16  # of the labels in the lines of a plan
SIZES = "heads kv_heads keys head_size value_size mask".split()
ENGINE = "softcap dropout seed grad engine".split()  # what a plan of ranks does not depend on


def plan(
    context: typer.Context,
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
    dropout: Annotated[
        float | None, typer.Option(help="Drop weights with this probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the dropout.")] = None,
    grad: Annotated[bool, typer.Option("--grad", help="Plan for gradients.")] = False,
    engine: Annotated[str, typer.Option(help="auto, or an engine by name.")] = "auto",
    ranks: Annotated[
        int | None, typer.Option(help="Plan for a sequence that is cut over this many processes.")
    ] = None,
    layout: Annotated[
        str, typer.Option(help="How it is cut: contiguous or head-tail.")
    ] = "contiguous",
    model: Annotated[
        Path | None,
        typer.Option(help="With --ranks: plan all calls of this model, by its configuration."),
    ] = None,
) -> None:
    """Print the engine that would compute attention, and its cost.

    Nothing is computed.

    \b
    Examples:
      clearhead plan --queries 8192 --mask 'causal & window(before=511)'
      clearhead plan --queries 1 --keys 32768 --kv-heads 2 --dtype bfloat16
      clearhead plan --queries 131072 --mask causal --ranks 64 --layout head-tail
      clearhead plan --model DIR --queries 131072 --ranks 64 --layout head-tail
    """
    import torch

    from clearhead import masks
    from clearhead.core.errors import BadValue
    from clearhead.core.errors.limits import MOST_PLANNED_SIZE as most
    from clearhead.core.functional.plan import plan as plan_of

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        gave = f"dtype {dtype!r} is unknown."
        hint = "pass one of these with --dtype."
        raise BadValue(gave, "a dtype is float32, float64, bfloat16 or float16.", hint)
    for name, value in (("--batch", batch), ("--heads", heads), ("--queries", queries),
                        ("--head-size", head_size), ("--kv-heads", kv_heads), ("--keys", keys),
                        ("--value-size", value_size)):  # fmt: skip
        if value is not None and not 1 <= value <= most:
            rule = f"a size is from 1 to {most}, because plan counts the keys of each query."
            raise BadValue(f"{name} is {value}.", rule, f"pass another number with {name}.")
    if model is not None:
        typer.echo(wrapped(_of_model(context, model, kind), LABEL_WIDTH))
        return
    G, Tk = heads if kv_heads is None else kv_heads, queries if keys is None else keys
    Dv = head_size if value_size is None else value_size
    shapes = ((heads, queries, head_size), (G, Tk, head_size), (G, Tk, Dv))
    # Views of one number, which need no memory.
    q, k, v = (torch.zeros((), dtype=kind).expand(batch, *shape) for shape in shapes)
    if grad:
        q = q.detach().requires_grad_()
    planned: object
    if ranks is None:
        rule = "a layout says which positions a rank has."
        refuse(context, ["layout"], "without --ranks", rule, "pass --ranks beside {}.")
        planned = plan_of(
            q, k, v, mask=masks.parse(mask), softcap=softcap, dropout=dropout, seed=seed,
            engine=engine,
        )  # fmt: skip
    else:
        from clearhead.distributed import plan as plan_of_ranks

        rule = "the plan of ranks has both passes, and does not depend on it."
        refuse(context, ENGINE, "with --ranks", rule, "leave {} out.")
        planned = plan_of_ranks(q, k, v, world=ranks, layout=layout, mask=masks.parse(mask))
    typer.echo(wrapped(str(planned), LABEL_WIDTH))


def _of_model(context: typer.Context, model: Path, dtype: "torch.dtype") -> str:
    """Return the plan of the attention of a model on ranks."""
    import torch

    from clearhead.core.errors import BadValue
    from clearhead.distributed import plan_model
    from clearhead.hf.supports import of_folder

    refuse(context, SIZES + ENGINE, "with --model", "the model has these itself.", "leave {} out.")
    options = context.params
    if options["ranks"] is None:
        rule = "a model is planned for the ranks that read its text together."
        raise BadValue("--model was passed without --ranks.", rule, "pass for example --ranks 8.")
    ids = torch.zeros(options["batch"], options["queries"], dtype=torch.long, device="meta")
    built = of_folder(model).to(dtype)
    return str(plan_model(built, ids, world=options["ranks"], layout=options["layout"]))

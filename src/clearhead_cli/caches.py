"""`clearhead caches`: what caches that round or drop keys cost, for each head and the loss."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Model, Text
from .output import say_loading
from .text_input import read_text


def caches(
    text: Text = None,
    model: Model = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="q8_0, q5_1, q5_0, q4_1, q4_0, fp8_e4m3, fp16 or bf16, for keys and values; "
            "again for more. By default q8_0 and q4_0, which need heads of 32 numbers, and "
            "fp8_e4m3 for the included model.",
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MASK",
            help="The keys that a cache keeps: 'prefix(4) | window(before=255, after=0)'.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw heads by layers: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Measure what a cache of fewer bits or keys costs.

    Prints, for each cache, how far the attention of the heads is from the exact one, the most
    damaged heads, and the change of the loss on the text.

    \b
    Examples:
      clearhead caches story.txt --model DIR
      clearhead caches story.txt --format bf16 --keep 'prefix(4) | window(before=63, after=0)'
    """
    say_loading(model)
    import clearhead
    from clearhead import masks
    from clearhead.views.load import load_text_model

    dropping = {f"keep {mask}": clearhead.edits.keep_only(masks.parse(mask)) for mask in keep or ()}
    default = ["fp8_e4m3"] if model is None else ["q8_0", "q4_0"]
    named = formats or ([] if keep else default)
    if out is not None:
        clearhead.views.plot.suffix_of(out)
    reader = load_text_model(model)
    _, inputs = reader.tokens_and_inputs(read_text(text))
    damage = clearhead.compare_caches(
        reader.predictor or reader.module,
        inputs,
        {**{form: form for form in named}, **dropping},
        metric="loss" if reader.predictor else None,
    )
    typer.echo(str(damage))
    if out is not None:
        typer.echo(f"wrote {clearhead.views.plot.save(clearhead.views.plot.caches(damage), out)}")

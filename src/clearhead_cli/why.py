"""`clearhead why`: split the score of a token and the token that a head looks at."""

import re
from typing import Annotated

import typer

from .options import Model, Text
from .output import say_loading
from .text_input import read_text
from .whatif import positions_of


def why(
    text: Text = None,
    model: Model = None,
    head: Annotated[str, typer.Option(metavar="HEAD", help="The layer and head: L1H3.")] = "",
    at: Annotated[
        str, typer.Option(metavar="WORD", help="The token that looks: its last place, or a number.")
    ] = "",
    key: Annotated[
        str | None,
        typer.Option(
            metavar="WORD", help="The token that it looks at; by default that of most weight."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run path edits beside the largest parts.")
    ] = False,
) -> None:
    """Split a score into what wrote the query and the key.

    Prints the embeddings, heads and MLPs of earlier layers from which the score of two tokens is
    summed, compared with the other tokens that the head may look at.

    \b
    Examples:
      clearhead why "There was a queen. She danced." --head L1H0 --at She
      clearhead why story.txt --model DIR --head L18H6 --at bridge --check
    """
    say_loading(model)
    import clearhead
    from clearhead.core.errors import BadValue
    from clearhead.views.load import load_text_model

    if (named := re.fullmatch(r"[Ll]?(\d+)[Hh.](\d+)", head.strip())) is None or not at:
        raise BadValue(
            f"--head {head!r} and --at {at!r} were passed.",
            "why needs a layer and a head, and the token that looks.",
            "pass for example --head L1H3 --at She.",
        )
    reader = load_text_model(model)
    tokens, inputs = reader.tokens_and_inputs(read_text(text))
    layer, number = map(int, named.groups())
    query = positions_of(at, tokens)[-1]

    def split(key: int | None, check: bool) -> clearhead.Why:
        return clearhead.why(
            reader.module, inputs, layer=layer, head=number, query=query, key=key,
            against="nothing" if key is None else "others", tokens=tokens, check=check,
        )  # fmt: skip

    if key is None:
        target = int(split(None, False).weights.argmax())
    else:
        target = positions_of(key, tokens)[-1]
    typer.echo(repr(split(target, check)))

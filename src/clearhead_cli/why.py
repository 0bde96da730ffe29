"""`clearhead why`: split the score of a token and the token that a head looks at, or the mean."""

import re
from typing import Annotated

import typer

from .options import HEAD, Model, Text
from .output import say_loading
from .text_input import read_text
from .whatif import positions_of


def why(
    text: Text = None,
    model: Model = None,
    head: Annotated[str, typer.Option(metavar="HEAD", help="The layer and head: L1H3.")] = "",
    at: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="The token that looks: its last place, or a number. By default the mean over all.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="The token that it looks at; by default that of most weight, or all in a mean.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run path edits beside the largest parts.")
    ] = False,
) -> None:
    """Split a score into what wrote the query and the key.

    Prints the embeddings, heads and MLPs of earlier layers from which the score of two tokens is
    summed, compared with the other tokens that the head may look at. Without --at, they are means
    over the text.

    \b
    Examples:
      clearhead why "There was a queen. She danced." --head L1H0 --at She
      clearhead why story.txt --model DIR --head L18H6 --at bridge --check
    """
    say_loading(model)
    import clearhead
    from clearhead.core.errors import BadValue
    from clearhead.views.load import load_text_model

    if (named := re.fullmatch(HEAD, head.strip())) is None:
        rule = "why needs a layer and a head."
        hint = "pass for example --head L1H3."
        raise BadValue(f"--head {head!r} was passed.", rule, hint)
    reader = load_text_model(model)
    tokens, inputs = reader.tokens_and_inputs(read_text(text))
    layer, number = map(int, named.groups())
    query = None if at is None else positions_of(at, tokens)[-1]
    target = None if key is None else positions_of(key, tokens)[-1]

    def split(key: int | None, check: bool, against: str = "others") -> clearhead.Why:
        return clearhead.why(
            reader.module, inputs, layer=layer, head=number, query=query, key=key, against=against,
            over="rows" if query is None else None, tokens=tokens, check=check,
        )  # fmt: skip

    if target is None and query is not None:
        target = int(split(None, False, "nothing").weights.argmax())
    typer.echo(repr(split(target, check)))

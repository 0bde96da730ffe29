"""Both functions under one name, together: with only one, the mask would be lost without a word."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import Missing, how_to_install
from .attention import attention_forward
from .internals import check_internals
from .masks import attention_mask

NAME = "clearhead"


def register() -> None:
    """Make ``attn_implementation="clearhead"`` available to every transformers model that hands its
    attention to that interface. Of others, transformers raises for some (GPT-J), and some take the
    name and go on as before (DeBERTa): `watch` raises where a model never asks.

    Raises `Missing`, an ImportError, if transformers is not installed, and `BadValue` if it is of a
    version that lacks something that clearhead reads.
    """
    library = transformers()
    check_internals()
    from transformers.masking_utils import AttentionMaskInterface

    library.AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def transformers() -> Any:
    """The library, or an error that says how to install it."""
    try:
        import transformers
    except ImportError as error:
        raise Missing(
            "transformers is not installed.",
            "reading a Hugging Face checkpoint needs it.",
            how_to_install("hf"),
        ) from error
    return transformers


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the warnings and the progress bars of transformers while a model is loaded."""
    logging = transformers().utils.logging
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)

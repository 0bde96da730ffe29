"""Register the attention function and the mask function of clearhead in transformers.

With only one of the two, transformers would ignore the mask without a warning.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..core.errors import needs
from .attention import attention_forward
from .internals import check_internals
from .masks import attention_mask

NAME = "clearhead"


def register() -> None:
    """Make ``attn_implementation="clearhead"`` available to transformers.

    It works for every model that uses transformers' attention interface. For some other models
    (GPT-J) transformers raises an error; others (DeBERTa) accept the name and compute attention
    themselves, in which case `watch` raises one.

    Raises `Missing`, an ImportError, if transformers is not installed, and `BadValue` if its
    version lacks something that clearhead reads.
    """
    library = transformers()
    check_internals()
    from transformers.masking_utils import AttentionMaskInterface

    library.AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def transformers() -> Any:
    """Import and return transformers. Raises `Missing` if it is not installed."""
    with needs("hf", "reading a Hugging Face checkpoint needs it."):
        import transformers
    return transformers


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the warnings and progress bars of transformers inside the `with` block."""
    logging = transformers().utils.logging
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)

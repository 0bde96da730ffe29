"""Import programs that are in a checkout of clearhead and not in the installed package."""

import importlib
import sys
from pathlib import Path
from types import ModuleType


def import_from_checkout(name: str) -> ModuleType:
    """Import a module of the checkout of clearhead: `bench`, `examples.storyteller`.

    Raises `BadValue` if clearhead was installed without its checkout.
    """
    import clearhead
    from clearhead.core.errors import BadValue

    root = Path(clearhead.__file__).parents[2]
    if not root.joinpath(*name.split(".")).is_dir():
        raise BadValue(
            f"There is no {name} beside the installed package.",
            "benchmarks and the training of the included model are only in the repository.",
            "clone the repository, install it with pip install -e ., and repeat the command.",
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return importlib.import_module(name)

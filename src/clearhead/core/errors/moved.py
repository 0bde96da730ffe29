"""Import modules by the names that they had before version 0.2.

Old names of public modules import the new ones, with a warning. Old names of internal modules raise
an error that names the new module.
"""

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PUBLIC = {
    "clearhead.compat": "clearhead.core.functional.compat",
    "clearhead.notebook": "clearhead.views.notebook",
    "clearhead.report": "clearhead.models.report",
    "clearhead.serve": "clearhead.views.serve",
    "clearhead.storyteller": "clearhead.demo",
    "clearhead.views": "clearhead.views",
}
INTERNAL = {
    "clearhead.api": "clearhead.core.functional and clearhead.models",
    "clearhead.bench": "bench, in a checkout of clearhead",
    "clearhead.results": "clearhead.core.functional.trace and clearhead.models",
}


class _Moved(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        top = ".".join(name.split(".")[:2])
        if top in INTERNAL:
            raise ModuleNotFoundError(f"{name} has moved: import {INTERNAL[top]}.", name=name)
        return ModuleSpec(name, self) if top in PUBLIC else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        top = ".".join(old.split(".")[:2])
        new = PUBLIC[top] + old[len(top) :]
        try:
            real = importlib.import_module(new)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{old} has moved: import {PUBLIC[top]}.", name=old
            ) from error
        warnings.warn(f"{old} has moved: import {new}.", DeprecationWarning, stacklevel=2)
        sys.modules[old] = _CallableReport(old) if old == "clearhead.report" else real


class _CallableReport(ModuleType):
    """The old module `clearhead.report`, which has the name of the function `clearhead.report`.

    It can be called like the function, and has the attributes of the modules that replaced it.
    """

    def __getattr__(self, name: str) -> Any:
        for new in ("inspection.report", "explorer"):
            module = importlib.import_module(f"clearhead.{new}")
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"clearhead.report has no {name!r}")

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return importlib.import_module("clearhead.models.report").report(*args, **keywords)


def keep_old_names() -> None:
    """Make the old names of modules importable."""
    sys.meta_path.append(_Moved())

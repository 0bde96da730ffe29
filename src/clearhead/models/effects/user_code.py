"""Find what a function refers to, and whether an installed package or the user wrote it.

Code of an installed package is identified by the package's release. Code of the user may change
while its name stays, so what it refers to is found and read.
"""

import builtins
import dis
import hashlib
import importlib.metadata
import sys
import sysconfig
import types
from collections.abc import Iterator
from functools import cache
from importlib.util import resolve_name

OWN = __name__.partition(".")[0]

# User code may refer to these, because their results follow from their arguments alone. Other
# functions may read a file, a clock or a setting.
_BUILTINS = {
    *"abs all any bool bytes callable complex dict divmod enumerate filter float format".split(),
    *"frozenset getattr hasattr hash int isinstance issubclass iter len list map max min".split(),
    *"next object pow print property range repr reversed round set setattr slice sorted".split(),
    *"staticmethod classmethod str sum super tuple type vars zip __build_class__".split(),
}
_MODULES = (
    "torch._C", "torch._tensor", "torch.amp", "torch.autograd", "torch.distributions", "torch.fft",
    "torch.func", "torch.functional", "torch.linalg", "torch.nn", "torch.special",
    "torch._jit_internal", "torch.utils._contextlib",
    "transformers.activations", "transformers.modeling_outputs", OWN, "abc", "cmath", "collections",
    "contextlib", "copy", "dataclasses", "einops", "enum", "functools", "itertools", "math",
    "numbers", "operator", "_operator", "statistics", "types", "typing",
)  # fmt: skip
_DYNAMIC = {"getattr", "vars", "__dict__", "attrgetter", "methodcaller"}  # read by a computed name
_SCOPED = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL")


@cache
def release(module: str) -> str | None:
    """Identify the installed release of the package of a module. None for code of the user.

    It is the version, with the digests of the package's files.
    """
    if not (root := module.partition(".")[0]):
        return None
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    if root in sys.stdlib_module_names:
        inside = file.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in file
        return "python" if inside or not file else None
    try:
        installed = importlib.metadata.distribution(root)
    except importlib.metadata.PackageNotFoundError:
        return "source" if root == OWN else None
    record = installed.read_text("RECORD")
    if record is None or not file.startswith(str(installed.locate_file(root))):  # an editable one
        return installed.version if root == OWN else None
    own = (x for x in record.splitlines() if x.startswith((f"{root}/", f"{root}.py,")))
    sources = "\n".join(sorted(x for x in own if ".py," in x))  # each line has a file's digest
    return f"{installed.version} {hashlib.sha256(sources.encode()).hexdigest()[:16]}"


def module_of(value: object) -> str:
    """Return the name of the module that defines a function or a class; "" if unknown.

    A decorator may give a function the name of another, so that of its global variables counts.
    """
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__", ""))
    return getattr(value, "__module__", None) or ""


def replaced_members(namespace: type | types.ModuleType) -> Iterator[tuple[str, object]]:
    """Yield the functions of the user that replace those of an installed class or module."""
    for name, member in vars(namespace).items():
        if isinstance(member, types.FunctionType) and release(module_of(member)) is None:
            yield name, member


def follows_from_arguments(value: object) -> bool:
    """Return whether a function or class of an installed package is known to read nothing else."""
    module = module_of(value)
    if module == "builtins":
        error = isinstance(value, type) and issubclass(value, BaseException)
        return error or getattr(value, "__name__", "") in _BUILTINS
    return module == "torch" or f"{module}.".startswith(tuple(f"{x}." for x in _MODULES))


def references(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the name and value of each variable that the code of a function may refer to.

    These are the variables of its closure, the global ones, and members of modules with a name that
    the code contains. If it reads members by a computed name, they are all members.
    """
    codes = [*_nested(function.__code__)]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = {name: _content(cell) for name, cell in cells}
    for code in codes:
        values |= _scoped(code, function.__globals__)
    strings = (x for code in codes for x in code.co_consts if isinstance(x, str))
    names = {name for code in codes for name in code.co_names}
    is_dynamic = bool(names & _DYNAMIC)
    names |= {part for text in strings for part in text.split(".")}
    queue, seen = [*values.items()], set[int]()
    while queue:
        path, value = queue.pop(0)
        yield path, value
        if not isinstance(value, types.ModuleType) or id(value) in seen:
            continue
        seen.add(id(value))
        own = release(value.__name__) is None
        every = own and (is_dynamic or "__getattr__" in vars(value))
        for name, member in sorted(vars(value).items()):
            if name in names or (every and not name.startswith("__")):
                queue.append((f"{path}.{name}", member))


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _nested(inner)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value
        return "no value"


def _scoped(code: types.CodeType, scope: dict[str, object]) -> dict[str, object]:
    """Return the global variables of code, and the modules that it imports."""
    values: dict[str, object] = {}
    steps = [*dis.get_instructions(code)]
    for number, step in enumerate(steps):
        if step.opname in _SCOPED:
            values[step.argval] = scope.get(step.argval, vars(builtins).get(step.argval))
        elif step.opname == "IMPORT_NAME":
            dots = "." * steps[number - 2].argval  # how far up a relative import begins
            package = scope.get("__package__")
            full = resolve_name(dots + step.argval, package if isinstance(package, str) else None)
            for name in {full, full.partition(".")[0]}:
                values[name] = sys.modules.get(name)
    return values

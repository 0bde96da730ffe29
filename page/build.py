"""Build the pages: `make page`. Users need neither this nor Node.js, only its results.

`src/schema.d.ts` declares the data of a page, from `views/html/schema.py`. esbuild bundles each
entry point, of scripts or of styles, and its imports, and Python writes the bundle into every page.
The first line of a bundle has a digest of all sources, with which a test checks that it is current.
"""

import hashlib
import inspect
import subprocess
import types
import typing
from dataclasses import is_dataclass
from pathlib import Path

from clearhead.views.html import schema
from clearhead.views.html.document import PAGE

FOLDER = Path(__file__).parent
SCHEMA = FOLDER / "src" / "schema.d.ts"
BUNDLES = {  # the entry point of each
    Path(str(PAGE)) / "page.js": "src/page.js",
    Path(str(PAGE)) / "survey.js": "src/survey/survey.js",
    Path(str(PAGE)) / "training.js": "src/training/training.js",
    Path(str(PAGE)) / "widget.js": "src/hosts/widget.js",
    Path(str(PAGE)) / "page.css": "src/page.css",
    Path(str(PAGE)) / "survey.css": "src/survey/survey.css",
    Path(str(PAGE)) / "training.css": "src/training/training.css",
}
ESBUILD = "node_modules/.bin/esbuild --bundle --target=es2022 --charset=utf8 --log-level=warning"


def bundle(entry: str) -> str:
    """Build and return the bundle of an entry point."""
    built = subprocess.run(
        [*_command(entry), entry], cwd=FOLDER, check=True, stdout=subprocess.PIPE, encoding="utf-8"
    )
    return f"{first_line(entry)}\n{built.stdout}"


def first_line(entry: str) -> str:
    """Return a comment with a digest of the sources and of the command that bundles them."""
    kind = Path(entry).suffix
    sources = [FOLDER / "package-lock.json", *sorted(FOLDER.glob(f"src/**/*{kind}"))]
    digest = hashlib.sha256(" ".join(_command(entry)).encode())
    for path in sources:
        text = path.read_text(encoding="utf-8")
        digest.update(f"\0{path.relative_to(FOLDER).as_posix()}\0{text}".encode())
    begin, end = ("// ", "") if kind == ".js" else ("/* ", " */")
    made = f"Made by `make page` from the sources {digest.hexdigest()}; do not edit."
    return f"{begin}{made}{end}"


def _command(entry: str) -> list[str]:
    """Return the command for an entry point. Styles lose white space; scripts stay readable.

    A page has its script as an element, and a notebook imports that of the widget.
    """
    form = (
        "--format=esm" if entry.endswith("widget.js") else "--format=iife --global-name=clearhead"
    )
    return f"{ESBUILD} {'--minify-whitespace' if entry.endswith('.css') else form}".split()


# ---- the data as TypeScript ----------------------------------------------------------

PLAIN = {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def declarations() -> str:
    """Return the schema in TypeScript: an interface for each `TypedDict` and dataclass."""
    text = f"// Made by `make page` from {schema.__name__}; do not edit.\n\n"
    text += _comment(schema.__doc__)
    for value in vars(schema).values():
        if _has_fields(value):
            text += f"\n{_comment(value.__doc__)}export interface {value.__name__} {{\n"
            for name, annotation in typing.get_type_hints(value).items():
                optional = "?" if name in getattr(value, "__optional_keys__", ()) else ""
                text += f"  {name}{optional}: {_type(annotation)};\n"
            text += "}\n"
    return text


def _has_fields(value: typing.Any) -> bool:
    return typing.is_typeddict(value) or (isinstance(value, type) and is_dataclass(value))


def _type(annotation: typing.Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in PLAIN:
        return PLAIN[annotation]
    if _has_fields(annotation):
        return annotation.__name__
    if origin is typing.Literal:
        return " | ".join(f'"{name}"' for name in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type, arguments))
    if origin is dict:
        return f"Record<{', '.join(map(_type, arguments))}>"
    if origin is list or arguments[-1] is ...:
        item = _type(arguments[0])
        return f"({item})[]" if " | " in item else f"{item}[]"
    return f"[{', '.join(map(_type, arguments))}]"


def _comment(text: str | None) -> str:
    lines = ["/**", *(f" * {line}".rstrip() for line in inspect.cleandoc(text or "").splitlines())]
    return "\n".join([*lines, " */\n"])


if __name__ == "__main__":
    SCHEMA.write_text(declarations(), encoding="utf-8")
    for path, entry in BUNDLES.items():
        path.write_text(bundle(entry), encoding="utf-8")

"""A page is made of the sources in the folder `page/`, and what it holds fits the schema.

None of this needs Node.js, but for the last proof of the bundle.
"""

import math
import re
import runpy
import types
import typing
from pathlib import Path

import pytest

import clearhead as ch
from clearhead import demo as storyteller, masks
from clearhead.views import html
from clearhead.views.html import schema
from clearhead.views.html.document import packed
from clearhead.views.html.edits import EDITS, MASKS, fits
from tests.views.test_page import embedded, full_trace
from tests.views.test_report_page import toy_report

FOLDER = Path(__file__).parents[2] / "page"
SOURCES = sorted((FOLDER / "src").rglob("*.js"))
build = types.SimpleNamespace(**runpy.run_path(str(FOLDER / "build.py")))
STALE = "Run `make page` and commit what it makes."


@pytest.mark.parametrize("path", build.BUNDLES, ids=lambda path: path.name)
def test_the_bundle_is_made_of_these_sources(path):
    line = build.first_line(build.BUNDLES[path])
    assert path.read_text(encoding="utf-8").split("\n")[0] == line, STALE


def test_the_declarations_are_those_of_the_schema():
    assert build.SCHEMA.read_text(encoding="utf-8") == build.declarations(), STALE


def test_esbuild_makes_this_bundle():
    if not (FOLDER / "node_modules").is_dir():
        pytest.skip("esbuild is not installed; `make check` installs it")
    for path, entry in build.BUNDLES.items():
        assert path.read_text(encoding="utf-8") == build.bundle(entry), STALE


@pytest.mark.parametrize("entry, name", [("src/page.js", "ink.js"), ("src/page.css", "page.css")])
def test_another_source_is_another_digest(entry, name, monkeypatch):
    line = build.first_line(entry)
    source = FOLDER / "src" / name
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, **how: read(path, **how) + " " * (path == source)
    )
    assert build.first_line(entry) != line


def test_the_script_reads_what_python_packed(browser):
    value = {"text": "</script> ∑ \ud83d", "numbers": [0.1, -3, 10**-9], "beyond": math.inf}
    source = (FOLDER / "src" / "json.js").read_text(encoding="utf-8").replace("export ", "")
    page = browser.new_page()
    read = page.evaluate(f"async (text) => {{ {source} return unpacked(text); }}", packed(value))
    page.close()
    assert read == value
    assert packed(value) == packed(dict(value))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.outside
def test_the_screens_of_a_page_are_photographed(tmp_path):
    from matplotlib.image import imread

    screens = types.SimpleNamespace(**runpy.run_path(str(FOLDER / "screens.py")))
    report = ch.report(
        storyteller.load(), "Once upon a time there was a queen. She", progress=False
    )
    page = html.write_report(report, tmp_path / "page.html")
    pictures = screens.photograph(str(page), tmp_path / "screens")
    names = {path.stem.split("-", 3)[3] for path in pictures}
    views = {"text", "lines", "map", "numbers", "walk", "why"}
    assert names == views | {
        "opening",
        "heads",
        "another-head",
        "compare",
        "what-if",
        "what-if-after",
    }
    sizes = {path.name.split("-")[0] for path in pictures}
    assert sizes == {"1400", "1280", "390"} and len(pictures) == 2 * (11 + 11 + 12)
    assert all(imread(path).std() > 0.01 for path in pictures)


def test_no_circle_between_modules():
    imports = {
        path: {
            (path.parent / name).resolve()
            for name in re.findall(r'^(?:im|ex)port .*? from "(.*?)";', path.read_text(), re.M)
        }
        for path in SOURCES
    }
    assert set().union(*imports.values()) < set(SOURCES), "every import is a file"
    done: set[Path] = set()
    while ready := [path for path in SOURCES if path not in done and imports[path] <= done]:
        done |= set(ready)
    assert not [path.name for path in SOURCES if path not in done]


def test_a_page_ships_without_its_sources():
    names = {path.name for path in next(iter(build.BUNDLES)).parent.iterdir()}
    parts = {
        f"{page}.{kind}"
        for page in ("page", "survey", "training")
        for kind in ("css", "html", "js")
    }
    assert names == {*parts, "widget.js"}


# ---- what a page holds ---------------------------------------------------------------


def misfit(value, kind, where="page"):
    """Where a value does not have the form of a type of the schema; None if it does."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict) or not kind.__required_keys__ <= set(value) <= set(hints):
            return f"{where}: {kind.__name__} of {value!r:.200}"
        parts = [(value[name], hints[name], name) for name in value]
    elif origin in (typing.Union, types.UnionType):
        wrong = [misfit(value, one, where) for one in arguments]
        return None if None in wrong else wrong[0]
    elif origin is typing.Literal:
        return None if value in arguments else f"{where}: {value!r}"
    elif origin is dict and isinstance(value, dict):
        parts = [(one, arguments[1], name) for name, one in value.items()]
    elif origin is list or (origin is tuple and arguments[-1] is ...):
        if not isinstance(value, list):
            return f"{where}: {value!r:.40}"
        parts = [(one, arguments[0], i) for i, one in enumerate(value)]
    elif origin is tuple:
        if not isinstance(value, list) or len(value) != len(arguments):
            return f"{where}: {value!r:.40}"
        parts = [(one, kind, i) for i, (one, kind) in enumerate(zip(value, arguments, strict=True))]
    elif kind is float:
        is_number = type(value) in (int, float) or (isinstance(value, dict) and "float" in value)
        return None if is_number else f"{where}: {value!r:.40}"
    else:
        return None if type(value) is kind else f"{where}: {value!r:.40}"
    return next(filter(None, (misfit(one, its, f"{where}.{at}") for one, its, at in parts)), None)


@pytest.fixture(scope="module")
def pages():
    text = "Once upon a time there was a queen."
    told = ch.report(storyteller.load(), text, effects=True, progress=False)
    return {
        "trace": html.page(full_trace(), query=1),
        "report": html.report_page(toy_report(11), host="server"),
        "long report": html.report_page(toy_report(300), host="notebook"),
        "teller": html.report_page(told, beside=told),
    }


@pytest.mark.parametrize("name", ["trace", "report", "long report", "teller"])
def test_what_a_page_holds_fits_the_schema(pages, name):
    held = embedded(pages[name])
    assert misfit(held, schema.Page) is None
    for part, value in (("tokens", [1]), ("layers", [{}]), ("host", "cloud"), ("more", 1)):
        assert misfit({**held, part: value}, schema.Page), part


# ---- edits and masks -----------------------------------------------------------------


def test_the_defaults_of_edits_are_the_values_of_a_request():
    assert misfit({name: edit["default"] for name, edit in EDITS.items()}, schema.Edits) is None


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("temperature", [1e-9, 2, 1e29], [0, -1, 1e30, float("nan"), float("inf")]),
        ("scale", [0, -1e29, 1e29], [1e30, -1e30, float("-inf")]),
        ("dropout", [0, 0.999], [-0.1, 1]),
        ("seed", [0, 2**53], [-1, 2**63]),
    ],
)
def test_the_bounds_of_edits(name, inside, outside):
    assert all(fits(value, EDITS[name]) for value in inside)
    assert not any(fits(value, EDITS[name]) for value in outside)


def test_examples_and_sliders_are_within_the_bounds():
    for edit in EDITS.values():
        if "example" in edit:
            assert fits(edit["example"], edit)
        for end in edit.get("slider", ())[:2]:
            assert fits(2**end if edit.get("doubles") else end, edit)


def test_the_masks_of_a_page_are_masks():
    for it in MASKS["suggested"]:
        assert it["mask"] == "" or masks.parse(it["mask"]) is not None
    for name, arguments in MASKS["arguments"].items():
        given = ", ".join(f"{argument}=2" for argument in arguments)
        assert masks.parse(f"{name}({given})" if given else name) is not None

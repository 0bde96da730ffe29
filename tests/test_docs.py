"""The documentation: its code runs, its links resolve, every public name is in the reference."""

import builtins
import html
import inspect
import json
import pydoc
import re
import unicodedata
from pathlib import Path

import pytest
from nbclient import NotebookClient

import clearhead as ch
from clearhead import corpus, demo
from clearhead_cli import COMMANDS
from docs import outputs
from tests import words
from tests.outputs import difference

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
WITH_LINKS = [
    *PAGES, *sorted((ROOT / "lessons").rglob("*.md")), *sorted(ROOT.glob("*.md"))
]  # fmt: skip
REFERENCE = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))


def name_of(path):
    return str(path.relative_to(ROOT))


def anchors(path):
    """The headings of a page, as links write them."""
    found = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in found}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_of_python_prints_what_the_page_shows(page, tmp_path, monkeypatch):
    """`python -m docs.outputs PAGE` writes the outputs. What cannot run here is `text`."""
    monkeypatch.chdir(tmp_path)
    for block, printed in outputs.run(page):
        assert not block[2] or difference(printed, block[3]) is None


@pytest.mark.parametrize("page", WITH_LINKS, ids=name_of)
def test_every_inner_link_and_picture_resolves(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_contributing_names_files_and_names_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    bases = [ROOT, ROOT / "src/clearhead", ROOT / "kernels/generic"]
    bases += [ROOT / "src/clearhead/core/engines/gpu/triton", ROOT / "src/clearhead/views/page"]
    spans = {x for x in re.findall(r"`([^`\n]+)`", text) if "NAME" not in x and " " not in x}
    paths = {x for x in spans if re.fullmatch(r"[\w./-]+(/|\.\w+)", x)}
    missing = [x for x in paths if not any((base / x).exists() for base in bases)]
    assert not missing
    folders = [
        *(f"src/{x}" for x in ("clearhead", "clearhead_cli")),
        "kernels",
        "page/src",
        "bench",
        "tests",
    ]
    code = "".join(
        path.read_text()
        for folder in folders
        for suffix in ("py", "h", "cpp", "js", "txt")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
    ) + "".join(path.read_text() for path in (ROOT / "lessons").glob("*.md"))
    names = {x.rstrip("=") for x in spans - paths if re.fullmatch(r"\w+=?", x)}
    assert names
    assert not [x for x in names if not re.search(rf"\b{x}\b", code)]


def test_no_two_surveys_of_the_documentation_have_one_folder():
    """A folder holds one survey, and another one in it is refused."""
    shell = [ROOT / "Makefile", ROOT / "src/clearhead_cli/survey.py", *ROOT.glob("examples/*.py")]
    in_folder: dict[str, set[str]] = {}
    for page in [ROOT / "README.md", *PAGES, *shell]:
        text = page.read_text()
        for call, folder in re.findall(r'(ch\.survey\([^=]*?out="(out/[\w-]+)")', text):
            in_folder.setdefault(folder, set()).add(f"{page.name}: {call}")
        for call, folder in re.findall(r"(clearhead survey .*--out (out/[\w-]+))", text):
            call = re.sub(r"--model \S+", "--model DIR", call.replace("out/", ""))
            in_folder.setdefault(folder, set()).add(call)
    assert len(in_folder) > 8
    assert not [calls for calls in in_folder.values() if len(calls) > 1]


def test_every_page_is_in_a_table_of_contents():
    listed = set()
    for page in PAGES:
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            names = re.findall(r"^([\w./*-]+)$", tree, re.MULTILINE)
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    alone = {ROOT / "docs" / "index.md", ROOT / "docs" / "accuracy.md"}  # accuracy.md is included
    assert set(PAGES) - alone <= listed


def test_a_star_import_hides_no_name_of_python():
    assert not set(ch.__all__) & set(dir(builtins))


def test_every_public_name_is_in_the_reference():
    for name in ch.__all__:
        assert re.search(rf"\b{name}\b", REFERENCE), name
    for part in (ch.nn, ch.distributed, ch.edits, ch.hf):
        for name in part.__all__:
            assert re.search(rf"\b{name}\b", REFERENCE), f"{part.__name__}.{name}"


def test_the_reference_links_each_name_to_its_source():
    """A viewer of files shows no docstrings, so the tables of the reference lead to them."""
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        text = page.read_text()
        sources = dict(re.findall(r"^\| \[`(?:[\w.]+\.)?(\w+)`\]\(([^)]+)\)", text, re.MULTILINE))
        for name in re.findall(r"^\.\. auto\w+:: [\w.]+\.(\w+)$", text, re.MULTILINE):
            source = (page.parent / sources[name]).read_text()
            assert re.search(rf"^(def|class) {name}\b", source, re.MULTILINE), name


def test_the_site_has_the_docstring_of_each_name_in_a_table_of_the_reference():
    linked = re.findall(r"^\| \[`(?:[\w.]+\.)?(\w+)`\]", REFERENCE, re.MULTILINE)
    documented = re.findall(r"^\.\. auto\w+:: [\w.]+\.(\w+)$", REFERENCE, re.MULTILINE)
    assert set(linked) - set(documented) == {"zero_ablate"}  # another name of `ablate`


def test_no_docstring_of_the_reference_has_a_bar_that_sphinx_replaces():
    """``make docs`` fails at a bar before a word outside ``...``, and at a table of Markdown."""
    for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)$", REFERENCE, re.MULTILINE):
        text = re.sub(r"``.*?``", "", inspect.getdoc(pydoc.locate(name)) or "", flags=re.DOTALL)
        assert not re.search(r"(?<![^\s(])\|\S", text), name


# Results, which calls return and nobody constructs, and two functions that raise nothing.
WITHOUT_ERRORS = {
    "Trace", "Step", "Look", "Matrix", "Recording", "Intervention", "Effects", "Effect",
    "LogitAttribution", "Why", "Circuits", "Report", "Survey", "Plan", "Shard", "Support",
    "Divergence", "CacheDamage", "can_draw", "in_notebook",
}  # fmt: skip


def test_what_a_user_calls_states_its_errors():
    views = ch.views.plot, ch.views.text, ch.views.html
    silent = set()
    for part in (ch, ch.nn, ch.distributed, ch.edits, ch.hf, *views):
        for name, thing in ((name, getattr(part, name)) for name in part.__all__):
            is_error = inspect.isclass(thing) and issubclass(thing, Exception)
            text = f"{inspect.getdoc(thing)} {inspect.getdoc(getattr(thing, '__init__', None))}"
            if callable(thing) and not is_error and not re.search(r"\b[Rr]aises?\b", text):
                silent.add(name)
    assert silent == WITHOUT_ERRORS


# Methods whose name or base class states it, and one with two choices, which its docstring lists.
SILENT_METHODS = {"Intervention.must_have_applied", "temperature.edit_problem"}


def test_a_method_that_raises_states_it():
    parts = ch, ch.nn, ch.distributed, ch.edits, ch.hf, ch.stats, ch.masks, corpus, demo
    silent = set()
    for part in parts:
        for thing in (getattr(part, name) for name in part.__all__):
            for owner in getattr(thing, "__mro__", ()):
                methods = vars(owner) if owner.__module__.startswith("clearhead.") else {}
                for name, method in methods.items():
                    method = getattr(method, "__func__", method)
                    if name.startswith("_") or not inspect.isfunction(method):
                        continue
                    text = inspect.getdoc(method) or ""
                    raises = re.search(r"^ +raise\b", inspect.getsource(method), re.MULTILINE)
                    if raises and not re.search(r"\b[Rr]aises?\b", text):
                        silent.add(f"{owner.__name__}.{name}")
    assert silent == SILENT_METHODS


@pytest.mark.parametrize("name", ch.edits.__all__)
def test_an_edit_describes_each_of_its_arguments(name):
    edit = getattr(ch.edits, name)
    text = inspect.getdoc(edit)
    for argument in inspect.signature(edit).parameters:
        assert re.search(rf"^    (\w+, )*{argument}(, \w+)*: ", text, re.MULTILINE), argument


@pytest.mark.parametrize("level, heading", [("avx512", "## AVX-512"), ("avx2", "## AVX2")])
def test_the_tables_of_benchmarks_are_whole(level, heading):
    """Every case that was measured, ours and torch's share of the ceiling as they were."""
    text = (ROOT / "docs" / "benchmarks.md").read_text().split(heading)[1].split("## ")[0]
    measured = json.loads((ROOT / "bench" / "results" / f"{level}.json").read_text())["results"]
    shown = dict(re.findall(r"^\| ([^|]+?) \| (\d+ % \| \d+ %) \|", text, re.MULTILINE))
    expected = {
        x["case"]: " | ".join(
            f"{100 * x['peers'][peer]['share']:.0f} %" for peer in ("clearhead", "torch sdpa")
        )
        for x in measured
        if x["group"] in ("prefill", "decode", "training")
    }
    assert shown == expected


def test_the_summary_for_models_lists_every_command():
    listed = re.search(r"^- shell: clearhead (.*)$", (ROOT / "docs" / "llms.txt").read_text(), re.M)
    assert listed is not None
    assert listed[1].split(" | ") == COMMANDS


def test_the_table_of_errors_was_made_by_its_command():
    text = (ROOT / "docs" / "accuracy.md").read_text()
    assert text.startswith("| dtype | computed by |")
    for dtype in ("float32", "bfloat16", "float16"):
        plain = re.search(rf"\| {dtype} \| plain torch \|(.*)\|", text)
        ours = re.findall(rf"\| {dtype} \| (?!plain)\w+ \|(.*)\|", text)
        limits = [2.05 * float(x) for x in plain[1].split("|")]
        for row in ours:  # at most twice as much as plain torch, as printed
            assert all(float(x) <= y for x, y in zip(row.split("|"), limits, strict=True))


@pytest.mark.parametrize("sentence, is_fault", [
    ("The function asks for a mask.", True),
    ("`look` says what it read.", True),
    ("The engine is told which tile to use.", True),
    ("An engine asked for by name never falls back.", True),
    ("Read the file aloud, and ask a friend what it says.", False),
    ("A query asks: which of you has a noun?", False),
    ("The table tells you which head to cut.", False),
    ("Each lesson can stand alone.", False),
    ("A file says which table it has.", True),
    ("Ask yourself what the verb needs.", False),
    ("The field says that a query attends to a key.", False),
    ("The letter T stands for the number of tokens.", False),
    ("What stands behind the mask changes nothing.", True),
    ("The paper says more.", False),
])  # fmt: skip
def test_the_lint_of_words_lets_people_speak_and_not_code(
    tmp_path, monkeypatch, sentence, is_fault
):
    monkeypatch.setattr(words, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(sentence)
    assert bool(words.faults_in(page)) == is_fault


def test_the_address_of_the_site_is_set_in_one_place():
    """`[project.urls]` of pyproject.toml; no page has an address of the project."""
    address = re.search(r'^Documentation = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    host = re.match(r"https?://[^/]+", address)[0]
    assert not [name_of(page) for page in WITH_LINKS if host in page.read_text()]


def test_the_math_font_of_the_site_has_the_letters_of_all_formulas():
    """A browser writes a name of one letter in italics, which are characters of their own."""
    convert = pytest.importorskip("latex2mathml.converter").convert
    ttf = pytest.importorskip("fontTools.ttLib").TTFont
    static = ROOT / "docs" / "static"
    (file,) = re.findall(r'url\("(.*?)"\)', (static / "pages.css").read_text())
    font = ttf(static / file)
    italics = (*range(0x1D434, 0x1D468), 0x210E, *range(0x1D6E2, 0x1D71C))
    italic = {unicodedata.normalize("NFKC", chr(x)): chr(x) for x in italics}
    letters = set()
    for page in WITH_LINKS:
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)
        for pair in re.findall(r"\$\$(.*?)\$\$|\$([^$\n]+)\$", text, re.DOTALL):
            for tag, name in re.findall(r"<(m[ion])[^>]*>([^<]+)<", convert("".join(pair))):
                name = html.unescape(name)
                single = tag == "mi" and len(name) == 1
                letters |= {italic.get(name, name)} if single else set(name)
    assert "MATH" in font and len(letters) > 50
    assert not [x for x in letters if ord(x) not in font.getBestCmap() and not x.isspace()]


def test_the_site_links_to_the_lessons_that_it_runs(monkeypatch):
    """A forge shows the pages of `lessons/read/`; the site runs the lessons instead."""
    pytest.importorskip("latex2mathml")
    monkeypatch.setattr(NotebookClient, "__init__", NotebookClient.__init__)  # conf.py changes it
    from docs.conf import link_to_notebooks

    for link in ("](read/02-one.md#a)", "](../lessons/read/02-one.md#a)", "](../read/02.md)"):
        source = [f"[x{link}"]
        link_to_notebooks(None, "docs/page", source)
        assert ("/read/" in source[0]) == link.startswith("](../read")

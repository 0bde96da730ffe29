"""Run lessons, and write each as a page that shows its outputs without being run.

    python -m lessons.render            # every lesson, minutes; needs the extras plot, hf and test
    python -m lessons.render 02 06      # these

A forge shows the pages in `lessons/read/`. `tests/test_lessons.py` compares them with what the
lessons print. Two tags except a cell: `measured` prints times, or what this processor chooses, and
is not compared; `smollm2` needs a file that is not in the repository, and is compared where it is.
"""

import asyncio
import re
import sys
from pathlib import Path
from typing import NamedTuple

import jupytext
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

FOLDER = Path(__file__).parent
READ = FOLDER / "read"
LESSONS = sorted(FOLDER.glob("[0-9][0-9]-*.md"))
# No names and no digits of the lesson before; figures as SVG without a date, with the same ids.
FIRST = """%reset -f
import torch
torch.set_printoptions(profile="default")
del torch
%matplotlib inline
import matplotlib
matplotlib.rcParams["svg.hashsalt"] = "lessons"
%config InlineBackend.figure_formats = ["svg"]
%config InlineBackend.print_figure_kwargs = {"bbox_inches": "tight", "metadata": {"Date": None}}"""
INTERACTIVE = "*A page to play with: a notebook and the site show it here.*"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Page(NamedTuple):
    """A lesson as Markdown, and its figures as SVG by the names of their files."""

    text: str
    figures: dict[str, str]


def run(notebook: NotebookNode, kernel: AsyncKernelManager) -> None:
    """Run the cells of a lesson in a kernel that others have used."""
    notebook.cells.insert(0, new_code_cell(FIRST, metadata={"tags": ["first"]}))
    client = NotebookClient(
        notebook,
        km=kernel,
        timeout=100,
        coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER)}},
        extra_arguments=["--log-level=ERROR"],  # each kernel warns that it is not encrypted
    )
    client.execute()
    client.kc.stop_channels()
    del notebook.cells[0]


def page(notebook: NotebookNode, name: str) -> Page:
    """Return the page of a lesson that ran."""
    figures: dict[str, str] = {}
    parts = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            parts.append(for_a_forge(cell.source))
            continue
        outputs = []
        for output in cell.outputs:
            words, figure = one_output(output)
            if figure:
                file = f"{name[:2]}-{len(figures) + 1}.svg"
                figures[file] = figure
                words = f"![{alt_text(cell, name)}](pictures/{file})"
            outputs.append(words)
        shown = "\n\n".join(words for words in outputs if words)
        one_block = re.sub(r"^```\n\n```text\n", "\n", shown, flags=re.MULTILINE)
        parts.append(cell_on_page(cell, [one_block] if one_block else []))
    title, rest = parts[0].split("\n\n", 1)
    source = f"*Outputs are those of [the notebook](../{name}.md), which you can run.*"
    return Page("\n\n".join([title, source, rest, *parts[1:]]) + "\n", figures)


def cell_on_page(cell: NotebookNode, outputs: list[str]) -> str:
    """Return a cell of code with its outputs: folded, if a notebook hides it."""
    code = re.sub(r"^%.*\n", "", cell.source, flags=re.MULTILINE)
    fence = f"```python\n{code}\n```"
    tags = cell.metadata.get("tags", [])
    prompt = cell.metadata.get("mystnb", {}).get("code_prompt_show", "Code")
    for tag in {"measured", "smollm2"} & set(tags):
        outputs = [f"<!-- {tag} -->", *outputs, "<!-- end -->"]
    if "hide-cell" in tags:
        return folded(prompt, [fence, *outputs])
    return "\n\n".join([folded(prompt, [fence]) if "hide-input" in tags else fence, *outputs])


def folded(prompt: str, parts: list[str]) -> str:
    return "\n\n".join([f"<details><summary>{prompt}</summary>", *parts, "</details>"])


def one_output(output: NotebookNode) -> tuple[str, str | None]:
    """Return an output as Markdown, or a figure as SVG."""
    if output.output_type == "stream":
        return block(output.text), None
    data = output.data
    if "image/svg+xml" in data:
        return "", data["image/svg+xml"]
    words = block(data["text/plain"])
    if "<svg" in data.get("text/html", "") and "<iframe" not in data["text/html"]:
        raise SystemExit(f"A forge shows only {data['text/plain']!r} of a picture: print it.")
    return (f"{words}\n\n{INTERACTIVE}" if "<iframe" in data.get("text/html", "") else words), None


def block(text: str) -> str:
    lines = [line.rstrip() for line in ANSI.sub("", text).rstrip().split("\n")]
    return "```text\n" + "\n".join(lines) + "\n```" if lines != [""] else ""


def alt_text(cell: NotebookNode, name: str) -> str:
    """Return what a figure shows, which the metadata of its cell states."""
    if "alt" not in cell.metadata:
        raise SystemExit(f"A figure of {name} has no :alt:, which states what is seen.")
    return str(cell.metadata["alt"])


def for_a_forge(markdown: str) -> str:
    """Write notes as quotations, and links as they are from the folder of the pages."""

    def quotation(match: re.Match[str]) -> str:
        lines = match[1].strip().split("\n")
        return "\n".join(["> [!NOTE]", *(f"> {line}".rstrip() for line in lines)])

    text = re.sub(r"^:::\{note\}\n(.*?)^:::$", quotation, markdown, flags=re.M | re.S)
    return re.sub(r"\]\((\.\./|index\.md|pictures/)", r"](../\1", text)


def write(path: Path, kernel: AsyncKernelManager) -> None:
    notebook = jupytext.read(path)
    run(notebook, kernel)
    rendered = page(notebook, path.stem)
    pictures = READ / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    for old in pictures.glob(f"{path.stem[:2]}-*.svg"):
        old.unlink()
    for file, figure in rendered.figures.items():
        (pictures / file).write_text(figure, "utf-8")
    (READ / path.name).write_text(rendered.text, "utf-8")
    print(path.stem, len(rendered.figures), "figures")


def main(numbers: list[str]) -> None:
    kernel = AsyncKernelManager(kernel_name="python3")
    for path in LESSONS:
        if not numbers or path.stem[:2] in numbers:
            write(path, kernel)
    asyncio.run(kernel.shutdown_kernel(now=True))


if __name__ == "__main__":
    main(sys.argv[1:])

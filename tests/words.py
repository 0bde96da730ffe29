"""Check the English of the project: python tests/words.py [FILE...]

The check reads what people read: Markdown, docstrings, comments, and the text of strings, such as
those of errors and of the page. It reports phrases and names that readers found hard, sentences of
more than 35 words, sentences of documentation with more than three numbers, and docstrings without
a verb. Tables, formulas and code have no sentences. `EXCEPTIONS` lists what stays, with the reason.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MOST_WORDS, MOST_NUMBERS = 35, 3

# Code calls, returns and reports. People, papers and tables ask, tell and say, and so do a query or
# "it" where one person explains to another.
SPEECH = "asks?|asked|asking|tells?|told|telling|says?|said|saying|hears?|heard|hearing"
SPEAKERS = (
    "argument|cache|call|class|code|command|core|edit|engine|error|file|function|hint|kernel|layer|"
    "library|mask|message|method|metric|model|module|option|page|program|report|server|shape|"
    "statistic|survey|tensor|torch|trace"
)

# A phrase, and what to write in its place. The case of a letter counts only after (?-i:...).
PHRASES = {
    r"(?<!there )(?<!there's )\b(?:is|are|was|were) no (?!(?:longer|more|less|other)\b)": "not a",
    r"(?-i:(?:^|[.!?] )Of )(?!course\b)(?=\w)": "begin with the subject",
    r"(?-i:(?:^|[.!?;:] )Who )(?!it is for|\w+[^.]*\?)": "name the person: a reader, a user",
    r"\b(?:for|to|by|of|from|with|what) who\b": "name the person: a reader, a user",
    r"\bthere and back\b": "forward and backward",
    r"\bway back\b": "backward pass",
    r"\bway out\b": "hint",
    r"\bblind (?:quer|row)": "fully masked query",
    r"\bcorners?\b": "causal alignment",
    r"\b(?:a|the|its|their|his|her|this|each|of) shares?\b(?! (?:of|with) .*heads)": "fraction",
    r"\bhalves\b": "16-bit types",
    r"\btiny calls?\b": "small calls",
    rf"(?:`|\b(?:{SPEAKERS})) (?:\w+ )?(?:{SPEECH})\b": "code does not speak: call, return, report",
    rf"\b(?:is|are|was|were|be|been|being) (?:\w+ )?(?:{SPEECH})\b": "name who does what",
    r"\b(?:asked|told) (?:for|of|by)\b": "request, pass",
    r"\b(?:stands?|stood|standing)\b(?![ -](?:alone|by|for|in|on|out|still)\b)": "is, is at",
    r"\b(?:lies|lie|lying)\b": "is, is at",
    r"\btaught\b": "trained, backpropagated",
    r"\bthat (?:is|are|was|were) there\b": "that exists",
    r"\b(?:is|are|was|were) not there\b": "is missing",
    r"\b(?:in|on) the (?:house|room|floor)\b": "package, module",
    r"\bin sight\b": "unmasked",
    r"\bnowhere said\b": "undocumented",
    r"\binside of\b": "inside",
}  # fmt: skip

# A docstring of a function begins with a verb, or asks what a predicate answers.
NOT_VERBS = ("The", "A", "An", "What", "Which", "How", "Of", "Where", "As", "In", "With", "Whether")

# Names that do not state what they hold.
NAMES = {
    "found", "given", "made", "kept", "held", "said", "each", "way", "whole", "place", "here",
    "Learned", "Coming", "Finished", "Dropped", "Final", "Top", "Here", "Place", "Placed",
    "Without", "Recorded", "Extra", "Made", "placed_at", "at_places", "by_engine", "one_by_one",
    "in_their_places", "gauges", "gauged", "GAUGES", "roomy", "turned", "kinds", "whole_files",
    "looked", "counted", "telling_others", "meet", "LOOK_UP", "first_able", "left_to_torch",
    "false_level", "NO_KEY", "EVERY_KEY", "NOTHING", "NOWHERE", "NO_CAP", "NO_HOST", "how_many",
    "teller", "links", "way_out", "shown",
}  # fmt: skip

# (file, text in the sentence or the name, why it stays).
EXCEPTIONS = (
    ("examples/storyteller/cast.py", "stood", "a verb of the stories"),
    ("src/clearhead/demo/measured.py", "found", "a key of the file of measurements"),
    ("src/clearhead/demo/storyteller.py", "links", "a list of WordLink"),
    ("src/clearhead/views/html/schema.py", "kept", "a key of the page's JSON"),
    ("src/clearhead/views/html/schema.py", "links", "a key of the page's JSON"),
    ("src/clearhead/models/report/findings.py", "links", "a tuple of Link"),
)

PATTERNS = (
    "*.md", "docs/**/*.md", "docs/llms.txt", "lessons/*.md", "src/**/*.py", "kernels/**/*.h",
    "kernels/**/*.cpp", "page/src/**/*.js", "bench/*.py", "examples/**/*.py",
)  # fmt: skip


class Paragraph(NamedTuple):
    """Text, and the line of the file where it begins. Only `prose` has sentences to measure."""

    line: int
    text: str
    prose: bool = True


class Fault(NamedTuple):
    file: str
    line: int
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text.strip()[:90]}  ->  {self.advice}"


def blank(match: re.Match[str]) -> str:
    """The line breaks of a match, so that later lines keep their numbers."""
    return "\n" * match[0].count("\n")


def paragraphs(lines: Iterable[str], first: int = 1) -> Iterator[Paragraph]:
    """Split lines at blank lines, list items and descriptions of arguments; formulas are left out.

    A line is a formula or a row of a table if it has wide gaps. A cell of a Markdown table is a
    paragraph without sentences.
    """
    collected: list[str] = []
    start = first
    for number, line in enumerate([*lines, ""], first):
        bare = re.sub(r"``.*?``|`[^`]*`", "code", line.strip())
        item = re.match(r"(?:[-*]|\d+\.) |#+ |\w+(?:, \w+)*: ", bare)
        table = bare.startswith("|")
        code = r">>>|\.\.\.|!\[|:::|\$ |.*\S {3,}\S"
        skip = table or re.match(code, bare) or line.startswith("  clearhead ")
        section = bare in ("Args:", "Returns:", "Raises:", "Yields:", "Example:", "Examples:")
        if collected and (not bare or skip or item or section):
            yield Paragraph(start, " ".join(collected))
            collected = []
        if table:
            yield from (Paragraph(number, cell, False) for cell in bare.split("|") if cell.strip())
        elif bare and not skip and not section:
            start = start if collected else number
            collected.append(bare[item.end() :] if item else bare)


def markdown(text: str) -> Iterator[Paragraph]:
    """Paragraphs without front matter, code, addresses and formulas."""
    text = re.sub(r"\A---\n.*?^---\n", blank, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^( *)(```+|~~~+).*?^\1\2 *$", blank, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", blank, text, flags=re.DOTALL)
    text = re.sub(r"^    .*$|^\+\+\+.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"\$\$.*?\$\$", blank, text, flags=re.DOTALL)
    yield from paragraphs(re.sub(r"\$[^$\n]+\$", "formula", text).split("\n"))


def python(text: str) -> Iterator[Paragraph]:
    """Docstrings, comments, and strings of at least four words."""
    tree = ast.parse(text)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            docstrings.add(node.body[0].value)  # type: ignore[attr-defined]
            yield from paragraphs(docstring.split("\n"), node.body[0].lineno)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.Constant) and node not in docstrings:
            string = string_of(node)
            if len(re.findall(r"\b[A-Za-z]+ ", string)) > 3 and not re.search(r"[;{<]", string):
                yield from (x._replace(line=node.lineno) for x in paragraphs(string.split("\n")))
    yield from comments(
        (token.start[0], token.string[1:], token.line.lstrip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
        and not re.match(r"#!|# ?(type:|noqa|fmt:|pragma|ruff:)", token.string)
    )


def string_of(node: ast.AST) -> str:
    """The text of a string, with X for each value of an f-string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(string_of(part) or "X" for part in node.values)
    return ""


def script(text: str) -> Iterator[Paragraph]:
    """Comments of C++ and JavaScript."""
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        if alone := re.match(r"\s*(?://+|\*+(?!\w)|/\*+)(.*?)(?:\*/)?$", line):
            lines.append((number, alone[1], True))
        elif beside := re.search(r"[;{},)] +//(.*)$", line):
            lines.append((number, beside[1], False))
    yield from comments(lines)


def comments(lines: Iterable[tuple[int, str, bool]]) -> Iterator[Paragraph]:
    """Paragraphs of comments, from (line, text, whether it is alone on its line)."""
    block: list[str] = []
    first = 0
    for number, text, alone in lines:
        if block and (number != first + len(block) or not alone):
            yield from paragraphs(block, first)
            block = []
        first = first if block else number
        block.append(text)
    yield from paragraphs(block, first)


def names(text: str) -> Iterator[tuple[int, str]]:
    """The names that code introduces: functions, classes, arguments, variables and attributes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def without_verb(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings of functions that begin with another word than a verb, such as an article."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            docstring = ast.get_docstring(node) or ""
            attribute = decorators & {"property", "cached", "cached_property"}
            if not attribute and docstring.startswith((*(f"{x} " for x in NOT_VERBS), "`", "(")):
                yield node.lineno, docstring.split("\n")[0]


def faults_in(path: Path) -> list[Fault]:
    file, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    documentation = path.suffix in (".md", ".txt")
    read = markdown if documentation else python if path.suffix == ".py" else script
    faults = []
    for line, paragraph, prose in read(text):
        for phrase, advice in PHRASES.items():
            for match in re.finditer(f"(?i:{phrase})", paragraph):
                around = paragraph[max(0, match.start() - 30) : match.end() + 30]
                faults.append(Fault(file, line, around, advice))
        for sentence in re.split(r"(?<=[.!?:;·])\s+", paragraph) if prose else ():
            if (length := len(sentence.split())) > MOST_WORDS:
                faults.append(Fault(file, line, sentence, f"{length} words"))
            numbers = re.findall(r"(?<![\w.])\d[\d,.]*(?:\s?%)?(?![\w-])", sentence)
            if documentation and len(numbers) > MOST_NUMBERS:
                faults.append(Fault(file, line, sentence, f"{len(numbers)} numbers"))
    if path.suffix == ".py" and path.is_relative_to(ROOT / "src"):
        for line, name in names(text):
            if name.lstrip("_") in NAMES:
                faults.append(Fault(file, line, name, "a name that states what it holds"))
        for line, docstring in without_verb(text):
            faults.append(Fault(file, line, docstring, "begin with a verb: return, compute"))
    excepted = [part for name, part, _ in EXCEPTIONS if name == file]
    return [fault for fault in faults if not any(part in fault.text for part in excepted)]


def files() -> list[Path]:
    return sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)})


def main(arguments: list[str]) -> int:
    checked = [Path(name).resolve() for name in arguments] or files()
    faults = [fault for path in checked for fault in faults_in(path)]
    print(*faults, f"{len(faults)} faults in {len(checked)} files", sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

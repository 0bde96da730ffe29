"""Connections of DuckDB, and the paths of files that it reads and writes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..core.errors import BadValue, needs


def connect() -> Any:
    """Return a connection of DuckDB with one thread. Raises `Missing` without DuckDB."""
    with needs("survey", "tables of a survey are read and written with DuckDB."):
        import duckdb
    return duckdb.connect(config={"threads": 1, "preserve_insertion_order": True})


def lock(connection: Any, files: Iterable[Path]) -> None:
    """Leave a connection access to these files alone, and no setting to change that.

    DuckDB compares a pattern that it reads, and the file that it opens, with this list.
    """
    paths = [quoted(text) for file in files for text in (full_path(file), pattern_of(file))]
    connection.execute(f"set allowed_paths = [{', '.join(paths)}]")
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")


def must_be_one_select(connection: Any, sql: str) -> None:
    """Raise an error of DuckDB for anything else: a COPY may write the files of `lock`."""
    import duckdb

    statement_types = [statement.type for statement in connection.extract_statements(sql)]
    if statement_types != [duckdb.StatementType.SELECT]:
        raise duckdb.ProgrammingError("it is not one SELECT")


def full_path(path: Path) -> str:
    """Return the absolute path, which DuckDB takes for neither a home folder nor an address.

    Raises `BadValue` if it is not UTF-8, as the text of a query is.
    """
    full = path.absolute().as_posix()
    try:
        full.encode()
    except UnicodeEncodeError as error:
        rule = "DuckDB reads and writes the tables of a survey, and takes only paths in UTF-8."
        hint = "use another name."
        raise BadValue(f"The path {full!r} is not UTF-8.", rule, hint) from error
    return full


def pattern_of(path: Path) -> str:
    """Return the pattern that matches a file alone: DuckDB takes each path to read for a pattern.

    >>> pattern_of(Path("/texts/a*b/c.parquet"))
    '/texts/a[*]b/c.parquet'

    Raises `BadValue` for a path that is not UTF-8, and for one that no pattern matches alone.
    """
    full = full_path(path)
    pattern = "".join(f"[{c}]" if c in "*?[" else c for c in full)
    if pattern != full and "\\" in full:  # in a pattern, a backslash is a slash
        rule = "DuckDB takes such a path for the pattern of other files."
        hint = "use another name."
        raise BadValue(f"The path {full!r} has a backslash, and one of * ? [.", rule, hint)
    return pattern


def quoted(text: str) -> str:
    """Return a text as SQL."""
    return "'" + text.replace("'", "''") + "'"

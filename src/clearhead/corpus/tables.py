"""The tables of a survey, their columns, and how they are written: Parquet, by DuckDB.

The same survey gives the same bytes with one version of DuckDB: rows are in the order of a total
key, DuckDB runs on one thread, and codec and row groups are fixed. All sums are computed before.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import BadValue
from ..core.files.atomic_io import temporary_for
from ..core.files.results import data_frame
from ..core.formatting import quantity
from .basic import TOP_KEYS
from .connection import connect, full_path, lock, pattern_of, quoted

if TYPE_CHECKING:
    import pandas

# The columns of each table, with their types in SQL and meanings: those of the tables in this file.
DESCRIPTION = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
SCHEMA = {
    name: {
        column: (type, meaning)
        for column, type, meaning in re.findall(r"^\| `(\w+)` \| (\S+) \| (.+) \|$", body, re.M)
    }
    for name, body in re.findall(r"^### (\w+)$(.*?)(?=^### |\Z)", DESCRIPTION, re.M | re.S)
}
QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
FOLDER = "tables"
DIGEST = "clearhead survey"  # the key of the survey's digest in the file of a table
ROW_GROUP = 65536
Columns = Mapping[str, "np.ndarray | list[Any]"]


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of a table, or of a query."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"{quantity(len(self.rows), 'row')} of {', '.join(self.columns)}"

    def to_pylist(self) -> list[dict[str, Any]]:
        """Return a dict for each row."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a DataFrame of pandas. Raises `Missing` without pandas."""
        return data_frame(self.to_pylist())


def write_table(
    out: Path, digest: str, name: str, parts: Iterable[Columns], select: str = "from rows"
) -> Path:
    """Write a table, in one move, from parts of columns whose rows are in order, or as selected.

    Its file has the `digest` of the survey. Raises `BadValue` if the disk is full.
    """
    import duckdb

    path = out / FOLDER / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_for(path)
    about = {DIGEST: f"{digest} {name}"}
    about |= {column: meaning for column, (_, meaning) in SCHEMA[name].items()}
    metadata = [f"{quoted(key)}: {quoted(value)}" for key, value in about.items()]
    types = ", ".join(f'"{column}" {type}' for column, (type, _) in SCHEMA[name].items())
    try:
        connection = connect()
        connection.execute(f"create table rows ({types})")
        for part in parts:
            connection.register("part", _registered(name, part))
            connection.execute(f"insert into rows select {_selected(name)} from part")
            connection.unregister("part")
        connection.execute(
            f"copy ({select}) to {quoted(full_path(temporary))} "
            f"(format parquet, compression zstd, row_group_size {ROW_GROUP}, "
            f"kv_metadata {{{', '.join(metadata)}}})"
        )
        connection.close()
        os.replace(temporary, path)
    except (OSError, duckdb.Error) as error:
        temporary.unlink(missing_ok=True)
        gave = f"{str(path)!r} cannot be written: {' '.join(str(error).split())[:300]}."
        rule = "tables are written under a temporary name, then moved; they need disk space."
        hint = "free disk space, and merge again; shards that are finished stay valid."
        raise BadValue(gave, rule, hint) from error
    return path


def _registered(name: str, part: Columns) -> dict[str, np.ndarray]:
    """Return the columns as arrays of one dimension; a list column of n is n columns."""
    arrays: dict[str, np.ndarray] = {}
    for column, (type, _) in SCHEMA[name].items():
        array = np.asarray(part[column], dtype=object if type == "VARCHAR" else None)
        columns = array.T if array.ndim > 1 else ()
        arrays |= {f"{column}_{i}": own for i, own in enumerate(columns)} or {column: array}
    return {column: np.ascontiguousarray(array) for column, array in arrays.items()}


def _selected(name: str) -> str:
    """Return the SQL of a row: lists from their columns, without missing keys; NULL for NaN."""
    known = " + ".join(f"(keys_{i} >= 0)::int" for i in range(TOP_KEYS))
    items = []
    for column, (type, _) in SCHEMA[name].items():
        if type.endswith("[]"):
            entries = ", ".join(f"{column}_{i}" for i in range(TOP_KEYS))
            items.append(f"[{entries}][1:{known}]")
        else:
            items.append(f"nullif({column}::double, 'nan')" if type == "DOUBLE" else f'"{column}"')
    return ", ".join(items)


def open_tables(out: Path, digest: str) -> Any:
    """Return a connection with a view of each table, which reads these files and nothing else.

    Raises `BadValue` unless the tables are of the survey with this digest.
    """
    if digest_of_tables(out) != digest:
        gave = f"The tables of the survey in {str(out)!r} are not of all its texts."
        rule = "tables are written when all shards are finished."
        raise BadValue(gave, rule, f"run the same survey again, or: clearhead survey merge {out}")
    connection, files = connect(), {name: out / FOLDER / f"{name}.parquet" for name in SCHEMA}
    for name, file in files.items():
        path = quoted(pattern_of(file))
        connection.execute(
            f"create view {name} as select * from read_parquet({path}, hive_partitioning = false)"
        )
    lock(connection, files.values())
    return connection


def digest_of_tables(out: Path) -> str | None:
    """Return the digest of the survey of all tables; None if they are not of one survey."""
    import duckdb

    files = [pattern_of(out / FOLDER / f"{name}.parquet") for name in SCHEMA]
    read = "select value from parquet_kv_metadata(?) where key = ?"
    try:
        rows = connect().execute(read, [files, DIGEST.encode()]).fetchall()
    except duckdb.Error:
        return None
    pairs = [str(value, "utf-8", "replace").split(" ") for (value,) in rows]
    digest = pairs[0][0] if pairs else None
    return digest if pairs == [[digest, name] for name in SCHEMA] else None


def content_digest(connection: Any) -> str:
    """Return a digest of the rows of all tables, in order."""
    digest = hashlib.sha256()
    for name in SCHEMA:
        digest.update(name.encode())
        rows = connection.execute(f"select * from {name}")
        while part := rows.fetchmany(ROW_GROUP):
            digest.update(repr(part).encode())
    return digest.hexdigest()

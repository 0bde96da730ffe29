"""The tables of a survey, their columns, and how they are written: Parquet, by DuckDB.

The same survey gives the same bytes with one version of DuckDB: rows are in the order of a total
key, DuckDB runs on one thread, and codec and row groups are fixed. All sums are computed before.
"""

import hashlib
import os
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

# The columns of each table: name, type in SQL, and meaning. Rows are in the order of the first
# columns, which identify a row.
SCHEMA: dict[str, dict[str, tuple[str, str]]] = {
    "heads": {
        "layer": ("SMALLINT", "number of the layer, from 0"),
        "head": ("SMALLINT", "number of the query head in the layer, from 0"),
        "metric": ("VARCHAR", "name of the metric"),
        "module": ("VARCHAR", "module of the model that calls attention"),
        "key_head": ("SMALLINT", "number of the key head that the query head reads, from 0"),
        "mean": ("DOUBLE", "mean over all queries: the sum of all texts / the number of queries"),
        "low": ("DOUBLE", "95 % interval of the mean over texts; NULL for one text"),
        "high": ("DOUBLE", "upper end of the interval"),
        "mean_of_texts": ("DOUBLE", "mean of the means of texts, each text alike"),
        "sd_of_texts": ("DOUBLE", "standard deviation of the means of texts; NULL for one text"),
        "q05": (
            "DOUBLE",
            "quantile over queries, within bin_width; NULL for 0 or 1, and beyond bins",
        ),
        "q25": ("DOUBLE", "quantile over queries, within bin_width"),
        "q50": ("DOUBLE", "quantile over queries, within bin_width"),
        "q75": ("DOUBLE", "quantile over queries, within bin_width"),
        "q95": ("DOUBLE", "quantile over queries, within bin_width"),
        "bin_width": ("DOUBLE", "width of the bin of the median"),
        "uniform": ("DOUBLE", "mean for uniform weights on the same keys; NULL without one"),
        "queries": ("BIGINT", "number of queries of the mean"),
        "texts": ("BIGINT", "number of texts with such a query"),
    },
    "histograms": {
        "layer": ("SMALLINT", "as in heads"),
        "head": ("SMALLINT", "as in heads"),
        "metric": ("VARCHAR", "as in heads"),
        "bin": ("SMALLINT", "number of the bin, from 0; bins without a query are left out"),
        "low": ("DOUBLE", "lower edge of the bin; the first one has all lower values too"),
        "high": ("DOUBLE", "upper edge of the bin; the last one has all higher values too"),
        "count": ("BIGINT", "number of queries"),
    },
    "examples": {
        "layer": ("SMALLINT", "as in heads"),
        "head": ("SMALLINT", "as in heads"),
        "metric": ("VARCHAR", "as in heads"),
        "stratum": ("TINYINT", "decile of the value in the sample, 0 to 9; 10: the largest values"),
        "rank": ("SMALLINT", "order: by hash; the largest values: each range of positions in turn"),
        "value": ("FLOAT", "value of the metric for this query"),
        "text": ("INTEGER", "number of the text"),
        "context": ("INTEGER", "number of the context in the text"),
        "query": ("INTEGER", "position in the context, from 0"),
        "hash": ("BIGINT", "hash of seed, text, context and query"),
        "keys": ("INTEGER[]", "positions in the context of the largest weights"),
        "weights": ("FLOAT[]", "these weights, in falling order"),
        "token": ("VARCHAR", "text of the query's token"),
        "token_class": ("VARCHAR", "its class, of token_classes.CLASSES"),
    },
    "tokens": {
        "layer": ("SMALLINT", "as in heads"),
        "head": ("SMALLINT", "as in heads"),
        "side": ("VARCHAR", "query or key"),
        "token": ("INTEGER", "token id"),
        "spelling": ("VARCHAR", "text of the token"),
        "count": ("BIGINT", "links: largest weights that are not on key 0 or the query itself"),
        "total": ("BIGINT", "links of the head"),
        "corpus": ("BIGINT", "queries with this token, over all texts"),
        "lift": ("DOUBLE", "(count / total) / (corpus / queries of all texts)"),
    },
    "mixes": {
        "layer": ("SMALLINT", "as in heads"),
        "head": ("SMALLINT", "as in heads"),
        "token_class": ("VARCHAR", "class of the query's token, of token_classes.CLASSES, or all"),
        "kind": ("VARCHAR", "kind of the key with the largest weight, of basic.KINDS"),
        "share": ("DOUBLE", "fraction of the queries of the class; of all kinds, they sum to 1"),
        "low": ("DOUBLE", "95 % interval of the share, clustered by text; NULL for one text"),
        "high": ("DOUBLE", "upper end of the interval"),
        "alone": ("DOUBLE", "fraction whose key has no other behaviour; NULL for no behaviour"),
        "chance": ("DOUBLE", "fraction for a query that picks any of its keys; NULL as alone"),
        "p": ("DOUBLE", "p-value of the behaviour, 1 above 0.05; NULL as alone, and for one text"),
        "queries": ("BIGINT", "number of queries of the class"),
        "texts": ("BIGINT", "number of texts with such a query"),
    },
    "roles": {
        "layer": ("SMALLINT", "as in heads"),
        "head": ("SMALLINT", "as in heads"),
        "p": ("DOUBLE", "p-value that it does more than one thing; NULL for one text"),
        "q": ("DOUBLE", "p, corrected for the number of heads"),
        "class": ("VARCHAR", "class with the surest behaviour, or all; NULL for p = 1"),
        "kind": ("VARCHAR", "this behaviour"),
        "other_class": ("VARCHAR", "class with the surest other behaviour, perhaps the same"),
        "other_kind": ("VARCHAR", "that behaviour"),
        "p_differ": ("DOUBLE", "p-value that classes differ; NULL for one text"),
        "q_differ": ("DOUBLE", "p_differ, corrected for the number of heads"),
        "differ_class": ("VARCHAR", "a class that differs from another; NULL for p_differ = 1"),
        "differ_kind": ("VARCHAR", "its behaviour, more frequent than in the other class"),
        "differ_other_class": ("VARCHAR", "the other class"),
        "differ_other_kind": ("VARCHAR", "its behaviour"),
    },
    "texts": {
        "text": ("INTEGER", "number of the text, from 0"),
        "name": ("VARCHAR", "name of the text"),
        "contexts": ("INTEGER", "number of its contexts"),
        "tokens": ("BIGINT", "tokens of its contexts, with those that the tokenizer adds"),
    },
    "metrics": {
        "metric": ("VARCHAR", "name"),
        "formula": ("VARCHAR", "what it computes for each query"),
        "source": ("VARCHAR", "where the definition is from"),
        "version": ("INTEGER", "increases when its numbers change"),
        "low": ("DOUBLE", "lower end of its bins"),
        "high": ("DOUBLE", "upper end of its bins"),
        "bins": ("INTEGER", "number of bins"),
        "logarithmic": ("BOOLEAN", "whether the logarithms of bins have equal widths"),
        "least": ("DOUBLE", "least possible mean; NULL without one"),
        "most": ("DOUBLE", "largest possible mean; NULL without one"),
        "examples": ("BOOLEAN", "whether it has examples"),
    },
}
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


def write_table(out: Path, digest: str, name: str, parts: Iterable[Columns]) -> Path:
    """Write a table, in one move, from parts of columns whose rows are in order.

    Its file has the `digest` of the survey. Raises `BadValue` if the disk is full.
    """
    import duckdb

    path = out / FOLDER / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_for(path)
    types = ", ".join(f'"{column}" {type}' for column, (type, _) in SCHEMA[name].items())
    try:
        connection = connect()
        connection.execute(f"create table rows ({types})")
        for part in parts:
            connection.register("part", _registered(name, part))
            connection.execute(f"insert into rows select {_selected(name)} from part")
            connection.unregister("part")
        connection.execute(
            f"copy (select * from rows) to {quoted(full_path(temporary))} "
            f"(format parquet, compression zstd, row_group_size {ROW_GROUP}, "
            f"kv_metadata {{{quoted(DIGEST)}: {quoted(f'{digest} {name}')}}})"
        )
        connection.close()
        os.replace(temporary, path)
    except (OSError, duckdb.Error) as error:
        temporary.unlink(missing_ok=True)
        raise BadValue(
            f"{str(path)!r} cannot be written: {' '.join(str(error).split())[:300]}.",
            "tables are written under a temporary name, then moved; they need disk space.",
            "free disk space, and merge again; shards that are finished stay valid.",
        ) from error
    return path


def _registered(name: str, part: Columns) -> dict[str, np.ndarray]:
    """Return the columns as arrays of one dimension; a list column of n is n columns."""
    arrays: dict[str, np.ndarray] = {}
    for column, (type, _) in SCHEMA[name].items():
        value = part[column]
        if type.endswith("[]"):
            for i in range(np.asarray(value).shape[1]):
                arrays[f"{column}_{i}"] = np.ascontiguousarray(np.asarray(value)[:, i])
        else:
            array = np.asarray(value, dtype=object) if type == "VARCHAR" else np.asarray(value)
            arrays[column] = np.ascontiguousarray(array)
    return arrays


def _selected(name: str) -> str:
    """Return the SQL of a row: lists from their columns, without missing keys; NULL for NaN."""
    known = " + ".join(f"(keys_{i} >= 0)::int" for i in range(TOP_KEYS))
    items = []
    for column, (type, _) in SCHEMA[name].items():
        if type.endswith("[]"):
            entries = ", ".join(f"{column}_{i}" for i in range(TOP_KEYS))
            items.append(f"[{entries}][1:{known}]")
        elif type == "DOUBLE":
            items.append(f'case when isnan("{column}"::double) then null else "{column}" end')
        else:
            items.append(f'"{column}"')
    return ", ".join(items)


def open_tables(out: Path, digest: str) -> Any:
    """Return a connection with a view of each table, which reads these files and nothing else.

    Raises `BadValue` unless the tables are of the survey with this digest.
    """
    if digest_of_tables(out) != digest:
        raise BadValue(
            f"The tables of the survey in {str(out)!r} are not of all its texts.",
            "tables are written when all shards are finished.",
            f"run the same survey again, or: clearhead survey merge {out}",
        )
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
    connection = connect()
    digests = {
        (_digest_in(connection, out / FOLDER / f"{name}.parquet") or "").removesuffix(f" {name}")
        for name in SCHEMA
    }
    return digests.pop() if len(digests) == 1 else None


def _digest_in(connection: Any, file: Path) -> str | None:
    """Return the digest of the survey of a table, and its name; None for any other file."""
    import duckdb

    try:
        rows = connection.execute(
            "select value from parquet_kv_metadata(?) where key = ?",
            [pattern_of(file), DIGEST.encode()],
        ).fetchall()
    except duckdb.Error:
        return None
    return str(rows[0][0], "utf-8", "replace") if rows else None


def content_digest(connection: Any) -> str:
    """Return a digest of the rows of all tables, in order."""
    digest = hashlib.sha256()
    for name in SCHEMA:
        digest.update(name.encode())
        rows = connection.execute(f"select * from {name}")
        while part := rows.fetchmany(ROW_GROUP):
            digest.update(repr(part).encode())
    return digest.hexdigest()

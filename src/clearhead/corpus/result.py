"""Read the tables of a survey: `Survey`."""

import warnings
from bisect import bisect, bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..core.errors import BadValue, as_count, as_path, did_you_mean, must_be
from ..core.formatting import quantity
from . import cache_bits, corpus, forgetting
from .compare import Comparison, compare
from .connection import must_be_one_select
from .corpus import Shard, read_shard
from .examples import IN_DECILE, LARGEST
from .headvis import export_headvis
from .looks import BEHAVIOURS
from .manifest import Manifest, read_manifest
from .merge import must_be_finished
from .reader import Reader, open_reader
from .roles import Roles, roles_of
from .tables import SCHEMA, Table, content_digest, open_tables
from .vectors import HeadVectors, OnContext, chosen_examples, read_vectors, weights_of

if TYPE_CHECKING:
    from ..models.report.text_model import TextModel


class Survey:
    """A finished survey: what every head of a model does over a corpus.

    `clearhead.corpus.tables.SCHEMA` describes the columns of all tables, which `query` reads with
    SQL: heads, reasons, histograms, examples, tokens, mixes, roles, texts, metrics.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._connection = open_tables(folder, manifest.digest)
        self._shards: dict[str, Shard] = {}

    @classmethod
    def open(cls, folder: str | Path) -> "Survey":
        """Open the survey in a folder.

        Raises `BadValue` for a folder without one, and if it is not finished.
        """
        path = as_path("Survey.open", folder)
        manifest = read_manifest(path)
        try:
            return cls(path, manifest)
        except BadValue:
            must_be_finished(path, manifest)
            raise

    def __repr__(self) -> str:
        fixed, counts = self.manifest.fixed, self.manifest.corpus
        heads = self.query("select count(distinct (layer, head)) from heads").rows[0][0]
        skipped = counts["skipped"]
        read, contexts = "text", f"contexts of up to {fixed['context']} tokens"
        if self.grid is not None:
            read, contexts = "picture", f"{self.grid[1]} x {self.grid[2]} patches"
        return (
            f"{fixed['model']}: {quantity(heads, 'head')}, "
            f"{quantity(counts['tokens of texts'], 'token')} of "
            f"{quantity(counts['texts'] - skipped, read)}, {contexts}."
            + f" Left out: {quantity(skipped, read)}."
            * bool(skipped)
        )

    @property
    def grid(self) -> tuple[list[str], int, int] | None:
        """The tokens before the patches of a picture, and the rows and columns of these; None for
        texts."""
        grid = self.manifest.fixed.get("grid")
        return None if grid is None else tuple(grid)

    def query(self, sql: str, parameters: list[Any] | None = None) -> Table:
        """Return the rows of a query in SQL.

        >>> survey.query("select layer, head, mean from heads where metric = 'first' "
        ...              "order by mean desc limit 5")  # doctest: +SKIP

        A query reads the tables of the survey, and no other file: a survey may come from somebody
        else. Raises `BadValue` for an error in the query, and for anything but one SELECT.
        """
        with self._errors():
            must_be_one_select(self._connection, sql)
            result = self._connection.execute(sql, parameters)
            return Table(tuple(x[0] for x in result.description), tuple(result.fetchall()))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise `BadValue` for an error of DuckDB."""
        import duckdb

        try:
            yield
        except duckdb.Error as error:
            why = " ".join(str(error).split())[:500]
            gave = f"The query of {str(self.folder)!r} failed: {why}."
            rule = f"a query is one SELECT of DuckDB over {', '.join(SCHEMA)}."
            hint = "see the columns in clearhead.corpus.tables.SCHEMA."
            raise BadValue(gave, rule, hint) from error

    def digest(self) -> str:
        """Return the SHA-256 of the rows of all tables, as 64 hexadecimal digits.

        Two surveys with the same rows have the same digest, also if other versions of DuckDB wrote
        their files with other bytes.
        """
        with self._errors():
            return content_digest(self._connection)

    @property
    def heads(self) -> Table:
        """One row for each layer, head and metric."""
        return self.query("select * from heads")

    @property
    def metrics(self) -> Table:
        """One row for each metric: its formula, source, version and bins."""
        return self.query("select * from metrics")

    def histogram(self, layer: int, head: int, metric: str) -> Table:
        """Return the histogram of a metric over the queries of a head; empty bins are left out.

        Raises `BadValue` for a head or metric that the survey does not have.
        """
        self.must_have(metric)
        return self.of_head("histograms", layer, head, metric)

    def tokens(self, layer: int, head: int) -> Table:
        """Return the tokens that a head connects, on the sides "query" and "key", with their lift.

        A link is a query whose largest weight is neither on key 0 nor on the query itself. Raises
        `BadValue` for a head that the survey does not have.
        """
        return self.of_head("tokens", layer, head, order="side desc, lift desc")

    def examples(
        self,
        layer: int,
        head: int,
        *,
        metric: str,
        decile: int | None = None,
        n: int = 8,
        where: str = "true",
    ) -> Table:
        """Return references to queries of a head, chosen by the value of a metric.

        `decile`, 0 to 9, returns a uniform sample of the queries in this decile of the values: the
        survey has a uniform sample of 200 queries, whose values in order are cut into ten equal
        parts. Several deciles have no query in common. None returns the largest values of each
        range of positions in turn (`examples.BANDS`), because a query with few keys has large
        weights in any head. `context` returns the tokens of an example.

        `where` is a condition in SQL on the columns of `examples`, and on the `name` of the text.
        It selects among the stored examples, 20 of a decile, so there may be fewer than n.

        >>> survey.examples(  # doctest: +SKIP
        ...     5, 3, metric="largest", where="query >= 64 and name like 'wiki/%'"
        ... )

        Raises `BadValue` for more than 20 examples.
        """
        rule = f"n is the number of examples, 1 to {IN_DECILE}."
        n = as_count("n", n, rule, "pass for example n=8.", least=1, most=IN_DECILE)
        self.must_have(metric)
        stratum = LARGEST
        if decile is not None:
            rule = "deciles are numbered from 0, the smallest values, to 9."
            stratum = as_count("decile", decile, rule, "pass decile=9 for the largest.", most=9)
        named = "examples e join texts using (text)"
        chosen = f"(select e.* from {named} where stratum = {stratum} and ({where}))"
        rows = self.of_head(chosen, layer, head, metric, f"rank limit {n}")
        if decile is not None:
            return rows
        value = rows.columns.index("value")
        return Table(rows.columns, tuple(sorted(rows.rows, key=lambda row: -row[value])))

    def example_rows(
        self, model: "str | Path | TextModel | nn.Module", examples: Table, *, tokenizer: Any = None
    ) -> list[Tensor]:
        """Compute the weights of the query of each example on all keys of its context, (T,) each.

        A survey stores few weights of an example. The model reads its context again, alone, so the
        weights equal the stored ones within rounding. The model is that of the survey, and
        `examples` are rows of the table `examples`.

        >>> examples = survey.examples(5, 3, metric="largest")  # doctest: +SKIP
        >>> rows = survey.example_rows("checkpoint", examples)  # doctest: +SKIP

        Raises `BadValue` for another model, and for rows without the columns of an example.
        """
        reader = self.must_be_of(model, tokenizer)
        return weights_of(examples, reader, self._context)

    def vectors(
        self,
        model: "str | Path | TextModel | nn.Module | Reader",
        layer: int,
        head: int,
        *,
        n: int = 200,
        tokenizer: Any = None,
        on_context: OnContext = lambda done, total: None,
    ) -> HeadVectors:
        """Compute the queries, keys, values and outputs of a head at n of its examples or more.

        The examples are those of all metrics: samples of every range of values, and the largest.
        They are of complete contexts, which the model of the survey reads again up to the layer.
        A key is the one with the largest weight. ``on_context(done, total)`` is called before each
        context.

        >>> vectors = survey.vectors("checkpoint", 5, 3)  # doctest: +SKIP
        >>> vectors.pca("q").points  # (n, 3)  # doctest: +SKIP

        Raises `BadValue` for another model, and for a head that does not exist or has no examples.
        """
        n = as_count("n", n, "n is a number of examples, 1 or more.", "pass n=200.", least=1)
        reader = self.must_be_of(model, tokenizer)
        examples = self.of_head("examples", layer, head)
        if not examples:
            rule = "vectors are those of examples, which metrics store for queries with a choice."
            hint = 'survey with metrics="basic".'
            raise BadValue(f"The survey has no examples of layer {layer}, head {head}.", rule, hint)
        chosen = chosen_examples(examples, self.manifest.fixed["seed"], n)
        return read_vectors(reader, layer, head, chosen, self._context, on_context)

    def roles(self, layer: int, head: int) -> Roles:
        """Return what a head does, as a mix: how often its largest weight is on each kind of key,
        over all queries and by the class of their tokens.

        >>> survey.roles(5, 3)  # doctest: +SKIP
        layer 5, head 3: first 0.52 (0.48 to 0.56), induction 0.31 (0.28 to 0.34), far 0.17 (...)

        Raises `BadValue` without the metrics of `basic`, whose masses are those of chance.
        """
        for metric in BEHAVIOURS.values():
            self.must_have(metric)
        (row,) = self.of_head("roles", layer, head).to_pylist()
        return roles_of(self.of_head("mixes", layer, head).to_pylist(), row)

    def compare(self, other: "Survey") -> Comparison:
        """Return how heads differ from those of another survey of the same tokens, paired by text.

        `clearhead.corpus.compare` describes the test. A model compared with itself has no
        difference: every p is 1. A layer, head or metric that only one survey has is left out, with
        a warning. So is a metric whose mean is over other queries, because the masks differ.

        Raises `BadType` for anything but a survey, and what `clearhead.corpus.compare` raises.
        """
        must_be("compare", other, Survey, "survey(...), or of Survey.open(folder)")
        comparison = compare(self.folder, other.folder)
        if comparison.warning:
            warnings.warn(comparison.warning, stacklevel=2)
        return comparison

    def grouped(self, table: str, order: str, *by: str) -> dict[Any, list[dict[str, Any]]]:
        """Return the rows of a table for each layer and head, and each value of the columns `by`,
        in one query.

        Raises `BadValue` for a table, an order or a column that does not exist.
        """
        key = "layer", "head", *by
        rows = self.query(f"select * from {table} order by {', '.join((*key, order))}").to_pylist()
        return {of: list(group) for of, group in groupby(rows, itemgetter(*key))}

    def must_be_of(
        self, model: "str | Path | TextModel | nn.Module | Reader", tokenizer: Any = None
    ) -> Reader:
        """Return the reader of the model. Raises `BadValue` if the survey is of another model."""
        reader, fixed = open_reader(model, tokenizer), self.manifest.fixed
        if reader.model_digest != fixed["model digest"]:
            gave = f"The survey is of {fixed['model']}, not of {reader.name} with these weights."
            rule = "examples of a survey are explored with its model."
            raise BadValue(gave, rule, f"pass the model of the survey in {str(self.folder)!r}.")
        return reader

    export_headvis = export_headvis
    export_duo_attention = forgetting.export_duo_attention
    export_kvpress = forgetting.export_kvpress
    key_heads = forgetting.key_heads
    budgets = forgetting.budgets
    bit_budgets = cache_bits.bit_budgets

    def context(self, text: int, context: int) -> list[str]:
        """Return the tokens of a context, as written in the text.

        Raises `BadValue` for a context that the survey does not have.
        """
        shard, index = self._context(text, context)
        return [shard.spelling[i] for i in shard.context(index).tolist()]

    def pixels(self, text: int, context: int = 0) -> Tensor | None:
        """Return a picture as the model received it, (channels, height, width); None for a text.

        Raises `BadValue` for a context that the survey does not have.
        """
        shard, index = self._context(text, context)
        return None if shard.pixels is None else shard.pixels[index]

    def _context(self, text: int, context: int) -> tuple[Shard, int]:
        """Return the shard of a context, and the index of the context in it."""
        at = bisect(self.manifest.shards, (text, context), key=lambda x: (x.text, x.context)) - 1
        entry = self.manifest.shards[max(at, 0)]
        if entry.corpus not in self._shards:
            self._shards[entry.corpus] = read_shard(self.folder / corpus.FOLDER / entry.corpus)
        shard = self._shards[entry.corpus]
        places = range(len(shard.lengths))
        number = bisect_left(places, (text, context), key=shard.numbers_of)
        if number < len(places) and shard.numbers_of(number) == (text, context):
            return shard, number
        rule = "texts and contexts are numbered from 0."
        hint = "use the numbers of an example."
        raise BadValue(f"The survey has no context {context} of text {text}.", rule, hint)

    def of_head(
        self, table: str, layer: int, head: int, metric: str | None = None, order: str = ""
    ) -> Table:
        """Return the rows of a head. Raises `BadValue` for a head or metric that does not exist."""
        parameters: list[Any] = [layer, head]
        where = "layer = ? and head = ?"
        if metric is not None:
            where, parameters = f"{where} and metric = ?", [*parameters, metric]
        last = f" order by {order}" if order else ""
        rows = self.query(f"select * from {table} where {where}{last}", parameters)
        if not rows and not self.query(
            "select 1 from heads where layer = ? and head = ? limit 1", [layer, head]
        ):
            rule = "layers and heads are numbered from 0."
            hint = "survey.heads lists those of the survey."
            raise BadValue(f"Layer {layer}, head {head} was requested.", rule, hint)
        return rows

    def must_have(self, metric: str) -> None:
        """Raise `BadValue` for a metric that the survey does not have."""
        names = [known["metric"] for known in self.manifest.metrics]
        if metric not in names:
            rule = f"this survey has {', '.join(names)}."
            hint = did_you_mean(str(metric), names) or "use one of these."
            raise BadValue(f"metric is {metric!r}.", rule, hint)

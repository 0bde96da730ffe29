"""Write the page of a survey: a scatter of all heads; one head's distributions, examples, tokens.
With another survey of the same texts, the page shows where the two differ.

The page holds all numbers and the contexts of its examples, so it needs no server. What belongs to
one head or one context is packed, and read when it is shown.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from ...core.errors import must_be
from ...core.formatting import visible_in_browser
from ...corpus import Bins, Survey
from ...corpus.basic import KINDS
from ...corpus.compare import compare
from ...corpus.examples import BANDS, LARGEST
from ...corpus.looks import BEHAVIOURS, CLASSES
from ...corpus.roles import roles_of
from ...models.follow.picture import pixels_of
from ...models.roles.role_keys import is_separator
from . import schema
from .document import INKS, encoded, fields_of, filled, packed, table, write
from .schema import Host

PER_DECILE, OF_LARGEST = 2, 4  # examples of each head and metric
ONE_KEY = "first", "self", "previous", "next", "largest"  # metrics of one weight
BACK = {"duplicate": 0, "induction": 1}  # from a key to the copy of the query's token
TOKENS, LEAST_LIFT, LEAST_LINKS = 8, 1.25, 5  # of each side
SIDE = 128  # pixels of a picture, at most
DIGITS = 5  # of a number, of which the page draws at most four


def survey_page(survey: Survey, *, other: Survey | None = None, host: Host | None = None) -> str:
    """Return the HTML document of a survey, compared with another one of the same texts if given.

    Raises `BadType` for anything else, and `BadValue` for surveys that cannot be compared.
    """
    for value in (survey,) if other is None else (survey, other):
        must_be("survey_page", value, Survey, "survey(...), or of Survey.open(folder)")
    data = page_data(survey, other, host)
    texts = {"title": f"Survey of {name_of(survey)}", "about": repr(survey).split(": ", 1)[1]}
    texts["caption"] = "The mean of the first metric over all queries."
    means = next(iter(data["numbers"].values()))["mean"]
    rows = [
        [f"L{of['layer']}H{of['head']}", "" if mean is None else f"{mean:.4g}"]
        for of, mean in zip(data["heads"], means, strict=True)
    ]
    return filled("survey", ("page.css", "survey.css"), data, texts, table(rows), host)


def write_survey(survey: Survey, path: str | Path, *, other: Survey | None = None) -> Path:
    """Write the page of a survey to `path`. Raises `BadValue` if it cannot, as `survey_page`."""
    return write(survey_page(survey, other=other), path)


def page_data(survey: Survey, other: Survey | None, host: Host | None) -> schema.SurveyPage:
    """Return all data of the page of a survey."""
    contexts = Contexts(survey)
    comparison = None if other is None else compare(survey.folder, other.folder)
    differences = {
        (row["layer"], row["head"], row["metric"]): fields_of(schema.SurveyDifference, row)
        for row in (() if comparison is None else comparison.to_pylist())
    }
    histograms = survey.grouped("histograms", "bin", "metric")
    examples = survey.grouped("examples", "stratum, rank", "metric")
    heads: dict[tuple[int, int], schema.SurveyHead] = {}
    details: dict[tuple[int, int], schema.SurveyDetails] = {}
    rows: dict[tuple[int, int, str], dict[str, Any]] = {}
    for row in survey.heads.to_pylist():
        layer_head = row["layer"], row["head"]
        if layer_head not in heads:
            heads[layer_head] = fields_of(schema.SurveyHead, row, shares=[], several="", details="")
            details[layer_head] = {"mixes": [], "metrics": {}, "tokens": []}
        key = *layer_head, row["metric"]
        rows[key], bins = rounded(row), histograms.get(key, [])
        details[layer_head]["metrics"][row["metric"]] = fields_of(
            schema.SurveyDetail,
            row,
            sd=row["sd_of_texts"],
            quantiles=[row[name] for name in ("q05", "q25", "q50", "q75", "q95")],
            bins=[x["bin"] for x in bins],
            counts=[x["count"] for x in bins],
            examples=[contexts.example(x) for x in _chosen(examples.get(key, []), contexts)],
        )
    _add_tokens(survey, details, contexts)
    _add_mixes(survey, heads, details)
    for layer_head, of in heads.items():
        of["details"] = packed(rounded(details[layer_head]))
    metrics = survey.metrics.to_pylist()
    numbers: dict[str, schema.SurveyNumbers] = {}
    for metric in (row["metric"] for row in metrics):
        keys = [(*layer_head, metric) for layer_head in heads]
        of_heads = {
            name: [rows.get(key, {}).get(name) for key in keys]
            for name in ("mean", "low", "high", "uniform")
        }
        compared = list(map(differences.get, keys)) if differences else []
        numbers[metric] = fields_of(schema.SurveyNumbers, of_heads, compared=compared)
    return {
        "inks": INKS,
        "host": host,
        "other": None if other is None else f"{name_of(other)}, in {other.folder.name}",
        "caution": "" if comparison is None else comparison.warning,
        "metrics": list(map(_metric, metrics)),
        "key_kinds": KINDS,
        "classes": CLASSES,
        "heads": list(heads.values()),
        "numbers": numbers,
        "contexts": list(map(packed, contexts.stored)),
        "spelling": list(contexts.spelling),
        "between": contexts.between,
        "around": tokens_around(survey),
        "grid": survey.grid,
    }


def rounded(value: Any) -> Any:
    """Round the numbers of data to `DIGITS` digits; counts stay."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: rounded(x) for name, x in value.items()}
    return [rounded(x) for x in value] if isinstance(value, (list, tuple)) else value


def tokens_around(survey: Survey) -> tuple[int, int]:
    """Return how many tokens the tokenizer adds before and after each context."""
    fixed = survey.manifest.fixed
    return len(fixed["tokens before each context"]), len(fixed["tokens after each context"])


def name_of(survey: Survey) -> str:
    """Return the name of the model of a survey."""
    return Path(str(survey.manifest.fixed["model"])).name


def _metric(row: Mapping[str, Any]) -> schema.SurveyMetric:
    edges = Bins(row["low"], row["high"], row["bins"], row["logarithmic"]).edges()
    return fields_of(schema.SurveyMetric, row, name=row["metric"], edges=edges)


def _chosen(
    examples: Iterable[Mapping[str, Any]], contexts: "Contexts"
) -> Iterable[Mapping[str, Any]]:
    """Return some examples of each decile, by their hash, and of the largest values.

    A query with few keys has large weights in any head, so the first ones are chosen last. The
    largest are those that exceed equal weights most, first one of each token of queries."""
    for stratum, of_stratum in groupby(examples, itemgetter("stratum")):
        in_order = sorted(of_stratum, key=lambda row: row["query"] < BANDS[1])
        if stratum == LARGEST:
            in_order.sort(
                key=lambda row: (row["query"] < BANDS[1], contexts.by_chance(row) - row["value"])
            )
            firsts = {row["token"]: row for row in reversed(in_order)}
            in_order.sort(key=lambda row: row is not firsts[row["token"]])
        yield from in_order[: OF_LARGEST if stratum == LARGEST else PER_DECILE]


class Contexts:
    """The contexts of examples, each stored once, and the texts of their tokens."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.stored: list[schema.SurveyContext] = []
        self.spelling: dict[str, int] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._names = dict(survey.query("select text, name from texts").rows)
        self._read = lru_cache(maxsize=None)(survey.context)
        later = survey.query("select 1 from heads where metric = 'ahead' and queries > 0 limit 1")
        self._causal = survey.grid is None and not later.rows

    def token(self, text: str) -> int:
        """Return the index of a token's text, in which only the space before a word is a space."""
        space, word = (" ", text[1:]) if text[:1] == " " and text[1:].strip() else ("", text)
        return self.spelling.setdefault(space + visible_in_browser(word), len(self.spelling))

    @property
    def between(self) -> str:
        """What is between two tokens: a space if no token has its own."""
        return "" if any(text[0] == " " for text in self.spelling) else " "

    def by_chance(self, row: Mapping[str, Any]) -> float:
        """Compute an example's metric for equal weights on all keys, without a window.

        For a metric that is not a mass of keys, return the example's own value."""
        metric, query = row["metric"], row["query"]
        if self.survey.grid is not None:  # the same for all patches, so that the largest are first
            return 0.0
        if metric not in (*ONE_KEY, *BACK, "separators"):
            return float(row["value"])
        tokens = self._read(row["text"], row["context"])
        keys = query + 1 if self._causal else len(tokens)
        if metric == "separators":
            return sum(map(is_separator, tokens[1:keys])) / keys
        if metric in ONE_KEY:
            return 1 / keys
        copies = (tokens[k - BACK[metric]] == tokens[query] for k in range(1, query - 1))
        return sum(copies) / keys

    def example(self, row: Mapping[str, Any]) -> schema.SurveyExample:
        text, context = text_context = row["text"], row["context"]
        if text_context not in self._numbers:
            self._numbers[text_context] = len(self.stored)
            name = self._names[text]
            name += f", context {context}" if self.survey.grid is None else ""
            tokens = [self.token(x) for x in self._read(text, context)]
            pixels = self.survey.pixels(text, context)
            self.stored.append(
                {
                    "name": name, "text": text, "context": context, "tokens": tokens,
                    "pixels": None if pixels is None else encoded(pixels_of(pixels, SIDE), "u1"),
                }
            )  # fmt: skip
        weights = [round(x, 5) for x in row["weights"]]
        number = self._numbers[text_context]
        return fields_of(
            schema.SurveyExample, row, decile=row["stratum"], context=number, weights=weights
        )


def _add_tokens(
    survey: Survey, details: Mapping[tuple[int, int], schema.SurveyDetails], contexts: Contexts
) -> None:
    """Add the tokens that each head's links have more often than the corpus, on each side."""
    condition = f"lift >= {LEAST_LIFT} and count >= {LEAST_LINKS}"
    side, first = "layer, head, side", "lift desc, token"
    best = f"row_number() over (partition by {side} order by {first}) <= {TOKENS}"
    question = f"select * from tokens where {condition} qualify {best} order by {side}, {first}"
    for row in survey.query(question).to_pylist():
        token = fields_of(schema.SurveyToken, row, token=contexts.token(row["spelling"]))
        details[row["layer"], row["head"]]["tokens"].append(token)


def _add_mixes(
    survey: Survey,
    heads: Mapping[tuple[int, int], schema.SurveyHead],
    details: Mapping[tuple[int, int], schema.SurveyDetails],
) -> None:
    """Add where each class of queries looks, and what heads do that do more than one thing."""
    rows = survey.query("select * from mixes").to_pylist()
    mixes = {of: list(own) for of, own in groupby(rows, itemgetter("layer", "head"))}
    tested = set(BEHAVIOURS.values()) <= {row["metric"] for row in survey.metrics.to_pylist()}
    for row in survey.query("select * from roles").to_pylist():
        layer_head = row["layer"], row["head"]
        own, of = mixes.get(layer_head, []), heads.get(layer_head)
        if of is None:  # no query has a choice
            continue
        if tested:
            of["several"] = roles_of(own, row).reason
        for _, shares in groupby(own, itemgetter("token_class")):
            of_class = list(shares)
            ends = [(x["share"], x["low"], x["high"]) for x in of_class]
            mix = fields_of(schema.SurveyMix, of_class[0], shares=ends)
            details[layer_head]["mixes"].append(mix)
            of["shares"] = rounded([x["share"] for x in of_class])  # at last those of all queries

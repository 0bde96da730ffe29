"""Write a survey as the folder `data/` that the viewer HeadVis reads.

Source of the format: `data_pipeline.py`, `server.py` and `attributions.js` of
github.com/anthropics/headvis, 2026. An interval is a decile of the queries by their largest weight.
A sequence has the weights of one query, because a survey stores no matrices, and its activation is
their largest outside row 0, column 0 and the diagonal. Distances and tokens are those of the whole
corpus.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..core.errors import writable_folder
from ..models.why import why
from .examples import DECILES, IN_DECILE
from .reader import Reader

if TYPE_CHECKING:
    from ..models.report.text_model import TextModel
    from . import Survey

SEQUENCES_BY = "largest"  # the metric whose examples are the sequences
Rows = Sequence[Mapping[str, Any]]
DISTANCE = re.compile(r"distance_(\d+)(?:_(\d+))?")
PATTERN = "L{layer}H{head}.json"
PAIRS = 40  # of what wrote the query and what wrote the key, for one link
PLOTS = {"qk_distance_histogram": "Q-K distance", "histogram": "Largest weight of a query"}
STATISTICS = {
    "queries": ("queries", "Queries"),
    "texts": ("texts", "Texts"),
    "mean_largest": ("mean", "Mean of the largest weight"),
}
TABLES = {"top_query_tokens": "Top query tokens", "top_key_tokens": "Top key tokens"}


def export_headvis(
    survey: "Survey", folder: str | Path, model: "str | Path | TextModel | nn.Module | None" = None,
    *, tokenizer: Any = None,
) -> Path:  # fmt: skip
    """Write the survey as a folder that the viewer HeadVis reads, and return its path.

    With the `model` of the survey, the tab QK has one link of each head: that of the largest weight
    of the stored ones, outside row 0, column 0 and the diagonal. `why` splits its contrast with
    the other keys into pairs of what wrote the query and what wrote the key, `PAIRS` of them. The
    format has features of a sparse dictionary there; these are heads, MLPs, embeddings and biases.

    Raises `BadValue` if the folder cannot be created, for another model, and what `why` raises."""
    out = writable_folder(folder, "an export is")
    reader = None if model is None else survey.must_be_of(model, tokenizer)
    (out / "heads").mkdir(exist_ok=True)
    (out / "attributions" / "qk").mkdir(parents=True, exist_ok=True)
    rows = survey.query("select * from heads order by layer, head, metric").to_pylist()
    heads = {
        layer_head: {row["metric"]: row for row in of}
        for layer_head, of in groupby(rows, itemgetter("layer", "head"))
    }
    _write(out / "config.json", _config(survey, list(heads)))
    means = [
        {"layer": layer, "head": head, **{name: row["mean"] for name, row in of.items()}}
        for (layer, head), of in heads.items()
    ]
    _write(out / "scatter_data.json", means)
    histograms = survey.by_metric("histograms", "bin")
    examples = survey.by_metric("examples", "stratum, rank")
    manifest: dict[str, Any] = {}
    for (layer, head), metrics in heads.items():
        name, key = PATTERN.format(layer=layer, head=head), (layer, head, SEQUENCES_BY)
        stored = [row for row in examples.get(key, []) if row["stratum"] < DECILES]
        sequences = [_sequence(survey, row) for row in stored]
        tokens = survey.tokens(layer, head).to_pylist()
        _write(out / "heads" / name, _head(sequences, metrics, tokens, histograms[key]))
        if reader is not None and stored:
            row, sequence = max(zip(stored, sequences, strict=True), key=lambda x: _link(x[0])[0])
            manifest |= _write_pairs(survey, reader, row, sequence, out / "attributions" / "qk")
    _write(out / "attributions" / "manifest.json", manifest)
    _write(out / "server_config.json", {})  # the viewer works without a server
    return out


def _write_pairs(
    survey: "Survey", reader: Reader, row: Mapping[str, Any], sequence: Mapping[str, Any],
    folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """Write the pairs of an example's largest link, and return the entry of the manifest."""
    shard, number = survey._context(row["text"], row["context"])
    ids, query, key = shard.context(number), row["query"], _link(row)[1]
    result = why(reader.module, ids, layer=row["layer"], head=row["head"], query=query, key=key)
    parts = result.pairs()
    pairs: list[dict[str, Any]] = []
    for index in parts.abs().flatten().argsort(descending=True)[:PAIRS].tolist():
        pair: dict[str, Any] = {"attribution": float(parts.flatten()[index])}
        numbers = divmod(index, len(parts))
        for side, at, number in zip(("query", "key"), (query, key), numbers, strict=True):
            wrote, token = str(result.components[number]), sequence["tokens"][at]
            pair |= {f"{side}_feature": wrote, f"{side}_description": f"{wrote} at {token!r}"}
            pair[f"{side}_snippets"] = []
        pairs.append(pair)
    name = f"L{row['layer']}H{row['head']}S{sequence['sequence_id']}"
    _write(folder / f"{name}Q{query}K{key}.json", {"pairs": pairs})
    return {name: {"qk": [[query, key]], "ov": []}}


def _config(survey: "Survey", heads: list[tuple[int, int]]) -> dict[str, Any]:
    metrics = survey.metrics.to_pylist()
    return {
        "model_name": str(survey.manifest.fixed["model"]),
        "heads": [list(layer_head) for layer_head in heads],
        "n_layers": len({layer for layer, _ in heads}),
        "n_heads": max(head for _, head in heads) + 1,
        "n_intervals": DECILES,
        "metrics": [row["metric"] for row in metrics],
        "metric_descriptions": {row["metric"]: row["formula"] for row in metrics},
        "head_data_pattern": PATTERN,
        "has_umap": False,
        "umap_heads": [],
        "custom_plots": [{"key": key, "label": label} for key, label in PLOTS.items()],
        "custom_tables": [{"key": key, "label": label} for key, label in TABLES.items()],
        "statistics_display": {
            name: {"label": label, "format": "default"} for name, (_, label) in STATISTICS.items()
        },
    }


def _head(
    sequences: list[dict[str, Any]], metrics: Mapping[str, Any], tokens: Rows, histogram: Rows
) -> dict[str, Any]:
    return {
        "sequences": sequences,
        "qk_distance_histogram": _distances(metrics),
        **{
            f"top_{side}_tokens": [
                {"token": row["spelling"], "weight": row["count"] / row["total"]}
                for row in sorted(tokens, key=itemgetter("count"), reverse=True)
                if row["side"] == side
            ]
            for side in ("query", "key")
        },
        "histogram": {
            "bin_edges": [row["low"] for row in histogram] + [histogram[-1]["high"]],
            "bin_values": [row["count"] for row in histogram],
        },
        "statistics": {
            name: metrics[SEQUENCES_BY][column] for name, (column, _) in STATISTICS.items()
        },
    }


def _sequence(survey: "Survey", row: Mapping[str, Any]) -> dict[str, Any]:
    tokens, query = survey.context(row["text"], row["context"]), row["query"]
    return {
        "sequence_id": IN_DECILE * row["stratum"] + row["rank"],
        "interval": row["stratum"] + 1,
        "tokens": tokens,
        "attention_indices": [query * len(tokens) + key for key in row["keys"]],
        "attention_values": [round(weight, 4) for weight in row["weights"]],
        "seq_len": len(tokens),
        "max_activation": _link(row)[0],
    }


def _link(row: Mapping[str, Any]) -> tuple[float, int]:
    """Return the largest stored weight outside row 0, column 0 and the diagonal, and its key.

    The weight is 0 if there is none; then the key is that of the largest weight.
    """
    pairs = zip(row["weights"], row["keys"], strict=True)
    inside = [pair for pair in pairs if row["query"] and 0 < pair[1] != row["query"]]
    return max(inside, default=(0.0, row["keys"][0]))


def _distances(metrics: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the sums of weights by distance: 0, 1, 2 to 3, 4 to 7, and so on."""
    bins = {0: metrics["self"], 1: metrics["previous"]}
    for name, row in metrics.items():
        if match := DISTANCE.fullmatch(name):
            bins[int(match[1])] = row
    lows = sorted(bins)
    return {
        "bin_edges": [float(low) for low in lows] + [2.0 * max(lows[-1], 1)],
        "bin_values": [bins[low]["mean"] * bins[low]["queries"] for low in lows],
    }


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, allow_nan=False), encoding="utf-8")

"""Write a survey as the folder `data/` that HeadVis and the loaders of Neuronpedia read.

Sources of the format: `data_pipeline.py`, `server.py`, `src/Index.svelte`, `UmapView.svelte` and
`data.js` of github.com/anthropics/headvis, and `compute-head-metrics.py`, `load-head-metrics.py`
and `load-head-sequences.py` of github.com/hijohnnylin/neuronpedia, 2026.

The numbers of heads are those of the survey, over all texts. It stores no matrices, so the model
reads a sample of contexts again for complete patterns.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..core.errors import BadType, as_count, must_be_of, writable_folder
from ..core.functional.ambient import FollowedCall
from ..core.stats import TopWeights, topk
from ..models.inspect.recording import Call
from ..models.inspect.watcher import Watcher
from ..models.why import why
from .basic import Largest
from .examples import DECILES
from .reader import Reader
from .vectors import Context, HeadVectors, in_order_of_hashes, principal_components, read_vectors

if TYPE_CHECKING:
    from ..models.report.text_model import TextModel
    from . import Survey

Head = tuple[int, int]  # a layer, and the number of the head in it
Rows = Sequence[Mapping[str, Any]]
WEIGHTS, LEAST = 8, 0.005  # the most weights of a row that are written, and the least of them
TOKENS = 50  # of queries, and of keys, of one head
DISTANCE = re.compile(r"distance_(\d+)_(\d+)")
PATTERN = "L{layer}H{head}.json"
CLOUD = 5000  # pairs of a query and a key, for one head
PAIRS = 40  # of what wrote the query and what wrote the key, for one link
VARIANCE = "qk_distance_variance"
NAMES = {  # of metrics in Neuronpedia
    "self": "self_attention_score",
    "previous": "prev_token_score",
    "entropy": "pattern_entropy",
    "induction": "induction_score",
    "distance": "qk_distance",
    "distance_squared": VARIANCE,
}
PLOTS = {"qk_distance_histogram": "Q-K distance", "histogram": "Largest weight of a query"}
STATISTICS = {"queries": "Queries", "texts": "Texts", "mean": "Mean of the largest weight"}
TABLES = {"top_query_tokens": "Top query tokens", "top_key_tokens": "Top key tokens"}


def export_headvis(
    survey: "Survey", folder: str | Path, model: "str | Path | TextModel | nn.Module", *,
    dataset: str, contexts: int = 20, heads: Iterable[Head] = (), tokenizer: Any = None,
) -> Path:  # fmt: skip
    """Write the survey as a folder that HeadVis and Neuronpedia read, and return its path.

    >>> survey.export_headvis(  # doctest: +SKIP
    ...     "exports/smollm2/headvis/stories", "checkpoint", dataset="stories", heads=[(17, 3)]
    ... )

    Means, histograms and tokens are those of all texts. The model reads a uniform sample of
    contexts, each once, for the pattern of every head: of each row the `WEIGHTS` largest weights,
    from `LEAST` on, with four decimals. The `max_activation` of a pattern is its largest weight
    outside row 0, column 0 and the diagonal, 0 if no weight is outside. The contexts in its order
    are cut into ten equal parts, the intervals of a head. Patterns wait in files: memory has the
    largest weights of one layer at a time, and never a square.

    Args:
        folder: where to write. Neuronpedia expects EXPORTS/MODEL/headvis/DATASET.
        model: the model of the survey.
        dataset: the name of the texts, which a survey does not have.
        contexts: how many contexts the model reads, 1 or more; all if there are fewer.
        heads: heads, as (layer, head), for the tabs UMAP and QK. Each takes another run of the
            model on these contexts. The tab UMAP has the vectors of the `CLOUD` largest links of
            the patterns, as those of `Survey.vectors`, on three principal components. The tab QK
            has the largest link: `why` splits its contrast with the other keys into pairs of what
            wrote the query and what wrote the key, `PAIRS` of them. The format has features of a
            sparse dictionary there; these are heads, MLPs, embeddings and biases.
        tokenizer: that of a module.

    Raises:
        BadType: if `dataset` is not a string, and `heads` are not pairs.
        BadValue: if the folder cannot be created; for another model, a head that does not exist,
            and a survey without the metrics of `basic`; for a model whose attention clearhead does
            not compute; and what `why` raises.
    """
    rule, hint = "contexts is how many the model reads, 1 or more.", "pass for example contexts=20."
    contexts = as_count("contexts", contexts, rule, hint, least=1)
    must_be_of(str, "dataset", dataset, "it names the texts.", 'pass dataset="stories".')
    for metric in (Largest.name, "self", "previous"):
        survey.must_have(metric)
    reader, named = survey.must_be_of(model, tokenizer), [*heads]
    for pair in named:
        if not isinstance(pair, tuple) or len(pair) != 2:
            rule, hint = "heads are pairs (layer, head).", "pass for example heads=[(17, 3)]."
            raise BadType(f"heads has {pair!r}.", rule, hint)
        survey.of_head("heads", *pair)
    out = writable_folder(folder, "an export is")
    for part in ("heads", "umap", "attributions/qk"):
        (out / part).mkdir(parents=True, exist_ok=True)
    rows: dict[Head, list[dict[str, Any]]] = survey.grouped("heads", "metric")
    histograms = survey.grouped(f"histograms where metric = '{Largest.name}'", "bin")
    rank = "row_number() over (partition by layer, head, side order by count desc, token)"
    tokens = survey.grouped(f"tokens qualify {rank} <= {TOKENS}", rank)
    means: list[dict[str, float]] = [
        {"layer": layer, "head": head, **{_metric(row): row["mean"] for row in own}}
        for (layer, head), own in rows.items()
    ]
    for row in means:
        if VARIANCE in row:
            row[VARIANCE] -= row["qk_distance"] ** 2
    means.sort(key=len, reverse=True)  # the axes of the viewer are the numbers of the first row
    _write(out / "scatter_data.json", means)
    _write(out / "config.json", _config(survey, means, [*rows], named, dataset))
    every = survey.query("select text, unnest(range(contexts)) from texts").rows
    chosen = in_order_of_hashes(survey.manifest.fixed["seed"], every)[:contexts]
    numbers = {context: number for number, context in enumerate(chosen)}
    manifest: dict[str, Any] = {}
    with TemporaryDirectory(dir=out) as lines:
        _write_lines(survey, reader, chosen, Path(lines))
        texts = [survey.context(*context) for context in chosen]
        for of, own in rows.items():
            name = PATTERN.format(layer=of[0], head=of[1])
            metrics = {row["metric"]: row for row in own}
            link, sequences = _sequences(Path(lines) / name, texts)
            parts = metrics, tokens.get(of, []), histograms[of]
            _write(out / "heads" / name, _head(sequences, *parts))
            if of in named:
                pairs = _strongest_pairs(sequences, chosen)
                vectors = read_vectors(reader, *of, pairs, survey._context)
                _write(out / "umap" / name, _cloud(vectors, numbers))
                if sequences[0]["max_activation"]:
                    manifest |= _write_pairs(survey, reader, of, sequences[0], link, chosen, out)
    _write(out / "umap" / "sequences.json", {i: survey.context(*x) for x, i in numbers.items()})
    _write(out / "attributions" / "manifest.json", manifest)
    _write(out / "server_config.json", {})  # the viewer works without a server
    return out


def _metric(row: Mapping[str, Any]) -> str:
    return NAMES.get(row["metric"], row["metric"])


def _write_lines(survey: "Survey", reader: Reader, contexts: list[Context], out: Path) -> None:
    """Write a file for each head, with a line of JSON for its pattern in each context."""

    def receive(call: Call, _: FollowedCall) -> None:
        top = call.statistics["topk"]
        assert isinstance(top, TopWeights)
        patterns = zip(top.weights[0].double(), top.keys[0], strict=True)
        for head, (weights, keys) in enumerate(patterns):
            with (out / PATTERN.format(layer=call.layer, head=head)).open("a") as file:
                file.write(json.dumps(_pattern(weights, keys)) + "\n")

    watcher = Watcher(reader.module, receive, (topk(WEIGHTS),))
    for context in contexts:
        shard, index = survey._context(*context)
        with watcher.hooked():
            reader.run(shard.context(index).unsqueeze(0))
    watcher.check_recorded()


def _pattern(weights: Tensor, keys: Tensor) -> tuple[int, dict[str, Any]]:
    """Return the flat index of the largest link of a pattern, and the pattern.

    `weights` and `keys` are the largest of each row, (T, n). A link is outside row 0, column 0 and
    the diagonal.
    """
    T = len(keys)
    query = torch.arange(T).unsqueeze(-1)
    outside = weights.masked_fill((query == 0) | (keys <= 0) | (keys == query), 0.0)
    index, large = query * T + keys, weights >= LEAST
    indices, order = index[large].sort()
    return int(index.flatten()[outside.argmax()]), {
        "attention_indices": indices.tolist(),
        "attention_values": weights[large][order].round(decimals=4).tolist(),
        "seq_len": T,
        "max_activation": float(outside.max()),
    }


def _sequences(file: Path, texts: Sequence[list[str]]) -> tuple[int, list[dict[str, Any]]]:
    """Return the largest link of a head, as a flat index, and its patterns, the strongest first.

    `texts` has the tokens of each context.
    """
    read = [json.loads(line) for line in file.read_text().splitlines()]
    order = sorted(range(len(read)), key=lambda i: -read[i][1]["max_activation"])
    return read[order[0]][0], [
        {
            "sequence_id": number,
            "interval": DECILES - rank * DECILES // len(read),
            "tokens": texts[number],
            **read[number][1],
        }
        for rank, number in enumerate(order)
    ]


def _strongest_pairs(sequences: Rows, contexts: list[Context]) -> dict[Context, list[Any]]:
    """Return the `CLOUD` largest weights of a head outside row 0, column 0 and the diagonal, by
    context, as rows of examples."""
    pairs = (
        (weight, x["sequence_id"], *divmod(index, x["seq_len"]))
        for x in sequences
        for index, weight in zip(x["attention_indices"], x["attention_values"], strict=True)
    )
    rows: dict[Context, list[Any]] = {}
    for weight, number, query, key in nlargest(CLOUD, (x for x in pairs if 0 < x[3] != x[2])):
        row = {"query": query, "keys": [key], "weights": [weight], "token": "", "token_class": ""}
        rows.setdefault(contexts[number], []).append(row)
    return rows


def _cloud(vectors: HeadVectors, numbers: dict[Context, int]) -> dict[str, Any]:
    """Return the vectors of a head on three principal components, 0 on those that do not exist."""
    rows = vectors.examples.to_pylist()
    parts = vectors.parts or dict.fromkeys("qkov", torch.zeros(0, 1))
    points = {part: principal_components(parts[part.lower()]).points for part in "QKOV"}
    return {
        "seq_idx": [numbers[x["text"], x["context"]] for x in rows],
        "top_q": [row["query"] for row in rows],
        "top_k": [row["key"] for row in rows],
        "norms": parts["q"].norm(dim=-1).tolist(),
        "pca": {
            part: {f"d{i}": own for i, own in enumerate(pad(x, (0, 3 - x.shape[1])).T.tolist())}
            for part, x in points.items()
        },
        "clusters": [],
    }


def _write_pairs(
    survey: "Survey", reader: Reader, of: Head, sequence: Mapping[str, Any], link: int,
    contexts: list[Context], out: Path,
) -> dict[str, Any]:  # fmt: skip
    """Write the pairs of a head's largest link, and return the entry of the manifest."""
    (layer, head), (query, key) = of, divmod(link, sequence["seq_len"])
    shard, number = survey._context(*contexts[sequence["sequence_id"]])
    result = why(reader.module, shard.context(number), layer=layer, head=head, query=query, key=key)
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
    name = f"L{layer}H{head}S{sequence['sequence_id']}"
    _write(out / "attributions" / "qk" / f"{name}Q{query}K{key}.json", {"pairs": pairs})
    return {name: {"qk": [[query, key]], "ov": []}}


def _config(
    survey: "Survey", means: Rows, heads: Sequence[Head], named: Sequence[Head], dataset: str
) -> dict[str, Any]:
    formulas = {_metric(row): row["formula"] for row in survey.metrics.to_pylist()}
    if VARIANCE in formulas:
        formulas[VARIANCE] += ", without the square of the mean qk_distance"
    metrics = [name for name in formulas if any(name in row for row in means)]
    fixed, corpus = survey.manifest.fixed, survey.manifest.corpus
    return {
        "model_name": str(fixed["model"]),
        "dataset_name": dataset,
        "n_sequences": corpus["contexts"],
        "seq_len": fixed["context"],
        "dtype": fixed["dtype"],
        "attn_implementation": "clearhead",
        "n_texts": corpus["texts"] - corpus["skipped"],
        "n_tokens": corpus["tokens of texts"],
        "heads": heads,
        "n_layers": len({layer for layer, _ in heads}),
        "n_heads": max(head for _, head in heads) + 1,
        "n_intervals": DECILES,
        "metrics": metrics,
        "metric_descriptions": {name: formulas[name] for name in metrics},
        "head_data_pattern": PATTERN,
        "has_umap": bool(named),
        "umap_heads": named,
        "custom_plots": [{"key": key, "label": label} for key, label in PLOTS.items()],
        "custom_tables": [{"key": key, "label": label} for key, label in TABLES.items()],
        "statistics_display": {
            name: {"label": label, "format": "default"} for name, label in STATISTICS.items()
        },
    }


def _head(sequences: Rows, metrics: Mapping[str, Any], tokens: Rows, bins: Rows) -> dict[str, Any]:
    counts = {row["bin"]: row["count"] for row in bins}
    return {
        "sequences": sequences,
        "qk_distance_histogram": _distances(metrics),
        **{
            f"top_{side}_tokens": [
                {"token": row["spelling"], "weight": row["count"] / row["total"]}
                for row in tokens
                if row["side"] == side
            ]
            for side in ("query", "key")
        },
        "histogram": {
            "bin_edges": Largest.bins.edges(),
            "bin_values": [counts.get(number, 0) for number in range(Largest.bins.count)],
        },
        "statistics": {column: metrics[Largest.name][column] for column in STATISTICS},
    }


def _distances(metrics: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the sums of weights by distance: 0, 1, 2 to 3, 4 to 7, and so on."""
    bins, last = {0: metrics["self"], 1: metrics["previous"]}, 1
    for name, row in metrics.items():
        if match := DISTANCE.fullmatch(name):
            bins[int(match[1])], last = row, max(last, int(match[2]))
    lows = sorted(bins)
    return {
        "bin_edges": [*map(float, lows), last + 1.0],
        "bin_values": [bins[low]["mean"] * bins[low]["queries"] for low in lows],
    }


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, allow_nan=False), encoding="utf-8")

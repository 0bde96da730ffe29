"""The folder for HeadVis and Neuronpedia: patterns against dense weights, and both contracts."""

import copy
import json
import math
import re
from itertools import pairwise

import pytest
import torch

import clearhead as ch
from clearhead import demo
from clearhead.corpus import basic, headvis
from clearhead.corpus.basic import First, Largest

from .models import CONTEXT, MODELS, SIZES, texts, tokenizer
from .test_planted import Planted

STORIES = [
    "once upon a time there was a queen . she danced in the castle because she was proud .",
    "a wizard and a dog lived by the sea . he gave his books to her . they laughed .",
    "long ago there lived a poor witch . she had a cat . the cat slept .",
]


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def read_head(out, layer, head):
    return read(out / "heads" / f"L{layer}H{head}.json")


@pytest.fixture(scope="module", params=["llama", "bert"])
def exported(request, tmp_path_factory):
    torch.manual_seed(3)
    model = MODELS[request.param](attn_implementation="clearhead").eval()
    eager = MODELS[request.param](attn_implementation="eager").double().eval()
    eager.load_state_dict(model.state_dict())
    folder, tok = tmp_path_factory.mktemp("survey"), tokenizer(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(basic, "STRIP", 7)  # so that contexts have several
        survey = ch.survey(
            model, texts(), out=folder / "out", tokenizer=tok, context=CONTEXT,
            metrics="basic,distance",
        )  # fmt: skip
    out = survey.export_headvis(
        folder / "headvis", model, dataset="words", contexts=30, heads=[(1, 4)], tokenizer=tok
    )
    return survey, model, eager, out


def weights_of(eager, tokens):
    """The weights of each layer, (H, T, T), in float64."""
    words = tokenizer(True).get_vocab()
    with torch.no_grad():
        ids = torch.tensor([[words[token] for token in tokens]])
        return [x[0] for x in eager(input_ids=ids, output_attentions=True).attentions]


def outside(weights):
    """The weights outside row 0, column 0 and the diagonal, the others 0."""
    T = len(weights)
    keep = ~torch.eye(T, dtype=torch.bool)
    keep[0], keep[:, 0] = False, False
    return weights * keep


def test_patterns_are_the_largest_weights_of_each_row(exported):
    _, _, eager, out = exported
    dense, seen = {}, 0
    for layer, head in read(out / "config.json")["heads"]:
        sequences = read_head(out, layer, head)["sequences"]
        strengths = {}
        for sequence in sequences:
            T, number = sequence["seq_len"], sequence["sequence_id"]
            if number not in dense:
                dense[number] = weights_of(eager, sequence["tokens"])
            weights = dense[number][layer][head]
            expected = {}
            for query, row in enumerate(weights):
                for key in row.argsort(descending=True)[:8].tolist():
                    if row[key] >= 0.005:
                        expected[query * T + key] = float(row[key])
            assert sequence["attention_indices"] == sorted(expected)
            for index, weight in zip(
                sequence["attention_indices"], sequence["attention_values"], strict=True
            ):
                assert weight == round(weight, 4) == pytest.approx(expected[index], abs=5.5e-5)
            strengths[number] = float(outside(weights).max())
            assert sequence["max_activation"] == pytest.approx(strengths[number], abs=5e-6)
            seen += any(row.count_nonzero() > 8 for row in weights)
        cut = [
            [strengths[x["sequence_id"]] for x in sequences if x["interval"] == interval]
            for interval in range(1, 11)
        ]
        assert [len(part) for part in cut] == [3] * 10
        assert all(max(low) <= min(high) + 1e-5 for low, high in pairwise(cut))
    assert seen > 100  # rows had more than eight weights


def test_contexts_are_a_sample_without_repeats(exported):
    """The same for all heads, from short and long texts, first and later contexts."""
    survey, _, _, out = exported
    names = read(out / "umap" / "sequences.json")
    tokens = [{x["sequence_id"]: x["tokens"] for x in read_head(out, *of)["sequences"]}
              for of in read(out / "config.json")["heads"]]  # fmt: skip
    assert all(of_head == tokens[0] for of_head in tokens) and len(tokens[0]) == 30
    assert all(names[str(number)] == own for number, own in tokens[0].items())
    places = survey.query("select text, unnest(range(contexts)) from texts").rows
    assert len(places) > 40
    every = [survey.context(*place) for place in places]
    assert all(own in every for own in tokens[0].values())
    lengths = [len(own) for own in tokens[0].values()]
    assert min(lengths) < CONTEXT // 2 and lengths.count(CONTEXT) > 5


def test_clouds_are_the_vectors_of_the_strongest_links(exported, monkeypatch):
    survey, model, _, out = exported
    cloud, sequences = read(out / "umap" / "L1H4.json"), read_head(out, 1, 4)["sequences"]
    links = sorted(
        (-weight, x["sequence_id"], index // x["seq_len"], index % x["seq_len"])
        for x in sequences
        for index, weight in zip(x["attention_indices"], x["attention_values"], strict=True)
        if 0 < index % x["seq_len"] != index // x["seq_len"]
    )
    columns = cloud["seq_idx"], cloud["top_q"], cloud["top_k"]
    assert len(links) > 1000 and sorted(zip(*columns, strict=True)) == sorted(x[1:] for x in links)
    # The same vectors as at the survey's examples, which are other ones.
    vectors = survey.vectors(model, 1, 4, tokenizer=tokenizer(True))
    tokens = {x["sequence_id"]: tuple(x["tokens"]) for x in sequences}
    norms = {
        (tokens[number], query): norm
        for number, query, norm in zip(*columns[:2], cloud["norms"], strict=True)
    }
    lengths = vectors.parts["q"].double().norm(dim=-1).tolist()
    both = 0
    for row, length in zip(vectors.examples.to_pylist(), lengths, strict=True):
        place = tuple(survey.context(row["text"], row["context"])), row["query"]
        if place in norms:
            assert norms[place] == pytest.approx(length)
            both += 1
    assert both > 20
    # With fewer, they are the largest; the coordinates are projections on components.
    monkeypatch.setattr(headvis, "CLOUD", 50)
    contexts = [(x, 0) for x in range(len(sequences))]
    few = headvis._strongest_pairs(sequences, contexts)
    chosen = [row["weights"][0] for rows in few.values() for row in rows]
    assert sorted(chosen, reverse=True) == [-x[0] for x in links[:50]]
    for part in "QKOV":
        points = torch.tensor([cloud["pca"][part][f"d{i}"] for i in range(3)]).double()
        assert points.mean(1).abs().max() < 1e-4
        products = points @ points.T
        assert (products - products.diag().diag()).abs().max() < 1e-3 * products.max()


def test_a_component_that_does_not_exist_is_0():
    from clearhead.corpus.tables import Table
    from clearhead.corpus.vectors import COLUMNS, HeadVectors

    row = (0, 2, 4, 3, 0.5, "a", "b", "other", "previous")
    line = torch.arange(3.0)[:, None] * torch.tensor([[3.0, 4.0]])
    parts = dict.fromkeys("qkvo", line)
    vectors = HeadVectors(0, 0, 0, Table(COLUMNS, (row,) * 3), parts, None)
    numbers = {(5, 5): 0, (0, 2): 1}
    cloud = headvis._cloud(vectors, numbers)
    assert cloud["seq_idx"] == [1, 1, 1]
    assert cloud["pca"]["V"]["d0"] == pytest.approx([-5.0, 0.0, 5.0])
    assert cloud["pca"]["V"]["d1"] == cloud["pca"]["V"]["d2"] == [0.0, 0.0, 0.0]
    empty = HeadVectors(0, 0, 0, Table(COLUMNS, ()), {}, None)
    assert headvis._cloud(empty, numbers)["pca"]["Q"] == {"d0": [], "d1": [], "d2": []}


def test_planted_heads_are_strong_where_they_look_outside(tmp_path):
    tok = tokenizer()
    names = ("previous", "self", "first", "even")
    model = Planted({tok.convert_tokens_to_ids(mark) for mark in ".,;!"}, names)
    survey = ch.survey(model, texts(), out=tmp_path / "out", tokenizer=tok, context=CONTEXT)
    out = survey.export_headvis(
        tmp_path / "headvis", model, dataset="x", contexts=10, tokenizer=tok
    )
    strong, weak = math.exp(9) / (math.exp(9) + 2), 1 / (math.exp(9) + 2)  # at query 2
    strengths = {"previous": strong, "self": weak, "first": weak, "even": 1 / 3}
    for head, name in enumerate(names):
        for sequence in read_head(out, 0, head)["sequences"]:
            T = sequence["seq_len"]
            pairs = zip(sequence["attention_indices"], sequence["attention_values"], strict=True)
            weights = {divmod(index, T): weight for index, weight in pairs}
            if name == "even":
                assert len(weights) == sum(min(q + 1, 8) for q in range(T))
            else:
                key = {
                    "previous": lambda q: max(q - 1, 0),
                    "self": lambda q: q,
                    "first": lambda q: 0,
                }
                large = {at for at, weight in weights.items() if weight > 0.9}
                assert large == {(q, key[name](q)) for q in range(T)}
            expected = strengths[name] if T > 2 else 0.0
            assert sequence["max_activation"] == pytest.approx(expected, rel=1e-5)


def test_the_tab_qk_has_why_a_named_head_looks(tmp_path):
    """The largest link of its patterns; pairs sum as `why` sums them."""
    model = demo.load()
    survey = ch.survey(model, STORIES, out=tmp_path / "out", context=12)
    named = [(0, 3), (1, 5)]
    out = survey.export_headvis(tmp_path / "headvis", model, dataset="stories", heads=named)
    manifest = read(out / "attributions" / "manifest.json")
    assert len(manifest) == 2
    words = {word: number for number, word in enumerate(model.words)}
    for (name, entry), of in zip(manifest.items(), named, strict=True):
        layer, head, number = map(int, re.fullmatch(r"L(\d)H(\d)S(\d+)", name).groups())
        ((query, key),) = entry["qk"]
        assert entry["ov"] == [] and (layer, head) == of
        sequences = read_head(out, layer, head)["sequences"]
        (own,) = (x for x in sequences if x["sequence_id"] == number)
        assert own["max_activation"] == max(x["max_activation"] for x in sequences)
        assert query and 0 < key != query
        at = own["attention_indices"].index(query * own["seq_len"] + key)
        assert own["attention_values"][at] == pytest.approx(own["max_activation"], abs=5.1e-5)
        pairs = read(out / f"attributions/qk/{name}Q{query}K{key}.json")["pairs"]
        sizes = [abs(pair["attribution"]) for pair in pairs]
        assert sizes == sorted(sizes, reverse=True)
        ids = torch.tensor([words[token] for token in own["tokens"]])
        reasons = ch.why(model.model, ids, layer=layer, head=head, query=query, key=key)
        if layer == 0:  # few parts, so all pairs
            total = sum(pair["attribution"] for pair in pairs)
            assert total == pytest.approx(reasons.contrast, rel=1e-4)
        assert len(pairs) == min(40, len(reasons.components) ** 2)
        known = {str(x): i for i, x in enumerate(reasons.components)}
        expected = reasons.pairs()
        for pair in pairs:
            q, k = known[pair["query_feature"]], known[pair["key_feature"]]
            assert pair["attribution"] == pytest.approx(float(expected[q, k]), abs=1e-4)
            assert pair["key_description"] == f"{pair['key_feature']} at {own['tokens'][key]!r}"
            assert pair["query_snippets"] == pair["key_snippets"] == []


def test_the_contract_of_the_viewer(exported):
    """What `data_pipeline.py` describes, and what `Index.svelte` and `UmapView.svelte` read."""
    survey, _, _, out = exported
    config = read(out / "config.json")
    assert (config["n_layers"], config["n_heads"], config["n_intervals"]) == (2, 6, 10)
    assert config["heads"] == [[layer, head] for layer in range(2) for head in range(6)]
    rows = read(out / "scatter_data.json")
    assert [[row["layer"], row["head"]] for row in rows] == config["heads"]
    axes = [name for name, value in rows[0].items() if isinstance(value, (int, float))]
    assert (
        set(axes) - {"layer", "head"}
        == set(config["metrics"])
        == set(config["metric_descriptions"])
    )
    assert set(config["metrics"]).isdisjoint({"self", "previous", "entropy", "induction"})
    assert config["head_data_pattern"] == "L{layer}H{head}.json"
    assert config["has_umap"] is True and config["umap_heads"] == [[1, 4]]
    assert {x.name for x in (out / "umap").iterdir()} == {"L1H4.json", "sequences.json"}
    assert {x.name for x in out.iterdir()} == {
        "config.json", "scatter_data.json", "server_config.json", "heads", "umap", "attributions"
    }  # fmt: skip
    cloud = read(out / "umap" / "L1H4.json")
    assert set(cloud) == {
        "seq_idx",
        "top_q",
        "top_k",
        "norms",
        "pca",
        "clusters",
    }  # without "views"
    columns = [cloud["seq_idx"], cloud["top_q"], cloud["top_k"], cloud["norms"]]
    columns += [cloud["pca"][part][f"d{i}"] for part in "QKOV" for i in range(3)]
    assert {len(column) for column in columns} == {len(cloud["norms"])}
    heads = {(row["layer"], row["head"], row["metric"]): row for row in survey.heads.to_pylist()}
    for row in rows:
        layer, head = row["layer"], row["head"]
        data, largest = read_head(out, layer, head), heads[layer, head, "largest"]
        for sequence in data["sequences"]:
            types = {name: type(value) for name, value in sequence.items()}
            assert types == {
                "sequence_id": int, "interval": int, "tokens": list, "attention_indices": list,
                "attention_values": list, "seq_len": int, "max_activation": float,
            }  # fmt: skip
            assert len(sequence["tokens"]) == sequence["seq_len"]
        for plot in config["custom_plots"]:
            bins = data[plot["key"]]
            assert len(bins["bin_edges"]) == len(bins["bin_values"]) + 1
            assert bins["bin_edges"] == sorted(bins["bin_edges"])
        for table in config["custom_tables"]:
            counts = [x["weight"] for x in data[table["key"]]]
            assert counts == sorted(counts, reverse=True) and 0 < len(counts) <= 50
        assert set(data["statistics"]) == set(config["statistics_display"])
        assert data["statistics"]["mean"] == largest["mean"] == row["largest"]
        assert sum(data["histogram"]["bin_values"]) == largest["queries"]
        middles = [(a + b) / 2 for a, b in pairwise(data["histogram"]["bin_edges"])]
        mean = sum(x * n for x, n in zip(middles, data["histogram"]["bin_values"], strict=True))
        assert mean / largest["queries"] == pytest.approx(largest["mean"], abs=0.005)


CONFIG_KEYS = "model_name", "dataset_name", "n_sequences", "seq_len", "dtype", "attn_implementation"
METRICS = {
    "self_attention_score": "self", "prev_token_score": "previous", "pattern_entropy": "entropy",
    "induction_score": "induction", "qk_distance": "distance",
}  # fmt: skip


def test_the_contract_of_the_loaders(exported, tmp_path):
    """What `load-head-metrics.py` and `load-head-sequences.py` read, and refuse."""
    survey, _, _, out = exported
    config = read(out / "config.json")
    assert isinstance(config, dict) and all(config.get(key) is not None for key in CONFIG_KEYS)
    assert config["dataset_name"] == "words" and config["dtype"] == "float32"
    assert config["seq_len"] == CONTEXT and config["attn_implementation"] == "clearhead"
    ((text_count, contexts),) = survey.query("select count(*), sum(contexts) from texts").rows
    assert (config["n_texts"], config["n_sequences"]) == (text_count, contexts)
    assert config["n_tokens"] == sum(len(text.split()) for text in texts())
    assert config["model_name"] in ("LlamaModel", "BertModel") and "pipeline_config" not in config
    means = {
        (row["layer"], row["head"], row["metric"]): row["mean"] for row in survey.heads.to_pylist()
    }
    rows = read(out / "scatter_data.json")
    assert isinstance(rows, list)
    for row in rows:
        for theirs, ours in METRICS.items():
            assert (
                math.isfinite(row[theirs]) and row[theirs] == means[row["layer"], row["head"], ours]
            )
    files = sorted((out / "heads").iterdir())
    assert len(files) == len(rows)
    for file in files:
        assert re.match(r"^L(\d+)H(\d+)\.json$", file.name)
        data = read(file)
        for name in ("qk_distance_histogram", "histogram", "statistics"):
            assert isinstance(data[name], dict)
        for side in ("query", "key"):
            assert all(set(x) == {"token", "weight"} for x in data[f"top_{side}_tokens"])
        for sequence in data["sequences"]:
            assert all(type(token) is str for token in sequence["tokens"])
            assert all(type(index) is int for index in sequence["attention_indices"])
            assert max(sequence["attention_indices"]) < 2**31  # a column of int32
            assert all(type(weight) is float for weight in sequence["attention_values"])
            assert 1 <= sequence["interval"] <= 10


def test_distances_are_those_of_dense_weights_over_all_texts(exported):
    survey, _, eager, out = exported
    sums, queries = torch.zeros(3, 2, 6).double(), 0
    for text, contexts in survey.query("select text, contexts from texts").rows:
        for context in range(contexts):
            weights = torch.stack(weights_of(eager, survey.context(text, context)))
            T = weights.shape[-1]
            distance = (torch.arange(T)[:, None] - torch.arange(T)).abs()
            chooses = (weights > 0).sum(-1)[0, 0] > 1
            for power in (1, 2):
                by_query = (weights * distance**power).sum(-1)
                sums[power] += by_query[..., chooses].sum(-1)
            queries += int(chooses.sum())
    mean, square = sums[1:] / queries
    for row in read(out / "scatter_data.json"):
        at = row["layer"], row["head"]
        assert row["qk_distance"] == pytest.approx(float(mean[at]), rel=1e-5)
        variance = float(square[at] - mean[at] ** 2)
        assert row["qk_distance_variance"] == pytest.approx(variance, rel=1e-4)
    described = read(out / "config.json")["metric_descriptions"]
    assert described["qk_distance"] == "Σ w |q - k|"
    assert "without the square" in described["qk_distance_variance"]


def test_axes_are_those_of_all_heads(tmp_path):
    """The viewer takes them from the first row; a layer with a window lacks far distances."""
    import transformers

    torch.manual_seed(3)
    config = transformers.Gemma2Config(num_key_value_heads=2, head_dim=8, sliding_window=4, **SIZES)
    config._attn_implementation = "clearhead"
    model, tok = transformers.Gemma2Model(config).eval(), tokenizer(True)
    assert config.layer_types[0] == "sliding_attention"
    survey = ch.survey(model, texts(9), out=tmp_path / "out", tokenizer=tok, context=CONTEXT)
    out = survey.export_headvis(tmp_path / "headvis", model, dataset="words", tokenizer=tok)
    rows = read(out / "scatter_data.json")
    assert "distance_8_15" not in next(row for row in rows if row["layer"] == 0)
    assert set(rows[0]) == {name for row in rows for name in row} >= {"distance_8_15"}
    assert {(row["layer"], row["head"]) for row in rows} == {
        (i, j) for i in (0, 1) for j in range(6)
    }
    edges = read_head(out, 0, 0)["qk_distance_histogram"]["bin_edges"]
    assert edges == [0, 1, 2, 4]
    edges = read_head(out, 1, 0)["qk_distance_histogram"]["bin_edges"]
    assert edges == [0, 1, 2, 4, 8, 16, 19]


def test_what_is_refused(exported, tmp_path):
    survey, model, _, _ = exported
    options = {"dataset": "words", "tokenizer": tokenizer(True)}
    with pytest.raises(ch.BadValue, match="Layer 2, head 0"):
        survey.export_headvis(tmp_path, model, heads=[(2, 0)], **options)
    with pytest.raises(ch.BadType, match=r"heads has 0(?s:.*)pairs \(layer, head\)"):
        survey.export_headvis(tmp_path, model, heads=(0, 1), **options)
    with pytest.raises(ch.BadValue, match="contexts=0"):
        survey.export_headvis(tmp_path, model, contexts=0, **options)
    with pytest.raises(ch.BadType, match="dataset got None"):
        survey.export_headvis(tmp_path, model, **(options | {"dataset": None}))
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with pytest.raises(ch.AttentionError, match="attention"):
        survey.export_headvis(tmp_path / "eager", eager, **options)
    assert not any((tmp_path / "eager" / "heads").iterdir())
    other = demo.load()
    with pytest.raises(ch.BadValue, match="with these weights"):
        survey.export_headvis(tmp_path, other, dataset="words")
    few = ch.survey(other, STORIES, out=tmp_path / "few", metrics=[First(), Largest()])
    with pytest.raises(ch.BadValue, match="'self'"):
        few.export_headvis(tmp_path, other, dataset="stories")
    assert {x.name for x in tmp_path.iterdir()} == {"few", "eager"}

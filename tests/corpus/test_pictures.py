"""A survey of pictures: its numbers from eager weights in float64, and pictures that change."""

import math
import shutil

import pytest
import torch
import transformers
from PIL import Image

import clearhead as ch
from clearhead import demo
from clearhead.core.errors import AttentionError, BadType, BadValue
from clearhead.corpus import Needles, RandomRepeats, Survey, state
from clearhead.hf import ImageCheckpoint
from tests.corpus.vision import TOWERS, draw, model_of, planted, save

pytest.importorskip("duckdb", reason="a survey needs DuckDB")
pytestmark = pytest.mark.outside


def saved(kind, folder):
    name, settings, size, *_ = TOWERS[kind]
    return save(model_of(name, **settings), folder, size)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("pictures"), 5)


def files_of(folder):
    """The pictures of `draw` in the order of a survey: those in folders by their path."""
    return sorted(folder.rglob("*.png"), key=lambda x: x.relative_to(folder).parts)


def eager_weights(folder, files):
    """The weights of all layers on each picture, from transformers in float64, (n, L, H, T, T)."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager")
    model = model.double().eval()
    rows = []
    for file in files:
        pixels = processor(Image.open(file).convert("RGB"), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            rows.append(model(pixels.double(), output_attentions=True).attentions)
    return torch.stack([torch.cat(x) for x in rows])


def expected_means(weights, before, rows, columns):
    """The mean of each metric over its queries, from explicit pairs of patches, (L, H) by name."""
    first = len(before)
    places = [(r, c) for r in range(rows) for c in range(columns)]
    groups = {
        "self": lambda a, b: a == b,
        "neighbours": lambda a, b: abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1,
        "within_1": lambda a, b: max(abs(a[0] - b[0]), abs(a[1] - b[1])) <= 1,
        "within_2": lambda a, b: max(abs(a[0] - b[0]), abs(a[1] - b[1])) <= 2,
        "row": lambda a, b: a[0] == b[0],
        "column": lambda a, b: a[1] == b[1],
    }
    values = {name: [] for name in groups}
    values |= {f"on_{x.strip('[]').lower()}": [] for x in before} | {"distance": []}
    T = first + len(places)
    for i, query in enumerate(places):
        own = weights[..., first + i, :]
        for name, is_member in groups.items():
            keys = [first + k for k, key in enumerate(places) if is_member(query, key)]
            if 0 < len(keys) < T:
                values[name].append(own[..., keys].sum(-1))
        for token in set(before):
            keys = [k for k, x in enumerate(before) if x == token]
            values[f"on_{token.strip('[]').lower()}"].append(own[..., keys].sum(-1))
        away = torch.tensor([math.dist(query, key) for key in places], dtype=torch.float64)
        values["distance"].append((own[..., first:] * away).sum(-1) / own[..., first:].sum(-1))
    return {name: torch.stack(x).mean(0) for name, x in values.items() if x}


@pytest.mark.parametrize("kind", TOWERS)
def test_means_are_those_of_eager_weights(kind, pictures, tmp_path):
    folder, (*_, before, rows, columns) = saved(kind, tmp_path / "model"), TOWERS[kind]
    survey = ch.survey(folder, pictures, out=tmp_path / "out")
    weights = eager_weights(folder, files_of(pictures))
    T = weights.shape[-1]
    expected = expected_means(weights, before, rows, columns)
    uniform = expected_means(torch.full_like(weights[:1], 1 / T), before, rows, columns)
    entropy = -(weights * weights.log()).sum(-1)
    means = {name: x.mean(0) for name, x in expected.items()}
    means |= {"entropy": entropy.mean((0, -1)), "largest": weights.amax(-1).mean((0, -1))}
    means |= {"evenness": means["entropy"] / math.log(T), "support": entropy.exp().mean((0, -1))}
    table = {(x["layer"], x["head"], x["metric"]): x for x in survey.heads.to_pylist()}
    assert {name for *_, name in table} == {*means}
    for (layer, head, name), row in table.items():
        scale = T if name == "support" else 1.0
        assert abs(row["mean"] - means[name][layer, head]) < 1e-4 * scale, (layer, head, name)
        if name in uniform:
            assert abs(row["uniform"] - uniform[name][0, layer, head]) < 1e-5, name
    names = [f"patch {r},{c}" for r in range(rows) for c in range(columns)]
    assert survey.context(3, 0) == [*before, *names]
    assert survey.grid == (before, rows, columns)


def test_planted_heads_have_the_weights_of_their_construction(tmp_path, pictures):
    survey = ch.survey(save(planted(), tmp_path / "model", (24, 40)), pictures, out=tmp_path / "o")
    rows = {(x["head"], x["metric"]): x for x in survey.heads.to_pylist()}
    right = {"neighbours": 0.8, "self": 0.2, "row": 1.0, "column": 0.2, "within_1": 1.0,
             "within_2": 1.0, "on_cls": 0.0, "distance": 0.8, "support": 1.0}  # fmt: skip
    for name, mean in right.items():
        assert abs(rows[0, name]["mean"] - mean) < 1e-5, name
    assert abs(rows[1, "on_cls"]["mean"] - 1.0) < 1e-5
    assert rows[1, "within_2"]["mean"] < 1e-5
    # Equal weights: 22 pairs of patches side by side, both ways, over 15 patches and 16 keys.
    assert abs(rows[0, "neighbours"]["uniform"] - 2 * 22 / 15 / 16) < 1e-7
    # In the histogram, twelve of fifteen patches of each picture are in the last bin.
    bins = survey.histogram(0, 0, "neighbours").to_pylist()
    assert [(x["bin"], x["count"]) for x in bins] == [(0, 3 * 5), (99, 12 * 5)]
    for row in survey.examples(0, 0, metric="neighbours", n=5).to_pylist():
        r, c = divmod(row["query"] - 1, 5)
        assert row["token"] == f"patch {r},{c}" and c < 4 and row["token_class"] == "other"
        assert row["keys"][0] == row["query"] + 1 and row["weights"][0] > 1 - 1e-5
    # Kinds of keys of texts, such as a token before, are not those of patches.
    assert not survey.query("select * from mixes")
    assert {x["p"] for x in survey.query("select * from roles").to_pylist()} == {None}
    with pytest.raises(BadValue, match="previous"):
        survey.roles(0, 0)


def test_pixels_and_rows_of_examples_are_those_of_the_picture(tmp_path, pictures):
    folder, files = saved("vit", tmp_path / "model"), files_of(pictures)
    survey = ch.survey(folder, pictures, out=tmp_path / "out")
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    names = dict(survey.query("select text, name from texts").rows)
    weights = eager_weights(folder, files)
    for text, file in enumerate(files):
        assert names[text] == f"{pictures.name}/{file.relative_to(pictures)}"
        expected = processor(Image.open(file), return_tensors="pt")["pixel_values"][0]
        assert torch.equal(survey.pixels(text), expected)
    examples = survey.examples(1, 2, metric="distance")
    exact = survey.example_rows(ImageCheckpoint(folder), examples)
    for row, own in zip(examples.to_pylist(), exact, strict=True):
        expected = weights[row["text"], 1, 2, row["query"]]
        torch.testing.assert_close(own.double(), expected, rtol=1e-4, atol=1e-5)
    vectors = survey.vectors(folder, 1, 2, n=8)
    assert {row["looks_at"] for row in vectors.examples.to_pylist()} == {None}
    assert vectors.parts["q"].shape[1] == 8


def states(out):
    return {x.name: x.stat().st_mtime_ns for x in (out / state.FOLDER).iterdir()}


def test_pictures_are_added_and_a_changed_one_is_noticed(tmp_path, pictures):
    folder, own = saved("vit", tmp_path / "model"), tmp_path / "pictures"
    shutil.copytree(pictures, own)
    out, options = tmp_path / "out", {"shard_tokens": 32}
    first = ch.survey(folder, own, out=out, **options)
    before = states(out)
    assert len(before) == 3  # of two pictures, two, and one
    again = ch.survey(folder, own, out=out, **options)
    assert states(out) == before and again.digest() == first.digest()
    shutil.copy(own / "00.png", own / "z.png")  # last in the order of names
    added = ch.survey(folder, own, out=out, **options)
    assert len(states(out)) == 4  # the last one was not complete
    alone = ch.survey(folder, own, out=tmp_path / "alone", **options)
    assert added.digest() == alone.digest()
    for name in ("z.png", "00.png"):  # in the last shard, and in the first
        image = Image.open(own / name)
        changed = image.copy()
        changed.paste((0, 0, 0), (0, 0, 9, 9))
        changed.save(own / name)
        with pytest.raises(BadValue, match="has other texts"):
            ch.survey(folder, own, out=out, **options)
        image.save(own / name)
    assert ch.survey(folder, own, out=out, **options).digest() == alone.digest()


def test_another_processor_is_another_survey(tmp_path, pictures):
    folder = saved("vit", tmp_path / "model")
    ch.survey(folder, pictures, out=tmp_path / "out")
    file = folder / "preprocessor_config.json"
    file.write_text(file.read_text().replace("0.4", "0.3"))
    with pytest.raises(BadValue, match="tokenizer digest"):
        ch.survey(folder, pictures, out=tmp_path / "out")


def test_two_workers_write_the_tables_of_one(tmp_path, pictures):
    folder, options = saved("deit", tmp_path / "model"), {"shard_tokens": 11}
    alone = ch.survey(folder, pictures, out=tmp_path / "alone", **options)
    together = ch.survey(folder, pictures, out=tmp_path / "two", workers=2, **options)
    assert alone.digest() == together.digest()
    one, two = (sorted((tmp_path / x / "tables").iterdir()) for x in ("alone", "two"))
    assert [x.read_bytes() for x in one] == [x.read_bytes() for x in two]


@pytest.mark.parametrize("content", [b"", b"not a picture", None], ids=["empty", "text", "cut"])
def test_a_damaged_picture_is_named_before_the_model_runs(tmp_path, pictures, content):
    folder, own = saved("vit", tmp_path / "model"), tmp_path / "pictures"
    shutil.copytree(pictures, own)
    whole = (own / "04.png").read_bytes()
    (own / "zz.png").write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(BadValue, match=r"zz\.png.*cannot be read"):
        ch.survey(folder, own, out=tmp_path / "out", shard_tokens=16)
    assert not states(tmp_path / "out")


def test_paths_are_read_in_their_order_and_other_files_are_named(tmp_path, pictures):
    folder, (a, b, *_) = saved("vit", tmp_path / "model"), files_of(pictures)
    (tmp_path / "notes.md").write_text("not a picture")
    survey = ch.survey(folder, [str(b), tmp_path / "notes.md", a], out=tmp_path / "out")
    assert [row[1] for row in survey.query("select text, name from texts").rows] == [b.name, a.name]
    [(name, why)] = survey.manifest.corpus["skipped texts"]
    assert name == "notes.md" and ".png" in why
    assert "2 pictures, 3 x 5 patches. Left out: 1 picture." in repr(survey)
    with pytest.raises(BadValue, match=r"notes\.md: it ends in none of"):
        ch.survey(folder, tmp_path / "notes.md", out=tmp_path / "none")
    with pytest.raises(BadValue, match="does not exist"):
        ch.survey(folder, "missing.png", out=tmp_path / "none")
    with pytest.raises(BadType, match="among its texts"):
        ch.survey(folder, [torch.zeros(3, 8, 8)], out=tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"metrics": "basic"}, "no previous token"),
        ({"metrics": "grid,long"}, "no previous token"),
        ({"tokens": 16}, "every patch"),
        ({"texts": RandomRepeats(3, 20)}, "every patch"),
        ({"texts": Needles("a text")}, "every patch"),
        ({"context": 8}, "16 tokens"),
    ],
    ids=str,
)
def test_what_patches_do_not_have_is_refused(tmp_path, pictures, options, why):
    texts = options.pop("texts", pictures)
    with pytest.raises(AttentionError, match=why):
        ch.survey(saved("vit", tmp_path / "model"), texts, out=tmp_path / "out", **options)


def test_the_grid_of_a_model_of_texts_is_refused(tmp_path):
    with pytest.raises(BadValue, match="'grid' is of patches"):
        ch.survey(demo.load(), "Tom saw a dog.", out=tmp_path / "out", metrics="grid")


def test_pictures_of_several_grids_are_refused(tmp_path):
    folder = save(model_of("Dinov2", image_size=28, patch_size=7), tmp_path / "model", None)
    pictures = draw(tmp_path / "pictures", 1)
    with pytest.raises(BadValue, match=r"(?s)30 x 50 pixels of .*00\.png.* a square has 256 x 256"):
        ch.survey(folder, pictures, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ViTMAE", {"mask_ratio": 0.0}),  # shuffles the patches
        ("ViTMAE", {"mask_ratio": 0.5}),  # and leaves out some
        (
            "Swin",
            {
                "embed_dim": 16,
                "depths": [1],
                "num_attention_heads": [2],
                "num_hidden_layers": 1,
                "window_size": 3,
            },
        ),
    ],
    ids=str,
)
def test_models_without_a_grid_are_refused(tmp_path, pictures, name, settings):
    model = model_of(name, image_size=48, patch_size=8, **settings)
    folder = save(model, tmp_path / "model", (48, 48))
    with pytest.raises(BadValue, match="are not the patches of a picture, row by row"):
        ch.survey(folder, pictures, out=tmp_path / "out")


def test_the_survey_is_complete_without_the_files(tmp_path):
    own = draw(tmp_path / "pictures", 2)
    folder = saved("vit", tmp_path / "model")
    ch.survey(folder, own, out=tmp_path / "out")
    shutil.rmtree(own)
    survey = Survey.open(tmp_path / "out")
    examples = survey.examples(0, 1, metric="largest", n=2)
    assert len(survey.example_rows(folder, examples)) == 2

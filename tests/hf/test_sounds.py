"""A tiny Whisper that reads sounds: its words in time, its report, its errors."""

import wave
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.core.errors import BadType, BadValue
from clearhead.models.report import word_times
from clearhead.models.report.word_times import _best_path
from tests.hf.tokenizer_families import CORPUS, wrapped

transformers = pytest.importorskip("transformers")
ADDED = ["<|endoftext|>", "<|startoftranscript|>", "<|de|>", "<|en|>", "<|transcribe|>",
         "<|notimestamps|>"]  # fmt: skip
SECONDS, RATE, LAYERS, HEADS = 2, 16_000, 2, 6


def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, show_progress=False, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(ADDED)
    return wrapped(backend, eos_token=ADDED[0], unk_token=ADDED[0])


def write_sound(path, seconds=1.3, channels=1, width=2, rate=RATE):
    noise = np.random.default_rng(0).integers(-9000, 9000, int(seconds * rate) * channels)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(noise.astype({1: "u1", 2: "<i2"}[width]).tobytes())
    return path


@pytest.fixture(scope="module", params=["English", "multilingual"])
def folder(request, tmp_path_factory):
    words, path = tokenizer(), tmp_path_factory.mktemp("whisper")
    ids = {name: words.convert_tokens_to_ids(name) for name in ADDED}
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    config = transformers.WhisperConfig(
        vocab_size=len(words), d_model=48, encoder_layers=1, decoder_layers=LAYERS,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=37,
        decoder_ffn_dim=37, num_mel_bins=80, max_source_positions=50 * SECONDS,
        max_target_positions=14, pad_token_id=end, bos_token_id=end, eos_token_id=end,
        decoder_start_token_id=start,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.WhisperForConditionalGeneration(config)
    with torch.no_grad():  # larger, so that weights are not even and words differ
        for parameter in model.parameters():
            parameter.mul_(3)
    settings = vars(model.generation_config)
    settings |= {
        "suppress_tokens": [*range(40), *range(start, start + 5)], "begin_suppress_tokens": [end],
        "no_timestamps_token_id": ids["<|notimestamps|>"], "_from_model_config": False,
    }  # fmt: skip
    if request.param == "multilingual":
        settings |= {
            "is_multilingual": True, "task_to_id": {"transcribe": ids["<|transcribe|>"]},
            "lang_to_id": {name: ids[name] for name in ("<|de|>", "<|en|>")},
        }  # fmt: skip
    model.save_pretrained(path)
    words.save_pretrained(path)
    transformers.WhisperFeatureExtractor(chunk_length=SECONDS).save_pretrained(path)
    return path


@pytest.fixture
def sound(tmp_path):
    return write_sound(tmp_path / "x.wav")


def eager_weights(folder, inputs):
    """Return the cross-attention of the model with eager attention, (L, H, tokens, frames)."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return torch.cat(model(**inputs, output_attentions=True).cross_attentions)


def test_the_prompt_and_the_words_are_those_of_whisper(folder, sound):
    reader = ch.hf.open_checkpoint(folder)
    times, inputs = reader.tokens_and_inputs(sound)
    assert times[:3] == ["0.00 s", "0.02 s", "0.04 s"] and len(times) == 50 * SECONDS
    written = reader.decoder_tokens(inputs)
    start, chosen = "<|startoftranscript|>", {}
    if hasattr(reader.model.generation_config, "lang_to_id"):
        chosen = {"language": written[1], "task": "transcribe"}
    prompt = written.index("<|notimestamps|>") + 1
    assert written[: prompt - 1] in ([start], [start, "<|de|>", "<|transcribe|>"])
    assert len(chosen) == prompt - 2
    own = reader.model.generate(inputs["input_features"], **chosen)  # which returns no prompt
    words = inputs["decoder_input_ids"][0, prompt:].tolist()
    assert len(words) > 3 and words == own[0].tolist()[-len(words) :]


def test_words_in_time_are_those_of_eager_weights(folder, sound):
    """By the median filter and the warping of transformers, from the same eight heads."""
    from transformers.models.whisper import generation_whisper as own

    def path_of(gain):
        return [x.copy() for x in own._dynamic_time_warping(-gain.numpy())]

    reader = ch.hf.open_checkpoint(folder)
    found = word_times(reader, sound)
    inputs = reader.tokens_and_inputs(sound)[1]
    ids, eos = inputs["decoder_input_ids"][0].tolist(), reader.tokenizer.eos_token_id
    written = [at for at, i in enumerate(ids) if i < eos]
    rows = slice(written[0] - 1, written[-1] + 1)
    weights = eager_weights(folder, inputs)[..., rows, :65].double()  # 1.3 s are 65 frames
    deviation, mean = torch.std_mean(weights, -2, keepdim=True, correction=0)
    smooth = own._median_filter((weights - mean) / deviation, 7)
    texts, frames = path_of(smooth.mean((0, 1)))
    scores = smooth[..., texts, frames].mean(-1)
    for layer, head, score in found.heads:  # the encoder has one call, a decoder's layer two
        assert abs(score - float(scores[(layer - 2) // 2, head])) < 1e-4
    assert [x[2] for x in found.heads] == sorted((x[2] for x in found.heads), reverse=True)
    best = scores.flatten().topk(8).indices
    texts, frames = path_of(smooth.flatten(0, 1)[best].mean(0))
    begins = [frames[texts == row].min() * 0.02 for row in range(len(written) + 1)]
    assert found.words[0].begin == begins[0] == 0
    assert found.words[-1].end == pytest.approx(begins[len(written)])
    assert {x.begin for x in found.words} <= set(begins)
    assert (
        " ".join(x.text for x in found.words).split()
        == reader.tokenizer.decode([ids[at] for at in written]).split()
    )
    of_first = [r for r, at in enumerate(written) if reader.tokenizer.decode([ids[at]])[0] == " "]
    count = of_first[0] or of_first[1] if of_first else len(written)
    expected = weights.flatten(0, 1)[best].mean(0)[:count].mean(0)
    torch.testing.assert_close(found.weights[0].double(), expected, rtol=1e-4, atol=1e-6)
    assert "From the heads that align best: L" in str(found)


def test_the_best_path_is_the_one_of_all_paths():
    gain = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def sums(i, j):
        if (i, j) == (2, 3):
            return [float(gain[i, j])]
        steps = [(a, b) for a, b in ((i + 1, j), (i, j + 1), (i + 1, j + 1)) if a < 3 and b < 4]
        return [float(gain[i, j]) + rest for step in steps for rest in sums(*step)]

    path = _best_path(gain.numpy())
    assert path[0].tolist() == [0, 0] and path[-1].tolist() == [2, 3]
    assert float(gain[path[:, 0], path[:, 1]].sum()) == pytest.approx(max(sums(0, 0)))


def test_a_report_has_frames_and_words(folder, sound):
    reader = ch.hf.open_checkpoint(folder)
    report = ch.report(reader, sound)
    inputs = reader.tokens_and_inputs(sound)[1]
    assert report.tokens[5] == "0.10 s" and report.name == folder.name
    crossing = [layer for layer in report.layers if layer.cross_attention]
    weights = eager_weights(folder, inputs)
    for layer, expected in zip(crossing, weights, strict=True):
        assert layer.query_tokens == tuple(reader.decoder_tokens(inputs))
        assert layer.key_tokens == report.tokens
        torch.testing.assert_close(layer.received, expected.sum(-2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "has"),
    [
        ({"channels": 2}, "has 2 channels, 16 bits, 16000 Hz, 1.30 s"),
        ({"width": 1}, "has 1 channels, 8 bits"),
        ({"rate": 8000}, "8000 Hz, 1.30 s"),
        ({"seconds": 2.01}, "16000 Hz, 2.01 s"),
        ({"seconds": 0}, "16000 Hz, 0.00 s"),
    ],
)
def test_other_sounds_are_refused(folder, tmp_path, wrong, has):
    path = write_sound(tmp_path / "x.wav", **wrong)
    with pytest.raises(BadValue, match=has) as error:
        word_times(ch.hf.open_checkpoint(folder), path)
    assert "16000 Hz, at most 2 s" in error.value.rule and "ffmpeg" in error.value.hint


def test_damaged_sounds_and_other_models_are_refused(folder, sound):
    reader = ch.hf.open_checkpoint(folder)
    data = sound.read_bytes()
    sound.write_bytes(data[:-100])
    with pytest.raises(BadValue, match=r"1\.30 s"):
        word_times(reader, sound)
    sound.write_bytes(b"not a sound")
    with pytest.raises(BadValue, match="cannot be read"):
        word_times(reader, sound)
    with pytest.raises(BadValue, match="cannot be read"):
        word_times(reader, Path("none.wav"))
    with pytest.raises(BadType, match="got a list"):
        reader.tokens_and_inputs([1.0])
    with pytest.raises(BadType, match="word_times got a Linear"):
        word_times(torch.nn.Linear(2, 2), sound)


def test_the_command_looks_at_a_sound(folder, sound, tmp_path, monkeypatch, capsys):
    from clearhead_cli import main

    def look(*arguments):
        monkeypatch.setattr("sys.argv", ["clearhead", "look", *map(str, arguments)])
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit):
            main()
        return capsys.readouterr()

    expected = word_times(ch.hf.open_checkpoint(folder), sound)
    shown = look(sound, "--model", folder, "--out", tmp_path / "out").out
    assert " ".join(str(expected).split()) in " ".join(shown.split())
    layer, head, _ = expected.heads[0]
    assert f"Begin with L{layer}H{head} (cross-attention)" in " ".join(shown.split())
    assert "cannot read" in look(sound).err
    (tmp_path / "x.png").write_bytes(b"")
    assert "x.png', an image" in look("x.png", "--model", folder).err

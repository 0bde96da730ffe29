"""GGUF files as checkpoints: weights, token ids, names, and what is refused by name."""

import io
import os
import re
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
import torch

import clearhead as ch
from clearhead.core.errors import BadValue
from clearhead.hf import Checkpoint
from clearhead.hf.pre_tokenizers import ADDS_BOS, RULES
from clearhead.models.report.whatif import whatif
from tests.hf.tiny_gguf import (
    CORPUS,
    OTHER_TEXTS,
    PUBLISHED,
    TEXTS,
    ByteLevel,
    Library,
    SentencePiece,
    llama,
    write,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits


@pytest.mark.parametrize("vocabulary", [ByteLevel("smollm"), SentencePiece()])
def test_the_model_of_a_file_is_the_one_that_was_written(tmp_path, vocabulary, cache):
    model = llama(len(vocabulary))
    file = write(tmp_path / "tiny-F32.gguf", model, vocabulary)
    checkpoint = Checkpoint(file)
    assert checkpoint.name == "tiny-F32"
    ids = vocabulary.ids(TEXTS["prose"])[:60]
    torch.testing.assert_close(logits(checkpoint.predictor, ids), logits(model, ids))
    assert list(cache.iterdir()) == [checkpoint.folder]


def other_model(kind, words):
    """A model of another kind with random weights, and the settings that its file has."""
    import transformers

    small = {
        "vocab_size": words, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    torch.manual_seed(6)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=words, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
    elif kind == "qwen2":
        config = transformers.Qwen2Config(**small)
    elif kind == "gemma2":  # scores are scaled by the head size, which the file does not have
        config = transformers.Gemma2Config(**small, head_dim=8, query_pre_attn_scalar=8)
    else:
        config = transformers.Gemma3TextConfig(
            **small, head_dim=8, query_pre_attn_scalar=8, sliding_window=512
        )
    settings = []
    if "gemma" in kind:
        settings = [(f"{kind}.attention.{x}_length", 8) for x in ("key", "value")]
        settings.append((f"{kind}.attention.sliding_window", config.sliding_window))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    return model, settings


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "gemma2", "gemma3"])
def test_models_of_other_kinds_are_those_that_were_written(tmp_path, kind):
    vocabulary = SentencePiece(False) if "gemma" in kind else ByteLevel("qwen2")
    model, settings = other_model(kind, len(vocabulary))
    file = write(tmp_path / "a.gguf", model, vocabulary, kind=kind, settings=settings)
    ids = vocabulary.ids(TEXTS["prose"])[:40]
    read = logits(Checkpoint(file).predictor, ids)
    torch.testing.assert_close(read, logits(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pre", PUBLISHED)
def test_token_ids_are_llama_cpps(tmp_path, pre):
    """Of tekken and gpt-4o llama.cpp has no combining marks, which emoji have."""
    vocabulary = ByteLevel(pre)
    tokenizer = Checkpoint(write(tmp_path / "a.gguf", llama(len(vocabulary)), vocabulary)).tokenizer
    begin = [0] if pre in ADDS_BOS else []
    for kind, text in TEXTS.items():
        if kind == "emoji" and pre in ("tekken", "gpt-4o"):
            continue
        expected = begin + vocabulary.ids(text, keeps_known=pre in ADDS_BOS)
        assert tokenizer(text)["input_ids"] == expected


@pytest.mark.parametrize("spaced", [True, False])
def test_token_ids_of_sentencepiece_are_llama_cpps(tmp_path, spaced):
    vocabulary = SentencePiece(spaced)
    checkpoint = Checkpoint(write(tmp_path / "a.gguf", llama(len(vocabulary)), vocabulary))
    for text in (*TEXTS.values(), *OTHER_TEXTS.values()):
        ids = checkpoint.tokenizer(text)["input_ids"]
        assert ids == vocabulary.ids(text)
        assert checkpoint.tokenizer.decode(ids, skip_special_tokens=True) == text


def trained():
    """A BPE vocabulary with bytes, trained by the library sentencepiece."""
    library, written = pytest.importorskip("sentencepiece"), io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines()]),
        model_writer=written, vocab_size=420, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=9,
    )  # fmt: skip
    return library.SentencePieceProcessor(model_proto=written.getvalue())


def of_mistral():
    """The vocabulary of Mistral 7B, 32,000 pieces, whose file is in a package on PyPI."""
    library, package = pytest.importorskip("sentencepiece"), find_spec("mistral_common")
    if package is None:
        pytest.skip("pip install --no-deps mistral-common")
    file = Path(package.origin).parent / "data" / "tokenizer.model.v1"
    return library.SentencePieceProcessor(model_file=str(file))


@pytest.mark.parametrize("model", [trained, pytest.param(of_mistral, marks=pytest.mark.slow)])
def test_ids_and_tokens_are_those_of_the_library_sentencepiece(tmp_path, model):
    vocabulary = Library(model())
    checkpoint = Checkpoint(write(tmp_path / "a.gguf", llama(len(vocabulary)), vocabulary))
    for text in (*TEXTS.values(), *OTHER_TEXTS.values()):
        ids = vocabulary.ids(text)
        tokens, inputs = checkpoint.tokens_and_inputs(text)
        assert inputs["input_ids"].tolist() == [ids]
        # A character in several tokens is on the last of them; the others show their bytes.
        shown = re.sub("⟨[0-9A-F ]+⟩", "", "".join(tokens[1:]))
        assert shown.removeprefix(" ") == vocabulary.library.decode(ids) == text


def test_the_rule_of_smollm_splits_indentation_before_a_digit_as_gpt2s_does_not():
    """What transformers takes instead, without a word: the test of the ids above can fail."""
    assert ByteLevel("smollm").ids("if\n    12") != ByteLevel("gpt-2").ids("if\n    12")


@pytest.mark.parametrize("pre", ["smollm-9", None])
def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path, pre, cache):
    vocabulary = ByteLevel(pre)
    file = write(tmp_path / "a.gguf", llama(len(vocabulary)), vocabulary)
    wanted = "no pre-tokenizer" if pre is None else "pre-tokenizer 'smollm-9'"
    with pytest.raises(BadValue, match=wanted):
        Checkpoint(file)
    assert not list(cache.iterdir())


def test_quantised_weights_are_their_exact_float32(tmp_path):
    vocabulary = ByteLevel("smollm")
    model = llama(len(vocabulary))
    kind = gguf.GGMLQuantizationType.Q4_1
    file = write(tmp_path / "tiny.Q4_1.gguf", model, vocabulary, stored=kind)
    checkpoint = Checkpoint(file)
    assert checkpoint.name == "tiny (Q4_1, dequantised)"
    x = model.model.layers[1].mlp.gate_proj.weight.detach()
    expected = gguf.dequantize(gguf.quantize(x.numpy(), kind), kind)
    loaded = checkpoint.model.layers[1].mlp.gate_proj.weight.detach()
    assert torch.equal(loaded, torch.from_numpy(expected))
    assert loaded.dtype == torch.float32 and not torch.equal(loaded, x)
    nameless = file.rename(tmp_path / "model.gguf")
    assert Checkpoint(nameless).name == "Tiny Llama (Q4_1, dequantised)"
    assert checkpoint.explain("the man").about.startswith("tiny (Q4_1, dequantised), layer 0: ")
    changed = str(whatif(checkpoint, "the man", [ch.edits.ablate(layers=[0])]))
    assert changed.startswith("tiny (Q4_1, dequantised)\n")
    report = ch.report(nameless, "the man", progress=False)
    assert report.name == "Tiny Llama (Q4_1, dequantised)" and report.folder == str(nameless)


def test_the_second_start_converts_nothing_and_a_changed_file_is_another(
    tmp_path, cache, monkeypatch
):
    vocabulary = ByteLevel("smollm")
    model = llama(len(vocabulary))
    file = write(tmp_path / "a.gguf", model, vocabulary)
    first = Checkpoint(file).folder
    with monkeypatch.context() as patched:
        patched.setattr(gguf, "GGUFReader", None)
        assert Checkpoint(file.rename(tmp_path / "b.gguf")).folder == first
    stamp = (tmp_path / "b.gguf").stat()
    with torch.no_grad():
        model.model.embed_tokens.weight[3] += 1
    write(file, model, vocabulary)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert file.stat().st_size == stamp.st_size  # size and time do not tell them apart
    changed = Checkpoint(file)
    assert changed.folder != first and len(list(cache.iterdir())) == 2
    assert torch.equal(changed.model.embed_tokens.weight[3], model.model.embed_tokens.weight[3])


def llama3_factors(config):
    """The factors by which llama.cpp divides the frequencies of a Llama 3.1, in float64."""
    rope, size = config.rope_parameters, config.head_dim
    factors = []
    for i in range(0, size, 2):
        turns = 8192 / (2 * torch.pi * rope["rope_theta"] ** (i / size))
        smooth = min(max((turns - 1) / (4 - 1), 0), 1)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors)


def test_rotations_of_llama_3_are_scaled(tmp_path):
    """transformers ignores the tensor that holds them."""
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    vocabulary = ByteLevel("llama-bpe")
    model = llama(len(vocabulary), rope_parameters=rope, longest=16384)
    factors = llama3_factors(model.config)
    assert factors.max() > 1
    file = write(tmp_path / "a.gguf", model, vocabulary, extra=[("rope_freqs", factors)])
    ids = vocabulary.ids(TEXTS["prose"])[:50]
    read = Checkpoint(file).predictor
    torch.testing.assert_close(logits(read, ids), logits(model, ids))
    odd = write(tmp_path / "b.gguf", model, vocabulary, extra=[("rope_freqs", factors + 0.5)])
    with pytest.raises(BadValue, match="rope_freqs"):
        Checkpoint(odd)


@pytest.mark.parametrize(
    "setting",
    [
        ("llama.rope.scaling.type", "yarn"),
        ("llama.rope.scaling.factor", 8.0),
        ("llama.rope.scale_linear", 8.0),
        ("llama.rope.scaling.attn_factor", 0.5),
        ("llama.attention.sliding_window", 9),
        ("llama.attention.a_new_one", 0),
    ],
)
def test_a_setting_that_transformers_does_not_read_is_refused_by_name(tmp_path, setting):
    vocabulary = ByteLevel("smollm")
    file = write(tmp_path / "a.gguf", llama(len(vocabulary)), vocabulary, settings=[setting])
    by_name = f"{setting[0]}={setting[1]}"
    with pytest.raises(BadValue, match=by_name):
        Checkpoint(file)


def test_sizes_of_tensors_other_than_in_the_settings_are_refused(tmp_path):
    vocabulary, setting = ByteLevel("smollm"), ("llama.feed_forward_length", 65)
    file = write(tmp_path / "a.gguf", llama(len(vocabulary)), vocabulary, settings=[setting])
    with pytest.raises(BadValue, match=r"down_proj.weight is \(32, 64\), and \(32, 65\)"):
        Checkpoint(file)


def test_a_tensor_that_no_parameter_takes_is_refused(tmp_path):
    vocabulary = ByteLevel("smollm")
    extra = [("blk.0.attn_q_norm", torch.ones(7))]
    file = write(tmp_path / "a.gguf", llama(len(vocabulary)), vocabulary, extra=extra)
    with pytest.raises(BadValue, match=r"7 fewer \(blk\.0\.attn_q_norm"):
        Checkpoint(file)


def test_a_damaged_file_is_refused(tmp_path):
    vocabulary = ByteLevel("smollm")
    file = write(tmp_path / "a.gguf", llama(len(vocabulary)), vocabulary)
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(BadValue, match="is broken"):
        Checkpoint(file)


def test_every_rule_is_an_expression_of_the_library():
    from tokenizers import Regex

    for expressions in RULES.values():
        for expression in expressions:
            Regex(expression)

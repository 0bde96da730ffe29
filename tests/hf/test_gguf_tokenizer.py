"""Added tokens of GGUF files, and the tokens around a text."""

import pytest

from clearhead.core.errors import BadValue
from clearhead.hf import Checkpoint
from tests.hf.tiny_gguf import TEXTS, ByteLevel, SentencePiece, gguf_letters, llama, write


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))


ADDED = {"<｜User｜>": 3, "<my token>": 4, "<|im_start|>": 3, "<think>": 4, "你": 4}  # noqa: RUF001


@pytest.mark.parametrize("kind", [ByteLevel, SentencePiece])
def test_an_added_token_is_one_token(tmp_path, kind):
    """transformers cuts those with a space, or a letter that is not one for a byte, into bytes."""
    vocabulary = kind("qwen2", ADDED) if kind is ByteLevel else kind(False, ADDED)
    checkpoint = Checkpoint(write(tmp_path / "a.gguf", llama(len(vocabulary)), vocabulary))
    bos = int(kind is SentencePiece)
    for number, text in enumerate(ADDED):
        tokens, inputs = checkpoint.tokens_and_inputs(f"the {text}cat")
        before, after = vocabulary.ids("the "), vocabulary.ids("cat")[bos:]
        id = len(vocabulary) - len(ADDED) + number
        assert inputs["input_ids"][0].tolist() == [*before, id, *after]
        assert tokens[len(before)] == text
        assert "".join(tokens[bos:]) == f"the {text}cat"
    prose = TEXTS["prose"]
    assert checkpoint.tokenizer(prose)["input_ids"] == vocabulary.ids(prose)


def test_an_added_token_that_is_another_one_is_refused(tmp_path):
    """In letters for bytes both are spelled alike, and the library keeps one of them."""
    spelled = "".join(gguf_letters()[byte] for byte in "你".encode())
    vocabulary = ByteLevel("qwen2", {"你": 4, spelled: 1})
    file = write(tmp_path / "a.gguf", llama(len(vocabulary)), vocabulary)
    with pytest.raises(BadValue, match=r"the USER_DEFINED token [0-9]+='你'"):
        Checkpoint(file)


@pytest.mark.parametrize("adds", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("kind", [ByteLevel, SentencePiece])
def test_tokens_around_a_text_are_those_that_the_file_names(tmp_path, kind, adds):
    vocabulary = kind("qwen2") if kind is ByteLevel else kind()
    flags = [("add_bos_token", adds[0]), ("add_eos_token", adds[1])]
    settings = [(f"tokenizer.ggml.{name}", value) for name, value in flags]
    file = write(tmp_path / "a.gguf", llama(len(vocabulary)), vocabulary, settings=settings)
    tokenizer = Checkpoint(file).tokenizer
    first, last = (0, 0) if kind is ByteLevel else (1, 2)
    text = vocabulary.ids("the cat")[kind is SentencePiece :]
    assert tokenizer("the cat")["input_ids"] == [first] * adds[0] + text + [last] * adds[1]

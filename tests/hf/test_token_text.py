"""Tokens as text: each family's tokens show what was written, in one way."""

import pickle
import re

import pytest
import torch

from clearhead.core.errors import BadType, BadValue
from clearhead.core.formatting import Token, visible
from clearhead.hf.token_text import TokenTexts, texts_of
from tests.hf.tokenizer_families import FAMILIES, TEXTS
from tests.views.test_page import embedded

LOSSLESS = ("gpt2", "llama3", "qwen", "gemma", "llama2")
BYTES = re.compile(r"⟨((?:[0-9A-F]{2} )*[0-9A-F]{2})⟩")


def written(family, text):
    """The tokens of a text, without those that the tokenizer puts around it."""
    tokenizer = FAMILIES[family]()
    encoded = tokenizer(text, return_offsets_mapping=True)
    tokens = TokenTexts(tokenizer).tokens(text, encoded["input_ids"], encoded["offset_mapping"])
    assert [token.id for token in tokens] == encoded["input_ids"]
    raw = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    assert [token.raw for token in tokens] == raw
    special = {"<|endoftext|>", "<s>", "</s>", "[CLS]", "[SEP]"}
    return [token for token in tokens if token.raw not in special]


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("family", LOSSLESS)
def test_the_texts_of_the_tokens_joined_are_the_text(family, kind):
    """But for the bytes of a character before its last token, which are written beside it."""
    text, tokens = TEXTS[kind], written(family, TEXTS[kind])
    joined = BYTES.sub("", "".join(tokens))
    # a token of its own for the space before the first word
    assert joined == text or (tokens[0].raw == "▁" and joined == f" {text}")
    if kind in ("arabic", "chinese", "emoji"):
        assert BYTES.search("".join(tokens))


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("family", LOSSLESS)
def test_no_token_shows_how_the_vocabulary_spells_it(family, kind):
    for token in written(family, TEXTS[kind]):
        assert "Ġ" not in token and "▁" not in token and "<0x" not in token and "�" not in token


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_families_that_normalise_show_what_was_written(family, kind):
    tokens = written(family, TEXTS[kind])
    joined = "".join(tokens).replace("(?)", "")
    assert re.sub(r"\s", "", joined) == re.sub(r"\s", "", TEXTS[kind])


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_of_a_word_are_joined_and_words_are_not(family):
    tokens = written(family, "the unbelievable naïve man")
    words, shown = [], [visible(token) for token in tokens]
    for token, text in zip(tokens, shown, strict=True):
        if token.joined:
            words[-1] += text
        elif text != "␣":
            words.append(text)
    assert words == ["the", "unbelievable", "naïve", "man"] or "⟨" in "".join(words)


def test_signs_for_lone_spaces_tabs_and_ends_of_lines():
    tokens = written("gpt2", TEXTS["code"])
    shown = "".join(visible(token) for token in tokens)
    assert "↵" in shown and "⇥" in shown and "␣" in shown
    assert {visible(t) for t in tokens if not t.strip()} <= {
        "␣" * n + m + "␣" * k for n in range(9) for m in ("", "↵", "⇥", "↵↵") for k in range(9)
    }


def test_a_character_is_written_where_its_last_byte_is():
    assert texts_of(["🙂".encode()[:2], "🙂".encode()[2:3], "🙂!".encode()[3:]]) == [
        "⟨F0 9F⟩",
        "⟨99⟩",
        "🙂!",
    ]
    assert texts_of([b"\xf0\x9f", b"x"]) == ["⟨F0 9F⟩", "x"]  # never completed
    assert texts_of([]) == [] and texts_of([b"", b"a"]) == ["", "a"]


def test_words_that_a_vocabulary_lacks_are_marked():
    tokenizer = FAMILIES["bert"]()
    tokens = written("bert", "The man كتب")
    assert [visible(token) for token in tokens][-1] == "كتب(?)"
    unknown = TokenTexts(tokenizer).unknown(["[CLS]", *tokens])
    assert unknown == (len(tokens),)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_alone_is_written_as_in_a_text(family):
    """Next words are written so."""
    texts = TokenTexts(FAMILIES[family]())
    for token in written(family, "the man went away")[1:]:
        assert visible(texts.alone(token.id)) == visible(token)


def test_a_token_is_a_string_that_keeps_its_spelling():
    token = Token(" Mary", "ĠMary", 11, False)
    again = pickle.loads(pickle.dumps(token))
    assert token == " Mary" and (again.raw, again.id, again.joined) == ("ĠMary", 11, False)
    assert visible(token) == "Mary" and visible(Token("  x", "ĠĠx", 1)) == "␣␣x"


def test_json_has_the_spelling_and_the_ids():
    import clearhead as ch
    from clearhead.views import html, text

    tokens = [Token("The", "The", 464), Token(" cat", "Ġcat", 3797), Token("s", "s", 82, True)]
    q = torch.randn(1, 1, 3, 4)
    trace = ch.explain(q, q, q, tokens=tokens)
    data = text.to_json(trace)
    assert data["queries"] == ["The", " cat", "s"]
    assert data["query_raw_tokens"] == data["key_raw_tokens"] == ["The", "Ġcat", "s"]
    assert data["key_token_ids"] == [464, 3797, 82]
    read = embedded(html.page(trace))
    assert read["tokens"] == ["The", "cat", "s"]
    assert read["spelling"] == {"raw": ["The", "Ġcat", "s"], "ids": [464, 3797, 82], "joined": [2]}
    words = embedded(html.page(ch.explain(q, q, q, tokens=["a", "b", "c"])))
    assert "spelling" not in words


def test_ids_are_read_in_place_of_a_text(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    import clearhead as ch
    from tests.hf.tiny_gguf import ByteLevel, llama, write

    vocabulary = ByteLevel("smollm")
    checkpoint = ch.hf.Checkpoint(write(tmp_path / "a.gguf", llama(len(vocabulary)), vocabulary))
    text = "the man\n  sat"
    ids = torch.tensor(vocabulary.ids(text))
    a, b = (ch.report(checkpoint, given, progress=False) for given in (text, ids))
    assert a.tokens == b.tokens and "".join(a.tokens) == text
    assert [x.id for x in b.tokens] == ids.tolist() == b.to_json()["token_ids"]
    assert [x.entropy for x in a.heads] == [x.entropy for x in b.heads] and a.guesses == b.guesses
    for wrong in (ids.float(), ids.reshape(1, 1, -1), torch.stack([ids, ids]), ids + 9999, ids[:0]):
        with pytest.raises((BadType, BadValue), match="The ids"):
            ch.report(checkpoint, wrong)

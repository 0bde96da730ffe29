"""The tokenizer of a GGUF file: apply what transformers ignores, and check its tokens."""

import json
from pathlib import Path
from typing import Any

from .gguf_settings import misread
from .pre_tokenizers import ADDS_BOS, apply_rule

CONTROL, USER_DEFINED = 3, 4  # the types of tokens that llama.cpp finds in a text before it splits


def set_tokenizer(file: Path, reader: Any, tokenizer: Any) -> None:
    """Apply the settings of the file's tokenizer that transformers ignores."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    fields = _fields(reader)
    backend = tokenizer.backend_tokenizer
    if fields.get("model") == "gpt2":
        apply_rule(backend, fields.get("pre"), str(file))
        if fields.get("pre") in ADDS_BOS and "add_bos_token" not in fields:
            tokenizer.add_bos_token = True
        _spell_added(reader, tokenizer)
    elif fields.get("model") == "llama":
        spaced = fields.get("add_space_prefix", True)
        adds = backend.encode("a", add_special_tokens=False).tokens[0].startswith("▁")
        if adds and not spaced:
            backend.normalizer = None
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
            backend.decoder = decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            )
        elif spaced and not adds:
            raise misread(file, "tokenizer.ggml.add_space_prefix", spaced, adds)
        elif spaced:  # Metaspace adds none to a text that begins with a space
            backend.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
            backend.pre_tokenizer = None


def _fields(reader: Any) -> dict[str, Any]:
    """Return the settings of the tokenizer that are single values."""
    return {
        key.removeprefix("tokenizer.ggml."): field.contents()
        for key, field in reader.fields.items()
        if key.startswith("tokenizer.ggml.") and len(field.data) < 2
    }


def _added(reader: Any) -> dict[int, tuple[str, int]]:
    """Return the text and the type of each added token, by its id."""
    types = reader.fields.get("tokenizer.ggml.token_type")
    texts = reader.fields["tokenizer.ggml.tokens"]
    return {
        id: (text, kind)
        for id, kind in enumerate(types.contents() if types else ())
        if kind in (CONTROL, USER_DEFINED) and (text := texts.contents(id))
    }


def _spell_added(reader: Any, tokenizer: Any) -> None:
    """Spell added tokens of a byte-level vocabulary as the file does.

    transformers spells those with a space or a character that is not a letter for a byte in letters
    for bytes, and splits their texts.
    """
    from tokenizers import AddedToken, Tokenizer

    backend = tokenizer.backend_tokenizer
    state = json.loads(backend.to_str())
    vocabulary, merges = state["model"]["vocab"], state["model"]["merges"]
    spelled = {id: token for token, id in vocabulary.items()}
    merged = {first + second for first, second in merges}
    added = []
    for id, (text, kind) in _added(reader).items():
        if text not in vocabulary and spelled.get(id, "") not in {"", *merged}:
            vocabulary[text] = vocabulary.pop(spelled[id])
            added.append(AddedToken(text, normalized=False, special=kind == CONTROL))
    if added:
        backend.model = Tokenizer.from_str(json.dumps(state)).model
        tokenizer.add_tokens(added)


def check_tokens(file: Path, reader: Any, tokenizer: Any) -> None:
    """Raise `BadValue` if an added token is not one token of its text, or if other tokens are added
    around a text than in llama.cpp."""
    backend, fields = tokenizer.backend_tokenizer, _fields(reader)
    added, texts = _added(reader), reader.fields["tokenizer.ggml.tokens"]
    encoded = backend.encode_batch([text for text, _ in added.values()], add_special_tokens=False)
    for (id, (text, kind)), pieces in zip(added.items(), encoded, strict=True):
        if pieces.ids != [id] and [texts.contents(i) for i in pieces.ids] != [text]:
            name = "USER_DEFINED" if kind == USER_DEFINED else "CONTROL"
            raise misread(file, f"the {name} token {id}", repr(text), pieces.tokens)
    bos = fields.get("add_bos_token", fields["model"] == "llama" or fields.get("pre") in ADDS_BOS)
    eos = fields.get("add_eos_token", fields["model"] == "t5")
    begun = [tokenizer.bos_token_id] * bool(bos)
    begun += backend.encode("a", add_special_tokens=False).ids
    ids = tokenizer("a")["input_ids"]
    if ids[: len(begun)] != begun:
        raise misread(file, "tokenizer.ggml.add_bos_token", bos, ids)
    if ids[len(begun) :] != [tokenizer.eos_token_id] * bool(eos):
        raise misread(file, "tokenizer.ggml.add_eos_token", eos, ids)

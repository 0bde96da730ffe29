"""The rules by which llama.cpp splits a text before byte-pair merges, by their names in GGUF files.

A file names its rule in `tokenizer.ggml.pre`. If transformers does not know the name, it uses
GPT-2's rule without a warning. The rules are those of `llama-vocab.cpp`: each expression splits the
pieces that the earlier expressions left. The rules of tekken and gpt-4o are those of the models:
in llama.cpp they lack combining marks.
"""

from typing import Any

from ..core.errors import BadValue

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LINES_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_GPT2 = _CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LETTERS = rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
# A word begins at a capital letter, or has capital letters only.
_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+"
_CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
_ENDS = rf"(?i:{_CONTRACTIONS})?"

# The expressions of a rule, and the names of the models that use it.
_RULES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (_GPT2,),
        "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe mpt "
        "olmo jais gigachat mellum modern-bert a.x-4.0 exaone4 trillion granite-docling",
    ),
    ((r"\p{N}", _GPT2), "starcoder refact command-r smollm codeshell exaone minerva-7b"),
    (
        (rf"{_LETTERS}|\p{{N}}{{1,3}}|{_LINES}",),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx "
        "smaug-bpe glm4 chatglm-bpe",
    ),
    ((rf"{_LETTERS}|\p{{N}}|{_LINES}",), "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2"),
    ((rf"{_WORD}|{_CAPITALS}|\p{{N}}|{_LINES_AND_SLASHES}",), "tekken"),
    (
        (rf"{_WORD}{_ENDS}|{_CAPITALS}{_ENDS}|\p{{N}}{{1,3}}|{_LINES_AND_SLASHES}",),
        "gpt-4o llama4 kanana2",
    ),
    ((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"), "falcon"),
    ((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), "default"),
)
RULES = {name: expressions for expressions, names in _RULES for name in names.split()}
# A piece that is a token is not split further, and a text begins with the BOS token.
_LLAMA3 = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano", "tekken",
}  # fmt: skip
KEEPS_KNOWN_PIECES = ADDS_BOS = _LLAMA3


def apply_rule(tokenizer: Any, name: str | None, file: str) -> None:
    """Make a byte-level tokenizer (of the library tokenizers) split texts by the named rule.

    Raises `BadValue` for an unknown rule, or if the file names none.
    """
    from tokenizers import Regex, pre_tokenizers

    if name not in RULES:
        gave = "names no pre-tokenizer" if name is None else f"names the pre-tokenizer {name!r}"
        rule = f"texts are split as in training; the known rules are {', '.join(sorted(RULES))}."
        newer = "convert the model again with a newer llama.cpp, which writes tokenizer.ggml.pre."
        other = "load the original checkpoint, a folder with its own tokenizer.json."
        raise BadValue(f"{file!r} {gave}.", rule, newer if name is None else other)
    cuts = [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in RULES[name]]
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spelled])
    tokenizer.model.ignore_merges = name in KEEPS_KNOWN_PIECES

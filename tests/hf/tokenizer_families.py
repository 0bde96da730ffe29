"""A tiny tokenizer of each family, trained by the pipeline of that family."""

import json
from functools import cache

TEXTS = {
    "english": "When Mary and John didn't go, the unbelievable naïve café was 12.5 km away.",
    "code": "def f(x):\n\tif x  > 10:\n        return x_y ** 2  # ok\n\n\nprint(f(3))\n",
    "arabic": "كتب الطالب رسالةً طويلة إلى صديقه.",
    "chinese": "今天天气很好。我们去公园。",
    "emoji": "I 🙂 love 👩‍👩‍👧 and ❤️!",
    "spaces": "  two  spaces \n",
}
CORPUS = [TEXTS["english"], TEXTS["code"], "the man went away and the dog did not go away"] * 4
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def wrapped(backend, **special):
    import transformers

    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def byte_level(pre_tokenizer, normalizer=None, first=None):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, show_progress=False, special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(CORPUS, trainer)
    if first:
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    return wrapped(backend, eos_token="<|endoftext|>", unk_token="<|endoftext|>")


@cache
def gpt2():
    from tokenizers import pre_tokenizers

    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def split_by_rule():
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@cache
def llama3():
    return byte_level(split_by_rule(), first=True)


@cache
def qwen():
    from tokenizers import normalizers

    return byte_level(split_by_rule(), normalizers.NFC())


def with_bytes(trained):
    """The same byte-pair model with a token for each byte, in place of the unknown token."""
    from tokenizers import models

    state = json.loads(trained.to_str())["model"]
    known = [token for token in state["vocab"] if token not in ("<unk>", "<s>", "</s>")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *known]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(pair) for pair in state["merges"]]
    trained.model = models.BPE(
        vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"
    )
    return trained


def sentencepiece_bpe(normalizer, pre_tokenizer, decoder):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    backend.decoder = decoder
    trainer = trainers.BpeTrainer(
        vocab_size=160, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]
    )
    if isinstance(pre_tokenizer, pre_tokenizers.Split):  # the merges of SentencePiece end at words
        backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.train_from_iterator(CORPUS, trainer)
    backend.pre_tokenizer = pre_tokenizer
    with_bytes(backend).post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return wrapped(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def gemma():
    from tokenizers import decoders, normalizers, pre_tokenizers

    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    split = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous")
    return sentencepiece_bpe(normalizers.Replace(" ", "▁"), split, decoder)


@cache
def llama2():
    from tokenizers import decoders, pre_tokenizers

    decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )  # fmt: skip
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    return sentencepiece_bpe(None, metaspace, decoder)


@cache
def bert():
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    trainer = trainers.WordPieceTrainer(
        vocab_size=120, show_progress=False, special_tokens=["[UNK]", "[CLS]", "[SEP]"]
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return wrapped(backend, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]")


@cache
def t5():
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()  # in place of the file with its rules
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=90, show_progress=False, unk_token="<unk>",
        special_tokens=["<pad>", "</s>", "<unk>"],
    )  # fmt: skip
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return wrapped(backend, eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


FAMILIES = {
    "gpt2": gpt2, "llama3": llama3, "qwen": qwen, "gemma": gemma, "llama2": llama2,
    "bert": bert, "t5": t5,
}  # fmt: skip

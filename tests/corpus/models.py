"""Tiny random models with a tokenizer of letters, and 40 texts."""

import random

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import clearhead as ch

ch.hf.register()
WORDS = "the owl saw a fox . it ran , and owl hid ; then fox slept !".split()
SPECIAL = ["<s>", "</s>", "<unk>"]
H, G, CONTEXT = 6, 2, 19
SIZES = {
    "vocab_size": 32, "hidden_size": 48, "intermediate_size": 31, "num_hidden_layers": 2,
    "num_attention_heads": H, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "gpt2": lambda **k: transformers.GPT2Model(transformers.GPT2Config(
        n_embd=48, n_layer=2, n_head=H, vocab_size=32, n_positions=64, initializer_range=0.4,
        bos_token_id=0, eos_token_id=1, **k)),
    "llama": lambda **k: transformers.LlamaModel(transformers.LlamaConfig(
        num_key_value_heads=G, initializer_range=0.3, **SIZES, **k)),
    "bert": lambda **k: transformers.BertModel(transformers.BertConfig(
        initializer_range=0.3, **SIZES, **k)),
    "t5": lambda **k: transformers.T5EncoderModel(transformers.T5Config(
        d_model=48, d_kv=8, d_ff=31, num_layers=2, num_heads=H, vocab_size=32,
        initializer_factor=3.0, **k)),
}  # fmt: skip


def tokenizer(around: bool = False) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of words; with `around`, it adds <s> and </s>."""
    words = dict.fromkeys([*SPECIAL, *WORDS])
    model = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if around:
        model.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def texts(count: int = 40) -> list[str]:
    """Return texts of 1 to 29 words: some shorter than a context, some of several."""
    drawn = random.Random(7)
    return [" ".join(drawn.choices(WORDS, k=1 + (i * 13) % 29)) for i in range(count)]

"""Small checkpoints for the server: a randomly initialised GPT-2 and a tokenizer of words."""

from pathlib import Path


def save_gpt2(
    folder: Path, *, layers: int = 2, heads: int = 3, longest: int = 64, predicts: bool = False
) -> Path:
    """Write a GPT-2 of random weights that reads the words w0 to w96."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(
        folder
    )
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=8 * heads, n_layer=layers, n_head=heads, n_positions=longest
    )
    kind = transformers.GPT2LMHeadModel if predicts else transformers.GPT2Model
    kind(config).eval().save_pretrained(folder)
    return folder


def words(count: int) -> str:
    """A text of so many words, that repeats itself."""
    return " ".join(f"w{(7 * i) % 89 + 1}" for i in range(count))

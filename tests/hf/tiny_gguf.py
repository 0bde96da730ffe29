"""Tiny GGUF files with random weights and a trained tokenizer, and llama.cpp's rules in Python."""

import json

import gguf
import regex
import torch

TEXTS = {
    "prose": "When Mary and John went to the store, John didn't give 12 drinks.\n\nThen?",
    "code": "def f(x):\n    if x > 10:\n        return  x ** 2\n\ty = [1, 23]  # a_b\r\n   7\n",
    "digits": "3.14159 and 1,234,567 or 0x1F; ٣٤ Ⅷ ½ 2024-05-06",
    "emoji": "I ❤️ 👩‍👩‍👧 and 🙂🙂 too, naïve café “so”",
}
# llama.cpp's expressions for how a text is cut, as it spells them.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_ENDS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+%s"
    r"|[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*%s"
)
_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLISHED = {
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "llama-bpe": [_ENDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _LINES % ""],
    "qwen2": [_ENDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _LINES % ""],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"],
    "tekken": [_CASED % ("", "") + r"|\p{N}|" + _LINES % "/"],
    "gpt-4o": [_CASED % (f"{_ENDS}?", f"{_ENDS}?") + r"|\p{N}{1,3}|" + _LINES % "/"],
}
OTHER_TEXTS = {  # of scripts that a small vocabulary writes as bytes
    "Arabic": "ذهب الولد إلى المدرسة، ثم عاد إلى البيت.",
    "Chinese": "今天天气很好，我们去公园散步吧。𠮷野家",  # noqa: RUF001
    "Hindi": "नमस्ते दुनिया",
    "flags": "👩‍👩‍👧 🇩🇪 🙂🙂 ok",
    "spaces": "  two before, a  b   c\n\n  d\t e ",
}
CORPUS = [
    *TEXTS.values(),
    "the man and the cat sat on the mat, then the store",
    "    return x\n",
] * 3


def llama(vocabulary, longest=128, **options):
    """A Llama with random weights, and an untied head."""
    import transformers

    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=longest,
        rms_norm_eps=1e-5, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def write(
    path, model, vocabulary, *, kind="llama", extra=(), settings=(),
    stored=gguf.GGMLQuantizationType.F32,
):  # fmt: skip
    """Write a model as llama.cpp's converter does: queries and keys of a Llama with their halves
    interleaved, norms of a Gemma with 1 added, matrices of a GPT-2 transposed.

    `vocabulary(writer)` writes the tokenizer; `settings` are pairs of a key and a value.
    """
    config, w = model.config, gguf.GGUFWriter(str(path), kind)
    w.add_name("Tiny Llama")
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_block_count(config.num_hidden_layers)
    w.add_head_count(config.num_attention_heads)
    if kind == "gpt2":
        w.add_feed_forward_length(4 * config.hidden_size)
        w.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        w.add_feed_forward_length(config.intermediate_size)
        w.add_head_count_kv(config.num_key_value_heads)
        w.add_layer_norm_rms_eps(config.rms_norm_eps)
        w.add_vocab_size(config.vocab_size)
        rotations = config.rope_parameters
        w.add_rope_freq_base(rotations.get("full_attention", rotations)["rope_theta"])
    if kind == "llama":
        w.add_rope_dimension_count(8)
    w.add_file_type(
        gguf.LlamaFileType.ALL_F32
        if stored == gguf.GGMLQuantizationType.F32
        else gguf.LlamaFileType.MOSTLY_Q4_1
    )
    for key, value in settings:
        w.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    vocabulary(w)
    (architecture,) = (a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, x in [*model.state_dict().items(), *extra]:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = x.shape[0] // 8
            x = x.reshape(heads, 2, -1, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)
        x = x + 1 if "gemma" in kind and "norm" in name else x
        x = x.T if kind == "gpt2" and x.dim() == 2 and ".c_" in name else x
        stem, dot, end = name.rpartition(".") if "." in name else (name, ".", "weight")
        if end not in ("weight", "bias"):
            stem, dot, end = name, ".", "weight"
        data = x.float().contiguous().numpy()
        dtype = stored if x.dim() > 1 else gguf.GGMLQuantizationType.F32
        named = (names.get_name(stem) or stem) + dot + end
        w.add_tensor(named, gguf.quantize(data, dtype), raw_dtype=dtype)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


class ByteLevel:
    """A byte-level vocabulary with merges, of the pre-tokenizer with this name; None writes none.

    `added` has the types of tokens after those, by their texts. `ids` follows llama.cpp's rules
    without the library tokenizers, for texts without them.
    """

    def __init__(self, pre, added=()):
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        self.pre, self.rules = pre, PUBLISHED.get(pre, PUBLISHED["gpt-2"])
        trained = Tokenizer(models.BPE())
        # trained on any text between spaces, so that merges cross what a rule may cut
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        trainer = trainers.BpeTrainer(
            vocab_size=700, show_progress=False, special_tokens=["<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )  # fmt: skip
        trained.train_from_iterator(CORPUS, trainer)
        state = json.loads(trained.to_str())["model"]
        self.tokens = sorted(state["vocab"], key=state["vocab"].get)
        self.merges = [tuple(pair) for pair in state["merges"]]
        self.letters = gguf_letters()
        self.types = [3, *[1] * (len(self.tokens) - 1), *dict(added).values()]
        self.tokens += dict(added)

    def __len__(self):
        return len(self.tokens)

    def __call__(self, writer):
        writer.add_tokenizer_model("gpt2")
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges([" ".join(pair) for pair in self.merges])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)

    def ids(self, text, keeps_known=False):
        pieces = [text]
        for rule in self.rules:
            pieces = [part for piece in pieces for part in cut(rule, piece)]
        rank = {pair: i for i, pair in enumerate(self.merges)}
        number = {token: i for i, token in enumerate(self.tokens)}
        ids = []
        for piece in pieces:
            parts = [self.letters[byte] for byte in piece.encode()]
            if keeps_known and "".join(parts) in number:
                parts = ["".join(parts)]
            while len(parts) > 1:
                at = min(
                    range(len(parts) - 1),
                    key=lambda i: rank.get((parts[i], parts[i + 1]), len(rank)),
                )
                if (parts[at], parts[at + 1]) not in rank:
                    break
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            ids += [number[part] for part in parts]
        return ids


def cut(rule, piece):
    """A piece cut around the matches of a rule."""
    parts, end = [], 0
    for match in regex.finditer(rule, piece):
        parts += [piece[end : match.start()], match[0]]
        end = match.end()
    return [part for part in [*parts, piece[end:]] if part]


def gguf_letters():
    """GPT-2's letter for each byte: its own, or one from 256 on for those that are not printed."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


class SentencePiece:
    """A SentencePiece vocabulary with bytes for characters that it lacks."""

    def __init__(self, spaced=True, added=()):
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        self.spaced = spaced
        trained = Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
        trainer = trainers.BpeTrainer(vocab_size=260, show_progress=False, limit_alphabet=50)
        trained.train_from_iterator(CORPUS, trainer)
        pieces = [t for t, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
        self.tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
        self.scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
        self.types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), *dict(added).values()]
        self.tokens += dict(added)
        self.scores += [0.0] * len(added)

    def __len__(self):
        return len(self.tokens)

    def __call__(self, writer):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(self.tokens)
        writer.add_token_scores(self.scores)
        writer.add_token_types(self.types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(self.spaced)

    def ids(self, text):
        """llama.cpp's: merge the neighbours of the highest score, the first of equals; a character
        that is no token becomes its bytes."""
        number = {token: i for i, token in enumerate(self.tokens)}
        parts = list((" " * self.spaced + text).replace(" ", "▁"))
        while True:
            able = [i for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in number]
            if not able:
                break
            at = max(able, key=lambda i: (self.scores[number[parts[i] + parts[i + 1]]], -i))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids = [1]
        for part in parts:
            ids += [number[part]] if part in number else [3 + byte for byte in part.encode()]
        return ids


class Library:
    """A vocabulary of the library sentencepiece, whose ids are its own."""

    def __init__(self, model):
        self.library = model
        pieces = range(model.get_piece_size())
        kinds = [(model.is_unknown, 2), (model.is_control, 3), (model.is_byte, 6)]
        self.tokens = [model.id_to_piece(i) for i in pieces]
        self.scores = [model.get_score(i) for i in pieces]
        self.types = [next((n for is_kind, n in kinds if is_kind(i)), 1) for i in pieces]

    def __len__(self):
        return len(self.tokens)

    def __call__(self, writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(self.tokens)
        writer.add_token_scores(self.scores)
        writer.add_token_types(self.types)
        writer.add_bos_token_id(self.library.bos_id())
        writer.add_eos_token_id(self.library.eos_id())
        writer.add_unk_token_id(self.library.unk_id())
        writer.add_add_bos_token(True)

    def ids(self, text):
        return [self.library.bos_id(), *self.library.encode(text)]

"""A model that reads contexts of token ids, with its tokenizer: `Reader`."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import BadType, BadValue, kind_of
from ..hf import Checkpoint, ImageCheckpoint, open_checkpoint
from ..hf.token_text import TokenTexts, Vocabulary
from ..models.effects.digest import weights_digest
from ..models.report.text_model import TextModel
from ..nn.token_ids import run_with_known_ids
from .pictures import Pictures, open_pictures


@dataclass(frozen=True, eq=False)
class Reader:
    """A model and its tokenizer.

    Attributes:
        name: the name of the model.
        path: its folder or file; None for a model in memory.
        module: the module that runs on a context.
        predictor: the module that returns logits of the next token; None without one.
        tokenizer: of transformers; None for a model with its own.
        text_model: the model, if it has its own tokenizer or its own way to run.
        words: the token of each id.
        pictures: how it reads pictures in place of texts; None for a model of texts.
    """

    name: str
    path: Path | None
    module: nn.Module
    predictor: nn.Module | None
    tokenizer: Any
    text_model: TextModel | None
    words: Sequence[str]
    pictures: Pictures | None = None

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts, without the tokens that the tokenizer adds around a text."""
        if self.tokenizer is not None and texts:
            encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)
            return [list(ids) for ids in encoded["input_ids"]]
        return [self._ids(text) if text.strip() else [] for text in texts]

    def _ids(self, text: str) -> list[int]:
        assert self.text_model is not None
        ids: list[int] = self.text_model.tokens_and_inputs(text)[1]["input_ids"].flatten().tolist()
        return ids

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer adds before and after a text: [BOS], or [CLS] and [SEP]."""
        if self.tokenizer is None:
            return [], []
        (body,) = self.encode(["a"])
        complete = list(self.tokenizer("a", verbose=False)["input_ids"])
        for start in range(len(complete) - len(body) + 1):
            if complete[start : start + len(body)] == body:
                return complete[:start], complete[start + len(body) :]
        gave = f"The tokenizer of {self.name} reads a text differently with special tokens."
        hint = "pass a tokenizer of transformers that adds them around the tokens of a text."
        raise BadValue(gave, "special tokens are added before and after each context.", hint)

    def run(self, ids: Tensor, pixels: Tensor | None = None) -> None:
        """Run the model on contexts of equal length, (B, T), or on pixels of pictures."""
        inputs: dict[str, Any] = {"input_ids": ids} if pixels is None else {"pixel_values": pixels}
        if getattr(getattr(self.module, "config", None), "use_cache", False):
            inputs["use_cache"] = False
        with torch.no_grad():
            if self.text_model is not None:
                self.text_model.run(inputs)
            else:
                run_with_known_ids(self.module, inputs)

    @cached_property
    def longest(self) -> int | None:
        """The number of positions of the model, or of tokens of a picture; None if it is unlimited
        or unknown."""
        if self.pictures is not None:
            return len(self.words)
        if isinstance(self.text_model, Checkpoint):
            return self.text_model.longest
        config = getattr(self.module, "config", None)
        names = ("max_position_embeddings", "n_positions", "context")
        sizes = (getattr(config, name, None) for name in names)
        return next((int(size) for size in sizes if size and size > 0), None)

    @cached_property
    def spaced(self) -> bool:
        """Whether tokens of the vocabulary begin with the space before a word."""
        return any(str(word)[:1] == " " for word in self.words)

    @cached_property
    def model_digest(self) -> str:
        """A digest of the weights and the configuration."""
        config: Any = getattr(self.module, "config", None)
        settings = (
            config.to_dict() if hasattr(config, "to_dict") else vars(config) if config else {}
        )
        local = {"_name_or_path", "transformers_version", "_attn_implementation"}
        portable = {name: x for name, x in settings.items() if name not in local}
        written = json.dumps(portable, sort_keys=True, default=str)
        return _short(weights_digest(self.module), written)

    @cached_property
    def tokenizer_digest(self) -> str:
        """A digest of the vocabulary and the rules of the tokenizer, or of the image processor."""
        if self.pictures is not None:
            return _short(*self.words, self.pictures.model.processor.to_json_string())
        if self.tokenizer is None:
            return _short(*map(str, self.words))
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend is not None else repr(type(self.tokenizer))
        return _short(rules, json.dumps(self.tokenizer.get_vocab(), sort_keys=True))


def open_reader(model: "str | Path | TextModel | nn.Module | Reader", tokenizer: Any) -> Reader:
    """Return the reader of a checkpoint folder, a text model, or a module with its tokenizer.

    Raises `BadType` for anything else.
    """
    if isinstance(model, Reader):
        return model
    if isinstance(model, (str, Path)):
        model = open_checkpoint(model)
    if isinstance(model, nn.Module):
        if tokenizer is None:
            gave = f"survey got the module {type(model).__name__} without a tokenizer."
            hint = "pass tokenizer=, or the folder of a checkpoint in place of the module."
            raise BadType(gave, "a survey reads texts.", hint)
        config = getattr(model, "config", None)
        module: Any = model
        predictor: nn.Module | None = model
        if getattr(config, "is_encoder_decoder", False):
            module, predictor = module.get_encoder(), None
        elif isinstance(getattr(model, "base_model", None), nn.Module):
            module = module.base_model  # without the head that computes logits
        vocabulary = Vocabulary(TokenTexts(tokenizer))
        model.eval()
        name = type(model).__name__
        return Reader(name, None, module, predictor, tokenizer, None, vocabulary)
    if not hasattr(model, "tokens_and_inputs"):
        rule = "a model is a checkpoint folder, a Checkpoint, or a torch.nn.Module with tokenizer=."
        hint = "pass one of these."
        raise BadType(f"survey got {kind_of(model)} for a model.", rule, hint)
    own = getattr(model, "tokenizer", None)
    pictures = open_pictures(model) if isinstance(model, ImageCheckpoint) else None
    words = model.words if pictures is None else pictures.grid.tokens
    about = model.name, model.path, model.module, model.predictor
    return Reader(*about, own, model, words, pictures)


def _short(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]

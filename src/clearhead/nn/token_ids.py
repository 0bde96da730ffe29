"""A run of a model that says which id has no embedding, where torch raises a bare `IndexError`, or
on a GPU an assertion that ends the process; and which inputs a model of transformers lacks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AttentionError, BadValue


def run(model: nn.Module, inputs: Any) -> Any:
    """What ``model(inputs)`` gives, ``model(**inputs)`` for a dict."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def run_with_known_ids(model: nn.Module, inputs: Any) -> Any:
    """`run`. Raises `BadValue` for an id outside of a table of embeddings, and for inputs on which
    a model of transformers raises."""
    try:
        with known_ids(model):
            return run(model, inputs)
    except AttentionError:
        raise
    except Exception as error:
        if hasattr(model, "base_model_prefix"):  # transformers checks its inputs deep inside
            raise _cannot_run(model, inputs, error) from error
        raise


@contextmanager
def known_ids(model: nn.Module) -> Iterator[None]:
    """Inside the `with` block, raise `BadValue` for an id outside of a table of embeddings, before
    it is looked up there."""
    tables = {*_tables(model)}
    hooks = [
        module.register_forward_pre_hook(partial(_check, name))
        for name, module in model.named_modules()
        if module in tables
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _cannot_run(model: nn.Module, inputs: Any, error: Exception) -> BadValue:
    """The error of a model of transformers that raised on its inputs."""
    name, config = type(model).__name__, getattr(model, "config", None)
    given = sorted(inputs) if isinstance(inputs, Mapping) else ["input_ids"]
    decodes = any(key.startswith("decoder_input") or key == "labels" for key in given)
    if getattr(config, "is_encoder_decoder", False) and not decodes:
        return BadValue(
            f"The {name} got {', '.join(given)}, and nothing for its decoder.",
            "an encoder-decoder reads two texts.",
            'pass a dict with "input_ids" and "decoder_input_ids", or model.get_encoder() to run '
            "the encoder alone.",
        )
    why = " ".join(str(error).split())
    return BadValue(
        f"The {name} raised {type(error).__name__} on {', '.join(given)}: {why}",
        "a model runs as model(inputs), or as model(**inputs) for a dict.",
        "pass inputs with which that call returns.",
    )


def _tables(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that look ids up: embeddings as torch has them, and what a part of a model of
    transformers names as its own, which may be of a class that scales them."""
    for module in model.modules():
        if type(module) is nn.Embedding:
            yield module
        try:
            own = module.get_input_embeddings()  # type: ignore[operator]  # a method, if it is there
        except (AttributeError, NotImplementedError):  # of another module, or one that reads no ids
            continue
        if isinstance(own, nn.Embedding):
            yield own


def _check(name: str, table: nn.Embedding, given: tuple[Any, ...]) -> None:
    if not given or not isinstance(given[0], Tensor) or torch.compiler.is_compiling():
        return
    (ids, *_), size = given, table.num_embeddings
    strange = ids[(ids < 0) | (ids >= size)]
    if strange.numel():
        raise BadValue(
            f"The id {int(strange[0])} was given to {name}.",
            f"it holds {size} embeddings, of the ids 0 to {size - 1}.",
            "take the tokenizer that the model was trained with, and no more tokens than it has "
            "positions; where words were added: model.resize_token_embeddings(len(tokenizer)).",
        )

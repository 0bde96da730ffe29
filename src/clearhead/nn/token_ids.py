"""Run a model, and raise errors that name an id without an embedding, or missing inputs.

Without this, torch raises an `IndexError` without the id, or on a GPU an assertion that ends the
process.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import AttentionError, BadValue


def run(model: nn.Module, inputs: Any) -> Any:
    """Call ``model(inputs)``, or ``model(**inputs)`` for a dict."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def as_batch(inputs: Any) -> Any:
    """Return the ids of one text, (T,), as a batch of one, (1, T), and other inputs as they are."""
    one = isinstance(inputs, Tensor) and inputs.dim() == 1 and not inputs.is_floating_point()
    return inputs[None] if one else inputs


def run_with_known_ids(model: nn.Module, inputs: Any) -> Any:
    """Run a model. Raises `BadValue` for an id without an embedding.

    Raises `BadValue` also for inputs on which a model of transformers raises.
    """
    try:
        with known_ids(model):
            return run(model, inputs)
    except AttentionError:
        raise
    except Exception as error:
        if hasattr(model, "base_model_prefix"):  # a model of transformers, with its own errors
            raise _cannot_run(model, inputs, error) from error
        raise


@contextmanager
def known_ids(model: nn.Module) -> Iterator[None]:
    """Raise `BadValue` inside the `with` block for an id without an embedding."""
    tables = {*_tables(model)}
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if module in tables:
                hooks.enter_context(module.register_forward_pre_hook(partial(_check, name)))
        yield


def _cannot_run(model: nn.Module, inputs: Any, error: Exception) -> BadValue:
    """Return the error for a model of transformers that raised on its inputs."""
    name, config = type(model).__name__, getattr(model, "config", None)
    passed = sorted(inputs) if isinstance(inputs, Mapping) else ["input_ids"]
    decodes = any(key.startswith("decoder_input") or key == "labels" for key in passed)
    if getattr(config, "is_encoder_decoder", False) and not decodes:
        gave = f"The {name} got {', '.join(passed)}, and nothing for its decoder."
        hint = 'pass a dict of "input_ids" and "decoder_input_ids", or use model.get_encoder().'
        return BadValue(gave, "an encoder-decoder reads two texts.", hint)
    why = " ".join(str(error).split())
    gave = f"The {name} raised {type(error).__name__} on {', '.join(passed)}: {why}"
    rule = "a model is called as model(inputs), or as model(**inputs) for a dict."
    return BadValue(gave, rule, "pass inputs with which this call returns.")


def _tables(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the embeddings of a model.

    These are torch's, and those that parts of a model of transformers return as their input
    embeddings, which may belong to a subclass that scales them.
    """
    for module in model.modules():
        if type(module) is nn.Embedding:
            yield module
        try:
            own = module.get_input_embeddings()  # type: ignore[operator]  # a method, if it exists
        except (AttributeError, NotImplementedError):  # another module, or one without ids
            continue
        if isinstance(own, nn.Embedding):
            yield own


def _check(name: str, table: nn.Embedding, arguments: tuple[Any, ...]) -> None:
    if not arguments or not isinstance(arguments[0], Tensor) or torch.compiler.is_compiling():
        return
    (ids, *_), size = arguments, table.num_embeddings
    unknown = ids[(ids < 0) | (ids >= size)]
    if unknown.numel():
        rule = f"it has {size} embeddings, for the ids 0 to {size - 1}."
        hint = "use its tokenizer and a shorter text, or for added tokens resize_token_embeddings."
        raise BadValue(f"{name} got the id {int(unknown[0])}.", rule, hint)

"""Make a cache of transformers that does not copy the stored keys and values at every step."""

import inspect
from typing import TYPE_CHECKING, Any

from ..errors import BadType, BadValue, kind_of
from .register import transformers

if TYPE_CHECKING:
    from transformers import DynamicCache, EncoderDecoderCache


def cache(model: Any) -> "DynamicCache | EncoderDecoderCache":
    """Make an empty cache for one batch of texts: ``model.generate(..., past_key_values=cache)``.

    It stores the same keys and values as transformers' default cache, and has the same methods.
    The default cache copies all of them at every step, this one only when its memory is full, once
    in 256 tokens. Its `keys` and `values` are views of that memory: after `crop`, new tokens
    overwrite the removed ones. Under autograd, and while torch compiles or transforms, it copies
    like the default cache.

    `model` is a model of transformers, with any `attn_implementation`. Its layers without keys
    (convolutions, linear attention) get the layer of the default cache. From transformers 5.24 on,
    the keyword `past_key_values` is also called `cache`.

    Raises `BadValue` for a model that does not use transformers' default cache or that stores
    anything else in a layer of attention, `BadType` for any other object, and `Missing` if
    transformers is not installed.
    """
    library = transformers()
    if not isinstance(model, library.PreTrainedModel):
        raise BadType(
            f"cache got {kind_of(model)}.",
            "a cache has the layers of a transformers model.",
            "pass the model that generates.",
        )
    name = type(model).__name__
    default = getattr(model, "_supports_default_dynamic_cache", lambda: True)
    keywords = inspect.signature(model.forward).parameters
    if keywords.keys().isdisjoint(("past_key_values", "cache")) or not default():
        raise BadValue(
            f"cache got {name}, which does not use transformers' default cache.",
            "it replaces the default cache of a model that decodes with one.",
            f"run {name} without this cache.",
        )
    own = library.DynamicCache(config=model.config)
    own.layers = [_appending(layer, name) for layer in own.layers]
    if not model.config.is_encoder_decoder:
        return own
    return library.EncoderDecoderCache(own, library.DynamicCache(config=model.config))


def _appending(layer: Any, model: str) -> Any:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    from .cache_layers import AppendingLayer, AppendingWindowLayer

    kind = type(layer)
    if kind is DynamicLayer:
        return AppendingLayer()
    if kind is DynamicSlidingWindowLayer:
        return AppendingWindowLayer(sliding_window=layer.sliding_window)
    if kind.__name__ in ("LinearAttentionLayer", "DummyLayer"):  # which 5.4 does not have
        return layer
    raise BadValue(
        f"cache got {model}, whose default cache has a {kind.__name__}.",
        "it replaces layers that store keys and values, all of them or those of a sliding window.",
        "generate with transformers' default cache, without past_key_values.",
    )

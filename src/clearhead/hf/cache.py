"""Make a cache of transformers that does not copy the stored keys and values at every step."""

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.errors import BadValue, must_be_of
from ..core.problem.blocks import must_be_format
from .register import transformers

if TYPE_CHECKING:
    from transformers import DynamicCache, EncoderDecoderCache


def cache(model: Any, dtype: str | None = None) -> "DynamicCache | EncoderDecoderCache":
    """Make an empty cache for one batch of texts: ``model.generate(..., past_key_values=cache)``.

    It stores the same keys and values as transformers' default cache, and has the same methods.
    The default cache copies all of them at every step, this one only when its memory is full, once
    in 256 tokens. Its `keys` and `values` are views of that memory: after `crop`, new tokens
    overwrite the removed ones. Under autograd, and while torch compiles or transforms, it copies
    like the default cache.

    With `dtype` "q8_0" or "q4_0" it stores keys and values in blocks of ggml, 8.5 or 4.5 bits a
    number, rounded when they are stored; see `nn.KVCache`. Attention of clearhead reads the blocks
    as they are, any other attention converts all of them at each step. None stores them as they
    are.

    `model` is a model of transformers, with any `attn_implementation`, or a PeftModel. Its layers
    without keys (convolutions, linear attention) get the layer of the default cache. From
    transformers 5.24 on, the keyword `past_key_values` is also called `cache`.

    Raises `BadValue` for a model that does not use transformers' default cache or that stores
    anything else in a layer of attention, and for another `dtype`; `BadType` for any other object,
    and `Missing` if transformers is not installed. A model with more layers than `model` raises
    `BadValue` when it runs with the cache.
    """
    library = transformers()
    must_be_format(dtype)
    model = getattr(model, "get_base_model", lambda: model)()
    rule, hint = "a cache has the layers of a transformers model.", "pass the model that generates."
    must_be_of(library.PreTrainedModel, "cache", model, rule, hint)
    name = type(model).__name__
    default = getattr(model, "_supports_default_dynamic_cache", lambda: True)
    keywords = inspect.signature(model.forward).parameters
    if keywords.keys().isdisjoint(("past_key_values", "cache")) or not default():
        gave = f"cache got {name}, which does not use transformers' default cache."
        rule = "it replaces the default cache of a model that decodes with one."
        raise BadValue(gave, rule, f"run {name} without this cache.")
    own = library.DynamicCache(config=model.config)
    own.layers = [_appending(layer, name, dtype) for layer in own.layers]
    own.layer_class_to_replicate = partial(_no_more_layers, name, len(own.layers))
    if not model.config.is_encoder_decoder:
        return own
    return library.EncoderDecoderCache(own, library.DynamicCache(config=model.config))


def _appending(layer: Any, model: str, format: str | None) -> Any:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    from .cache_layers import AppendingLayer, AppendingWindowLayer

    kind = type(layer)
    if kind is DynamicLayer:
        return AppendingLayer(format)
    if kind is DynamicSlidingWindowLayer:
        return AppendingWindowLayer(format, sliding_window=layer.sliding_window)
    if kind.__name__ in ("LinearAttentionLayer", "DummyLayer"):  # which 5.4 does not have
        return layer
    gave = f"cache got {model}, whose default cache has a {kind.__name__}."
    rule = "it replaces layers that store all keys and values, or those of a sliding window."
    hint = "generate with transformers' default cache, without past_key_values."
    raise BadValue(gave, rule, hint)


def _no_more_layers(model: str, count: int) -> NoReturn:
    """Take the place of the class from which a cache of transformers makes a layer it lacks."""
    layers = f"{count} layer{'s' * (count != 1)}"
    gave = f"A model got the cache of a {model} with {layers}, and has more."
    rule = "a cache has the layers of the model that it is made for."
    raise BadValue(gave, rule, "pass cache(model) of the model that generates.")

"""Generate text by a transformers model, after a text that is cut over ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import BadValue, needs
from .attention import TIMEOUT
from .decode import Decoding
from .layouts import Layout
from .sharded import sharded
from .transport import Group


def generate(
    model: Any,
    ids: Tensor,
    group: Group = None,
    *,
    layout: Layout | str = "head-tail",
    timeout: float = TIMEOUT,
    **keywords: Any,
) -> Any:
    """Call ``model.generate`` of transformers after a text that is cut over the ranks of a group.

    >>> tokens = ch.distributed.generate(model, ids, max_new_tokens=100)  # doctest: +SKIP

    The ranks compute the text together, up to its last token, and each caches the keys and values
    of its part. Then all ranks run the model on the same new tokens; each caches all of these.

    Args:
        model: a transformers model of the next token with ``attn_implementation="clearhead"``. It
            takes position_ids.
        ids: the tokens of the whole text, the same on all ranks, (B, T), without padding.
        group, timeout: as in `attention`.
        layout: which of the first T - 1 positions each rank holds.
        keywords: those of ``model.generate``. With ``do_sample=True``, seed every rank alike.

    Returns what ``model.generate`` returns, on every rank.

    Raises what `sharded` raises, and `BadValue` for padding, for new tokens that differ between
    ranks, and for a text of so few tokens that a rank has none. It also raises `BadValue` for ways
    to generate that compute tokens again, such as an assistant model.
    """
    with needs("hf", "generate() is a function of its models."):
        from transformers import DynamicCache
    cache: Any = DynamicCache()
    length = ids.shape[1] - 1
    with sharded(length, group, layout=layout, timeout=timeout) as part, torch.no_grad():
        if not all(map(len, part.layout.positions)):
            gave = f"The text has {ids.shape[1]} tokens, for {part.layout.world} ranks."
            rule = "each rank has a part of the text before its last token."
            raise BadValue(gave, rule, "call model.generate(ids) on each rank.")
        model(**part.inputs(ids[:, :length]), past_key_values=cache, logits_to_keep=1)
        step = Decoding(part.layout, group, timeout, part.rank, length, part.block)
        of_part, elsewhere = cache.get_seq_length, length - len(part.positions)

        def begin_step(_: nn.Module, args: object, passed: Mapping[str, Any]) -> None:
            step.tokens_before, step.compared = cache.get_seq_length(), False
            at = passed.get("position_ids")
            first = None if at is None else at[..., 0].unique().tolist()
            if first != [step.tokens_before]:
                gave = f"generate() continued {step.tokens_before} tokens at position {first}."
                rule = "a text has no padding, and a step continues the cache of all ranks."
                hint = "omit use_cache=False, assistant_model= and prompt_lookup_num_tokens=."
                raise BadValue(gave, rule, hint)
            cache.batch_repeat_interleave(len(passed["input_ids"]) // len(cache.layers[0].keys))

        cache.get_seq_length = lambda layer_idx=0: of_part(layer_idx) + elsewhere
        part.block.generates = True
        try:
            with model.register_forward_pre_hook(begin_step, with_kwargs=True), step.computing():
                return model.generate(ids, past_key_values=cache, **keywords)
        finally:
            del cache.get_seq_length

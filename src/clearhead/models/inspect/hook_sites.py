"""Find where TransformerLens has the tensors of an attention call: `hook_site`.

The names are those of version 4: ``blocks.3.attn`` in a decoder or encoder alone, and in an
encoder-decoder ``encoder_blocks.3.attn``, ``decoder_blocks.3.self_attn`` and
``decoder_blocks.3.cross_attn``. The number is the index of the block in its list, from the path of
the module. A call without a certain name has none, and the reason is recorded.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from ...core.problem.problem import Problem
from ...core.torch_state import loadable
from ...hf.architectures import CHANGE_QUERIES_AND_KEYS, CHANGE_VALUES, IMAGE_ENCODERS
from ...hf.inspect_model import names_of


@loadable
class HookSite(NamedTuple):
    """Where TransformerLens has the tensors of an attention call.

    `prefix` is the name of the attention, such as ``blocks.3.attn``. If it is empty, `reason` is
    why. `rotation` is "rot_" if queries and keys are rotated, and "" if they come straight from
    their projections; None if neither is certain. `projected` is whether values come straight from
    their projection. `Tq` is the number of queries.
    """

    prefix: str
    reason: str
    rotation: str | None
    projected: bool
    Tq: int


def hook_site(
    model: nn.Module, name: str, crosses: bool, repeated: bool, problem: Problem
) -> HookSite:
    """Return the site of a call of the module `name`, which is running.

    `crosses` is whether the call is cross-attention, and `repeated` whether the module called
    attention earlier in this run.
    """
    path = name.split(".") if name else []
    chain = [model]
    for part in path:
        chain.append(getattr(chain[-1], part))
    prefix, reason = _prefix(chain, path, crosses)
    if repeated:
        prefix, reason = "", "it calls attention several times in a run"
    rotation, projected = _received(chain[-1], problem)
    return HookSite(prefix, reason, rotation, projected, problem.Tq)


def _prefix(chain: list[nn.Module], path: list[str], crosses: bool) -> tuple[str, str]:
    """Return the name of the attention in TransformerLens, or "" and the reason why it has none.

    `chain` holds the modules around the attention, outermost first, and `path` their names, without
    that of the first.
    """
    stacks = [
        (chain.index(stack), blocks) for blocks, stack in _stacks(chain).items() if stack in chain
    ]
    if not stacks:
        return "", "it is not in the part of the model that reads and writes text"
    start, blocks = max(stacks)
    inner = path[start:]
    numbers = [i for i, part in enumerate(inner) if part.isdigit()]
    if [inner[i - 1] for i in numbers] == ["block", "layer"]:  # T5: a block is a list of sublayers
        numbers.pop()
    if len(numbers) != 1:
        return "", f"the path of a block has one number, and this has {len(numbers) or 'none'}"
    if "Merged" in type(chain[-1]).__name__:  # T5Gemma 2
        return "", "it looks at both texts in one call"
    if crosses and blocks != "decoder_blocks":
        return "", "it is cross-attention outside the decoder of an encoder-decoder"
    attention = ("cross_attn" if crosses else "self_attn") if blocks == "decoder_blocks" else "attn"
    return f"{blocks}.{inner[numbers[0]]}.{attention}", ""


def _stacks(chain: list[nn.Module]) -> dict[str, nn.Module]:
    """Return the parts of the model that have blocks, by the name of these in TransformerLens."""
    for i, module in enumerate(chain):
        if isinstance(module, nn.Transformer):
            return {"encoder_blocks": module.encoder, "decoder_blocks": module.decoder}
        if hasattr(module, "base_model_prefix"):
            loaded: Any = module  # a model of transformers
            stacks: dict[str, nn.Module] = {"blocks": loaded.get_decoder()}
            if loaded.config.is_encoder_decoder:
                encoder, decoder = loaded.get_encoder(), loaded.get_decoder()
                stacks = {"encoder_blocks": encoder, "decoder_blocks": decoder}
            for part in chain[i + 1 :]:
                if type(part).__name__ in IMAGE_ENCODERS:
                    stacks["vision_encoder.encoder_layers"] = part
            return stacks
    return {"blocks": chain[0]}


def _received(module: nn.Module, problem: Problem) -> tuple[str | None, bool]:
    """Return `HookSite.rotation` and `HookSite.projected` of a module that calls attention."""
    kind = type(module)
    if isinstance(module, nn.MultiheadAttention) or kind.__module__.startswith("clearhead.nn."):
        return "rot_" if getattr(module, "rotary", None) is not None else "", True
    if not kind.__module__.startswith("transformers."):
        return None, False
    code = _code_of(kind)  # type: ignore[arg-type]  # a class has a hash
    if code.rotates:
        return None if "kv_b_proj" in code.changes else "rot_", code.projected
    scaled = problem.scale != 1 or code.relative  # T5 does not scale
    return "" if scaled and not code.changes else None, code.projected


class _Code(NamedTuple):
    """What follows from the names in the code of an attention class."""

    changes: frozenset[str]
    projected: bool
    rotates: bool
    relative: bool


@lru_cache(maxsize=1024)
def _code_of(kind: type[nn.Module]) -> _Code:
    names = {name.lower() for name in names_of(kind)}
    return _Code(
        frozenset(x for x in CHANGE_QUERIES_AND_KEYS if any(x in name for name in names)),
        not any(part in name for name in names for part in CHANGE_VALUES),
        any("rotary" in name for name in names),
        "relative_attention_bias" in names,
    )

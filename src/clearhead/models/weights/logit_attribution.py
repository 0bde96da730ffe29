"""`logit_attribution`: split the logit of a token into the parts of a model that write it.

Letters: L attention calls (layers), H heads, T tokens, d model size.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import BadType, BadValue, kind_of
from ...core.functional.ambient import ambient
from ...core.torch_state import own_dtypes
from ...nn.token_ids import run_with_known_ids
from ..follow.copies import fresh
from ..follow.layers import must_be_runnable, no_attention_call
from ..follow.outputs import logits_of
from ..follow.refused_models import no_random_numbers, weights_must_be_whole
from ..follow.run import AttentionCall
from .direct_paths import DirectPaths, Part
from .logit_parts import LogitAttribution, Source
from .norms_and_rotations import wide_dtype
from .unembedding import find_unembedding, parse_target

_OTHERS = "for an image model or a classifier, effects measures a function of its output."
_TOLERANCE = 1e-4  # for the residue over the sum of absolute parts; larger in 16-bit types


@torch.inference_mode(False)  # it needs gradients inside torch.no_grad(), too
@torch.enable_grad()
def logit_attribution(
    model: nn.Module,
    ids: Tensor | Mapping[str, Any],
    target: str | int | Tensor | Callable[..., Tensor] = "next",
    *,
    center: bool = False,
) -> LogitAttribution:
    """Split the target's logit at each position into parts of heads, MLPs, embedding and biases.

    >>> parts = ch.logit_attribution(model, ids)  # doctest: +SKIP
    >>> parts.heads[:, :, -1]  # of every head, in the logit of the last token  # doctest: +SKIP
    >>> parts.sources(layer=1, head=3, query=-1)  # from which tokens  # doctest: +SKIP

    The part of head h at position t is ``scale[t] * (z[h, t] @ W_O[h]) @ u``: z is the head's
    output, u the target's column of the unembedding, and the scale is that of the final norm in the
    run, with its gain. The same holds for norms after attention or after an MLP (Gemma), and for
    blocks with a norm after the sum. It is the direct effect of a head, without its effect on later
    layers; for both, see `effects`.

    Args:
        model: a model with logits (1, T, words) and without dropout: a transformers model with
            ``attn_implementation="clearhead"`` and a head for the next token, or a model of
            `clearhead.nn`.
        ids: the ids of one text, (T,) or (1, T); or the inputs of the model by name, a dict.
        target: the token whose logit is split. "next" is the next token, so there are T - 1
            positions. Otherwise an id, or an id for each position, (T,).
            ``ch.logit_difference(a, b)`` is the logit of a minus that of b at every position; its
            `at` is not used.
        center: subtract the mean logit of all words, and so the parts that are equal for all words.

    The logit is that before a final soft cap. Raises `BadValue` if the parts miss the logit by more
    than 1e-4 of their absolute sum (for 16-bit models, 8 roundings). The error names the reason: a
    transform before the unembedding (BERT), an unknown norm, or a gate or a norm before an output
    projection. Raises `BadValue` or `BadType` also for several texts, a compiled model, random
    numbers, offloaded weights, or a model without attention calls through clearhead.

    Source: nostalgebraist 2020, "interpreting GPT: the logit lens"; Elhage et al. 2021, "A
    Mathematical Framework for Transformer Circuits"; Wang et al. 2022, "Interpretability in the
    Wild".
    """
    rule, more = "logit_attribution runs a model with logits.", ", then the ids of a text"
    must_be_runnable("logit_attribution", model, rule, more)
    weights_must_be_whole("logit_attribution", model)
    inputs, text = _one_text(ids)
    paths = DirectPaths(model)
    with no_random_numbers(model), paths.recorded():
        output = run_with_known_ids(model, fresh(inputs))
    logits = logits_of(output, f"pass a model with a head for the next token; {_OTHERS}").detach()
    if not paths.heads:
        raise no_attention_call(model, "logit_attribution splits attention calls by head.")
    if logits.shape[:2] != (1, len(text)):
        gave = f"The {type(model).__name__} gave logits {tuple(logits.shape)} for {len(text)} ids."
        rule = "logit_attribution needs the logits of all positions, (1, T, words)."
        raise BadValue(gave, rule, "leave out logits_to_keep=.")
    if bool(logits.isnan().any()):
        gave = f"The {type(model).__name__} gave logits with NaN."
        hint = "check the weights for NaN, or load the model in float32."
        raise BadValue(gave, "a logit that is split is a number.", hint)
    unembedding = find_unembedding(model, paths.last_linear, logits)
    wanted = parse_target(target, text, logits.shape[-1], center)
    n = len(wanted.plus)
    stream = unembedding.input[:n]
    direction = wanted.of_words(unembedding.rows, stream.dtype) * unembedding.scale
    others = [*paths.others, *paths.biases]
    leaves = [*(part.written for part in paths.heads), *(part.written for part in others)]
    gradients = torch.autograd.grad((stream * direction).sum(), leaves, allow_unused=True)
    with torch.no_grad(), own_dtypes():
        bias = None
        if unembedding.bias is not None:
            bias = wanted.of_words(unembedding.bias, stream.dtype) * unembedding.scale
        logit = wanted.of_logits(unembedding.raw[:n]) * unembedding.scale
        return _assembled(model, paths, gradients, logit, bias, wanted.plus)


def _assembled(
    model: nn.Module, paths: DirectPaths, gradients: Sequence[Tensor | None], logit: Tensor,
    bias: Tensor | None, target: Tensor,
) -> LogitAttribution:  # fmt: skip
    """Compute the parts from the gradients of the logits with respect to the outputs.

    `gradients` are those of the heads, of other modules and of the biases of norms, in this order.
    """
    n = len(logit)
    of_heads = gradients[: len(paths.heads)]
    reached = [
        (number, part.call, _by_position(gradient, n))
        for number, (part, gradient) in enumerate(zip(paths.heads, of_heads, strict=True))
        if gradient is not None
    ]
    _check_reached(model, paths, reached)
    zero = torch.zeros(n, dtype=torch.float64, device=logit.device)
    is_edited = bool(ambient().editors)
    rows, sources, biases = [], [], zero if bias is None else bias.double()
    for _, call, gradient in reached:
        weight = call.projection.weight.to(wide_dtype(call.z))
        along = torch.einsum("hvd,td->htv", weight, gradient.to(weight))
        rows.append(torch.einsum("htv,htv->ht", call.z[0, :, :n].to(weight), along))
        sources.append(Source(call.problem, call.inputs, along, is_edited))
        if call.projection.bias is not None:
            biases = biases + (gradient.double() @ call.projection.bias.double())
    layer_of = _layers_by_block(reached)
    mlps, embedding = [zero] * len(reached), zero
    for number, part in enumerate([*paths.others, *paths.biases]):
        reaches = gradients[len(paths.heads) + number]
        if reaches is None:
            continue
        written = _by_position(reaches.double() * part.written.double(), n).sum(-1)
        if number >= len(paths.others):
            biases = biases + written
        elif (layer := layer_of(part)) is None:
            embedding = embedding + written
        else:
            mlps[layer] = mlps[layer] + written
    modules = tuple(call.module for _, call, _ in reached)
    kind = rows[0].dtype
    attribution = LogitAttribution(
        torch.stack(rows), torch.stack(mlps).to(kind), embedding.to(kind), biases.to(kind),
        logit.to(kind), target, modules, tuple(sources),
    )  # fmt: skip
    _check_sum(model, attribution, paths)
    return attribution


def _one_text(ids: Tensor | Mapping[str, Any]) -> tuple[Tensor | dict[str, Any], Tensor]:
    """Return the inputs of the model, and the ids (T,) of its logits."""
    named = dict(ids) if isinstance(ids, Mapping) else {"input_ids": ids}
    text = named.get("decoder_input_ids", named.get("input_ids"))
    if text is None and named:
        gave = f"logit_attribution got {', '.join(map(str, named))}, and no input_ids."
        rule = "it splits the logits of the next tokens of a text."
        raise BadType(gave, rule, f"pass the ids of a text as input_ids; {_OTHERS}")
    if not isinstance(text, Tensor) or text.is_floating_point() or text.dim() not in (1, 2):
        what = kind_of(text)
        if isinstance(text, Tensor):
            what = f"{text.dtype} numbers {tuple(text.shape)}"
        rule = "ids are those of one text, (T,) or (1, T), or inputs by name with these."
        hint = f"pass an integer tensor; {_OTHERS}"
        raise BadType(f"logit_attribution got {what} as ids.", rule, hint)
    if (text.dim() == 2 and len(text) != 1) or not text.numel():
        rule = "logit_attribution reads one text with at least one token."
        hint = "call logit_attribution once for each text."
        raise BadValue(f"logit_attribution got ids of shape {tuple(text.shape)}.", rule, hint)
    return (named if isinstance(ids, Mapping) else text.reshape(1, -1)), text.flatten()


def _check_reached(
    model: nn.Module, paths: DirectPaths, reached: Sequence[tuple[int, AttentionCall, Tensor]]
) -> None:
    """Raise `BadValue` if the outputs of heads do not reach the logits along the residual stream.

    Heads of an encoder need not, because they reach a decoder through its attention.
    """
    if len({call.problem.H for _, call, _ in reached}) > 1:
        counts = ", ".join(str(call.problem.H) for _, call, _ in reached)
        rule = "the parts of all heads are one tensor, (L, H, T)."
        hint = "pass a model with the same number of heads in every layer."
        raise BadValue(f"The layers of the {type(model).__name__} have {counts} heads.", rule, hint)
    numbers = {number for number, _, _ in reached}
    missing = [part.call.module for i, part in enumerate(paths.heads) if i not in numbers]
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and reached
    if not missing or encodes:
        return
    norms = f" The norm {paths.unknown_norms[0]!r} is not known." if paths.unknown_norms else ""
    gave = f"The heads of {missing[0]} do not reach the logits along the residual stream.{norms}"
    rule = "only norms may be between them, and no transform, as in the head of BERT."
    hint = "pass a model whose logits are the unembedding of its normed residual stream."
    raise BadValue(gave, rule, hint)


def _check_sum(model: nn.Module, attribution: LogitAttribution, paths: DirectPaths) -> None:
    """Raise `BadValue` unless the parts sum to the logit."""
    dtypes = {x.dtype for part in paths.heads for x in (part.call.z, part.written)}
    tolerance = max(_TOLERANCE, *(8 * torch.finfo(dtype).eps for dtype in dtypes))
    residue = attribution.check()
    if residue <= tolerance:
        return
    gave = f"In the {type(model).__name__} the parts miss the logit by {residue:.1g} of their sum."
    rule = "the stream must be a sum of outputs of modules and biases, and pass only norms."
    raise BadValue(gave, rule, "load the model in float32; if it is, its logits cannot be split.")


def _layers_by_block(
    reached: Sequence[tuple[int, AttentionCall, Tensor]],
) -> Callable[[Part], int | None]:
    """Return a function that finds the layer of a part: that of its block, or else the last one.

    It returns None for a part before the first attention call.
    """
    last_of = {block_of(call.module): layer for layer, (_, call, _) in enumerate(reached)}

    def layer_of(part: Part) -> int | None:
        block = block_of(part.module)
        if block is not None and block in last_of:
            return last_of[block]
        before = [layer for layer, (number, _, _) in enumerate(reached) if number < part.calls]
        return before[-1] if before else None

    return layer_of


def block_of(module: str) -> str | None:
    """Return the name of a module's block, up to the first number: model.layers.3."""
    parts = module.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1]) if numbered else None


def _by_position(x: Tensor, n: int) -> Tensor:
    """Select the first n positions of one text, (n, d); some models join texts and positions."""
    return x.reshape(-1, x.shape[-1])[:n]

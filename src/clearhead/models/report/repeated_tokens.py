"""Scores of heads on random tokens that are repeated, where no text can mislead.

The tokens are n different ones, drawn from the vocabulary, and then the same n again, as in
TransformerLens and in Olsson et al. 2022 ("prefix matching"). Every token of the second half has
one earlier copy, n tokens back.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...core.errors import BadType, BadValue
from ...core.functional.ambient import FollowedCall, ambient, listening, statistics_of
from ...core.masks import window
from ...core.problem.problem import Inputs, Problem
from ...core.stats import mass
from ...nn.token_ids import run_with_known_ids

TOKENS, TEXTS = 50, 4  # tokens before they are repeated, and how many such texts; both at most
FEWEST_TOKENS = 4


def repeated_token_scores(
    module: nn.Module, inputs: "Tensor | Mapping[str, Tensor]"
) -> list[list[dict[str, float]] | None]:
    """Run a model on random repeated tokens; return the scores of the heads of each layer.

    The scores are mean weights:

    - ``induction``: on the token after the earlier copy, over the n queries that have a copy;
    - ``induction_all``: the same, over all 2 n queries;
    - ``duplicate``, ``duplicate_all``: on the earlier copy itself, likewise;
    - ``previous``: on the token before, over the queries that have one.

    TransformerLens' induction stripe is the mean over n + 1 queries, with the last query of the
    first half, whose key is token 0; its `head_detector` divides by all queries. A layer of
    cross-attention has no scores, None. Raises `BadType` for a model that does not read token ids.
    """
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() != 2:
        gave = "Repeated tokens were requested of a model that does not read token ids."
        rule = "the repeated-token test runs the model on random tokens."
        raise BadType(gave, rule, "pass ids of shape (1, T), or leave repeated_tokens out.")
    if ambient().ranks is not None:
        rule = "the repeated-token test has a text of its own, which is not cut."
        hint = "request it outside, or leave repeated_tokens out."
        raise BadValue("Repeated tokens were requested inside distributed.sharded.", rule, hint)
    first, size = ids[:1, :1], _vocabulary(module)
    n = min(TOKENS, size // 2, (_context(module) - 1) // 2)
    if n < FEWEST_TOKENS:
        rule = f"the repeated-token test repeats at least {FEWEST_TOKENS} tokens."
        hint = "leave repeated_tokens out."
        raise BadValue(f"The model reads {_context(module)} tokens of {size}.", rule, hint)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([torch.randperm(size, generator=generator)[:n] for _ in range(TEXTS)])
    text = torch.cat([first.cpu().expand(TEXTS, 1), drawn, drawn], 1).to(ids)
    scores: list[list[dict[str, float]] | None] = []

    def on_call(call: FollowedCall) -> None:
        p = call.problem
        same = p.Tq == p.Tk == text.shape[1] and p.B == TEXTS
        scores.append(_scores(p, call.inputs, n) if same else None)

    with torch.no_grad(), listening(on_call):
        run_with_known_ids(module, _with_ids(inputs, text))
    return scores


def _scores(problem: Problem, inputs: Inputs, n: int) -> list[dict[str, float]]:
    distances = {"induction": n - 1, "duplicate": n, "previous": 1}
    groups = {
        name: window(before=d, after=0) & ~window(before=d - 1, after=0)
        for name, d in distances.items()
    }
    masses = cast(dict[str, Tensor], statistics_of(problem, inputs, [mass(groups)])["mass"])
    means = {}
    for name in ("induction", "duplicate"):  # the first token is before the random ones
        means[name] = masses[name][..., n + 1 :].mean((0, 2))
        means[f"{name}_all"] = masses[name][..., n + 1 :].sum(2).mean(0) / (2 * n)
    means["previous"] = masses["previous"][..., 1:].mean((0, 2))
    return [{name: float(mean[h]) for name, mean in means.items()} for h in range(problem.H)]


def _with_ids(inputs: "Tensor | Mapping[str, Tensor]", text: Tensor) -> Any:
    """Return the inputs with other ids, a padding mask of 1 and token types of 0."""
    if isinstance(inputs, Tensor):
        return text
    changed = {name: x for name, x in inputs.items() if not isinstance(x, Tensor)}
    if "attention_mask" in inputs:
        changed["attention_mask"] = torch.ones_like(text)
    if "token_type_ids" in inputs:
        changed["token_type_ids"] = torch.zeros_like(text)
    return changed | {"input_ids": text}


def _vocabulary(module: nn.Module) -> int:
    tables = [x.num_embeddings for x in module.modules() if isinstance(x, nn.Embedding)]
    stated = getattr(getattr(module, "config", None), "vocab_size", None)
    return int(stated or max(tables, default=0))


def _context(module: nn.Module) -> int:
    config = getattr(module, "config", None)
    stated = getattr(config, "max_position_embeddings", None) or getattr(config, "context", None)
    return int(stated or 2 * TOKENS + 1)

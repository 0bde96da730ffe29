"""`why_scale`: measure softmax over random queries and keys, with and without scaling.

A dot product of d independent terms of variance 1 has variance d. Without scaling, softmax puts
nearly all weight on one key when d is large, and its gradient vanishes. With scaling, the variance
is 1 for every d. Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import BadType, BadValue, as_count, is_iterable, kind_of, whole_number
from ..errors.limits import MOST_HEAD_SIZE, MOST_SEED
from .explain import explain
from .scaling import Scaling

SIZES = (4, 16, 64, 256, 1024)


def why_scale(
    size: int = 256,
    *,
    keys: int = 32,
    queries: int = 256,
    seed: int = 0,
    sizes: Sequence[int] = SIZES,
) -> Scaling:
    """Measure scores, weights and gradients over random normal queries and keys, by `explain`.

    `size` is the head size whose weights are shown, and is added to `sizes`. Raises `BadValue` if a
    size or a count is below 1.
    """
    rule = "a seed is a whole number from 0 to 2^63 - 1."
    seed = as_count("seed", seed, rule, "pass for example seed=0.", most=MOST_SEED)
    if not is_iterable(sizes):
        raise BadType(
            f"sizes is {kind_of(sizes)}.",
            "sizes are the head sizes to compare, in a list.",
            "pass for example sizes=[16, 64, 256].",
        )
    if whole_number(keys) == 1:
        raise BadValue(
            "keys=1.",
            "the weight of a single key is 1 for every score, so scaling has no effect.",
            "pass keys=2 or more.",
        )
    size, keys, queries = _size("size", size), _size("keys", keys), _size("queries", queries)
    sizes = sorted({size, *(_size(f"sizes[{i}]", d) for i, d in enumerate(sizes))})
    columns: dict[str, list[float]] = {
        f"{what}_{kind}": []
        for what in ("variance", "gradient", "entropy")
        for kind in ("raw", "scaled")
    }
    of_size: dict[str, Tensor] = {}  # by kind, one query's weights at the head size `size`
    source = torch.Generator("cpu").manual_seed(seed)
    for d in sizes:
        q, k = (
            torch.randn(n, d, generator=source, dtype=torch.float64, device="cpu")
            for n in (queries, keys)
        )
        for kind, scale in (("raw", 1.0), ("scaled", None)):
            trace = explain(q, k, k, scale=scale)
            weights = trace["weights"]
            scores = trace["scaled"] if "scaled" in trace else trace["scores"]
            columns[f"variance_{kind}"].append(float(scores.var()))
            columns[f"gradient_{kind}"].append(float(_jacobian_norm(weights).mean()))
            entropy = torch.special.entr(weights).sum(-1)
            columns[f"entropy_{kind}"].append(float(entropy.mean()))
            if d == size:
                of_size[kind] = weights[0].sort(descending=True).values
    return Scaling(
        keys, size, sizes, weights_raw=of_size["raw"], weights_scaled=of_size["scaled"], **columns
    )


def _size(name: str, value: object) -> int:
    rule = f"head sizes and counts are whole numbers from 1 to {MOST_HEAD_SIZE}."
    return as_count(name, value, rule, "pass a number in between.", 1, MOST_HEAD_SIZE)


def _jacobian_norm(weights: Tensor) -> Tensor:
    """Compute the Frobenius norm of diag(w) - w w^T, the derivative of softmax, for each row.

    Its square is sum(w_i^2) - 2 sum(w_i^3) + sum(w_i^2)^2.
    """
    squares = weights.square().sum(-1)
    return (squares - 2 * weights.pow(3).sum(-1) + squares.square()).clamp(min=0).sqrt()

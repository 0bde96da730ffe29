"""Principal components of vectors, exactly: `principal_components`."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.errors import BadValue, as_count
from ..core.formatting import quantity

ROUNDING = 4  # units in the last place by which a model may round a vector


class Projection(NamedTuple):
    """Vectors x, (n, D), on their first c principal components, in float64.

    points = (x - mean) @ components.T

    Attributes:
        points: the coordinates of each vector, (n, c).
        shares: the fraction of the variance along each component, (c,); in falling order.
        components: directions of length 1, (c, D). The entry with the largest magnitude of each is
            positive, the first one of equals.
        mean: the mean of the vectors, (D,).
    """

    points: Tensor
    shares: Tensor
    components: Tensor
    mean: Tensor


def principal_components(x: Tensor, count: int = 3) -> Projection:
    """Return vectors, (n, D), on their first `count` principal components.

    It is a singular value decomposition in float64 of the vectors without their mean. Components
    are left out whose singular value is at most `ROUNDING` eps |x|, with the eps of the vectors'
    dtype and the Frobenius norm, so fewer than `count` may be returned; none if all vectors are
    equal within rounding, or if there are none.

    Raises `BadType` or `BadValue` unless `count` is a whole number of 1 or more, and `BadValue` for
    NaN and infinity.
    """
    rule, hint = "it is a number of components, 1 or more.", "pass for example components=3."
    count = as_count("components", count, rule, hint, least=1)
    if not bool(x.isfinite().all()):
        raise BadValue(
            f"NaN or infinity in {int((~x.isfinite()).any(-1).sum())} of "
            f"{quantity(len(x), 'vector')}.",
            "principal components are of finite vectors.",
            "check the weights of the model.",
        )
    if not len(x):
        x = x.new_zeros(1, x.shape[1])[:0].double()
        return Projection(x[:, :0], x.sum(0)[:0], x[:0], x.sum(0))
    eps = torch.finfo(x.dtype).eps
    x = x.double()
    mean = x.mean(0)
    centred = x - mean
    _, s, rows = torch.linalg.svd(centred, full_matrices=False)
    rounding = ROUNDING * eps * torch.linalg.matrix_norm(x)
    components = rows[: min(count, int((s > rounding).sum()))]
    largest = components.abs().argmax(-1, keepdim=True)
    components = components * components.gather(-1, largest).sign()
    shares = (s.square() / s.square().sum())[: len(components)]
    return Projection(centred @ components.T, shares, components, mean)

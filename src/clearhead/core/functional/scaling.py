"""Hold the effect of dividing by sqrt(d) on softmax, which `why_scale` measures and views draw."""

import math
import textwrap
from dataclasses import dataclass

from torch import Tensor

from ..torch_state import loadable


@loadable
@dataclass(frozen=True, eq=False, repr=False)
class Scaling:
    """The effect of scaling for each head size in `sizes`; `raw` is without scaling.

    `variance` is the variance of the scores. `gradient` is the mean Frobenius norm of
    d weights / d scores of one query. `entropy` is the entropy of the weights in nats, at most
    log(keys). `weights` are the weights of one query at head size `size`, in falling order.
    """

    keys: int
    size: int
    sizes: list[int]
    variance_raw: list[float]
    variance_scaled: list[float]
    gradient_raw: list[float]
    gradient_scaled: list[float]
    entropy_raw: list[float]
    entropy_scaled: list[float]
    weights_raw: Tensor
    weights_scaled: Tensor

    def __repr__(self) -> str:
        return self.text()

    def text(self, width: int = 80) -> str:
        """Return the table, and sentences about it that are wrapped to `width` columns."""
        lines = [
            *textwrap.wrap(f"Why divide by sqrt(d)? Random vectors, {self.keys} keys.", width),
            "",
            "         variance of scores      entropy of weights     gradient of weights",
            "     d    raw       scaled        raw      scaled         raw      scaled",
        ]
        for i, d in enumerate(self.sizes):
            lines.append(
                f"{d:6}  {self.variance_raw[i]:8.2f}  {self.variance_scaled[i]:8.3f}"
                f"   {self.entropy_raw[i]:8.3f}  {self.entropy_scaled[i]:8.3f}"
                f"    {self.gradient_raw[i]:9.5f} {self.gradient_scaled[i]:9.5f}"
            )
        raw, scaled = float(self.weights_raw[0]), float(self.weights_scaled[0])
        paragraphs = [
            f"At d = {self.size} the largest weight of one query is {raw:.4f} unscaled and "
            f"{scaled:.4f} scaled (1/{self.keys} = {1 / self.keys:.4f} would be uniform).",
            "Unscaled, scores grow with d: their variance goes from "
            f"{self.variance_raw[0]:.1f} to {self.variance_raw[-1]:.1f}. Softmax then saturates: "
            "nearly all weight is on one key, and the gradient goes from "
            f"{self.gradient_raw[0]:.3f} to {self.gradient_raw[-1]:.3f}. Divided by sqrt(d), "
            "variance, entropy and gradient stay about the same.",
            f"Entropy is in nats, at most ln {self.keys} = {math.log(self.keys):.2f}; the gradient "
            "is the norm of the derivatives of the weights by the scores.",
        ]
        for paragraph in paragraphs:
            lines += ["", *textwrap.wrap(paragraph, width)]
        return "\n".join(lines)

"""Define named problems, and the error that an engine may make, for tests and benchmarks.

Sizes are distinct primes and Tq differs from Tk, so swapped dimensions cannot pass a test.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clearhead.core.masks import Causal, Mask, dense, documents, everything, lengths, prefix, window
from clearhead.core.problem.biases import Bias, alibi, bias
from clearhead.core.problem.check import Options, make_problem


@dataclass(frozen=True, eq=False)
class Case:
    """Tensors and keywords for `attention`. `learn` are the keywords' tensors with a gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    keywords: dict[str, object] = field(default_factory=dict)
    learn: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def wanted(self) -> tuple[Tensor, ...]:
        return (*self.tensors, *self.learn)


def make(
    B: int = 2,
    H: int = 6,
    G: int = 6,
    Tq: int = 13,
    Tk: int = 17,
    D: int = 7,
    Dv: int = 5,
    **keywords: object,
) -> Callable[[torch.dtype, int], Case]:
    """Return a function that draws a problem of these sizes, from a dtype and a seed.

    A tuple for `bias` or `sinks` is the shape of a tensor to draw, which gets a gradient. Other
    keywords are passed to `attention` as they are.
    """

    def build(dtype: torch.dtype, seed: int = 0) -> Case:
        source = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            # Drawn as float32 for every dtype, so that each gets the same numbers, rounded.
            return torch.randn(*shape, generator=source).to(dtype)

        tensors = draw(B, H, Tq, D), draw(B, G, Tk, D), draw(B, G, Tk, Dv)
        passed, learn = {}, []
        for name, value in keywords.items():
            if name in ("bias", "sinks") and isinstance(value, tuple):
                tensor = draw(*value)
                learn.append(tensor)
                value = bias(tensor) if name == "bias" else tensor
            passed[name] = value
        return Case(*tensors, keywords=passed, learn=tuple(learn))

    return build


def _scattered() -> Tensor:
    """Return the cells that a dense mask keeps: about half, and none in row 3."""
    keep = torch.rand(2, 1, 13, 17, generator=torch.Generator().manual_seed(1)) < 0.5
    keep[:, :, 3] = False
    return keep


PROBLEMS: dict[str, Callable[[torch.dtype, int], Case]] = {
    "full": make(),
    "one query": make(Tq=1, mask=Causal(align="end")),
    "one key": make(Tk=1),
    "one key causal": make(Tk=1, mask=Causal(align="start")),
    "square causal": make(Tq=17, mask=Causal()),
    "causal from the start": make(mask=Causal(align="start")),
    "causal to the end": make(mask=Causal(align="end")),
    "causal to the end, fully masked queries": make(Tq=17, Tk=13, mask=Causal(align="end")),
    "causal from a position": make(mask=Causal(align=[3, 2])),
    "window": make(Tq=17, mask=window(before=3, after=2)),
    "window to the end": make(mask=Causal(align="end") & window(before=5, align="end")),
    "prefix": make(Tq=17, mask=Causal() | prefix(5)),
    "lengths": make(mask=lengths(keys=[11, 0], queries=[13, 7])),
    "documents": make(Tq=17, mask=Causal() & documents([0] * 5 + [1] * 3 + [2] * 9)),
    "scattered": make(mask=dense(keep=_scattered())),
    "scattered and causal": make(mask=dense(keep=_scattered()) & Causal(align="end")),
    "not causal": make(mask=~Causal(align="start")),
    "nobody sees anything": make(mask=~everything),
    "grouped": make(G=2, mask=Causal(align="end")),
    "one key head": make(G=1),
    "bias": make(bias=(6, 13, 17)),
    "bias per key": make(bias=(2, 1, 1, 17), mask=Causal(align="end")),
    "alibi": make(Tq=17, bias=alibi(), mask=Causal()),
    "soft cap": make(softcap=1.5, scale=1.0),
    "sinks": make(sinks=(6,), mask=Causal(align="end")),
    "sinks and fully masked queries": make(Tq=17, Tk=13, G=3, sinks=(6,), mask=Causal(align="end")),
    "everything at once": make(
        G=3,
        mask=Causal(align="end") & window(before=7, align="end"),
        bias=(2, 6, 13, 17),
        softcap=5.0,
        sinks=(6,),
        scale=0.7,
    ),
    "dropout by seed": make(G=3, dropout=0.3, seed=11, mask=Causal(align="end")),
    "wide values": make(D=3, Dv=19),
    "large": make(B=1, H=2, G=1, Tq=307, Tk=613, D=16, Dv=16, mask=Causal(align="end")),
    "large scores": make(scale=300.0),
    "no batch": make(B=0),
    "no queries": make(Tq=0),
    "no keys": make(Tk=0),
}


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = everything,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """Compute attention in plain torch, as it is usually written, in the dtype of the inputs.

    An engine may err twice as much as this. Dropout drops the same weights as clearhead, because
    random draws cannot be compared.
    """
    (B, H, Tq, D), Tk = q.shape, k.shape[2]
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    x = q @ k.mT * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    if bias is not None:
        problem, _ = make_problem(q, k, v, Options(bias=bias))
        x = x + bias.block(problem.grid, slice(None), slice(None), x)
    x = x.masked_fill(~mask.to_bool(Tq, Tk, B=B, H=H), float("-inf"))
    if sinks is not None:
        x = torch.cat([x, sinks.to(x).reshape(1, -1, 1, 1).expand(B, H, Tq, 1)], -1)
    weights = torch.softmax(x, -1)[..., :Tk]
    weights = weights.masked_fill(torch.isneginf(x[..., :Tk]), 0.0)
    if dropout:
        problem, _ = make_problem(q, k, v, Options(dropout=dropout, seed=seed))
        weights = weights * problem.survivors(slice(None), slice(None)).to(weights.dtype)
    return weights @ v


def within_yardstick(got: Tensor, true: Tensor, yardstick: Tensor, size: float) -> tuple[bool, str]:
    """Is `got` at most twice as far from the float64 `true` as `yardstick`, plus four roundings?

    Scores, weights, sum and output each round once, by at most eps times `size`, the largest number
    in them. Returns the verdict, and the error with its limit as text. All three tensors have one
    shape; `got` and `yardstick` have one dtype.
    """
    got, true, yardstick = got.detach(), true.detach(), yardstick.detach()
    if not true.numel():
        return got.shape == true.shape, "empty"
    if not bool(torch.isfinite(got).all()):
        return False, "not finite"
    allowed = 2 * float((yardstick.double() - true).abs().nan_to_num().max())
    allowed += 4 * torch.finfo(got.dtype).eps * size
    error = float((got.double() - true).abs().max())
    return error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"

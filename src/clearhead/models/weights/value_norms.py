"""The norms of what the values of a call write: |v W_O| for every head and key.

`watch` multiplies weights by them (``value_weighted``, ``by="value"``). W_O is the part of the
layer's output projection that reads the head, times a layer scale after it. The norms are computed
from a square root of W_O W_O^T, so a key costs Dv x Dv multiplications instead of Dv x d.

``by="relative_value"`` takes |(v - v_first) W_O|, with the value of the text's first token. As
sum_j w_j = 1, the output without this value is sum_j w_j (v_j - v_first).

Letters: B batch, H query heads, G key/value heads, Tk keys, Dv value size, d model size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...core.errors import BadValue
from ...core.functional.ambient import over_ranks, token_positions
from ...core.masks.text_positions import PerText
from ...core.problem.problem import Inputs, Problem
from ...core.torch_state import has_values
from ...hf.projections import OutputProjection, output_projection, projection_parameter


class _Layer(NamedTuple):
    root: Tensor  # (H, Dv, Dv): |v W_O| = |v root|
    parameter: Tensor  # of the model, which holds W_O
    version: int  # of the parameter, which a step of training changes in place
    sample: Tensor  # of its numbers, because torch counts no write to `parameter.data`

    def differs(self, parameter: Tensor) -> bool:
        """Was the parameter changed or replaced?"""
        is_other = parameter.data_ptr() != self.parameter.data_ptr()
        if is_other or self.version != _version(parameter):
            return True
        return has_values(parameter) and not torch.equal(self.sample, _sample(parameter))


class ValueNorms:
    """The norms for the calls of a model, and a root of W_O W_O^T for each.

    The first call of every module is verified, and the first one after its weights have changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: dict[str, _Layer] = {}
        self._new: OutputProjection | None = None  # of the last call, if it is not verified
        self._unverified: dict[str, tuple[OutputProjection, Tensor]] = {}  # and output of attention

    @torch.no_grad()
    def root(self, name: str, p: Problem) -> Tensor:
        """Return R, (H, Dv, Dv), with |x R| = |x W_O|, for a call of the module `name`.

        `expect` receives the output of the call later.

        Raises `BadValue` if the output projection of the module is not found.
        """
        layer, self._new = self._layers.get(name), None
        now = layer and projection_parameter(self._model, name, p.H, p.Dv)
        if layer is None or (now is not None and layer.differs(now)):
            linear = output_projection(self._model, name, p.H, p.Dv)
            projection = linear.scaled(self._model)
            weight = projection.weight.double()
            root = _root(weight @ weight.mT, projection)
            parameter = projection.parameter
            version, sample = _version(parameter), _sample(parameter).clone()
            layer = _Layer(root, parameter, version, sample)
            if projection is linear:  # a layer scale may change without the parameter
                self._layers[name] = layer
            self._new = projection
        return layer.root.to(p.device, p.wide)

    def expect(self, p: Problem, out: Tensor) -> None:
        """Receive the output of the call whose root was returned last."""
        if self._new is not None:
            heads = out.detach().reshape(p.B, p.H, out.shape[-2], p.Dv)
            self._unverified[self._new.module] = self._new, heads

    def verify(self, name: str, returned: object) -> None:
        """Compare what the module `name` returned with what the heads of its call write."""
        if returned is not None and name in self._unverified:
            projection, heads = self._unverified.pop(name)
            projection.check(heads, returned)

    def must_be_verified(self) -> None:
        """Raise `BadValue` if an output projection that was found did not run."""
        for name in self._unverified:
            gave = f"The output projection {name} did not run after its attention call."
            rule = "the norms of values are those of the projection that reads the heads."
            raise BadValue(gave, rule, "call it as a module, or leave out statistics of values.")


def _root(gram: Tensor, projection: OutputProjection) -> Tensor:
    """Return R with R R^T = W_O W_O^T, (H, Dv, Dv); `gram` is the product."""
    if not bool(gram.sum().isfinite()):  # products of fp32 numbers do not overflow in fp64
        projection.must_be_finite()
    root, failed = torch.linalg.cholesky_ex(gram)
    if not bool(failed.any()):
        return root
    eigenvalues, vectors = torch.linalg.eigh(gram)  # the matrix of a head has not full rank
    return vectors * eigenvalues.clamp(min=0).sqrt().unsqueeze(-2)


def _version(parameter: Tensor) -> int:
    """Return a number that changes with each write; tensors of inference mode have only one."""
    return 0 if parameter.is_inference() else parameter._version


def _sample(parameter: Tensor) -> Tensor:
    """Return about 32 x 32 numbers of a matrix, a view of it."""
    rows, columns = (max(1, size // 32) for size in parameter.shape)
    return parameter[::rows, ::columns]


@torch.no_grad()
def norms(root: Tensor, p: Problem, inputs: Inputs, first: PerText | None = None) -> Tensor:
    """Compute |v W_O|, (B, H, k), from the root of W_O, of the keys that are here.

    With `first`, the key of each text's first token, it is |(v - v_first) W_O|. Inside `sharded`,
    one rank has the value of that key, and adds it to the zeros of the others.
    """
    per_key_head = root.unflatten(0, (p.G, p.H // p.G))
    values = inputs.v.detach().reshape(p.B, p.G, 1, inputs.v.shape[-2], p.Dv).to(p.wide)
    if first is not None:
        keys = token_positions(0, values.shape[3], torch.long, p.device)
        is_first = keys == torch.tensor(first, device=p.device).reshape(-1, 1, 1, 1)
        of_first = values.masked_fill(~is_first.unsqueeze(-1), 0.0).sum(3, keepdim=True)
        values = values - over_ranks(of_first)
    return (values @ per_key_head).norm(dim=-1).flatten(1, 2)

"""The parts of the contrast of one query of a head, or of its mean over queries.

Letters: C components, H heads, G KV heads, Tq queries, Tk keys, D head dimension.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...core.engines import choice
from ...core.errors import BadValue
from ...core.errors.limits import STRIP_CELLS
from ...core.problem.problem import Inputs
from ...core.torch_state import own_dtypes
from ..follow.refused_models import weights_must_be_whole
from ..weights.attention_weights import rotary_of_call
from .result import Terms
from .score_paths import Component, ScoreRows, ScoreRun, Side, record_scores, score_rows

SIDES: tuple[Side, Side] = "key", "query"
TOLERANCE = 1e-4  # of the absolute sum of the parts; larger in 16-bit types


class Split:
    """The contrast of one query, or its mean over n queries, and what its parts are.

    With M = e - u, (Tq, Tk), the mean of sum_j M_ij scale q_i . k_j is sum_j w_j . k_j with
    w = scale M^T q / n, and sum_i v_i . q_i with v = scale M k / n. So its parts are those of one
    vector for each key, and of one for each query. `why` describes e and u.

    M is computed in strips of queries, one at a time. For e = A and u uniform, both products are
    attention: A k with the keys as values, and A^T q its gradient. So an engine computes them.
    """

    rows: ScoreRows  # of the last strip; with one query, all of them
    contrast: Tensor  # M of the same queries
    to_keys: Tensor  # w, (Tk, D)
    to_queries: Tensor  # scale M k, (n, D)
    to_means: Tensor  # scale M (mean k), (n, D)
    of_bias: Tensor  # sum_j M_ij bias_ij, (n,)

    def __init__(
        self, run: ScoreRun, h: int, query: int | None = None, key: int | None = None,
        against: str | int = "others",
    ) -> None:  # fmt: skip
        self.run, self.h, self.rotary = run, h, run.rotary
        p = run.problem
        self.g = h // (p.H // p.G)
        self.at = slice(0, p.Tq) if query is None else slice(query, query + 1)
        # NaN is only where nothing is visible: `score_rows` refuses it elsewhere.
        q, self.k = (x.detach().double().nan_to_num() for x in (run.q[0, h], run.k[0, self.g]))
        self.q, self.mean_q = q[self.at], self._mean(q)[self.at]
        self.weights, self.bias = self.k.new_zeros(2, p.Tk)
        self.visible, self.score, self.count = self.weights.bool(), 0.0, 0
        self.of_bias = self.q.new_zeros(len(self.q))
        keys = torch.cat([self.k, self._mean(self.k)], -1)
        of_all = query is None and key is None and against == "others" and p.bias is None
        if of_all and not (p.masked and p.key_ranges.keys_per_query().shape[1] > 1):
            to_keys, to_queries = self._sum_by_engine(keys)
        else:
            to_keys, to_queries = self._sum_strips(keys, query, key, against)
        if not self.count:
            rule = "the mean is over queries that do."
            hint = "pass another key, or against another one."
            raise BadValue("No query looks at the key and at what it is compared with.", rule, hint)
        self.weights, self.bias = self.weights / self.count, self.bias / self.count
        self.score = self.score / self.count
        self.to_keys = p.scale / self.count * to_keys
        self.to_queries, self.to_means = (p.scale * to_queries).chunk(2, -1)
        self.along, self.of_key = self.to_keys, torch.ones_like(self.weights)
        if query is not None:  # the scores of all keys, whose sum with e - u is the contrast
            self.along, self.of_key = (p.scale * self.q).expand_as(self.k), self.contrast[0]
            self.bias = self.rows.bias[0]

    @torch.no_grad()
    def _sum_strips(
        self, keys: Tensor, query: int | None, key: int | None, against: str | int
    ) -> tuple[Tensor, Tensor]:
        """Return M^T q and M [k, mean k], and sum over the queries what else is needed."""
        p = self.run.problem
        to_keys, to_queries = torch.zeros_like(self.k), self.q.new_zeros(len(self.q), keys.shape[1])
        size = max(1, STRIP_CELLS // p.Tk)
        for start in range(0, len(self.q), size):
            strip = slice(start, min(start + size, len(self.q)))
            at = slice(self.at.start + start, self.at.start + strip.stop)
            self.rows, weights = score_rows(self.run, at, self.h)
            e, self.contrast, averaged = _contrasts(query, key, against, self.rows, weights)
            to_keys += self.contrast.T @ self.q[strip]
            to_queries[strip] = self.contrast @ keys
            self.weights += averaged.double() @ weights
            self.visible |= self.rows.visible[averaged].any(0)
            if p.bias is not None:
                of_bias = self.contrast * self.rows.bias
                self.bias += of_bias.sum(0)
                self.of_bias[strip] = of_bias.sum(1)
            self.score += float(e.flatten() @ self.rows.scores.flatten())
            self.count += int(averaged.sum())
        return to_keys, to_queries

    def _sum_by_engine(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same for the weights of all queries, against all keys that each may see.

        A second head, with queries of 0, has uniform weights. A last column of the values, of 1,
        has the sum of a query's weights, which is below 1 with a sink.
        """
        p, h, D = self.run.problem, self.h, self.k.shape[1]
        score_rows(self.run, slice(0, 1), h)  # checks the weights
        sinks = None if p.sinks is None else torch.stack([p.sinks[h], p.sinks[h] - torch.inf])
        v = torch.cat([keys, torch.ones_like(keys[:, :1])], -1)[None, None].to(p.wide)
        v.requires_grad_()
        inputs = Inputs(torch.stack([self.q, 0 * self.q])[None].to(v), self.k[None, None].to(v), v)
        both = replace(
            p, H=2, G=1, Dv=v.shape[-1], dtype=v.dtype, sinks=sinks, grad=True, input_dims=4
        )
        out = choice.choose(both, "auto").compute(both, inputs)
        means = out[0].detach().double()
        sums, sees = means[..., -1:], means[1, :, -1] > 0
        along = torch.zeros_like(means)
        along[..., :D] = self.q / sums * sums.new_tensor([1, -1]).view(2, 1, 1)
        along[0, :, -1] = along[1, :, D] = 1.0
        along = along.where(sees.unsqueeze(-1), 0)
        to = torch.autograd.grad(out, v, along[None].to(out))[0][0, 0].double()
        means = (means[..., :-1] / sums).where(sees.unsqueeze(-1), 0)
        self.weights, self.visible, self.count = to[:, -1], to[:, D] > 0, int(sees.sum())
        self.score = p.scale * float((self.q * means[0, :, :D]).sum())
        return to[:, :D], means[0] - means[1]

    def split(self) -> None:
        """Compute the parts of the components, for all keys and queries."""
        by_key = self._parts("key", self.along).masked_fill(~self.visible, 0.0)
        by_query = self._parts("query", self.to_queries / self.count)
        of_keys = (self.along * self.k).masked_fill(~self.visible.unsqueeze(-1), 0.0)
        self._must_sum("key", by_key, of_keys)
        self._must_sum("query", by_query, self.to_queries * self.q / self.count)
        of_keys = of_keys.sum(-1)
        self.total = (of_keys + self.bias) @ self.of_key
        wrote = [x for x in range(len(by_key)) if bool(by_key[x].any() or by_query[x].any())]
        self.indices = torch.tensor(wrote, device=by_key.device)
        self.components = [self.run.components[x] for x in wrote]
        self.by_key, self.queries = by_key[self.indices], by_query[self.indices].sum(-1)
        if self.run.problem.bias is not None:
            self.components.append(Component("distance", None, None, ""))
            self.by_key = torch.cat([self.by_key, self.bias[None]])
            self.queries = torch.cat([self.queries, (self.bias @ self.of_key).reshape(1)])
        self.keys = self.by_key @ self.of_key

    def totals(self, side: Side) -> Tensor:
        """Sum the parts of each component over all queries, (C,); a position bias is the last."""
        vectors, x = self.to_queries, self.q
        if side == "key":
            vectors, x = self.count * self.to_keys, self.k
        totals = self.run.totals(side, self._direction(side, vectors))
        self._must_sum(side, totals.unsqueeze(1), (vectors * x).reshape(1, -1))
        return torch.cat([totals, self.of_bias.sum().reshape(1)])

    def _parts(self, side: Side, vectors: Tensor) -> Tensor:
        """Multiply vectors of keys or queries by what each component wrote, (C, Tk) or (C, n)."""
        at = slice(None) if side == "key" else self.at
        return self.run.parts(side, self._direction(side, vectors), at)

    def _direction(self, side: Side, vectors: Tensor) -> Tensor:
        """Return the gradient of ``sum(vectors * x)`` by x, for keys (Tk, D) or queries (n, D)."""
        to = torch.zeros_like(self.run.k if side == "key" else self.run.q)
        to[(0, self.g) if side == "key" else (0, self.h, self.at)] = vectors.to(to.dtype)
        return to

    def _must_sum(self, side: Side, parts: Tensor, products: Tensor) -> None:
        """Raise `BadValue` unless the parts (C, n) sum to the scores, the sums of products (n, D).

        Rounding is that of the products, also where they cancel.
        """
        sizes = parts.abs().sum(0)
        sizes = sizes.maximum(0.05 * products.abs().sum(-1)).clamp(
            min=max(1e-30, 1e-6 * float(sizes.max()))
        )
        missed = (parts.sum(0) - products.sum(-1)).abs() / sizes
        worst = float(missed.max())
        if not worst <= max(TOLERANCE, 8 * torch.finfo(self.run.problem.dtype).eps):
            what = "keys" if side == "key" else "queries"
            gave = f"The parts of the {what} miss a score by {worst:.1g} of their absolute sum."
            rule = "the stream must be a sum of what modules write, position by position, uncached."
            hint = "load the model in float32; if it is, its scores cannot be split."
            raise BadValue(gave, rule, hint)

    def sources(self, side: Side, layer: int) -> Tensor:
        """Split the parts of an earlier layer's heads by the token that they read from, (H, T)."""
        vectors = self.to_queries / self.count
        if side == "key":
            vectors = self.along * self.of_key.unsqueeze(-1)
        return self.run.sources(side, self._direction(side, vectors), layer)

    def factors(self, side: Side) -> Tensor:
        """Compute what each component wrote of one query, or of its keys' contrast, (C, D)."""
        weights = self.of_key if side == "key" else self.of_key.new_ones(1)
        features = torch.eye(self.q.shape[1], dtype=self.q.dtype, device=self.q.device)
        columns = [self._parts(side, torch.outer(weights, x)).sum(-1) for x in features]
        return torch.stack(columns, 1)[self.indices]

    def _mean(self, x: Tensor) -> Tensor:
        """Return the mean of queries or keys (T, D) before rotation, rotated to each position."""
        at = torch.arange(len(x), device=x.device)
        if self.rotary is None:
            return x.mean(0).expand_as(x)
        return self.rotary.rotated(self.rotary.rotated(x, -at).mean(0).expand_as(x), at)

    def row_terms(self) -> Tensor:
        """Split the contrast of each query into the four `Terms`, (n, 4)."""
        products = [
            (a * b).sum(-1)
            for b in (self.to_means, self.to_queries - self.to_means)
            for a in (self.mean_q, self.q - self.mean_q)
        ]
        return torch.stack([products[0] + self.of_bias, *products[1:]], -1)

    def terms(self) -> Terms:
        """Split the contrast by the means of queries and keys before rotation; see `Terms`."""
        return Terms(*map(float, self.row_terms().sum(0) / self.count))

    def further(self, key: int, by: Tensor) -> Tensor | None:
        """Return by how much the score of a key changes if its vector is further back."""
        if self.rotary is None or self.bias.any():  # a mask may be a bias of 0
            return None
        moved = self.rotary.rotated(self.k[key].expand(len(by), -1), -by.to(self.k.device))
        return (self.run.problem.scale * (moved - self.k[key]) @ self.q[0]).float()

    def frequencies(self) -> Tensor | None:
        """Split the contrast by rotary frequency, (r/2 + 1,); the last is what is not rotated."""
        if self.rotary is None:
            return None
        products = (self.to_keys * self.k).sum(0)
        r = 2 * len(self.rotary.frequencies)
        pairs = products[:r].unflatten(0, (-1, 2) if self.rotary.interleaved else (2, -1))
        summed = pairs.sum(-1 if self.rotary.interleaved else 0)
        return torch.cat([summed, products[r:].sum().reshape(1)]).float()


def _contrasts(
    query: int | None, key: int | None, against: str | int, rows: ScoreRows, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return e and e - u of some queries, (n, Tk) each, with e the key or the weights, and which
    queries look at something of both, (n,). e and u are 0 for the others.

    Raises `BadValue` if `query`, the only one of these, does not look at both.
    """
    at = torch.arange(weights.shape[1], device=weights.device)
    others = rows.visible if key is None else rows.visible & (at != key)
    if not isinstance(against, str):
        others = others & (at == against)
    e = weights if key is None else rows.visible & (at == key)
    u = weights if against == "weights" else others
    of_e, of_u = e.sum(-1), u.sum(-1)
    both = (of_e > 0) & ((of_u > 0) | (against == "nothing"))
    if query is not None and not bool(both):
        keys = rows.visible[0].nonzero().flatten().tolist()
        some = f"{', '.join(map(str, keys[:8]))}{', ...' if len(keys) > 8 else ''}"
        gave = f"Query {query} looks at {len(keys)} keys ({some}); why got {key=} and {against=}."
        rule = "it must look at the key, and at something else to compare with."
        hint = 'pass keys that it looks at, or against="nothing" for the score itself.'
        raise BadValue(gave, rule, hint)
    e = e * (both.double() / of_e).nan_to_num().unsqueeze(-1)
    if against == "nothing":
        return e, e, both
    return e, e - u * (both.double() / of_u).nan_to_num().unsqueeze(-1), both


class HeadReasons(NamedTuple):
    """Why the heads of a layer look at their keys more than at all keys that they see.

    `terms` are those of `Terms` for each query, (H, Tq, 4), whose sum is the contrast of the query.
    `key_parts` and `query_parts` are sums over all queries, by what wrote the keys and the queries,
    (H, C), the last of which is a position bias. Each sums to the sum of all contrasts.
    """

    terms: Tensor
    components: tuple[Component, ...]
    key_parts: Tensor
    query_parts: Tensor


@torch.inference_mode(False)  # it needs gradients inside torch.no_grad(), too
@torch.enable_grad()
def reasons_of_heads(model: nn.Module, ids: Tensor) -> list[HeadReasons]:
    """Split what `why` splits with ``over="rows"``, for all heads of a model and the ids (T,).

    Raises the errors of `why`, and `BadValue` if the rotation of a layer is unknown.
    """
    weights_must_be_whole("why", model)
    layers = []
    with own_dtypes():
        for run in record_scores(model, ids[None], None):
            run.must_be_linear()
            run.rotary = rotary_of_call(model, run.attention, run.inside)
            splits = [Split(run, h) for h in range(run.problem.H)]
            keys, queries = (torch.stack([x.totals(of) for x in splits]) for of in SIDES)
            components = *run.components, Component("distance", None, None, "")
            terms = torch.stack([x.row_terms() for x in splits])
            layers.append(HeadReasons(terms, components, keys, queries))
    return layers

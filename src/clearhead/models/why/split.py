"""The parts of the contrast of one query of a head, or of its mean over queries.

Letters: C components, H heads, G KV heads, Tq queries, Tk keys, D head dimension.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...core.errors import BadValue
from ...core.errors.limits import STRIP_CELLS
from ..weights.norms_and_rotations import Rotary
from .result import Terms
from .score_paths import TOLERANCE, Component, ScoreRows, ScoreRun, Side, score_rows

_AT_ONCE = 16  # features whose gradients are in memory
# Return e and e - u of some queries, (n, Tk) each, and which of them are in the mean, (n,): both
# are 0 for the others. See `why`.
Contrasts = Callable[[ScoreRows, Tensor], tuple[Tensor, Tensor, Tensor]]


class Split:
    """The parts of the contrast of one query, or of its mean over n queries.

    With M = e - u, (Tq, Tk), the mean of sum_j M_ij scale q_i . k_j is sum_j w_j . k_j with
    w = scale M^T q / n, and sum_i v_i . q_i with v = scale M k / n. So its parts are those of one
    vector for each key, and of one for each query. Strips of M are in memory, one at a time.
    """

    rows: ScoreRows  # of the last strip; with one query, all of them
    contrast: Tensor  # M of the same queries
    to_keys: Tensor  # w, (Tk, D)

    def __init__(
        self, run: ScoreRun, query: int | None, h: int, contrasts: Contrasts, rotary: Rotary | None
    ) -> None:
        self.run, self.h, self.rotary = run, h, rotary
        p = run.problem
        self.g = h // (p.H // p.G)
        self.at = slice(0, p.Tq) if query is None else slice(query, query + 1)
        # NaN is only where nothing is visible: `score_rows` refuses it elsewhere.
        q, self.k = (x.detach().double().nan_to_num() for x in (run.q[0, h], run.k[0, self.g]))
        self.q, self.mean_q = q[self.at], self._mean(q)[self.at]
        self._sum(contrasts)
        self.along, self.of_key = self.to_keys, torch.ones_like(self.weights)
        if query is not None:  # the scores of all keys, whose sum with e - u is the contrast
            self.along, self.of_key = (p.scale * self.q).expand_as(self.k), self.contrast[0]
            self.bias = self.rows.bias[0]
        self._split()

    @torch.no_grad()
    def _sum(self, contrasts: Contrasts) -> None:
        """Sum over the queries what the parts need, and divide by their number."""
        p, D = self.run.problem, self.k.shape[1]
        q = torch.cat([self.q, self.mean_q], -1)
        to_keys, to_queries = self.k.new_zeros(p.Tk, 2 * D), torch.zeros_like(self.q)
        self.weights, self.bias = self.k.new_zeros(2, p.Tk)
        self.visible, score, count = self.weights.bool(), 0.0, 0
        size = max(1, STRIP_CELLS // p.Tk)
        for start in range(0, len(q), size):
            strip = slice(start, min(start + size, len(q)))
            at = slice(self.at.start + start, self.at.start + strip.stop)
            self.rows, weights = score_rows(self.run, at, self.h)
            e, self.contrast, averaged = contrasts(self.rows, weights)
            to_keys += self.contrast.T @ q[strip]
            to_queries[strip] = self.contrast @ self.k
            self.weights += averaged.double() @ weights
            self.visible |= self.rows.visible[averaged].any(0)
            if p.bias is not None:
                self.bias += (self.contrast * self.rows.bias).sum(0)
            score += float(e.flatten() @ self.rows.scores.flatten())
            count += int(averaged.sum())
        if not count:
            raise BadValue(
                "No query looks at the key and at what it is compared with.",
                "the mean is over queries that do.",
                "pass another key, or against another one.",
            )
        self.weights, self.bias = self.weights / count, self.bias / count
        self.score, self.count = score / count, count
        self.to_keys, self.to_means = (p.scale / count * to_keys).split(D, -1)
        self.to_queries = p.scale / count * to_queries

    def _split(self) -> None:
        by_key = self._parts("key", self.along[None])[0].masked_fill(~self.visible, 0.0)
        by_query = self._parts("query", self.to_queries[None])[0]
        of_keys = (self.along * self.k).sum(-1).masked_fill(~self.visible, 0.0)
        self._must_sum("keys", by_key, of_keys)
        self._must_sum("queries", by_query, (self.to_queries * self.q).sum(-1))
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

    def _parts(self, side: Side, vectors: Tensor) -> Tensor:
        """Multiply K sets of a vector for each key or query by what each component wrote of it,
        (K, C, Tk) or (K, C, n)."""
        at = slice(None) if side == "key" else self.at
        return self.run.parts(side, [self._direction(side, x) for x in vectors], at)

    def _direction(self, side: Side, vectors: Tensor) -> Tensor:
        """Return the gradient of ``sum(vectors * x)`` by x, for keys (Tk, D) or queries (n, D)."""
        to = torch.zeros_like(self.run.k if side == "key" else self.run.q)
        to[(0, self.g) if side == "key" else (0, self.h, self.at)] = vectors.to(to.dtype)
        return to

    def _must_sum(self, of: str, parts: Tensor, wanted: Tensor) -> None:
        """Raise `BadValue` unless the parts (C, n) sum to the scores (n,)."""
        sizes = parts.abs().sum(0)
        missed = (parts.sum(0) - wanted).abs() / sizes.clamp(
            min=max(1e-30, 1e-6 * float(sizes.max()))
        )
        worst = float(missed.max())
        if not worst <= max(TOLERANCE, 8 * torch.finfo(self.run.problem.dtype).eps):
            raise BadValue(
                f"In the {type(self.run.model).__name__} the parts of the {of} miss a score by "
                f"{worst:.1g} of their absolute sum.",
                "the stream must be a sum of what modules with weights write, position by "
                "position, without a cache.",
                "load the model in float32; if it is, its scores cannot be split.",
            )

    def sources(self, side: Side, layer: int) -> Tensor:
        """Split the parts of an earlier layer's heads by the token that they read from, (H, T)."""
        vectors = self.to_queries
        if side == "key":
            vectors = self.along * self.of_key.unsqueeze(-1)
        return self.run.sources(side, self._direction(side, vectors), layer)

    def factors(self, side: Side) -> Tensor:
        """Compute what each component wrote of one query, or of its keys' contrast, (C, D)."""
        weights = self.of_key if side == "key" else self.of_key.new_ones(1)
        features = torch.eye(self.q.shape[1], dtype=self.q.dtype, device=self.q.device)
        size = len(self.k) if side == "key" else 1
        columns = [
            self._parts(side, some[:, None].expand(-1, size, -1))[:, self.indices] @ weights
            for some in features.split(_AT_ONCE)
        ]
        return torch.cat(columns).T

    def _mean(self, x: Tensor) -> Tensor:
        """Return the mean of queries or keys (T, D) before rotation, rotated to each position."""
        at = torch.arange(len(x), device=x.device)
        if self.rotary is None:
            return x.mean(0).expand_as(x)
        return self.rotary.rotated(self.rotary.rotated(x, -at).mean(0).expand_as(x), at)

    def terms(self) -> Terms:
        """Split the contrast by the means of queries and keys before rotation; see `Terms`."""
        mean = self._mean(self.k)
        rest, of_rest = self.k - mean, self.to_keys - self.to_means
        products = ((a * b).sum() for b in (mean, rest) for a in (self.to_means, of_rest))
        position, *others = map(float, products)
        return Terms(position + float(self.bias @ self.of_key), *others)

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

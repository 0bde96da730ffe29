"""What `why` returns: the parts of a score, and their sources.

Letters: C components, T tokens, Tk keys.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...core.errors import BadValue, as_count, as_index
from ...core.files.results import Savable, data_frame
from ...core.formatting import ShownInNotebook, visible
from ...core.torch_state import loadable, own_dtypes
from .score_paths import Component

if TYPE_CHECKING:
    import pandas

_LISTED = 6  # parts that are printed for each side


@loadable
class Terms(NamedTuple):
    """Four terms that sum to the contrast.

    With m + r for queries and n + t for keys, before rotation, these are m . n (a function of the
    distance, with the position bias), r . n, m . t and r . t. m and n are the means over all
    queries and keys of the head in this text, which is a convention. Positions that are written
    into the stream (GPT-2) are components instead.
    """

    position: float
    query_by_position: float
    key_alone: float
    match: float


@loadable
class Check(NamedTuple):
    """What the weight becomes without a component, in the keys or the query of the head.

    `frozen` follows from the parts, `edited` from a path edit (`edits.path` with a zero ablation,
    and everything but heads in between recomputed). `agrees` is False if one of them raises the
    weight and the other lowers it, or if they order this part and another checked one of its side
    differently; differences of weights below 0.01 do not count.
    """

    component: Component
    of: str
    part: float
    weight: float
    frozen: float
    edited: float
    agrees: bool


@loadable
@dataclass(frozen=True, repr=False)
class Why(ShownInNotebook, Savable):
    """The parts of the contrast of a query with a key, or with its row if `key` is None.

    With ``over="rows"``, `query` is None, and all parts, the score, the weights and the contrast
    are means over `rows` queries.

    Attributes:
        layer, head, query, key, against: the arguments; all numbers count from 0.
        rows: the number of queries, 1 for one query.
        tokens: the tokens of the keys, or None.
        visible: the positions of the keys that the query, or one of them, may look at.
        score: the score, with the position bias and before a soft cap; of a row, its mean under the
            weights.
        weight: the weight of the key; of a row, the largest weight.
        contrast: the score minus that of what it is compared with.
        components: what wrote the parts, C of them.
        key_parts, query_parts: the parts of the contrast, by what wrote the keys, and by what wrote
            the query, (C,) each. Both sum to `contrast`.
        by_key: the score of each key by what wrote it, (C, Tk); 0 for keys that are not visible.
            With ``over="rows"``, what each key adds to `key_parts`, which are its sums over keys.
        key_sources: the largest part of the keys by the token that its head read from, (T,); None
            if no head wrote it. See `sources`.
        weights: the weights of the query, (Tk,).
        softcap: the soft cap that follows the sum, or None. Then the contrast is not that of
            logarithms of weights.
        terms: four terms; None if the rotation of the layer is not known, see `remarks`.
        frequencies: the contrast without the position bias by rotary frequency, and at last what is
            not rotated; None without a rotation.
        remarks: what could not be computed, and the reason.
        checks: what path edits show, with ``check=True``.
    """

    layer: int
    head: int
    query: int | None
    key: int | None
    against: str | int
    rows: int
    tokens: tuple[str, ...] | None
    visible: Tensor
    score: float
    weight: float
    contrast: float
    components: tuple[Component, ...]
    key_parts: Tensor
    query_parts: Tensor
    by_key: Tensor
    key_sources: Tensor | None
    weights: Tensor
    softcap: float | None
    terms: Terms | None
    frequencies: Tensor | None
    remarks: tuple[str, ...]
    checks: tuple[Check, ...] = ()
    _split: Any = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is saved: all but the run, from which sources and pairs are computed."""
        return {**self.__dict__, "_split": None}

    @own_dtypes()
    def sources(self, layer: int, head: int, of: str = "key") -> Tensor:
        """Split the part of an earlier head by the token that it read from, (T,).

        Part t is the weight of that head on t times the value of t, as the keys read it: that of
        the key minus those of the keys it is compared with. With ``of="query"`` it is what the
        query reads. The parts sum to the head's part in `key_parts` or `query_parts`, except for
        what an edit of its output changed.

        Raises `BadValue` for a head that is not an earlier one, and for a loaded result.
        """
        self._parts("sources", of)
        rule = f"earlier layers are 0 to {self.layer - 1}."
        layer = as_index("Layer", layer, self.layer, rule)
        parts = self._with_run().sources(of, layer)
        return parts[as_index("Head", head, len(parts))].float()

    @own_dtypes()
    def pairs(self) -> Tensor:
        """Compute the part of each pair of a query's and a key's component, (C, C).

        The rows sum to `query_parts`, the columns to `key_parts`; a position bias is on the
        diagonal. It takes two backward passes for each of the D features, and many pairs cancel.
        Raises `BadValue` for a loaded result and for a mean over rows.
        """
        split = self._with_run()
        if self.query is None:
            gave = f"This result is a mean over {self.rows} queries."
            raise BadValue(gave, "pairs are those of one query.", "call why with a query.")
        pairs = split.run.problem.scale * split.factors("query") @ split.factors("key").T
        if len(self.components) > len(pairs):
            pairs = torch.block_diag(pairs, self.key_parts[-1:].to(pairs))
        return pairs.float()

    @own_dtypes()
    def further(self, by: Tensor) -> Tensor | None:
        """Return by how much the score changes if the key is `by` tokens further back, (n,).

        `by` has n numbers. The vector of the key before rotation stays, so the contrast changes by
        the same. None without a rotation that is known, with a position bias, and of a row. Raises
        `BadValue` for a loaded result.
        """
        split, is_pair = self._with_run(), self.key is not None and self.query is not None
        return split.further(self.key, by) if is_pair else None

    def _with_run(self) -> Any:
        if self._split is None:
            rule = "sources and pairs follow from the run of the model, which is not saved."
            raise BadValue("This result was loaded from a file.", rule, "call why again.")
        return self._split

    def largest(self, of: str = "key", n: int = _LISTED) -> list[tuple[Component, float]]:
        """Return the n largest parts by absolute value, with their components.

        `of` is "key" or "query"; `BadValue` is raised for anything else, and for a negative n.
        """
        parts = self._parts("largest", of)
        n = as_count("n", n, "n is a number of parts.", f"there are {len(parts)} parts.")
        top = parts.abs().argsort(descending=True)[:n].tolist()
        return [(self.components[x], float(parts[x])) for x in top]

    def _parts(self, method: str, of: str) -> Tensor:
        """Return the parts of the keys or of the query. Raises `BadValue` for anything else."""
        if of not in ("key", "query"):
            raise BadValue(f"{method} got of={of!r}.", 'of is "key" or "query".', "pass one.")
        return self.key_parts if of == "key" else self.query_parts

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a table with one row per component: its kind, layer, head and module, and its
        parts in the keys and in the query. Raises `Missing` without pandas."""
        return data_frame(
            [
                {**c._asdict(), "key_part": float(k), "query_part": float(q)}
                for c, k, q in zip(self.components, self.key_parts, self.query_parts, strict=True)
            ]
        )

    def sentence(self) -> str:
        """Name the component that wrote the largest part of the key with the sign of the contrast,
        or the distance if the term `position` is larger and more than half of the contrast. A part
        of less than half is the largest of several reasons."""
        sign = 1 if self.contrast > 0 else -1
        best = int((sign * self.key_parts).argmax())
        reason, part = self._wrote(self.components[best]), float(self.key_parts[best])
        position = 0.0 if self.terms is None else self.terms.position
        if sign * position > max(sign * part, sign * self.contrast / 2):
            reason, part = "of its distance", position
        at = f"over {self.rows} queries" if self.query is None else f"at {self._named(self.query)}"
        alone = sign * part >= sign * self.contrast / 2
        return (
            f"L{self.layer}H{self.head} {at} looks {'at' if sign > 0 else 'away from'} "
            f"{self._target()} {'' if alone else 'for several reasons, above all '}because "
            f"{reason}: {part:.1f} of {self.contrast:.1f}."
        )

    def _target(self) -> str:
        if self.key is None:
            return f"its keys, most at {self._named(int(self.weights.argmax()))},"
        return self._named(self.key)

    def _named(self, at: int) -> str:
        if self.tokens is None or at >= len(self.tokens):
            return f"position {at}"
        return f"*{visible(self.tokens[at]).strip()}* ({at})"

    def _wrote(self, component: Component) -> str:
        if component.kind == "distance":
            return "of its distance"
        if component.kind == "mlp":
            return f"the MLP of layer {component.layer} wrote there"
        if component.kind != "head":
            return f"of what {component.module or component.kind} wrote there"
        who = f"L{component.layer}H{component.head} wrote there"
        if self.key_sources is None or self.key is None:
            return who
        token = int(self.key_sources.argmax())
        known = {self.key - 1: "which token came before", self.key: "which token it is"}
        return f"{who} {known.get(token) or f'what it read at {self._named(token)}'}"

    def __repr__(self) -> str:
        against = self.against if isinstance(self.against, str) else self._named(self.against)
        lines = [
            self.sentence(),
            f"weight {self.weight:.3f}, score {self.score:.2f}, contrast {self.contrast:.2f} "
            f"against {against}",
        ]
        if self.softcap is not None:
            lines[1] += f", before the soft cap {self.softcap:g}"
        for of in ("key", "query"):
            lines.append(f"what wrote the {of}:")
            lines += [f"  {part:+8.2f}  {c}" for c, part in self.largest(of)]
        if self.terms is not None:
            names = "position", "query x position", "key alone", "match"
            # Without a rotation or a bias, positions are in what the embeddings wrote.
            first = 0 if self.frequencies is not None or abs(self.terms.position) > 1e-6 else 2
            named = [*zip(names, self.terms, strict=True)][first:]
            terms = ", ".join(f"{name} {x:.2f}" for name, x in named)
            lines.append(f"{terms} (around the means of this text)")
        for c in self.checks:
            mark = "" if c.agrees else "  <- disagrees"
            lines.append(
                f"without {c.component} in the {c.of}: weight {c.weight:.3f} -> {c.edited:.3f} by "
                f"a path edit, {c.frozen:.3f} by its part{mark}"
            )
        if not self.checks:
            lines.append(
                "Parts of the score with the norms of this run, not effects; see check=True."
            )
        return "\n".join([*lines, *self.remarks])

"""Record statistics of every attention call of a running model: `watch`.

The statistics are computed after each call. They do not change what the model computes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from torch import nn

from ...core.errors import refuse_keywords
from ...core.functional.ambient import FollowedCall, must_not_be_sharded
from ...core.stats import DEFAULT_STATISTICS, Statistic, exact_rows as ExactRows, parse_stats
from ...core.stats.parse import BY_NAME
from ..follow.layers import check_layers, checked_list, must_be_module
from .hook_sites import hook_site
from .recording import INDEX, Call, Recording, new_folder, write_call
from .watcher import Watcher


@contextmanager
def watch(
    model: nn.Module,
    *,
    stats: Sequence[str | Statistic] = DEFAULT_STATISTICS,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
    exact_rows: Sequence[int] | None = None,
    outputs: bool = False,
    inputs: bool = False,
    to: str | Path | None = None,
    **unknown: NoReturn,
) -> Iterator[Recording]:
    """Record statistics of every attention call that `model` makes inside the `with` block.

    >>> with ch.watch(model, stats=["entropy", ch.topk(3)]) as recording:  # doctest: +SKIP
    ...     model(x)
    >>> recording[0].entropy  # (B, H, Tq) of the first layer  # doctest: +SKIP

    It records layers of `clearhead.nn`, transformers models with
    ``attn_implementation="clearhead"``, and any other module of the model that calls `attention`
    in this thread. The outputs of the model do not change.

    If a call records gradients, its statistics carry gradients, except for `drop_error` and for
    `received` with arguments other than `by`. The core computes the gradients of
    `lse`, `entropy`, `effective`, `mass` and `received`. For the other statistics, torch recomputes
    the statistic in the backward pass (`topk` already in the forward pass), which is several times
    slower. A checkpoint with ``use_reentrant=True`` records no gradients in its forward pass, so a
    backward pass through a statistic raises `BadValue` there.

    ``value_weighted(groups)`` and ``by="value"`` multiply weights by ``|v W_O|``, the norm of what
    the value of a key writes through the output projection of its layer. The projection is found in
    the model, and compared with what the layer returns; the norms receive no gradient.
    ``by="relative_value"`` takes ``|(v - v_first) W_O|``, relative to the value of the text's first
    token: the output without v_first W_O is the sum of these vectors times the weights. If a cache
    has dropped the first token, it is relative to the oldest key.

    ``"varying"`` is ``|o - mean o|² / mean |o|²`` at each query, (B, H, Tq). Here o = z W_O is what
    the head writes, and means are over the queries of the text in this call. Its mean over queries
    is the fraction of the head's squared output that varies from query to query.

    Groups of `mass` without `align` take the alignment of the call's mask, if all its parts have
    the same one. So they stay correct with a KV cache.

    Positions (of groups, of `exact_rows`, of the keys of `topk`) count from the first real token of
    each text if the call carries its padding: a 2-D `attention_mask` of transformers, the
    `key_padding_mask` of torch.nn.MultiheadAttention, or `lengths`. Otherwise positions are
    columns. The dimensions Tq and Tk of a result are always columns; `Call.at` gives the column at
    which each text begins. `received`, `drop_error` and `pooled` do not count queries of padding.
    So ``received(last=8)`` counts the last eight real queries of each text.

    Inside `distributed.sharded`, use the same arguments on all ranks, but pass `to` on one rank
    only. Every rank gets the statistics of the complete sequence, without gradients.

    Args:
        stats: the statistics to compute, as in `look`, or "varying".
        layers: record only these layers. Numbers are those of `Call.layer`; strings are patterns
            for module names, such as ``"*.5.*"``. None means all.
        heads: record only these query heads. None means all.
        exact_rows: also record the weights of these queries. Rows count from the first token of
            each text in the call; negative rows count from its last. Every call must have these
            rows: a generation step has only -1. A row that exists only in longer texts of the batch
            is 0 in the others. None means none.
        outputs: also record the output of each recorded head, (B, H, Tq, Dv), as `.output`.
        inputs: also record what attention receives, after rotation and norms of queries and keys:
            `.query`, (B, H, Tq, D), of each recorded head, and `.key`, (B, G, Tk, D), and `.value`,
            (B, G, Tk, Dv), of all KV heads. Edits apply first; `temperature` and `uniform` change
            the queries.
        to: a folder. Each call is written to a safetensors file there, described by a line of
            `index.jsonl`, and not kept in memory. `recording.written` has the paths, for
            `safetensors.torch.load_file`. None keeps everything in memory.

    Raises:
        BadValue, BadType: unknown statistics, patterns that match no module, heads or rows that do
            not exist, heads that tensor parallelism divides over ranks, a folder that cannot be
            written or holds an earlier recording; and at the end of the block, if the model ran
            without an attention call or in another thread, or a layer in `layers` made none; for
            statistics of values, an output projection that is not found, or that does not compute
            what the layer returns.

    Warns at the end of the block if the model did not run, if a part of it is compiled, or if a
    module computed attention without clearhead: `torch.nn.MultiheadAttention` with
    ``need_weights=True``, a part of a transformers model with another `attn_implementation`, or a
    module whose class has "Attention" in its name and computes it itself.
    """
    if unknown:
        refuse_keywords(watch, unknown)
    more = "; for one attention call, use look(...)"
    must_be_module("watch", model, "watch records the modules of a model.", more)
    layers = checked_list("layers", layers, patterns=True)
    check_layers(layers, model)
    heads = checked_list("heads", heads)
    statistics = parse_stats(stats)
    if exact_rows is not None:
        statistics = parse_stats([*statistics, ExactRows(exact_rows)])
    exact = next((s for s in statistics if isinstance(s, ExactRows)), None)
    rows = None if exact is None else exact.queries
    statistics = tuple(s for s in statistics if s is not exact)
    folder = None if to is None else new_folder(to)
    names = [s.name if s == BY_NAME.get(s.name) else repr(s) for s in statistics]
    names += [] if rows is None else [repr(ExactRows(rows))]
    recording, recorded = Recording(), 0

    def keep(call: Call, followed: FollowedCall) -> None:
        nonlocal recorded  # `Recording.clear` forgets files, but their numbers are used
        if folder is None:
            running = watcher.running
            repeated = running.names.index(call.module) != call.layer
            site = hook_site(model, call.module, running.texts.crosses, repeated, followed.problem)
            recording.calls.append(replace(call, site=site))
        else:
            recording.written.append(write_call(folder, recorded, call, names))
        recorded += 1

    if inputs:
        must_not_be_sharded("watch with inputs=True")
    watcher = Watcher(model, keep, statistics, layers, heads, rows, outputs, inputs)
    try:
        with watcher.hooked():
            yield recording
        watcher.check_recorded()
    finally:
        if folder is not None and not recorded:
            (folder / INDEX).unlink(missing_ok=True)

"""Make a press of KVPress that scores keys by a statistic, without eager attention."""

from typing import TYPE_CHECKING

from ..core.errors import BadValue, Missing, as_count
from ..core.stats import Statistic, parse_stats
from .register import register

if TYPE_CHECKING:
    from kvpress import ScorerPress


def press(
    score: str | Statistic, compression_ratio: float = 0.0, *, window: int = 0, kernel: int = 1
) -> "ScorerPress":
    """Make a press that drops the keys with the lowest scores: ``with press(...)(model): ...``.

    It computes the attention of each layer on the prompt a second time, tile by tile, and the score
    in O(S) memory. A KV head has the mean of its query heads. A model needs attn_implementation
    "clearhead" or "sdpa". Presses of KVPress that take a press, such as `AdaKVPress` and
    `CriticalKVPress` (which multiplies scores by norms of values), take this one, if they score
    complete prompts. ::

        press(received(reduce="mean"), 0.5)  # ObservedAttentionPress
        press(received(reduce="mean", last=64), 0.5, window=64, kernel=5)  # SnapKVPress
        press("drop_error", 0.5)  # the squared error of the outputs if a key is dropped

    Args:
        score: a statistic of keys: "received", "drop_error", or one of them with arguments.
        compression_ratio: the fraction of keys that are dropped, from 0 to below 1.
        window: the number of last keys that are never dropped.
        kernel: the score of a key before the window is the mean of so many keys around it, an odd
            number; those beyond the ends count as 0.

    Raises:
        BadValue, BadType: a statistic of queries, or one by norms; a number out of range. In a
            run: a prompt that is not longer than the window, or that KVPress divides; another
            attention; a call inside `intervene` or `distributed.sharded`.
        Missing: without KVPress.

    Source: Devoto et al. 2025, "Expected Attention", for KVPress.
    """
    (statistic,) = parse_stats([score])
    numbers = statistic.factors
    if statistic.axis != "keys" or (numbers is not None and numbers.numbers is None):
        rule = 'a score has a number for each key, from q, k and v: "received" or "drop_error".'
        hint = "for norms of values, pass this press to kvpress.CriticalKVPress."
        raise BadValue(f"press got {score!r}.", rule, hint)
    rule, hint = "both are numbers of keys, and kernel is odd.", "pass window=64, kernel=5."
    window = as_count("press got window", window, rule, hint)
    kernel = as_count("press got kernel", kernel, rule, hint, least=1)
    if kernel % 2 == 0:
        raise BadValue(f"press got kernel={kernel}.", rule, hint)
    if not 0 <= compression_ratio < 1:
        rule, hint = "it is a fraction of the keys, below 1.", "pass compression_ratio=0.5."
        raise BadValue(f"press got compression_ratio={compression_ratio!r}.", rule, hint)
    try:
        from .scorer import Scorer
    except ImportError as error:
        rule = "the press is one of its classes."
        raise Missing(f"KVPress is not installed: {error}.", rule, "install kvpress.") from error
    register()
    return Scorer(compression_ratio, statistic=statistic, window=window, kernel=kernel)

"""Edits of the attention of a running model: `clearhead.edits`.

For each head and query, x are the logits of its visible keys (after scale, soft cap and bias),
w = softmax(x) the weights, and o = w V the output:

| edit                    | effect                                                          |
|-------------------------|-----------------------------------------------------------------|
| `knock_out(mask)`       | removes the edges that `mask` allows: w = 0, the rest renormalised |
| `keep_only(mask)`       | removes all other edges                                         |
| `temperature(t)`        | w = softmax(x / t)                                              |
| `uniform()`             | w = 1/n for each of the n keys that the query may look at       |
| `freeze(recording)`     | w as recorded in another run                                    |
| `ablate(by=...)`        | o = 0, the mean of a reference set, or a tensor                 |
| `scale(factor)`         | factor * o                                                      |
| `patch(recording)`      | o as recorded in another run; with `of`, the queries, keys or values |
| `path(sender, receiver, of)` | changes what a head writes, only as another head reads it   |
| `cache(keys=..., values=...)` | keys and values as a cache of fewer bits returns them |

The first four change the problem, which an engine computes as usual, in O(S) memory. In one call,
caches and patches of queries, keys and values apply first, then the first four, then `freeze`, then
the edits of the output; within each of these groups the order of the list decides. So frozen
weights stay as recorded.

`from_duo_attention(folder, model)` reads a pattern of DuoAttention as a list of `keep_only`.

All edits take `layers`, `heads`, `positions` and `batch`, which select where they apply (see
`Edit`).

`positions`, and positions in masks such as `prefix(1)`, count from the first real token of each
text if the call carries its padding: a 2-D `attention_mask` of transformers, the `key_padding_mask`
of torch.nn.MultiheadAttention, or `lengths`. Otherwise positions are columns.
"""

from .cache import cache
from .duo_attention import from_duo_attention
from .edit import Edit
from .freeze import freeze
from .outputs import ablate, mean_ablate, scale, zero_ablate
from .patch import patch
from .path import path
from .weights import keep_only, knock_out, temperature, uniform

__all__ = [
    "Edit", "ablate", "cache", "freeze", "from_duo_attention", "keep_only", "knock_out",
    "mean_ablate", "patch", "path", "scale", "temperature", "uniform", "zero_ablate",
]  # fmt: skip

"""What can be changed about attention while a model runs: `clearhead.edits`.

With the logits x of the keys that a query may look at (after scale, soft cap and bias), the weights
w = softmax(x) and the output o = w V of each head and query:

| edit                    | what becomes of it                                              |
|-------------------------|-----------------------------------------------------------------|
| `knock_out(mask)`       | the edges that `mask` allows are not there: w = 0, renormalised  |
| `keep_only(mask)`       | all the others are not there                                    |
| `temperature(t)`        | w = softmax(x / t)                                              |
| `uniform()`             | w = 1/n for each of the n keys that the query may look at       |
| `freeze(recording)`     | w as recorded in another run                                    |
| `ablate(by=...)`        | o = 0, the mean of a reference set, or a tensor                 |
| `scale(factor)`         | factor * o                                                      |
| `patch(recording)`      | o as recorded in another run                                    |

The first four make another problem, which an engine solves like any other, in O(S) memory.
Of the edits of one call, the first four apply first, then `freeze`, then those of the output; each
kind in the order of the list. So weights that are frozen stay as they were recorded.

All edits take `layers`, `heads`, `rows` and `batch`, which say where they apply (`Edit`).

Positions, of `rows` and of masks such as `prefix(1)`, count from the first real token of each text
where the call carries its padding: a 2-D `attention_mask` of transformers, the `key_padding_mask`
of torch.nn.MultiheadAttention, or `lengths`. Otherwise they are columns.
"""

from .edit import Edit
from .freeze import freeze
from .outputs import ablate, patch, scale
from .weights import keep_only, knock_out, temperature, uniform

__all__ = [
    "Edit",
    "ablate",
    "freeze",
    "keep_only",
    "knock_out",
    "patch",
    "scale",
    "temperature",
    "uniform",
]

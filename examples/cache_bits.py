"""Measure which KV heads of a real model need 8 bits, and whether it helps to know them.

`compare_caches` measures what ggml's q4_0 does to each head of SmolLM2-135M-Instruct, or of
Gemma 3 270M, on some texts. Half of the KV heads then get q8_0 and the others q4_0, 6.5 bits a
number: those that the measurement names, and as many by rules that people use without one. The
program prints the loss and the recall of a pass key on other texts, as `forget_keys.py` does.

    python examples/cache_bits.py [smollm2 | gemma3]
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

import clearhead as ch
from clearhead.hf import Checkpoint
from clearhead.models.progress import progress_bar

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples import gemma3, smollm2
from examples.forget_keys import CONTEXT, SURVEYED, scores, texts

FEW, MORE = "q4_0", "q8_0"
KeyHead = tuple[int, int]
MODELS = {"smollm2": smollm2, "gemma3": gemma3}


def inputs(checkpoint: Checkpoint) -> Iterable[Tensor]:
    """Yield the ids of every second text that is measured."""
    for text in texts(SURVEYED, 0)[::2]:
        ids = checkpoint.tokenizer(text)["input_ids"]
        yield torch.tensor([ids[:CONTEXT]])


def measured(checkpoint: Checkpoint) -> dict[str, dict[KeyHead, float]]:
    """Return by KV head, as sums over its query heads and the texts: the divergence and error with
    q4_0, and the entropy."""
    totals: dict[str, dict[KeyHead, float]] = {"kl": {}, "error": {}, "entropy": {}}
    model = checkpoint.predictor
    assert model is not None

    def add(name: str, at: KeyHead, number: float) -> None:
        totals[name][at] = totals[name].get(at, 0.0) + number

    for ids in inputs(checkpoint):
        damage = ch.compare_caches(model, ids, FEW, metric=None)
        with torch.no_grad(), ch.watch(model, stats=["entropy"]) as recording:
            model(ids, use_cache=False)
        for head in damage.heads:
            at = head.layer, head.key_head
            add("kl", at, head.kl)
            add("error", at, head.error)
            add("entropy", at, float(recording[head.layer].entropy[0, head.head].mean()))
    return totals


def edits(precise: set[KeyHead], every: Iterable[KeyHead]) -> list[ch.edits.Edit]:
    """Return the caches of all KV heads, of which the precise ones have more bits."""
    made: list[ch.edits.Edit] = []
    for form, wanted in ((MORE, True), (FEW, False)):
        by_layer: dict[int, list[int]] = {}
        for layer, head in every:
            if ((layer, head) in precise) is wanted:
                by_layer.setdefault(layer, []).append(head)
        made += [
            ch.edits.cache(keys=form, values=form, layers=[layer], heads=heads)
            for layer, heads in by_layer.items()
        ]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure which KV heads need 8 bits.")
    parser.add_argument("model", nargs="?", choices=MODELS, default="smollm2")
    checkpoint = Checkpoint(MODELS[parser.parse_args().model].fetch())
    numbers = measured(checkpoint)
    every = sorted(numbers["kl"])
    layers = 1 + max(layer for layer, _ in every)

    def half(rank: Callable[[KeyHead], float]) -> set[KeyHead]:
        return set(sorted(every, key=rank)[: len(every) // 2])

    rules = {
        f"all {MORE}": set(every),
        "largest divergence": half(lambda at: -numbers["kl"][at]),
        "largest error": half(lambda at: -numbers["error"][at]),
        "least entropy": half(lambda at: numbers["entropy"][at]),
        "most entropy": half(lambda at: -numbers["entropy"][at]),
        "first and last layers": half(lambda at: min(at[0], layers - 1 - at[0])),
        "first layers": half(lambda at: at[0]),
        "last layers": half(lambda at: -at[0]),
        **{
            f"random {i}": half(lambda at, i=i: random.Random(f"{i} {at}").random())  # type: ignore[misc]
            for i in range(3)
        },
        "smallest divergence": half(lambda at: numbers["kl"][at]),
        f"all {FEW}": set(),
    }
    print(f"{'q8_0 for':22} {'loss':>6} {'recall':>7}")
    with progress_bar("Evaluating", len(rules) + 1, None) as advance:
        for name, precise in {"exact": None, **rules}.items():
            case = [] if precise is None else edits(precise, every)
            loss, recall = scores(checkpoint, case)
            advance()
            print(f"{name:22} {loss:6.4f} {recall:7.0%}", flush=True)


if __name__ == "__main__":
    main()

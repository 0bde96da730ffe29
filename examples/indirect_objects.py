"""Find the heads of a real model that write the right name, and ablate them.

The fifty prompts are "When A and B went to the store, B gave a drink to", with the names in both
orders. A model that follows them predicts A. The program prints how often SmolLM2-135M-Instruct
(Q4_1, dequantised) does, the heads that write A over B with their sources, and what it costs to
ablate five heads: those that write most, those with the largest estimated effect, those that look
most at A, and random ones.

    python examples/indirect_objects.py

Source: Wang et al. 2022, "Interpretability in the Wild", whose task this is.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import clearhead as ch
from clearhead.hf import Checkpoint
from clearhead.models.progress import progress_bar

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.smollm2 import fetch

# fmt: off
NAMES = (  # one token each, after a space
    "Mary", "John", "Tom", "Sarah", "Anna", "Paul", "Mark", "Emma", "Jack", "Alice", "Kate", "Bob",
    "George", "Laura", "Michael", "Maria", "Daniel", "Jane", "Robert", "Susan", "David", "Linda",
    "Peter", "Lisa", "Henry", "Helen", "Frank", "Nancy", "Adam", "Rachel", "Simon", "Julia",
    "Kevin", "Amy", "Brian", "Emily", "Eric", "Ruth", "Jason", "Diana", "Ryan", "Karen", "Andrew",
    "Lucy", "Martin", "Rebecca", "Steve", "Amanda", "James", "Jessica",
)
# fmt: on
COUNT, DRAWS = 5, 5  # heads that are ablated together, and draws of random ones
AT = ("the first token", "A", "B", "B again", "other tokens")


def prompts() -> list[tuple[str, str, str]]:
    """Return (A, B, prompt) for each pair of names, in both orders of the first two."""
    made = []
    for a, b in zip(NAMES[::2], NAMES[1::2], strict=True):
        for one, two in ((a, b), (b, a)):
            made.append((a, b, f"When {one} and {two} went to the store, {b} gave a drink to"))
    return made


class Task:
    """The prompts for a model, as a batch. All have the same number of tokens."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.model = checkpoint.predictor
        self.prompts = prompts()
        tokens = checkpoint.tokenizer
        self.a, self.b = (
            torch.tensor([tokens(f" {names[i]}")["input_ids"] for names in self.prompts]).flatten()
            for i in (0, 1)
        )
        self.ids = torch.tensor([tokens(prompt)["input_ids"] for *_, prompt in self.prompts])
        self.inputs = {"input_ids": self.ids, "use_cache": False, "logits_to_keep": 1}

    def position(self, name: Tensor, last: bool = False) -> Tensor:
        """Return the first position of each prompt's name, or its last one, (B,)."""
        hits = (self.ids == name.unsqueeze(1)).int()
        T = hits.shape[1]
        return T - 1 - hits.flip(1).argmax(1) if last else hits.argmax(1)

    @torch.no_grad()
    def scores(self, heads: Sequence[tuple[int, int]] = ()) -> tuple[float, float]:
        """Return the mean logit difference A - B, and how often it is positive, without `heads`."""
        edits = [ch.edits.ablate(layers=[layer], heads=[head]) for layer, head in heads]
        with ch.intervene(self.model, edits):
            logits = self.model(**self.inputs).logits[:, -1]
        at = torch.arange(len(logits))
        difference = logits[at, self.a] - logits[at, self.b]
        return float(difference.mean()), float((difference > 0).float().mean())

    def written(self) -> list[ch.LogitAttribution]:
        """Split the logit difference of each prompt by head."""
        parts = []
        with progress_bar("what heads write, by prompt", len(self.ids), None) as advance:
            for ids, a, b in zip(self.ids, self.a, self.b, strict=True):
                inputs = {"input_ids": ids[None], "use_cache": False}
                target = ch.logit_difference(int(a), int(b))
                parts.append(ch.logit_attribution(self.model, inputs, target))
                advance()
        return parts

    @torch.no_grad()
    def looks(self) -> Tensor:
        """Return the mean weight of the last token on A, (L, H)."""
        with ch.watch(self.model, stats=[], exact_rows=[-1]) as seen:
            self.model(**self.inputs)
        texts, at = torch.arange(len(self.ids)), self.position(self.a)
        return torch.stack([call.exact_rows[texts, :, 0, at].mean(0) for call in seen])

    def estimated_effects(self) -> Tensor:
        """Return the estimated change of the logit difference without each head, (L, H)."""
        metric = ch.logit_difference(self.a, self.b)
        found = ch.effects(self.model, self.inputs, metric, exact=False)
        shape = 1 + max(e.layer for e in found), 1 + max(e.head for e in found)
        result = torch.zeros(shape)
        for effect in found:
            result[effect.layer, effect.head] = effect.estimate
        return result

    def sources(self, parts: Sequence[ch.LogitAttribution], layer: int, head: int) -> Tensor:
        """Return the mean part of a head at the last token from each source of `AT`."""
        groups = torch.full(self.ids.shape, len(AT) - 1)
        groups[:, 0] = 0
        places = self.position(self.a), self.position(self.b), self.position(self.b, last=True)
        for number, at in enumerate(places, 1):
            groups[torch.arange(len(groups)), at] = number
        total = torch.zeros(len(AT))
        for group, part in zip(groups, parts, strict=True):
            total.index_add_(0, group, part.sources(layer, head, -1))
        return total / len(parts)


def largest(scores: Tensor) -> list[tuple[int, int]]:
    """Return the (layer, head) of the largest numbers of (L, H)."""
    at = scores.flatten().topk(COUNT).indices.tolist()
    return [divmod(i, scores.shape[1]) for i in at]


def row(*cells: object) -> str:
    return "| " + " | ".join(f"{x:.2f}" if isinstance(x, float) else str(x) for x in cells) + " |"


def main() -> None:
    checkpoint = Checkpoint(fetch())
    task = Task(checkpoint)
    difference, accuracy = task.scores()
    print(f"{checkpoint.name}: A over B in {accuracy:.0%} of {len(task.ids)} prompts, by a mean")
    print(f"logit difference of {difference:.2f}.\n")
    parts = task.written()
    written = torch.stack([part.heads[..., -1] for part in parts]).mean(0)
    looks, effects = task.looks(), task.estimated_effects()
    print(row("head", "writes A over B", *(f"from {x}" for x in AT), "weight on A"))
    print(row(*["---"] * (len(AT) + 3)))
    for layer, head in largest(written):
        sources = task.sources(parts, layer, head).tolist()
        numbers = float(written[layer, head]), *sources, float(looks[layer, head])
        print(row(f"layer {layer} head {head}", *numbers))
    every = [divmod(i, written.shape[1]) for i in range(written.numel())]
    generator = torch.Generator().manual_seed(0)
    sets = {
        "write most": largest(written),
        "cause most, by the estimate": largest(-effects),
        "look most at A": largest(looks),
    }
    for draw in range(DRAWS):
        chosen = torch.randperm(len(every), generator=generator)[:COUNT].tolist()
        sets[f"random, draw {draw + 1}"] = [every[i] for i in chosen]
    print("\n" + row("five heads that", "write", "look at A", "difference without", "accuracy"))
    print(row(*["---"] * 5))
    with progress_bar("ablations", len(sets), None) as advance:
        for name, heads in sets.items():
            total = float(sum(written[at] for at in heads))
            mean = float(sum(looks[at] for at in heads)) / len(heads)
            change, right = task.scores(heads)
            print(row(name, total, mean, change, f"{right:.0%}"), flush=True)
            advance()


if __name__ == "__main__":
    main()

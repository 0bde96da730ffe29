"""Measure the effect of one edge of each head, from a pronoun to its antecedent, on the next word.

The word after a pronoun depends on the antecedent. `measure` reports which head looks at it;
`causes` knocks out the edge between the two in each head, and compares the loss of the next word.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.core.errors import BadValue
from clearhead.core.masks import Dense, dense
from clearhead.demo.storyteller import Storyteller
from clearhead.models.effects.effect_table import Effects
from clearhead.models.effects.effects import effects
from clearhead.models.inspect.edits import Edit, knock_out

from . import data
from .data import pad
from .grammar import Story, lexicon
from .measure import hit_rates

MOST = 0.5  # a head looks at antecedents if it does so for more than this fraction of pronouns


def causes(teller: Storyteller, *, stories: int = 100, seed: int = 1) -> Effects:
    """Measure the increase of the loss after a pronoun without the edge to its antecedent, in nats.

    The edge is knocked out in each head, in the heads that look at the antecedents of most
    pronouns, in all other heads, and in all heads. The stories are held out.

    Raises `BadValue` for a model that was not trained on stories.
    """
    if strange := set(lexicon()) - set(teller.vocabulary.words):
        raise BadValue(
            f"The model does not know {len(strange)} words of the stories.",
            "the antecedents of pronouns are known only for the stories of the grammar.",
            "pass a model that was trained on stories.",
        )
    model, held_out = teller.model, data.stories(seed, stories, "held-out")
    ids, targets = pad(held_out, teller.vocabulary)
    edges = links(held_out, ids.shape[1])
    after = edges.bits.any(-1).squeeze(1)  # the pronouns, (B, T)

    def loss_after_pronouns(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits[after], targets[after])

    def without(heads: Sequence[tuple[int, int]]) -> list[Edit]:
        return [
            knock_out(edges, layers=[layer], heads=[h for at, h in heads if at == layer])
            for layer in sorted({at for at, _ in heads})
        ]

    rates, _ = hit_rates(model, teller.vocabulary, held_out)["antecedent"]
    every = [(layer, head) for layer in range(len(rates)) for head in range(len(rates[layer]))]
    looking = [at for at in every if rates[at] > MOST]
    others = [at for at in every if at not in looking]
    edits = {f"layer {at[0]} head {at[1]}": without([at]) for at in every}
    if looking and others:
        edits[f"the {len(looking)} heads that look at most antecedents"] = without(looking)
        edits[f"the {len(others)} other heads"] = without(others)
    edits["every head"] = without(every)
    labels = {at: f"looks at {float(rates[at]):.1%} of antecedents" for at in every}
    return effects(model, ids, loss_after_pronouns, edits).labelled(labels)


def links(stories: Sequence[Story], T: int) -> Dense:
    """Return the edges from each pronoun to its antecedent, (B, 1, T, T)."""
    cells = torch.zeros(len(stories), 1, T, T, dtype=torch.bool)
    for b, story in enumerate(stories):
        for pronoun, noun in story.antecedents.items():
            cells[b, 0, pronoun, noun] = True
    return dense(keep=cells)

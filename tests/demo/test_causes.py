"""What the edges from a pronoun to its antecedent are for, in the model that ships."""

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
import clearhead.demo as st
from examples.storyteller import data
from examples.storyteller.causes import causes, links
from examples.storyteller.data import pad


@pytest.fixture(scope="module")
def found():
    return causes(st.load(), stories=30)


def test_the_heads_that_look_at_the_antecedent_are_those_that_matter(found):
    exact = {e.name: e.exact for e in found}
    best = next(h for h in st.load().heads if h.label == "antecedent")
    others = [e.exact for e in found if e.head is not None and "0.0%" in e.label]
    assert exact[f"layer {best.layer} head {best.head}"] > 20 * max(map(abs, others))
    looking, rest = (next(x for n, x in exact.items() if n.endswith(w)) for w in (
        "heads that look at most antecedents", "other heads"))  # fmt: skip
    assert looking > rest
    assert exact["every head"] == max(exact.values())


def test_a_row_is_what_running_without_these_edges_gives(found):
    teller = st.load()
    told = data.stories(1, 30, "held-out")
    ids, targets = pad(told, teller.vocabulary)
    edges = links(told, ids.shape[1])
    pairs = [(b, p, a) for b, s in enumerate(told) for p, a in s.antecedents.items()]
    assert edges.bits.sum() == len(pairs) and all(edges.bits[b, 0, p, a] for b, p, a in pairs)
    b, p, _ = torch.tensor(pairs).T
    losses = []
    for edits in ([], [ch.edits.knock_out(edges, layers=[1], heads=[2])]):
        with torch.no_grad(), ch.intervene(teller.model, edits):
            losses.append(float(F.cross_entropy(teller.model(ids)[b, p], targets[b, p])))
    assert found.baseline == pytest.approx(losses[0], abs=1e-5)
    row = next(e for e in found if (e.layer, e.head) == (1, 2))
    assert row.exact == pytest.approx(losses[1] - losses[0], abs=1e-5)

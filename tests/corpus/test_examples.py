"""The examples that are stored are those of a plain sort of all queries."""

import torch

from clearhead.core.stats import TopWeights
from clearhead.corpus.examples import (
    IN_STRATUM,
    LARGEST,
    OF_LARGEST,
    STRATA,
    HashOrder,
    LayerExamples,
)
from clearhead.corpus.metric import FRACTION, Batch, Metric

H = 2


class Fraction(Metric):
    name = "fraction"


def test_batches_of_any_size_select_as_a_plain_sort():
    random = torch.Generator().manual_seed(5)
    layer, strata, largest = LayerExamples(3, H, [Fraction()]), {}, {}
    for number, (B, T) in enumerate([(2, 40), (1, 3), (3, 25), (2, 40), (1, 1), (2, 200)]):
        # Few different values, so that equal ones compete.
        values = torch.randint(0, 60, (B, H, T), generator=random) / 60
        counts = torch.rand(B, T, generator=random) < 0.8
        keys = torch.arange(B * H * T * 4).view(B, H, T, 4)[..., :T]
        contexts = list(range(B))
        batch = Batch(torch.zeros(B, T).long(), [number] * B, contexts, {}, torch.zeros(B, T) > 0)
        order, bins = HashOrder(7, batch), FRACTION.of(values)
        top = TopWeights(keys / 1e4, keys)
        layer.add(0, values, bins, counts, batch, order, top)
        layer.select()
        for b, t in counts.nonzero().tolist():
            for h in range(H):
                query = int(order.hash[b, t]), number, b, t
                about = float(values[b, h, t]), keys[b, h, t].tolist() + [-1] * (4 - T)
                stratum = int(bins[b, h, t]) * STRATA // FRACTION.count
                strata.setdefault((h, stratum), []).append((*query, *about))
                largest.setdefault(h, []).append((-about[0], *query, about[1]))
    expected = []
    for h in range(H):
        for stratum in range(STRATA):
            for row in sorted(strata.get((h, stratum), []))[:IN_STRATUM]:
                expected.append((h, stratum, *row))
        for value, *query, chosen in sorted(largest[h])[:OF_LARGEST]:
            expected.append((h, LARGEST, *query, -value, chosen))
    names = ("head", "stratum", "hash", "text", "context", "query", "value", "keys")
    selected = [tuple(row[name].tolist() for name in names) for row in layer.examples]
    assert selected == expected
    assert set(layer.examples["layer"]) == {3}

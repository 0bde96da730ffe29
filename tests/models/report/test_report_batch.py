"""Each text of a padded batch has the report of the text alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clearhead as ch
from clearhead import BadType, BadValue, demo
from tests.models.report import simulated_heads as simulated
from tests.models.report.models import pointing

LENGTHS, T = (40, 64, 51), 64
LEFT = {"left": [T - n for n in LENGTHS], "right": [0, 0, 0], "mixed": [24, 0, 5]}
HEADS = {
    "previous": lambda i: max(i - 1, 0),
    "first": lambda i: 0,
    "before2": lambda i: max(i - 2, 0),
    "": lambda i: (i * 2654435761 >> 7) % (i + 1),
}
TOKENS = [simulated.text(n, seed) for seed, n in enumerate(LENGTHS)]


class Heads(nn.Module):
    """Heads that look at one key each, on the texts of a batch."""

    base_model_prefix = ""  # as a model of transformers, whose attention_mask is its padding

    def forward(self, attention_mask, **keywords):
        B, columns = attention_mask.shape
        q, k = torch.randn(2, B, len(HEADS), columns, T)  # random on padding
        for b, real in enumerate(attention_mask.bool()):
            n = int(real.sum())
            for h, where in enumerate(HEADS.values()):
                for x, own in zip((q, k), pointing(n, where), strict=True):
                    x[b, h, real] = F.pad(own, (0, T - n))
        mask = ch.causal & ch.dense(keep=attention_mask[:, None, None].bool())
        ch.attention(q, k, k, mask=mask, **keywords)


def padding(side):
    mask = torch.zeros(len(LENGTHS), T, dtype=torch.long)
    for b, (left, n) in enumerate(zip(LEFT[side], LENGTHS, strict=True)):
        mask[b, left : left + n] = 1
    return mask


@pytest.mark.parametrize(
    ("side", "keywords"),
    [("left", {}), ("right", {"softcap": 90.0}), ("mixed", {"bias": ch.alibi()})],
)
def test_roles_in_a_padded_batch_are_those_of_each_text_alone(side, keywords):
    inputs = {"attention_mask": padding(side), **keywords}
    reports = ch.report_batch(Heads(), inputs, tokens=TOKENS, progress=False)
    for tokens, batched in zip(TOKENS, reports, strict=True):
        alone = {"attention_mask": torch.ones(1, len(tokens), dtype=torch.long), **keywords}
        right = ch.report(Heads(), alone, tokens=tokens, progress=False)
        assert batched.tokens == right.tokens
        for ours, theirs in zip(batched.heads, right.heads, strict=True):
            assert [role.name for role in ours.roles] == [role.name for role in theirs.roles]
            for role, other in zip(ours.roles, theirs.roles, strict=True):
                numbers, right_numbers = (
                    {n: x for n, x in vars(r).items() if not isinstance(x, str)}
                    for r in (role, other)
                )
                assert numbers == pytest.approx(right_numbers, rel=1e-4, abs=1e-6)
            assert ours.shares == pytest.approx(theirs.shares, rel=1e-4, abs=1e-6)
            assert [(x.query, x.key) for x in ours.links] == [
                (x.query, x.key) for x in theirs.links
            ]
        (layer,), (other,) = batched.layers, right.layers
        torch.testing.assert_close(layer.pooled, other.pooled)
        torch.testing.assert_close(layer.received, other.received)
        assert layer.allowed.equal(other.allowed) and layer.top_keys.equal(other.top_keys)
        names = [[role.name for role in head.roles] for head in batched.heads]
        assert names == [[name] if name else [] for name in HEADS]


def test_a_single_padded_text_has_the_roles_of_the_text():
    """Its positions are columns, as the tokens passed for it."""
    left, tokens = 24, TOKENS[0]
    columns = ["pad"] * left + tokens
    found = ch.report(Heads(), {"attention_mask": padding("left")[:1]}, tokens=columns)
    for head, name in zip(found.heads, HEADS, strict=True):
        assert [role.name for role in head.roles] == ([name] if name else [])
        assert all(min(link.query, link.key) >= left for link in head.links)


def test_the_ids_of_one_text_are_a_batch_of_one():
    storyteller = demo.load()
    ids = torch.tensor(storyteller.encode("A witch flew .").ids)
    one, batch = (ch.report_batch(storyteller.model, x, progress=False) for x in (ids, ids[None]))
    assert len(one) == 1 and str(one[0]) == str(batch[0])


class Padded(nn.Module):
    """torch's attention with a padding mask, and a bias for all texts."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, key_padding_mask, bias):
        options = {"need_weights": False, "key_padding_mask": key_padding_mask}
        with ch.compat.patched():
            return self.attention(x + bias, x, x, **options)[0]


def test_padding_is_cut_out_of_all_inputs():
    model, x, bias = Padded().eval(), torch.randn(2, 5, 8), torch.randn(1, 5, 8)
    padding = torch.tensor([[0, 0, 0, 1, 1], [1, 0, 0, 0, 0]]).bool()
    inputs = {"x": x, "key_padding_mask": padding, "bias": bias}
    for b, ours in enumerate(ch.report_batch(model, inputs, progress=False)):
        real = ~padding[b]
        alone = {"x": x[b : b + 1, real], "key_padding_mask": None, "bias": bias[:, real]}
        right = ch.report(model, alone, progress=False)
        assert len(ours.tokens) == int(real.sum()) and ours.heads == right.heads


def test_an_input_of_another_batch_is_refused():
    """Such as the sizes of three images in two texts, of which nothing states whose they are."""
    inputs = {"attention_mask": padding("right")[:2], "sizes": torch.zeros(3, 2)}
    with pytest.raises(BadValue, match=r"sizes is of shape \(3, 2\), and the batch has 2 texts"):
        ch.report_batch(Heads(), inputs)


def test_what_is_no_batch_is_refused():
    inputs = {"attention_mask": padding("right")}
    with pytest.raises(BadValue, match="tokens has the tokens of 2 texts, and the batch has 3"):
        ch.report_batch(Heads(), inputs, tokens=TOKENS[:2])
    with pytest.raises(BadValue, match="tokens has 51 entries for 64 positions"):
        ch.report_batch(Heads(), inputs, tokens=[TOKENS[0], TOKENS[2], TOKENS[1]])
    with pytest.raises(BadType, match="report got a str for the module Heads"):
        ch.report_batch(Heads(), ["a", "b"])
    with pytest.raises(BadValue, match="'folder'"):
        ch.report_batch("folder", ["a", "b"])
    with pytest.raises(BadType, match="report got a list for a checkpoint"):
        ch.report_batch(demo.load(), [])
    with pytest.raises(BadValue, match="or use report_batch"):
        ch.report(Heads(), inputs)

"""Positions in texts of a padded batch, in models of torch and of `clearhead.nn`."""

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead import BadValue

B, H, T, d = 3, 2, 7, 12
LENGTHS = (4, 7, 5)
PADDING = torch.tensor(
    [[i < T - n if b != 2 else i >= n for i in range(T)] for b, n in enumerate(LENGTHS)]
)
COLUMNS = [slice(T - n, T) if b != 2 else slice(0, n) for b, n in enumerate(LENGTHS)]


def texts(T=T, seed=0):
    return torch.randn(B, T, d, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("additive", [False, True])
@torch.no_grad()
def test_key_padding_masks_of_torch(additive):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(d, H, 17, dropout=0.0, batch_first=True).eval()
    x = texts()
    mask = torch.zeros(B, T).masked_fill(PADDING, -torch.inf) if additive else PADDING
    edit = ch.edits.knock_out(ch.prefix(1), positions=[0, 2, -1], heads=[1])
    stats = [ch.mass({"first": ch.prefix(1), "near": ch.window(before=1)})]
    with ch.compat.patched(), ch.watch(encoder, stats=stats, exact_rows=[1, -1]) as seen:
        encoder(x, src_key_padding_mask=mask)
        with ch.intervene(encoder, [edit]):
            found = encoder(x, src_key_padding_mask=mask)
    for b, columns in enumerate(COLUMNS):
        alone = x[b : b + 1, columns]
        n, keep = LENGTHS[b], torch.ones(1, H, LENGTHS[b], LENGTHS[b], dtype=torch.bool)
        w = encoder.self_attn(alone, alone, alone, average_attn_weights=False)[1][0]
        torch.testing.assert_close(seen[0].mass["first"][b, :, columns], w[..., 0])
        near = w.diagonal(0, -2, -1).clone()
        near[:, 1:] += w.diagonal(-1, -2, -1)
        after = w.triu(1).sum(-1)
        torch.testing.assert_close(seen[0].mass["near"][b, :, columns], near + after)
        torch.testing.assert_close(seen[0].exact_rows[b, ..., columns], w[:, [1, -1]])
        keep[:, 1, [0, 2, n - 1], 0] = False
        right = encoder(alone, src_mask=~keep[0])
        torch.testing.assert_close(found[b, columns], right[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_cross_attention_of_torch_has_the_padding_of_both_texts():
    torch.manual_seed(0)
    decoder = nn.TransformerDecoderLayer(d, H, 17, dropout=0.0, batch_first=True).eval()
    x, memory = texts(), texts(seed=1)
    swapped = PADDING.flip(0)  # of the texts that queries are of
    own = COLUMNS[::-1]
    edits = [ch.edits.knock_out(ch.prefix(2), positions=[1, -1], layers=["multihead_attn"])]
    with ch.compat.patched(), ch.intervene(decoder, edits) as done:
        found = decoder(x, memory, tgt_key_padding_mask=swapped, memory_key_padding_mask=PADDING)
    assert done.times(0) == 1
    for b in range(B):
        q, k = x[b : b + 1, own[b]], memory[b : b + 1, COLUMNS[b]]
        drop = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
        drop[[1, -1], :2] = True
        right = decoder(q, k, memory_mask=drop)
        torch.testing.assert_close(found[b, own[b]], right[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_lengths_say_where_a_text_ends():
    torch.manual_seed(0)
    layer, x = ch.nn.MultiHeadAttention(d, H), texts()
    mask = ch.lengths(keys=LENGTHS)
    with ch.watch(layer, stats=["entropy"], exact_rows=[-1, 5]) as seen:
        layer(x, mask=mask)
    with ch.intervene(layer, [ch.edits.scale(0.0, positions=[-1])]):
        found = layer(x, mask=mask)
    for b, n in enumerate(LENGTHS):
        with ch.watch(layer, exact_rows=[-1]) as alone:
            right = layer(x[b : b + 1, :n])
        torch.testing.assert_close(seen[0].exact_rows[b, :, 0, :n], alone[0].exact_rows[0, :, 0])
        assert bool(seen[0].exact_rows[b, :, 1].any()) == (n > 5)
        with ch.intervene(layer, [ch.edits.scale(0.0, positions=[n - 1])]):
            right = layer(x[b : b + 1, :n])
        torch.testing.assert_close(found[b, :n], right[0])
    real = torch.cat([seen[0].entropy[b, :, :n].flatten() for b, n in enumerate(LENGTHS)])
    mean = seen.scalars()["0.entropy"]  # padding does not count
    assert mean == pytest.approx(float(real.mean()), rel=1e-5)
    with pytest.raises(BadValue, match="query 7, and there are 7"):
        with ch.watch(layer, exact_rows=[7]):
            layer(x, mask=mask)


@torch.no_grad()
def test_an_edit_that_keeps_lengths_is_no_padding():
    layer, x = ch.nn.MultiHeadAttention(d, H), texts()
    edit = ch.edits.keep_only(ch.lengths(keys=3))
    with ch.intervene(layer, [edit]), ch.watch(layer, exact_rows=[-1]) as seen:
        layer(x)
    assert seen[0].queries == (T - 1,)


@torch.no_grad()
def test_dense_masks_are_not_taken_for_padding():
    """Their positions are columns, and a mask with cells for each text is about columns, too."""

    class Layer(nn.Module):
        def forward(self, x, mask):
            return ch.attention(x, x, x, mask=mask)

    layer, x = Layer(), texts().unsqueeze(1)
    real = ch.dense(keep=~PADDING[:, None, None, :])
    with ch.watch(layer, stats=[ch.mass({"first": ch.prefix(1)})]) as seen:
        layer(x, real)
    assert not seen[0].mass["first"][0].any() and bool(seen[0].mass["first"][1].all())


CELLS = torch.rand(B, 1, 1, T, generator=torch.Generator().manual_seed(5)) > 0.5


@torch.no_grad()
def test_a_group_with_cells_for_each_text_is_about_columns():
    encoder = nn.TransformerEncoderLayer(d, H, 17, batch_first=True).eval()
    stats = [ch.mass({"cells": ch.dense(keep=CELLS), "words": ch.dense(keep=CELLS[1])})]
    with ch.compat.patched(), ch.watch(encoder, stats=stats, exact_rows=range(T)) as seen:
        encoder(texts(), src_key_padding_mask=PADDING)
    w = seen[0].exact_rows
    for b, columns in enumerate(COLUMNS):
        n = LENGTHS[b]
        by_column = (w[b] * CELLS[b, 0]).sum(-1)[:, :n]
        torch.testing.assert_close(seen[0].mass["cells"][b, :, columns], by_column)
        by_position = (w[b, ..., columns] * CELLS[1, 0, 0, :n]).sum(-1)[:, :n]
        torch.testing.assert_close(seen[0].mass["words"][b, :, columns], by_position)


@torch.no_grad()
def test_an_edit_that_removes_no_visible_edge_is_said():
    layer, x = ch.nn.MultiHeadAttention(d, H, causal=True), texts()
    nothing = ch.edits.knock_out(ch.window(before=0, after=2) & ~ch.window(before=0, after=0))
    some = ch.edits.knock_out(ch.prefix(1))
    plain = layer(x)
    with pytest.warns(UserWarning, match=r"knock_out\(.*\) removed no visible edge"):
        with ch.intervene(layer, [nothing]) as done:
            found = layer(x)
            layer(x)
    assert found.equal(plain)
    assert "applied 2 times, removed no visible edge\n" in repr(done)
    with ch.intervene(layer, [some]) as done:  # the second time they are gone
        with pytest.warns(UserWarning, match="removed no visible edge"):
            with ch.intervene(layer, [some]) as inner:
                layer(x)
        layer(x)
    assert inner.without_edges == {0: 1} and done.without_edges[0] == 0
    hidden = ch.bias(torch.zeros(1, 1, 1, T).masked_fill(torch.arange(T) < 2, -torch.inf))

    class Biased(nn.Module):
        def forward(self, x):
            return ch.attention(x, x, x, bias=hidden)

    model = Biased()
    with pytest.warns(UserWarning, match="removed no visible edge"):
        with ch.intervene(model, [ch.edits.knock_out(ch.prefix(2))]) as done:
            model(x.unsqueeze(1))
    assert done.without_edges == {0: 1}

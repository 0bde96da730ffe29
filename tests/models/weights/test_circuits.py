"""`circuits` of own blocks, and of the model that ships."""

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead import demo
from clearhead.core.errors import BadValue


class Stack(nn.Module):
    def __init__(self, norm="pre", rotary=None):
        super().__init__()
        self.embed = ch.nn.TokenEmbedding(19, 12)
        self.blocks = nn.ModuleList(
            ch.nn.TransformerBlock(12, 3, kv_heads=1, causal=True, norm=norm, rotary=rotary)
            for _ in range(2)
        )
        self.head = nn.Linear(12, 19)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_rotated_keys_of_own_blocks(pairs):
    torch.manual_seed(0)
    rotary = ch.nn.RotaryPositions(4, pairs=pairs)
    model = Stack(rotary=rotary).double()
    with torch.no_grad():
        for x in model.parameters():
            x.normal_()
    model = model.float()
    found = ch.circuits(model)
    layer, gain = model.blocks[1].attention, model.blocks[1].norm_1.weight
    with torch.no_grad():
        rows = torch.zeros(1, 12, 8, 4)
        q = layer.W_query.weight.T.unflatten(-1, (3, 4)).movedim(1, 0) * gain[:, None]
        k = layer.W_key.weight.T[None] * gain[:, None]
        q, k = (x - x.mean(1, keepdim=True) for x in (q, k))
        at = [rotary(rows + x[:, :, None]) for x in (q, k)]  # every row at positions 0 to 7
        want = at[0][1, :, 6] @ at[1][0, :, 4].T
    assert torch.allclose(found.qk(1, 1, offset=2).dense(), want, atol=1e-4)


def test_a_head_that_copies():
    torch.manual_seed(0)
    model = Stack()
    attention = model.blocks[0].attention
    with torch.no_grad():
        model.head.weight.copy_(model.embed.table.weight)
        eye = torch.eye(12)
        attention.W_value.weight.copy_(eye[:4])  # one value head, which three heads read
        attention.out_proj.weight.copy_(torch.cat([eye[:, :4], -eye[:, :4], eye[:, 4:8]], 1))
    scores = ch.circuits(model).copying()
    assert scores[0, 0] > 0.99 and scores[0, 1] < -0.99 and abs(scores[0, 2]) < 0.9


def test_the_model_that_ships():
    found = ch.circuits(demo.load().model)
    assert found.copying().shape == (2, 8) and found.composition("K").shape == (2, 8, 2, 8)
    assert found.inexact == () and found.modules == ("blocks.0.attention", "blocks.1.attention")
    assert abs(found.baseline("K").mean - 128**-0.5) < 0.002


def test_a_model_of_images_is_refused():
    model = Stack()
    model.main_input_name = "pixel_values"  # as in transformers
    with pytest.raises(BadValue, match="The Stack reads pixel_values, and not ids"):
        ch.circuits(model)


def test_blocks_with_the_norm_after_the_sum_are_refused():
    with pytest.raises(BadValue, match=r"the norm blocks\.0\.norm_2 of another block"):
        ch.circuits(Stack("post"))

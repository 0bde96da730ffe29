"""The names of TransformerLens for recordings of modules that are not of transformers."""

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.core.errors import BadValue

B, T, H, D = 2, 7, 3, 4


def blocks(n=3, **options):
    torch.manual_seed(0)
    layers = (ch.nn.TransformerBlock(H * D, H, causal=True, **options) for _ in range(n))
    return nn.Sequential(*layers).eval()


def recorded(model, **options):
    with torch.no_grad(), ch.watch(model, **options) as seen:
        model(torch.randn(B, T, H * D))
    return seen


def test_names_and_shapes(tmp_path):
    seen = recorded(blocks(2), exact_rows=range(T), outputs=True, inputs=True)
    tensors = seen.to_hook_names()
    one = {
        "hook_pattern": (B, H, T, T),
        **{name: (B, T, H, D) for name in ("hook_z", "hook_q", "hook_k", "hook_v")},
    }
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        f"blocks.{i}.attn.{name}": shape for i in range(2) for name, shape in one.items()
    }
    for i, call in enumerate(seen):
        assert torch.equal(tensors[f"blocks.{i}.attn.hook_z"][:, :, 1], call.output[:, 1])
        assert torch.equal(tensors[f"blocks.{i}.attn.hook_k"][:, :, 1], call.key[:, 1])
        assert torch.equal(tensors[f"blocks.{i}.attn.hook_pattern"], call.exact_rows)
    loaded = ch.load(seen.save(tmp_path / "seen.safetensors")).to_hook_names()
    assert all(torch.equal(loaded[name], x) for name, x in tensors.items())


def test_rows_of_a_pattern_are_columns_of_the_call_in_any_order():
    model, x = blocks(1), torch.randn(B, T, H * D)
    order = [3, 0, -1, 2, 1, 4, 5]
    with torch.no_grad(), ch.watch(model, exact_rows=order) as seen:
        model(x)
    with torch.no_grad(), ch.watch(model, exact_rows=range(T)) as right:
        model(x)
    assert torch.equal(
        seen.to_hook_names()["blocks.0.attn.hook_pattern"], right[0].exact_rows
    )  # fmt: skip


def test_rotated_queries_have_their_own_name():
    seen = recorded(blocks(1, rotary=ch.nn.RotaryPositions(D)), inputs=True)
    assert [*seen.to_hook_names()] == [
        f"blocks.0.attn.{name}" for name in ("hook_rot_q", "hook_rot_k", "hook_v")
    ]


def test_the_number_is_that_of_the_block_when_some_are_recorded():
    seen = recorded(blocks(), layers=[2], outputs=True)
    assert [*seen.to_hook_names()] == ["blocks.2.attn.hook_z"]


def test_an_encoder_decoder_of_torch():
    model = nn.Transformer(16, 4, 2, 1, 17, 0.0, batch_first=True).train()
    x = torch.randn(B, T, 16)
    with torch.no_grad(), ch.compat.patched(), ch.watch(model, outputs=True) as seen:
        model(x, x[:, :5])
    assert (
        {"decoder_blocks.0.cross_attn.hook_z"}
        <= {*seen.to_hook_names()}
        <= {
            *(f"encoder_blocks.{i}.attn.hook_z" for i in range(2)),
            *(f"decoder_blocks.0.{attn}.hook_z" for attn in ("self_attn", "cross_attn")),
        }
    )


class Twice(nn.Module):
    """A block that runs the same attention twice, or two of them."""

    def __init__(self, shared):
        super().__init__()
        self.first = ch.nn.MultiHeadAttention(H * D, H)
        self.second = self.first if shared else ch.nn.MultiHeadAttention(H * D, H)

    def forward(self, x):
        return self.second(self.first(x))


class Own(nn.Module):
    def forward(self, x):
        x = x.unflatten(-1, (H, D)).transpose(1, 2)
        return ch.attention(x, x, x).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        (lambda: blocks(1)[0], {}, "attention has no name.*has none"),
        (lambda: nn.Sequential(blocks(1), blocks(1)), {}, "0.0.attention has no name.*has 2"),
        (lambda: nn.Sequential(Twice(False)), {}, "0.first and 0.second would both be blocks.0"),
        (lambda: nn.Sequential(Twice(True)), {}, "0.first has no name.*several times"),
        (lambda: nn.Sequential(Twice(True)), {"layers": [1]}, "0.first has no name.*several times"),
        (lambda: blocks(1), {"heads": [1]}, "was recorded for heads 1"),
        (lambda: blocks(1), {"exact_rows": range(3)}, "without 4 of 7 queries"),
        (lambda: blocks(1), {"outputs": False}, "no weights of all queries, no outputs"),
        (lambda: nn.Sequential(Own()), {"inputs": True}, "names are uncertain"),
    ],
)
def test_what_has_no_certain_name_is_refused(model, options, says):
    with pytest.raises(BadValue, match=says) as error:
        recorded(model(), **{"outputs": True, **options}).to_hook_names()
    assert error.value.rule.endswith(".") and error.value.hint.endswith(".")

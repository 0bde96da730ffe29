"""What the heads of a report carry, and models in which that is unknown."""

import torch
from torch import nn

import clearhead as ch
from clearhead.views.html.report import snapshot


class Block(nn.Module):
    """Attention, whose output projection may be followed by a gate in the same module."""

    def __init__(self, H=2, D=5, changes=False):
        super().__init__()
        self.H, self.changes = H, changes
        self.o_proj = nn.Linear(H * D, H * D, bias=False)

    def forward(self, x):
        heads = x.unflatten(-1, (self.H, -1)).transpose(-3, -2)
        z = ch.attention(heads, heads, heads, mask=ch.causal).transpose(-3, -2).flatten(-2)
        return self.o_proj(2 * z if self.changes else z)


def report(changes):
    torch.manual_seed(0)
    return ch.report(Block(changes=changes), torch.randn(1, 7, 10), progress=False)


def test_the_norm_weighted_attention_of_heads():
    torch.manual_seed(0)
    model, x = Block(), torch.randn(1, 7, 10)
    found = ch.report(model, x, progress=False)
    heads = x[0].double().view(7, 2, 5).transpose(0, 1)
    scores = (heads @ heads.mT / 5**0.5).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    W_O = model.o_proj.weight.double().T.view(2, 5, 10)
    norms = (heads @ W_O).norm(dim=-1)
    torch.testing.assert_close(found.layers[0].value_norms.double(), norms, rtol=1e-5, atol=1e-6)
    parts = scores.softmax(-1) * norms[:, None]
    parts = parts / parts.sum(-1, keepdim=True)
    for h, head in enumerate(found.heads):
        means = {
            "first": parts[h, :, 0].mean(),
            "same": parts[h].diagonal().mean(),
            "previous": parts[h].diagonal(-1).sum() / 7,
            "next": torch.tensor(0.0),
        }
        for name, mean in means.items():
            assert abs(head.norm_weighted[name] - mean.item()) < 1e-5, name
    assert found.as_rows()[1]["norm_weighted_first"] == found[0, 1].norm_weighted["first"]
    assert f" {found[0, 1].norm_weighted['first']:.2f}\n" in str(found) and "by norm:" in str(found)


def test_norms_of_another_projection_are_withheld():
    found = report(changes=True)
    [layer] = found.layers
    assert layer.value_norms is None and "o_proj" in layer.norms_withheld
    assert not any(head.norm_weighted for head in found.heads) and "by norm:" not in str(found)
    assert "o_proj" in snapshot(found)["layers"][0]["norms_withheld"]
    assert "norms" in snapshot(report(changes=False))["layers"][0]

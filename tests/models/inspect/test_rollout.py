"""Attention rollout against the product of dense matrices."""

import pytest
import torch

import clearhead as ch
from clearhead.core.errors import BadType, BadValue

B, T, d = 2, 7, 12


def record(rows=range(T), layers=3, dtype=torch.float64, heads=None):
    torch.manual_seed(0)
    blocks = (ch.nn.TransformerBlock(d, 3, causal=True) for _ in range(layers))
    model = torch.nn.Sequential(*blocks).to(dtype).eval()
    with torch.no_grad(), ch.watch(model, exact_rows=rows, heads=heads) as seen:
        model(torch.randn(B, T, d, dtype=dtype))
    return seen


@pytest.mark.parametrize("residual", [0.0, 0.3, 0.5, 1.0])
def test_by_hand(residual):
    seen = record()
    right = torch.eye(T, dtype=torch.float64).expand(B, T, T)
    for call in seen:
        a = residual * torch.eye(T) + (1 - residual) * call.exact_rows.mean(1)
        right = a @ right
    found = ch.rollout(seen, residual=residual)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(found.sum(-1), torch.ones(B, T).double())
    torch.testing.assert_close(ch.rollout(seen, [2, -1], residual=residual), right[:, [2, -1]])


class Sinks(torch.nn.Module):
    """Attention with sink logits, in which a query may look at no key."""

    def __init__(self):
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64))

    def forward(self, x):
        q = x.unflatten(-1, (3, -1)).transpose(1, 2)
        keep = torch.ones(T, T, dtype=torch.bool).tril()
        keep[4] = False
        out = ch.attention(q, q, q, mask=ch.dense(keep=keep), sinks=self.sinks)
        return x + out.transpose(1, 2).flatten(2)


def test_the_weight_of_a_sink_stays_with_the_token():
    torch.manual_seed(0)
    model = torch.nn.Sequential(Sinks(), Sinks())
    with torch.no_grad(), ch.watch(model, exact_rows=range(T)) as seen:
        model(torch.randn(B, T, d, dtype=torch.float64))
    right = torch.eye(T, dtype=torch.float64).expand(B, T, T)
    for call in seen:
        weights = call.exact_rows.mean(1)
        assert (weights.sum(-1) < 0.9).any()
        right = (
            0.3 * torch.eye(T) + 0.7 * (weights + torch.diag_embed(1 - weights.sum(-1)))
        ) @ right
    found = ch.rollout(seen, residual=0.3)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(found.sum(-1), torch.ones(B, T).double())
    torch.testing.assert_close(ch.rollout(seen, [-1, 1], residual=0.3), right[:, [-1, 1]])
    torch.testing.assert_close(found[:, 4], torch.eye(T).double()[4].expand(B, T))


def test_autocast_changes_nothing():
    recording = record(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ch.rollout(recording)
    assert torch.equal(found, ch.rollout(recording))


def test_rows_in_any_order_and_only_those_asked_for_of_the_last_layer():
    whole, mixed = record(), record(rows=[3, 1, 0, 2, 6, 5, 4])
    torch.testing.assert_close(ch.rollout(mixed, [5, 0]), ch.rollout(whole, [5, 0]))
    mixed.calls[2] = record(rows=[5])[2]
    torch.testing.assert_close(ch.rollout(mixed), ch.rollout(whole, [5]))


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (lambda: ch.rollout("run"), BadType, "got a str"),
        (lambda: ch.rollout(ch.Recording()), BadValue, "without calls"),
        (lambda: ch.rollout(record(rows=None)), BadValue, "recorded without rows"),
        (lambda: ch.rollout(record(heads=[1])), BadValue, "recorded for heads 1"),
        (lambda: ch.rollout(record(rows=[2, 3])), BadValue, "5 required queries"),
        (lambda: ch.rollout(record(), [T]), BadValue, "Row 7"),
        (lambda: ch.rollout(record(), residual=1.5), BadValue, "residual=1.5"),
        (lambda: ch.rollout(record(), residual="x"), BadType, "residual='x'"),
        (lambda: ch.rollout(record(), residual=True), BadType, "residual=True"),
        (lambda: ch.rollout(record(), residual=float("nan")), BadValue, "residual=nan"),
    ],
)
def test_errors_have_three_parts(wrong, kind, says):
    with pytest.raises(kind, match=says) as error:
        wrong()
    assert error.value.rule.endswith(".") and error.value.hint.endswith(".")

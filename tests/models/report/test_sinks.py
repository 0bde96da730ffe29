"""Tokens of a text that a model uses as sinks besides the first: a large norm, and much weight."""

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.models.report import summary
from tests.models.report import simulated_heads as simulated

T, SINK = 64, 20
TOKENS = [*simulated.text(T, 1)[:SINK], ",", *simulated.text(T, 1)[SINK + 1 :]]


class Attention(nn.Module):
    """Two heads: one looks at `key` if it may; the other has uniform weights."""

    def __init__(self, key, strength):
        super().__init__()
        self.key, self.strength = key, strength

    def forward(self, x):
        keys = torch.eye(T).expand(1, 2, T, T)
        queries = torch.zeros(1, 2, T, T)
        queries[:, 0, :, self.key] = self.strength
        ch.attention(queries, keys, keys, mask=ch.causal, scale=1.0)
        return x


class Block(nn.Module):
    """A layer with a norm and attention, which multiplies the vector of one token by `factor`."""

    def __init__(self, attention, token, factor):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), attention
        self.token, self.factor = token, factor

    def forward(self, x):
        self.attention(self.norm(x))
        x = x.clone()
        x[:, self.token] *= self.factor
        return x


class Model(nn.Module):
    def __init__(self, token=SINK, factor=9.0, strength=5.0, written_by=0):
        super().__init__()
        factors = [factor if i == written_by else 1.0 for i in range(3)]
        self.layers = nn.ModuleList(Block(Attention(token, strength), token, x) for x in factors)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def stream(seed=0):
    x = torch.randn(1, T, 8, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


def test_a_later_sink_is_named_with_its_norm_and_weight():
    report = ch.report(Model(), stream(), tokens=TOKENS)
    assert [[x.token for x in layer.registers] for layer in report.layers] == [[], [SINK], [SINK]]
    sink = report.layers[1].registers[0]
    assert sink.name == "," and sink.norm == pytest.approx(9.0)
    # By hand: half of the heads give it e^5 / (e^5 + n) of the weight of a query with n other keys.
    others = torch.arange(SINK, T)
    weight = (torch.e**5 / (torch.e**5 + others)).sum() + (1 / (others + 1)).sum()
    even = 2 * (1 / (others + 1)).sum()
    assert sink.weight == pytest.approx(float(weight / even), rel=1e-5)
    looks, even = report.layers[1].heads
    assert [role.name for role in looks.roles] == ["sinks"] and not even.roles
    # Over all queries with a choice. Those before the sink cannot look at it.
    mass = (torch.e**5 / (torch.e**5 + others)).sum() / (T - 1)
    assert looks.roles[0].mass == pytest.approx(float(mass), rel=1e-5)
    # Before the sink is known it is a comma that gets much weight.
    assert "sinks" not in {role.name for role in report.layers[0].heads[0].roles}
    text = " ".join(summary(report).split())
    assert "Sinks besides the first token: ',' (20) (in layer" in text


@pytest.mark.parametrize(
    "change",
    [{"factor": 2.0}, {"strength": 0.0}, {"written_by": 3}, {"token": 0}],
    ids=["a small norm", "no weight", "no large norm", "the first token"],
)
def test_other_tokens_are_not_sinks(change):
    report = ch.report(Model(**change), stream(), tokens=TOKENS)
    assert not any(layer.registers for layer in report.layers)
    assert "Sinks" not in summary(report)


def test_a_large_norm_of_the_word_itself_is_not_a_sink():
    x = stream()
    x[:, SINK] *= 9
    report = ch.report(Model(factor=1.0), x, tokens=TOKENS)
    assert report.layers[1].stream_norms[SINK] > 8
    assert not any(layer.registers for layer in report.layers)


def test_sinks_are_those_of_the_real_tokens():
    """Padding on the left changes no number, though its vectors are long."""

    class Padded(Model):
        base_model_prefix = ""

        def forward(self, x, attention_mask):
            return super().forward(x)

    def padded_attention(self, x):
        keys = torch.eye(T + 8).expand(1, 2, T + 8, T + 8)
        queries = torch.zeros(1, 2, T + 8, T + 8)
        queries[:, 0, :, self.key] = self.strength
        keep = torch.arange(T + 8) >= 8
        ch.attention(queries, keys, keys, mask=ch.causal & ch.dense(keep=keep), scale=1.0)
        return x

    model = Padded(token=SINK + 8)
    for layer in model.layers:
        layer.attention.forward = padded_attention.__get__(layer.attention)
    x = torch.cat([50 * torch.randn(1, 8, 8), stream()], 1)
    mask = (torch.arange(T + 8) >= 8).long()[None]
    report = ch.report(model, {"x": x, "attention_mask": mask}, tokens=[*["pad"] * 8, *TOKENS])
    right = ch.report(Model(), stream(), tokens=TOKENS).layers[1].registers[0]
    [own] = report.layers[1].registers
    assert own.token == SINK + 8 and own.name == ","
    assert (own.norm, own.weight) == pytest.approx((right.norm, right.weight), rel=1e-5)

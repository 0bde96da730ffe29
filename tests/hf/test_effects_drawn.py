"""Effects of models, inputs and metrics drawn at random, against eager attention and a hook.

Of real tokens alone: on padding eager gives a uniform mixture, and clearhead gives 0.
"""

import random
import warnings

import pytest
import torch

import clearhead as ch
from tests.hf.test_effects_of_models import (
    build,
    call_names,
    eager_heads,
    next_token,
    projection,
    value,
)

DECODERS = ("llama", "mistral", "mixtral", "gpt2", "opt")


def drawn(seed):
    """A model kind, its inputs, a metric and what it is, and how many copies run at once."""
    draw = random.Random(seed)
    source = torch.Generator().manual_seed(seed)
    kind = draw.choice([*DECODERS, "bert", "sentence", "t5", "bart", "vit"])
    B, T = draw.randint(1, 4), draw.randint(5, 9)

    def ids(length):
        return torch.randint(5, 50, (B, length), generator=source)

    if kind == "vit":
        inputs = {"pixel_values": torch.randn(B, 3, 8, 8, generator=source)}
    else:
        inputs = {"input_ids": ids(T)}
        if side := draw.choice(["left", "right", None]):
            pads = torch.randint(0, T - 3, (B, 1), generator=source)
            real = (torch.arange(T) >= pads).long()
            inputs["attention_mask"] = real if side == "left" else real.flip(1)
    own = kind not in DECODERS or draw.random() < 0.5
    by_logits = draw.random() < 0.3
    if own and not by_logits:
        if kind in ("vit", "sentence"):
            inputs["labels"] = torch.randint(0, 3, (B,), generator=source)
        else:
            inputs["labels"] = ids(draw.randint(3, 9) if kind in ("t5", "bart") else T)
            inputs["labels"][:, draw.randrange(1, 3)] = -100
            if kind not in ("t5", "bart") and "attention_mask" in inputs:
                real = inputs["attention_mask"]  # and the token before, which predicts
                inputs["labels"][(real * torch.cat([real[:, :1], real[:, :-1]], 1)) == 0] = -100
    elif kind in ("t5", "bart"):
        inputs["decoder_input_ids"] = ids(draw.randint(2, 6))
    if kind in ("llama", "gpt2", "opt") and draw.random() < 0.5:
        inputs["use_cache"] = False

    def third_word(out):
        x = out.logits[..., 2].square()
        real = inputs.get("attention_mask")
        return (x * real).sum() if real is not None and real.shape == x.shape else x.sum()

    metric, right = "loss", (lambda out: out.loss) if own else next_token(inputs)
    if by_logits:
        metric = right = third_word
    elif own and draw.random() < 0.5:
        metric = lambda out: out.loss  # noqa: E731
    return kind, inputs, metric, right, draw.choice([None, None, 1, 2, 3])


@pytest.mark.parametrize(
    "seed",
    [
        *range(6),
        *(
            pytest.param(random.SystemRandom().randrange(2**31), marks=pytest.mark.slow)
            for _ in range(40)
        ),
    ],
)
def test_whatever_is_drawn_is_right(seed):
    kind, inputs, metric, right, at_once = drawn(seed)
    ours, eager, pattern = build(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = ch.effects(ours, inputs, metric, at_once=at_once, estimate=seed % 2 == 0)
    plain = value(eager, inputs, right)
    drawn_as = f"seed {seed}: {kind}, {sorted(inputs)}, at_once={at_once}"
    assert found.baseline == pytest.approx(plain, rel=1e-4, abs=1e-4), drawn_as
    modules = [projection(eager, name, pattern) for name in dict.fromkeys(call_names(ours, inputs))]
    assert len(found) == len(modules) * eager_heads(eager)
    for e in found:
        change = value(eager, inputs, right, modules[e.layer], e.head) - plain
        # A random T5 multiplies rounding: in float64 the two agree to 1e-12.
        assert e.exact == pytest.approx(change, rel=1e-3, abs=2e-4 + 1e-4 * abs(plain)), (
            f"{drawn_as}, {e.name}"
        )

"""The loss curve, and a training rate that would end in numbers which cannot be drawn."""

import math

import pytest
from typer.testing import CliRunner

from clearhead.core.errors import BadValue
from clearhead_cli import app
from examples.storyteller.plots import draw_losses

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("held_out", [math.nan, math.inf, 2.5])
@pytest.mark.parametrize("losses", [[3.0, math.inf, math.nan], [math.nan], []])
def test_a_loss_that_is_not_finite_is_left_out(tmp_path, losses, held_out):
    path = draw_losses({"loss": losses}, tmp_path / "loss.png", held_out=held_out)
    assert path is not None and path.stat().st_size > 1000


def test_a_rate_that_is_not_finite_is_refused_before_anything_is_written(tmp_path):
    out = tmp_path / "out"
    ran = CliRunner().invoke(app, ["train", "--steps", "1", "--rate", "inf", "--out", str(out)])
    assert isinstance(ran.exception, BadValue)
    assert ran.exception.gave == "rate=inf." and not out.exists()

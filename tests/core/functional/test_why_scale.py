"""Check that the measured effects of scaling are those of the lesson."""

import math

import pytest
import torch

from clearhead.core.errors import BadValue
from clearhead.core.functional.why_scale import _jacobian_norm, why_scale


def test_variance_grows_with_d_and_scaling_takes_it_back():
    report = why_scale(256)
    for d, raw, scaled in zip(
        report.sizes, report.variance_raw, report.variance_scaled, strict=True
    ):
        assert raw == pytest.approx(d, rel=0.15)
        assert scaled == pytest.approx(raw / d, rel=1e-9)


def test_unscaled_softmax_saturates_and_its_gradient_vanishes():
    report = why_scale(256, keys=32)
    i = report.sizes.index(256)
    assert report.entropy_raw[i] < 0.5 < 2.5 < report.entropy_scaled[i] < math.log(32)
    assert report.gradient_raw[i] < report.gradient_scaled[i] / 2
    assert report.weights_raw.sum() == pytest.approx(1) == report.weights_scaled.sum()
    assert report.weights_raw[0] > 4 * report.weights_scaled[0]


def test_the_closed_form_of_the_gradient_is_the_jacobian():
    x = torch.randn(7, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda s: torch.softmax(s, -1), x)
    torch.testing.assert_close(_jacobian_norm(torch.softmax(x, -1)), jacobian.norm())


def test_sizes_may_come_one_by_one():
    assert why_scale(8, sizes=iter([4, 16]), keys=5, queries=3).sizes == [4, 8, 16]


def test_it_prints_a_row_for_each_size():
    text = str(why_scale(6, keys=5, sizes=(2,)))
    assert "     2 " in text and "     6 " in text and "At d = 6 " in text


@pytest.mark.parametrize("wrong, text", [
    ({"size": 0}, "size=0."), ({"keys": -1}, "keys=-1."), ({"sizes": (4, 0)}, "sizes[1]=0."),
])  # fmt: skip
def test_sizes_are_positive(wrong, text):
    with pytest.raises(BadValue) as error:
        why_scale(**wrong)
    assert str(error.value) == (
        f"{text}\n  Rule: head sizes and counts are whole numbers from 1 to 65536.\n"
        "  Hint: pass a number in between."
    )


def test_a_size_may_be_any_whole_number():
    found = why_scale(torch.tensor(16), sizes=[4, 16], keys=torch.tensor(8))
    assert found.sizes == [4, 16] and type(found.size) is int and found.weights_raw.shape == (8,)

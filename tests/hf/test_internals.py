"""A transformers that lacks what clearhead reads is refused by `register`, with its version."""

import pytest

import clearhead as ch
from clearhead.core.errors import BadValue
from clearhead.hf import internals

transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")


@pytest.fixture
def unchecked():
    """The check runs again here, and once more after the test."""
    internals.check_internals.cache_clear()
    yield
    internals.check_internals.cache_clear()


def other_closure(chunks, left_padding):
    def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
        return (q_idx - left_padding) // chunks == (kv_idx - left_padding) // chunks

    return inner_mask


def older_sdpa_mask(batch_size, cache_position, kv_length, kv_offset=0):
    """As in transformers 5.0."""


@pytest.mark.parametrize(
    "path, value, name",
    [
        ("masking_utils.causal_mask_function", None, "masking_utils.causal_mask_function"),
        ("masking_utils.and_masks", None, "masking_utils.and_masks with mask_functions"),
        (
            "masking_utils.chunked_overlay",
            other_closure,
            "masking_utils.chunked_overlay with chunk_size, left_padding",
        ),
        (
            "masking_utils.sdpa_mask",
            older_sdpa_mask,
            "masking_utils.sdpa_mask(batch_size, q_length",
        ),
        (
            "utils.output_capturing._active_collector",
            None,
            "output_capturing._active_collector.get",
        ),
    ],
)
def test_a_name_that_is_missing(path, value, name, unchecked, monkeypatch):
    ch.hf.register()  # all that is read is there
    internals.check_internals.cache_clear()
    if value is None:
        monkeypatch.delattr(f"transformers.{path}")
    else:
        monkeypatch.setattr(f"transformers.{path}", value)
    with pytest.raises(BadValue) as error:
        ch.hf.register()
    assert error.value.gave.startswith(f"transformers {transformers.__version__} has no ")
    assert name in error.value.gave
    assert error.value.rule.startswith("clearhead is tested with transformers 5.")
    assert "pip install" in error.value.hint


def test_the_version_that_is_installed_is_named_as_tested():
    major, minor, *_ = transformers.__version__.split(".")
    assert f"{major}.{minor}" in internals.TESTED

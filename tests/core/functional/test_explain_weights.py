"""Weights that another program computed become a trace of one step, or are refused."""

import warnings

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import BadType, BadValue

QUERIES, KEYS = "le chat noir dort .".split(), "the black cat sleeps on it .".split()


def weights(*leading, dtype=torch.float32):
    drawn = torch.Generator().manual_seed(3)
    logits = torch.randn(*leading, len(QUERIES), len(KEYS), generator=drawn)
    return (3 * logits).softmax(-1).to(dtype)


@pytest.mark.parametrize(
    ("leading", "axes", "about"),
    [
        ((), "q k", "Tq=5 Tk=7"),
        ((3,), "h q k", "H=3 Tq=5 Tk=7"),
        ((2, 3), "b h q k", "B=2 H=3 Tq=5 Tk=7"),
    ],
)
def test_the_trace_has_the_weights_and_labels(leading, axes, about):
    given = weights(*leading)
    trace = ch.explain_weights(given, tokens=QUERIES, key_tokens=KEYS)
    assert trace.names == ("weights",) and trace.step("weights").axes == axes
    assert trace["weights"].equal(given)
    assert trace.queries == tuple(QUERIES) and trace.keys == tuple(KEYS)
    assert trace.about.startswith(about)
    why = trace.step("weights").why
    assert why == "Another program computed these weights. Their scores and values are unknown."


def test_tokens_label_keys_of_a_square_matrix_and_none_are_numbers():
    square = torch.eye(5)
    assert ch.explain_weights(square, tokens=QUERIES).keys == tuple(QUERIES)
    trace = ch.explain_weights(weights(), tokens=QUERIES)
    assert trace.keys is None and trace.labels("k", 7) == list("0123456")


def test_arrays_are_read_without_a_warning():
    given = weights(3).numpy()
    given.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = ch.explain_weights(given)
    assert trace["weights"].numpy().tobytes() == given.tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_weights_still_sum_to_1(dtype):
    many = torch.rand(11, 997, generator=torch.Generator().manual_seed(0)).softmax(-1)
    why = ch.explain_weights(many.to(dtype)).step("weights").why
    assert "less than 1" not in why


def test_a_row_that_sums_to_less_than_1_is_noted_and_a_masked_one_is_not():
    given = weights(3)
    given[1, 2] = 0
    assert "sum" not in ch.explain_weights(given).step("weights").why
    given[0, 4] *= 0.72
    why = ch.explain_weights(given).step("weights").why
    assert "Some rows sum to less than 1, one to 0.72" in why


SUMS = weights(3)
SUMS[1, 2] *= 1.25


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (None, BadType, r"The weights are None\.\n.*\n.*attn_implementation=\"eager\""),
        ([weights(3)], BadType, r"The weights are a list\.\n.*\n.*report_weights"),
        ("abc", BadType, r"The weights are a str\."),
        (weights(3) > 0.5, BadType, r"a Tensor of torch.bool cpu\."),
        (weights(3).to("meta"), BadType, r"a Tensor of torch.float32 meta\."),
        (np.array(["a"]), BadType, r"a ndarray of <U1"),
        (weights(3).to_sparse(), BadType, r"of layout torch.sparse_coo"),
        (weights(3)[0, 0], BadValue, r"the shape \(7,\)"),
        (weights(2, 3)[None], BadValue, r"the shape \(1, 2, 3, 5, 7\)"),
        (-weights(3), BadValue, r"between -0\.\d+ and -.*\n.*\n.*not scores"),
        (weights(3) / torch.zeros(()), BadValue, r"between inf and inf"),
        (
            weights(3).index_fill(1, torch.tensor(2), torch.nan),
            BadValue,
            r"nan.*\n.*\n.*nan_to_num",
        ),
        (SUMS, BadValue, r"A row of the weights sums to 1\.25\.\n.*\n.*model\.eval"),
    ],
)
def test_other_numbers_are_refused(given, error, text):
    with pytest.raises(error, match=text):
        ch.explain_weights(given)


def test_labels_that_do_not_fit_are_refused():
    with pytest.raises(BadValue, match="tokens has 7 entries for 5 positions"):
        ch.explain_weights(weights(3), tokens=KEYS)
    with pytest.raises(BadValue, match="key_tokens has 5 entries for 7 positions"):
        ch.explain_weights(weights(3), tokens=QUERIES, key_tokens=QUERIES)
    with pytest.raises(BadType, match="tokens is one string"):
        ch.explain_weights(weights(3), tokens="le chat")

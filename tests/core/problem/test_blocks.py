"""Blocks have the bits of ggml's reference quantisation, and other operations read numbers."""

import copy
import pickle

import pytest
import torch

from clearhead.core.errors import BadValue
from clearhead.core.problem.blocks import BYTES, BlockTensor, in_blocks

FORMATS = pytest.mark.parametrize("format", list(BYTES))


def vectors(*shape: int, scale: float = 1.0) -> torch.Tensor:
    x = torch.randn(*shape) * scale
    x[..., 0, :] = 0  # a block of zeros has scale 0
    x[..., -1, :] = torch.arange(float(shape[-1])) - 40  # and halves are rounded away from 0
    return x


@FORMATS
@pytest.mark.parametrize("scale", [1e-8, 1e-3, 1.0, 100.0, 6e4])
def test_the_bits_are_those_of_ggml(format, scale):
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGMLQuantizationType

    torch.manual_seed(0)
    x, kind = vectors(2, 3, 50, 96, scale=scale), GGMLQuantizationType[format.upper()]
    blocks, theirs = in_blocks(x, format), quants.quantize(x.numpy(), kind)
    assert torch.equal(blocks.stored, torch.from_numpy(theirs))
    read = torch.from_numpy(quants.dequantize(theirs, kind))
    assert torch.equal(blocks.dequantize(), read)
    assert in_blocks(blocks, format) is blocks
    # What was read from blocks has the same blocks.
    assert torch.equal(in_blocks(read, format).dequantize(), read)


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_stay_in_blocks_and_other_operations_read_numbers(format, dtype):
    x = in_blocks(vectors(2, 3, 10, 64).to(dtype), format)
    read = x.dequantize()
    assert type(read) is torch.Tensor and read.dtype is x.dtype is dtype and read.shape == x.shape
    order = torch.tensor([1, 0])
    for same in (
        lambda y: y[:, :, 2:5], lambda y: y[1:], lambda y: y.index_select(0, order),
        lambda y: y.narrow(-2, 3, 4), lambda y: y.detach(), lambda y: y.clone(),
        copy.copy, copy.deepcopy, lambda y: pickle.loads(pickle.dumps(y)),
    ):  # fmt: skip
        assert isinstance(same(x), BlockTensor)
        assert torch.equal(same(x).dequantize(), same(read))
    for plain in (
        lambda y: y[..., :32], lambda y: y.index_select(-1, order), lambda y: y * 2,
        lambda y: torch.cat([y, y], -2), lambda y: y.transpose(1, 2), lambda y: y.sum(),
        lambda y: y.repeat_interleave(2, 0), lambda y: y[[1, 0]],
    ):  # fmt: skip
        assert type(plain(x)) is torch.Tensor and torch.equal(plain(x), plain(read))
    with pytest.raises(BadValue, match="not changed in place"):
        x.mul_(2)
    assert "tensor" in repr(x).lower()


def test_only_whole_blocks():
    with pytest.raises(BadValue, match=r"vectors of 48 numbers"):
        in_blocks(torch.zeros(1, 48), "q8_0")

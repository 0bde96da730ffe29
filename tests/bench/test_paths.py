"""The engines that `auto` chooses on a described GPU; none is needed."""

import pytest

from bench.paths import CALLS, path_of

pytest.importorskip("triton")


def test_twelve_typical_calls():
    chosen = {name: path_of(name, (9, 0)) for name in CALLS}
    assert len(chosen) == 12 and all(reason for _, reason in chosen.values())
    triton = {name for name, (engine, _) in chosen.items() if engine == "triton"}
    assert triton == {
        "causal, float32", "causal, float32, grouped heads", "causal, head size 100",
        "a chunk after a cache", "a window and a prefix", "causal with ALiBi",
        "causal with a soft cap",
    }  # fmt: skip
    assert {engine for engine, _ in chosen.values()} == {"fused", "triton"}
    assert "cudnn or flash" in chosen["causal"][1]
    assert "cudnn or flash" in chosen["a step of decoding"][1]

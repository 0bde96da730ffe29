"""Print which engine `auto` chooses for typical calls on a GPU, and why, without the GPU:

python -m bench.paths 9.0
"""

import sys
from dataclasses import replace
from unittest import mock

import torch

from clearhead.core.engines.choice import first_capable
from clearhead.core.masks import Causal, Mask, causal, everything, prefix, window
from clearhead.core.problem.biases import alibi
from clearhead.core.problem.check import Options, make_problem

BF16, F32 = torch.bfloat16, torch.float32
CHUNK = Causal(align="end")
CALLS: dict[str, tuple[dict[str, object], Mask, dict[str, object]]] = {
    "plain": ({}, everything, {}),
    "causal": ({}, causal, {}),
    "causal, grouped heads": ({"G": 2}, causal, {}),
    "causal, float32": ({"dtype": F32}, causal, {}),
    "causal, float32, grouped heads": ({"dtype": F32, "G": 2}, causal, {}),
    "causal, head size 80": ({"D": 80}, causal, {}),
    "causal, head size 100": ({"D": 100}, causal, {}),
    "a step of decoding": ({"Tq": 1}, CHUNK, {}),
    "a chunk after a cache": ({"Tq": 128}, CHUNK, {}),
    "a window and a prefix": ({}, window(before=511, after=0) | prefix(4), {}),
    "causal with ALiBi": ({}, causal, {"bias": alibi()}),
    "causal with a soft cap": ({}, causal, {"softcap": 30.0}),
}


def path_of(name: str, capability: tuple[int, int]) -> tuple[str, str]:
    """Return the engine that `auto` chooses for a call of `CALLS`, and the reasons, as `plan`."""
    sizes, mask, keywords = CALLS[name]
    of = {"dtype": BF16, "G": 8, "D": 64, "Tq": 4096} | sizes
    q, k = (
        torch.empty(1, heads, length, of["D"], dtype=of["dtype"], device="meta")
        for heads, length in ((8, of["Tq"]), (of["G"], 4096))
    )
    problem, _ = make_problem(q, k, k, Options(mask=mask, **keywords))
    problem = replace(problem, device=torch.device("cuda"))
    with (
        mock.patch("clearhead.core.engines.sdpa_backends.capability_of", lambda device: capability),
        mock.patch("torch.backends.cudnn.is_available", lambda: True),
    ):
        engine, declined = first_capable(problem, "auto")
        if engine is None:
            return "none", ""
        reasons = [f"{name}: {', '.join(r)}" for name, r in declined.items()]
        return engine.name, "; ".join([engine.caption_of(problem), *reasons])


if __name__ == "__main__":
    major, _, minor = sys.argv[1].partition(".")
    for name in CALLS:
        engine, reason = path_of(name, (int(major), int(minor or 0)))
        print(f"{name:31} {engine:7} {reason}")

"""Results written by `torch.save` are read by `torch.load` with its default, weights_only=True."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import clearhead as ch
from clearhead.demo import load

STATS = ["entropy", ch.topk(2), ch.mass({"first": ch.prefix(1)}), ch.pooled(2, 3)]


def block() -> nn.Module:
    torch.manual_seed(0)
    return ch.nn.TransformerBlock(12, 3, causal=True)


def recorded(tmp_path, to=None):
    model = block()
    with ch.watch(model, stats=STATS, exact_rows=[-1], outputs=True, to=to) as seen:
        model(torch.randn(2, 7, 12))
    return seen


def looked(tmp_path):
    q, k = torch.randn(1, 2, 5, 4, requires_grad=True), torch.randn(1, 2, 7, 4)
    return ch.look(q, k, k, stats=STATS, mask=ch.Causal(align="end"))


def explained(tmp_path):
    q = torch.randn(1, 2, 5, 4)
    return ch.explain(q, q, q, mask=ch.causal, bias=ch.alibi(), tokens=list("abcde"))


def planned(tmp_path):
    q = torch.randn(1, 2, 5, 4)
    return ch.plan(q, q, q, mask=ch.causal)


def effects(tmp_path):
    model = block().eval()
    return ch.effects(model, {"x": torch.randn(1, 7, 12)}, lambda out: out.sum((1, 2)))


RESULTS = {
    "look": looked,
    "recording": recorded,
    "recording in a folder": lambda path: recorded(path, to=path / "calls"),
    "trace": explained,
    "plan": planned,
    "scaling": lambda _: ch.why_scale(),
    "effects": effects,
    "report": lambda _: ch.report(load(None), "She danced in the castle.", progress=False),
}


def numbers(value: object) -> list[object]:
    """Everything that a result holds, its tensors among it."""
    if hasattr(value, "__dict__") and type(value).__module__.startswith("clearhead"):
        return [x for part in vars(value).values() for x in numbers(part)]
    leaves = tree_leaves(value)
    return [x for leaf in leaves for x in ([leaf] if leaf is value else numbers(leaf))]


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_read_back(name, tmp_path):
    result = RESULTS[name](tmp_path)
    torch.save(result, tmp_path / "saved.pt")
    read = torch.load(tmp_path / "saved.pt")
    assert type(read) is type(result)
    a, b = numbers(result), numbers(read)
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_a_new_process_reads_them_once_clearhead_is_imported(tmp_path):
    for name in ("look", "report"):
        torch.save(RESULTS[name](tmp_path), tmp_path / f"{name}.pt")
    code = (
        "import sys, torch, clearhead; print(*(type(torch.load(x)).__name__ for x in sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *(tmp_path / f"{x}.pt" for x in ("look", "report"))],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "Look Report\n", done.stderr

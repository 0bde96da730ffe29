"""The C++ core below torch's tracers: inductor in one graph, and an exported program."""

import pytest
import torch
from test_kernels import question

import clearhead as ch

pytest.importorskip("clearhead._kernels", reason="built without a C++ compiler")


RULES = {
    "causal": {"mask": ch.causal},
    "window, cap": {"mask": ch.causal & ch.window(before=5, after=0), "softcap": 20.0},
    "everything": {},
}


class Layer(torch.nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def forward(self, q, k, v):
        return ch.attention(q, k, v, engine="cpu", **self.rule) * 2


# Inductor itself still uses what torch calls deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_inductor_compiles_it_in_one_graph(rule):
    qkv = question(2, 4, 2, 37, 37, 16)
    compiled = torch.compile(Layer(rule), fullgraph=True, backend="inductor")
    with torch.no_grad():
        assert torch.equal(compiled(*qkv), Layer(rule)(*qkv))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_exported_program_holds_one_operator_and_gives_the_same_bits(rule):
    qkv, others = question(2, 4, 2, 37, 37, 16), question(2, 4, 2, 37, 37, 16, seed=9)
    with torch.no_grad():
        program = torch.export.export(Layer(rule), qkv)
        assert torch.equal(program.module()(*others), Layer(rule)(*others))
    calls = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert calls.count("clearhead.attend.default") == 1, calls
    assert not any("softmax" in call or "bmm" in call for call in calls), calls

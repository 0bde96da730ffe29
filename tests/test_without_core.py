"""Without a C++ compiler there is no core: everything works, and reports that it is slower."""

from tests.fresh_process import run_program

HIDE = """if True:
    import sys
    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name == "clearhead._kernels":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Hidden())
    import torch, clearhead as ch
    from clearhead_cli import main
"""


def without_core(program: str) -> str:
    script = HIDE + "".join(f"    {line}\n" for line in program.splitlines())
    done = run_program(script)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_attention_statistics_and_gradients_go_by_torch_and_the_doctor_says_so():
    said = without_core("""q = torch.randn(1, 2, 5, 8, requires_grad=True)
seen = ch.look(q, q, q, mask=ch.causal, stats=["entropy", "received"])
seen.out.sum().backward()
assert torch.equal(seen.out, ch.attention(q, q, q, mask=ch.causal)) and q.grad.isfinite().all()
print(ch.plan(q, q, q, mask=ch.causal))
print("== doctor")
sys.argv = ["clearhead", "doctor"]
main()""")
    plan, doctor = said.split("== doctor")
    assert "installed without a C++ compiler" in plan and "sdpa" in plan
    assert "without a C++ compiler" in doctor and "slower" in doctor


def test_a_core_of_another_version_is_named():
    script = (
        "import importlib.util, sys, types\n"
        "spec = importlib.util.find_spec('clearhead')\n"
        "package = types.ModuleType('clearhead')\n"
        "package.__path__ = spec.submodule_search_locations\n"
        "sys.modules['clearhead'] = package\n"
        "import clearhead._kernels as core\n"
        "fields = core.fields()\n"
        "fields['GroupMask'] = fields['GroupMask'].replace('lo hi', 'hi lo')  # of the same size\n"
        "core.fields = lambda: fields\n"
        "import clearhead.core.engines.cpu\n"
    )
    done = run_program(script)
    assert done.returncode and "are of different versions" in done.stderr
    assert "the members of GroupMask" in done.stderr

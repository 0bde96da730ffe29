"""Children of a fork, which have lost torch's threads, and subinterpreters."""

import subprocess
import sys

import pytest

FORKED = """if True:
    import os, torch, clearhead as ch
    torch.set_num_threads(2)
    torch.randn(2000, 2000).sum()  # torch's threads start
    x = torch.randn(1, 8, 300, 16).requires_grad_()
    bias = torch.randn(300, 300)

    def run():
        {}

    true = run()
    if pid := os.fork():
        raise SystemExit(os.waitpid(pid, 0)[1] != 0)
    same = all(torch.equal(a, b) for a, b in zip(run(), true, strict=True))
    os._exit(not same)
"""


@pytest.mark.parametrize(
    "answer",
    [
        "return [ch.attention(x, x, x, bias=bias)]",
        "return [ch.look(x, x, x, stats=['entropy']).entropy]",
        "return torch.autograd.grad(ch.attention(x, x, x).sum(), x)",
    ],
    ids=["bias", "look", "backward"],
)
def test_a_child_of_fork_answers_on_one_thread(answer):
    """The same bits. In a process of its own, because other libraries of these tests do not like to
    be forked."""
    subprocess.run([sys.executable, "-c", FORKED.format(answer)], check=True, timeout=60)


def test_a_subinterpreter_is_refused():
    program = """if True:
        import _xxsubinterpreters as interpreters
        interpreters.run_string(interpreters.create(), "import clearhead")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert b"clearhead was imported in a subinterpreter" in done.stderr

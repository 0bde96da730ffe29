"""Children of a fork, which have lost torch's threads, and subinterpreters."""

import subprocess
import sys

from tests.fresh_process import run_program

FORKED = """if True:
    import os, torch, clearhead as ch
    torch.set_num_threads(2)
    torch.randn(2000, 2000).sum()  # torch's threads start
    x = torch.randn(1, 8, 300, 16).requires_grad_()
    bias = torch.randn(300, 300)
    asked = {
        "plain": lambda: ch.attention(x.detach(), x.detach(), x.detach(), engine="cpu"),
        "bias": lambda: ch.attention(x, x, x, bias=bias),
        "look": lambda: ch.look(x, x, x, stats=["entropy"]).entropy,
        "backward": lambda: torch.autograd.grad(ch.attention(x, x, x).sum(), x)[0],
    }
    true = {name: ask() for name, ask in asked.items()}
    for name, ask in asked.items():
        if pid := os.fork():
            assert os.waitpid(pid, 0)[1] == 0, name
        else:
            os._exit(0 if torch.equal(ask(), true[name]) else 1)
"""


def test_a_child_of_fork_answers_on_one_thread():
    """The same bits. In a process of its own, because other libraries of these tests do not like to
    be forked."""
    done = run_program(FORKED)
    assert done.returncode == 0, done.stderr


def test_a_subinterpreter_is_refused():
    program = """if True:
        import _xxsubinterpreters as interpreters
        interpreters.run_string(interpreters.create(), "import clearhead")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert b"clearhead was imported in a subinterpreter" in done.stderr

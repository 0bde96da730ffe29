"""Run a program in a fresh process, as `python -c` does, except that torch is imported already.

To import torch takes longer than most of these programs. One server imports it, and nothing else,
starts no thread, and forks a process for each program. The process has its own environment and
imports its own clearhead. It ends as any process of Python does.
"""

import atexit
import os
import pickle
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SERVER = """
import gc, os, pickle, sys, torch

gc.freeze()  # the collector of a child does not visit the objects of torch
requests, answers = sys.stdin.buffer, sys.stdout.buffer
while True:
    try:
        program, arguments, environment, files = pickle.load(requests)
    except EOFError:  # the process of the tests has ended
        sys.exit()
    child = os.fork()
    if not child:
        break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    answers.write(b"%d\\n" % code)
    answers.flush()
for number, file in enumerate([os.devnull, *files]):
    os.dup2(os.open(file, os.O_RDWR), number)
os.environ.clear()
os.environ.update(environment)
sys.argv = ["-c", *arguments]
exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
"""


@cache
def server() -> "subprocess.Popen[bytes]":
    """Ends when this process closes the pipe."""
    command = [sys.executable, "-c", SERVER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(process.communicate)
    return process


def run_program(
    program: str, *arguments: object, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run the program with these arguments and additions to the environment, and return its exit
    code, output and errors, as `subprocess.run(..., capture_output=True, text=True)` does."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("output", "errors")]
        for file in files:
            file.touch()
        request = program, [*map(str, arguments)], os.environ | environment, [*map(str, files)]
        process = server()
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            code = int(process.stdout.readline())
        except BaseException:  # a timeout: a late answer would be taken for the next one
            process.kill()
            server.cache_clear()
            raise
        return subprocess.CompletedProcess(program, code, *(file.read_text() for file in files))

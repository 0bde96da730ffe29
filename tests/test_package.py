"""What is published: a wheel that works in an empty environment, away from the checkout."""

import subprocess
import sys
from pathlib import Path

import jupytext
import pytest

ROOT = Path(__file__).parents[1]
TEXT = "The queen danced because she was proud."


def run(*command, cwd):
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sdist_and_wheel_in_an_empty_environment(tmp_path):
    """Built in the published way, but unoptimized; then the README's main job and a lesson."""
    unoptimized = "--config-setting=cmake.define.CMAKE_CXX_FLAGS_RELEASE=-O0"
    run(sys.executable, "-m", "build", unoptimized, "--outdir", tmp_path, ROOT, cwd=tmp_path)
    [sdist], [wheel] = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    assert sdist.stat().st_size < 10e6 and wheel.stat().st_size < 10e6

    run(sys.executable, "-m", "venv", tmp_path / "empty", cwd=tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    install = "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt"
    run(python, "-m", *install, f"{wheel}[plot]", cwd=tmp_path)

    shell = python.with_name("clearhead")
    told = run(shell, "look", TEXT, "--out", "pictures", cwd=tmp_path)
    assert (tmp_path / "pictures" / "storyteller.html").is_file() and "antecedent" in told

    lesson = jupytext.read(ROOT / "lessons" / "06-masks.md")
    cells = [cell.source for cell in lesson.cells if cell.cell_type == "code"]
    lines = [line for cell in cells for line in cell.splitlines() if not line.startswith("%")]
    (tmp_path / "lesson.py").write_text("\n".join(lines))
    assert "Not tried yet" in run(python, "lesson.py", cwd=tmp_path)

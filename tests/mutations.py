"""Faults of the core, one at a time, to show that the tests notice them.

    python tests/mutations.py                 list the mutations
    python tests/mutations.py --run           run the tests on every mutation (or --run 3 7)
    python tests/mutations.py --apply 3       put number 3 into this tree
    python tests/mutations.py --revert 3      restore that file from the last commit

`--run` works on the last commit, in a clone of the repository that is removed at the end, so this
tree never changes, whatever interrupts it. The clone runs the file of tests that notices the
mutation and, if that passes, the ring *all*, and stops at the first failure. A mutation of the C++
core compiles it again, into `out/mutations` (minutes, once for each state of `kernels/`).
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CORES = ROOT / "out" / "mutations"
CORE = "_kernels.abi3.so"


class Mutation(NamedTuple):
    """A fault: `old`, which occurs once in `file`, becomes `new`, which `breaks` something."""

    area: str
    file: str
    old: str
    new: str
    breaks: str
    tests: str  # the file in `tests` that notices it

    @property
    def is_compiled(self) -> bool:
        return self.file.startswith("kernels/")


MUTATIONS = [
    Mutation(
        "kernels",
        "kernels/generic/epilogue.h",
        "sum = sum * rescale + exp2_one(float((sink - base) * LOG2E));",
        "sum = sum * rescale;",
        "A sink takes no weight.",
        "core/engines/cpu/test_kernels.py",
    ),
    Mutation(
        "kernels",
        "kernels/generic/prefill.h",
        "store(rescale_ + r, exp2<5>(shift));",
        "store(rescale_ + r, splat(1));",
        "Prefill does not rescale the sums of earlier key blocks to a new maximum.",
        "core/engines/cpu/test_kernels.py",
    ),
    Mutation(
        "kernels",
        "kernels/generic/decode.h",
        "sum += x[1] * share[s];",
        "sum += x[1];",
        "Where decode splits the keys, the sums of the splits are not rescaled.",
        "core/engines/cpu/test_kernels.py",
    ),
    Mutation(
        "kernels",
        "kernels/generic/mask.h",
        "low_bits(int(hi)) & ~low_bits(int(lo))",
        "low_bits(int(hi))",
        "In a block of 64 keys, those before the first visible key are visible, too.",
        "core/engines/cpu/test_kernels.py",
    ),
    Mutation(
        "gradients",
        "kernels/generic/backward.h",
        "total(sum) - dlse;",
        "total(sum) + dlse;",
        "The core gives the gradient of the log-sum-exp the wrong sign.",
        "core/engines/cpu/test_backward.py",
    ),
    Mutation(
        "masks",
        "src/clearhead/core/masks/positions.py",
        "real = q < values.batch_column(self.queries, device)",
        "real = q <= values.batch_column(self.queries, device)",
        "The key ranges of lengths(queries=) hold one query too many.",
        "core/masks/test_block_mask.py",
    ),
    Mutation(
        "masks",
        "src/clearhead/core/masks/key_ranges.py",
        "-(-self.Tk // width), hi // width)",
        "-(-self.Tk // width), -(-hi // width))",
        "A tile that a range fills in part counts as full, so its mask is not applied.",
        "core/masks/test_changed_in_place.py",
    ),
    Mutation(
        "masks",
        "src/clearhead/core/masks/key_ranges.py",
        "return _without_unused(lo, hi.gather(-1, order))",
        "return _without_unused(lo, hi)",
        "Ranges are sorted by their begins, but their ends stay in the old order.",
        "core/masks/test_expanded.py",
    ),
    Mutation(
        "masks",
        "src/clearhead/core/masks/key_ranges.py",
        "bits = self.bits & other.bits",
        "bits = self.bits",
        "The second of two dense masks composed by & is ignored.",
        "core/masks/test_block_mask.py",
    ),
    Mutation(
        "statistics",
        "src/clearhead/core/stats/row_statistics.py",
        "factor * (self.total + shift * sum)",
        "factor * self.total",
        "The entropy is wrong where a later tile raises the maximum.",
        "core/stats/test_stats.py",
    ),
    Mutation(
        "statistics",
        "src/clearhead/core/stats/top_scores.py",
        "by_key = keys.argsort(-1)",
        "by_key = keys.argsort(-1, descending=True)",
        "For equal weights, topk lists the higher key first.",
        "core/stats/test_stats.py",
    ),
    Mutation(
        "statistics",
        "src/clearhead/core/stats/statistic.py",
        "return ((position + 1) * bins - 1) // max(size, 1)",
        "return position * bins // max(size, 1)",
        "Positions at the edge of a bin of the pooled matrix fall into the bin before.",
        "core/stats/test_stats.py",
    ),
    Mutation(
        "statistics",
        "src/clearhead/core/stats/partial.py",
        "sums = {name: x + other.sums[name] for name, x in self.sums.items()}",
        "sums = dict(self.sums)",
        "Merged chunks of queries count only the weights of the first chunk.",
        "core/stats/test_stats.py",
    ),
    Mutation(
        "gradients",
        "src/clearhead/core/engines/cpu/stats_backward.py",
        "(1 + total.log().masked_fill(total == 0, 0.0))",
        "total.log().masked_fill(total == 0, 0.0)",
        "The gradient of the entropy lacks a term.",
        "core/engines/cpu/test_stats.py",
    ),
    Mutation(
        "gradients",
        "kernels/generic/backward.h",
        "h = key_head * shared; h < (key_head + 1) * shared; h++",
        "h = key_head; h < p.H; h += p.G",
        "Gradients of keys are summed over the wrong query heads.",
        "core/engines/cpu/test_backward.py",
    ),
    Mutation(
        "edits",
        "src/clearhead/models/inspect/edits/weights.py",
        "scale=problem.scale / self.t, softcap=softcap / self.t)",
        "scale=problem.scale / self.t)",
        "A temperature under a soft cap divides before the cap alone.",
        "models/inspect/test_intervene.py",
    ),
    Mutation(
        "edits",
        "src/clearhead/models/inspect/edits/freeze.py",
        "heads // (problem.H // problem.G)",
        "heads % problem.G",
        "Frozen weights are applied to the values of the wrong key head.",
        "models/inspect/test_intervene.py",
    ),
    Mutation(
        "edits",
        "src/clearhead/models/inspect/edits/edit.py",
        "return real & (torch.isin(from_first, from_start) | torch.isin(from_last, named))",
        "return ~real | torch.isin(from_first, from_start) | torch.isin(from_last, named)",
        "An edit of positions changes padding, too.",
        "properties/test_models.py",
    ),
    Mutation(
        "checks",
        "src/clearhead/core/problem/check.py",
        "(G == 0 and H != 0) or (G and H % G)",
        "G == 0 and H != 0",
        "Query heads that are not a multiple of the key heads are accepted.",
        "test_errors.py",
    ),
    Mutation(
        "checks",
        "src/clearhead/core/problem/check.py",
        "lambda cap: 0 < cap < math.inf",
        "lambda cap: 0 <= cap < math.inf",
        "A soft cap of 0 is accepted.",
        "test_errors.py",
    ),
    Mutation(
        "statistics",
        "src/clearhead/core/engines/operators.py",
        "cast(PerKey, statistic.by).has_nan:",
        "False:",
        "topk(by=) of the core leaves out a key whose number is NaN.",
        "core/stats/test_weighted.py",
    ),
    Mutation(
        "statistics",
        "src/clearhead/models/inspect/watcher.py",
        "counts = counts if masked is None else counts & ~masked",
        "counts = counts",
        "Fully masked queries are in the means of varying.",
        "hf/test_value_norms.py",
    ),
    Mutation(
        "statistics",
        "src/clearhead/core/stats/weight_statistics.py",
        "(total * self.factors.numbers.to(total)).masked_fill(total == 0, 0.0)",
        "total * self.factors.numbers.to(total)",
        "received(by=) of a key that no query sees is NaN if its number is.",
        "core/stats/test_weighted.py",
    ),
    Mutation(
        "statistics",
        "src/clearhead/core/stats/group_statistics.py",
        "total = total.masked_fill(total == 0, 1.0)",
        "total = total.clone()",
        "value_weighted of a fully masked query is NaN.",
        "core/stats/test_weighted.py",
    ),
    Mutation(
        "statistics",
        "src/clearhead/core/stats/weight_statistics.py",
        "exact = exact.masked_fill(tile.scores[:, :, in_tile] == MASKED, 0.0)",
        "exact = exact.clone()",
        "In a row of NaN, exact_rows has NaN at masked keys.",
        "core/stats/test_stats.py",
    ),
    Mutation(
        "checks",
        "src/clearhead/core/engines/cpu/direct.py",
        "0 < softcap < LARGEST_CAP",
        "0 < softcap < math.inf",
        "A plain call applies a soft cap that is too large for float32.",
        "core/engines/test_engines.py",
    ),
    Mutation(
        "checks",
        "src/clearhead/core/engines/cpu/direct.py",
        "        mask.must_fit(grid)\n",
        "",
        "A plain call accepts lengths that exceed its keys.",
        "core/engines/cpu/test_direct.py",
    ),
    Mutation(
        "page",
        "src/clearhead/views/page/page.js",
        "PAINTED.group(pen, { shapes: scene.shapes, x: 0, y: 0 });",
        "void PAINTED;",
        "The page paints nothing.",
        "views/test_page.py",
    ),
]


def replace_once(root: Path, file: str, old: str, new: str) -> None:
    path = root / file
    text = path.read_text()
    if text.count(old) != 1:
        sys.exit(f"{file} holds {text.count(old)} times {old!r}, and not once.")
    path.write_text(text.replace(old, new))


def is_changed(file: str) -> bool:
    status = ["git", "status", "--porcelain", "--untracked-files=no", "--", file]
    return bool(subprocess.check_output(status, cwd=ROOT, text=True))


def clone_commit(folder: Path) -> Path:
    """Clone the last commit with its core, and let Python import it and not this tree, which may
    change meanwhile."""
    clone = folder / "clone"
    shutil.copy(installed_core(), folder / CORE)
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
    # An editable installation imports from this tree even with PYTHONPATH.
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "sys.meta_path[:] = [x for x in sys.meta_path if '_editable' not in type(x).__module__]\n"
    )
    return clone


def installed_core() -> Path:
    print_path = "import clearhead._kernels as core; print(core.__file__)"
    return Path(subprocess.check_output([sys.executable, "-c", print_path], text=True).strip())


def compiled_core(clone: Path) -> Path:
    """The core of the clone. It is compiled once for each state of its sources."""
    sources = sorted([clone / "CMakeLists.txt", *(clone / "kernels").rglob("*.*")])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    core = CORES / f"{digest}.so"
    if not core.exists():
        wheels = clone.parent / "wheels"
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        build = [*pip, "wheel", "--no-deps", "--wheel-dir", wheels, clone]
        subprocess.run(build, check=True)
        (wheel,) = wheels.glob("clearhead-*.whl")
        with zipfile.ZipFile(wheel) as files:
            CORES.mkdir(parents=True, exist_ok=True)
            core.write_bytes(files.read(f"clearhead/{CORE}"))
    return core


def failed_test(clone: Path, *arguments: str) -> str:
    """Run pytest in the clone, and return the first test that fails, or nothing."""
    pytest = [sys.executable, "-m", "pytest", "-qx", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": f"{clone / 'src'}:{clone.parent}"}
    done = subprocess.run(
        [*pytest, *arguments], cwd=clone, env=environment, capture_output=True, text=True
    )
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if failed is None and done.returncode not in (0, 5):  # 5: no test was selected
        sys.exit(f"pytest {' '.join(arguments)} did not run:\n{done.stdout[-2000:]}{done.stderr}")
    return failed[1] if failed else ""


def catching_test(clone: Path, mutation: Mutation) -> str:
    """The first test that fails with the mutation and not without, or nothing."""
    core, without_mutation = clone / "src" / "clearhead" / CORE, clone.parent / CORE
    always_fail: list[str] = []
    for tests in (f"tests/{mutation.tests}", "tests"):
        while True:
            replace_once(clone, mutation.file, mutation.old, mutation.new)
            shutil.copy(compiled_core(clone) if mutation.is_compiled else without_mutation, core)
            without = [f"--deselect={test}" for test in always_fail]
            test = failed_test(clone, tests, *without)
            subprocess.run(["git", "checkout", "--quiet", "."], cwd=clone, check=True)
            shutil.copy(without_mutation, core)
            if not test:
                break
            if not failed_test(clone, test):
                return test
            always_fail.append(test)
    return ""


def run(numbers: list[int]) -> None:
    if is_changed("."):
        print("Changes that are not committed are left out.")
    survived = []
    with tempfile.TemporaryDirectory(prefix="clearhead-mutations-") as folder:
        clone = clone_commit(Path(folder))
        for number in numbers:
            mutation = MUTATIONS[number - 1]
            test = catching_test(clone, mutation)
            print(f"{number:2}  {mutation.area:10}  {test or 'SURVIVED'}", flush=True)
            survived += [] if test else [number]
    print(f"{len(numbers) - len(survived)} of {len(numbers)} were caught.")
    sys.exit(1 if survived else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--run", nargs="*", type=int, metavar="N", help="all without numbers")
    action.add_argument("--apply", type=int, metavar="N")
    action.add_argument("--revert", type=int, metavar="N")
    options = parser.parse_args()
    if options.run is not None:
        run(options.run or list(range(1, len(MUTATIONS) + 1)))
    if number := options.apply:
        mutation = MUTATIONS[number - 1]
        if is_changed(mutation.file):
            sys.exit(f"{mutation.file} has changes that are not committed.")
        replace_once(ROOT, mutation.file, mutation.old, mutation.new)
        print("Compile the core: pip install --editable ." if mutation.is_compiled else "Applied.")
    elif number := options.revert:
        subprocess.run(["git", "checkout", "--", MUTATIONS[number - 1].file], cwd=ROOT, check=True)
    else:
        for number, mutation in enumerate(MUTATIONS, 1):
            print(f"{number:2}  {mutation.area:10}  {mutation.breaks}")
            print(f"    {mutation.file}, noticed by tests/{mutation.tests}")


if __name__ == "__main__":
    main()

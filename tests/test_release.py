"""The version has one source, and what repeats it agrees with it."""

import re
import subprocess
import textwrap
from importlib.metadata import PackageNotFoundError, metadata, version as installed

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import clearhead as ch
from tests import release


def test_the_version_is_the_same_everywhere():
    assert release.version() == ch.__version__
    assert release.disagreements() == []


def test_another_tag_and_an_open_changelog_are_refused():
    assert any("the tag says 9.9.9" in line for line in release.disagreements("v9.9.9"))
    if "unreleased" in (release.ROOT / "CHANGELOG.md").read_text():
        assert any("has no date" in line for line in release.disagreements(f"v{ch.__version__}"))


def test_the_installed_package_has_a_version():
    assert installed("clearhead")


def test_every_pinned_version_exists_for_the_pythons_of_ci():
    """Read from the metadata of those that are installed."""
    workflow = (release.ROOT / ".github" / "workflows" / "ci.yml").read_text()
    pythons = set(re.findall(r'"(3\.\d+)"', workflow))
    assert "3.10" in pythons and "3.14" in pythons
    missing, read = [], 0
    for line in (release.ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        try:
            needs = SpecifierSet(metadata(pin.name).get("Requires-Python") or "")
        except PackageNotFoundError:
            continue
        read += 1
        for python in pythons:
            used = pin.marker is None or pin.marker.evaluate({"python_version": python})
            if used and f"{python}.9" not in needs:
                missing.append(f"{line} does not run on Python {python}")
    assert read > 20 and not missing, missing


def test_ci_lets_each_torch_bring_its_own_triton(tmp_path):
    """torch 2.10 requires Triton 3.6, and newer ones another."""
    workflow = (release.ROOT / ".github" / "workflows" / "ci.yml").read_text()
    step = textwrap.dedent(
        re.search(r"TORCH:.*?run: \|\n(.*?)\n      - run:", workflow, re.DOTALL)[1]
    )
    (tmp_path / "constraints.txt").write_text((release.ROOT / "constraints.txt").read_text())
    for torch, pins in (("2.10.0", ["torch==2.10.0"]), ("newest", [])):
        subprocess.run(["sh", "-ec", step], cwd=tmp_path, env={"TORCH": torch}, check=True)
        lines = (tmp_path / "constraints.txt").read_text().splitlines()
        assert [x for x in lines if x.startswith(("torch==", "triton=="))] == pins
        assert len(lines) > 100

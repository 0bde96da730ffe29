"""The version has one source, and what repeats it agrees with it."""

from importlib.metadata import version as installed

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

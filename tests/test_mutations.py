"""The mutations still fit the sources that they change."""

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation


def test_every_part_of_the_core_is_mutated():
    assert len(MUTATIONS) == len(set(MUTATIONS)) == 28
    areas = {mutation.area for mutation in MUTATIONS}
    assert areas == {"kernels", "masks", "statistics", "gradients", "edits", "checks", "page"}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.breaks)
def test_a_mutation_can_be_applied(mutation: Mutation):
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    assert text.replace(mutation.old, mutation.new) != text
    assert (ROOT / "tests" / mutation.tests).is_file()

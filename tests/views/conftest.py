"""One browser for all tests of pages; it ends before other tests, because it runs an event loop."""

import pytest

from tests.views.browser import launched, visits


@pytest.fixture(scope="package")
def browser():
    with launched() as opened:
        yield opened


@pytest.fixture
def visit(browser, tmp_path):
    with visits(browser, tmp_path) as open_page:
        yield open_page

"""Skip the tests of this folder where namespaces are not allowed."""

from functools import cache

import pytest

from hosts.hosts import why_unsupported

_why_unsupported = cache(why_unsupported)


@pytest.fixture(autouse=True)
def _supported() -> None:
    if (reason := _why_unsupported()) is not None:
        pytest.skip(reason)

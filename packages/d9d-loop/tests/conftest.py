"""What most tests of the loop need: a job of this one process."""

from collections.abc import Iterator

import pytest

from d9d_dist import DistributedContext, MeshConfig


@pytest.fixture
def ctx() -> Iterator[DistributedContext]:
    with MeshConfig().build() as ctx:
        yield ctx

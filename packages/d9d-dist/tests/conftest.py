import pytest
import torch

from d9d_dist.testing import Device, accelerators_for


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "world_size(ranks): ranks of a test that uses the fixture device; 2 by default")


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    """Device type of a test's ranks. Parameters on accelerators are skipped if the machine has too few."""
    marker = request.node.get_closest_marker("world_size")
    ranks = marker.args[0] if marker else 2
    if request.param == "accelerator" and not accelerators_for(ranks):
        pytest.skip(f"needs {ranks} accelerators; this machine has {torch.accelerator.device_count()}")
    return request.param

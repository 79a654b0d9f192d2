from unittest import mock

import pytest

from d9d_dist import MeshConfig, UserError, enable_symmetric_memory
from d9d_dist.testing import run_ranks


def _enable() -> None:
    with MeshConfig(tensor_parallel=2).build() as ctx:
        mesh = ctx.mesh_for("dense")["tp"]
        with pytest.raises(UserError, match=r"^key: kernels must access .* tp axis are of the type cpu\. Expected "):
            enable_symmetric_memory(mesh, setting="key")
        failing = {
            "is_symm_mem_enabled_for_group": mock.Mock(return_value=True),
            "empty": mock.Mock(),
            "rendezvous": mock.Mock(side_effect=RuntimeError("no peer access")),
        }
        torch_memory = mock.patch.multiple("d9d_dist.symmetric_memory.symmetric_memory", **failing)
        is_cuda = mock.patch.object(type(mesh), "device_type", mock.PropertyMock(return_value="cuda"))
        message = r"^key: kernels cannot access .* ranks of the tp axis: no peer access\. Expected "
        with torch_memory, is_cuda, pytest.raises(UserError, match=message):
            enable_symmetric_memory(mesh, setting="key")


def test_devices_without_access_to_each_other_are_refused() -> None:
    run_ranks(_enable)

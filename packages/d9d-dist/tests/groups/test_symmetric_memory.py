from unittest import mock

import pytest

from d9d_dist import MeshConfig, UserError
from d9d_dist.groups.symmetric_memory import enable_symmetric_memory
from d9d_dist.testing import run_ranks


def _enable() -> None:
    with MeshConfig(tensor_parallel=2).build() as ctx:
        mesh = ctx.mesh_for("dense")["tp"]
        with pytest.raises(UserError, match=r"^key: kernels must .* tp axis, .* devices of the type cpu\. Expected "):
            enable_symmetric_memory(mesh, setting="key")
        failing = {
            "_SymmetricMemory": mock.Mock(),
            "is_symm_mem_enabled_for_group": mock.Mock(return_value=True),
            "empty": mock.Mock(),
            "rendezvous": mock.Mock(side_effect=RuntimeError("no peer access")),
        }
        message = r"^key: kernels cannot access .* ranks of the tp axis: no peer access\. Expected "
        torch_memory = mock.patch.multiple("d9d_dist.groups.symmetric_memory.symmetric_memory", **failing)
        with torch_memory, pytest.raises(UserError, match=message):
            enable_symmetric_memory(mesh, setting="key")


def test_devices_without_access_to_each_other_are_refused() -> None:
    run_ranks(_enable)

"""Launches of Triton kernels on the fake accelerator: kernels are recorded, but neither compiled nor run."""

import types
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from fake_accelerator.operators import NAME, Operators


def record_triton_launches(operators: Operators) -> None:
    """Make every launch of a Triton kernel in this process only add an entry to the log, if Triton is installed."""
    if find_spec("triton") is None:
        return
    from triton.backends.driver import DriverBase  # noqa: PLC0415 - optional
    from triton.runtime import JITFunction, driver  # noqa: PLC0415

    class NoDriver(DriverBase):
        """Triton driver that reports the device properties of an NVIDIA H100."""

        def __init__(self) -> None:
            sizes = {"max_shared_mem": 232_448, "multiprocessor_count": 132}
            self.utils = types.SimpleNamespace(get_device_properties=lambda _: sizes)

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> Any:
            return types.SimpleNamespace(arch=90, warp_size=32)

        def get_active_torch_device(self) -> Any:
            raise NotImplementedError

        def get_benchmarker(self) -> Any:
            raise NotImplementedError

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del grid, warmup
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        misplaced = [tuple(each.shape) for each in tensors if each.device.type != NAME]
        if misplaced:
            raise RuntimeError(
                f"Triton kernel {kernel.__name__} got tensors on another device, with shapes {misplaced}."
            )
        operators.put(f"triton:{kernel.__name__}", 0, sum(each.nbytes for each in tensors), tensors)

    driver.set_active(NoDriver())
    JITFunction.run = run

"""Compile every Triton kernel of the packages for accelerators that this machine does not have.

The real launchers run with a driver that has no device. A launch compiles the kernel for the target and runs nothing.
So tiles, warps and constants are those that the launchers choose. `python compiled_kernels.py TARGET CASE...` prints a
JSON list of `CompiledKernel`.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

import d9d_loop.optimizers._triton_stochastic as stochastic
import d9d_modules._triton_rms_norm as norm
import d9d_modules._triton_silu_mul as silu
import d9d_moe._triton_permute as permute
from d9d_loop.optimizers._adamw_numbers import AdamWNumbers
from d9d_loop.optimizers.index_rule import IndexRule
from d9d_modules.triton_jit import threads_per_warp

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Target:
    """An accelerator to compile for: Triton's target, and the limits of one multiprocessor.

    Sources: CUDA C++ programming guide, table "Technical specifications per compute capability"; AMD CDNA3 ISA.

    Attributes:
        triton: Backend, architecture and threads of a warp.
        shared: Largest shared memory of a program, in bytes.
        warps: Largest number of warps that run at once on a multiprocessor; 0 where occupancy is not computed.
        programs: Largest number of programs that run at once on a multiprocessor.
    """

    triton: GPUTarget
    shared: int
    warps: int = 0
    programs: int = 0


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 166_912, warps=64, programs=32),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 232_448, warps=64, programs=32),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 232_448, warps=64, programs=32),
    "sm_120": Target(GPUTarget("cuda", 120, 32), 101_376, warps=48, programs=24),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 65_536),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), 163_840),
}
REGISTERS = 65_536
"""Number of 32-bit registers of an NVIDIA multiprocessor."""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel as compiled for a target.

    Attributes:
        case: Key of `CASES`.
        registers: Registers of a thread (vector registers on AMD).
        spilled: Bytes of local memory of a thread, or spilled registers on AMD.
        occupancy: Share of a multiprocessor's warps that can run at once; `None` on AMD.
        widest_load: Bytes of the widest load from global memory.
        widest_store: Bytes of the widest store to global memory.
    """

    target: str
    case: str
    kernel: str
    num_warps: int
    registers: int
    spilled: int
    occupancy: float | None
    widest_load: int
    widest_store: int


class OfflineDriver(DriverBase):
    """A Triton driver without a device: it records launches instead of running them."""

    def __init__(self, target: Target) -> None:
        self.target, self.utils = target, self
        self.launches: list[tuple[Any, Any]] = []
        launches = self.launches

        class Launcher:
            def __init__(self, source: Any, metadata: Any) -> None:
                self._launch = (source, metadata)

            def __call__(self, *args: Any) -> None:
                launches.append(self._launch)

        self.launcher_cls = Launcher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target.triton

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("there is no device to benchmark on")

    def get_current_device(self) -> int:
        return list(TARGETS.values()).index(self.target)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.target.shared, "multiprocessor_count": 132}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        return (1, 1, 0, 0, 1024)

    def unload_module(self, module: int) -> None:
        pass

    def compiled(self) -> Iterator[tuple[Any, Any]]:
        """Yield the compiled kernel and the metadata of each recorded launch, and forget the launches."""
        for source, metadata in self.launches:
            kernels = source.fn.device_caches[self.get_current_device()][0].values()
            yield next(kernel for kernel in kernels if kernel.hash == metadata.hash), metadata
        self.launches.clear()


def compile_cases(target: str, cases: dict[str, Callable[[], None]]) -> Iterator[CompiledKernel]:
    """Run the launchers of each case, and yield its kernels as compiled for the target."""
    offline = OfflineDriver(TARGETS[target])
    driver.set_active(offline)
    threads_per_warp.cache_clear()
    for case, launch in cases.items():
        launch()
        for kernel, metadata in offline.compiled():
            measure = _of_nvidia if "cubin" in kernel.asm else _of_amd
            measured = measure(kernel.asm, TARGETS[target], metadata)
            yield CompiledKernel(target, case, metadata.name, metadata.num_warps, **measured)


def _of_nvidia(asm: dict[str, Any], target: Target, metadata: Any) -> dict[str, Any]:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = _run(tools / "cuobjdump", "-res-usage", file.name)
        sass = _run(tools / "cuobjdump", "-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    per_warp = -(-registers * 32 // 256) * 256
    programs = min(
        target.programs,
        target.warps // metadata.num_warps,
        REGISTERS // per_warp // metadata.num_warps,
        target.shared // (metadata.shared + 1024),
    )
    return {
        "registers": registers,
        "spilled": stack + local,
        "occupancy": programs * metadata.num_warps / target.warps,
        "widest_load": _widest_nvidia(sass, "LDG"),
        "widest_store": _widest_nvidia(sass, "STG"),
    }


def _widest_nvidia(sass: str, operation: str) -> int:
    """Return the bytes of the widest access, such as 16 for `LDG.E.128`."""
    accesses = re.findall(rf"\b{operation}((?:\.\w+)*)", sass)
    widths = [re.search(r"\.(?:U|S)?(8|16|64|128)\b", access) for access in accesses]
    return max((int(width[1]) // 8 if width else 4 for width in widths), default=0)


def _of_amd(asm: dict[str, Any], target: Target, metadata: Any) -> dict[str, Any]:
    code = asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", code)
        return int(found[1]) if found else 0

    return {
        "registers": number("vgpr_count"),
        "spilled": number("vgpr_spill_count") + number("sgpr_spill_count") + number("private_segment_fixed_size"),
        "occupancy": None,
        "widest_load": _widest_amd(code, "load"),
        "widest_store": _widest_amd(code, "store"),
    }


def _widest_amd(code: str, operation: str) -> int:
    """Return the bytes of the widest access, such as 16 for `global_load_dwordx4`."""
    widths = re.findall(rf"\b(?:global|buffer)_{operation}_(dword(?:x\d)?|\w+)", code)
    return max((4 * int(width[6:] or 1) if width.startswith("dword") else 2 for width in widths), default=0)


def _run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _leaf(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, requires_grad=True)


def _norm(rows: int, size: int, dtype: torch.dtype, *, weight: torch.dtype | None = None, add: bool = False) -> None:
    x_ND, weight_D = _leaf(rows, size, dtype=dtype), _leaf(size, dtype=weight or dtype)
    if add:
        residual_ND = _leaf(rows, size, dtype=dtype)
        outputs = norm.add_rms_norm(x_ND, residual_ND, weight_D, eps=1e-6, zero_centered=False)
    else:
        outputs = (norm.rms_norm(x_ND, weight_D, eps=1e-6, zero_centered=False),)
    torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])


def _silu(size: int, dtype: torch.dtype) -> None:
    product = silu.silu_mul(_leaf(256, size, dtype=dtype), _leaf(256, size, dtype=dtype))
    product.backward(torch.empty_like(product))


def _permute(size: int, dtype: torch.dtype, weight: torch.dtype) -> None:
    order_K, x_TD, rows_KD = torch.arange(512), torch.empty(64, size, dtype=dtype), torch.empty(512, size, dtype=dtype)
    weights_TA = torch.empty(64, 8, dtype=weight)
    permute.gather(x_TD, order_K, copies=8)
    permute.gather_sum(rows_KD, order_K, None, copies=8)
    permute.gather_sum(rows_KD, order_K, weights_TA, copies=8)
    permute.combine_backward(x_TD, rows_KD, weights_TA, order_K)


def _adamw(weight: torch.dtype, gradient: torch.dtype, average: torch.dtype, rule: IndexRule) -> None:
    numbers = AdamWNumbers(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)
    w, g, m, v = (torch.empty(_PARAMETERS, dtype=dtype) for dtype in (weight, gradient, average, average))
    stochastic.adamw(w, g, m, v, numbers=numbers, key=123456789012345, rule=rule, gate=torch.zeros(()))


_PARAMETERS = 1 << 20
_ALL = IndexRule(offset=0, run=_PARAMETERS, stride=_PARAMETERS)
_COLUMNS = IndexRule(offset=4096, run=4096, stride=8192)

CASES: dict[str, Callable[[], None]] = {
    "norm of 4096 (Qwen3-8B)": lambda: _norm(512, 4096, BF16),
    "norm of 4096 with residual": lambda: _norm(512, 4096, BF16, add=True),
    "norm of 2048 with residual (Qwen3-30B-A3B)": lambda: _norm(512, 2048, BF16, add=True),
    "norm of 128 (queries and keys)": lambda: _norm(16384, 128, BF16),
    "norm of 4096, float32 weight": lambda: _norm(512, 4096, BF16, weight=FP32),
    "norm of 4096 in float32 with residual": lambda: _norm(512, 4096, FP32, add=True),
    "norm of 7168 with residual (DeepSeek-V3)": lambda: _norm(512, 7168, BF16, add=True),
    "norm of 16384 with residual": lambda: _norm(512, 16384, BF16, add=True),
    "norm of 16384 in float32 with residual": lambda: _norm(64, 16384, FP32, add=True),
    "silu_mul of 12288 (Qwen3-8B)": lambda: _silu(12288, BF16),
    "silu_mul of 768 (Qwen3-30B-A3B)": lambda: _silu(768, BF16),
    "silu_mul of 12288 in float32": lambda: _silu(12288, FP32),
    "permute of 2048, float32 weights (Qwen3-30B-A3B)": lambda: _permute(2048, BF16, FP32),
    "permute of 2048": lambda: _permute(2048, BF16, BF16),
    "permute of 7168 (DeepSeek-V3)": lambda: _permute(7168, BF16, FP32),
    "permute of 2048 in float32": lambda: _permute(2048, FP32, FP32),
    "AdamW, all in bfloat16": lambda: _adamw(BF16, BF16, BF16, _ALL),
    "AdamW, float32 gradients and averages": lambda: _adamw(BF16, FP32, FP32, _ALL),
    "AdamW, all in bfloat16, sharded columns": lambda: _adamw(BF16, BF16, BF16, _COLUMNS),
    "AdamW, float32 averages, sharded columns": lambda: _adamw(BF16, FP32, FP32, _COLUMNS),
}

SPILLING = "norm of 32768 in float32, which does not fit into registers"
"""Case of a norm that is otherwise computed by torch, to show that spills are detected."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    cases = CASES | {SPILLING: lambda: _norm(64, 32768, FP32, add=True)}
    target_, *chosen = sys.argv[1:]
    print(json.dumps([asdict(kernel) for kernel in compile_cases(target_, {name: cases[name] for name in chosen})]))

"""Measurement of this machine's device, written as a hardware description."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from d9d_dist import UserError

_SECONDS = 1.0


def calibrate(path: Path) -> Path:
    """Measure matrix products, attention, memory and launches of this machine; write a hardware file and return it.

    Takes less than two minutes. Links between devices are not measured. For a CPU the file has a shared memory of 10
    GB/s, for an accelerator the links of DGX H100: edit them.

    Raises:
        UserError: If the file exists.
    """
    if path.exists():
        raise UserError(f"{path} exists; expected a new file. Choose another name, or delete it.")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    is_cpu = device.type == "cpu"
    dtype = torch.float32 if is_cpu else torch.bfloat16
    sizes = (256, 512, 1024) if is_cpu else (2048, 4096, 8192)
    rates = [_matmul_rate(size, dtype, device) for size in sizes]
    bandwidth = _bandwidth(2**25 if is_cpu else 2**30, device)
    attention = _attention_rate(dtype, device, length=512 if is_cpu else 8192)
    host = _launch_seconds(device)
    peak = max(rates)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = "CPU" if is_cpu else torch.get_device_module(device).get_device_name(device)
    if not is_cpu:
        memory = torch.get_device_module(device).mem_get_info(device)[1]
    values = {
        "links": (1e10, 2e-5) if is_cpu else (4.5e11, 2e-6),
        "network": (1e9, 5e-5) if is_cpu else (5e10, 5e-6),
    }
    num = 1 if is_cpu else torch.get_device_module(device).get_device_properties(device).multi_processor_count
    lines = [
        f"# Measured by d9d-plan --calibrate with torch {torch.__version__}; links and network are not measured.",
        f'name = "{name}"',
        f"devices_per_node = {max(1, torch.accelerator.device_count()) if not is_cpu else os.cpu_count()}",
        "",
        "[device]",
        f"memory_bytes = {memory}",
        f"memory_bandwidth = {bandwidth:.4g}",
        f"peak_flops = {{ bf16 = {peak:.4g} }}",
        f"num_multiprocessors = {num}",
        f"kernel_seconds = {host if is_cpu else 2e-6:.3g}",
        *(
            line
            for tier, (rate, latency) in values.items()
            for line in ("", f"[{tier}]", f"bandwidth = {rate:g}", f"latency = {latency:g}")
        ),
        "",
        "[fitted]",
        "matmul_efficiency = 1.0",
        f"attention_efficiency = {min(1.0, attention / peak):.3f}",
        "memory_efficiency = 1.0",
        f"host_seconds = {host:.3g}",
        "link_efficiency = 0.8",
        "network_efficiency = 0.8",
        "",
    ]
    path.write_text("\n".join(lines))
    return path


def _matmul_rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b)


def _bandwidth(num_bytes: int, device: torch.device) -> float:
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source))


def _attention_rate(dtype: torch.dtype, device: torch.device, *, length: int) -> float:
    q = torch.ones(1, 8, length, 128, dtype=dtype, device=device)
    seconds = _seconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))
    return 4 * 8 * length**2 * 128 / 2 / seconds


def _launch_seconds(device: torch.device) -> float:
    x = torch.ones(8, device=device)

    def many() -> None:
        for _ in range(1000):
            x.add_(1)

    return _seconds(many) / 1000


def _seconds(run: Callable[[], object]) -> float:
    """Return the time of a call: the smallest of the batches that fit into a second."""
    run()
    synchronize = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < _SECONDS:
        synchronize()
        before = time.perf_counter()
        for _ in range(3):
            run()
        synchronize()
        best = min(best, (time.perf_counter() - before) / 3)
    return best

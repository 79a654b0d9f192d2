"""Measurement of this machine's device, written as a hardware description."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import spawn
from torch.nn import functional

from d9d_dist import UserError
from d9d_loop.planning.hardware_spec import Hardware, hardware_names
from d9d_loop.planning.kernel_time import attention_fill
from d9d_loop.planning.layer_time import BACKWARD_OPERATORS, FORWARD_OPERATORS

_SECONDS = 1.0
_LAYER_KERNELS = 38
"""Number of kernels that `layer_time` counts for a dense layer: 4 + 8 products, 2 of attention, 8 + 16 others."""
GATHERED_BYTES = 2**25


def calibrate(path: Path) -> Path:
    """Measure matrix products, attention, memory, launches and links of this machine; write a hardware file, return it.

    Takes less than two minutes. Links are measured by all-gathers of all accelerators, or of two processes on a CPU.
    Two values are not measured: the links of a machine with one accelerator, and the network between nodes. For these,
    the file has the values of DGX H100, which the user must edit.

    Raises:
        UserError: If the file exists.
    """
    if path.exists():
        raise UserError(f"{path} exists; expected a new file. Choose another name, or delete it.")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    num_threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)  # as the ranks that torchrun starts
    try:
        values = _measured(device)
    finally:
        torch.set_num_threads(num_threads)
    comment = f"# Measured by d9d-plan --calibrate with torch {torch.__version__}; the network is not measured."
    path.write_text(f"{comment}\n{_toml(values)}\n")
    return path


def _measured(device: torch.device) -> dict[str, Any]:
    """Return the values of this machine's hardware description, by name; each section is a dict."""
    is_cpu = device.type == "cpu"
    dtype = torch.float32 if is_cpu else torch.bfloat16
    peak = max(_matmul_rate(size, dtype, device) for size in ((256, 512, 1024) if is_cpu else (2048, 4096, 8192)))
    attention = _attention_rate(dtype, device, length=512 if is_cpu else 8192)
    layer = _layer_seconds(device)
    if is_cpu:
        name, num_devices, num_multiprocessors = "CPU", 2, 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        module, num_devices = torch.get_device_module(device), torch.accelerator.device_count()
        name, memory = module.get_device_name(device), module.mem_get_info(device)[1]
        num_multiprocessors = module.get_device_properties(device).multi_processor_count
    link = links_of(device.type, num_devices) if num_devices > 1 else (4.5e11, 2e-6, 0.0)
    network = (1e9, 5e-5) if is_cpu else (5e10, 5e-6)
    known = list(map(Hardware.load, hardware_names()))
    return {
        "name": name,
        # No step of this machine was measured, so its intervals are as wide as the widest of the measured clusters.
        "dense_error": max(each.dense_error for each in known),
        "sparse_error": max(each.sparse_error for each in known),
        "devices_per_node": os.cpu_count() if is_cpu else num_devices,
        "device": {
            "memory_bytes": memory,
            "memory_bandwidth": _bandwidth(2**25 if is_cpu else 2**30, device),
            "peak_flops.bf16": peak,
            "num_multiprocessors": num_multiprocessors,
            "kernel_seconds": layer / _LAYER_KERNELS if is_cpu else 2e-6,
            "shard_seconds": link[2],
            "overlaps": not is_cpu,
        },
        "links": {"bandwidth": link[0], "latency": link[1]},
        "network": {"bandwidth": network[0], "latency": network[1]},
        "fitted": {
            "matmul_efficiency": 1.0,
            "attention_efficiency": min(1.0, attention / peak),
            # The planner counts activations of 2 bytes an element; a CPU's have 4.
            "memory_efficiency": 0.5 if is_cpu else 1.0,
            # On a CPU nothing overlaps the launches, so their time is part of the kernels.
            "host_seconds": 0.0 if is_cpu else layer / (FORWARD_OPERATORS + BACKWARD_OPERATORS),
            "link_efficiency": 1.0 if num_devices > 1 else 0.8,
            "network_efficiency": 0.8,
        },
    }


def _toml(values: dict[str, Any]) -> str:
    """Format values and nested sections as TOML; floats have four significant digits."""

    def line(name: str, value: float | str) -> str:
        return f"{name} = {value:.4g}" if isinstance(value, float) else f"{name} = {json.dumps(value)}"

    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += ["", f"[{name}]", *(line(key, each) for key, each in value.items())]
        else:
            lines.append(line(name, value))
    return "\n".join(lines)


def links_of(device_type: str, num_devices: int) -> tuple[float, float, float]:
    """Measure the links between the devices of this machine.

    One process per device measures all-gathers of a small and a large tensor; `collective_time.py` has the equation. On
    a CPU, two processes also run sharded layers, because hooks and copies of FSDP take longer there than small
    all-gathers.

    Returns:
        Bandwidth in bytes/s, latency in s, and `Device.shard_seconds`.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_gather_repeatedly, (num_devices, device_type, folder), nprocs=num_devices)
        small, large, sharded = json.loads(Path(folder, "seconds").read_text())
    bandwidth, latency = link_of(num_devices, small=small, large=large)
    return bandwidth, latency, max(0.0, sharded - small)


def link_of(num_devices: int, *, small: float, large: float) -> tuple[float, float]:
    """Return the bandwidth and latency of links, given the seconds of a small and a large all-gather."""
    share = (num_devices - 1) / num_devices * GATHERED_BYTES
    return share / max(large - small, 1e-9), small / (num_devices - 1)


def _gather_repeatedly(rank: int, num_devices: int, device_type: str, folder: str) -> None:
    """Write the seconds of a small and of a large all-gather and, on a CPU, of a sharded layer's gather or scatter.

    Collective over the processes of `links_of`.
    """
    device = torch.device(device_type, rank) if device_type != "cpu" else torch.device("cpu")
    if device_type != "cpu":
        torch.accelerator.set_device_index(rank)
    store = dist.FileStore(f"{folder}/store", num_devices)
    dist.init_process_group(dist.get_default_backend_for_device(device), store=store, rank=rank, world_size=num_devices)
    seconds = []
    for num_bytes in (1024, GATHERED_BYTES):
        gathered = torch.ones(num_bytes // 4, device=device)
        own = gathered.chunk(num_devices)[rank].clone()
        seconds.append(_seconds(partial(dist.all_gather_into_tensor, gathered, own), repeats=10))
    seconds.append(_sharded_seconds(device) if device_type == "cpu" else 0.0)
    if rank == 0:
        Path(folder, "seconds").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def _matmul_rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b)


def _bandwidth(num_bytes: int, device: torch.device) -> float:
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source))


def _attention_rate(dtype: torch.dtype, device: torch.device, *, length: int) -> float:
    """Return the FLOP/s of attention's forward on long sequences, from a measurement on sequences of `length`."""
    q = torch.ones(1, 8, length, 128, dtype=dtype, device=device)
    seconds = _seconds(lambda: functional.scaled_dot_product_attention(q, q, q, is_causal=True))
    return 4 * 8 * length**2 * 128 / 2 / seconds / attention_fill(length, 128)


class _Layer(nn.Module):
    """Decoder layer so small that the overhead of operators and autograd determines its time."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(64), nn.LayerNorm(64)])
        self.products = nn.ModuleList([nn.Linear(64, 192), nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 64)])

    def forward(self, x: Tensor) -> Tensor:
        qkv, out, up, down = self.products
        q, k, v = (each.unflatten(-1, (2, 32)).transpose(1, 2) for each in qkv(self.norms[0](x)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + out(attended.transpose(1, 2).flatten(2))
        return x + down(functional.gelu(up(self.norms[1](x))))


def _layer_seconds(device: torch.device) -> float:
    """Return the time of a small layer's forward and backward: the overhead of Python, operators and autograd."""
    layers, run = _small_layers(device)
    return _seconds(run) / len(layers)


def _sharded_seconds(device: torch.device) -> float:
    """Return the time that FSDP adds for each of the three gathers and scatters of a small layer."""
    layers, run = _small_layers(device)
    plain = _seconds(run, repeats=20)
    for layer in layers:
        fully_shard(layer)
    fully_shard(layers)
    return (_seconds(run, repeats=20) - plain) / (3 * len(layers))


def _small_layers(device: torch.device) -> tuple[nn.Sequential, Callable[[], object]]:
    """Return layers, and a function that runs their forward and backward."""
    layers = nn.Sequential(*(_Layer() for _ in range(8))).to(device)
    x = torch.ones(1, 8, 64, device=device, requires_grad=True)
    return layers, lambda: layers(x).sum().backward()


def _seconds(run: Callable[[], object], *, repeats: int | None = None) -> float:
    """Return the time of a call: the best mean of three calls, in `repeats` measurements or until the time limit."""
    run()
    synchronize = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None
    best, start, count = float("inf"), time.perf_counter(), 0
    while count < repeats if repeats is not None else time.perf_counter() - start < _SECONDS:
        synchronize()
        before = time.perf_counter()
        for _ in range(3):
            run()
        synchronize()
        best = min(best, (time.perf_counter() - before) / 3)
        count += 1
    return best

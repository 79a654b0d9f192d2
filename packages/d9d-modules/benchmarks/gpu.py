"""Speed of each kernel and its reference implementations, relative to the device's measured peak: a table, and JSON.

    uv run python packages/d9d-modules/benchmarks/gpu.py --output gpu.json

The bytes of a kernel are the minimum to move, each input read once and each output written once; its bandwidth is
relative to the bandwidth of copying a large tensor in the same run. The operations of the loss are counted as three
matrix products, relative to the rate of one large product. References: eager torch, torch.compile, and Liger if it is
installed. Calls alternate between buffers that together are ten times as large as a cache. The device works on a
product while the timed calls are queued, so the device is measured and not Python.

`--device cpu --tiny` only checks that the benchmark runs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_modules.lm_head import language_model_head
from d9d_modules.norm import add_rms_norm, rms_norm
from d9d_modules.swiglu import silu_mul

Function: TypeAlias = Callable[..., Tensor | tuple[Tensor, ...]]

_WORKING_SET = 1 << 29
"""Total bytes of the buffers between which calls alternate: ten times a large cache of an accelerator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the measurements.

    Attributes:
        tokens: Rows of every input.
        hidden: Size of a norm's rows.
        intermediate: Size of a gated row.
        vocabulary: Rows of the head's weight.
        ceiling: Side of the square product, and rows of the copy, that measure the peak rates.
        repeats: Number of measurements; the median is reported.
        calls: Number of calls per measurement.
    """

    tokens: int = 8192
    hidden: int = 4096
    intermediate: int = 14336
    vocabulary: int = 128_256
    ceiling: int = 8192
    repeats: int = 50
    calls: int = 10


TINY = Sizes(tokens=8, hidden=16, intermediate=24, vocabulary=40, ceiling=32, repeats=2, calls=2)


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the table.

    Attributes:
        kernel: Name of the computation.
        peer: Name of the implementation.
        direction: Forward, backward, or both.
        microseconds: Median of one call.
        part: Fraction of the measured bandwidth, or of the measured rate of products.
        extra_mib: For the loss: peak memory beyond inputs and gradients, in MiB; None if the device does not report it.
    """

    kernel: str
    peer: str
    direction: str
    microseconds: float
    part: float
    extra_mib: float | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """Memory-bound kernel.

    Attributes:
        name: Name of the computation.
        peers: Implementations by name.
        shapes: Shapes of the inputs.
        forward: Number of tensors of the first shape that forward reads and writes.
        backward: Number of tensors of the first shape that backward reads and writes.
    """

    name: str
    peers: dict[str, Function]
    shapes: list[tuple[int, ...]]
    forward: int
    backward: int


def main() -> None:
    """Measure, print the table, and optionally write JSON."""
    parser = argparse.ArgumentParser(description="Speed of kernels, relative to the device's measured peak.")
    parser.add_argument("--device", help="default: the accelerator")
    parser.add_argument("--tiny", action="store_true", help="use small sizes, to test the script")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--no-compile", action="store_true", help="omit torch.compile")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    device = torch.device(args.device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    bench = Bench(device, getattr(torch, args.dtype), TINY if args.tiny else Sizes())
    ceilings = {"copy_bytes_per_second": bench.bandwidth(), "product_flops_per_second": bench.product_rate()}
    print(f"{device}: copy {bench.bandwidth() / 1e12:.3f} TB/s, product {bench.product_rate() / 1e12:.1f} TFLOP/s")
    rows = []
    for row in bench.rows(with_compile=not args.no_compile):
        rows.append(row)
        extra = "" if row.extra_mib is None else f"  {row.extra_mib:8.1f} MiB"
        print(f"{row.kernel:22s} {row.peer:8s} {row.direction:9s} {row.microseconds:12.1f} us  {row.part:7.1%}{extra}")
    figures = {"torch": torch.__version__, "device": str(device), "dtype": args.dtype, **ceilings}
    figures |= {"sizes": asdict(bench.sizes), "rows": [asdict(row) for row in rows]}
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


class Bench:
    """Measurements on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> None:
        self.device, self.dtype, self.sizes = device, dtype, sizes
        side = sizes.ceiling
        self._square = torch.randn(side, side, device=device, dtype=dtype)
        copy = torch.randn(16 * side, side, device=device, dtype=dtype)
        target = torch.empty_like(copy)
        self._bandwidth = 2 * copy.nbytes / self._seconds([lambda: target.copy_(copy)])
        self._rate = 2 * side**3 / self._seconds([lambda: self._square @ self._square])

    def bandwidth(self) -> float:
        """Return the bytes per second of a copy, read and written."""
        return self._bandwidth

    def product_rate(self) -> float:
        """Return the operations per second of a product of square matrices."""
        return self._rate

    def rows(self, *, with_compile: bool) -> Iterator[Row]:
        """Yield all rows of the table."""
        for kernel in (*norms(self.sizes), gate(self.sizes)):
            for peer, function in kernel.peers.items():
                if peer != "compile" or with_compile:
                    yield from self._kernel_rows(kernel, peer, function)
        yield from self._loss_rows()

    def _kernel_rows(self, kernel: Kernel, peer: str, function: Function) -> Iterator[Row]:
        size = self.dtype.itemsize * torch.Size(kernel.shapes[0]).numel()
        num_buffers = 2 if self.sizes is TINY else max(2, -(-_WORKING_SET // size))
        inputs = [[self._draw(shape).requires_grad_() for shape in kernel.shapes] for _ in range(num_buffers)]
        seconds = self._seconds([partial(function, *tensors) for tensors in inputs])
        yield Row(kernel.name, peer, "forward", seconds * 1e6, kernel.forward * size / seconds / self._bandwidth)
        backwards: list[Callable[[], object]] = []
        for tensors in inputs:
            outputs = function(*tensors)
            outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
            gradients = tuple(torch.randn_like(y) for y in outputs)
            backwards.append(partial(torch.autograd.grad, outputs, tensors, gradients, retain_graph=True))
        seconds = self._seconds(backwards)
        yield Row(kernel.name, peer, "backward", seconds * 1e6, kernel.backward * size / seconds / self._bandwidth)

    def _loss_rows(self) -> Iterator[Row]:
        sizes = self.sizes
        hidden = self._draw((1, sizes.tokens, sizes.hidden)).requires_grad_()
        weight = (self._draw((sizes.vocabulary, sizes.hidden)) * 0.02).requires_grad_()
        labels = torch.randint(0, sizes.vocabulary, (1, sizes.tokens), device=self.device)
        flops = 6 * sizes.tokens * sizes.hidden * sizes.vocabulary
        for peer, loss in losses().items():

            def step(loss: Function = loss) -> None:
                hidden.grad = weight.grad = None
                torch.autograd.backward(loss(hidden, weight, labels))

            seconds = self._seconds([step], calls=1)
            extra = self._extra_mib(step, hidden.nbytes + weight.nbytes)
            yield Row("linear_cross_entropy", peer, "both", seconds * 1e6, flops / seconds / self._rate, extra)

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def _seconds(self, functions: list[Callable[[], object]], *, calls: int | None = None) -> float:
        """Return the median time of one call in seconds; the functions alternate."""
        calls = calls or self.sizes.calls
        for function in functions:
            function()
        return statistics.median(self._measure(functions, calls) for _ in range(self.sizes.repeats)) / calls

    def _measure(self, functions: list[Callable[[], object]], calls: int) -> float:
        if self.device.type == "cpu":
            begin = time.perf_counter()
            for i in range(calls):
                functions[i % len(functions)]()
            return time.perf_counter() - begin
        start, stop = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        for _ in range(4):
            torch.mm(self._square, self._square)  # while the device computes these, the timed calls are queued
        start.record()
        for i in range(calls):
            functions[i % len(functions)]()
        stop.record()
        torch.accelerator.synchronize()
        return start.elapsed_time(stop) / 1e3

    def _extra_mib(self, step: Callable[[], None], gradients: int) -> float | None:
        if self.device.type == "cpu":
            return None
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = (
            torch.accelerator.memory_allocated() - gradients
        )  # without the gradients of the previous step, which are freed
        step()
        return (torch.accelerator.max_memory_allocated() - before - gradients) / 2**20


def norms(sizes: Sizes) -> Iterator[Kernel]:
    """Yield RMS norm without and with the residual add; partial sums of the weight gradient are not counted."""

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)

    def eager_add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return eager(total, weight), total

    peers: dict[str, Function] = {"ours": rms_norm, "eager": eager, "compile": torch.compile(eager)}
    add_peers: dict[str, Function] = {"ours": add_rms_norm, "eager": eager_add, "compile": torch.compile(eager_add)}
    if liger := _liger():
        peers["liger"] = lambda x, weight: liger.liger_rms_norm(x, weight, 1e-6, in_place=False)
        add_peers["liger"] = lambda x, r, weight: liger.liger_fused_add_rms_norm(x, r, weight, 1e-6, in_place=False)
    rows, weight = (sizes.tokens, sizes.hidden), (sizes.hidden,)
    yield Kernel("rms_norm", peers, [rows, weight], forward=2, backward=3)
    yield Kernel("add_rms_norm", add_peers, [rows, rows, weight], forward=4, backward=4)


def gate(sizes: Sizes) -> Kernel:
    """Return the product of a gated feed-forward block."""

    def eager(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    peers: dict[str, Function] = {"ours": silu_mul, "eager": eager, "compile": torch.compile(eager)}
    if liger := _liger():
        peers["liger"] = liger.liger_swiglu
    rows = (sizes.tokens, sizes.intermediate)
    return Kernel("silu_mul", peers, [rows, rows], forward=3, backward=5)


def losses() -> dict[str, Function]:
    """Return functions from hidden states [1, T, D], a weight [V, D] and labels [1, T] to the summed loss."""

    def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return language_model_head(hidden, weight, labels=labels, backend="chunked").sum()

    def eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), labels.flatten(), reduction="sum")

    def cut(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return language_model_head(hidden, weight, labels=labels, backend="cut_cross_entropy").sum()

    peers: dict[str, Function] = {"ours": ours, "eager": eager}
    if find_spec("cut_cross_entropy") and torch.accelerator.is_available():
        peers["cut"] = cut
    if liger := _liger():
        peers["liger"] = lambda hidden, weight, labels: liger.liger_fused_linear_cross_entropy(
            hidden[0], weight, labels[0], reduction="sum"
        )
    return peers


def _liger() -> Any:
    """Return Liger's functions, or `None` if Liger or an accelerator is missing."""
    is_there = find_spec("liger_kernel") is not None and torch.accelerator.is_available()
    return import_module("liger_kernel.transformers.functional") if is_there else None


if __name__ == "__main__":
    main()

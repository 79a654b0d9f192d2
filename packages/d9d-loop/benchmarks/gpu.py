"""Bandwidth of the optimizers' kernels and of reference implementations, relative to a copy: a table, and JSON.

    python packages/d9d-loop/benchmarks/gpu.py --output gpu.json

The bytes of a kernel are the minimum to move, each number read once and written once: 14 or 22 per element of AdamW on
bfloat16 parameters, with moments in bfloat16 or float32. The bandwidth is relative to the bandwidth of copying a large
tensor in the same run. References: torch's fused AdamW, which rounds to nearest, and torchao's AdamW if it is
installed. Together the tensors are larger than any cache.

`--device cpu --tiny` only checks that the benchmark runs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d9d_loop.optimizers import LocalAdamW, StochasticAdamW


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the measurements.

    Attributes:
        elements: Number of elements of all tensors together.
        tensors: Number of tensors that a step updates.
        repeats: Number of measurements; the median is reported.
    """

    elements: int = 10**9
    tensors: int = 64
    repeats: int = 20


TINY = Sizes(elements=4096, tensors=2, repeats=2)


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the table.

    Attributes:
        kernel: Name of the computation.
        peer: Name of the implementation.
        milliseconds: Median of one call.
        part: Fraction of the bandwidth of a copy.
    """

    kernel: str
    peer: str
    milliseconds: float
    part: float


def main() -> None:
    """Measure, print the table, and optionally write JSON."""
    parser = argparse.ArgumentParser(description="Bandwidth of optimizer kernels, relative to a copy.")
    parser.add_argument("--device", help="default: the accelerator")
    parser.add_argument("--tiny", action="store_true", help="use small sizes, to test the script")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    bench = Bench(
        torch.device(args.device or torch.accelerator.current_accelerator(check_available=True) or "cpu"),
        TINY if args.tiny else Sizes(),
    )
    print(f"{bench.device}: copy {bench.bandwidth / 1e12:.3f} TB/s")
    rows = []
    for row in bench.steps():
        rows.append(row)
        print(f"{row.kernel:32s} {row.peer:10s} {row.milliseconds:10.3f} ms  {row.part:7.1%}", flush=True)
    figures: dict[str, Any] = {
        "torch": torch.__version__,
        "device": str(bench.device),
        "copy_bytes_per_second": bench.bandwidth,
    }
    figures |= {"sizes": asdict(bench.sizes), "rows": [asdict(row) for row in rows]}
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


class Bench:
    """Measurements on one device."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        source = torch.zeros(sizes.elements, dtype=torch.bfloat16, device=device)
        target = torch.empty_like(source)
        self.bandwidth = 2 * source.nbytes / self._seconds(lambda: target.copy_(source))

    def steps(self) -> Iterator[Row]:
        """Yield the rows of AdamW steps on bfloat16."""
        for dtype, num_bytes in ((torch.bfloat16, 14), (torch.float32, 22)):
            name = f"adamw, averages {str(dtype).removeprefix('torch.')}"
            named = self._parameters()
            yield self._row(name, "ours", StochasticAdamW(named, average_dtype=dtype).step, num_bytes=num_bytes)
        fused = LocalAdamW([parameter for _, parameter in self._parameters()], fused=True)
        yield self._row("adamw, to nearest", "torch", fused.step, num_bytes=14)
        if torchao := _torchao():
            parameters = [parameter for _, parameter in self._parameters()]
            step = torchao._AdamW(parameters, bf16_stochastic_round=True).step
            yield self._row("adamw, averages bfloat16", "torchao", step, num_bytes=14)

    def _parameters(self) -> list[tuple[str, Tensor]]:
        named = []
        for index in range(self.sizes.tensors):
            shape = (self.sizes.elements // self.sizes.tensors // 8, 8)
            parameter = torch.ones(shape, dtype=torch.bfloat16, device=self.device, requires_grad=True)
            parameter.grad = torch.ones_like(parameter)
            named.append((f"w{index}", parameter))
        return named

    def _row(self, kernel: str, peer: str, run: Callable[[], object], *, num_bytes: int) -> Row:
        seconds = self._seconds(run)
        return Row(kernel, peer, seconds * 1e3, num_bytes * self.sizes.elements / seconds / self.bandwidth)

    def _seconds(self, run: Callable[[], object]) -> float:
        """Return the median time of one call in seconds, after two warm-up calls."""
        for _ in range(2):
            run()
        return statistics.median(self._measure(run) for _ in range(self.sizes.repeats))

    def _measure(self, run: Callable[[], object]) -> float:
        self._wait()
        begin = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def _torchao() -> Any:
    """Return torchao's optimizers, or `None` if torchao or an accelerator is missing."""
    is_there = find_spec("torchao") is not None and torch.accelerator.is_available()
    return import_module("torchao.optim") if is_there else None


if __name__ == "__main__":
    main()

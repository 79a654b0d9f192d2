"""Speed of grouped products, permutations and a stack of layers, relative to the peak rates of the device.

    uv run --group test python packages/d9d-moe/benchmarks/gpu.py --output gpu.json

Products are relative to one large product in the same run. Permutations are relative to a copy: each row is counted
once where it is read and once where it is written. If `transformers` is installed, the stack is compared with its stack
with grouped products and with its loop over experts. `--device cpu --tiny` only checks that it runs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from moe_layer import copy_weights, our_layer, step, their_layer
from torch import Tensor, nn

from d9d_moe import grouped_matmul
from d9d_moe.permute import combine_rows, inverse_permutation, take_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the measurements.

    Attributes:
        tokens: Tokens of a forward pass.
        experts: Number of experts.
        top_k: Experts of each token.
        hidden: Size of the hidden states.
        intermediate: Size of the gated space of an expert.
        layers: Layers of the stack.
        ceiling: Side of the square product, and rows of the copy, that measure the peak rates.
        repeats: Number of measurements; the median is reported.
    """

    tokens: int = 16384
    experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    intermediate: int = 768
    layers: int = 4
    ceiling: int = 8192
    repeats: int = 20


TINY = Sizes(tokens=32, experts=8, top_k=2, hidden=16, intermediate=16, layers=2, ceiling=64, repeats=2)


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the table.

    Attributes:
        what: Name of the computation.
        microseconds: Median of one call.
        part: Fraction of the measured rate of products or bandwidth; for the stack, of the rate of products.
        tokens_per_second: Tokens per second of the stack.
    """

    what: str
    microseconds: float
    part: float
    tokens_per_second: float | None = None


def main() -> None:
    """Measure, print the table, and optionally write JSON."""
    parser = argparse.ArgumentParser(description="Speed of experts, relative to the device's measured peak.")
    parser.add_argument("--device", help="default: the accelerator")
    parser.add_argument("--tiny", action="store_true", help="use small sizes, to test the script")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    device = torch.device(args.device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    bench = Bench(device, TINY if args.tiny else Sizes())
    rows = []
    for row in bench.rows():
        rows.append(row)
        speed = "" if row.tokens_per_second is None else f"  {row.tokens_per_second:12.0f} tokens/s"
        print(f"{row.what:42s} {row.microseconds:12.1f} us  {row.part:7.1%}{speed}")
    figures = {"torch": torch.__version__, "device": str(device), "sizes": asdict(bench.sizes)}
    if args.output:
        figures["rows"] = [asdict(row) for row in rows]
        args.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


class Bench:
    """Measurements on one device, in bfloat16."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        side = sizes.ceiling
        self._square = square = self._draw(side, side)
        copy = self._draw(8 * side, side)
        target = torch.empty_like(copy)
        self._bandwidth = 2 * copy.nbytes / self._seconds(lambda: target.copy_(copy))
        self._rate = 2 * side**3 / self._seconds(lambda: square @ square)

    def rows(self) -> Iterator[Row]:
        """Yield all rows of the table."""
        for name, counts in (("balanced", self._balanced()), ("Zipf", self._zipf())):
            yield from self._products(name, counts)
        yield from self._permutations()
        yield from self._stacks()

    def _balanced(self) -> Tensor:
        sizes = self.sizes
        return torch.full((sizes.experts,), sizes.tokens * sizes.top_k // sizes.experts, device=self.device)

    def _zipf(self) -> Tensor:
        """Return counts in which the n-th expert's share is proportional to 1 / n."""
        total = self.sizes.tokens * self.sizes.top_k
        shares = 1.0 / torch.arange(1, self.sizes.experts + 1)
        counts = (shares / shares.sum() * total).long()
        counts[0] += total - counts.sum()
        return counts.to(self.device)

    def _products(self, name: str, counts: Tensor) -> Iterator[Row]:
        sizes = self.sizes
        num_rows = int(counts.sum())
        x = self._draw(num_rows, sizes.hidden).requires_grad_()
        weight = self._draw(sizes.experts, sizes.intermediate, sizes.hidden).requires_grad_()
        flops = 2 * num_rows * sizes.hidden * sizes.intermediate
        seconds = self._seconds(lambda: grouped_matmul(x, weight, counts))
        yield Row(f"grouped product forward, {name}", seconds * 1e6, flops / seconds / self._rate)
        y = grouped_matmul(x, weight, counts)
        gradient = torch.randn_like(y)
        seconds = self._seconds(lambda: torch.autograd.grad(y, (x, weight), gradient, retain_graph=True))
        yield Row(f"grouped product backward, {name}", seconds * 1e6, 2 * flops / seconds / self._rate)

    def _permutations(self) -> Iterator[Row]:
        sizes = self.sizes
        num_rows = sizes.tokens * sizes.top_k
        x = self._draw(sizes.tokens, sizes.hidden).requires_grad_()
        rows = self._draw(num_rows, sizes.hidden).requires_grad_()
        weights = torch.rand(sizes.tokens, sizes.top_k, device=self.device, requires_grad=True)
        order = torch.randperm(num_rows, device=self.device)
        inverse = inverse_permutation(order)
        taken = take_rows(x, order, inverse, copies=sizes.top_k)
        combined = combine_rows(rows, weights, order, inverse)
        gradients = torch.randn_like(taken), torch.randn_like(combined)
        cases: list[tuple[str, Callable[[], object], int]] = [
            (
                "permute forward",
                lambda: take_rows(x, order, inverse, copies=sizes.top_k),
                sizes.tokens + num_rows,
            ),
            (
                "permute backward",
                lambda: torch.autograd.grad(taken, x, gradients[0], retain_graph=True),
                sizes.tokens + num_rows,
            ),
            ("unpermute forward", lambda: combine_rows(rows, weights, order, inverse), sizes.tokens + num_rows),
            (
                "unpermute backward",
                lambda: torch.autograd.grad(combined, (rows, weights), gradients[1], retain_graph=True),
                sizes.tokens + 2 * num_rows,
            ),
        ]
        for name, function, num_moved in cases:
            seconds = self._seconds(function)
            num_bytes = num_moved * sizes.hidden * rows.element_size()
            yield Row(name, seconds * 1e6, num_bytes / seconds / self._bandwidth)

    def _stacks(self) -> Iterator[Row]:
        sizes = self.sizes
        namespace = argparse.Namespace(
            experts=sizes.experts,
            top_k=sizes.top_k,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
        )
        with torch.device(self.device):
            ours = [our_layer(namespace).to(torch.bfloat16) for _ in range(sizes.layers)]
        x = self._draw(1, sizes.tokens, sizes.hidden)
        gradient = torch.randn_like(x)
        flops = 3 * 2 * 3 * sizes.tokens * sizes.top_k * sizes.hidden * sizes.intermediate * sizes.layers

        def row(name: str, stack: nn.Module) -> Row:
            seconds = self._seconds(lambda: step(stack, x, gradient))
            return Row(name, seconds * 1e6, flops / seconds / self._rate, sizes.tokens / seconds)

        yield row("stack, ours", _Stack(ours))
        for implementation in ("grouped_mm", "eager") if find_spec("transformers") else ():
            with torch.device(self.device):
                theirs = [their_layer(namespace, implementation).to(torch.bfloat16) for _ in ours]
            for one, other in zip(ours, theirs, strict=True):
                copy_weights(one, other)
            yield row(f"stack, transformers {implementation}", _Stack(theirs))

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def _seconds(self, function: Callable[[], object]) -> float:
        """Return the median time of a call in seconds."""
        function()
        return statistics.median(self._measure(function) for _ in range(self.sizes.repeats))

    def _measure(self, function: Callable[[], object]) -> float:
        if self.device.type == "cpu":
            begin = time.perf_counter()
            function()
            return time.perf_counter() - begin
        start, stop = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        torch.accelerator.synchronize()
        for _ in range(4):
            torch.mm(self._square, self._square)  # while the device computes these, the timed call is queued
        start.record()
        function()
        stop.record()
        torch.accelerator.synchronize()
        return start.elapsed_time(stop) / 1e3


class _Stack(nn.Module):
    """Sequence of layers with residual connections."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = x + (y[0] if isinstance(y, tuple) else y)
        return x


if __name__ == "__main__":
    main()

"""Check that stochastic rounding is unbiased: errors of means of 10^8 values, in standard deviations of the mean.

    python packages/d9d-loop/benchmarks/rounding.py --output rounding.json

Every line should be within 4 sigma. `--device cpu --tiny` only checks that the benchmark runs.
"""

import argparse
import json
import math
from pathlib import Path

import torch

from d9d_dist import stream_key
from d9d_dist.values.counter_random import random_bits_at
from d9d_loop.optimizers.stochastic_adamw import draw, round_stochastically

_CHUNK = 1 << 22
_VALUES = (1.001, -1.0005, 1 / 3, 123.456, 3e-20, 1.00390625)


def deviation(value: float, samples: int, device: torch.device) -> float:
    """Return the deviation of the mean of rounded values from the value, in standard deviations of the mean."""
    exact = torch.tensor(value).item()
    low = (torch.tensor(value).view(torch.int32) & -0x10000).view(torch.float32).item()
    high = ((torch.tensor(value).view(torch.int32) & -0x10000) + 0x10000).view(torch.float32).item()
    source = torch.full((min(_CHUNK, samples),), value, device=device)
    indices = torch.arange(len(source), device=device)
    raised = done = 0
    for step in range(-(-samples // _CHUNK)):
        bits = random_bits_at(indices, stream_key(0, "benchmark", step))
        raised += int((round_stochastically(source, draw(bits, 0)) == high).sum())
        done += len(source)
    share = (exact - low) / (high - low)
    return (raised / done - share) / math.sqrt(share * (1 - share) / done)


def main() -> None:
    """Measure, print, and optionally write JSON."""
    parser = argparse.ArgumentParser(
        description="Errors of the means of stochastically rounded values, in standard deviations."
    )
    parser.add_argument("--device", help="default: the accelerator, if there is one")
    parser.add_argument("--samples", type=int, default=10**8)
    parser.add_argument("--tiny", action="store_true", help="use small sizes, to test the script")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    device = torch.device(args.device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    samples = 10**5 if args.tiny else args.samples
    rows = []
    for value in _VALUES:
        rows.append({"value": value, "samples": samples, "sigmas": deviation(value, samples, device)})
        print(f"{value:12g}: {rows[-1]['sigmas']:+.2f} sigma over {samples:.0e} samples", flush=True)
    figures = {"torch": torch.__version__, "device": str(device), "rows": rows}
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

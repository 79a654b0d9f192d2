"""Model FLOPs and how much of the hardware's they are, by one definition.

Model FLOPs are the floating-point operations of the *matrix products* that the mathematics of a training step asks for:
two for each multiply-add, in the forward pass and in both products of the backward pass, so three times those of the
forward pass. Counted are products with weights, the language-model head among them, and those of attention for the
pairs of positions that its mask allows. Not counted are what is computed again (activation checkpointing) or in vain
(padding), look-ups in embeddings, norms, activations, softmax and the optimizer. Of a mixture of experts only the
experts that a token goes to are counted. MFU (Chowdhery et al. 2022, PaLM, https://arxiv.org/abs/2204.02311, section
4.1 and appendix B) is model FLOPs per second over the peak of all ranks; we differ in counting causal attention by
half, as its mask does.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_metrics.accumulator import Accumulator
from d9d_metrics.metric import Metric

PEAK_FLOPS: Mapping[str, float] = {
    "GB300": 2.5e15,
    "GB200": 2.5e15,
    "B300": 2.25e15,
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX A6000": 154.8e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI355X": 2.5e15,
    "MI350X": 2.3e15,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
    "MI300A": 980e12,
    "MI250X": 191.5e12,
    "MI250": 181e12,
}
"""Peak rates of dense bfloat16 matrix products with float32 sums, in FLOP/s of one device as torch counts devices (an
MI250X is two). They are those of NVIDIA's and AMD's data sheets, of which NVIDIA's often give twice as much, for sparse
matrices; SXM and OAM modules where the name says no other form (PCIe, NVL). A device has the rate of the longest name
that is part of its own."""


def peak_flops(device: torch.device, *, table: Mapping[str, float] = PEAK_FLOPS) -> float:
    """Peak rate of a device, in FLOP/s.

    Args:
        device: An accelerator.
        table: Rates by parts of the device's name; `{**PEAK_FLOPS, "My Chip": 1e15}` adds one.

    Raises:
        UserError: If the table does not have the device, or the device is the CPU, which has no one rate.
    """
    name = "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return _peak_by_name(name, table)


def _peak_by_name(name: str, table: Mapping[str, float]) -> float:
    words = name.lower().replace("-", " ")
    # "NVIDIA L40S" is no L4: a name ends where a word does.
    found = [known for known in table if f" {known.lower()} " in f" {words} "]
    if not found:
        raise UserError(
            f"no peak rate is known for the device {name!r}; known are {', '.join(table)}. Pass the rate itself, or a "
            "table with the device: {**PEAK_FLOPS, 'name': FLOP/s}."
        )
    return table[max(found, key=len)]


def transformer_flops_per_token(
    *,
    num_matmul_parameters: int,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    sequence_length: int,
    causal: bool = True,
    training: bool = True,
) -> float:
    """Model FLOPs of one token of a transformer: 3 (2 P + 4 L H D K), with K the mean number of keys of a query.

    K is the sequence length S, or (S + 1) / 2 under a causal mask.

    Args:
        num_matmul_parameters: P: elements of the weights that a token is multiplied with: without the embedding table
            where it is only looked up in, with the head, and of experts only as many as a token goes to.
        num_layers: L: number of layers with attention.
        num_heads: H: number of query heads of a layer.
        head_dim: D: size of a head, the mean of those of keys and of values.
        sequence_length: S: positions that attend to each other; of packed documents, their mean length weighted by it.
        causal: Whether a position attends to itself and those before it only.
        training: Whether there is a backward pass; otherwise there is no factor 3.
    """
    num_keys = (sequence_length + 1) / 2 if causal else sequence_length
    forward = 2 * num_matmul_parameters + 4 * num_layers * num_heads * head_dim * num_keys
    return (3 if training else 1) * forward


@final
class ModelFlops(Metric):
    """The rate of model FLOPs, and the share of the peak rate that they are (MFU).

    The value has `flops_per_second`, of all ranks together, and `mfu`, from 0 to 1; both are 0 of nothing.

    Args:
        peak: Peak rate of this rank's device in FLOP/s, see `peak_flops`.
    """

    def __init__(self, peak: float) -> None:
        self._peak = peak
        self._flops, self._possible = Accumulator("sum"), Accumulator("sum")
        self._seconds = Accumulator("max")

    def accumulators(self) -> dict[str, Accumulator]:
        """Return the FLOPs done, those that were possible in the time, and the seconds."""
        return {"flops": self._flops, "possible": self._possible, "seconds": self._seconds}

    def update(self, flops: Tensor | float, seconds: float) -> None:
        """Take in some work.

        Args:
            flops: Model FLOPs of what this rank did: its tokens times `transformer_flops_per_token`, over the number of
                ranks that share each token's work (tensor, pipeline and context parallel).
            seconds: The time it took.
        """
        self._flops.update(flops)
        self._possible.update(self._peak * seconds)
        # The maximum is that over ranks; on one rank times add up.
        self._seconds.update(self._seconds.value.clamp(min=0) + seconds)

    def compute(self) -> dict[str, Tensor]:
        """Return both: float64 scalars."""
        seconds, possible = self._seconds.value.clamp(min=0), self._possible.value
        return {
            "flops_per_second": self._flops.value / seconds.where(seconds != 0, 1.0),
            "mfu": self._flops.value / possible.where(possible != 0, 1.0),
        }

"""Model FLOPs and model FLOPs utilization (MFU).

Model FLOPs are the floating-point operations of the *matrix products* in a training step: two per multiply-add. The
backward pass has two products for each one of the forward pass, so a step has three times the FLOPs of the forward
pass. Included are products with weights, and the attention products for the pairs of positions that the mask allows.
Experts count only for the tokens that are dispatched to them. Recomputation (activation checkpointing) and padding are
excluded.

MFU (Chowdhery et al. 2022, PaLM, https://arxiv.org/abs/2204.02311, section 4.1 and appendix B) is model FLOPs per
second over the peak rate of all ranks. Unlike the paper, this module counts only the unmasked half of causal attention.
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
"""Peak rates of dense bfloat16 matrix products with float32 accumulation, in FLOP/s per device.

Devices are counted as in torch: an MI250X is two devices. The rates are from the data sheets of NVIDIA, with sparse
rates halved, and AMD. Names without a form factor (PCIe, NVL) are SXM and OAM modules. A device has the rate of the
longest name that its own name contains.
"""


def peak_flops(device: torch.device, *, table: Mapping[str, float] = PEAK_FLOPS) -> float:
    """Return the peak rate of an accelerator, in FLOP/s.

    `table` maps device names, or parts of them, to FLOP/s; `{**PEAK_FLOPS, "My Chip": 1e15}` adds an entry.

    Raises:
        UserError: If the table has no entry for the device, or the device is the CPU.
    """
    name = "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return _peak_by_name(name, table)


def _peak_by_name(name: str, table: Mapping[str, float]) -> float:
    words = name.lower().replace("-", " ")
    # Match whole words: "NVIDIA L40S" must not match "L4".
    found = [known for known in table if f" {known.lower()} " in f" {words} "]
    if not found:
        raise UserError(
            f"got the device {name!r}, whose peak rate is unknown; expected one of {', '.join(table)}. Pass the rate "
            "itself, or a table with the device: {**d9d_metrics.flops.PEAK_FLOPS, 'name': FLOP/s}."
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
    """Return the model FLOPs per token of a transformer: 3 (2 P + 4 L H D K), with K the mean number of keys per query.

    K is the sequence length S, or (S + 1) / 2 under a causal mask.

    Args:
        num_matmul_parameters: P: number of weight elements that a token is multiplied with. Include the head. Exclude
            an embedding table that is only used for lookups, and experts that a token is not dispatched to.
        num_layers: L: number of attention layers.
        num_heads: H: number of query heads per layer.
        head_dim: D: the mean of the key and value sizes if they differ.
        sequence_length: S. For packed documents, the mean document length weighted by length.
        causal: True for a causal mask.
        training: True to include the backward pass; otherwise the factor 3 is omitted.
    """
    num_keys = (sequence_length + 1) / 2 if causal else sequence_length
    forward = 2 * num_matmul_parameters + 4 * num_layers * num_heads * head_dim * num_keys
    return (3 if training else 1) * forward


@final
class ModelFlops(Metric):
    """Rate of model FLOPs, and its fraction of the peak rate (MFU).

    The value has `flops_per_second`, summed over all ranks, and `mfu`, from 0 to 1. Both values are 0 without data.

    Args:
        peak: Peak rate of this rank's device in FLOP/s; see `peak_flops`.
    """

    def __init__(self, peak: float) -> None:
        self._peak = peak
        self._flops, self._possible = Accumulator("sum"), Accumulator("sum")
        self._seconds = Accumulator("max")

    def update(self, flops: Tensor | float, seconds: float) -> None:
        """Add the model FLOPs of this rank in a time interval.

        The FLOPs are the rank's tokens times `transformer_flops_per_token`, divided by the number of ranks that share
        each token's work (tensor, pipeline and context parallel).
        """
        self._flops.update(flops)
        self._possible.update(self._peak * seconds)
        # Times are summed on each rank; the metric takes their maximum over ranks.
        self._seconds.update(self._seconds.value.clamp(min=0) + seconds)

    def compute(self) -> dict[str, Tensor]:
        """Return `flops_per_second` and `mfu`: float64 scalars."""
        seconds, possible = self._seconds.value.clamp(min=0), self._possible.value
        return {
            "flops_per_second": self._flops.value / seconds.where(seconds != 0, 1.0),
            "mfu": self._flops.value / possible.where(possible != 0, 1.0),
        }

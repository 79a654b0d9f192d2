"""Model FLOPs and model FLOPs utilization (MFU).

Model FLOPs are the floating-point operations of the *matrix products* and convolutions in the forward and backward pass
of a training step: two per multiply-add. The backward pass has a product for the gradient of each operand: that of a
weight only if the weight is trained, and that of an input only if something before it is trained. Attention counts for
the pairs of positions that the mask allows, and experts for the tokens that are dispatched to them. Linear attention
counts as its recurrence: for each position and head, three products with the state. Recomputation (activation
checkpointing, logits, attention scores), padding and the optimizer are excluded.

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
    "GB300": 2.5e15, "GB200": 2.5e15, "B300": 2.25e15, "B200": 2.25e15, "GH200": 989e12, "H200 NVL": 835e12,
    "H200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12, "H800 PCIe": 756e12, "H800": 989e12,
    "H20": 148e12, "A100": 312e12, "A800": 312e12, "A40": 149.7e12, "A30": 165e12, "A10G": 70e12, "A10": 125e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "RTX A6000": 154.8e12, "RTX 5090": 209.5e12, "RTX 4090": 165.2e12,
    "RTX 3090": 71e12, "MI355X": 2.5e15, "MI350X": 2.3e15, "MI325X": 1307e12, "MI300X": 1307e12, "MI300A": 980e12,
    "MI250X": 191.5e12, "MI250": 181e12,
}  # fmt: skip
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
    words = name.lower().replace("-", " ")  # whole words must match: "L4" is not in "NVIDIA L40S"
    found = [known for known in table if f" {known.lower()} " in f" {words} "]
    if not found:
        raise UserError(
            f"got the device {name!r}, whose peak rate is unknown; expected one of {', '.join(table)}. Pass the rate "
            "itself, or a table with the device: {**d9d_metrics.flops.PEAK_FLOPS, 'name': FLOP/s}."
        )
    return table[max(found, key=len)]


def transformer_flops_per_token(
    *,
    num_matmul_parameters: float,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    sequence_length: int,
    causal: bool = True,
    training: bool = True,
    value_dim: int | None = None,
    window: int | None = None,
    num_window_layers: int | None = None,
    chunk: int | None = None,
    num_frozen_parameters: float = 0,
    state_size: int = 0,
) -> float:
    """Return the model FLOPs per token of a transformer: 6 P - 2 F + 3 L H (2 D + 2 V) K + 18 S.

    K is the mean number of keys per query: half of the sequence length plus one under a causal mask without a window.

    Args:
        num_matmul_parameters: P: number of weight elements that a token is multiplied with. Include the head. Exclude
            an embedding table that is only used for lookups, and experts that a token is not dispatched to.
        num_layers: L: number of layers with softmax attention.
        num_heads: H: number of query heads per layer.
        head_dim: D: size of a query and a key; with latent attention, including the rotary features.
        sequence_length: For packed documents, the mean document length weighted by length.
        causal: True for a causal mask.
        training: True to include the backward pass; otherwise 2 P + L H (2 D + 2 V) K + 6 S.
        value_dim: V: size of a value; D by default.
        window: Sliding-window size; `None` for no limit.
        num_window_layers: Number of layers with the window; all by default.
        chunk: Size of the chunks of a row within which positions attend; `None` for no chunks.
        num_frozen_parameters: F: elements among P without weight gradients. Count those before the first trained
            parameter twice, because they have no gradients of inputs either.
        state_size: S: heads, times key size, times value size, of all layers with linear attention.
    """
    near, whole = (num_pairs(sequence_length, causal=causal, window=each, chunk=chunk) for each in (window, None))
    num_near = num_layers if num_window_layers is None else num_window_layers
    num_keys = (num_near * near + (num_layers - num_near) * whole) / sequence_length
    attention = 2 * num_heads * (head_dim + (head_dim if value_dim is None else value_dim)) * num_keys
    forward = 2 * num_matmul_parameters + attention + 6 * state_size
    return 3 * forward - 2 * num_frozen_parameters if training else forward


def num_pairs(length: float, *, causal: bool, window: int | None, chunk: int | None) -> float:
    """Return the number of pairs of a query and a key that a mask allows in a document of some length."""
    if chunk is not None and length > chunk:
        whole, rest = divmod(length, chunk)
        of_chunk, of_rest = (num_pairs(each, causal=causal, window=window, chunk=None) for each in (chunk, rest))
        return whole * of_chunk + of_rest
    reach = length if window is None else min(window, length)
    num_seen = reach * (reach + 1) / 2 + (length - reach) * reach
    return num_seen if causal else 2 * num_seen - length


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

        The FLOPs of ranks that share the work of a token (tensor, pipeline and context parallel) are those of one of
        these ranks, or are divided among them.
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

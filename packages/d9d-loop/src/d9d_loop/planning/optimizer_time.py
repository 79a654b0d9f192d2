"""Time of gradient clipping and the optimizer, in s: both are bound by memory bandwidth.

    t = P (2 o + 2 w + 4 g) / (0.88 B)

P: parameters whose state this rank holds. o, w, g: bytes per parameter of optimizer state (moments, and master weights
unless the stored weights are the master weights), of stored weights and of kept gradients. State and weights are read
and written; the norm reads gradients, clipping reads and writes them, and the update reads them. B: memory bandwidth,
bytes/s, of which kernels that stream large buffers reach 0.88 (McIntosh-Smith et al., BabelStream, on A100).
"""

from d9d_loop.planning.hardware_spec import Hardware
from d9d_loop.planning.plan_layout import PlanLayout

STREAM_EFFICIENCY = 0.88


def optimizer_seconds(hardware: Hardware, layout: PlanLayout, num_parameters: float) -> float:
    """Return the time of clipping and AdamW for a rank that holds the state of `num_parameters`."""
    moved = 2 * layout.master_bytes + 2 * layout.stored_weight_bytes + 4 * layout.kept_gradient_bytes
    return num_parameters * moved / (hardware.device.memory_bandwidth * STREAM_EFFICIENCY)

"""Time of gradient clipping and the optimizer, in s: both are bound by memory bandwidth.

    t = P n / (B f)

P: parameters whose state this rank holds. n: bytes per parameter that are read and written: AdamW on fp32 reads weight,
gradient and two moments and writes three of them (28), the norm reads the gradient (4), clipping reads and writes it
(8), and the compute copy of the weight is written (2). B f: effective memory bandwidth, bytes/s.
"""

from d9d_loop.planning.hardware_spec import Hardware

BYTES_PER_PARAMETER = 28 + 4 + 8 + 2


def optimizer_seconds(hardware: Hardware, num_parameters: float) -> float:
    """Return the time of clipping and AdamW for a rank that holds the state of `num_parameters`."""
    roof = hardware.device.memory_bandwidth * hardware.fitted.memory_efficiency
    return num_parameters * BYTES_PER_PARAMETER / roof

"""Work at the same time as a device's computation: communication, and launches of operators by the host.

    exposed = first + max(c l min(computation, rest), rest - computation),  rest = communication - first

If layers are prefetched (FSDP), the first transfer is exposed, and each later transfer overlaps the computation of the
previous layer. Transfers over the links within a node slow the computation down by c = 0.4 of their time, because they
use multiprocessors and memory bandwidth. l: share of the time in which these links are busy: 1 within a node, 0 if each
rank of the group is on another node, and less than 1 if the network limits the rate of the links. Times are in s.
Source of the overlap: PyTorch FSDP, Zhao et al. 2023, https://arxiv.org/abs/2304.11277, section 3.3. c was fitted once
to the measurements on A100 and H100.

    t = (D^4 + (N h)^4)^(1/4)

A device cannot run faster than its operators are launched. D: device time of a pass, in s. N: operators that the host
launches. h: fitted time of one launch in s, with Python's overhead. The slower of device and host determines the time;
where both are close, some operators wait for the host and others for the device, which the power mean describes.
"""

CONTENTION = 0.4


def exposed_seconds(computation: float, communication: float, *, first: float, link_share: float) -> float:
    """Return the exposed time of a communication that overlaps a computation, with the slowdown of the computation.

    `first` is the time of the first transfer, and `link_share` the share of the time in which links of a node are busy.
    """
    rest = communication - first
    return first + max(CONTENTION * link_share * min(computation, rest), rest - computation)


def launch_bound_seconds(device_seconds: float, num_operators: float, host_seconds: float) -> float:
    """Return the time of operators that take `device_seconds` on the device."""
    return (device_seconds**4 + (num_operators * host_seconds) ** 4) ** 0.25

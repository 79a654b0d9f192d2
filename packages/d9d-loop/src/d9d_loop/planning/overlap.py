"""Communication that is hidden behind computation.

    exposed = first + max(0, communication - first - computation)

Of a sequence of layers that prefetch (FSDP), the first transfer is exposed and each later one runs beside the
computation of the layer before. Transfers slow computation down by taking multiprocessors: 0 in this model, because
NCCL uses a few of them. Times are in s.
Source: PyTorch FSDP, Zhao et al. 2023, https://arxiv.org/abs/2304.11277, section 3.3.
"""


def exposed_seconds(computation: float, communication: float, *, first: float) -> float:
    """Return the exposed part of a communication that overlaps a computation, except its first transfer."""
    return first + max(0.0, communication - first - computation)

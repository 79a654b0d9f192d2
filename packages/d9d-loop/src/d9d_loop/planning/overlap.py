"""Communication that is hidden behind computation.

    exposed = first + max(c min(computation, rest), rest - computation),  rest = communication - first

Of a sequence of layers that prefetch (FSDP), the first transfer is exposed and each later one runs beside the
computation of the layer before. Transfers between devices of a node slow that computation down by a share c = 0.4 of
their time, since they take multiprocessors and memory bandwidth; those between nodes do not (c = 0). Times are in s.
Source of the overlap: PyTorch FSDP, Zhao et al. 2023, https://arxiv.org/abs/2304.11277, section 3.3. c was chosen once
for the rows of A100 and H100.
"""

CONTENTION = 0.4


def exposed_seconds(computation: float, communication: float, *, first: float, contends: bool) -> float:
    """Return the exposed part of a communication that overlaps a computation: its first transfer, and the slowdown.

    `contends` is True if transfers use the links of a node.
    """
    rest = communication - first
    return first + max(CONTENTION * min(computation, rest) if contends else 0.0, rest - computation)

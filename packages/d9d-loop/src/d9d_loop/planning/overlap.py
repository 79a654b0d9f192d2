"""Communication that is hidden behind computation.

    exposed = first + max(c min(computation, rest), rest - computation),  rest = communication - first

If layers are prefetched (FSDP), the first transfer is exposed, and each later transfer overlaps the computation of the
previous layer. Transfers within a node slow the computation down by c = 0.4 of the transfer time, because they use
multiprocessors and memory bandwidth; transfers between nodes do not (c = 0). Times are in s. Source of the overlap:
PyTorch FSDP, Zhao et al. 2023, https://arxiv.org/abs/2304.11277, section 3.3. c was fitted once to the measurements on
A100 and H100.
"""

CONTENTION = 0.4


def exposed_seconds(computation: float, communication: float, *, first: float, contends: bool) -> float:
    """Return the exposed time of a communication that overlaps a computation, with the slowdown of the computation.

    `first` is the time of the first transfer. `contends` is True if transfers use the links of a node.
    """
    rest = communication - first
    return first + max(CONTENTION * min(computation, rest) if contends else 0.0, rest - computation)

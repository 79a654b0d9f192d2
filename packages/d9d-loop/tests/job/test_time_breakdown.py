import pytest
from hypothesis import given
from hypothesis import strategies as st

from d9d_loop.job.time_breakdown import TimeBreakdown, break_down, spans_of

_SPANS = st.lists(st.tuples(st.integers(-5, 40), st.integers(-5, 40)).map(lambda span: (min(span), max(span))))


@given(compute=_SPANS, communication=_SPANS)
def test_overlapping_times_are_counted_once(
    compute: list[tuple[int, int]], communication: list[tuple[int, int]]
) -> None:
    def during(spans: list[tuple[int, int]], moment: int) -> bool:
        return any(start <= moment < end for start, end in spans)

    moments = [(during(compute, moment), during(communication, moment)) for moment in range(32)]
    assert break_down(compute, communication, total=(0, 32)) == TimeBreakdown(
        total=32,
        compute=sum(computes for computes, _ in moments),
        communication=sum(communicates for _, communicates in moments),
        exposed=sum(communicates and not computes for computes, communicates in moments),
        idle=sum(not (computes or communicates) for computes, communicates in moments),
    )


class _Kind:
    def __init__(self, name: str) -> None:
        self.name = name


class _Range:
    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, end


class _Event:
    def __init__(self, name: str, start: float, device: str = "CPU") -> None:
        self.name, self.device_type, self.time_range = name, _Kind(device), _Range(start * 1e6, start * 1e6 + 1e6)


@pytest.mark.parametrize("name", ["gloo:all_reduce", "c10d::allreduce_", "record_param_comms", "nccl:all_gather"])
def test_collectives_are_communication(name: str) -> None:
    assert spans_of([_Event(name, 3), _Event("aten::mm", 5), _Event("autograd::engine: x", 7)]) == ([(5, 6)], [(3, 4)])


def test_only_device_kernels_are_counted() -> None:
    events = [_Event("aten::mm", 0), _Event("gemm_kernel", 2, "CUDA"), _Event("ncclDevKernel_AllReduce", 4, "CUDA")]
    assert spans_of(events) == ([(2, 3)], [(4, 5)])

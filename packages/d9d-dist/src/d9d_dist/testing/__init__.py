"""Tools to test distributed code on one machine, with real ranks and collectives in reused processes.

Public, so that users can test their own parallel code with them.
"""

from d9d_dist.testing.compare import (
    Difference,
    assert_rounds_like,
    assert_trees_close,
    differences,
    full_gradients,
    full_parameters,
    full_tree,
)
from d9d_dist.testing.device_log import DeviceEntry, DeviceLog, EntryKind
from d9d_dist.testing.fake_accelerator import FakeAccelerator, why_no_fake_accelerator
from d9d_dist.testing.float64 import KeepFloat64, in_float64
from d9d_dist.testing.pool import Device, RankError, RankPool, accelerators_for, run_ranks
from d9d_dist.testing.stream_order import StreamOrder
from d9d_dist.testing.triton_interpreter import run_tests_interpreted

__all__ = [
    "Device",
    "DeviceEntry",
    "DeviceLog",
    "Difference",
    "EntryKind",
    "FakeAccelerator",
    "KeepFloat64",
    "RankError",
    "RankPool",
    "StreamOrder",
    "accelerators_for",
    "assert_rounds_like",
    "assert_trees_close",
    "differences",
    "full_gradients",
    "full_parameters",
    "full_tree",
    "in_float64",
    "run_ranks",
    "run_tests_interpreted",
    "why_no_fake_accelerator",
]

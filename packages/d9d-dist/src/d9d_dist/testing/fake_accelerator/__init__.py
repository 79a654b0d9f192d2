"""Accelerator that computes nothing: what a job asks of a device is recorded in order, on a machine without one.

The device is torch's PrivateUse1 backend under the name "fakegpu". Operators have shapes, dtypes, FLOPs and bytes and
no values; memory has sizes and no contents. `FakeAccelerator.install` compiles its C++ part, which needs g++ and ninja.
"""

from d9d_dist.testing.fake_accelerator.accelerator import FakeAccelerator, why_unavailable
from d9d_dist.testing.fake_accelerator.log import DeviceLog, Entry, Kind

__all__ = ["DeviceLog", "Entry", "FakeAccelerator", "Kind", "why_unavailable"]

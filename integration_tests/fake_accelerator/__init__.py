"""Fake accelerator for tests: a torch device that records operations and memory instead of executing operators."""

from fake_accelerator.accelerator import FakeAccelerator as FakeAccelerator
from fake_accelerator.accelerator import why_no_fake_accelerator as why_no_fake_accelerator
from fake_accelerator.device_log import DeviceEntry as DeviceEntry
from fake_accelerator.device_log import DeviceLog as DeviceLog
from fake_accelerator.device_log import EntryKind as EntryKind
from fake_accelerator.stream_order import StreamOrder as StreamOrder

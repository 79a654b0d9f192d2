"""Log of the operations that the host issued to the fake accelerator: in order, with streams and host waits."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, get_args

EntryKind = Literal[
    "kernel",
    "allocation",
    "free",
    "event record",
    "event wait",
    "copy in",
    "copy out",
    "copy",
    "host wait",
    "collective",
]
"""Kind of an entry. `copy in` is from the host, `copy out` to the host, `copy` within the device."""

KINDS: tuple[EntryKind, ...] = get_args(
    EntryKind
)  # in the order of the enum `Kind` in fake_device.cpp; "collective" exists only in Python


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """Operation that the host requested of the device, or a wait of the host.

    Attributes:
        stream: Stream on which the operation runs; 0 is the default stream.
        name: torch's name of the operator or collective, or the reason of a host wait; else empty.
        num_bytes: Bytes that the operation reads and writes, allocates, frees or transfers.
        flops: Floating-point operations; 0 except for matrix products and attention.
        number: Event id of an event record or event wait; address of an allocation; number of ranks of a collective;
            else 0.
        stack: Frames of the caller outside of torch, innermost first, such as "d9d_moe/all_to_all.py:86 _sizes". Only
            for host waits and collectives.
        shapes: Shapes of the tensor arguments of a kernel or collective.
    """

    kind: EntryKind
    stream: int
    name: str = ""
    num_bytes: int = 0
    flops: int = 0
    number: int = 0
    stack: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True)
class DeviceLog:
    """Entries of a recorded block of code, in the order in which the host issued them.

    Attributes:
        entries: All entries; complete after the block.
        peak_bytes: Largest allocated device memory in the block. Blocks are rounded up to 512 bytes; fragmentation and
            the delayed release of `Tensor.record_stream` are not modeled.
    """

    entries: list[DeviceEntry] = field(default_factory=list)
    start_bytes: int = 0
    peak_bytes: int = 0

    def of(self, *kinds: EntryKind, name: str = "") -> list[DeviceEntry]:
        """Return the entries of some kinds whose names contain `name`."""
        return [entry for entry in self.entries if entry.kind in kinds and name in entry.name]

    @property
    def host_waits(self) -> list[DeviceEntry]:
        """Points at which the host would wait for the device."""
        return self.of("host wait")

    @property
    def flops(self) -> int:
        """Floating-point operations of all kernels."""
        return sum(entry.flops for entry in self.entries)

    def counts(self, *kinds: EntryKind) -> Counter[str]:
        """Return the number of entries by name; `kernel` by default."""
        return Counter(entry.name for entry in self.of(*(kinds or ("kernel",))))

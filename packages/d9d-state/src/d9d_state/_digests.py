"""Digests of checkpoint content: 128-bit XXH3, which a CPU core computes ten times as fast as SHA-256.

The digests detect damage, not manipulation. SHA-256 would not detect manipulation either: an attacker who can change a
file can also change its record.
"""

from typing import NamedTuple

from xxhash import xxh3_128

ALGORITHM = "XXH3-128"


class PartRecord(NamedTuple):
    """Expected size and digest of a contiguous part of a file; a list in JSON."""

    size: int
    digest: str

    @classmethod
    def of(cls, part: bytes | memoryview) -> "PartRecord":
        """Return the record of some bytes."""
        return cls(len(part), xxh3_128(part).hexdigest())

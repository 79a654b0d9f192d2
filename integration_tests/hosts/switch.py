"""Ethernet switch in user space, with a delay and losses on every path: `switch.py DELAY LOSS PID...`.

Creates `eth0` in the network of each process. The kernel's netem does the same, but is not built into every kernel.
The lines "cut N" and "mend N" on stdin disconnect and reconnect port N.
"""

import ctypes
import fcntl
import heapq
import os
import random
import selectors
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_LONGEST = 1 << 16


def main(delay: float, loss: float, processes: Sequence[int]) -> None:
    """Forward packets until stdin is closed."""
    ports = [_open_port(process) for process in processes]
    randoms = random.Random(0)  # noqa: S311
    selector = selectors.DefaultSelector()
    for number, port in enumerate(ports):
        selector.register(port, selectors.EVENT_READ, number)
    selector.register(0, selectors.EVENT_READ, None)
    port_of: dict[bytes, int] = {}
    pending: list[tuple[float, int, int, bytes]] = []
    cut: set[int] = set()
    count = 0
    print("ready", flush=True)
    while True:
        for key, _ in selector.select(max(pending[0][0] - time.monotonic(), 0) if pending else None):
            if key.data is None:
                if not (lines := os.read(0, _LONGEST)):
                    return
                _obey(lines.decode().splitlines(), cut)
                continue
            frame = os.read(key.fd, _LONGEST)
            to, source = frame[:6], frame[6:12]
            port_of[source] = key.data
            for target in [port_of[to]] if to in port_of else range(len(ports)):
                if target != key.data and not {target, key.data} & cut and randoms.random() >= loss:
                    count += 1
                    heapq.heappush(pending, (time.monotonic() + delay, count, target, frame))
        while pending and pending[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(pending)
            if target not in cut:
                with suppress(OSError):  # the interface is not up yet, or no longer: the frame is lost
                    os.write(ports[target], frame)


def _obey(commands: Iterable[str], cut: set[int]) -> None:
    for command in commands:
        what, _, port = command.partition(" ")
        (cut.add if what == "cut" else cut.discard)(int(port))


def _open_port(process: int) -> int:
    """Create a TAP device in the network of a process; return its file descriptor."""
    with open(f"/proc/{process}/ns/net", "rb") as network:  # noqa: PTH123
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    port = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
    return port


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), [int(argument) for argument in sys.argv[3:]])

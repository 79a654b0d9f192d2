"""Reads of tensors in the memory of another rank on the same host, by Linux's cross-memory attach.

Each rank copies only the bytes that it needs, at memory bandwidth, while the owner of the tensors waits. MPI libraries
exchange large messages between the processes of a host in the same way.
"""

import ctypes
import os
import secrets
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch

from d9d_dist.consensus import agree, gather_json

_TOKEN_BYTES = 32
# `prctl` option PR_SET_PTRACER of the Linux security module Yama, and two values of its argument.
_SET_TRACER, _ANY_PROCESS, _NO_PROCESS = 0x59616D61, ctypes.c_ulong(-1), ctypes.c_ulong(0)


class _Range(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


@final
class PeerTensors:
    """Tensors of another process on this host. That process must keep them alive and unchanged.

    Args:
        process: Process id of the owner.
        addresses: Address of the first element by name; the elements are contiguous.
    """

    def __init__(self, process: int, addresses: Mapping[str, int]) -> None:
        self._process, self._addresses = process, addresses

    def __contains__(self, name: str) -> bool:
        return name in self._addresses

    def read(self, name: str, offset: int, into: torch.Tensor) -> None:
        """Fill a contiguous CPU tensor with the bytes of a tensor from `offset` on. Raise `OSError` on failure."""
        _read(self._process, self._addresses[name] + offset, into)


@contextmanager
def peer_tensors(tensors: Mapping[str, torch.Tensor] | None) -> Generator[PeerTensors]:
    """Let all ranks read rank 0's tensors during the body; other ranks pass `None`. Collective over all ranks.

    Calls `gather_json` twice before the body. If the memory is readable, calls `agree` after the body, so rank 0 keeps
    the tensors alive until all ranks have read them. Only contiguous CPU tensors can be read. The result is empty if
    any rank cannot read rank 0's memory, because the rank runs on another host or the system forbids the access.
    """
    token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_BYTES), _TOKEN_BYTES)
    offer = None
    if tensors is not None:
        addresses = {name: each.data_ptr() for name, each in tensors.items() if _is_plain(each)}
        offer = {
            "process": os.getpid(),
            "token": token.raw.hex(),
            "place": ctypes.addressof(token),
            "addresses": addresses,
        }
        _allow_readers(_ANY_PROCESS)
    try:
        offer = gather_json(offer)[0]
        readable = all(gather_json(_reads_token(offer)))
        yield PeerTensors(offer["process"], offer["addresses"] if readable else {})
        if readable:
            agree()
    finally:
        if tensors is not None:
            _allow_readers(_NO_PROCESS)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a contiguous, strided CPU tensor without lazy conjugation or negation."""
    return (
        type(tensor) in {torch.Tensor, torch.nn.Parameter}
        and (tensor.device.type, tensor.layout) == ("cpu", torch.strided)
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _reads_token(offer: Mapping[str, Any]) -> bool:
    """Return True if this process reads the expected token from rank 0's memory.

    On another host, rank 0's process id belongs to no process or to an unrelated one.
    """
    found = torch.zeros(_TOKEN_BYTES, dtype=torch.uint8)
    try:
        _read(offer["process"], offer["place"], found)
    except OSError:
        return False
    return bytes(found.tolist()).hex() == offer["token"]


def _read(process: int, address: int, into: torch.Tensor) -> None:
    if not sys.platform.startswith("linux"):
        raise OSError("other processes' memory is read on Linux only")
    place, left = into.data_ptr(), into.nbytes
    while left:
        here, there = _Range(place, left), _Range(address, left)
        zero = ctypes.c_ulong(0)
        count = _libc().process_vm_readv(
            process, ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1), zero
        )
        if count <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"rank 0's memory (process {process}) cannot be read: {os.strerror(code)}")
        place, address, left = place + count, address + count, left - count


def _allow_readers(who: ctypes.c_ulong) -> None:
    """Set which processes of this user may attach; by default, Yama allows only ancestors of this process."""
    if sys.platform.startswith("linux"):
        _libc().prctl(_SET_TRACER, who, *[ctypes.c_ulong(0)] * 3)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc

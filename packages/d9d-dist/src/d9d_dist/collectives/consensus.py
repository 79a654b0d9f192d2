"""Consensus of ranks: all ranks get the same JSON values and raise the same errors.

Ranks exchange JSON and tensors, never pickles: data from another rank must not run code.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from d9d_dist.collectives.tensors import all_gather, host_device
from d9d_dist.errors import UserError, shorten

_MAX_BYTES = 1 << 28  # bytes of JSON per rank
_MAX_PROBLEM = 4000  # maximum length of a problem's text, in characters, in messages that list ranks
_RANKS_SHOWN = 8
_KEYS_SHOWN = 5
_VALUE_SHOWN = 60  # maximum length of a value's text in messages; longer values are compared but not shown
_SIZE_BYTES, _HEAD = 8, 512
_INLINE = _HEAD - _SIZE_BYTES  # a text of up to this many bytes is sent with its size, in a single collective


def gather_json(value: Any, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> list[Any]:
    """Return the JSON values of all ranks, in rank order; equal values are one object. Synchronizes the host.

    Collective over the group: an all-gather of sizes and texts of up to 504 bytes. If a text is longer, a second
    all-gather sends the remaining bytes, padded to the longest. The tensors are on the CPU if the group has a CPU
    backend. Error messages number ranks within the group.

    Args:
        value: This rank's value, encoded by `json.dumps`: tuples become lists, and keys become strings.
        group: Process group; `None` for all ranks of the job.
        alone: True to return only this process's value, without collectives. Needs no process group.

    Raises:
        UserError: On every rank, if the value of a rank is not JSON, is not finite, or exceeds 256 MiB.
    """
    text, is_value = _encode(value)
    num_ranks = 1 if alone or not dist.is_initialized() else dist.get_world_size(group)
    is_alone = num_ranks == 1 or dist.get_backend(group) == "fake"  # simulated ranks would have this rank's value
    received = [(text, is_value)] if is_alone else _gather_texts(text, is_value, group)
    problems = {rank: text.decode() for rank, (text, is_value) in enumerate(received) if not is_value}
    if problems:
        _raise_together(UserError(_describe_problems(problems, len(received))), group, num_ranks=len(received))
    known = {text: json.loads(text) if text else None for text in {text for text, _ in received}}
    return [known[text] for text, _ in received] * (num_ranks if is_alone else 1)


def agree(
    problem: str | UserError | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    same: Mapping[str, str | bytes | Mapping[str, str]] | None = None,
    error: type[Exception] = UserError,
    alone: bool = False,
) -> None:
    """Raise the same error on all ranks if a rank has a problem, or if a value differs between ranks.

    Collectives are those of `gather_json`, for the problem and a 32-byte digest per value. No rank raises before
    all ranks know the error, so no rank closes connections that another rank still needs.

    Args:
        problem: Description of this rank's failure, or `None`. The error is a `UserError` if all failed ranks pass one,
            else `error`.
        group: Process group; `None` for all ranks of the job.
        same: Values that must be equal on all ranks, by their names in the message, e.g. "the configuration". All ranks
            pass the same names. If a mapping differs, the message names its keys that differ, with short values.
        error: Type of the error for a problem that is a text.
        alone: As in `gather_json`.

    Raises:
        Exception: The problems with their ranks. A `UserError` that is equal on all failed ranks is raised without
            ranks.
        UserError: The name of a value that differs, with the ranks that differ from the most common value; on a tie,
            from the lowest rank's value.
    """
    digests = {name: _digest(value) for name, value in (same or {}).items()}
    report = None
    if problem is not None or digests:
        is_users = isinstance(problem, UserError)
        report = {"problem": None if problem is None else str(problem), "is_users": is_users, "same": digests}
    reports = gather_json(report, group, alone=alone)
    failed = {rank: each for rank, each in enumerate(reports) if each and each["problem"] is not None}
    if failed:
        kind = UserError if all(each["is_users"] for each in failed.values()) else error
        texts = {rank: each["problem"] for rank, each in failed.items()}
        text = _describe_problems(texts, len(reports), is_users=issubclass(kind, UserError))
        _raise_together(kind(text), group, num_ranks=len(reports))
    for name in digests:
        of_ranks = [each["same"][name] for each in reports]
        if len(set(of_ranks)) > 1:
            keys = _differing_keys((same or {})[name], group)
            _raise_together(UserError(_describe_difference(name, of_ranks, keys)), group, num_ranks=len(reports))


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 1, 2" for messages, with at most 8 numbers."""
    return f"rank{'s' if ranks[1:] else ''} {shorten(ranks, _RANKS_SHOWN)}"


def _encode(value: Any) -> tuple[bytes, bool]:
    """Return the JSON text, empty for `None`, and True; or an error text and False."""
    try:
        text = b"" if value is None else json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return f"got a value to gather that is not JSON: {error}; expected JSON with finite numbers.".encode(), False
    problem = f"got {len(text)} bytes of JSON to gather; expected at most {_MAX_BYTES}."
    return (text, True) if len(text) <= _MAX_BYTES else (problem.encode(), False)


def _gather_texts(text: bytes, is_value: bool, group: dist.ProcessGroup | None) -> list[tuple[bytes, bool]]:
    """All-gather texts, each with a flag, which is sent as the sign of the size."""
    device = host_device(group)
    size = len(text) if is_value else -len(text)
    heads = _all_gather_bytes(size.to_bytes(_SIZE_BYTES, "little", signed=True) + text[:_INLINE], _HEAD, group, device)
    sizes = [int.from_bytes(head[:_SIZE_BYTES], "little", signed=True) for head in heads]
    width = max(map(abs, sizes)) - _INLINE
    rests = _all_gather_bytes(text[_INLINE:], width, group, device) if width > 0 else [b""] * len(sizes)
    texts = [head[_SIZE_BYTES:] + rest for head, rest in zip(heads, rests, strict=True)]
    return [(text[: abs(size)], size >= 0) for text, size in zip(texts, sizes, strict=True)]


def _all_gather_bytes(content: bytes, width: int, group: dist.ProcessGroup | None, device: torch.device) -> list[bytes]:
    """All-gather bytes that are padded to `width` on each rank."""
    padded = torch.frombuffer(bytearray(content.ljust(width, b"\0")), dtype=torch.uint8).to(device)
    gathered = all_gather(padded, group)
    received = bytearray(gathered.numel())
    torch.frombuffer(received, dtype=torch.uint8).copy_(gathered)
    return [bytes(received[start : start + width]) for start in range(0, len(received), width)]


def _raise_together(error: Exception, group: dist.ProcessGroup | None, *, num_ranks: int) -> NoReturn:
    """Raise an error on all ranks after a collective, so that no rank exits before all ranks know the error."""
    if num_ranks > 1:
        with suppress(RuntimeError):
            _gather_texts(b"", True, group)
    raise error


def _differing_keys(value: str | bytes | Mapping[str, str], group: dist.ProcessGroup | None) -> list[str]:
    """Return the keys of mappings that differ, with short values; none for other types. Collective for a mapping."""
    if not isinstance(value, Mapping):
        return []
    shown = {key: text for key, text in value.items() if len(text) <= _VALUE_SHOWN and "\n" not in text}
    of_ranks = gather_json({key: (_digest(text), shown.get(key)) for key, text in value.items()}, group)
    keys = dict.fromkeys(key for each in of_ranks for key in each)
    found = {key: [each.get(key) for each in of_ranks] for key in keys}
    return [f"{key}{_describe_values(each)}" for key, each in found.items() if any(one != each[0] for one in each)]


def _describe_values(of_ranks: Sequence[tuple[str, str | None] | None]) -> str:
    """Return the first two values of a key that differ, in parentheses; empty if one is too long to show."""
    odd = next(rank for rank, each in enumerate(of_ranks) if each != of_ranks[0])
    texts = ["absent" if each is None else each[1] for each in (of_ranks[0], of_ranks[odd])]
    return "" if not all(texts) else f" ({texts[0]} on rank 0, {texts[1]} on rank {odd})"


def _digest(value: str | bytes | Mapping[str, str]) -> str:
    text = json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else value
    content = text.encode() if isinstance(text, str) else text
    return hashlib.blake2b(content, digest_size=32, person=b"d9d").hexdigest()


def _describe_problems(problems: Mapping[int, str], num_ranks: int, *, is_users: bool = False) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, text in problems.items():
        ranks_of.setdefault(text, []).append(rank)
    if num_ranks == 1 or (is_users and len(ranks_of) == 1):
        return next(iter(ranks_of))
    return "; ".join(f"{name_ranks(ranks)}: {text[:_MAX_PROBLEM]}" for text, ranks in ranks_of.items())


def _describe_difference(name: str, digests: Sequence[str], keys: Sequence[str] = ()) -> str:
    counts = Counter(digests)
    # The most common digest; on a tie, the lowest rank's, because max returns the first maximum.
    usual = max(digests, key=lambda digest: counts[digest])
    odd = [rank for rank, digest in enumerate(digests) if digest != usual]
    where = f" in {', '.join(keys[:_KEYS_SHOWN])}{', ...' if keys[_KEYS_SHOWN:] else ''}" if keys else ""
    return (
        f"{name} differs between the {len(digests)} ranks: {name_ranks(odd)} differ{'' if odd[1:] else 's'} from "
        f"rank {digests.index(usual)}{where}; expected equal values. Start all ranks with the same code, configuration "
        "and arguments."
    )

"""Exit codes of the ranks of a node, and which of them the launcher returns."""

import signal
from dataclasses import dataclass, field
from typing import final

from d9d_loop.resilience.exit_codes import ExitCode, restart_policy

# Exit codes of ranks that ended because of another rank: by themselves, or by the agent's signal.
_VICTIMS = (ExitCode.PEER_LOST, -signal.SIGTERM)


@final
@dataclass(slots=True)
class RankEnds:
    """Exit codes of a node's ranks, and the first failure of the job.

    Attributes:
        codes: Exit code by global rank, in the order in which the agent saw the ranks end; negative for a signal.
        first: Rank that failed first, as the ranks know it, and its exit code if it is known; on any node.
        is_replacing: True if the ranks of all nodes ended to replace a slow host.
    """

    codes: dict[int, int] = field(default_factory=dict)
    first: tuple[int, int | None] | None = None
    is_replacing: bool = False

    def exit_code(self, *, default: int = 1) -> int:
        """Return the exit code of the rank that failed first; `default` if no rank has ended.

        A rank of another node counts if the ranks of this node know its code.
        """
        failed = {rank: code for rank, code in self.codes.items() if code != 0}
        own = {rank: code for rank, code in failed.items() if code not in _VICTIMS}
        if self.first is not None:
            rank, reported = self.first
            code = own.get(rank, reported)
            if code is not None:  # a rank that is killed while it ends, as by the agent, has reported its code before
                return _as_shell(reported if code < 0 and reported is not None else code)
        if own:
            return _as_shell(next(iter(own.values())))
        if failed:
            return ExitCode.PEER_LOST if ExitCode.PEER_LOST in failed.values() else _as_shell(-signal.SIGTERM)
        return 0 if self.codes else default

    def rank_of(self, code: int) -> int:
        """Return the rank of this node that ended first with an exit code, as shells report it."""
        return next((rank for rank, each in self.codes.items() if _as_shell(each) == code), 0)

    def wants_restart(self) -> bool:
        """Return True if the launcher should restart the ranks: after a failure that may pass, or on another host."""
        code = self.exit_code()
        return self.is_replacing if code == ExitCode.STOPPED else restart_policy(code) == "limited"

    def describe(self) -> str:
        """Return which rank failed first, and the exit codes of the ranks of this node."""
        codes = ", ".join(f"rank {rank}: {_as_shell(code)}" for rank, code in sorted(self.codes.items()))
        first = "" if self.first is None else f"Rank {self.first[0]} failed first. "
        return f"d9d-torchrun: {first}Exit codes: {codes}."


def _as_shell(code: int) -> int:
    """Return the exit code of a process as shells report it: 128 plus the number of the signal that killed it."""
    return code if code >= 0 else 128 - code

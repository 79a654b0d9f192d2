"""Tools to test distributed code on one machine: real ranks, real collectives, in milliseconds.

Public because a user's own parallel code deserves the same proof as ours.
"""

from d9d_dist.testing.pool import RankError, RankPool, run_ranks

__all__ = ["RankError", "RankPool", "run_ranks"]

"""Time of a pipeline of stages of different cost, in s.

    t = sum_r (F_r + B_r) / v + (p - 1) 2 t_p2p + (m - 1 / v) max_r (F_r + B_r) + exposed transfers

F_r, B_r: forward and backward of one microbatch on pipeline rank r, over all its v stages. m: microbatches, p: pipeline
ranks, t_p2p: time of a send. The first two terms are the path of the first microbatch through one stage of each rank.
For equal stages and no transfers this is (m + (p - 1) / v)(F + B), as for 1F1B and interleaved 1F1B (Narayanan et al.
2021, https://arxiv.org/abs/2104.04473, sections 2.2.1 and 2.2.2). `tests/planning/test_pipeline_time.py` compares the
equation with `d9d_pipeline.simulate`.
"""

from collections.abc import Sequence


def pipeline_seconds(
    ranks: Sequence[float], *, num_microbatches: int, stages_per_rank: int = 1, transfer: float = 0.0, overlaps: bool
) -> float:
    """Return the time of a step's forward and backward passes.

    Args:
        ranks: Seconds of forward and backward of one microbatch on each pipeline rank.
        num_microbatches: Microbatches of a step.
        stages_per_rank: Stages of each pipeline rank.
        transfer: Seconds of one send between stages.
        overlaps: True if transfers overlap computation in the steady state.
    """
    slowest = max(ranks)
    fill = (sum(ranks) - slowest) / stages_per_rank
    if len(ranks) == 1:
        return num_microbatches * slowest
    waits = 2 * (len(ranks) - 1) * transfer
    steady = 0.0 if overlaps else 2 * stages_per_rank * num_microbatches * transfer
    return num_microbatches * slowest + fill + waits + steady

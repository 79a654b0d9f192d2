"""Microbatches of a call: placed on the device, the same number on all ranks."""

from collections.abc import Callable, Sequence
from typing import Any, final

from d9d_dist import DistributedContext, UserError, all_gather_trees, gather_json
from d9d_loop.data.batch_placement import BatchPlacement
from d9d_loop.task import BatchTask


@final
class MicrobatchAgreement:
    """Agreement of all ranks on a number of microbatches; ranks with fewer batches get stand-ins of the task."""

    def __init__(self, task: BatchTask, ctx: DistributedContext) -> None:
        self._task, self._ctx = task, ctx
        self._place = BatchPlacement(task, ctx)
        self._example: Any = None
        self._has_example = False

    def __call__(self, batches: Sequence[Any], supported: Callable[[int], int]) -> list[Any]:
        """Place batches, and add stand-ins up to the number that all ranks need. Collective over all ranks.

        For `batches`, see `Engine.forward_backward`. `supported` returns the smallest supported number of microbatches
        that is at least its argument.

        Raises:
            UserError: On every rank, if no rank has a batch, or ranks of one data-parallel coordinate have different
                numbers of batches. On this rank, if `batches` is not a sequence.
        """
        if not isinstance(batches, Sequence):
            raise UserError(
                f"got a {type(batches).__name__} as batches; expected a list of batches, one for each microbatch. Pass "
                "[batch] for one batch."
            )
        if batches:
            self._example, self._has_example = batches[-1], True
        counts = gather_json([self._ctx.coordinate("batch", "dp"), len(batches), self._has_example])
        self._check(counts)
        number = supported(max(count for _, count, _ in counts))
        if any(count < number and not has_example for _, count, has_example in counts):
            found = all_gather_trees([batches[-1]] if batches else [], None)
            if not self._has_example:
                self._example, self._has_example = next(tree for tree in found if tree)[0], True
        placed = [self._place(batch) for batch in batches]
        if len(placed) < number:
            stand_in = self._place(self._task.stand_in(self._example))
            placed.extend([stand_in] * (number - len(placed)))
        return placed

    def _check(self, counts: Sequence[tuple[int, int, bool]]) -> None:
        if not any(count for _, count, _ in counts):
            raise UserError("no rank passed a batch; expected at least one batch. Skip the call if there are no data.")
        expected: dict[int, int] = {}
        for rank, (dp_rank, count, _) in enumerate(counts):
            if expected.setdefault(dp_rank, count) != count:
                raise UserError(
                    f"rank {rank} got {count} batches, and an earlier rank with data-parallel coordinate {dp_rank} got "
                    f"{expected[dp_rank]}; expected the same batches on all pipeline-, context- and tensor-parallel "
                    "ranks of a coordinate. Choose a rank's data by ctx.coordinate('batch', 'dp')."
                )

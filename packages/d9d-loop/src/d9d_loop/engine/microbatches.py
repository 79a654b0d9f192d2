"""Microbatches of a call: placed on the device, the same number on all ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from d9d_dist import DistributedContext, UserError, agree, gather_json
from d9d_dist.collectives.consensus import name_ranks
from d9d_dist.collectives.tree_gather import all_gather_trees
from d9d_loop.engine.batch_digest import digest_batches, digest_on_device, find_difference
from d9d_loop.task import BatchPlacement, BatchTask


@final
class MicrobatchAgreement:
    """Agreement of all ranks on a number of microbatches; ranks with fewer batches get stand-ins of the task."""

    def __init__(self, task: BatchTask, ctx: DistributedContext) -> None:
        self._task, self._ctx = task, ctx
        self._place = BatchPlacement(task, ctx)
        self._has_copies = ctx.world_size > ctx.size("batch", "dp")  # several ranks get the same batches
        self._rows_group = ctx.group_for("batch", "pp", "cp", "tp")
        self._digest: Tensor | None = None
        self._example: Any = None
        self._has_example = False

    def __call__(
        self,
        batches: Sequence[Any],
        supported: Callable[[int], int],
        *,
        call: str = "forward_backward()",
        stand_in_problem: str = "",
    ) -> tuple[list[Any], list[int]]:
        """Place batches, and add stand-ins up to the number that all ranks need. Collective over all ranks.

        Also return the number of columns that were added to each of `batches`, see `BatchTask.pad_sequence`.

        For `batches`, see `Engine.forward_backward`. `supported` returns the smallest supported number of microbatches
        that is at least its argument. `call` is the method of the engine, for messages. With a `stand_in_problem` on
        any rank, stand-ins are an error.

        Raises:
            UserError: On every rank, if no rank has a batch, ranks of one data-parallel coordinate have different
                batches, or results would include stand-ins. On this rank, if `batches` is not a
                sequence.
        """
        if not isinstance(batches, Sequence):
            raise UserError(
                f"got a {type(batches).__name__} as batches; expected a list of batches, one for each microbatch. Pass "
                "[batch] for one batch."
            )
        if batches:
            self._example, self._has_example = batches[-1], True
        digest = digest_batches(batches) if self._has_copies else 0
        mine = [self._ctx.coordinate("batch", "dp"), len(batches), self._has_example, digest, stand_in_problem]
        counts = same_call(call, mine)
        if self._digests_differ(counts):
            self._compare(batches)
        if self._has_copies:
            self._digest = digest_on_device(batches, self._digest)
        number = supported(max(count for _, count, *_ in counts))
        short = [rank for rank, (_, count, *_) in enumerate(counts) if count < number]
        if short and (problem := next(filter(None, (problem for *_, problem in counts)), "")):
            raise UserError(f"{name_ranks(short)} got fewer than {number} batches, and {problem}")
        if any(count < number and not has_example for _, count, has_example, *_ in counts):
            found = all_gather_trees([batches[-1]] if batches else [], None)
            if not self._has_example:
                self._example, self._has_example = next(tree for tree in found if tree)[0], True
        pairs = [self._place.padded(batch) for batch in batches]
        placed = [each for each, _ in pairs]
        if len(placed) < number:
            stand_in = self._place(self._task.stand_in(self._example))
            placed.extend([stand_in] * (number - len(placed)))
        return placed, [num_added for _, num_added in pairs]

    def pop_digests(self) -> Tensor | None:
        """Return the digests of the batches on the device since the last call; see `Same`. No collectives."""
        if not self._has_copies or self._ctx.device.type == "cpu":
            return None
        num, own = self._ctx.size("batch", "dp"), self._ctx.coordinate("batch", "dp")
        digests = torch.full((2 * num,), -torch.inf, dtype=torch.float64, device=self._ctx.device)
        if self._digest is not None:
            digests[own].copy_(self._digest)
            digests[num + own].copy_(-self._digest)
        self._digest = None
        return digests

    def _compare(self, batches: Sequence[Any]) -> None:
        """Raise `UserError` on every rank if batches of one coordinate differ by more than rounding. Collective."""
        found, problem = find_difference(batches, self._rows_group), None
        if found is not None:
            rank, first, name = found
            problem = UserError(
                f"rank {rank} got other batches than rank {first}, which has the same data-parallel coordinate "
                f"{self._ctx.coordinate('batch', 'dp')}: {name} differs; expected the same batches on all pipeline-, "
                "context- and tensor-parallel ranks of a coordinate. Choose a rank's data by "
                "ctx.coordinate('batch', 'dp'), and seed random data by it."
            )
        agree(problem)

    def _digests_differ(self, counts: Sequence[Any]) -> bool:
        """Return True if digests differ within a coordinate; raise `UserError` for numbers of batches that do."""
        if not any(count for _, count, *_ in counts):
            raise UserError("no rank passed a batch; expected at least one batch. Skip the call if there are no data.")
        expected: dict[int, tuple[int, int]] = {}
        differ = False
        for rank, (dp_rank, count, _, digest, _) in enumerate(counts):
            num, digest_of_first = expected.setdefault(dp_rank, (count, digest))
            differ = differ or digest != digest_of_first
            if num != count:
                raise UserError(
                    f"rank {rank} got {count} batches, and an earlier rank with data-parallel coordinate {dp_rank} got "
                    f"{num}; expected the same batches on all pipeline-, context- and tensor-parallel "
                    "ranks of a coordinate. Choose a rank's data by ctx.coordinate('batch', 'dp')."
                )
        return differ


def without_padding(values: Sequence[Mapping[str, Tensor]], num_added: Sequence[int]) -> list[Mapping[str, Tensor]]:
    """Return values per token [B, L, ...] of each batch without the last columns, which were added to its rows."""
    return [
        {name: value[:, : value.shape[1] - num] for name, value in each.items()} if num else each
        for each, num in zip(values, num_added, strict=True)
    ]


def same_call(call: str, value: Any = None) -> list[Any]:
    """Return the JSON values of all ranks, which make the same call of an engine. Collective: one all-gather.

    Raises:
        UserError: On every rank, if a rank makes another call.
    """
    found = gather_json([call, value])
    for rank, (other, _) in enumerate(found):
        if other != found[0][0]:
            raise UserError(
                f"rank {rank} called {other} of the engine while rank 0 called {found[0][0]}; expected the same calls "
                "in the same order on all ranks. Do not call the engine on one rank only: use its result there."
            )
    return [each for _, each in found]

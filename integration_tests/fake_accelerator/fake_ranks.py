"""Process group with only one real rank: collectives run on a stream of the group, as with NCCL.

The other ranks are assumed to have the same data: collectives on CPU tensors return the result for equal ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from fake_accelerator.operators import NAME, Operators

BACKEND = "fakegpu_ranks"
"""Name of the backend for `torch.distributed.init_process_group`."""


@final
class FakeWork(dist._Work):
    """Handle of a collective. `wait` makes the current stream wait, not the host."""

    def __init__(self, extension: Any, event: int | None, result: Sequence[Tensor]) -> None:
        super().__init__()
        self._extension, self._event, self._result = extension, event, list(result)

    def wait(self, timeout: Any = None) -> bool:
        if self._event is not None:
            self._extension.put_event_wait(self._event, -1)
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._result


_Tensors: TypeAlias = Tensor | Sequence["_Tensors"]


def _leaves(tensors: _Tensors) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(tensors) if isinstance(each, Tensor)]


def _reduce(tensor: Tensor, size: int, op: Any) -> None:
    """Replace a CPU tensor by the reduction of `size` equal tensors."""
    if tensor.device.type != "cpu":
        return
    if op == dist.ReduceOp.SUM:
        tensor.mul_(size)
    elif op == dist.ReduceOp.PRODUCT:
        tensor.pow_(size)
    elif op == dist.ReduceOp.BXOR:
        tensor.mul_(size % 2)
    # The average, minimum, maximum, "and" and "or" of equal values are these values.


def _all_reduce(name: str) -> Callable[..., FakeWork]:
    """Return a method of `FakeGroup` that records a reduction whose outputs are its inputs."""

    def method(group: "FakeGroup", tensors: _Tensors, options: Any = None) -> FakeWork:
        for tensor in _leaves(tensors):
            _reduce(tensor, group.size(), _op(options))
        return group._record(name, tensors, tensors)

    return method


def _op(options: Any) -> Any:
    return dist.ReduceOp.SUM if options is None else options.reduceOp


def _split(name: str, *, reduces: bool) -> Callable[..., FakeWork]:
    """Return a method of `FakeGroup` that sends part r of the input to rank r: a reduce-scatter or an all-to-all."""

    def method(group: "FakeGroup", outputs: _Tensors, inputs: _Tensors, *more: Any) -> FakeWork:
        results, sent = _leaves(outputs), _leaves(inputs)
        if any(each.device.type == "cpu" and each.numel() for each in results):
            if len(sent) != 1 or len(results) != 1 or sent[0].numel() % group.size() or (not reduces and any(more[:2])):
                raise NotImplementedError(
                    f"fake ranks support {name} of CPU tensors only for one tensor in equal parts"
                )
            own = sent[0].flatten().chunk(group.size())[group.rank()]
            results[0].copy_((own if reduces else own.repeat(group.size())).view_as(results[0]))
            if reduces:
                _reduce(results[0], group.size(), _op(more[-1] if more else None))
        return group._record(name, inputs, outputs)

    return method


_ProcessGroup: Any = dist.ProcessGroup  # names and signatures of its methods depend on the version of torch


@final
class FakeGroup(_ProcessGroup):
    """Process group whose other ranks do not exist."""

    def __init__(self, rank: int, size: int, extension: Any, operators: Operators) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._extension, self._operators = rank, size, extension, operators
        self._stream = extension.new_stream()
        self._peer_streams: dict[int, int] = {}

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        """Name of the group, which functional collectives look up."""
        return self.pg_name

    def _get_backend(self, device: Any) -> "FakeGroup":
        """Return the group itself; `batch_isend_irecv` then calls its sends and receives one by one."""
        return self

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def _record(self, name: str, inputs: Any, outputs: Any, *, stream: int | None = None) -> FakeWork:
        tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
        results = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
        on_device = [x for x in (*tensors, *results) if x.device.type == NAME]
        if not on_device:
            return FakeWork(self._extension, None, results)
        num_bytes = max(sum(x.nbytes for x in tensors), sum(x.nbytes for x in results))
        stream = self._stream if stream is None else stream
        self._extension.put_event_wait(self._extension.put_event_record(-1), stream)
        self._operators.put_collective(name, num_bytes, tensors, stream=stream, num_ranks=self._size)
        return FakeWork(self._extension, self._extension.put_event_record(stream), results)

    def _peer_stream(self, peer: int) -> int:
        """Return the stream for messages to and from another rank; NCCL has a communicator for each pair."""
        if peer not in self._peer_streams:
            self._peer_streams[peer] = self._extension.new_stream()
        return self._peer_streams[peer]

    def barrier(self, _options: Any = None) -> FakeWork:
        return FakeWork(self._extension, None, [])

    def allgather(self, outputs: Any, inputs: Any, _options: Any = None) -> FakeWork:
        for each, own in zip(outputs, inputs, strict=True):
            for output in each:
                _fill(output, own)
        return self._record("all_gather", inputs, outputs)

    def all_gather_single(self, output: Tensor, own: Tensor, _options: Any = None) -> FakeWork:
        for part in output.flatten().chunk(self._size) if output.device.type == "cpu" else ():
            _fill(part, own.flatten())
        return self._record("all_gather", own, output)

    def gather(self, outputs: Any, inputs: Any, _options: Any = None) -> FakeWork:
        for each, own in zip(outputs, inputs, strict=False):
            for output in each:
                _fill(output, own)
        return self._record("gather", inputs, outputs)

    def scatter(self, outputs: Any, inputs: Any, _options: Any = None) -> FakeWork:
        for output, each in zip(outputs, inputs, strict=False):
            _fill(output, each[self._rank])
        return self._record("scatter", inputs, outputs)

    def send(self, tensors: Any, to: int, _tag: int = 0) -> FakeWork:
        return self._record("send", tensors, (), stream=self._peer_stream(to))

    def recv(self, tensors: Any, source: int, _tag: int = 0) -> FakeWork:
        return self._record("recv", (), tensors, stream=self._peer_stream(source))

    def broadcast(self, tensors: Any, _options: Any = None) -> FakeWork:
        return self._record("broadcast", tensors, tensors)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, _options: Any = None) -> FakeWork:
        for output, own in zip(outputs, inputs, strict=True):
            for part in output.flatten().chunk(self._size):
                _fill(part, own.flatten())
        return self._record("all_gather", inputs, outputs)

    allreduce = allreduce_coalesced = _all_reduce("all_reduce")
    reduce = _all_reduce("reduce")
    reduce_scatter = reduce_scatter_single = reduce_scatter_single_coalesced = _split("reduce_scatter", reduces=True)
    all_to_all_single = alltoall = _split("all_to_all", reduces=False)

    # Names of torch before 2.15.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _fill(output: Tensor, value: Tensor) -> None:
    if output.device.type == "cpu":
        output.copy_(value)

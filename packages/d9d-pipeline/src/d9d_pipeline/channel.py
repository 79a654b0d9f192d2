"""Transfer of trees of tensors between pipeline ranks; metadata is sent once per kind of message, then cached.

Both ranks process the same microbatches, so both know which message is the first of its kind. Stages may thus return
any tree, and shapes may change from batch to batch, without a shape inference pass.
"""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from d9d_dist import UserError
from d9d_pipeline._message import Description

Kind: TypeAlias = tuple[Hashable, ...]
"""Key of messages with equal metadata: the stage that sends them, and the shapes of the step's inputs."""


@final
@dataclass(frozen=True, slots=True)
class Messages:
    """Metadata of the messages between stages, known before the first step.

    Attributes:
        outputs: A stage's output by global stage index, as `stage_output` describes it.
    """

    outputs: Mapping[int, Description]

    def of(self, kind: Kind) -> Description:
        """Return the metadata of a kind of message: a stage's output, or the gradient of a stage's input."""
        what, stage = kind[:2]
        assert isinstance(stage, int)
        if what == "output":
            return self.outputs[stage]
        leaves = self.outputs[stage - 1].leaves
        gradients = (leaf._replace(needs_gradient=False) for leaf in leaves if leaf and leaf.needs_gradient)
        return Description(None, tuple(gradients))


def stage_output(output: Any) -> Description:
    """Describe the output of a stage, a tree of tensors; raise `UserError` if it cannot be sent to another rank."""
    description = Description.of(*pytree.tree_flatten(output))
    description.to_json()  # raises for containers that cannot be serialized
    return description


@final
@dataclass(frozen=True, slots=True)
class Arriving:
    """Message that is being received. The tensors in `leaves` are valid after `wait`."""

    description: Description
    leaves: list[Tensor | None]
    works: list[dist.Work]

    def wait(self) -> list[Tensor | None]:
        """Wait for the receives, and return the leaves."""
        for work in self.works:
            work.wait()
        return self.leaves


@final
class Channel:
    """Point-to-point channel between this rank and the other ranks of its pipeline."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, messages: Messages | None = None) -> None:
        self._group, self._device, self._messages = group, device, messages
        self._sent: dict[Kind, Description] = {}
        self._received: dict[Kind, Description] = {}
        self._pending_sends: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, leaves: Sequence[Any], description: Description, *, kind: Kind, peer: int) -> None:
        """Start to send a message; raise `UserError` if an earlier message of this kind had different metadata."""
        known = self._sent.setdefault(kind, description)
        if known is description:
            if self._messages is None:
                self._send_description(description, peer)
        elif known != description:
            raise UserError(
                f"got a message of {description}, but {known} earlier for inputs of the same shapes; expected the "
                "shapes and dtypes of a stage's outputs to depend only on those of its inputs. Pad outputs that vary."
            )
        while self._pending_sends and self._pending_sends[0][0].is_completed():
            self._pending_sends.popleft()
        for leaf in leaves:
            if leaf is not None and leaf.numel():
                tensor = leaf.detach().contiguous()
                work = dist.isend(tensor, group=self._group, group_dst=peer)
                assert work is not None, "isend and irecv return None only on ranks outside the group"
                self._pending_sends.append((work, tensor))

    def send_gradients(self, gradients: Sequence[Tensor | None], *, kind: Kind, peer: int) -> None:
        """Start to send gradients; see `send`. None is sent as zeros if the first message of this kind had a tensor.

        Raises `UserError` for a tensor that was None in the first message.
        """
        known = self._sent.get(kind) if self._messages is None else self._messages.of(kind)
        if known is not None:
            pairs = list(zip(gradients, known.leaves, strict=True))
            if any(leaf is None and gradient is not None for gradient, leaf in pairs):
                raise UserError(
                    "got a gradient for an input tensor that the stage did not use in the first microbatch; expected "
                    "the stage to use the same inputs in every microbatch, since gradients of unused inputs are not "
                    "sent. Use the input in every microbatch, e.g. multiplied by 0."
                )
            gradients = [
                torch.zeros(leaf.shape, dtype=leaf.dtype, device=self._device)
                if gradient is None and leaf
                else gradient
                for gradient, leaf in pairs
            ]
        self.send(gradients, Description.of(gradients), kind=kind, peer=peer)

    def receive(self, *, kind: Kind, peer: int) -> Arriving:
        """Start to receive a message; blocks for its metadata if it is the first of its kind."""
        if kind not in self._received:
            known = self._messages
            self._received[kind] = self._receive_description(peer) if known is None else known.of(kind)
        description = self._received[kind]
        leaves: list[Tensor | None] = []
        works = []
        for leaf in description.leaves:
            tensor = None if leaf is None else torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device)
            leaves.append(tensor)
            if tensor is not None and prod(tensor.shape):
                work = dist.irecv(tensor, group=self._group, group_src=peer)
                assert work is not None, "isend and irecv return None only on ranks outside the group"
                works.append(work)
        return Arriving(description, leaves, works)

    def finish(self) -> None:
        """Wait until all sends are complete."""
        while self._pending_sends:
            self._pending_sends.popleft()[0].wait()

    def _send_description(self, description: Description, peer: int) -> None:
        text = torch.frombuffer(bytearray(description.to_json().encode()), dtype=torch.uint8).to(self._device)
        for tensor in (torch.tensor([len(text)], device=self._device), text):
            dist.send(tensor, group=self._group, group_dst=peer)

    def _receive_description(self, peer: int) -> Description:
        size = torch.empty(1, dtype=torch.int64, device=self._device)
        dist.recv(size, group=self._group, group_src=peer)
        text = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.recv(text, group=self._group, group_src=peer)
        return Description.from_json(bytes(text.tolist()).decode())

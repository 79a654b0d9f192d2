"""Trees of tensors from one pipeline rank to another: what they are made of is told once, then only tensors travel.

Both ends see the same microbatches, so both know whether a message of this kind has been described before. Its first
one is preceded by a description. So stages may return any tree, in any layout of the job, shapes may change from batch
to batch, and nothing has to be worked out beforehand.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist import UserError
from d9d_pipeline._message import Description, Leaf

Kind: TypeAlias = tuple[Hashable, ...]
"""What messages of one description have in common: who made them, and the shapes of what went into the step."""


@final
@dataclass(frozen=True, slots=True)
class Arriving:
    """A message on its way to this rank.

    Attributes:
        description: What it is made of.
        leaves: Its leaves, tensors among them yet to be written to.
        works: Done when all is there.
    """

    description: Description
    leaves: list[Tensor | None]
    works: list[dist.Work]

    def wait(self) -> list[Tensor | None]:
        """The leaves, once they are there."""
        for work in self.works:
            work.wait()
        return self.leaves


@final
class Channel:
    """This rank's end of all that it exchanges with the other ranks of its pipeline.

    Args:
        group: The ranks of the pipeline.
        device: Where messages are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._sent: dict[Kind, Description] = {}
        self._received: dict[Kind, Description] = {}
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, leaves: Sequence[Any], description: Description, *, kind: Kind, peer: int) -> None:
        """Start to send a message.

        Args:
            leaves: Its leaves.
            description: What they are.
            kind: The kind of message. Messages of one kind have one description.
            peer: The pipeline rank that receives it.

        Raises:
            UserError: If messages of this kind were something else before.
        """
        known = self._sent.setdefault(kind, description)
        if known is description:
            self._tell(description, peer)
        elif known != description:
            raise UserError(
                f"got {description}, where for inputs of the same shapes it was {known} before; expected what a stage "
                "returns to follow from the shapes and dtypes of its inputs. Pad what varies."
            )
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        for leaf in leaves:
            if leaf is not None and leaf.numel():
                tensor = leaf.detach().contiguous()
                work = dist.isend(tensor, group=self._group, group_dst=peer)
                assert work is not None, "this rank is in the group"
                self._leaving.append((work, tensor))

    def send_gradients(self, gradients: Sequence[Tensor | None], *, kind: Kind, peer: int) -> None:
        """Start to send gradients; see `send`. One that is missing for once is sent as zeros."""
        known = self._sent.get(kind)
        if known is not None:
            pairs = zip(gradients, known.leaves, strict=True)
            if any(leaf is None and gradient is not None for gradient, leaf in pairs):
                raise UserError(
                    "got a gradient for a tensor from the stage before that was not used in the first microbatch; "
                    "expected a stage to use the same of its inputs each time, since what is not used is not sent "
                    "back. Use it always, e.g. multiplied by 0."
                )
            gradients = [
                torch.zeros(leaf.shape, dtype=leaf.dtype, device=self._device)
                if gradient is None and leaf
                else gradient
                for gradient, leaf in zip(gradients, known.leaves, strict=True)
            ]
        self.send(gradients, Description.of(gradients), kind=kind, peer=peer)

    def receive(self, *, kind: Kind, peer: int) -> Arriving:
        """Start to receive a message.

        Args:
            kind: The kind of message.
            peer: The pipeline rank that sends it.
        """
        if kind not in self._received:
            self._received[kind] = self._listen(peer)
        description = self._received[kind]
        leaves: list[Tensor | None] = []
        works = []
        for leaf in description.leaves:
            tensor = None if leaf is None else torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device)
            leaves.append(tensor)
            if tensor is not None and prod(tensor.shape):
                work = dist.irecv(tensor, group=self._group, group_src=peer)
                assert work is not None, "this rank is in the group"
                works.append(work)
        return Arriving(description, leaves, works)

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        while self._leaving:
            self._leaving.popleft()[0].wait()

    def _zeros(self, leaf: Leaf) -> Tensor:
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=self._device)

    def _tell(self, description: Description, peer: int) -> None:
        text = torch.frombuffer(bytearray(description.to_json().encode()), dtype=torch.uint8).to(self._device)
        for tensor in (torch.tensor([len(text)], device=self._device), text):
            dist.send(tensor, group=self._group, group_dst=peer)

    def _listen(self, peer: int) -> Description:
        size = torch.empty(1, dtype=torch.int64, device=self._device)
        dist.recv(size, group=self._group, group_src=peer)
        text = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.recv(text, group=self._group, group_src=peer)
        return Description.from_json(bytes(text.tolist()).decode())

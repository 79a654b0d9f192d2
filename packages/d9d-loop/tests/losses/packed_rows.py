"""Random packed rows, and the same values as one row per document."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Rows:
    """Packed rows. `take(values)` lists the values in the loss mask per document, ordered by row and document."""

    document_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    num_documents: list[int]

    def values(self) -> Tensor:
        return -torch.rand(self.mask.shape, dtype=torch.float64) * 3

    def take(self, values: Tensor, *, trained: bool = True) -> list[Tensor]:
        keep = self.mask if trained else torch.ones_like(self.mask)
        return [
            values[row][(self.document_ids[row] == document) & keep[row]]
            for row, num in enumerate(self.num_documents)
            for document in range(num)
        ]

    def padded(self, values: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(self.take(values), batch_first=True)


def packed_rows(num_rows: int = 3, length: int = 24, num_documents: int = 4, *, padding: int = 3) -> Rows:
    """Return rows of random documents, each with at least one token in the loss mask, and padding at the end."""
    ids, positions, masks = [], [], []
    for _ in range(num_rows):
        bounds = torch.randperm(length - padding - 1)[: num_documents - 1].sort().values + 1
        sizes = torch.diff(torch.cat((torch.tensor([0]), bounds, torch.tensor([length - padding])))).tolist()
        ids.append(torch.tensor([n for n, size in enumerate([*sizes, padding]) for _ in range(size)]))
        positions.append(torch.tensor([p for size in sizes for p in range(size)] + [0] * padding))
        mask = torch.rand(length) < 0.6
        last = torch.tensor(sizes).cumsum(0) - 1
        mask[last] = True
        mask[length - padding :] = False
        masks.append(mask)
    return Rows(torch.stack(ids), torch.stack(positions), torch.stack(masks), [num_documents] * num_rows)

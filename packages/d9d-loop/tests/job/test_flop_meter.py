from types import SimpleNamespace
from typing import Any, final

import pytest
import torch
from torch import Tensor

from d9d_loop import Loss, Task
from d9d_loop.job.flop_formula import AttentionFlops, FlopFormula
from d9d_loop.job.flop_meter import FlopMeter
from d9d_pipeline import Inputs

FORMULA = FlopFormula(per_row=10.0, attention=(AttentionFlops(per_pair=1.0),))
IDS = torch.zeros(2, 4, dtype=torch.int64)


@final
class Masked(Task):
    def __init__(self, mask: Tensor | None = None) -> None:
        self.mask = mask

    def inputs(self, batch: Any) -> Inputs:
        return batch

    def loss(self, outputs: Any, batch: Any) -> Loss:
        raise NotImplementedError

    def token_mask(self, batch: Any) -> Tensor | None:
        return self.mask


@pytest.mark.parametrize(
    ("inputs", "lengths"),
    [
        (Inputs(IDS), [4, 4]),
        (Inputs(input_ids=IDS), [4, 4]),
        (Inputs(inputs_embeds=torch.zeros(2, 4, 3)), [4, 4]),
        (Inputs(IDS, document_ids_BL=torch.tensor([[0, 0, 0, 1], [5, 5, 4, 4]])), [3, 1, 2, 2]),
        (Inputs(IDS, position_ids=torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]])), [3, 1, 2, 2]),
        (Inputs(IDS, position_ids=torch.arange(4)), [4, 4]),
        (Inputs(input_ids=IDS, attention_mask=torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]])), [2, 3]),
        (Inputs(IDS[:1], cu_seq_lens_q=torch.tensor([0, 3, 4])), [3, 1]),
        (Inputs(torch.zeros(3, 2)), [1] * 6),
    ],
)
def test_documents_follow_from_the_inputs(inputs: Inputs, lengths: list[int]) -> None:
    meter = FlopMeter(FORMULA, Masked())
    for _ in range(2):
        meter.add(inputs, inputs)
    assert float(meter.take()) == 2 * FORMULA.of_lengths(lengths)
    assert meter.take() == 0


def test_masked_tokens_do_not_count() -> None:
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    ids = torch.tensor([[0, 0, 1, 2], [0, 0, 1, 1]])
    for inputs, lengths in ((Inputs(IDS), [3, 2]), (Inputs(IDS, document_ids_BL=ids), [2, 1, 2])):
        meter = FlopMeter(FORMULA, Masked(mask))
        meter.add(inputs, inputs)
        assert float(meter.take()) == FORMULA.of_lengths(lengths)


@pytest.mark.parametrize(
    ("shared", "lengths"),
    [
        ({}, [4, 4]),
        ({"position_ids": torch.arange(4).expand(2, -1), "document_ids_BL": IDS}, [4, 4]),
        ({"position_ids": torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]])}, [3, 1, 2, 2]),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])}, [3, 4]),
    ],
)
def test_parts_of_rows_are_numbered_by_their_positions(shared: dict[str, Tensor], lengths: list[int]) -> None:
    meters = []
    for columns in ([0, 3], [1, 2]):
        mesh = SimpleNamespace(size=lambda: 2)
        split: Any = SimpleNamespace(mesh=mesh, positions=lambda length, at=columns: torch.tensor([at]))
        meters.append(FlopMeter(FORMULA, Masked(), split=split))
        inputs = Inputs(IDS[:, columns], **{name: each[:, columns] for name, each in shared.items()})
        meters[-1].add(inputs, inputs)
    assert sum(float(meter.take()) for meter in meters) == FORMULA.of_lengths(lengths)


def test_documents_of_four_dimensional_positions_are_those_of_the_text() -> None:
    text = torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]])
    meter = FlopMeter(FORMULA, Masked())
    meter.add(inputs := Inputs(IDS, position_ids=torch.stack([text, *([torch.zeros_like(text)] * 3)])), inputs)
    assert float(meter.take()) == FORMULA.of_lengths([3, 1, 2, 2])

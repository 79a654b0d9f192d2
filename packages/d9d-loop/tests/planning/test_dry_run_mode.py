"""Dry run mode: values of a batch, and of results of operators on them alone."""

import torch
from torch import nn

from d9d_loop.planning.dry_run_mode import DryRunMode, values_of


def test_values_of_a_batch_are_known_and_those_of_weights_are_not() -> None:
    mode = DryRunMode()
    ids = mode.with_values(torch.tensor([[1, 2], [0, 3]]))
    with mode:
        weights = torch.empty(4, 3)
        x = nn.functional.embedding(ids, weights)
        positions = torch.arange(2) + ids[1]
        found = values_of(positions)
        assert found is not None
        assert found.tolist() == [0, 4]
        assert values_of(x) is None
        assert x[ids == 0].shape == (1, 3)
        assert x.masked_select((ids == 0)[..., None]).shape == (3,)
        counts = torch.zeros(4, dtype=torch.int64)
        assert values_of(counts) is not None
        counts += x.argmax()
        assert values_of(counts) is None


def test_without_values_results_are_those_of_fake_tensors() -> None:
    with DryRunMode():
        assert values_of(torch.arange(2)) is None

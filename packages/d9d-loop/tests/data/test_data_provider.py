import random
from typing import Any

import pytest
import torch

from d9d_dist import UserError
from d9d_loop.data import DataProvider, DatasetProvider, IndexedStream, SampleStream
from d9d_loop.data.data_provider import provider_of
from d9d_loop.data.sample_order import SampleOrder


def test_a_dataset_is_a_provider() -> None:
    data = [torch.tensor(number) for number in range(9)]
    stream = DatasetProvider(data).training(seed=4)
    assert [stream.read(entry).item() for entry in stream.cursor().take(20)] == SampleOrder(9, seed=4).take(0, 20)
    assert DatasetProvider(data, shuffle=False).training(seed=4).cursor().take(3) == [0, 1, 2]
    assert DatasetProvider(data).evaluation() is None
    assert DatasetProvider(data).collate(data[:2]).tolist() == [0, 1]


def test_only_plain_containers_are_assumed_to_draw_nothing() -> None:
    class Augmented(list[int]):
        def __getitem__(self, index: Any) -> Any:
            return random.random()  # noqa: S311 - no secret

    for samples in ([1], (1,), torch.ones(1)):
        assert not DatasetProvider(samples).draws
        assert DatasetProvider(samples, collate=list).draws
    assert DatasetProvider(Augmented([1])).draws
    assert DatasetProvider(range(2)).draws
    assert not DatasetProvider(range(2), draws=False).draws
    assert DatasetProvider([1], draws=True).draws


def test_a_provider_needs_only_training_data() -> None:
    class Own(DataProvider):
        def training(self, *, seed: int) -> SampleStream:
            return IndexedStream([seed], seed=seed)

    own: Any = Own()
    assert own.training(seed=3).read(0) == 3
    assert own.evaluation() is None
    assert own.draws


def test_arguments_of_a_dataset_are_errors_with_a_provider() -> None:
    provider = DatasetProvider([1], epochs=2)
    assert provider_of(provider, None, None, shuffle=False, epochs=2) is provider
    message = "got {} together with a DatasetProvider; expected it only with a dataset"
    with pytest.raises(UserError, match=message.format("evaluation_data")):
        provider_of(provider, [1], None, shuffle=False, epochs=None)
    with pytest.raises(UserError, match=message.format("collate")):
        provider_of(provider, None, list, shuffle=False, epochs=None)

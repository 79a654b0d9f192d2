import pytest
import torch
from torch import nn

from d9d_loop.model.known_values import known_values

WEIGHTS = nn.Parameter(torch.empty(4, 3, device="meta"))


def test_values_of_a_batch_can_be_read() -> None:
    ids = torch.tensor([[1, 2], [0, 3]])
    with known_values():
        x = nn.functional.embedding(ids, WEIGHTS)
        positions = torch.arange(2, device=x.device) + torch.tensor([ids.max().item(), 0])
        assert positions.to(x.device).tolist() == [3, 1]
        assert x[ids == 0].shape == (1, 3)
        assert x.masked_select((ids == 0)[..., None]).shape == (3,)
        assert torch.take_along_dim(x, (ids == 0).long()[..., None], dim=1).shape == x.shape
        assert torch.zeros(2, device=x.device).is_meta
        assert torch.zeros(2, dtype=torch.int64, device=x.device).tolist() == [0, 0]
        (x * positions[:, None]).sum().backward()
    assert WEIGHTS.grad is not None
    assert WEIGHTS.grad.is_meta


def test_values_that_depend_on_parameters_are_not_known() -> None:
    with known_values():
        with pytest.raises(RuntimeError, match="meta"):
            WEIGHTS.sum().item()
        with pytest.raises(NotImplementedError, match="depend on parameters"):
            torch.tensor([0.0, 1.0]).copy_(WEIGHTS[0, :2])


def test_integers_written_with_values_that_depend_on_parameters_are_not_known() -> None:
    with known_values():
        x = WEIGHTS.detach()
        top, known = x.topk(1).indices, torch.arange(4, device=x.device)
        written = [
            torch.zeros(4, 3, dtype=torch.bool, device=x.device).scatter_(-1, top, True),
            torch.zeros(3, dtype=torch.int64, device=x.device).scatter_add_(0, top[:, 0], known),
            torch.zeros(4, dtype=torch.int64, device=x.device).index_copy_(0, known, top[:, 0]),
        ]
        inverse, counts = (torch.zeros(4, dtype=torch.int64, device=x.device) for _ in range(2))
        view = counts[:2]
        inverse[x[:, 0].argsort()] = known
        counts += top[:, 0]
        for each in (*written, inverse, counts, view):
            assert (each + 1).is_meta
            for read in (each.tolist, each.numpy, lambda each=each: each.any().item()):
                with pytest.raises((RuntimeError, TypeError, NotImplementedError), match=r"(?i)meta|unallocated"):
                    read()
        assert known.tolist() == [0, 1, 2, 3]

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from d9d_dist import UserError
from d9d_state.module_tensors import aliases, module_tensors, unique_tensors


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


class _Extra(nn.Module):
    def get_extra_state(self) -> str:
        return "text"


def test_module_tensors_are_the_tensors_themselves_without_non_persistent_buffers() -> None:
    model = _Tied()
    tensors = module_tensors(model)
    assert list(tensors) == ["scale", "embedding.weight", "head.weight"]
    assert tensors["head.weight"] is model.embedding.weight


def test_aliases_map_tied_tensors_to_their_first_name() -> None:
    assert list(unique_tensors(_Tied())) == ["scale", "embedding.weight"]
    assert aliases(module_tensors(_Tied())) == {
        "scale": "scale",
        "embedding.weight": "embedding.weight",
        "head.weight": "embedding.weight",
    }


def test_non_tensor_state_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"got _extra_state in the state dict; expected tensors only, which .* Remove get_extra_state",
    ):
        module_tensors(_Extra())


def test_wrapper_prefixes_are_removed_from_names() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1)))
    compiled = torch.compile(nn.Linear(1, 1))
    assert isinstance(compiled, nn.Module)
    model.append(compiled)
    assert list(module_tensors(model)) == ["0.weight", "0.bias", "1.weight", "1.bias"]

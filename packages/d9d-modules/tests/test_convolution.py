import pytest
import torch
from torch import Tensor, nn

from d9d_dist import UserError
from d9d_modules.convolution import CausalConvolution, causal_convolution


def _by_hand(x: Tensor, weight: Tensor, documents: Tensor | None) -> Tensor:
    """Reference: loop over positions, back to the start of the row or document."""
    width, rows = weight.shape[1], []
    for row in range(len(x)):
        outs = []
        for now in range(x.shape[1]):
            total = x[row, now] * weight[:, -1]
            for back in range(1, min(width, now + 1)):
                if documents is not None and documents[row, now - back + 1] != documents[row, now - back]:
                    break
                total = total + x[row, now - back] * weight[:, width - 1 - back]
            outs.append(total)
        rows.append(torch.stack(outs))
    return torch.stack(rows)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("length", "width"), [(1, 4), (3, 4), (9, 4), (9, 1), (9, 2)])
def test_outputs_and_gradients_equal_a_loop_over_positions(length: int, width: int, is_packed: bool) -> None:
    x = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, width, dtype=torch.float64, requires_grad=True)
    documents = torch.tensor([[5, 5, 1, 5, 5, 5, 5, 2, 2], [0] * 4 + [1] * 5])[:, :length] if is_packed else None
    expected = _by_hand(x, weight, documents)
    found = causal_convolution(x, weight, document_ids_BL=documents)
    direction = torch.randn_like(found)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(expected, (x, weight), direction)
    torch.testing.assert_close(torch.autograd.grad(found, (x, weight), direction), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("documents", [None, torch.zeros(2, 0, dtype=torch.int64)])
def test_empty_rows_stay_empty(documents: Tensor | None) -> None:
    assert causal_convolution(torch.zeros(2, 0, 3), torch.zeros(3, 4), document_ids_BL=documents).shape == (2, 0, 3)


def test_packed_bfloat16_is_rounded_once() -> None:
    x, weight = torch.randn(1, 9, 3).bfloat16(), torch.randn(3, 4).bfloat16()
    documents = torch.tensor([[0] * 4 + [1] * 5])
    wide = causal_convolution(x.float(), weight.float(), document_ids_BL=documents)
    assert torch.equal(causal_convolution(x, weight, document_ids_BL=documents), wide.bfloat16())


def test_the_weight_is_initialized_like_torch_conv1d() -> None:
    ours = CausalConvolution(5000, width=4)
    theirs = nn.Conv1d(5000, 5000, 4, groups=5000)
    nn.init.zeros_(ours.weight)
    ours.reset_parameters()
    assert abs(ours.weight.std().item() / theirs.weight.std().item() - 1) < 0.05
    assert ours.weight.abs().max() <= 0.5


def test_documents_are_not_broadcast_over_rows() -> None:
    with pytest.raises(UserError, match=r"got document_ids_BL of shape \(1, 4\) and dtype torch.int64; exp"):
        causal_convolution(torch.zeros(2, 4, 3), torch.ones(3, 2), document_ids_BL=torch.zeros(1, 4, dtype=torch.int64))


def test_another_number_of_features_raises() -> None:
    with pytest.raises(UserError, match=r"of 3 features got a tensor of shape \(1, 2, 4\); expected a last dim of 3"):
        CausalConvolution(3)(torch.zeros(1, 2, 4))

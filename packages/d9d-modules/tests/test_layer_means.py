import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from d9d_dist import UserError
from d9d_modules.layer_means import LayerMeans

MASK = torch.tensor([[1, 1, 0], [0, 0, 0]])


def test_gathers_the_mean_of_each_layer_across_stages() -> None:
    outputs = torch.randn(4, 2, 3, 5, dtype=torch.float64)
    means = LayerMeans.start(MASK, outputs[0])
    assert means.means_NBD.shape == (0, 2, 5)
    for index, hidden in enumerate(outputs):
        if index == 2:  # pytree sent to the next stage
            leaves, structure = tree_flatten(means)
            assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
            described = treespec_dumps(structure)  # sent to another rank
            means = tree_unflatten([leaf.clone() for leaf in leaves], treespec_loads(described))
            assert isinstance(means, LayerMeans)
        means = means.add(hidden)
    expected = torch.stack((outputs[:, 0, :2].mean(1), torch.zeros(4, 5, dtype=torch.float64)), dim=1)
    torch.testing.assert_close(means.means_NBD, expected)


def test_gradients_reach_every_layer() -> None:
    hidden = torch.randn(2, 3, 5, requires_grad=True)
    means = LayerMeans.start(MASK, hidden).add(hidden).add(2 * hidden)
    (gradient,) = torch.autograd.grad(means.means_NBD.sum(), hidden)
    torch.testing.assert_close(gradient[0], torch.tensor([[1.5], [1.5], [0.0]]).expand(3, 5))


def test_shapes_are_inferred_on_meta_and_masks_are_checked() -> None:
    hidden = torch.randn(2, 3, 5, device="meta")
    assert LayerMeans.start(MASK.to("meta"), hidden).add(hidden).means_NBD.shape == (1, 2, 5)
    with pytest.raises(UserError, match=r"the mask has shape \(2, 3\); expected \(2, 4\)"):
        LayerMeans.start(MASK, torch.randn(2, 4, 5))
    with pytest.raises(UserError, match=r"the mask has shape \(2, 3\); expected \(1, 3\)"):
        LayerMeans.start(MASK, torch.randn(2, 3, 5)).add(torch.randn(1, 3, 5))

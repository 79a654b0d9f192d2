import torch
from torch.testing import assert_close

from d9d_loop.losses import kl_divergence


def test_k1_and_k3_have_the_divergence_as_their_mean() -> None:
    policy, reference = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    expected = (policy.exp() * (policy - reference)).sum()
    for form in ("k1", "k3"):
        assert_close((policy.exp() * kl_divergence(policy, reference, form=form)).sum(), expected)
    assert (kl_divergence(policy, reference, form="k3") >= 0).all()


def test_k2_has_the_gradient_of_the_divergence() -> None:
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    policy, reference = logits.log_softmax(-1), torch.randn(6, dtype=torch.float64).log_softmax(-1)
    expected = (policy.exp() * (policy - reference)).sum()
    estimate = (policy.detach().exp() * kl_divergence(policy, reference, form="k2")).sum()
    assert_close(*(torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (estimate, expected)))

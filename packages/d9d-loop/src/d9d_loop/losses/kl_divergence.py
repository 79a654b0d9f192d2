"""Estimators of the KL divergence between the policy and a reference, from one sampled token."""

from typing import Literal, TypeAlias, assert_never

from torch import Tensor

KlForm: TypeAlias = Literal["k1", "k2", "k3"]
"""Estimator of Schulman's "Approximating KL divergence" (2020): `k1` is unbiased, `k3` is unbiased and not negative."""


def kl_divergence(log_probs: Tensor, reference_log_probs: Tensor, *, form: KlForm = "k3") -> Tensor:
    r"""Estimate $KL(\pi \| \pi_\text{ref})$ at each token. With $d = \log \pi_\text{ref} - \log \pi$:

    - `k1`: $-d$
    - `k2`: $d^2 / 2$
    - `k3`: $e^d - d - 1$, the form of GRPO (arXiv:2402.03300, equation 4)

    The estimates are of the same shape as the log-probabilities of the sampled tokens. As a penalty in a loss, on
    tokens sampled from the policy, `k2` has in expectation the gradient of the reverse KL divergence. The expected
    gradient of `k1` is 0.
    """  # noqa: D415 - a list follows the first sentence
    difference = reference_log_probs - log_probs
    match form:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2.0
        case "k3":
            return difference.exp() - difference - 1.0
        case _:
            assert_never(form)

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_dist import UserError
from d9d_modules import lm_head
from d9d_modules._cut_cross_entropy import cut_cross_entropy, why_not_cut_cross_entropy
from d9d_modules.cross_entropy import CrossEntropy
from d9d_modules.lm_head import language_model_head


class _Package(ModuleType):
    """Stand-in for the package, with the arguments that its version 25.1 has."""

    def linear_cross_entropy(self, e: Tensor, c: Tensor, targets: Tensor, **options: Any) -> Tensor:
        assert options.pop("reduction") == "none"
        assert options.pop("ignore_index") == -100
        assert options.pop("filter_eps") is None
        assert options.pop("impl") == "cce"
        softcap = options.pop("softcap")
        assert not options
        logits = e @ c.T
        return F.cross_entropy(
            logits if softcap is None else softcap * (logits / softcap).tanh(), targets, reduction="none"
        )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    package = _Package("cut_cross_entropy")
    package.__spec__ = ModuleSpec("cut_cross_entropy", None)
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", package)


@pytest.mark.usefixtures("installed")
def test_supports_plain_16_bit_losses_on_an_accelerator() -> None:
    hidden = torch.randn(2, 3, dtype=torch.bfloat16)
    plain = CrossEntropy()
    assert why_not_cut_cross_entropy(hidden, 1, plain) == "it needs an accelerator, but the hidden states are on cpu"


def test_the_package_is_called_with_its_arguments(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "why_not_cut_cross_entropy", lambda *_: None)  # as on an accelerator
    hidden, weight = torch.randn(1, 3, 4), torch.randn(5, 4)
    labels = torch.tensor([[0, 4, -100]])
    found = language_model_head(hidden, weight, labels=labels, softcap=2.0, backend="cut_cross_entropy")
    torch.testing.assert_close(found, language_model_head(hidden, weight, labels=labels, softcap=2.0))
    assert cut_cross_entropy(hidden[0].double(), weight.double(), labels[0], softcap=None).dtype == torch.float32


@pytest.mark.usefixtures("installed")
def test_an_installed_package_does_not_change_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "why_not_cut_cross_entropy", lambda *_: None)  # as on an accelerator
    monkeypatch.setattr(lm_head, "cut_cross_entropy", lambda *_, **__: pytest.fail("the package is called"))
    assert language_model_head(torch.randn(1, 3, 4), torch.randn(5, 4), labels=torch.ones(1, 3).long()).isfinite().all()


def test_the_error_for_a_missing_package_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    monkeypatch.setattr("d9d_modules._cut_cross_entropy.find_spec", lambda _: None)
    hidden, weight, labels = torch.randn(1, 3, 4), torch.randn(5, 4), torch.ones(1, 3).long()
    with pytest.raises(UserError, match=r"is not available: it is not installed: pip install 'cut-cross-entropy>=25"):
        language_model_head(hidden, weight, labels=labels, backend="cut_cross_entropy")


class _OnAccelerator:
    """Stand-in for hidden states on an accelerator."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, torch.device("cuda")


@pytest.mark.usefixtures("installed")
def test_rejections_name_the_reason() -> None:
    def why_not(dtype: torch.dtype = torch.bfloat16, num_weights: int = 1, loss: object = CrossEntropy()) -> str | None:
        hidden: Any = _OnAccelerator(dtype)
        return why_not_cut_cross_entropy(hidden, num_weights, loss)

    assert why_not() is None
    assert why_not(torch.float32) == "it needs bfloat16 or float16, but the hidden states are torch.float32"
    assert why_not(num_weights=2) == "it takes one weight, but the vocabulary has 2 splits"
    assert "it computes plain cross entropy, not CrossEntropy(z_loss=0.1" in str(why_not(loss=CrossEntropy(z_loss=0.1)))

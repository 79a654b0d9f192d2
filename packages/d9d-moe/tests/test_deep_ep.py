import pytest
import torch

from d9d_dist import UserError
from d9d_moe import refuse_deep_ep


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UserError, match=r"dispatch = 'deep_ep' on a CPU; .* Use dispatch = 'all_to_all'"):
        refuse_deep_ep(torch.device("cpu"))


def test_an_installed_one_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d9d_moe.deep_ep.find_spec", lambda name: object())
    with pytest.raises(UserError, match="which is installed; use dispatch = 'all_to_all'"):
        refuse_deep_ep(torch.device("meta"))


def test_the_install_command_is_named() -> None:
    with pytest.raises(UserError, match=r"deep_ep is not installed\. Install it: pip install .*DeepEP"):
        refuse_deep_ep(torch.device("meta"))

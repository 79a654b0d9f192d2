import pytest
import torch
from torch import nn

from d9d_dist import UserError
from d9d_modules import SplitTokenEmbedding
from d9d_peft import FullTune, inject
from d9d_peft._targets import Target


def model() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.LayerNorm(2))


@pytest.mark.parametrize("target", ["^0$", nn.Linear, (nn.Linear, nn.ReLU), r"^0\.0\.(weight|bias)$"])
def test_claims_parameters_of_submodules(target: Target) -> None:
    plan = FullTune(target).plan(model())
    assert plan.claimed == plan.trainable == {"0.0.weight", "0.0.bias"}
    assert plan.adapters == {}


def test_type_target_matches_the_root_module() -> None:
    assert FullTune(nn.LayerNorm).plan(nn.LayerNorm(2)).trainable == {"weight", "bias"}


def test_tied_parameter_is_claimed_by_its_first_name() -> None:
    tied = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5)})
    tied["head"].register_parameter("weight", tied["embedding"].get_parameter("weight"))
    inject(FullTune("head"), tied)
    assert {name for name, parameter in tied.named_parameters() if parameter.requires_grad} == {
        "embedding.weight",
        "head.bias",
    }
    assert FullTune("head").plan(tied).claimed == {"embedding.weight", "head.bias"}


def test_only_rows_of_new_tokens_are_trained() -> None:
    embedding = nn.ModuleDict({"tokens": SplitTokenEmbedding({"orig": 7, "new": 2}, 4)})
    inject(FullTune(r"tokens\.weight_new"), embedding)
    before = {name: tensor.clone() for name, tensor in embedding.state_dict().items()}
    embedding["tokens"](torch.arange(9)).square().sum().backward()
    torch.optim.SGD([p for p in embedding.parameters() if p.requires_grad], lr=0.1).step()
    after = embedding.state_dict()
    assert {name for name in after if not torch.equal(after[name], before[name])} == {"tokens.weight_new"}


@pytest.mark.parametrize("target", ["absent", r"0\.1", nn.Embedding])
def test_refuses_a_target_without_matches(target: Target) -> None:
    message = r"matches neither a parameter nor a module with parameters\. This model has 0\.0, 1\."
    with pytest.raises(UserError, match=message):
        inject(FullTune(target), model())


def test_refuses_an_invalid_regular_expression() -> None:
    with pytest.raises(
        UserError, match=r"FullTune got the pattern '\(', which is not a valid regular expression: missing \)"
    ):
        FullTune("(")

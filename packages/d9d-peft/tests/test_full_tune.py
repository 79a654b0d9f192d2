import pytest
from torch import nn

from d9d_dist import UserError
from d9d_peft import FullTune, inject


def model() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.LayerNorm(2))


def test_claims_everything_inside_what_matches() -> None:
    plan = FullTune("^0$").plan(model())
    assert plan.claimed == plan.trainable == {"0.0.weight", "0.0.bias"}
    assert plan.replacements == {}


def test_a_tied_parameter_is_trained_under_its_first_name() -> None:
    tied = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5)})
    tied["head"].register_parameter("weight", tied["embedding"].get_parameter("weight"))
    inject(FullTune("head"), tied)
    assert {name for name, parameter in tied.named_parameters() if parameter.requires_grad} == {
        "embedding.weight",
        "head.bias",
    }
    assert FullTune("head").plan(tied).claimed == {"embedding.weight", "head.bias"}


@pytest.mark.parametrize("pattern", ["absent", r"0\.1"])
def test_refuses_to_match_no_parameter(pattern: str) -> None:
    with pytest.raises(UserError, match=r"matches no module with parameters\. This model has 0\.0, 1\."):
        FullTune(pattern).plan(model())


def test_refuses_what_is_no_regular_expression() -> None:
    with pytest.raises(UserError, match=r"FullTune got the pattern '\(', which is no regular expression: missing \)"):
        FullTune("(")

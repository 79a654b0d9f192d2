import pytest
import torch

from d9d_state import StateMapper, TensorInfo
from d9d_state.mapper.cut import narrow, pad, select


def test_narrow_takes_a_range_of_a_dim() -> None:
    tensor = torch.arange(12).view(3, 4)
    mapper = narrow("a", "b", dim=-1, start=1, length=2)
    assert torch.equal(mapper.apply({"a": tensor})["b"], tensor[:, 1:3])
    assert list(narrow("a", start=0, length=1).outputs) == ["a"]


def test_select_takes_one_index_of_a_dim() -> None:
    tensor = torch.arange(12).view(3, 4)
    assert torch.equal(select("a", "b", dim=1, index=-1).apply({"a": tensor})["b"], tensor[:, 3])
    assert list(select("a", index=0).outputs) == ["a"]


def test_narrow_and_select_have_no_inverse() -> None:
    with pytest.raises(
        ValueError, match=r"narrow\(dim=0, start=1, length=2\) has no inverse, because values are lost. Use split"
    ):
        narrow("a", start=1, length=2).inverse()
    with pytest.raises(
        ValueError, match=r"select\(dim=0, index=1\) has no inverse, because values are lost. Use unstack"
    ):
        select("a", index=1).inverse()


def test_the_inverse_of_pad_removes_the_padding() -> None:
    tensor = torch.randn(2, 3).bfloat16()
    mapper = pad("a", "b", dim=-1, size=3, padded_size=5, value=-1)
    output = mapper.apply({"a": tensor})
    assert output["b"].dtype is torch.bfloat16
    assert torch.equal(output["b"][:, :3], tensor)
    assert output["b"][:, 3:].tolist() == [[-1, -1]] * 2
    assert torch.equal(mapper.inverse().apply(output)["a"], tensor)
    assert torch.equal(mapper.inverse().inverse().apply({"a": tensor})["b"], output["b"])
    assert "unpad(dim=-1, 5 to 3)" in mapper.inverse().explain()


@pytest.mark.parametrize(
    ("mapper", "message"),
    [
        (narrow("a", start=2, length=2), r"dim 0 of shape \[3, 4\] ends before 4"),
        (narrow("a", dim=2, start=0, length=0), r"got dim 2; expected a dim of a tensor with 2 dims"),
        (select("a", index=3), r"dim 0 of shape \[3, 4\] has no index 3"),
        (select("a", dim=-1, index=-5), r"dim -1 of shape \[3, 4\] has no index -5"),
        (pad("a", size=2, padded_size=4), r"dim 0 of shape \[3, 4\] must have size 2"),
        (pad("a", size=2, padded_size=4).inverse(), r"dim 0 of shape \[3, 4\] must have size 4"),
    ],
)
def test_mismatched_tensors_are_refused(mapper: StateMapper, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mapper.infer({"a": TensorInfo((3, 4), torch.float32)})
    with pytest.raises(ValueError, match=message):
        mapper.apply({"a": torch.ones(3, 4)})


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="narrow of a got start -1 and length 2; expected both to be 0 or more"):
        narrow("a", start=-1, length=2)
    with pytest.raises(ValueError, match=r"pad of a got size 4 and padded_size 3; expected 0 <= size <= padded_size"):
        pad("a", size=4, padded_size=3)

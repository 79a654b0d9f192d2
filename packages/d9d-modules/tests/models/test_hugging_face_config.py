import pytest

from d9d_dist import UserError
from d9d_modules import config_value, require_value


def test_values_are_read_with_their_type() -> None:
    config = {"size": 3, "eps": 1e-6, "theta": 10_000, "tied": True}
    assert config_value(config, "size", int) == 3
    assert config_value(config, "eps", float) == 1e-6
    assert config_value(config, "tied", bool) is True
    assert config_value(config, "absent", int, default=7) == 7
    theta = config_value(config, "theta", float)
    assert (theta, type(theta)) == (10_000.0, float)


def test_a_missing_value_is_named() -> None:
    with pytest.raises(UserError, match=r"config\.json has no 'size'; expected a int: is this the right checkpoint"):
        config_value({}, "size", int)


@pytest.mark.parametrize(("value", "kind"), [("3", int), (3.5, int), (True, int), (1, bool), (True, float)])
def test_a_mistyped_value_is_refused(value: object, kind: type[int] | type[float] | type[bool]) -> None:
    with pytest.raises(UserError, match=rf"config\.json has key = {value!r}; expected a {kind.__name__}"):
        config_value({"key": value}, "key", kind)


def test_an_unsupported_value_is_refused() -> None:
    require_value({"hidden_act": "silu"}, "hidden_act", "silu")
    require_value({}, "hidden_act", "silu")
    with pytest.raises(UserError, match=r"config\.json has hidden_act = 'gelu'; only 'silu' is supported"):
        require_value({"hidden_act": "gelu"}, "hidden_act", "silu")
    with pytest.raises(UserError, match=r"config\.json has model_type = None; only 'qwen3' is supported"):
        require_value({}, "model_type", "qwen3", required=True)

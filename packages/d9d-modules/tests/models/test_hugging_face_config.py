import pytest

from d9d_dist import UserError
from d9d_modules.models.hugging_face_config import (
    config_keys_in_errors,
    config_value,
    require_known_keys,
    require_value,
)
from d9d_modules.models.hugging_face_family import DECODER_ENTRIES, with_defaults


def test_values_are_read_with_their_type() -> None:
    config = {"size": 3, "eps": 1e-6, "theta": 10_000, "tied": True}
    assert config_value(config, "size", int) == 3
    assert config_value(config, "eps", float) == 1e-6
    assert config_value(config, "tied", bool) is True
    assert config_value(config, "absent", int, default=7) == 7
    theta = config_value(config, "theta", float)
    assert (theta, type(theta)) == (10_000.0, float)


def test_the_error_names_a_missing_entry() -> None:
    with pytest.raises(
        UserError, match=r"config\.json has no 'size'; expected a value of type int: is this the right checkpoint"
    ):
        config_value({}, "size", int)


@pytest.mark.parametrize(("value", "kind"), [("3", int), (3.5, int), (True, int), (1, bool), (True, float)])
def test_a_mistyped_value_raises(value: object, kind: type[int] | type[float] | type[bool]) -> None:
    with pytest.raises(UserError, match=rf"config\.json has key = {value!r}; expected a value of type {kind.__name__}"):
        config_value({"key": value}, "key", kind)


def test_an_unsupported_value_raises() -> None:
    require_value({"hidden_act": "silu"}, "hidden_act", "silu")
    require_value({}, "hidden_act", "silu")
    with pytest.raises(UserError, match=r"config\.json has hidden_act = 'gelu'; only 'silu' is supported"):
        require_value({"hidden_act": "gelu"}, "hidden_act", "silu")
    with pytest.raises(UserError, match=r"config\.json has model_type = None; only 'qwen3' is supported"):
        require_value({}, "model_type", "qwen3", required=True)


@pytest.mark.parametrize(
    ("value", "minimum", "message"),
    [
        (0, None, "key = 0; expected a value of type int above 0"),
        (-2, 0, "key = -2; expected a value of type int of at least 0"),
        (0.0, None, r"key = 0\.0; expected a value of type float above 0"),
        (float("nan"), None, "key = nan; expected a value of type float above 0"),
        (float("inf"), 0.0, r"key = inf; expected a value of type float of at least 0\.0"),
    ],
)
def test_a_number_out_of_range_raises(value: float, minimum: float | None, message: str) -> None:
    assert config_value({"key": 0}, "key", int, minimum=0) == 0
    with pytest.raises(UserError, match=rf"config\.json has {message}"):
        config_value({"key": value}, "key", type(value), minimum=minimum)


def test_a_number_is_not_a_flag() -> None:
    with pytest.raises(UserError, match=r"config\.json has attention_bias = 0; only False is supported"):
        require_value({"attention_bias": 0}, "attention_bias", supported=False)
    with pytest.raises(UserError, match=r"config\.json has step = True; only 1 is supported"):
        require_value({"step": True}, "step", 1)


def test_an_unknown_entry_raises_with_its_name() -> None:
    require_known_keys({"size": 1, "dtype": "float16"}, used=["size"], irrelevant={"dtype": "a reason"})
    with pytest.raises(UserError, match=r"config\.json has alibi = True, extra = None; expected only known entries"):
        require_known_keys({"size": 1, "alibi": True, "extra": None}, used=["size"], irrelevant={})


def _raise(message: str) -> None:
    with config_keys_in_errors({"num_heads": "num_attention_heads", "top_k": "top_k"}):
        raise UserError(message)


def test_errors_name_the_config_json_entry_of_a_field() -> None:
    with pytest.raises(UserError, match=r"^num_heads = 3; no\. In config\.json num_heads is num_attention_heads\.$"):
        _raise("num_heads = 3; no.")
    with pytest.raises(UserError, match=r"^top_k = 3; no\.$"):
        _raise("top_k = 3; no.")


def test_entries_get_other_defaults() -> None:
    entries = with_defaults(DECODER_ENTRIES, tie_word_embeddings=True)
    changed = {new.field: new.default for old, new in zip(DECODER_ENTRIES, entries, strict=True) if old != new}
    assert changed == {"tie_word_embeddings": True}

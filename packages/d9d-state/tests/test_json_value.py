import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d9d_state.json_value import dump_json, parse_json

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(_VALUES)
def test_json_values_round_trip_bitwise(value: Any) -> None:
    text = dump_json(value)
    assert parse_json(text) == value
    assert dump_json(parse_json(text)) == text
    assert parse_json(dump_json(value, indent=2)) == value


def test_json_texts_have_sorted_keys_and_no_spaces() -> None:
    assert dump_json({"b": (1, 2.5), "a": None}) == b'{"a":null,"b":[1,2.5]}'


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [math.nan]}, r"value\.a\[0\] = nan; expected a finite number, as JSON requires"),
        ({"a": math.inf}, r"value\.a = inf; expected a finite"),
        ({"a": {1: 2}}, r"value\.a has the key 1 of type int; JSON keys are str"),
        ([object()], r"value\[0\] is of type object; expected None, bool, int, float, str, list or dict"),
        (b"bytes", "value is of type bytes"),
    ],
)
def test_error_names_path_of_non_json_value(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dump_json(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lambda: b'{"a": 1, "b": 2, "a": 3}', "JSON repeats the key 'a'"),
        (lambda: b"[NaN]", "JSON contains NaN, which is not a finite number"),
        (lambda: b"[-Infinity]", "JSON contains -Infinity"),
        (lambda: b"[" * 100_000, "JSON nests too deeply"),
        (lambda: b"\xff", "codec can't decode"),
        (lambda: b"{", "Expecting property name"),
        (lambda: b"1e999", "JSON contains '1e999', which is not a finite number"),
        (lambda: b"1" * 5000, "digits"),
        (lambda: b'{"' + b"a" * 1000 + b'":1,"' + b"a" * 1000 + b'":1}', r"repeats the key 'a{100}\.\.\.'"),
        (lambda: b"\xef\xbb\xbf{}", "Expecting value"),
    ],
)
def test_malformed_json_is_refused(text: Callable[[], bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text())


def test_a_surrogate_pair_is_parsed_to_one_character() -> None:
    assert parse_json(b'["\\ud83d\\ude42", "\\\\ud800"]') == ["\U0001f642", "\\ud800"]


def test_duplicate_key_check_scales_to_many_keys() -> None:
    text = b"{" + b",".join(b'"%d":0' % number for number in [*range(100_000), 99_999]) + b"}"
    with pytest.raises(ValueError, match="JSON repeats the key '99999'"):
        parse_json(text)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="nests too deeply for JSON, or contains itself"):
        dump_json(value)

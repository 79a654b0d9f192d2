from typing import Any

import pytest

from d9d_dist import UserError
from d9d_loop.data import read_conversation, read_pair

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(
    "sample",
    [
        {"messages": [USER, ANSWER]},
        {"conversations": [USER, ANSWER]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"messages": [{**USER, "tool_calls": None}, ANSWER], "tools": None},  # as a Hugging Face dataset has it
        {"messages": [USER, ANSWER], "tools": "[]"},
    ],
)
def test_every_supported_format_gives_the_same_conversation(sample: dict[str, Any]) -> None:
    conversation = read_conversation(sample)
    assert conversation.messages == [USER, ANSWER]
    assert (conversation.tools, conversation.first_trained) == (None, 0)


def test_only_the_completion_contributes_to_the_loss() -> None:
    assert read_conversation({"prompt": "hi", "completion": "hello"}).messages == [USER, ANSWER]
    conversation = read_conversation({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]})
    assert (len(conversation.messages), conversation.first_trained) == (4, 3)


def test_tool_calls_have_objects_as_arguments() -> None:
    call = {"type": "function", "function": {"name": "get", "arguments": '{"city": "Bonn"}'}}
    schema = {"type": "function", "function": {"name": "get"}}
    expected = {"name": "get", "arguments": {"city": "Bonn"}}
    conversation = read_conversation(
        {"messages": [USER, {"role": "assistant", "tool_calls": [call]}], "tools": [schema]}
    )
    assert conversation.tools == [schema]
    assert conversation.messages[1] == {
        "role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": expected}],
    }  # fmt: skip
    sharegpt = {
        "system": "be brief",
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": '{"name": "get", "arguments": {"city": "Bonn"}}'},
            {"from": "observation", "value": "sunny"},
        ],
    }
    system, user, assistant, tool = read_conversation(sharegpt).messages
    assert (system["role"], user, tool) == ("system", USER, {"role": "tool", "content": "sunny"})
    assert assistant["tool_calls"] == [{"type": "function", "function": expected}]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"text": "a"}, r"a sample has the keys text; expected messages, conversations, or prompt and completion"),
        ({"messages": "hi"}, r"got messages of type str; expected a list"),
        ({"messages": []}, r"got messages of type list; expected a list of at least one message"),
        ({"messages": ["hi"]}, r"message 0 is a str; expected an object with role and content"),
        ({"messages": [{"role": "user"}]}, r"message 0 has the keys role; expected role, and content or tool_calls"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, r"message 0 is from 'bot'; expected one of system, human"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, r"message 1 has weight 0.5; expected 1, or 0 to exclude it"),
        ({"messages": [USER], "tools": "{"}, r"tools is not JSON"),
        ({"messages": [USER], "tools": {}}, r"tools is a dict; expected a list of JSON schemas"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}, r"which are not JSON"),
    ],
)
def test_samples_in_unsupported_formats_are_refused(sample: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_conversation(sample)


def test_every_supported_format_gives_the_same_pair() -> None:
    other = {"role": "assistant", "content": "go away"}
    for sample in (
        {"prompt": "hi", "chosen": "hello", "rejected": "go away"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [other]},
        {"chosen": [USER, ANSWER], "rejected": [USER, other]},
    ):
        chosen, rejected = read_pair(sample)
        assert (chosen.messages, rejected.messages) == ([USER, ANSWER], [USER, other])
        assert chosen.first_trained == rejected.first_trained == 1


def test_equal_answers_are_refused() -> None:
    with pytest.raises(UserError, match="the chosen and the rejected conversation are equal"):
        read_pair({"prompt": "hi", "chosen": "hello", "rejected": "hello"})
    with pytest.raises(UserError, match="a sample has the keys prompt; expected chosen and rejected"):
        read_pair({"prompt": "hi"})


def test_a_function_call_in_sharegpt_format_keeps_its_weight() -> None:
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {}}', "weight": 0}
    (message,) = read_conversation({"conversations": [call]}).messages
    assert message["weight"] == 0

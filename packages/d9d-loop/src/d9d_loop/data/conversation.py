"""Conversion of conversations in common dataset formats to messages for chat templates."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, final

from d9d_dist import UserError
from d9d_loop.data.json_lines import JsonObject

TooLong: TypeAlias = Literal["refuse", "drop", "truncate"]
"""Treatment of a conversation of more than `max_length` positions."""

ChatLabels: TypeAlias = Literal["assistant", "all"]
"""Tokens of a conversation that contribute to the loss: the assistant's turns, or all tokens except for a `prompt`."""

TextPairs: TypeAlias = Literal["chat", "joined"]
"""Treatment of a `prompt` and a `completion` that are texts: by the chat template, or joined, with an end token."""

Message = dict[str, Any]
"""Message of a chat template: `role` and `content`, and possibly `tool_calls`, `reasoning_content` and others."""

_SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


@final
@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a conversation.

    Attributes:
        tools: JSON schemas of the tools that the assistant may call; None for no tools.
        first_trained: Index of the first message that may contribute to the loss; earlier messages are context.
        is_text_pair: True for a prompt and a completion, or an answer of a pair, that are texts without roles.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    first_trained: int = field(default=0)
    is_text_pair: bool = False

    def to_json(self) -> str:
        """Return the contents as JSON, to compare conversations."""
        return json.dumps([self.messages, self.tools, self.first_trained], default=str)


def read_conversation(sample: Mapping[str, Any]) -> Conversation:
    """Convert a sample to a conversation.

    Formats, by key:

    - `messages`: a list of messages with `role` and `content`; the form of OpenAI and Hugging Face. `tool_calls` may
      have their arguments as JSON text. `weight: 0` excludes an assistant message from the loss.
    - `conversations`: the same, or ShareGPT's `from` and `value`. The value of `function_call` is a JSON object with
      `name` and `arguments`. An additional key `system` has the system message.
    - `prompt` and `completion`: each a text, or a list of messages. Only the completion contributes to the loss.

    An additional key `tools` has a list of JSON schemas, possibly as JSON text.

    A table, such as Parquet or a Hugging Face dataset, gives all objects of a column the same keys, and stores an
    absent key as null. So nulls are removed at any depth, except from a `JsonObject`, from JSON text, and from samples
    in which objects of one list have different keys: no table has these.

    Raises:
        UserError: If the sample has none of these formats, or a message lacks its role or content.
    """
    sample = _without_nulls_of_tables(sample)
    tools = _tools(sample.get("tools"))
    if sample.get("messages") is not None:
        return Conversation(_messages(sample["messages"]), tools)
    if sample.get("conversations") is not None:
        messages = _messages(sample["conversations"])
        if sample.get("system"):
            messages.insert(0, {"role": "system", "content": sample["system"]})
        return Conversation(messages, tools)
    if sample.get("prompt") is not None and sample.get("completion") is not None:
        prompt, is_text = _turn(sample["prompt"], role="user"), isinstance(sample["prompt"], str)
        completion = _turn(sample["completion"], role="assistant")
        is_pair = is_text and isinstance(sample["completion"], str)
        return Conversation([*prompt, *completion], tools, len(prompt), is_pair)
    raise _unknown(sample, "messages, conversations, or prompt and completion")


def read_pair(sample: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
    """Convert a preference sample to its chosen and rejected conversations. Only the answers contribute to the loss.

    `prompt`, `chosen` and `rejected` are each a text, or a list of messages; `chosen` and `rejected` follow `prompt`.
    Without `prompt`, both are whole conversations, and their common first messages are the prompt. `tools` is as in
    `read_conversation`.

    Raises:
        UserError: If `chosen` or `rejected` is missing, one is a prefix of the other, or a message lacks its role or
            content.
    """
    if sample.get("chosen") is None or sample.get("rejected") is None:
        raise _unknown(sample, "chosen and rejected, with or without prompt")
    sample = _without_nulls_of_tables(sample)
    tools = _tools(sample.get("tools"))
    prompt = [] if sample.get("prompt") is None else _turn(sample["prompt"], role="user")
    chosen, rejected = ([*prompt, *_turn(sample[key], role="assistant")] for key in ("chosen", "rejected"))
    num_common = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        num_common += 1
    if num_common == min(len(chosen), len(rejected)):
        raise UserError(
            "the chosen and the rejected conversation are equal, or one is a prefix of the other; expected answers "
            "that differ. Remove the sample."
        )
    first = max(len(prompt), num_common)
    is_text = all(isinstance(sample.get(key), str) for key in ("prompt", "chosen", "rejected"))
    return Conversation(chosen, tools, first, is_text), Conversation(rejected, tools, first, is_text)


def with_parts(message: Message) -> Message:
    """Return a message whose content is a list of parts, as the templates of models with images read it."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def _without_nulls_of_tables(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(sample, JsonObject) or _differ_in_keys([sample]):
        return sample
    return _without_nulls(sample)


def _differ_in_keys(values: list[Any]) -> bool:
    """Return True if values of one column are objects with different keys, or contain such objects at any depth."""
    objects = [value for value in values if isinstance(value, Mapping)]
    if len({frozenset(each) for each in objects}) > 1:
        return True
    columns = [[each[key] for each in objects] for key in (objects[0] if objects else ())]
    columns.append([item for value in values if isinstance(value, list) for item in value])
    return any(_differ_in_keys(column) for column in columns if column)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _messages(values: Any) -> list[Message]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise UserError(f"got messages of type {type(values).__name__}; expected a list of at least one message.")
    return [_message(number, value) for number, value in enumerate(values)]


def _turn(value: Any, *, role: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else _messages(value)


def _message(number: int, value: Any) -> Message:
    if not isinstance(value, Mapping):
        raise UserError(f"message {number} is a {type(value).__name__}; expected an object with role and content.")
    if "role" not in value and "from" in value:
        value = _from_sharegpt(number, value)
    message = {key: each for key, each in value.items() if each is not None}
    if not isinstance(message.get("role"), str) or not ({"content", "tool_calls"} & message.keys()):
        raise UserError(
            f"message {number} has the keys {', '.join(value)}; expected role, and content or tool_calls (or, in the "
            "form of ShareGPT, from and value)."
        )
    if message.get("weight", 1) not in (0, 1):
        raise UserError(
            f"message {number} has weight {message['weight']!r}; expected 1, or 0 to exclude it from the loss."
        )
    message.setdefault("content", "")
    if "tool_calls" in message:
        message["tool_calls"] = [_tool_call(number, call) for call in message["tool_calls"]]
    return message


def _from_sharegpt(number: int, value: Mapping[str, Any]) -> Message:
    role = _SHAREGPT_ROLES.get(value["from"])
    if role is None:
        raise UserError(
            f"message {number} is from {value['from']!r}; expected one of {', '.join(_SHAREGPT_ROLES)}. Rename it."
        )
    content = value.get("value")
    more = {key: value[key] for key in ("weight",) if key in value}
    if value["from"] == "function_call":
        return {"role": role, "tool_calls": [{"type": "function", "function": _json(number, content)}], **more}
    return {"role": role, "content": content, **more}


def _tool_call(number: int, call: Any) -> Any:
    """Return a tool call whose arguments are an object, as templates expect."""
    if not isinstance(call, Mapping):
        raise UserError(f"message {number} has a tool call of type {type(call).__name__}; expected an object.")
    function = call.get("function", call)
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        function = {**function, "arguments": _json(number, function["arguments"])}
    return {**call, "function": function} if "function" in call else function


def _json(number: int, text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise UserError(f"message {number} has the tool arguments {text!r}, which are not JSON: {error}.") from None


def _tools(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise UserError(f"tools is not JSON: {error}; expected a list of JSON schemas.") from None
    if value is not None and not isinstance(value, list):
        raise UserError(f"tools is a {type(value).__name__}; expected a list of JSON schemas.")
    return value or None


def _unknown(sample: Mapping[str, Any], expected: str) -> UserError:
    return UserError(f"a sample has the keys {', '.join(map(str, sample))}; expected {expected}. Rename its keys.")

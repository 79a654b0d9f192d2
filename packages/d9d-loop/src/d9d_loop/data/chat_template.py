"""Chat template of a tokenizer: renders messages to text, as `transformers` does."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.data.conversation import Message

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@final
class ChatTemplate:
    """Jinja template of conversations. Requires the extra `chat`.

    Its environment matches `PreTrainedTokenizerBase.apply_chat_template` of `transformers`: sandboxed, with
    `raise_exception`, `strftime_now`, `tojson`, and the block `{% generation %}`, which is rendered as its contents.

    `special_tokens` are variables of the template, such as `{"bos_token": "<s>"}`.

    Raises:
        UserError: If the template has a syntax error.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source, self.special_tokens = source, dict(special_tokens or {})
        self._compiled = _compile(source)

    def render(
        self, messages: Sequence[Message], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> str:
        """Render messages to text. With `add_generation_prompt`, append the header of an assistant message.

        Raises:
            UserError: If the template cannot render the messages.
        """
        from jinja2 import TemplateError  # noqa: PLC0415 - optional

        try:
            return self._compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except (TemplateError, TypeError, KeyError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UserError(
                f"the chat template cannot render messages with the roles {roles or 'none'}: {error}. Change the "
                "messages or the template."
            ) from None


def read_chat_template(folder: Path, *, for_tools: bool = False) -> ChatTemplate:
    """Read the chat template and the special tokens of a model folder.

    The template is in `chat_template.jinja` or in `tokenizer_config.json`. Of several named templates, the one named
    `tool_use` is used if `for_tools`, else the one named `default`.

    Raises:
        UserError: If the folder has no chat template.
    """
    config = read_json(folder / "tokenizer_config.json")
    tokens = {**read_json(folder / "special_tokens_map.json"), **config}
    named = {key: _content(tokens[key]) for key in _SPECIAL_TOKENS if tokens.get(key)}
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        by_name = {each["name"]: each["template"] for each in source}
        source = by_name.get("tool_use" if for_tools else "default", by_name.get("default"))
    if not isinstance(source, str):
        raise UserError(
            f"{folder} has no chat template, neither chat_template.jinja nor a chat_template in tokenizer_config.json; "
            "expected the folder of a chat model. Write its template to chat_template.jinja."
        )
    return ChatTemplate(source, special_tokens=named)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, Mapping) else token


def _compile(source: str) -> Any:
    if find_spec("jinja2") is None or find_spec("tokenizers") is None:
        raise ModuleNotFoundError(f"chats need jinja2 and tokenizers. Install them: {install_hint('d9d-loop', 'chat')}")
    from jinja2 import TemplateSyntaxError, nodes  # noqa: PLC0415 - optional
    from jinja2.exceptions import TemplateError  # noqa: PLC0415
    from jinja2.ext import Extension, loopcontrols  # noqa: PLC0415
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    class Generation(Extension):
        """Block that marks answers for `transformers`; its contents are rendered as they are."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().astimezone().strftime(pattern)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    functions: dict[str, Any] = {"raise_exception": raise_exception, "strftime_now": strftime_now}
    try:
        return environment.from_string(source, globals=functions)
    except TemplateSyntaxError as error:
        raise UserError(f"the chat template has a syntax error in line {error.lineno}: {error.message}.") from None

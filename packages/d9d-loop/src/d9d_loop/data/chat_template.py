"""Chat template of a tokenizer: renders messages to text, as `transformers` does."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.data.conversation import Message, with_parts
from d9d_loop.data.text_tokenizer import TEMPLATE_FOLDER, read_json, read_special_tokens

TRAINING_DATE = date(2024, 7, 26)
"""Date that `strftime_now` prints in training data. A clock would let ranks and resumed jobs render other texts."""

_BLOCK, BLOCK_END = "endgeneration", "\ufdd0"  # the second one is not a character of texts

# Keys of a message that may hold its thinking, in transformers' order of preference.
_REASONING = ("reasoning_content", "thinking", "reasoning")

# The second probe meets conditions of templates, such as a minimum length or the end of a thinking block.
_PROBES = ("a content", "<think>\nWell.\n</think>\n\n" + "Another content. " * 99)
_FORMS, _SPEAKERS = (dict, with_parts), ("system", "user", "assistant")
_NO_TEXT, _NOTHING, _AS_DATA, _CHANGED, _CONTENT = range(-1, 4)
_FUNCTION, _RESULT = {"name": "f", "arguments": {}}, {"name": "f", "tool_call_id": "0" * 9}
_CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "0" * 9, "type": "function", "function": _FUNCTION}]}


@final
class NoChatTemplateError(UserError):
    """A folder has no chat template."""


@final
class ChatTemplate:
    """Jinja template of conversations. Requires the extra `chat`.

    Its environment matches `PreTrainedTokenizerBase.apply_chat_template` of `transformers`: sandboxed, with
    `raise_exception`, `strftime_now`, `tojson`, and the block `{% generation %}`, which marks the labels of an answer.

    `special_tokens` are variables of the template, such as `{"bos_token": "<s>"}`. `strftime_now` formats `today`, at
    midnight, so that the text is a function of the messages. With `has_parts`, each content is a list of parts, as the
    templates of models with images expect, unless the template reads only texts for the role of the message.

    Raises:
        UserError: If the template has a syntax error.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        today: date = TRAINING_DATE,
        has_parts: bool = False,
    ) -> None:
        self.source, self.special_tokens, self.today = source, dict(special_tokens or {}), today
        self.has_parts = has_parts
        self._compiled, self._form_of = _compile(source, today), cache(self._find_form)

    def __reduce__(self) -> tuple[Any, ...]:
        # Compiled templates cannot be pickled for a data worker.
        options = {"special_tokens": self.special_tokens, "today": self.today, "has_parts": self.has_parts}
        return partial(ChatTemplate, **options), (self.source,)

    @property
    def prints_date(self) -> bool:
        """True if the template may print the date."""
        return "strftime_now" in self.source

    def identity(self) -> str:
        """Return a digest of everything that determines the text, apart from the messages."""
        options = [sorted(self.special_tokens.items()), self.today.isoformat() if self.prints_date else ""]
        options += ["blocks"] if _BLOCK in self.source else []
        return hashlib.sha256(f"{options}\0{self.source}".encode()).hexdigest()

    def _find_form(self, role: str) -> Callable[[Message], Message]:
        """Return the function that converts messages of a role to the form of content that the template reads."""
        text, parts = found = [self._reads(role, form) for form in _FORMS]
        if role == "assistant" and max(found) == _NOTHING:
            raise UserError(
                'the chat template does not write answers, neither a text nor parts {"type": "text", "text": ...}; '
                "expected the text, which the model learns. Change the template."
            )
        if text != parts and max(found) >= _CHANGED:
            return with_parts if parts > text else _with_text
        if max(found) < _CONTENT and role != "user":  # undecided: use the form of a user's message
            form = self._form_of("user")
            return _with_text if form is with_parts and self._reads("user", dict) == _CONTENT else form
        return with_parts if self.has_parts else dict if text == _CONTENT else _with_text

    def _reads(self, role: str, form: Callable[[Message], Message]) -> int:
        """Return how a template writes the content of a message, from `_NO_TEXT` (it raises an error) to `_CONTENT`."""
        more, found = {} if role in _SPEAKERS else _RESULT, _NO_TEXT
        probes = [form({"role": role, "content": probe, **more}) for probe in _PROBES]
        starts = [[each({"role": "user", "content": "."}), each(_CALL)] for each in _FORMS]
        for before in (*(starts if more else ()), *(start[:1] for start in starts), ()):
            # A system message comes first: templates may read a later one in another form.
            tried = [[probe, *before] if role == "system" else [*before, probe] for probe in probes]
            try:
                text, other = (self._compiled.render(messages=each, **self.special_tokens).lower() for each in tried)
            except Exception:  # noqa: S112 - of a template that cannot read it
                continue
            if _PROBES[0] in text:
                is_data = f"text': '{_PROBES[0]}" in text or f'text": "{_PROBES[0]}' in text
                return _AS_DATA if is_data else _CONTENT
            found = max(found, _NOTHING if text == other else _CHANGED)
        return found

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
        options: Mapping[str, Any] | None = None,
        marked: bool = False,
    ) -> str:
        """Render messages to text. With `add_generation_prompt`, append the header of an assistant message.

        With `marked`, `BLOCK_END` is at both ends of each block, or of the whole text if the template has no block.
        `options` are further variables. A content gets the form that the template reads for its role: text or parts.

        Raises:
            UserError: If the template cannot render the messages.
        """
        from jinja2 import TemplateError  # noqa: PLC0415 - optional

        formed = [self._form_of(str(each.get("role")))(each) for each in messages]
        try:
            text = self._compiled.render(
                messages=list(map(_with_reasoning, formed)),
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self.special_tokens, **(options or {})},
            )
        except (TemplateError, TypeError, KeyError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UserError(
                f"the chat template cannot render messages with the roles {roles or 'none'}: {error}. Change the "
                "messages or the template."
            ) from None
        end = "" if _BLOCK in self.source else BLOCK_END
        return f"{end}{text}{end}" if marked else text.replace(BLOCK_END, "")


def read_chat_template(
    folder: Path,
    *,
    for_tools: bool = False,
    special_tokens: Mapping[str, str] | None = None,
    today: date = TRAINING_DATE,
    has_parts: bool = False,
) -> ChatTemplate:
    """Read the chat template of a model folder, and its special tokens unless they are given.

    The first of these has it: `chat_template.jinja` or `additional_chat_templates`, `tokenizer_config.json`, as in
    `AutoTokenizer`, `chat_template.json`, `processor_config.json`. With `has_parts`, `processor_config.json`, then
    `chat_template.json`, come first, as in `AutoProcessor`. Of several named templates, the one named `tool_use` is
    used if `for_tools`, else the one named `default`.

    Raises:
        NoChatTemplateError: If the folder has no chat template.
        UserError: If the template has a syntax error.
    """
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    named: dict[str, Any] = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    names = ("processor_config.json", "chat_template.json", "tokenizer_config.json")
    processor, legacy, tokenizer = (read_json(folder / name).get("chat_template") for name in names)
    own = (processor or legacy) if has_parts else None
    if own or not named:
        found = own or tokenizer or legacy or processor
        listed = {each["name"]: each["template"] for each in found} if isinstance(found, list) else found
        named = listed if isinstance(listed, dict) else {"default": found}
    source = named.get("tool_use" if for_tools else "default", named.get("default"))
    if not isinstance(source, str):
        raise NoChatTemplateError(
            f"{folder} has no chat template; expected the folder of a chat model, with chat_template.jinja, or chat_"
            "template in tokenizer_config.json. Write its template to chat_template.jinja."
        )
    special = read_special_tokens(folder) if special_tokens is None else special_tokens
    return ChatTemplate(source, special_tokens=special, today=today, has_parts=has_parts)


def _with_text(message: Message) -> Message:
    parts = message["content"]
    if not isinstance(parts, list):
        return message
    texts = [one.get("text", None if "type" in one else one) if isinstance(one, Mapping) else one for one in parts]
    if all(isinstance(text, str) for text in texts):
        return {**message, "content": "".join(texts)}
    if None in texts or message["role"] in _SPEAKERS:
        raise UserError(
            f"a message of the role {message['role']} has a part that is not a text; expected texts, because the chat "
            "template reads no other parts. Remove the part."
        )
    return message  # data that a tool returned


def _with_reasoning(message: Message) -> Message:
    """Return a message whose thinking has the names that templates read, as `apply_chat_template` does."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _compile(source: str, today: date) -> Any:
    if find_spec("jinja2") is None or find_spec("tokenizers") is None:
        raise ModuleNotFoundError(f"chats need jinja2 and tokenizers. Install them: {install_hint('d9d-loop', 'chat')}")
    from jinja2 import TemplateSyntaxError, nodes  # noqa: PLC0415 - optional
    from jinja2.exceptions import TemplateError  # noqa: PLC0415
    from jinja2.ext import Extension, loopcontrols  # noqa: PLC0415
    from jinja2.sandbox import ImmutableSandboxedEnvironment as Sandbox  # noqa: PLC0415

    class Generation(Extension):
        """Block that marks the labels of an answer."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            end = nodes.Output([nodes.TemplateData(BLOCK_END)], lineno=line)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return [end, nodes.Scope(body, lineno=line), end]

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    strftime_now = datetime.combine(today, time()).strftime
    functions: dict[str, Any] = {"raise_exception": raise_exception, "strftime_now": strftime_now}
    try:
        return environment.from_string(source, globals=functions)
    except TemplateSyntaxError as error:
        raise UserError(f"the chat template has a syntax error in line {error.lineno}: {error.message}.") from None

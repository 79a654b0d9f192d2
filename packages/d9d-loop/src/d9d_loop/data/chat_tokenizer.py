"""Tokens of conversations with a loss mask, which is verified if only the assistant's turns contribute to the loss."""

import copy
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, final

from pydantic import JsonValue

from d9d_dist import UserError
from d9d_dist.errors import check_choice
from d9d_loop.data.chat_template import BLOCK_END, TRAINING_DATE, ChatTemplate, read_chat_template
from d9d_loop.data.conversation import ChatLabels, Conversation, TextPairs
from d9d_loop.data.text_tokenizer import TextTokenizer, listed_ids, read_json, read_text_tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

Span = tuple[int, int]
"""Characters [start, stop) of a text."""

_TURNS = Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
_GREEN, _DIM, _RESET = "\033[1;32m", "\033[2m", "\033[0m"


@final
@dataclass(frozen=True, slots=True)
class ChatTokens:
    """Tokens of a conversation.

    Attributes:
        mask: True for each token that contributes to the loss as a label. The tokens end with such a token.
        spans: Character ranges [start, stop) of `text` that contribute to the loss.
    """

    tokens: list[int]
    mask: list[bool]
    text: str
    spans: list[Span]


@final
class ChatTokenizer:
    """Tokenizer of conversations: renders them with a chat template, tokenizes the text, and derives the loss mask.

    An assistant turn starts where the text of the previous messages with the generation prompt ends, and ends with its
    stop token. These positions are verified for each conversation:

    - The template is prefix-preserving: the text of the first messages is a prefix of the whole text. Templates that
      drop the thinking of earlier turns are accepted; the text and the loss do not contain the dropped thinking.
    - No token contains both the end of a prompt and the start of an answer.
    - A special token ends each turn, and contributes to the loss. Text after it, such as a newline, does not.
    - If the template has blocks `{% generation %}`, only tokens of answers in a block contribute to the loss.
    - Some tokens contribute to the loss, and some do not.

    Args:
        stop_tokens: Texts of further tokens that may end a turn, if the tokenizer does not list them as special.
        thinking: Text that opens a thinking block, and text that closes it.
        labels: `all` makes all tokens contribute to the loss, except for a `prompt` and messages with `weight: 0`.
            Only the ends of these are verified in this case.
        text_pairs: `joined` tokenizes a `prompt` and a `completion` that are texts as one text, followed by the end
            token, without the chat template.

    Raises:
        UserError: If a stop token is not in the vocabulary, or text pairs are joined by a tokenizer without end token.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer | TextTokenizer",
        template: ChatTemplate,
        *,
        stop_tokens: Iterable[str] = (),
        thinking: tuple[str, str] = ("<think>", "</think>"),
        tool_template: ChatTemplate | None = None,
        labels: ChatLabels = "assistant",
        text_pairs: TextPairs = "chat",
    ) -> None:
        check_choice("labels", labels, ChatLabels)
        check_choice("text_pairs", text_pairs, TextPairs)
        self._labels, self._text_pairs = labels, text_pairs
        self.text_tokenizer = (
            tokenizer if isinstance(tokenizer, TextTokenizer) else TextTokenizer(copy.deepcopy(tokenizer))
        )
        self._template, self._tool_template = template, tool_template or template
        self._stops = self.text_tokenizer.special_ids()
        for token in (*stop_tokens, *filter(None, [template.special_tokens.get("eos_token")])):
            if (number := self.text_tokenizer.token_id(token)) is None:
                raise UserError(f"the stop token {token!r} is not in the vocabulary; expected one of its tokens.")
            self._stops.add(number)
        first, last = map(re.escape, thinking)
        self._block = re.compile(rf"{first}.*?{last}\s*", re.DOTALL)
        self._open_block = re.compile(rf"{first}\s*(?:{last}\s*)?\Z")
        self._empty_block = re.compile(rf"{first}\s*{last}\s*")
        stops = "|".join(re.escape(self.text_tokenizer.token(number) or "") for number in sorted(self._stops))
        self._only_stops = re.compile(rf"(?:{stops or '(?!)'}|\s)*\Z")
        self._first_stop = re.compile(stops or "(?!)")
        self._options = [sorted(self._stops), list(thinking), labels, text_pairs]
        self._end = self.text_tokenizer.special_tokens.get("eos_token", "")
        if text_pairs == "joined" and not self._end:
            raise UserError(
                'text_pairs = "joined", but the tokenizer names no eos_token; expected one. Set it in '
                "tokenizer_config.json."
            )

    @property
    def vocab_size(self) -> int:
        """Largest token id plus one."""
        return self.text_tokenizer.vocab_size

    @property
    def prints_date(self) -> bool:
        """True if a template may print the date."""
        return self._template.prints_date or self._tool_template.prints_date

    def identity(self) -> JsonValue:
        """Return a digest of everything that determines the tokens."""
        templates = (self._template.identity(), self._tool_template.identity())
        parts = (self.text_tokenizer.identity(), *templates, str(self._options))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def __call__(self, conversation: Conversation) -> ChatTokens:
        """Tokenize a conversation, up to the last token that contributes to the loss.

        Raises:
            UserError: If the mask cannot be verified. The message shows the text with the mask.
        """
        if conversation.is_text_pair and self._text_pairs == "joined":
            if len(conversation.messages) > 2:
                raise UserError(
                    'a sample has a system message, but text_pairs = "joined" joins a prompt and an answer alone; '
                    "expected no system message. Write it into the prompt, or remove it."
                )
            return self._joined(*(each["content"] for each in conversation.messages))
        marked = self._render(conversation, len(conversation.messages), marked=True)
        text = marked.replace(BLOCK_END, "")
        if self._labels == "all":
            first = conversation.first_trained
            prompt = self._render(conversation, first, answer=True) if first else ""
            weights = enumerate(each.get("weight", 1) for each in conversation.messages)
            excluded = [self._turn(conversation, n, text, []) for n, weight in weights if n >= first and not weight]
            ids, encoding = self.text_tokenizer.encode_offsets(prompt).ids, self.text_tokenizer.encode_offsets(text)
            return _after(ids, encoding, text, excluded)
        encoding = self.text_tokenizer.encode_offsets(text)
        trained = [False] * len(encoding.ids)
        spans: list[Span] = []
        ends = [end.start() - number for number, end in enumerate(re.finditer(BLOCK_END, marked))]
        unused = blocks = [each for each in zip(ends[::2], ends[1::2], strict=True) if each[0] < each[1]]
        for number in [number for number, each in enumerate(conversation.messages) if each["role"] == "assistant"]:
            start, stop = self._turn(conversation, number, text, spans)
            unused = [(first, last) for first, last in unused if last <= start or stop <= first]
            own = [(max(first, start), min(last, stop)) for first, last in blocks if start < last and first < stop]
            for part in own:
                first, last = self._tokens_of(part, encoding, text, [*spans, part], is_end=part == own[-1])
                if number >= conversation.first_trained and conversation.messages[number].get("weight", 1):
                    trained[first : last + 1] = [True] * (last + 1 - first)
                    spans.append((part[0], encoding.offsets[last][1]))
        if not any(trained):
            _refuse("no assistant message contributes to the loss; expected one with a weight other than 0", text, [])
        if unused:
            _refuse("a block {% generation %} is not in an answer; expected only answers. Move it", text, unused)
        if all(trained):
            _refuse("every token contributes to the loss; expected a prompt, which does not", text, spans)
        length = len(trained) - trained[::-1].index(True)
        return ChatTokens(encoding.ids[:length], trained[:length], text, spans)

    def _joined(self, prompt: str, completion: str) -> ChatTokens:
        """Return the tokens of a prompt and its completion as one text with an end token."""
        text = prompt + completion
        text += "" if completion.endswith(self._end) else self._end
        return _after(
            self.text_tokenizer.encode(prompt), self.text_tokenizer.encode_offsets(text, adds_special=True), text
        )

    def prompt(self, text: str) -> tuple[str, list[int]]:
        """Return the text and the tokens of a user's message, and of the header of its answer."""
        rendered = self._render(Conversation([{"role": "user", "content": text}]), 1, answer=True)
        return rendered, self.text_tokenizer.encode_offsets(rendered).ids

    def render(self, conversation: Conversation) -> str:
        """Return the text of a conversation."""
        return self._render(conversation, len(conversation.messages))

    def end_of_turn(self) -> int:
        """Return the token that ends an answer; raise `UserError` if the template does not end it with a token."""
        return self(_TURNS).tokens[-1]

    def _render(self, conversation: Conversation, num_messages: int, *, answer: bool = False, **more: bool) -> str:
        if conversation.is_split:
            raise UserError(
                "a pair has texts without a prompt, which a chat template cannot render; expected a prompt. Set "
                'dataset.text_pairs = "joined", which trains on the texts as they are, or write prompt, or messages.'
            )
        template = self._template if conversation.tools is None else self._tool_template
        options: dict[str, Any] = {"tools": conversation.tools, "options": conversation.template_options, **more}
        return template.render(conversation.messages[:num_messages], add_generation_prompt=answer, **options)

    def _turn(self, conversation: Conversation, number: int, text: str, spans: list[Span]) -> Span:
        """Return the characters of a message, including the text that the template appends to it.

        The characters of an assistant message are those after its header.
        """
        is_answer = conversation.messages[number]["role"] == "assistant"
        prompt = self._render(conversation, number, answer=is_answer) if number or is_answer else ""
        without = self._block.sub("", prompt)
        # If the prompt opens a thinking block, which the template drops from the text, the turn starts before it.
        starts = [prompt, self._open_block.sub("", prompt), without, self._open_block.sub("", without)]
        start = next((len(each) for each in starts if text.startswith(each)), None)
        if start is None:
            _refuse(
                f"the chat template is not prefix-preserving: message {number} changes the text of the messages before "
                f"it. Without this message, it ends with {prompt[-40:]!r}; expected a template that only appends",
                text,
                spans,
            )
        turn = self._render(conversation, number + 1)
        stop = self._end_of_turn(text, turn, start)
        if stop is None:
            _refuse(
                f"the chat template is not prefix-preserving: the messages after message {number} change its text. "
                f"Without them, the text ends with {turn[-40:]!r}; expected a template that only appends",
                text,
                [*spans, (start, start)],
            )
        return start, stop

    def _end_of_turn(self, text: str, turn: str, start: int) -> int | None:
        """Return the end of a turn in the whole text. `turn` is the text of the messages up to this turn.

        Return None if the whole text does not start with `turn`, apart from dropped thinking and stop tokens.
        """
        for same in (turn, self._block.sub("", turn)):
            if len(same) > start and text.startswith(same):
                return len(same)
        if turn[:start] != text[:start]:
            return None
        # The template drops the thinking of this turn from the text, or leaves an empty block.
        empty = self._empty_block.match(text, start)
        first, bare = empty.end() if empty else start, self._block.sub("", turn[start:])
        if text.startswith(bare, first):
            return first + len(bare)
        # The template ends the last turn of a text with a different stop token, or with an additional one.
        stop = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(turn, text, strict=False)))
        cut = [token.start() for token in self._first_stop.finditer(turn) if token.start() < stop < token.end()]
        stop = cut[0] if cut else stop
        if stop <= start or not self._only_stops.match(turn, stop):
            return None
        ends = [token.end() for token in self._first_stop.finditer(text, start, stop)]
        if ends and not text[ends[-1] : stop].strip():
            return stop
        following = self._first_stop.match(text, stop)
        return None if following is None else following.end()

    def _tokens_of(self, span: Span, encoding: Any, text: str, spans: list[Span], *, is_end: bool) -> tuple[int, int]:
        """Return the indices of a part's first token and of its stop token; of its last token unless it ends a turn."""
        start, stop = span
        last_stop, first = None, None
        for index, (begin, end) in enumerate(encoding.offsets):
            if begin < start < end:
                _refuse(
                    f"the token {text[begin:end]!r} is partly prompt and partly answer; expected a generation prompt "
                    "that ends where a token ends. Remove trailing space from the template's generation prompt",
                    text,
                    spans,
                )
            if start <= begin and end <= stop and begin < end:
                first = index if first is None else first
                last_stop = index if encoding.ids[index] in self._stops or not is_end else last_stop
        if first is None or last_stop is None or text[encoding.offsets[last_stop][1] : stop].strip():
            _refuse(
                f"a turn ends with {text[start:stop][-40:]!r}, which is not a special token, so the model would not "
                "learn to stop; expected a template that ends turns with a special token. Correct the template, or "
                "name the token in stop_tokens",
                text,
                spans,
            )
        return first, last_stop


def read_chat_tokenizer(
    folder: str | Path,
    *,
    stop_tokens: Iterable[str] = (),
    today: date = TRAINING_DATE,
    labels: ChatLabels = "assistant",
    text_pairs: TextPairs = "chat",
    has_parts: bool = False,
) -> ChatTokenizer:
    """Read the tokenizer and the chat template of a model folder. Requires the extra `chat`.

    The folder has the files of a tokenizer, and a chat template; see `read_text_tokenizer` and `read_chat_template`.
    For `stop_tokens`, `labels` and `text_pairs`, see `ChatTokenizer`; for `has_parts`, `ChatTemplate`. `today` is the
    date of templates that print it.

    Raises:
        UserError: If a file is missing or invalid.
    """
    path = Path(folder)
    tokenizer = read_text_tokenizer(path)
    options: dict[str, Any] = {"special_tokens": tokenizer.special_tokens, "today": today, "has_parts": has_parts}
    template, tool_template = (read_chat_template(path, for_tools=each, **options) for each in (False, True))
    named = map(tokenizer.token, listed_ids(read_json(path / "generation_config.json").get("eos_token_id")))
    return ChatTokenizer(
        tokenizer,
        template,
        stop_tokens=[*stop_tokens, *filter(None, named)],
        tool_template=tool_template,
        labels=labels,
        text_pairs=text_pairs,
    )


def _after(prompt: list[int], encoding: "Encoding", text: str, excluded: Sequence[Span] = ()) -> ChatTokens:
    """Return the tokens of a text. Those after the common prefix with `prompt`, outside of `excluded`, are trained."""
    num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, encoding.ids, strict=False)))
    mask = [number >= num_common for number in range(len(encoding.ids))]
    for start, stop in excluded:
        mask = [
            each and not begin < stop > start < end for each, (begin, end) in zip(mask, encoding.offsets, strict=True)
        ]
    if not any(mask):
        _refuse("no token follows the prompt; expected a completion, with a weight other than 0", text, [])
    length = len(mask) - mask[::-1].index(True)
    starts = [encoding.offsets[num_common][0], *(stop for _, stop in excluded)]
    spans = zip(starts, [*(start for start, _ in excluded), len(text)], strict=True)
    return ChatTokens(encoding.ids[:length], mask[:length], text, [span for span in spans if span[0] < span[1]])


def mark_spans(text: str, spans: Sequence[Span], *, in_color: bool = False) -> str:
    """Return the text with its spans, in ascending order, in brackets ⟦ ⟧.

    With `in_color`, use terminal colors instead: the spans are green, the other parts dimmed.
    """
    around, rest = (f"{_GREEN}{{}}{_RESET}", f"{_DIM}{{}}{_RESET}") if in_color else ("⟦{}⟧", "{}")
    parts: list[str] = []
    before = 0
    for start, stop in spans:
        parts += [rest.format(text[before:start])] if start > before else []
        parts.append(around.format(text[start:stop]))
        before = stop
    return "".join(parts) + (rest.format(text[before:]) if before < len(text) else "")


def _refuse(problem: str, text: str, spans: list[Span]) -> NoReturn:
    raise UserError(f"{problem}. The text, with ⟦parts in the loss⟧:\n{mark_spans(text, spans)}")

"""Tokenizer of all routes from text to tokens: jobs, token files, prompts, chats and scores use this class alone.

The tokens of a text are those of `transformers.AutoTokenizer` on the same folder. Truncation and padding that are
stored in `tokenizer.json` are settings of a call, so they are never applied.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

END_TOKEN = "<|endoftext|>"  # noqa: S105 - it is a token of text
NUM_BYTES = 256
_VERSION = 1
"""Version of the rules in this file. Increase it if equal files give other tokens."""

_VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "tekken.json", "tiktoken.model"),
    *("vocab.json", "vocab.txt"),
)
TOKENIZER_FILES = (
    *(*_VOCABULARIES, "merges.txt", "added_tokens.json", "special_tokens_map.json"),
    *("tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)
"""Files of a model folder that belong to its tokenizer, or to its image processor.

Further chat templates are in `TEMPLATE_FOLDER`.
"""

TEMPLATE_FOLDER = "additional_chat_templates"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Entries of tokenizer_config.json that change tokens, and that only transformers applies.
_OF_TRANSFORMERS = ("add_bos_token", "add_eos_token", "extra_special_tokens", "split_special_tokens")
_GENERIC_CLASSES = (None, "PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend")


@final
class TextTokenizer:
    """Tokenizer of a model folder or of a `tokenizer.json`. Requires `tokenizers`; settings of a folder need more.

    Use `read_text_tokenizer` to read one from files.

    Attributes:
        special_tokens: Special tokens that the folder names, such as `{"eos_token": "</s>"}`.
        bos_id, eos_id, pad_id: Ids of these tokens; None for those that the folder does not name.

    Args:
        backend: Tokenizer of the package `tokenizers`; None if `auto` has none. Its truncation and padding are removed.
        auto: Tokenizer of `transformers` that `backend` belongs to, if there is one.
        special: Special tokens of the folder, if there is no `auto`.
        digest: Digest of the files that `auto` read, if there is no `backend`.
    """

    def __init__(
        self,
        backend: "Tokenizer | None",
        *,
        auto: Any = None,
        special: Mapping[str, str] | None = None,
        digest: str = "",
    ) -> None:
        self._backend, self._auto, self._digest = backend, auto, digest
        if backend is not None:
            normalize_tokenizer(backend)
        self._splits_special = bool(getattr(auto, "split_special_tokens", False))
        self.special_tokens: dict[str, str] = dict(special or {}) if auto is None else dict(auto.special_tokens_map)
        named = (self.special_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token"))
        self.bos_id, self.eos_id, self.pad_id = (None if each is None else self.token_id(each) for each in named)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._backend is not None:
            self._backend.encode_special_tokens = self._splits_special  # a pickled Tokenizer lacks it

    @property
    def vocab_size(self) -> int:
        """Largest token id plus one."""
        return max(self.vocabulary().values()) + 1

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of all tokens, added tokens included."""
        return self._auto.get_vocab() if self._backend is None else self._backend.get_vocab(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None if the vocabulary does not have it."""
        return self.vocabulary().get(token) if self._backend is None else self._backend.token_to_id(token)

    @property
    def end_id(self) -> int | None:
        """Id of the token that ends a text: the end token that the folder names, or else `<|endoftext|>`."""
        return self.eos_id if self.eos_id is not None else self.token_id(END_TOKEN)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the special tokens that the tokenizer adds."""
        if self._backend is None:
            return list(self._auto(text, truncation=False, padding=False).input_ids)
        return self._backend.encode(text).ids

    def encode_documents(self, texts: Sequence[str], *, end: int | None = None) -> list[list[int]]:
        """Return the tokens of documents for pretraining. If `end` is a token id, each document ends with it once."""
        if self._backend is None:
            documents = [self.encode(text) for text in texts]
        else:
            documents = [each.ids for each in self._backend.encode_batch_fast(list(texts))]
        return [ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in documents]

    def encode_cut(self, text: str, max_length: int) -> list[int]:
        """Return at most `max_length` tokens of a text, special tokens included, as `transformers` truncates.

        Raises:
            UserError: If the special tokens alone are longer.
        """
        if self._backend is None:
            return list(self._auto(text, truncation=True, max_length=max_length, padding=False).input_ids)
        room = max_length - self._backend.num_special_tokens_to_add(False)
        if room < 1:
            raise UserError(
                f"a length of {max_length} tokens leaves no room for a text, because the tokenizer adds "
                f"{max_length - room} special tokens; expected at least {max_length - room + 1}. Increase the length."
            )
        encoding = self._backend.encode(text, add_special_tokens=False)
        encoding.truncate(room, direction=getattr(self._auto, "truncation_side", "right"))
        return self._backend.post_process(encoding).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text that a model continues: without the special tokens that end a text."""
        if self._backend is None:
            return self.encode(text)
        encoding = self._backend.encode(text)
        added = encoding.special_tokens_mask
        while added and added[-1]:
            added.pop()
        return encoding.ids[: len(added)]

    def encode_offsets(self, text: str, *, adds_special: bool = False) -> "Encoding":
        """Return the tokens of a text, with the characters that each one covers.

        The template of a rendered chat has written all special tokens. With `adds_special`, the tokens are those of
        `encode`.

        Raises:
            UserError: If the tokenizer cannot say which characters a token covers.
        """
        if self._backend is None:
            raise UserError(
                f"{type(self._auto).__name__} has no character offsets; expected a tokenizer with tokenizer.json. "
                "Convert it with transformers (save_pretrained), or choose another tokenizer."
            )
        return self._backend.encode(text, add_special_tokens=adds_special)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        if self._auto is not None:
            return str(self._auto.decode(list(ids), skip_special_tokens=skip_special_tokens))
        assert self._backend is not None
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def special_ids(self) -> set[int]:
        """Return the ids of all special tokens."""
        if self._backend is None:
            return set(self._auto.all_special_ids)
        return {number for number, token in self._backend.get_added_tokens_decoder().items() if token.special}

    def token(self, number: int) -> str | None:
        """Return the token of an id; None if there is no such token."""
        return self._auto.convert_ids_to_tokens(number) if self._backend is None else self._backend.id_to_token(number)

    def identity(self) -> str:
        """Return a digest of everything that determines the tokens of a text."""
        contents = self._digest if self._backend is None else self._backend.to_str()
        return hashlib.sha256(f"{[_VERSION, self._splits_special]}\0{contents}".encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write files from which `AutoTokenizer` reads this tokenizer in any model folder; keep its other settings."""
        assert self._backend is not None
        self._backend.save(str(folder / "tokenizer.json"))
        named = {"bos_token": self.bos_id, "eos_token": self.end_id, "pad_token": self.pad_id}
        config = read_json(folder / "tokenizer_config.json") | {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= {name: self.token(number) for name, number in named.items() if number is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def of_bytes(cls, *, with_end: bool = True) -> Self:
        """Return a tokenizer whose tokens are bytes, for models without files. Token 256 is `<|endoftext|>`."""
        check_tokenizers()
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - optional

        backend = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        if with_end:
            backend.add_special_tokens([END_TOKEN])
        return cls(backend)


def _byte_vocabulary() -> dict[str, int]:
    """Return the vocabulary of a byte-level tokenizer: the character that stands for each byte, with the byte as id."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(NUM_BYTES) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(NUM_BYTES + n) for n, byte in enumerate(hidden)}
    return {letter: byte for byte, letter in letters.items()}


def normalize_tokenizer(backend: "Tokenizer") -> None:
    """Disable truncation, padding and the trimming of offsets, which would exclude the spaces of a token.

    Replace a missing post-processor, as transformers does, so that digests are equal.
    """
    from tokenizers import processors  # noqa: PLC0415 - optional

    backend.no_truncation()
    backend.no_padding()
    if backend.post_processor is None:
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    found: Any = backend.post_processor
    for each in found if isinstance(found, processors.Sequence) else [found]:
        if hasattr(each, "trim_offsets"):
            each.trim_offsets = False


def read_text_tokenizer(path: str | Path, *, key: str = "model.tokenizer") -> TextTokenizer:
    """Read the tokenizer of a model folder, or of one file.

    A path that ends with `tokenizer.json` stands for its folder, whose settings apply. A file of another name is a
    tokenizer without settings. `transformers` reads a folder with settings; only if the settings change no tokens, the
    package `tokenizers` suffices.

    Raises:
        UserError: If there is no tokenizer or it cannot be read, or if it needs `transformers`, which is not installed.
            The message names the configuration `key`.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent if path.name == "tokenizer.json" else None
    if folder is None and not path.is_file():
        raise UserError(f"the tokenizer {path} does not exist; expected a tokenizer.json or a model folder. Set {key}.")
    if folder is not None and not any((folder / name).is_file() for name in _VOCABULARIES):
        raise UserError(
            f"{folder / 'tokenizer.json'} does not exist; expected the tokenizer of the model, or the folder of a "
            f"model with its tokenizer.json. Set {key}."
        )
    if folder is not None and find_spec("transformers") is not None and _has_settings(folder):
        return _read_with_transformers(folder)
    backend = _read_backend(path if folder is None else folder / "tokenizer.json")
    return TextTokenizer(backend, special=None if folder is None else _plain_settings(folder, backend))


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens that the settings of a folder name."""
    tokens = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    return {name: _content(tokens[name]) for name in _SPECIAL_TOKENS if tokens.get(name)}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is no file. Raise `UserError` for a damaged file."""
    with suppress(ValueError):
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if isinstance(found, dict):
            return found
    raise UserError(f"{path} is damaged; expected a JSON object. Restore the file.")


def listed_ids(found: int | Sequence[int | None] | None) -> list[int]:
    """Return the ids of an entry such as `eos_token_id`, which is one id, a list or null, without repetitions."""
    ids = found if isinstance(found, Sequence) else [found]
    return list(dict.fromkeys(each for each in ids if each is not None))


def check_tokenizers() -> None:
    """Raise `ModuleNotFoundError` if `tokenizers` is not installed."""
    if find_spec("tokenizers") is None:
        raise ModuleNotFoundError(
            f"tokenizing needs the package tokenizers. Install it: {install_hint('d9d-loop', 'tokenizers')}"
        )


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, Mapping) else token


def _has_settings(folder: Path) -> bool:
    return not (folder / "tokenizer.json").is_file() or any((folder / name).is_file() for name in _SETTINGS)


def _read_backend(file: Path) -> "Tokenizer":
    check_tokenizers()
    from tokenizers import Tokenizer  # noqa: PLC0415 - optional

    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise UserError(f"{file} is not a tokenizer.json: {error}. Download it again.") from None
    _check_added_ids(file, backend)
    return backend


def _check_added_ids(file: Path, backend: "Tokenizer") -> None:
    """Raise `UserError` if tokens have other ids than in the file: tokenizers numbers added tokens without gaps."""
    for token in read_json(file).get("added_tokens", []):
        if (number := backend.token_to_id(token["content"])) != token["id"]:
            raise UserError(
                f"{file}: the added token {token['content']!r} has the id {token['id']}, but tokenizers reads it as "
                f"{number}, because it numbers added tokens without gaps. Add tokens for the missing ids, or correct "
                "the id."
            )


def _read_with_transformers(folder: Path) -> TextTokenizer:
    from transformers import AutoTokenizer

    file = folder / "tokenizer.json"
    try:
        auto: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises exceptions of many libraries
        if file.is_file():
            _read_backend(file)  # if this file is the problem, the error names it
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"transformers cannot read the tokenizer of {folder}: {why} Expected a folder that "
            "AutoTokenizer.from_pretrained reads without remote code. Download it again, or save it with transformers."
        ) from error
    if (backend := getattr(auto, "backend_tokenizer", None)) is not None:
        _check_added_ids(file, backend)
        return TextTokenizer(backend, auto=auto)
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    digest = "".join(f"{file.name}:{hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files)
    return TextTokenizer(None, auto=auto, digest=type(auto).__name__ + digest)


def _plain_settings(folder: Path, backend: "Tokenizer") -> dict[str, str]:
    """Return the special tokens of a folder. Raise `UserError` if only `transformers` gives its right tokens."""
    config, special = read_json(folder / "tokenizer_config.json"), read_special_tokens(folder)
    changed = [name for name in _OF_TRANSFORMERS if config.get(name)]
    added = [_content(token) for token in config.get("added_tokens_decoder", {}).values()]
    changed += [token for token in (*added, *special.values()) if backend.token_to_id(token) is None]
    is_generic = config.get("tokenizer_class") in _GENERIC_CLASSES if config else not _has_settings(folder)
    changed += [] if is_generic else ["tokenizer_class"]
    if changed:
        raise UserError(
            f"{folder / 'tokenizer_config.json'}: {', '.join(changed)} needs the package transformers, which is not "
            f"installed. Install it: {install_hint('d9d-loop', 'transformers')}"
        )
    return special

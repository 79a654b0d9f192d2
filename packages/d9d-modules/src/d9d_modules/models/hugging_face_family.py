"""`config.json` of a family as data: entries that set hyperparameters, and entries with one valid value."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Generic, Literal, assert_never, final

from d9d_dist.errors import UserError
from d9d_modules.models.decoder_hugging_face import decoder_from_hugging_face
from d9d_modules.models.decoder_parallelize import parallelize_decoder
from d9d_modules.models.decoder_params import RopeScaling
from d9d_modules.models.hugging_face_config import (
    HuggingFaceConfig,
    config_keys_in_errors,
    config_value,
    require_known_keys,
    require_value,
)
from d9d_modules.models.hugging_face_irrelevant import IRRELEVANT
from d9d_modules.models.hugging_face_quantization import quantization_from_hugging_face
from d9d_modules.models.hugging_face_rope import (
    ROPE_ENTRIES,
    P,
    rope_from_hugging_face,
    rope_to_hugging_face,
    rotary_factor_from_hugging_face,
    without_ntk,
)
from d9d_state import JsonValue, StateMapper


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of `config.json` that sets one hyperparameter.

    Attributes:
        field: Name of the hyperparameter.
        key: Name of the entry.
        kind: Type of the value.
        default: Default value, or a function that computes it from the preceding hyperparameters; with a function, null
            also counts as missing. None: the entry is required.
        minimum: Smallest valid number; None requires a number above 0.
        alias: Second name of the entry; a configuration may use one name, or both with equal values.
    """

    field: str
    key: str
    kind: type[int] | type[float] | type[bool] = int
    default: float | Callable[[Mapping[str, Any]], int] | None = None
    minimum: float | None = None
    alias: str | None = None

    def key_in(self, config: HuggingFaceConfig) -> str:
        """Return the name under which a configuration has the entry.

        Raises:
            UserError: If the entry has an alias and is missing, has another type, or differs between both names.
        """
        if self.alias is None:
            return self.key
        found = {name: config_value(config, name, self.kind) for name in (self.key, self.alias) if name in config}
        if not found:
            raise UserError(f"config.json has no {self.key!r} or {self.alias!r}; expected one of them.")
        if len(set(found.values())) > 1:
            raise UserError(
                f"config.json has {self.key} = {config[self.key]} and {self.alias} = {config[self.alias]}; expected "
                "equal numbers. Correct one of the entries, or remove it."
            )
        return [*found][-1]

    def read(self, config: HuggingFaceConfig, values: Mapping[str, Any]) -> Any:
        """Read the value, given the preceding hyperparameters; errors as in `config_value`."""
        key = self.key_in(config)
        default: Any = self.default
        if callable(default):
            default = default(values)
            config = {} if config.get(key) is None else config
        return config_value(config, key, self.kind, default=default, minimum=self.minimum)


def split_head_dim(values: Mapping[str, Any]) -> int:
    """Return the default size of a head: the width divided by the number of heads."""
    return values["hidden_size"] // values["num_heads"]


DECODER_ENTRIES = (
    Entry("vocab_size", "vocab_size"),
    Entry("hidden_size", "hidden_size"),
    Entry("intermediate_size", "intermediate_size"),
    Entry("num_layers", "num_hidden_layers"),
    Entry("num_heads", "num_attention_heads"),
    Entry("rms_norm_eps", "rms_norm_eps", float, 1e-6),
    Entry("tie_word_embeddings", "tie_word_embeddings", bool, default=False),
    Entry("initializer_range", "initializer_range", float, 0.02),
    Entry("max_position_embeddings", "max_position_embeddings"),
)
"""Entries of all families."""

GROUPED_QUERY_ENTRIES = (
    *DECODER_ENTRIES,
    Entry("num_kv_heads", "num_key_value_heads"),
    Entry("head_dim", "head_dim"),
)
"""Entries of families with grouped-query attention."""

MULTI_HEAD_ENTRIES = (
    *DECODER_ENTRIES,
    Entry("num_kv_heads", "num_key_value_heads", default=lambda values: values["num_heads"]),
    Entry("head_dim", "head_dim", default=split_head_dim),
)
"""Entries of families with multi-head attention by default: num_kv_heads = num_heads."""

FIXED_ENTRIES: Mapping[str, JsonValue] = {"hidden_act": "silu", "attention_dropout": 0.0}
"""`config.json` entries for which most families support only one value."""

UNBIASED_ENTRIES: Mapping[str, JsonValue] = {**FIXED_ENTRIES, "attention_bias": False}
"""`FIXED_ENTRIES` of families without attention biases."""


def with_defaults(
    entries: tuple[Entry, ...], **defaults: float | Callable[[Mapping[str, Any]], int] | None
) -> tuple[Entry, ...]:
    """Return entries with other defaults, by hyperparameter name; a default of None makes the entry required."""
    assert defaults.keys() <= {each.field for each in entries}
    return tuple(replace(each, default=defaults.get(each.field, each.default)) for each in entries)


_UNSUPPORTED: Mapping[str, JsonValue] = {"is_encoder_decoder": False}
"""Entries that no family writes, with their only supported value."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceFamily(Generic[P]):
    """Family of checkpoints: its `config.json` and its weights, in both directions.

    Attributes:
        params: Class of the hyperparameters.
        architecture: Model class of `transformers`.
        model_type: Name of the family in `transformers`.
        entries: Entries that set one hyperparameter each.
        nested_type: `model_type` of multimodal configurations that contain the family as `text_config`; None if there
            are no such configurations.
        fixed: Entries with only one supported value: read if present, always written.
        written: Further entries that are always written.
        own: Names of the entries that `check` and `read_own` read.
        prepare: Function that extracts the family's entries from a configuration that may contain other models.
        check: Function that raises an error for configurations that the family does not support.
        read_own: Function that reads the other hyperparameters, given the values of `entries`.
        write_own: Function that returns the entries of the other hyperparameters.
        irrelevant: Further entries, besides `IRRELEVANT`, that do not affect the model, with the reasons.
        rotary_factor: Default of `partial_rotary_factor`, which sets the hyperparameter `rotary_dim`; None if the
            family rotates all features.
        read_rope: Function that reads RoPE base and scaling; see `rope_from_hugging_face`.
        write_rope: Function that returns the RoPE entries; see `rope_to_hugging_face`.
        unused: `fnmatch` patterns of tensors in released checkpoints that are not loaded, besides rotary buffers;
            `{num_layers}` stands for the index of each layer for multi-token prediction. Other tensors that the mapper
            does not consume raise an error.
        parallelize: Function that parallelizes a stage; see `parallelize_decoder`.
        mapper: Function that builds the mapper from a Hugging Face checkpoint to `DecoderForCausalLM`.
        other_mappers: Functions that build the mappers of other layouts of a checkpoint, which are only read.
        classifier: Function that returns the names of a classification head's weights in the model, by their names in
            a `...ForSequenceClassification` checkpoint.
        has_classifier: False if `transformers` has no such class; the export of a classifier then names none.
    """

    params: type[P]
    architecture: str
    model_type: str
    entries: tuple[Entry, ...]
    fixed: Mapping[str, JsonValue]
    written: Mapping[str, JsonValue] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    nested_type: str | None = None
    prepare: Callable[[HuggingFaceConfig], HuggingFaceConfig] = lambda config: config
    check: Callable[[HuggingFaceConfig], None] = lambda config: None
    read_own: Callable[[HuggingFaceConfig, Mapping[str, Any]], Mapping[str, Any]] = lambda config, values: {}
    write_own: Callable[[P], Mapping[str, JsonValue]] = lambda params: {}
    irrelevant: Mapping[str, str] = field(default_factory=dict)
    rotary_factor: float | None = None
    read_rope: Callable[..., tuple[float, RopeScaling | None]] = rope_from_hugging_face
    write_rope: Callable[..., Mapping[str, JsonValue]] = rope_to_hugging_face
    unused: tuple[str, ...] = ()
    parallelize: Callable[..., None] = parallelize_decoder
    mapper: Callable[[P], StateMapper] = decoder_from_hugging_face
    other_mappers: tuple[Callable[[P], StateMapper], ...] = ()
    classifier: Callable[[P], Mapping[str, str]] = lambda params: {"score.weight": "head.score.weight"}
    has_classifier: bool = True

    def architectures(self, head: Literal["language_model", "classification", "embedding"]) -> list[JsonValue]:
        """Return the names of the `transformers` classes for a model with this head; the list may be empty."""
        # Multimodal models have the shorter name, except for language models.
        name = self.architecture.rpartition("For")[0] + ("" if self.nested_type is None else "Text")
        match head:
            case "language_model":
                return [self.architecture]
            case "embedding":
                return [f"{name}Model"]
            case "classification":
                return [f"{name}ForSequenceClassification"] if self.has_classifier else []
            case _:
                assert_never(head)

    @property
    def used(self) -> tuple[str, ...]:
        """Names of all entries that `read` reads."""
        keys = [name for entry in self.entries for name in (entry.key, entry.alias) if name is not None]
        return ("model_type", *keys, *ROPE_ENTRIES, *self.fixed, *_UNSUPPORTED, "quantization_config", *self.own)

    def read(self, config: HuggingFaceConfig) -> P:
        """Read the hyperparameters from a parsed `config.json`.

        The hyperparameters do not depend on a quantization of the checkpoint; see `quantization_from_hugging_face`.

        Raises:
            UserError: If `config` is of another family, lacks an entry, or has an unknown or unsupported entry.
        """
        config = self.prepare(config)
        require_value(config, "model_type", self.model_type, required=True)
        require_known_keys(config, used=self.used, irrelevant={**IRRELEVANT, **self.irrelevant})
        for key, supported in {**self.fixed, **_UNSUPPORTED}.items():
            require_value(config, key, supported)
        quantization_from_hugging_face(config)  # raises an error for layouts that cannot be loaded
        self.check(config)
        factor = 1.0
        if self.rotary_factor is not None:
            factor = rotary_factor_from_hugging_face(config, default=self.rotary_factor)
        theta, scaling = self.read_rope(config, rotary_factor=factor)
        values: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
        for entry in self.entries:
            values[entry.field] = entry.read(config, values)
        if self.rotary_factor is not None:
            values["rotary_dim"] = int(values["head_dim"] * factor)
        values.update(self.read_own(config, values))
        keys = {"rotary_dim": "head_dim times partial_rotary_factor"} if self.rotary_factor is not None else {}
        with config_keys_in_errors(keys | {entry.field: entry.key_in(config) for entry in self.entries}):
            return self.params(**values)

    def write(self, params: P) -> dict[str, JsonValue]:
        """Return the `config.json` of exported weights, for `transformers` and inference engines.

        Raises:
            UserError: If `config.json` cannot represent the hyperparameters.
        """
        params = without_ntk(params)
        values = vars(params)
        # transformers truncates head_dim * factor, so round the factor up.
        factor = None
        if self.rotary_factor is not None:
            factor = math.nextafter(values["rotary_dim"] / values["head_dim"], 2.0)
        written: dict[str, JsonValue] = {
            "architectures": self.architectures("language_model"),
            "model_type": self.model_type,
            **{
                name: values[each.field] for each in self.entries for name in (each.key, each.alias) if name is not None
            },
            **self.write_rope(params, rotary_factor=factor),
            **self.fixed,
            **self.written,
            **self.write_own(params),
        }
        self._refuse_inexpressible(params, written)
        return written

    def _refuse_inexpressible(self, params: P, written: HuggingFaceConfig) -> None:
        """Raise a `UserError` if `config.json` would be read as other hyperparameters."""
        name = f"a config.json of {self.architecture}"
        try:
            read = vars(self.read(written))
        except UserError as error:
            raise UserError(f"{name} cannot express these hyperparameters: {error}") from error
        lost = [
            f"{field} = {value!r} (read as {read[field]!r})"
            for field, value in vars(params).items()
            if _comparable(value) != _comparable(read[field]) and field not in params.not_exported
        ]
        if lost:
            raise UserError(f"{name} cannot express {', '.join(lost)}; expected the values in parentheses.")


def _comparable(value: Any) -> Any:
    """Return a value that is equal for equivalent hyperparameters: lists as tuples, and layers in any order."""
    if is_dataclass(value):
        numbers = (getattr(value, each.name) for each in fields(value))
        return type(value), *(tuple(each) if isinstance(each, list) else each for each in numbers)
    return set(value) if isinstance(value, list | tuple) else value

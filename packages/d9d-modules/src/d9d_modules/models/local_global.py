"""Decoders with local (sliding-window) and global layers, each kind with its own RoPE base: Gemma 3, ModernBERT."""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass

from d9d_dist.errors import UserError
from d9d_modules.models.decoder_params import Rope, RopeScaling
from d9d_modules.models.grouped_query import GroupedQueryParams
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value
from d9d_modules.models.hugging_face_rope import rope_from_hugging_face, rope_to_hugging_face
from d9d_state import JsonValue


@dataclass(frozen=True, kw_only=True)
class LocalGlobalParams(GroupedQueryParams, ABC):
    """Hyperparameters of a model with local and global layers; see `GroupedQueryParams`.

    Attributes:
        sliding_rope_theta: RoPE base of the layers with a sliding window, which have no RoPE scaling.
    """

    sliding_rope_theta: float = 10_000.0

    def rope(self, index: int) -> Rope:
        """See `DecoderParams`."""
        is_sliding = self.mixer_kind(index) == "sliding_attention"
        return Rope(self.sliding_rope_theta) if is_sliding else super().rope(index)


def read_global_rope(
    config: HuggingFaceConfig, *, rotary_factor: float, key: str, default: float
) -> tuple[float, RopeScaling | None]:
    """Read RoPE base and scaling of the global layers: in the format of `transformers` 5, else the entry `key`."""
    full = _of_kind(config, "full_attention")
    scaling = config.get("rope_scaling")
    scaling = scaling if isinstance(scaling, Mapping) else {}
    for place, entries in (("rope_parameters of full_attention", full), ("rope_scaling", scaling)):
        if entries.get("truncate", True) is not True:
            raise UserError(
                f"config.json has truncate = {entries['truncate']!r} in {place}; expected True, or no entry: "
                "transformers truncates in any case if kinds of layers have RoPE parameters of their own."
            )
    if "type" in scaling and "rope_type" not in scaling:
        raise UserError(
            f"config.json has rope_scaling = {dict(scaling)!r}; expected the entry rope_type: transformers ignores "
            "type in models with local and global layers. Rename it, or remove rope_scaling to train without scaling."
        )
    if "rope_theta" not in full:
        theta = default if config.get(key) is None else config_value(config, key, float)
        config = {**config, "rope_theta": theta}
    return rope_from_hugging_face({**config, "rope_parameters": full or None}, rotary_factor=rotary_factor)


def read_local_theta(config: HuggingFaceConfig, *, key: str) -> float:
    """Read the RoPE base of the local layers: in the format of `transformers` 5, else the entry `key`, else 10000."""
    sliding = _of_kind(config, "sliding_attention")
    if sliding.get("rope_type", sliding.get("type", "default")) != "default":
        raise UserError(f"config.json has rope_parameters of sliding_attention = {dict(sliding)}; expected no scaling.")
    theta = config_value(config, key, float, default=10_000.0)
    return config_value(sliding, "rope_theta", float, default=theta)


def written_ropes(params: LocalGlobalParams, *, rotary_factor: float | None) -> dict[str, JsonValue]:
    """Return the RoPE entries of both kinds of layers; see `rope_to_hugging_face`."""
    full = rope_to_hugging_face(params, rotary_factor=rotary_factor)
    sliding: JsonValue = {"rope_type": "default", "rope_theta": params.sliding_rope_theta}
    return {**full, "rope_parameters": {"full_attention": full["rope_parameters"], "sliding_attention": sliding}}


def _of_kind(config: HuggingFaceConfig, kind: str) -> Mapping[str, object]:
    """Return the entries of `rope_parameters` for one kind of layer; empty if config.json has the older format."""
    written = config.get("rope_parameters")
    if written is None:
        return {}
    if not isinstance(written, Mapping) or not written.keys() <= {"full_attention", "sliding_attention"}:
        raise UserError(
            f"config.json has rope_parameters = {written!r}; expected an object with the entries full_attention and "
            "sliding_attention."
        )
    return {str(key): value for key, value in (written.get(kind) or {}).items()}

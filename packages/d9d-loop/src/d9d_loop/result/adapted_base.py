"""Adapters with their base model, loaded by `transformers` and by peft, or by d9d-peft if peft is not installed."""

import argparse
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias, final, get_args

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.data.text_tokenizer import read_json
from d9d_loop.model.export_notes import with_older_entries

ADAPTER_CONFIG = "adapter_config.json"

BaseWeights: TypeAlias = Literal["trained", "dense", "dequantized"]
"""Weights of the base under adapters: those of the training, those of the folder, or those of its quantized format."""


@final
@dataclass(frozen=True, slots=True)
class AdaptedBase:
    """Folder of adapters, with the base model to load below them.

    Attributes:
        folder: Folder with `adapter_config.json`.
        base: Folder of the base model in Hugging Face layout.
        block_format: Quantized format through which the base weights of adapted layers are rounded, as in the training;
            None for the weights of the folder.
        block_size: Number of weights that share a scale in this format.
    """

    folder: Path
    base: Path
    block_format: str | None
    block_size: int

    def __str__(self) -> str:
        """Describe which adapters are on which weights."""
        weights = "weights" if self.block_format is None else f"weights dequantized from {self.block_format}"
        return f"adapters of {self.folder} on the {weights} of {self.base}"


def add_base_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the base model of adapters."""
    parser.add_argument("--base", type=Path, help="base model of adapters; default: the one that they or the run name")
    parser.add_argument(
        "--base-weights",
        choices=get_args(BaseWeights),
        default="trained",
        help="weights of the base: dense (of its folder), dequantized (of the run's adapter.base), or trained: "
        "dequantized if the run quantized the base, else dense; default: %(default)s",
    )


def find_base(folder: Path, *, base: Path | None = None, weights: BaseWeights = "trained") -> AdaptedBase:
    """Find the base model of adapters: `base`, or the folder that the adapters or the configuration of the run names.

    Raises:
        UserError: If there is no such folder, its weights are not those of the training, and `base` did not choose it,
            or dequantized weights are chosen and the run quantized none.
    """
    named = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    job = read_json(folder.parent / "config.json")
    model, adapter = (job[name] if isinstance(job.get(name), dict) else {} for name in ("model", "adapter"))
    names = (base, named, job.get("initial_weights"), model.get("folder"))
    found = [Path(each) for each in names if isinstance(each, str | Path)]
    candidates = [base] if base is not None else found
    chosen = next((each for each in candidates if (each / "config.json").is_file()), None)
    if chosen is None:
        names = f"{', '.join(map(str, candidates))} is not a folder with config.json" if candidates else "none is named"
        raise UserError(
            f"{folder} contains adapters, and their base model is missing: {names}. Nothing is downloaded. Pass "
            "--base FOLDER, the folder of the base model."
        )
    from d9d_loop.engine.code_digest import BASE, BASE_FILE, source_digests  # noqa: PLC0415 - imports torch

    trained = read_json(folder / BASE_FILE).get(BASE)
    if base is None and trained not in (None, source_digests(chosen, has_adapters=True).get(BASE)):
        raise UserError(
            f"{BASE} in {chosen} have changed since the training of {folder}; expected those of the training. Restore "
            "them, or pass --base FOLDER to use other ones."
        )
    block_format = None if weights == "dense" else adapter.get("base", "dense")
    if weights == "dequantized" and block_format == "dense":
        raise UserError(
            f"--base-weights dequantized, but {folder.parent / 'config.json'} names no quantized format of the base; "
            "expected adapter.base = nf4 or int8. Use --base-weights dense."
        )
    return AdaptedBase(folder, chosen, None if block_format == "dense" else block_format, adapter.get("block_size", 64))


def load_adapted(source: AdaptedBase) -> Any:
    """Load a base model, in the dtypes of its files, with adapters. Return a model of `transformers`.

    Raises:
        UserError: If the adapters do not fit the base, or neither peft nor d9d-peft is installed.
    """
    adapted = _attach(_round_base(_load_base(source), source), source)
    return adapted.get_base_model() if find_spec("peft") is not None else adapted


def save_merged(source: AdaptedBase, folder: Path) -> None:
    """Merge adapters into their base in float32, and save the model in the dtypes of the base's files.

    A tied weight with an adapter is untied, and the configuration of the saved model says so.

    Raises:
        UserError: As `load_adapted`.
    """
    model = _load_base(source)
    dtypes = {name: each.dtype for name, each in model.named_parameters()}
    adapted = _attach(_round_base(model.float(), source), source)
    if find_spec("peft") is not None:
        adapted = adapted.merge_and_unload()
    else:
        _d9d_peft().merge_(adapted)
    for name, parameter in adapted.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))
    state = {name: each for name, each in adapted.state_dict().items() if ".adapter." not in name}
    adapted.save_pretrained(folder, state_dict=state)
    config = with_older_entries(read_json(folder / "config.json"))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_model(folder: Path, named: Path | None = None) -> Any:
    """Load a model in the dtypes of its files, as the class that the `config.json` of `named`, or of `folder`, names.

    The loading report of `transformers` is the only sign of parameters that the folder lacks.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(named or folder, local_files_only=True)
    name = (config.architectures or ["AutoModelForCausalLM"])[0]
    auto: Any = getattr(transformers, name, transformers.AutoModelForCausalLM)
    return auto.from_pretrained(folder, config=config, dtype="auto", local_files_only=True)


def _load_base(source: AdaptedBase) -> Any:
    """Load the base as the class of the adapted model; parameters that the base lacks are in the adapter files."""
    return load_model(source.base, source.folder if (source.folder / "config.json").is_file() else None)


def _round_base(model: Any, source: AdaptedBase) -> Any:
    """Round the weights with adapters to the values of their quantized format, in place; return the model."""
    if source.block_format is None:
        return model
    config, weights = read_json(source.folder / ADAPTER_CONFIG), dict(model.named_parameters())
    names = [*(f"{name}.weight" for name in config.get("target_modules") or ()), *(config["target_parameters"] or ())]
    if missing := [name for name in names if name not in weights]:
        raise UserError(
            f"{source.base} has no parameter {missing[0]}, whose adapter is in {source.folder}; expected the base of "
            "the training. Pass --base FOLDER."
        )
    for name in names:
        weight, options = weights[name], {"block_format": source.block_format, "block_size": source.block_size}
        weight.data = _d9d_peft().fake_quantize(weight.data, **options)
    return model


def _attach(model: Any, source: AdaptedBase) -> Any:
    if find_spec("peft") is not None:
        from peft import PeftModel

        return PeftModel.from_pretrained(model, str(source.folder)).eval()
    peft = _d9d_peft()
    peft.inject(peft.stored_method(source.folder), model)
    peft.load_adapters(model, source.folder)
    return model.eval()


def _d9d_peft() -> Any:
    try:
        import d9d_peft  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise UserError(
            "adapters are loaded by peft or d9d-peft, and a base is quantized by d9d-peft, which is not installed. "
            f"Install it: {install_hint('d9d-peft')}"
        ) from None
    return d9d_peft

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import BaseModel, Field, model_validator

from d9d_dist import UserError
from d9d_loop import Section, TrainerConfig, validate_config
from d9d_loop.config._config_errors import OTHER_NAMES
from d9d_loop.config._config_keys import all_keys
from d9d_loop.jobs.job_config import TextJobConfig

BATCH = {"batch": {"global_size": 8}}
JOB = {"steps": 3, **BATCH}


class Adam(Section):
    kind: Literal["adam"] = "adam"
    learning_rate: float = 1.0
    betas: tuple[float, float] = (0.9, 0.99)


class Momentum(Section):
    kind: Literal["momentum"] = "momentum"
    learning_rate: float = 1.0
    decay: float = Field(default=0.9, gt=0, lt=1)


Choice = Annotated[Adam | Momentum, Field(discriminator="kind")]


@dataclass(frozen=True)
class Width:
    hidden: int
    heads: int = 1


class Inner(Section):
    choice: Choice = Adam()
    untagged: Adam | Momentum | None = None


class Job(Section):
    width: Width
    optimizer: Choice = Adam()
    each: tuple[Choice, ...] = ()
    inner: Inner = Inner()
    optional_width: Width | None = None
    by_name: dict[str, int] = Field(default_factory=dict)
    whole: int | str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.whole == 13:
            raise ValueError("whole = 13 brings bad luck; use another number")
        return self


def _problems(model: type[BaseModel], values: dict[str, Any]) -> list[str]:
    with pytest.raises(UserError) as error:
        validate_config(model, values)
    return str(error.value).split("\n     ")


def _problem(model: type[BaseModel], values: dict[str, Any]) -> str:
    (problem,) = _problems(model, values)
    return problem


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stps": 4}, "stps is not a configuration key; did you mean steps?"),
        (
            {"batch": {"global_sise": 8, "global_size": 8}},
            "batch.global_sise is not a configuration key; did you mean batch.global_size?",
        ),
        (
            {"optimizer": {"learning_rat": 1}},
            "optimizer.learning_rat is not a configuration key; did you mean optimizer.learning_rate?",
        ),
        ({"learning_rate": 1}, "learning_rate is not a configuration key; did you mean optimizer.learning_rate?"),
        (
            {"run": {"every": 2}},
            "run.every is not a configuration key; did you mean checkpoint.every or evaluation.every or logging.every "
            "or profile.every or resilience.health.every or resilience.stop.every or resilience.replicas.every?",
        ),
        ({"gradient": {"max_norm": 2}}, "gradient is not a configuration key; did you mean gradients?"),
        (
            {"run": {"zzz": 2}},
            "run.zzz is not a configuration key; [run] has adopt, folder, from_scratch, name, on_completion, "
            "on_failure.",
        ),
        (
            {"trackers": [{"kind": "jsonl", "fil": "x"}]},
            "trackers.0.fil is not a configuration key; did you mean trackers.0.file?",
        ),
    ],
)
def test_an_unknown_key_suggests_the_closest_one(values: dict[str, Any], message: str) -> None:
    assert _problem(TrainerConfig, {**JOB, **values}) == message


def test_an_unknown_key_without_a_close_match_lists_all_keys() -> None:
    assert _problem(Inner, {"qqq": 1}) == "qqq is not a configuration key; there are choice, untagged."


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"width": {"hidden": 1, "head": 2}}, "width.head is not a configuration key; did you mean width.heads?"),
        (
            {"optional_width": {"hidden": 1, "hedas": 2}},
            "optional_width.hedas is not a configuration key; did you mean optional_width.heads?",
        ),
        (
            {"optimizer": {"kind": "adam", "decay": 1}},
            "optimizer.decay is a key of another kind of [optimizer]; this kind has betas, kind, learning_rate.",
        ),
        (
            {"optimizer": {"kind": "momentum", "decai": 1}},
            "optimizer.decai is not a configuration key; did you mean optimizer.decay?",
        ),
        (
            {"inner": {"choice": {"kind": "adam", "bet": 1}}},
            "inner.choice.bet is not a configuration key; did you mean inner.choice.betas?",
        ),
        (
            {"each": [{"kind": "momentum"}, {"kind": "adam", "betes": 1}]},
            "each.1.betes is not a configuration key; did you mean each.1.betas?",
        ),
    ],
)
def test_keys_are_found_in_dataclasses_unions_and_lists(values: dict[str, Any], message: str) -> None:
    assert _problem(Job, {"width": {"hidden": 1}, **values}) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"width": {"hidden": "wide"}},
            "width.hidden = 'wide'; expected a valid integer, unable to parse string as an "
            "integer. Change it in the configuration file, or with --width.hidden VALUE.",
        ),
        (
            {"optimizer": {"kind": "momentum", "decay": 1.5}},
            "optimizer.decay = 1.5; expected a number less than 1. "
            "Change it in the configuration file, or with --optimizer.decay VALUE.",
        ),
        (
            {"optimizer": {"kind": "momentum", "decay": 0}},
            "optimizer.decay = 0; expected a number greater than 0. "
            "Change it in the configuration file, or with --optimizer.decay VALUE.",
        ),
        (
            {"optimizer": {"kind": "sgd"}},
            "optimizer.kind = 'sgd'; expected one of 'adam', 'momentum'. Change it in the "
            "configuration file, or with --optimizer.kind VALUE.",
        ),
        (
            {"optimizer": {"decay": 1}},
            "optimizer.kind is missing; expected one of 'adam', 'momentum'. Change it in the "
            "configuration file, or with --optimizer.kind VALUE.",
        ),
        (
            {"each": [{"kind": "adam", "betas": [1, "x"]}]},
            "each.0.betas.1 = 'x'; expected a valid number, unable to "
            "parse string as a number. Change it in the configuration file, or with --each VALUE.",
        ),
        (
            {"by_name": {"a": "b"}},
            "by_name.a = 'b'; expected a valid integer, unable to parse string as an integer. "
            "Change it in the configuration file, or with --by_name.a VALUE.",
        ),
        (
            {"width": 7},
            "width = 7; expected a dictionary or an instance of Width. Change it in the configuration file, "
            "or with --width VALUE.",
        ),
        ({"whole": 13}, "whole = 13 brings bad luck; use another number."),
    ],
)
def test_a_wrong_value_states_the_expected_one(values: dict[str, Any], message: str) -> None:
    assert _problem(Job, {"width": {"hidden": 1}, **values}) == message


def test_unions_may_be_discriminated_by_another_key_than_kind() -> None:
    class Left(Section):
        side: Literal["left"]
        size: int = 1

    class Right(Section):
        side: Literal["right"]

    class Sides(Section):
        at: Annotated[Left | Right, Field(discriminator="side")]

    assert _problem(Sides, {"at": {"side": "left", "sizes": 2}}) == (
        "at.sizes is not a configuration key; did you mean at.size?"
    )
    assert _problem(Sides, {"at": {"side": "up"}}).startswith("at.side = 'up'; expected one of 'left', 'right'. ")
    assert _problem(Sides, {"at": {}}).startswith("at.side is missing; expected one of 'left', 'right'. ")


def test_a_value_that_fits_no_union_member_is_explained_per_member() -> None:
    assert _problems(Job, {"width": {"hidden": 1}, "whole": [1]}) == [
        f"whole = [1]; expected a valid {kind}. Change it in the configuration file, or with --whole VALUE."
        for kind in ("integer", "string")
    ]


def test_a_long_value_is_truncated() -> None:
    message = _problem(TrainerConfig, {**BATCH, "steps": "a" * 100})
    assert message.startswith(f"steps = '{'a' * 56}...; expected a valid integer")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"steps": 1},
            "batch.global_size is missing; set it in the configuration file, or with --batch.global_size VALUE.",
        ),
        (
            {"steps": 1, "batch": {}},
            "batch.global_size is missing; set it in the configuration file, or with --batch.global_size VALUE.",
        ),
    ],
)
def test_the_error_for_a_missing_key_has_the_command_line_option(values: dict[str, Any], message: str) -> None:
    assert _problem(TrainerConfig, values) == message


def test_the_error_for_a_missing_section_lists_its_required_keys() -> None:
    class Pair(Section):
        left: int
        right: int

    class Pairs(Section):
        pair: Pair

    assert _problem(Pairs, {}) == (
        "pair.left and pair.right are missing; set them in the configuration file, or with --pair.left VALUE "
        "--pair.right VALUE."
    )


def test_all_errors_are_listed_at_once() -> None:
    assert _problems(TrainerConfig, {"stps": 1, "batch": {"global_size": 0}, "mesh": {"data_parallel_shard": 0}}) == [
        "batch.global_size = 0; expected a number greater than 0. Change it in the configuration file, or with "
        "--batch.global_size VALUE.",
        "mesh.data_parallel_shard: got 0; expected a positive number of ranks, or -1 for all remaining ranks.",
        "stps is not a configuration key; did you mean steps?",
    ]


def test_each_name_of_another_trainer_suggests_a_key_that_exists() -> None:
    known, sections = [key.name for key in all_keys(TextJobConfig)], {"batch", "data", "plan"}
    assert set(OTHER_NAMES.values()) <= set(known)
    assert not {name for name, ours in OTHER_NAMES.items() if name in known and name not in sections and name != ours}


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("modules_to_save", "; did you mean adapter.full?"),
        ("use_dora", "; did you mean adapter.kind?"),
        *((key, "; [adapter] has alpha, base,") for key in ("use_rslora", "rank_pattern", "bias", "init_lora_weights")),
    ],
)
def test_names_of_peft_suggest_only_keys_of_that_meaning(key: str, advice: str) -> None:
    (problem,) = _problems(
        TextJobConfig, {"job": "sft", **JOB, "model": {"folder": "a"}, "adapter": {key: 1}, "dataset": {"files": ["a"]}}
    )
    assert f"adapter.{key} is not a configuration key{advice}" in problem


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("lr", "optimizer.learning_rate"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("learning-rate", "optimizer.learning_rate"),
        ("weight_decay", "optimizer.weight_decay"),
        ("optim", "optimizer.kind"),
        ("max_grad_norm", "gradients.max_norm"),
        ("optimizer.max_grad_norm", "gradients.max_norm"),
        ("batch_size", "batch.global_size"),
        ("batch.batch_size", "batch.global_size"),
        ("per_device_train_batch_size", "batch.microbatch_size"),
        ("gradient_accumulation_steps", "batch.microbatch_size"),
        ("batch.gradient_accumulation_steps", "batch.microbatch_size"),
        ("max_steps", "steps"),
        ("num_train_epochs", "epochs"),
        ("bf16", "precision"),
        ("output_dir", "run.folder"),
        ("run.output_dir", "run.folder"),
        ("warmup_steps", "lr_schedule.warmup_steps"),
    ],
)
def test_names_of_other_trainers_suggest_our_key(name: str, ours: str) -> None:
    *sections, key = name.split(".")
    values: dict[str, Any] = {key: 1}
    for section in reversed(sections):
        values = {section: {**(BATCH["batch"] if section == "batch" else {}), **values}}
    problems = _problems(TrainerConfig, {**JOB, **values})
    assert [problem for problem in problems if f"; did you mean {ours}?" in problem], problems

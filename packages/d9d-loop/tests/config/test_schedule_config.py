import pytest

from d9d_dist import UserError
from d9d_loop import ScheduleConfig
from d9d_loop.config.schedule_config import KINDS
from d9d_loop.config.trainer_config import PipelineConfig
from d9d_pipeline import Interleaved, OneForwardOneBackward, Schedule, ZeroBubble1P, ZeroBubbleV, build


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_builds_a_training_schedule(kind: str) -> None:
    schedule = ScheduleConfig.model_validate({"kind": kind}).build()
    program = build(schedule, num_ranks=2, num_microbatches=4)
    assert program.trains
    assert schedule == ScheduleConfig.model_validate({"kind": kind}).build()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, OneForwardOneBackward()),
        ({"schedule": "zbv"}, ZeroBubbleV()),
        ({"schedule": {"kind": "interleaved_1f1b", "stages_per_rank": 3}}, Interleaved(3)),
        ({"schedule": "interleaved_1f1b"}, Interleaved(2)),
        ({"schedule": {"kind": "zb1p"}}, ZeroBubble1P(1)),
        ({"schedule": {"kind": "zbv", "stages_per_rank": 2}}, ZeroBubbleV()),
        ({"schedule": {"kind": "1f1b", "max_activations": 3}}, OneForwardOneBackward(max_activations=3)),
        ({"schedule": {"kind": "interleaved_1f1b", "max_activations": 9}}, Interleaved(2, max_activations=9)),
        (
            {"schedule": {"kind": "zb1p", "stages_per_rank": 2, "warmup": "long", "max_activations": 9}},
            ZeroBubble1P(2, warmup="long", max_activations=9),
        ),
    ],
)
def test_a_schedule_may_be_given_by_its_name(value: dict[str, object], expected: Schedule) -> None:
    assert PipelineConfig.model_validate(value).schedule.build() == expected


def test_a_fixed_number_of_stages_cannot_be_set() -> None:
    config = ScheduleConfig.model_validate({"kind": "1f1b", "stages_per_rank": 2})
    message = r"pipeline\.schedule\.stages_per_rank = 2; 1f1b always has 1\. Remove it, or use one of looped_bfs"
    with pytest.raises(UserError, match=message):
        config.build()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"kind": "gpipe", "max_activations": 4},
            r"schedule\.max_activations = 4; gpipe does not have this option\. .* one of 1f1b, interleaved_1f1b, zb1p",
        ),
        ({"kind": "1f1b", "warmup": "long"}, r"pipeline\.schedule\.warmup = long; 1f1b does not .* use one of zb1p\."),
    ],
)
def test_an_option_of_another_schedule_is_refused(value: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ScheduleConfig.model_validate(value).build()

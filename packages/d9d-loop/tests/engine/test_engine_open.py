"""Engines built from a configuration: learning rates, checkpoints, offloading, bad steps."""

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from opened_engines import BATCHES, NAN, TASK, config_of, opened, take_step, values
from torch import nn

from d9d_dist import UserError
from d9d_loop import BadStepError, Engine, OptimizerDone, StateOffloaded, StateOnloaded
from d9d_loop.resilience import health_check


def test_slow_measurements_are_printed_once_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    slow = {("compute", 0): "slow compute of rank 0: 31.0 ms."}
    with mock.patch.object(health_check, "find_slow", return_value=slow), opened(tmp_path, health={"enabled": True}):
        assert capsys.readouterr().out.count("slow compute of rank 0: 31.0 ms.") == 1
    assert not caplog.records


def test_a_learning_rate_stays_set_until_it_is_changed(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        rates = []
        for learning_rate in (None, 0.05, None):
            engine.forward_backward(BATCHES, TASK.loss)
            rates.append(engine.step(learning_rate).learning_rate)
        assert rates == [0.1, 0.05, 0.05]
        engine.set_learning_rates(0.5)
        engine.forward_backward(BATCHES, TASK.loss)
        assert engine.step().learning_rate == 0.05
    assert not list(tmp_path.iterdir()), "an engine that saves nothing writes nothing"


@pytest.mark.parametrize("given", [{}, {"step_seconds": 7.0}])
def test_a_given_timeout_of_steps_holds_after_the_first_step(tmp_path: Path, given: dict[str, float]) -> None:
    with opened(tmp_path, timeouts={"startup_seconds": 300, **given}) as engine:
        with mock.patch.object(type(engine.ctx), "set_timeout") as set_timeout:
            take_step(engine)
            take_step(engine)
        assert [call.args for call in set_timeout.call_args_list] == [(timedelta(seconds=7),)] * len(given)


def test_a_loaded_engine_continues_bitwise(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        assert engine.load() is None
        take_step(engine, 0.05)
        engine.save({"prompts": 7}, background=True)
        take_step(engine, 0.02)
        expected = values(engine)
    with opened(tmp_path) as engine:
        assert engine.load() == {"prompts": 7}
        assert engine.num_steps == 1
        take_step(engine, 0.02)
        assert all(map(torch.equal, values(engine), expected))
        engine.load()
        assert engine.num_steps == 1


@pytest.mark.parametrize("as_function", [True, False])
def test_a_model_is_a_module_or_a_function(as_function: bool, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    expected = [each.detach().clone() for each in model.parameters()]
    with Engine.open(config_of(tmp_path), model=(lambda: model) if as_function else model, task=TASK) as engine:
        assert all(map(torch.equal, values(engine), expected))


def test_a_checkpoint_needs_the_same_reference(tmp_path: Path) -> None:
    def engine(seed: int) -> Any:
        config = config_of(tmp_path, seed=seed)
        return Engine.open(config, model=lambda stage: nn.Linear(3, 2), task=TASK, reference="initial")

    with engine(0) as first:
        take_step(first)
        first.save()
    with engine(1) as other, pytest.raises(UserError, match="are the reference of this job, have changed since"):
        other.load()
    with engine(0) as again:
        again.load()
        assert again.num_steps == 1


def test_an_engine_continues_from_a_local_tier_that_is_newer_than_its_checkpoints(tmp_path: Path) -> None:
    tiers = {"tiers": {"local_every": 2, "local_folder": tmp_path / "disk", "replicas": 0}}
    run = tmp_path / "run"
    with opened(run, **tiers) as engine:
        for step in range(1, 5):
            take_step(engine)
            engine.save_local({"prompts": step})
            if step == 1:
                engine.save({"prompts": step})
        expected = values(engine)
    with opened(run) as engine:
        assert engine.load() == {"prompts": 1}  # without the tier
    with opened(run, **tiers) as engine:
        assert engine.load() == {"prompts": 4}
        assert engine.num_steps == 4
        assert all(map(torch.equal, values(engine), expected))
        engine.delete_local()
        assert engine.load() == {"prompts": 1}
    shutil.rmtree(run)
    with opened(run, **tiers) as engine:
        assert engine.load() is None
        take_step(engine)
        take_step(engine)
        engine.save_local({"prompts": 2})
        take_step(engine)
        assert engine.load() == {"prompts": 2}  # without any checkpoint


def test_settings_of_tiers_without_an_effect_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"got tiers\.local_every without tiers\.local_folder"),
        opened(tmp_path, tiers={"local_every": 2}),
    ):
        pass


def test_accumulated_gradients_cannot_be_saved(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        engine.forward_backward(BATCHES, TASK.loss)
        with pytest.raises(UserError, match=r"got save\(\) with accumulated gradients"):
            engine.save()


def test_only_engines_of_open_have_checkpoints(ctx: Any) -> None:
    model = nn.Linear(3, 2)
    engine = Engine(model, torch.optim.SGD(model.parameters()), ctx=ctx, task=TASK)
    with pytest.raises(UserError, match=r"this engine has no checkpoints; create it with Engine\.open"):
        engine.save()


def test_all_state_is_offloaded_and_restored(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        take_step(engine)
        tensors = [*engine.model.parameters(), *(each["exp_avg"] for each in engine.optimizer.state.values())]
        before, seen = [tensor.detach().clone() for tensor in tensors], []
        for kind in (StateOffloaded, StateOnloaded):
            engine.events.on(
                kind, lambda event: seen.append((event, sum(tensor.untyped_storage().nbytes() for tensor in tensors)))
            )
        with engine.offloaded():
            pass
        engine.offload()
        with pytest.raises(UserError, match="already offloaded"), engine.offloaded():
            pass
        engine.onload()
        size = sum(tensor.nbytes for tensor in tensors)
        assert seen == [(StateOffloaded(1), 0), (StateOnloaded(1), size)] * 2
        assert all(map(torch.equal, tensors, before))


def test_an_exception_onloads_the_state(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        before = values(engine)
        with pytest.raises(RuntimeError, match="no rollouts"), engine.offloaded():
            raise RuntimeError("no rollouts")
        assert all(map(torch.equal, values(engine), before))


def test_an_exception_of_a_handler_onloads_the_state(tmp_path: Path) -> None:
    def fail(event: StateOffloaded) -> None:
        raise RuntimeError("no server")

    with opened(tmp_path) as engine:
        before = values(engine)
        engine.events.on(StateOffloaded, fail)
        with pytest.raises(RuntimeError, match="no server"), engine.offloaded():
            pytest.fail("the handler raises")
        assert all(map(torch.equal, values(engine), before))
        take_step(engine)


def test_bad_steps_are_skipped_and_then_stop_the_engine(tmp_path: Path) -> None:
    with opened(tmp_path, bad_steps={"max_in_a_row": 2}) as engine:
        before, seen = values(engine), []
        engine.events.on(OptimizerDone, lambda event: seen.append(bool(event.taken)))
        engine.forward_backward(NAN, TASK.loss)
        assert not engine.step().taken
        engine.forward_backward(NAN, TASK.loss)
        with pytest.raises(BadStepError, match="it is bad step 2 in a row, so the job stops"):
            engine.step()
        assert seen == [False, False]
        assert all(map(torch.equal, values(engine), before))


def test_the_policy_roll_back_is_refused_by_engines(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match=r'bad_steps\.spike = "roll_back", but an engine cannot repeat')
    with refused, opened(tmp_path, bad_steps={"spike": "roll_back"}):
        pass


def test_an_engine_has_the_options_of_a_job_for_its_model(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"freeze": ["bias"], "precision": "autocast", "compile": "eager"}
    with opened(tmp_path, **settings) as engine:
        before = {name: each.clone() for name, each in engine.model.named_parameters()}
        take_step(engine)
        changed = {name for name, each in engine.model.named_parameters() if not torch.equal(each, before[name])}
    assert changed == {"weight"}
    for settings, message in (
        ({"freeze": ["gamma"]}, "freeze: 'gamma' matches no parameter"),
        ({"activation_checkpointing": "blocks"}, "activation_checkpointing = 'blocks' matches no module"),
        ({"compile": "fast"}, "fast"),
    ):
        with pytest.raises(UserError, match=message), opened(tmp_path, **settings):
            pass

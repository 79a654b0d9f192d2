"""Writes real runs to a repository and reads them from it."""

import time
from pathlib import Path
from typing import Any

import pytest

from d9d_dist import UserError
from d9d_metrics import AimTracker, AimTrackerConfig, Histogram, Image, Text
from d9d_metrics.trackers import _extras


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository shared by all tests, because creating one takes seconds. Each test has its own run."""
    import aim

    folder = tmp_path_factory.mktemp("repository")
    aim.Repo(str(folder), init=True)
    return folder


def wait_until_aim_knows_new_runs() -> None:
    """Aim looks for new runs twice a second; a `BackgroundTracker` would retry until it finds them."""
    time.sleep(0.6)


def reopened(folder: Path, state: dict[str, Any]) -> Any:
    import aim

    wait_until_aim_knows_new_runs()
    return aim.Run(
        state["aim_run_hash"],
        repo=str(folder),
        force_resume=True,
        system_tracking_interval=None,
        log_system_params=False,
        capture_terminal_logs=False,
    )


def series(sequence: Any) -> dict[int, Any]:
    """Return the values of a sequence by step."""
    steps, (values, *_) = sequence.data.items_list()
    return dict(zip(map(int, steps), values, strict=True))


@pytest.mark.full
def test_values_can_be_read_and_a_run_is_resumed(repository: Path) -> None:
    from aim.storage.context import Context
    from matplotlib.figure import Figure

    first = AimTracker(str(repository), experiment="test")
    first.log_config({"lr": 0.5, "mesh": {"dp": 2, "password": "canary"}, "name": None})
    too_fine = Histogram(0.0, 1.0, (1.0,) * 513)
    first.log(3, {"loss": 1.5, "h": Histogram(0.0, 4.0, (1.0, 3.0)), "t": Text("hello"), "fine": too_fine})
    first.log(3, {"p": Image.of(Figure(figsize=(1, 1), dpi=20))})
    first.log(4, {"loss": 1.0})
    first.log(5, {"loss": 0.75})
    first.close()
    state = first.state_dict()
    wait_until_aim_knows_new_runs()
    second = AimTracker(str(repository))
    second.resume(3, state)
    second.log(4, {"loss": 40.0})
    second.close()
    assert second.state_dict() == state
    run = reopened(repository, state)
    assert run["config"] == {"lr": 0.5, "mesh": {"dp": 2, "password": "<redacted>"}, "name": None}
    assert run.experiment == "test"
    everywhere = Context({})
    assert series(run.get_metric("loss", everywhere)) == {3: 1.5, 4: 40.0, 5: 0.75}
    (stored,) = run.meta_run_tree.subtree("traces").collect().values()
    kept = {name: stored["loss"][name] for name in ("last", "min", "max")}
    assert kept == {"last": 0.75, "min": 0.75, "max": 40.0}  # Aim's, until a later step is logged; docs/metrics.md
    counts, edges = series(run.get_distribution_sequence("h", everywhere))[3].to_np_histogram()
    assert (counts.tolist(), edges.tolist()) == ([1.0, 3.0], [0.0, 2.0, 4.0])
    assert series(run.get_text_sequence("t", everywhere))[3].data == "hello"
    assert series(run.get_image_sequence("p", everywhere))[3].to_pil_image().size == (20, 20)
    assert run.get_distribution_sequence("fine", everywhere) is None
    run.close()


@pytest.mark.full
def test_config_builds_a_tracker_with_a_spool(repository: Path, tmp_path: Path) -> None:
    from aim.storage.context import Context

    tracker = AimTrackerConfig(repository=str(repository), experiment="e").build(tmp_path)
    tracker.resume(0)
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    run = reopened(repository, tracker.state_dict())
    assert series(run.get_metric("loss", Context({}))) == {1: 1.0}
    run.close()


@pytest.mark.full
def test_runs_of_a_folder_share_a_repository_and_have_names(tmp_path: Path) -> None:
    from aim.storage.context import Context

    states = {}
    for name, settings in (("first", AimTrackerConfig()), ("own", AimTrackerConfig(name="own"))):
        tracker = settings.build(tmp_path / ("first" if settings.name is None else "second"))
        tracker.resume(0)
        tracker.log(1, {"loss": 1.0})  # a run of one value
        tracker.close()
        states[name] = tracker.state_dict()
    assert {path.parent for path in tmp_path.rglob(".aim")} == {tmp_path}
    for name, state in states.items():
        run = reopened(tmp_path, state)
        assert (run.name, series(run.get_metric("loss", Context({})))) == (name, {1: 1.0})
        run.close()


def test_without_the_package_the_error_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_extras, "find_spec", lambda _module: None)
    with pytest.raises(UserError, match=r"the aim tracker needs .* pip install 'aim>=3.* 'boto3>=1"):
        AimTrackerConfig().build(tmp_path)

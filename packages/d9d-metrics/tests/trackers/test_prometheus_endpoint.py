import socket
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from d9d_metrics import Histogram, PrometheusTracker, PrometheusTrackerConfig, Text, build_trackers


def _scrape(port: int) -> dict[str, float]:
    """Return the samples of the endpoint, as Prometheus' own parser reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels == {"run": "mine"} for sample in samples)
    return {sample.name: sample.value for sample in samples}


def test_the_endpoint_has_the_latest_values_until_it_is_closed() -> None:
    tracker = PrometheusTracker(run="mine", port=0, host="127.0.0.1")
    tracker.resume(0)
    assert _scrape(tracker.port) == {"d9d_step": 0}
    tracker.log(1, {"loss": 2.5, "tokens_per_second": 10.0, "note": Text("x")})
    tracker.log(2, {"loss": float("inf"), "held-out/loss": 3.0, "weights": Histogram(0.0, 1.0, (1.0,))})
    found = _scrape(tracker.port)
    assert found.pop("d9d_updated_seconds") > 1.7e9
    assert found == {
        "d9d_step": 2,
        "d9d_loss": float("inf"),
        "d9d_tokens_per_second": 10.0,
        "d9d_held_out_loss": 3.0,
    }
    tracker.resume(1)  # the job rolls back
    assert _scrape(tracker.port)["d9d_step"] == 1
    tracker.close()
    with pytest.raises(URLError):
        _scrape(tracker.port)


def test_a_configuration_serves_a_run_and_writes_no_files(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tracker = build_trackers([PrometheusTrackerConfig(port=port, host="127.0.0.1")], tmp_path / "mine")
    tracker.resume(3)
    tracker.log(4, {"loss": 1.0})
    tracker.flush()
    assert _scrape(port)["d9d_step"] == 4
    tracker.close()
    assert not (tmp_path / "mine").exists()


def test_a_port_of_another_run_is_taken_once_it_is_free(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = PrometheusTracker(run="other", port=0, host="127.0.0.1")
    config = PrometheusTrackerConfig(port=other.port, host="127.0.0.1")
    tracker = build_trackers([config], tmp_path / "mine")
    tracker.resume(0)
    for step in range(1, 4):
        tracker.log(step, {"loss": 1.0 / step})
    tracker.flush()
    assert tracker.state_dict() == {}  # a checkpoint does not keep values that nobody will read
    (message,) = caplog.messages
    assert "Address already in use. Give each run of a host a port of its own." in message
    other.close()
    tracker.log(4, {"loss": 0.25})
    with pytest.raises(URLError):  # the next attempt is due after some seconds
        _scrape(config.port)
    now = time.monotonic() + 10
    monkeypatch.setattr("d9d_metrics.trackers.prometheus_endpoint.time.monotonic", lambda: now)
    tracker.log(5, {"loss": 0.2})
    found = _scrape(config.port)
    assert (found["d9d_step"], found["d9d_loss"]) == (5, 0.2)
    tracker.close()


def test_a_tracker_without_a_port_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        PrometheusTracker(run="mine", port=taken.getsockname()[1], host="127.0.0.1").close()

"""Prometheus tracker: the latest values of a run as text over HTTP, for a Prometheus server to scrape."""

import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Literal, final

from pydantic import Field, JsonValue

from d9d_metrics.trackers._extras import ExtraTrackerConfig, require_package
from d9d_metrics.trackers.tracker import Tracker
from d9d_metrics.trackers.values import Media, Tracked

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

_LOGGER = logging.getLogger("d9d.metrics")
_RETRY_SECONDS = 10.0
_INVALID = re.compile(r"[^a-zA-Z0-9_]")


@final
class PrometheusTracker(Tracker):
    """Tracker that serves the latest value of each name at `http://HOST:PORT/metrics`.

    Each number is a gauge `d9d_<name>` with the label `run`; other characters than letters, digits and `_` become `_`.
    `d9d_step` is the last logged step, and `d9d_updated_seconds` the Unix time at which it was logged. Histograms, text
    and images are skipped.

    If the port is in use, such as by another run of the host, a warning says so, and `log` tries again every 10
    seconds.
    """

    def __init__(self, *, run: str, port: int, host: str = "0.0.0.0") -> None:  # noqa: S104 - scraped from elsewhere
        """Start the server. Port 0 selects a free port.

        Raises `UserError` if the package prometheus_client is missing.
        """
        require_package("prometheus")
        from prometheus_client import CollectorRegistry

        self._run, self._registry = run, CollectorRegistry()
        self._gauges: dict[str, Callable[[float], None]] = {}
        self._port, self._host = port, host
        self._server: tuple[WSGIServer, Thread] | None = None
        self._has_warned, self._next = False, 0.0
        self._listen()

    @property
    def port(self) -> int:
        """Port of the server."""
        return self._port if self._server is None else self._server[0].server_port

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        """Set `d9d_step` to the step that the run resumes from."""
        self._set("step", max(step, 0))

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Replace the served values of these names, and set the step and the time."""
        if self._server is None and time.monotonic() >= self._next:
            self._listen()
        for name, value in values.items():
            if not isinstance(value, Media):
                self._set(name, value)
        self._set("step", step)
        self._set("updated_seconds", time.time())

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()

    def _listen(self) -> None:
        from prometheus_client import start_http_server

        try:
            self._server = start_http_server(self._port, self._host, self._registry)
        except OSError as error:
            self._next = time.monotonic() + _RETRY_SECONDS
            if not self._has_warned:
                _LOGGER.warning(
                    "the prometheus tracker cannot listen on %s:%d and tries again: %s. Give each run of a host a port "
                    "of its own.",
                    *(self._host, self._port, error),
                )
            self._has_warned = True

    def _set(self, name: str, value: float) -> None:
        name = f"d9d_{_INVALID.sub('_', name)}"
        if name not in self._gauges:
            from prometheus_client import Gauge

            gauge = Gauge(name, "Latest value of the run.", ["run"], registry=self._registry)
            self._gauges[name] = gauge.labels(self._run).set
        self._gauges[name](value)


@final
class PrometheusTrackerConfig(ExtraTrackerConfig):
    """Configuration of a text endpoint for Prometheus on the host of rank 0; needs the extra `prometheus`.

    Attributes:
        host: Address to listen on; by default all addresses of the host.
    """

    kind: Literal["prometheus"] = "prometheus"
    port: int = Field(default=9400, ge=1, le=65535)
    host: str = "0.0.0.0"  # noqa: S104 - scraped from elsewhere

    def build(self, run_dir: Path) -> PrometheusTracker:
        """Create the tracker. It needs no background thread and no spool, because it does not delay steps."""
        return self._opener(run_dir)()

    def _opener(self, run_dir: Path) -> Callable[[], PrometheusTracker]:
        return lambda: PrometheusTracker(run=run_dir.resolve().name, port=self.port, host=self.host)

"""S3 servers that tests start, and an application that forwards requests to them."""

import getpass
import http.client
import os
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

KEY, SECRET = "test:tester", "test"
App = Callable[[dict[str, Any], Any], Iterable[bytes]]
_SECONDS = 120.0  # to start a server
_OF_THE_HOP = ("connection", "transfer-encoding", "expect")


@contextmanager
def moto_app(_: Path) -> Generator[App]:
    """Return moto's server, which runs in this process."""
    moto = pytest.importorskip("moto.server", reason="needs moto, which is optional")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
        yield moto.DomainDispatcherApplication(moto.create_backend_app)


@contextmanager
def rclone_app(folder: Path) -> Generator[App]:
    """Start `rclone serve s3` on a folder."""
    if (rclone := os.environ.get("D9D_RCLONE")) is None:
        pytest.skip("needs the lane s3 of .ci/nightly, which has rclone")
    (folder / "root").mkdir()
    port = _free_port()
    words = [rclone, "serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--addr", f"127.0.0.1:{port}", folder / "root"]
    with (folder / "rclone.log").open("w") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        try:
            _wait_for(port, process)
            yield _forwarded(port)
        finally:
            process.kill()


_RINGS = """
import sys
from swift.common.ring import RingBuilder
for kind, port in zip(("account", "container", "object"), sys.argv[1:]):
    builder = RingBuilder(2, 1, 1)
    builder.add_dev(
        {"id": 0, "region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(port), "device": "disk", "weight": 1}
    )
    builder.rebalance()
    builder.get_ring().save(f"{kind}.ring.gz")
"""
_FILTERS = {
    "catch_errors": "",
    "cache": "use = egg:swift#memcache",
    "listing_formats": "",
    "s3api": "min_segment_size = 1\nlocation = us-east-1",
    "tempauth": f"user_{KEY.replace(':', '_')} = {SECRET} .admin",
    "bulk": "",
    "slo": "",
}


@contextmanager
def swift_app(folder: Path) -> Generator[App]:
    """Start the four servers of OpenStack Swift, whose proxy has an S3 interface."""
    if (programs := os.environ.get("D9D_SWIFT")) is None:
        pytest.skip("needs the lane s3 of .ci/nightly, which has Swift")
    kinds = ("account", "container", "object", "proxy")
    ports = dict(zip(kinds, (_free_port() for _ in kinds), strict=True))
    (folder / "devices" / "disk").mkdir(parents=True)
    (folder / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = d9d\n")
    words = [Path(programs, "python"), "-c", _RINGS, *map(str, list(ports.values())[:3])]
    subprocess.run(words, cwd=folder, check=True, timeout=_SECONDS)
    with ExitStack() as running:
        for kind, port in ports.items():
            (folder / f"{kind}.conf").write_text(_configuration(kind, port, folder))
            log = running.enter_context((folder / f"{kind}.log").open("w"))
            words = [Path(programs, f"swift-{kind}-server"), folder / f"{kind}.conf", "-v"]
            process = running.enter_context(subprocess.Popen(words, stdout=log, stderr=log))
            running.callback(process.kill)
            _wait_for(port, process)
        yield _forwarded(ports["proxy"])


def _configuration(kind: str, port: int, folder: Path) -> str:
    filters = _FILTERS if kind == "proxy" else {}
    sections = [
        f"[DEFAULT]\nswift_dir = {folder}\ndevices = {folder / 'devices'}\nmount_check = false",
        f"bind_ip = 127.0.0.1\nbind_port = {port}\nworkers = 0\nuser = {getpass.getuser()}",
        f"[pipeline:main]\npipeline = {' '.join([*filters, f'{kind}-server'])}",
        f"[app:{kind}-server]\nuse = egg:swift#{kind}"
        + ("\naccount_autocreate = true\nconn_timeout = 60\nnode_timeout = 60" if kind == "proxy" else ""),
    ]
    for name, options in filters.items():
        sections.append(
            f"[filter:{name}]\n" + (options if "use =" in options else f"use = egg:swift#{name}\n{options}")
        )
    return "\n".join(sections) + "\n"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"{process.args} does not answer; its exit code is {process.poll()}")


def _forwarded(port: int) -> App:
    """Return an application that sends each request to a port, with the headers that its signature covers."""

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        headers = {name[5:].replace("_", "-"): str(value) for name, value in environ.items() if name[:5] == "HTTP_"}
        headers |= {
            name.replace("_", "-"): environ[name] for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(name)
        }
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
        try:
            kept = {name: value for name, value in headers.items() if name.lower() not in _OF_THE_HOP}
            connection.request(environ["REQUEST_METHOD"], environ["REQUEST_URI"], body, kept)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        kept_answer = [pair for pair in answer.getheaders() if pair[0].lower() not in _OF_THE_HOP]
        start_response(f"{answer.status} {answer.reason}", kept_answer)
        return [content]

    return app


SERVERS = {"moto": moto_app, "rclone": rclone_app, "swift": swift_app}

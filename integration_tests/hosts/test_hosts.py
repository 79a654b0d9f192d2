"""The hosts of these tests behave as hosts: own names, disks and processes, and links that are cut."""

import subprocess

import pytest

from hosts.hosts import PORT, Hosts

_SERVER = f"import socket; s = socket.create_server(('', {PORT})); print('ready', flush=True)\nwhile True: s.accept()"
_CLIENT = f"import socket, sys; socket.create_connection((sys.argv[1], {PORT}), timeout=float(sys.argv[2]))"


def _connect(hosts: Hosts, source: int, name: str, *, seconds: float) -> None:
    hosts.run(source, "python3", "-S", "-c", _CLIENT, name, str(seconds))


@pytest.mark.parametrize("delay", [0.0, 0.01], ids=["bridge", "switch"])
def test_a_host_that_is_cut_off_is_unreachable_until_its_link_is_mended(delay: float) -> None:
    with Hosts(2, delay=delay, rate="100mbit") as hosts:
        server = hosts.start(1, "python3", "-S", "-c", _SERVER)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        _connect(hosts, 0, "host1", seconds=30)
        hosts.cut(1)
        with pytest.raises(subprocess.CalledProcessError):
            _connect(hosts, 0, "host1", seconds=0.3)
        hosts.mend(1)
        _connect(hosts, 0, "host1", seconds=30)
        hosts.power_off(1)
        assert server.wait(timeout=10) != 0


def test_each_host_has_its_own_name_disk_and_memory_files() -> None:
    with Hosts(2, disk_mib=1) as hosts:
        for number in range(2):
            hosts.run(number, "sh", "-c", f"hostname > {hosts.local}/name && hostname > /dev/shm/name")
        for number in range(2):
            assert hosts.run(number, "cat", f"{hosts.local}/name", "/dev/shm/name") == f"host{number}\n" * 2  # noqa: S108
        hosts.run(0, "touch", f"{hosts.shared}/file")
        assert hosts.run(1, "ls", str(hosts.shared)) == "file\n"
        with pytest.raises(subprocess.CalledProcessError):
            hosts.run(0, "dd", "if=/dev/zero", f"of={hosts.local}/full", "bs=1M", "count=2")


def test_an_error_ends_the_processes_on_the_hosts() -> None:
    started: list[subprocess.Popen[str]] = []

    def fail() -> None:
        with Hosts(1) as hosts:
            started.append(hosts.start(0, "sleep", "infinity"))
            hosts.run(0, "false")

    with pytest.raises(subprocess.CalledProcessError):
        fail()
    assert started[0].returncode != 0

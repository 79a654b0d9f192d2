"""Hosts as Linux namespaces on one machine, joined by a network whose links can be cut, slow or lossy.

A host has its own network, host name, process ids, `/dev/shm` and local disk. Other files, such as the interpreter and
a shared folder, are those of the machine. All namespaces end with the process that created them, even if it is killed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, final

_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child")
_TOOLS = ("unshare", "nsenter", "ip", "tc", "mount")
_SWITCH = Path(__file__).with_name("switch.py")
_REBOOT_SECONDS = 60.0
PORT = 29500  # free on every host, because each has its own network


def why_unsupported() -> str | None:
    """Return why this machine cannot run hosts, or `None`."""
    if os.geteuid() != 0:
        return "hosts as namespaces need root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"hosts as namespaces need {', '.join(missing)}"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "hosts as namespaces need /dev/net/tun"
    link = ("ip", "link", "add", "name", "bridge0", "type", "bridge")
    tried = subprocess.run(["unshare", *_NAMESPACES, *link], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"hosts as namespaces are not allowed: {tried.stderr.strip()}"


@final
class Hosts:
    """Context manager with a few hosts, named host0, host1, ..., which reach each other by name.

    Attributes:
        shared: Folder that all hosts see.
        local: Folder of which each host sees its own, as a local disk.

    Args:
        num_hosts: Number of hosts.
        delay: Time from one host to another, in seconds.
        loss: Probability that a packet is lost.
        rate: Bandwidth of each host's link in the syntax of `tc`, such as "100mbit"; `None` for no limit.
        disk_mib: Size of each host's local disk; `None` for a folder of this machine.
        aliases: More names of each host, with `{}` in place of its number.
        sysctls: Network settings of the kernel, such as `{"net.ipv4.tcp_rto_max_ms": 2000}`.
    """

    def __init__(
        self,
        num_hosts: int,
        *,
        delay: float = 0.0,
        loss: float = 0.0,
        rate: str | None = None,
        disk_mib: int | None = None,
        aliases: Sequence[str] = (),
        sysctls: dict[str, int] | None = None,
    ) -> None:
        self.names = [f"host{number}" for number in range(num_hosts)]
        self._aliases = aliases
        self._delay, self._loss, self._rate = delay, loss, rate
        self._disk_mib, self._sysctls = disk_mib, sysctls or {}
        self._open = ExitStack()
        self._inits: dict[int, int] = {}
        self._switch: subprocess.Popen[str] | None = None
        self._bridge = 0

    def __enter__(self) -> Self:
        """Create the hosts and their network."""
        with ExitStack() as opened:
            self._folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="d9d-hosts-")))
            self._open = opened
            self.shared, self.local = self._folder / "shared", self._folder / "local"
            for folder in (self.shared, self.local, *(self._folder / name for name in self.names)):
                folder.mkdir()
            addresses = [
                f"{_address(number)} {name} {' '.join(alias.format(number) for alias in self._aliases)}\n"
                for number, name in enumerate(self.names)
            ]
            (self._folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(addresses), encoding="utf-8")
            for number in range(len(self.names)):
                self._boot(number)
            self._connect()
            self._open = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End all processes on all hosts."""
        self._open.close()

    def init_process(self, host: int) -> int:
        """Return the process id of a host's first process, whose namespaces are those of the host."""
        return self._inits[host]

    def disk(self, host: int) -> Path:
        """Return a host's local disk as this machine sees it; empty if the disk has a size."""
        return self._folder / self.names[host]

    def cut(self, host: int) -> None:
        """Disconnect a host: its packets, and packets for it, are lost."""
        self._set_link(host, "cut", "down")

    def mend(self, host: int) -> None:
        """Reconnect a host."""
        self._set_link(host, "mend", "up")

    def power_off(self, host: int) -> None:
        """Disconnect a host, then kill all its processes. Other hosts see no closed connections."""
        self.cut(host)
        os.kill(self._inits[host], 9)

    def reboot(self, host: int) -> None:
        """Start a host that lost its power: with an empty memory, its disk, and no processes. Needs the bridge."""
        assert self._switch is None, "expected hosts without delay or loss"
        # The interface of the old host is deleted some time after its last process.
        deadline = time.monotonic() + _REBOOT_SECONDS
        while f"port{host}:" in (ports := self._in_bridge("ip -o link")) or f"port{host}@" in ports:
            assert time.monotonic() < deadline, f"host {host} still has its interface"
            time.sleep(0.02)
        self._boot(host)
        self._plug_in(host)
        self._configure_link(host)

    def run(self, host: int, *command: str) -> str:
        """Run a command on a host; return its output. Raises if the command fails."""
        return subprocess.run([*self._enter(host), *command], check=True, capture_output=True, text=True).stdout

    def start(self, host: int, *command: str, environment: dict[str, str] | None = None) -> "subprocess.Popen[str]":
        """Start a command on a host, with its stdout and stderr as one pipe."""
        started = self._open.enter_context(
            subprocess.Popen(
                [*self._enter(host), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "D9D_DEVICE": "cpu", "OMP_NUM_THREADS": "1", **(environment or {})},
            )
        )
        self._open.callback(started.kill)  # before the context of `Popen` waits for its end
        return started

    def torchrun(self, *arguments: str, hosts: Sequence[int] | None = None) -> "list[subprocess.Popen[str]]":
        """Start `torchrun` with the same arguments on each host, or on some."""
        launcher = (sys.executable, "-m", "torch.distributed.run")
        return [self.start(host, *launcher, *arguments) for host in hosts or range(len(self.names))]

    def _boot(self, host: int) -> None:
        size = (
            f"-t tmpfs -o size={self._disk_mib}m tmpfs" if self._disk_mib is not None else f"--bind {self.disk(host)}"
        )
        commands = [
            f"hostname {self.names[host]}",
            "mount -t tmpfs tmpfs /dev/shm",
            f"mount --bind {self._folder}/hosts /etc/hosts",
            f"mount {size} {self.local}",
            "ip link set lo up",
            *(f"sysctl -q -w {name}={value}" for name, value in self._sysctls.items()),
        ]
        self._inits[host] = self._create(commands)

    def _create(self, commands: Sequence[str]) -> int:
        """Create namespaces in which the commands have run; return the process id of their first process."""
        script = " && ".join([*commands, "echo ready", "read _"])
        holder = subprocess.Popen(
            ["unshare", *_NAMESPACES, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert holder.stdin is not None
        assert holder.stdout is not None
        self._open.callback(holder.wait)
        self._open.callback(holder.stdout.close)
        self._open.callback(holder.stdin.close)  # its `read` ends, and with it all processes of the namespaces
        if holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"namespaces could not be created: {script}")
        return int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text(encoding="ascii"))

    def _connect(self) -> None:
        """Connect the hosts by a bridge, or by the switch if packets are delayed or lost."""
        if self._delay or self._loss:
            self._start_switch()
        else:
            self._bridge = self._create(["ip link add bridge0 type bridge", "ip link set bridge0 up"])
            for number in self._inits:
                self._plug_in(number)
        for number in self._inits:
            self._configure_link(number)

    def _plug_in(self, host: int) -> None:
        port = f"port{host}"
        # A host has the same hardware address after a reboot. Others would send packets to the old one for a minute.
        own = f"name eth0 address 02:00:00:00:00:{host:02x} netns {self._inits[host]}"
        self._in_bridge(f"ip link add {port} type veth peer {own}")
        self._in_bridge(f"ip link set {port} master bridge0 up")

    def _configure_link(self, host: int) -> None:
        rate = f"tc qdisc add dev eth0 root tbf rate {self._rate} burst 128kb latency 400ms"
        commands = [f"ip addr add {_address(host)}/24 dev eth0", "ip link set eth0 up"]
        self.run(host, "sh", "-c", " && ".join([*commands, *([rate] if self._rate is not None else [])]))

    def _start_switch(self) -> None:
        inits = [str(init) for init in self._inits.values()]
        command = [sys.executable, str(_SWITCH), str(self._delay), str(self._loss), *inits]
        self._switch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._open.enter_context(self._switch)
        self._open.callback(self._switch.kill)
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != "ready\n":
            raise RuntimeError("the switch could not be started")

    def _set_link(self, host: int, command: str, state: str) -> None:
        if self._switch is None:
            self._in_bridge(f"ip link set port{host} {state}")
            return
        assert self._switch.stdin is not None
        self._switch.stdin.write(f"{command} {host}\n")
        self._switch.stdin.flush()

    def _in_bridge(self, command: str) -> str:
        entered = ["nsenter", "-t", str(self._bridge), "--net", *command.split()]
        return subprocess.run(entered, check=True, capture_output=True, text=True).stdout

    def _enter(self, host: int) -> list[str]:
        return ["nsenter", "-t", str(self._inits[host]), "--all", f"--wd={Path.cwd()}"]


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"

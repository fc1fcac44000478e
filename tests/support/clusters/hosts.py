"""Simulates hosts with network namespaces on a bridge, and runs a Ray cluster on them.

All hosts share files, process ids and the machine's name. Each host has its own network: ports may
be the same on all hosts, and loopback stays on the host. The machine itself is also on the bridge,
as the place of the users.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

from clusters.ray_heads import BIN, SHELL, new_token
from waiting import wait_until

_IP = shutil.which("ip")
_MAX_NETWORKS, _MAX_HOSTS, _USERS = 250, 20, 254
_START_TIMEOUT_S = 300
_OBJECT_STORE_BYTES = 100_000_000


def why_no_hosts() -> str | None:
    """Return why this machine cannot make hosts; None if it can."""
    if _IP is None:
        return "there is no command ip (iproute2)"
    try:
        with network() as made:
            made.add()
    except RuntimeError as error:
        return f"network namespaces cannot be made: {error}"
    return None


class Network:
    """A bridge with the hosts that are connected to it."""

    def __init__(self, ends: ExitStack) -> None:
        """Make the first bridge whose name is free, since several tests may run at once.

        Args:
            ends: Stack that gets the callbacks that remove the bridge and its hosts.
        """
        self._ends = ends
        self.hosts: list[Host] = []
        self._number = next(number for number in range(_MAX_NETWORKS) if _makes_bridge(number))
        ends.callback(_ip, "link", "delete", self.name)
        up = [
            f"link set {self.name} address {self.hardware(_USERS)} up",
            f"address add {self.address(_USERS)}/24 dev {self.name}",
        ]
        _ip(batch=[*up, *self.neighbours(self.name, _USERS)])

    @property
    def name(self) -> str:
        """Name of the bridge; the hosts' names begin with it."""
        return _bridge(self._number)

    def add(self) -> Host:
        """Add a host that is up and runs no process."""
        host = Host(self, len(self.hosts) + 1, self._ends)
        self.hosts.append(host)
        return host

    def address(self, number: int) -> str:
        """Return a host's address, in the range that RFC 2544 reserves for tests of networks."""
        return f"198.18.{self._number}.{number}"

    def hardware(self, number: int) -> str:
        """Return the hardware address of a host's network card."""
        return f"02:00:c6:12:{self._number:02x}:{number:02x}"

    def neighbours(self, device: str, number: int) -> list[str]:
        """Return lines for ``ip -batch`` that tell a host the addresses of all others.

        Without them, packets to a host that is gone come back as errors of this machine. In a data
        centre they are lost without notice.
        """
        others = {*range(1, _MAX_HOSTS + 1), _USERS} - {number}
        return [
            f"neighbour replace {self.address(other)} lladdr {self.hardware(other)} "
            f"nud permanent dev {device}"
            for other in sorted(others)
        ]


class Host:
    """One running host, made by `Network.add`."""

    def __init__(self, network: Network, number: int, ends: ExitStack) -> None:
        self.address = network.address(number)
        self.files = Path(tempfile.mkdtemp(prefix="mh-", dir="/tmp"))  # short, for sockets
        ends.callback(shutil.rmtree, self.files, ignore_errors=True)
        self._name, self._link = f"{network.name}h{number}", f"{network.name}v{number}"
        self._started: list[subprocess.Popen[bytes]] = []
        _ip("netns", "add", self._name)
        ends.callback(_ip, "netns", "delete", self._name)
        _ip("link", "add", self._link, "type", "veth", "peer", "eth0", "netns", self._name)
        ends.callback(_ip, "link", "delete", self._link)  # sooner than the kernel would
        ends.callback(self.cut_power)
        _ip("link", "set", self._link, "master", network.name, "up")
        up = [
            "link set lo up",
            f"link set eth0 address {network.hardware(number)} up",
            f"address add {self.address}/24 dev eth0",
        ]
        _ip("-netns", self._name, batch=[*up, *network.neighbours("eth0", number)])

    def start(self, *command: str | Path, env: Mapping[str, str], log: str) -> None:
        """Start a program on the host; its output goes to ``log`` among the host's files."""
        with (self.files / log).open("wb") as printed:
            inside = self._inside(command)
            started = subprocess.Popen(inside, env=dict(env), stdout=printed, stderr=printed)
        self._started.append(started)

    def run(self, *command: str | Path, env: Mapping[str, str]) -> str:
        """Run a program on the host to its end and return its output."""
        inside = self._inside(command)
        done = subprocess.run(inside, env=dict(env), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def processes(self, name: str) -> list[int]:
        """Return the ids of the host's processes with ``name`` in their command line."""
        return [pid for pid in self._pids() if name in _command_of(pid)]

    def cut_power(self) -> None:
        """Kill all processes of the host after its link is down, so that no packet leaves it."""
        _ip("link", "set", self._link, "down")
        while pids := self._pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait()

    def _inside(self, command: Sequence[str | Path]) -> list[str]:
        assert _IP is not None
        return [_IP, "netns", "exec", self._name, *map(str, command)]

    def _pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self._name).split()]


class Cluster:
    """A Ray cluster on hosts: a head without CPUs for work, and workers.

    The cluster asks for a token. ``shell``, the environment of a user's commands, contains it, and
    so do ``headers``, for requests to the ``dashboard``.
    """

    def __init__(
        self, network: Network, environment: Callable[[Host], Mapping[str, str]], *, num_cpus: int
    ) -> None:
        """Start the head.

        Args:
            network: Network that gets the hosts.
            environment: Returns variables of a host's processes to add to those of ``shell``.
            num_cpus: Number of each worker's CPUs for Ray.
        """
        self._network = network
        self._environment = environment
        self._num_cpus = num_cpus
        self.shell = {**SHELL, **new_token()}
        self.headers = {"Authorization": f"Bearer {self.shell['RAY_AUTH_TOKEN']}"}
        self.workers: list[Host] = []
        self.head = network.add()
        self.dashboard = f"http://{self.head.address}:8265"
        everywhere = "0.0.0.0"  # noqa: S104 - in the head's own network
        options = {"port": 6379, "num-cpus": 0, "dashboard-host": everywhere}
        self._start(self.head, "--head", options=options)

    def add_worker(self) -> Host:
        """Start a worker on a new host and wait until it has joined."""
        worker = self._network.add()
        options = {"address": f"{self.head.address}:6379", "num-cpus": self._num_cpus}
        self._start(worker, options=options)
        self.workers.append(worker)
        return worker

    def cut_power(self, worker: Host) -> None:
        """Cut the power of a worker; see `Host.cut_power`."""
        self.workers.remove(worker)
        worker.cut_power()

    def has(self, host: Host) -> bool:
        """Return whether Ray lists a host as alive."""
        with suppress(httpx.TransportError):
            url = f"{self.dashboard}/nodes?view=summary"
            answer = httpx.get(url, headers=self.headers, timeout=10)
            if answer.status_code == httpx.codes.OK:
                nodes = answer.json()["data"]["summary"]
                states = {node.get("ip"): node["raylet"].get("state") for node in nodes}
                return states.get(host.address) == "ALIVE"
        return False

    def _start(self, host: Host, *flags: str, options: Mapping[str, str | int]) -> None:
        own = {
            "node-ip-address": host.address,
            "object-store-memory": _OBJECT_STORE_BYTES,
            "temp-dir": str(host.files),
        }
        arguments = [*flags, *(f"--{name}={value}" for name, value in {**own, **options}.items())]
        command = [BIN / "ray", "start", "--block", "--disable-usage-stats", *arguments]
        # All hosts have the machine's name, and gloo would look up that name's address.
        variables = {**self.shell, "GLOO_SOCKET_IFNAME": "eth0", **self._environment(host)}
        host.start(*command, env=variables, log="ray.txt")
        wait_until(lambda: self.has(host), _START_TIMEOUT_S, (host.files / "ray.txt").read_text)


@contextmanager
def network() -> Iterator[Network]:
    """Make a network for the length of the block; its hosts end with the block."""
    with ExitStack() as ends:
        yield Network(ends)


def _bridge(number: int) -> str:
    return f"mr{number}"


def _makes_bridge(number: int) -> bool:
    """Make a bridge; returns False if one with that name exists."""
    try:
        _ip("link", "add", _bridge(number), "type", "bridge")
    except RuntimeError as error:
        if "File exists" in str(error):
            return False
        raise
    return True


def _ip(*arguments: str, batch: Sequence[str] = ()) -> str:
    assert _IP is not None
    command = [_IP, *arguments, *(["-batch", "-"] if batch else [])]
    done = subprocess.run(command, input="\n".join(batch), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:  # it has ended meanwhile
        return ""

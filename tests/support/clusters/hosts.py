"""Hosts on this machine: network namespaces on a bridge, and a Ray cluster on them.

Files, process ids and the machine's name are common to all hosts. The network is each one's own:
ports may be the same everywhere, and loopback reaches nobody else. The machine itself is on the
bridge, too, as the place where users are.
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
_START_TIMEOUT_S = 90
_OBJECT_STORE_BYTES = 100_000_000


def why_no_hosts() -> str | None:
    """Why hosts cannot be made here; None where they can."""
    if _IP is None:
        return "there is no command ip (iproute2)"
    try:
        with network() as made:
            made.add()
    except RuntimeError as error:
        return f"network namespaces cannot be made: {error}"
    return None


class Network:
    """A bridge, and the hosts on it."""

    def __init__(self, ends: ExitStack) -> None:
        """Make the first bridge whose name is free, so that several tests may run at once.

        Args:
            ends: gets what takes the bridge and the hosts away.
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
        """Of the bridge; the names of hosts begin with it."""
        return _bridge(self._number)

    def add(self) -> Host:
        """A new host, up and without any process."""
        host = Host(self, len(self.hosts) + 1, self._ends)
        self.hosts.append(host)
        return host

    def address(self, number: int) -> str:
        """Of a host; the range is set apart for tests of networks (RFC 2544)."""
        return f"198.18.{self._number}.{number}"

    def hardware(self, number: int) -> str:
        """Address of a host's network card."""
        return f"02:00:c6:12:{self._number:02x}:{number:02x}"

    def neighbours(self, device: str, number: int) -> list[str]:
        """Lines for ``ip -batch`` that tell a host where all others are.

        Else what is sent to a host that is gone would come back as an error of this machine's own.
        In a data centre it is lost, and nobody says so.
        """
        others = {*range(1, _MAX_HOSTS + 1), _USERS} - {number}
        return [
            f"neighbour replace {self.address(other)} lladdr {self.hardware(other)} "
            f"nud permanent dev {device}"
            for other in sorted(others)
        ]


class Host:
    """A host that runs; made by `Network.add`."""

    def __init__(self, network: Network, number: int, ends: ExitStack) -> None:
        self.address = network.address(number)
        self.files = Path(tempfile.mkdtemp(prefix="mh-", dir="/tmp"))  # short: sockets lie there
        ends.callback(shutil.rmtree, self.files, ignore_errors=True)
        self._name, self._link = f"{network.name}h{number}", f"{network.name}v{number}"
        self._started: list[subprocess.Popen[bytes]] = []
        _ip("netns", "add", self._name)
        ends.callback(_ip, "netns", "delete", self._name)
        _ip("link", "add", self._link, "type", "veth", "peer", "eth0", "netns", self._name)
        ends.callback(_ip, "link", "delete", self._link)  # the kernel itself would take its time
        ends.callback(self.cut_power)
        _ip("link", "set", self._link, "master", network.name, "up")
        up = [
            "link set lo up",
            f"link set eth0 address {network.hardware(number)} up",
            f"address add {self.address}/24 dev eth0",
        ]
        _ip("-netns", self._name, batch=[*up, *network.neighbours("eth0", number)])

    def start(self, *command: str | Path, env: Mapping[str, str], log: str) -> None:
        """Start a program on the host; it prints to the file ``log`` among the host's files."""
        with (self.files / log).open("wb") as printed:
            inside = self._inside(command)
            started = subprocess.Popen(inside, env=dict(env), stdout=printed, stderr=printed)
        self._started.append(started)

    def run(self, *command: str | Path, env: Mapping[str, str]) -> str:
        """What a program prints that is run on the host to its end."""
        inside = self._inside(command)
        done = subprocess.run(inside, env=dict(env), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def processes(self, name: str) -> list[int]:
        """Ids of the host's processes that have ``name`` in their command line."""
        return [pid for pid in self._pids() if name in _command_of(pid)]

    def cut_power(self) -> None:
        """End everything on the host so that nobody hears of it: no packet leaves it any more."""
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
    """Ray on hosts of its own: a head, on which nothing runs that needs a CPU, and workers.

    It asks for a token, which ``shell`` has, the environment of a user's commands, and ``headers``
    for requests to ``dashboard``, its address.
    """

    def __init__(
        self, network: Network, environment: Callable[[Host], Mapping[str, str]], *, num_cpus: int
    ) -> None:
        """Start the head.

        Args:
            network: gets the hosts.
            environment: variables of a host's processes, beside those of ``shell``.
            num_cpus: of each worker, for Ray.
        """
        self._network = network
        self._environment = environment
        self._num_cpus = num_cpus
        self.shell = {**SHELL, **new_token()}
        self.headers = {"Authorization": f"Bearer {self.shell['RAY_AUTH_TOKEN']}"}
        self.workers: list[Host] = []
        self.head = network.add()
        self.dashboard = f"http://{self.head.address}:8265"
        everywhere = "0.0.0.0"  # noqa: S104 - of the head's own network
        options = {"port": 6379, "num-cpus": 0, "dashboard-host": everywhere}
        self._start(self.head, "--head", options=options)

    def add_worker(self) -> Host:
        """Start a worker on a new host, and wait until it has joined."""
        worker = self._network.add()
        options = {"address": f"{self.head.address}:6379", "num-cpus": self._num_cpus}
        self._start(worker, options=options)
        self.workers.append(worker)
        return worker

    def cut_power(self, worker: Host) -> None:
        """End a worker's host; see `Host.cut_power`."""
        self.workers.remove(worker)
        worker.cut_power()

    def has(self, host: Host) -> bool:
        """Whether Ray takes a host to be up."""
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
        # The machine's name is the same everywhere, and gloo would look its address up.
        variables = {**self.shell, "GLOO_SOCKET_IFNAME": "eth0", **self._environment(host)}
        host.start(*command, env=variables, log="ray.txt")
        wait_until(lambda: self.has(host), _START_TIMEOUT_S, (host.files / "ray.txt").read_text)


@contextmanager
def network() -> Iterator[Network]:
    """A network for the length of a block; everything on its hosts ends with it."""
    with ExitStack() as ends:
        yield Network(ends)


def _bridge(number: int) -> str:
    return f"mr{number}"


def _makes_bridge(number: int) -> bool:
    """Make a bridge, unless there is one of that name."""
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

"""Servers on the nodes of a Ray cluster. The only file that imports ray.

Ray finds room for processes, starts an actor there, and says when it is gone. What the run's servers and the run say to
each other goes past Ray: an actor starts the very server that a run on one machine starts, as a child on its own node,
and reports where it listens. So Ray's pickle carries settings and exit codes of this project, and never data.

Consumes: what to start. Produces: addresses, exit codes. Waits for: room, then a server to listen, each at most its own
limit. Unblocked by: the server, its death, its node's death. Shutdown: `stop` ends a server, then its actor; `close`
gives the room back and leaves the cluster.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headway.config import ConfigError
from headway.processes.child import Child, start_child, still_wanted, tail

GONE = -1
"""Exit code of a server that went with its actor or node."""

_KILL_S = 5.0
"""An actor that has not killed its server by then is killed itself."""

_LOOK_S = 0.2
"""How often a start is asked whether it is wanted still."""

_KNOCK_S = 10.0
"""How long a cluster's address may take to accept a connection."""

_LOCAL_STORE_BYTES = 80 << 20
"""No data goes through Ray's object store; this is the smallest it takes."""

CheckPlace = Callable[[str, str, bool], None]
"""Name of a server, its node, and whether that is this process's; raises ConfigError."""


class Place:
    """An actor: one server on whichever node the actor lives. The server ends when the actor does."""

    def __init__(self) -> None:
        self._child: Child | None = None

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def start(
        self, module: str, variables: dict[str, str], what: str, log: str, start_timeout_s: float
    ) -> tuple[str, int]:
        """Start the server here: its endpoint and process id. Raises RuntimeError."""
        host, path = get_node_ip_address(), Path(log)
        if not path.parent.is_dir():
            raise RuntimeError(
                f"{what} is placed on {host}, where there is no {path.parent}: put the run folder on a file system "
                "that all nodes share, at the same path"
            )
        self._child = start_child(
            module, variables, what=what, log_path=path, start_timeout_s=start_timeout_s, host=host
        )
        return self._child.endpoint, self._child.pid

    def wait(self) -> int:
        """The exit code, once there is one."""
        return self._started.process.wait()

    def kill(self) -> None:
        self._started.kill()

    def stop(self, grace_s: float) -> int:
        return self._started.stop(grace_s)

    @property
    def _started(self) -> Child:
        if self._child is None:
            raise RuntimeError("no server was started here")
        return self._child


class PlacedServer:
    """A server in an actor, as the run sees it: see `headway.processes.child.Server`."""

    def __init__(self, place: Any, endpoint: str, pid: int, log_path: Path) -> None:
        self._place, self.endpoint, self.pid, self.log_path = place, endpoint, pid, log_path
        self._end = place.wait.remote()
        self._code: int | None = None
        self._patience = float("inf")

    def poll(self) -> int | None:
        if self._code is None:
            if ray.wait([self._end], timeout=0)[0]:
                self._code = _code(self._end, 0)
            elif time.monotonic() > self._patience:
                ray.kill(self._place)
                self._code = GONE
        return self._code

    def kill(self) -> None:
        self._place.kill.remote()
        self._patience = min(self._patience, time.monotonic() + _KILL_S)

    def terminate(self) -> None:
        self._place.stop.remote(_KILL_S)

    def stop(self, grace_s: float = 3.0) -> int:
        code = self.poll()
        if code is None:
            code = self._code = _code(self._place.stop.remote(grace_s), grace_s + _KILL_S)
        ray.kill(self._place)
        return code

    def log_tail(self, num_lines: int = 20) -> str:
        return tail(self.log_path, num_lines)


class Cluster:
    """A connection to Ray, and room for a run's servers: one bundle each of a placement group.

    `address`: as `ray.init` takes it; empty joins the cluster of RAY_ADDRESS, or starts one on this machine. `bundles`:
    resources by the stem of a server's log file. `strategy`: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD. `timeout_s`:
    how long to wait for room. Raises ConfigError when the cluster is not there or has no room, and what `check_place`
    raises.
    """

    def __init__(
        self,
        address: str,
        bundles: Mapping[str, Mapping[str, float]],
        *,
        strategy: str,
        timeout_s: float,
        check_place: CheckPlace,
    ) -> None:
        self._bundles, self._timeout_s, self._check_place = bundles, timeout_s, check_place
        self._index = {name: index for index, name in enumerate(bundles)}
        self._group: Any = None
        self._owns = not ray.is_initialized()
        try:
            if self._owns:
                _connect(address, num_cpus=_sum(bundles).get("CPU", 1))
            self.host: str = get_node_ip_address()
            self._here = ray.get_runtime_context().get_node_id()
            self._group = placement_group([dict(needed) for needed in bundles.values()], strategy=strategy)
            if not self._group.wait(timeout_s):
                raise ConfigError(self._no_room(f"all {len(bundles)} servers ({strategy})", _sum(bundles)))
            for name, node in self._nodes().items():
                check_place(name, node, node == self._here)
        except BaseException:  # Ctrl-C while waiting for room, too
            self.close()
            raise

    def spawn(
        self,
        module: str,
        variables: Mapping[str, str],
        *,
        what: str,
        log_path: Path,
        start_timeout_s: float,
        is_wanted: Callable[[], bool] = still_wanted,
    ) -> PlacedServer:
        """As `headway.processes.child.start_child`, in this server's bundle, wherever Ray has put that by now."""
        name = log_path.stem
        needed = self._bundles[name]
        place: Any = (
            ray.remote(Place)
            .options(
                num_cpus=needed.get("CPU", 0),
                num_gpus=needed.get("GPU", 0),
                max_concurrency=4,  # `wait` holds a thread for as long as the server lives
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=self._index[name]
                ),
            )
            .remote()
        )
        try:
            node = _get(place.node.remote(), self._timeout_s, is_wanted)
            self._check_place(name, node, node == self._here)
            answer = place.start.remote(module, dict(variables), what, str(log_path.absolute()), start_timeout_s)
            endpoint, pid = _get(answer, start_timeout_s + self._timeout_s, is_wanted)
        except GetTimeoutError as error:
            ray.kill(place)
            raise RuntimeError(self._no_room(what, needed)) from error
        except (RayError, ConfigError) as error:
            ray.kill(place)
            raise RuntimeError(f"{what} did not start in the Ray cluster: {_first(error)}") from error
        return PlacedServer(place, endpoint, pid, log_path)

    def describe(self) -> str:
        """Which server is on which node."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        return ", ".join(f"{name} on {addresses[node]} ({node[:6]})" for name, node in self._nodes().items())

    def close(self) -> None:
        """Give the room back, and leave the cluster unless the caller had joined it before."""
        if self._group is not None:
            remove_placement_group(self._group)
        if self._owns:
            ray.shutdown()

    def _nodes(self) -> dict[str, str]:
        placed = placement_group_table(self._group)["bundles_to_node_id"]
        return {name: placed[index] for name, index in self._index.items()}

    def _no_room(self, what: str, needed: Mapping[str, float]) -> str:
        free, all_there_is = _shown(ray.available_resources()), _shown(ray.cluster_resources())
        return (
            f"the Ray cluster had no room for {what} within ray.place_timeout_s = {self._timeout_s:g}: needed "
            f"{dict(needed)}, free {free} of {all_there_is}; add nodes, or lower engines.num_engines, "
            "learner.num_ranks or their num_threads"
        )


def _connect(address: str, *, num_cpus: float) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere unless asked for
    address = address or os.environ.get("RAY_ADDRESS", "local")
    # On one machine of one's own, threads may outnumber cores, as without Ray.
    own: dict[str, Any] = {
        "num_cpus": max(num_cpus, os.cpu_count() or 1),
        "object_store_memory": _LOCAL_STORE_BYTES,
        "include_dashboard": False,
    }
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, **(own if address == "local" else {}))
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise ConfigError(f"ray.address = {address!r}: no Ray cluster answers there: {_first(error)}") from error


def _knock(address: str) -> None:
    """Ray itself waits for minutes where nobody listens. Raises OSError; other ways to name a cluster are Ray's own."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S).close()


def _get(answer: Any, timeout_s: float, is_wanted: Callable[[], bool]) -> Any:
    """What an actor answers. Raises RayError; GetTimeoutError also for an answer that is not wanted any more."""
    deadline = time.monotonic() + timeout_s
    while is_wanted() and (left_s := deadline - time.monotonic()) > 0:
        if ray.wait([answer], timeout=min(_LOOK_S, left_s))[0]:
            return ray.get(answer)
    raise GetTimeoutError


def _code(answer: Any, timeout_s: float) -> int:
    try:
        return ray.get(answer, timeout=timeout_s)
    except (RayError, GetTimeoutError):
        return GONE


def _first(error: Exception) -> str:
    """What an actor raised, without Ray's frames around it."""
    cause = getattr(error, "cause", None)
    return str(cause or error)


def _shown(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if name in ("CPU", "GPU")}


def _sum(bundles: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    names = {name for needed in bundles.values() for name in needed}
    return {name: sum(needed.get(name, 0) for needed in bundles.values()) for name in sorted(names)}

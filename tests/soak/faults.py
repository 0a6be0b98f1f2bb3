"""Kills, freezes, slows and cuts off the processes of a Ray, from a process of its own.

    python -m tests.soak.faults --folder FOLDER [--cut]

Prints the URL of a Redis and the address of a Ray of three nodes, which it starts; the nodes'
sessions are in the file FOLDER/sessions. A line "SEED SECONDS" on its input begins strikes, one
every SECONDS on average; the next line ends them, and what was frozen or cut off continues. Each
strike is printed. A node whose raylet has ended is replaced. It ends with its input.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from network import cut_ports
from ray_nodes import RayNodes
from serving import listening_ports, pids_of

from bench.redis_server import RedisServer

# By the titles that Ray gives to actors; some are struck more often than others.
TITLES = ("ray::WorkerActor",) * 5 + ("ray::RouterActor",) * 2
TITLES += ("ray::Controller", "redis", "raylet")
NODES, SLOTS = ("one", "two"), 3
SLICE_SECONDS = 0.05


class Struck:
    """The Redis, and Ray's nodes: the head, and two that workers are on."""

    def __init__(self, redis: RedisServer, rays: RayNodes, folder: Path) -> None:
        self._redis, self._rays, self._folder = redis, rays, folder
        for name in NODES:
            self.add(name)

    def add(self, name: str) -> None:
        self._rays.add(name, SLOTS)
        sessions = [str(node.pid) for node in self._rays.nodes.values()]
        (self._folder / "sessions").write_text(" ".join(sessions))

    def pids(self, title: str) -> list[int]:
        if title == "redis":
            return [self._redis.process.pid]
        if title == "raylet":
            return list(self._raylets())
        sessions = (node.pid for node in self._rays.nodes.values())
        return sorted(pid for session in sessions for pid in pids_of(session, title))

    def _raylets(self) -> dict[int, str]:
        """The names of their nodes."""
        return {
            pid: name
            for name in NODES
            for pid, line in self._rays.nodes[name].processes().items()
            if "/raylet/raylet " in line
        }

    def replacement(self, pid: int) -> Callable[[], None] | None:
        """What puts another in place of a process that ends and that nobody else restarts."""
        if pid == self._redis.process.pid:
            return self._start_redis
        name = self._raylets().get(pid)
        return functools.partial(self._replace_node, name) if name else None

    def _start_redis(self) -> None:
        self._redis.process.wait()
        self._redis.start()

    def _replace_node(self, name: str) -> None:
        self._rays.kill(name)
        self.add(name)


class Striker:
    def __init__(self, struck: Struck, seed: int, seconds: float, *, cuts: bool) -> None:
        self._struck, self._seconds = struck, seconds
        self._draw = random.Random(seed)
        self._strikes = [self._kill, self._kill, self._end, self._freeze, self._slow]
        self._strikes += [self._cut] if cuts else []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._draw.uniform(0.3, 1.7) * self._seconds):
            title = self._draw.choice(TITLES)
            strike = self._draw.choice(self._strikes)
            if found := self._struck.pids(title):
                pid = self._draw.choice(found)
                print(f"{strike.__name__.lstrip('_')} {title} {pid}", flush=True)
                self._strike(strike, pid)

    def _strike(self, strike: Callable[[int], None], pid: int) -> None:
        ends = strike in (self._kill, self._end)
        replace = self._struck.replacement(pid) if ends else None
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            strike(pid)
        if replace:
            self._ended.wait(self._draw.uniform(0.5, 3.0))
            replace()

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def _end(self, pid: int) -> None:
        os.kill(pid, signal.SIGTERM)

    def _freeze(self, pid: int) -> None:
        seconds = self._draw.uniform(0.5, 8.0)
        os.kill(pid, signal.SIGSTOP)
        self._ended.wait(seconds)
        os.kill(pid, signal.SIGCONT)

    def _slow(self, pid: int) -> None:
        """It gets half of the time, in slices."""
        until = time.monotonic() + self._draw.uniform(2.0, 8.0)
        while time.monotonic() < until:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(pid, number)
                time.sleep(SLICE_SECONDS)

    def _cut(self, pid: int) -> None:
        """Nobody reaches where it listens; what it has connected to itself, it still reaches."""
        with cut_ports(listening_ports(pid)):
            self._ended.wait(self._draw.uniform(0.5, 8.0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cut", action="store_true", help="in a network namespace of its own")
    options = parser.parse_args()
    with RedisServer(options.folder) as redis, RayNodes() as rays:
        struck = Struck(redis, rays, options.folder)
        print(redis.url, rays.address, flush=True)
        striker: Striker | None = None
        for line in sys.stdin:
            if striker:
                striker.end()
                striker = None
                print("quiet", flush=True)
            elif line.strip():
                seed, seconds = line.split()
                striker = Striker(struck, int(seed), float(seconds), cuts=options.cut)
        if striker:
            striker.end()


if __name__ == "__main__":
    main()

"""Lists what Baton's and Ray's processes on this machine listen on, and who can reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"  # the state of a socket in /proc/net/tcp
_OURS = ("baton", "ray::", "/ray/")
_TITLE = 40


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    address: str
    port: int
    process: str
    reach: str  # "this machine" or "the network"


def exposure() -> list[Listener]:
    """All listeners of the user's processes that are Baton's or Ray's."""
    found = set()
    for pid, title in _processes():
        if any(mark in title for mark in _OURS):
            short = title if title.startswith("ray::") else _program(title)
            for address, port in listeners(pid):
                near = ipaddress.ip_address(address).is_loopback
                found.add(Listener(address, port, short, "this machine" if near else "the network"))
    return sorted(found)


def listeners(pid: int) -> set[tuple[str, int]]:
    """The addresses and TCP ports that a process listens on; empty if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        links = _open_files(pid)
        return {where for link, where in _listening(pid) if link in links}
    return set()


def _processes() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == os.getuid() and int(entry.name) != os.getpid():
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                yield int(entry.name), title.decode(errors="replace").strip()


def _program(title: str) -> str:
    """The part of a command line that names what runs."""
    words = [Path(word).name for word in title.split() if not word.startswith("-")]
    if words and words[0].startswith("python"):
        words = words[1:] or words
    return " ".join(words)[:_TITLE]


def _listening(pid: int) -> Iterator[tuple[str, tuple[str, int]]]:
    """The link and address of each listening socket in the process's network namespace."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                host, _, port = fields[1].rpartition(":")
                yield f"socket:[{fields[9]}]", (_address(host), int(port, 16))


def _address(text: str) -> str:
    """The kernel writes addresses as words of 32 bits in its own byte order."""
    raw = bytes.fromhex(text)
    words = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    if len(words) == 4:
        return socket.inet_ntop(socket.AF_INET, words)
    address = ipaddress.IPv6Address(words)
    return str(address.ipv4_mapped or address)


def _open_files(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(entry))
    return found

"""A hub of our own: the parts of a Hugging Face hub's API that downloading a model needs.

GET  /api/models/ID[/revision/REV]   the commit
GET  /api/models/ID/tree/COMMIT      the files
HEAD, GET /ID/resolve/COMMIT/FILE    a small file, or a redirect to the store of large ones
GET  /store/DIGEST                   a large file, also a part of it
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LARGE = 1 << 16
"""Bytes of a file that the store keeps."""

TOKEN = "hf_" + "x" * 34


@dataclass
class Repository:
    """Branches, and the files of each commit."""

    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: bool = False
    gated: bool = False


class TinyHub:
    """Serves on a free port of this machine until it is closed."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []  # "GET /path", and " bytes=5-" of a part
        self.cuts = 0  # downloads that are still to be cut off
        self.down = False  # answers 503
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.hub = self  # type: ignore[attr-defined]
        self._server.daemon_threads = True
        port = self._server.server_port
        self.url = f"http://127.0.0.1:{port}"
        self.store = f"http://localhost:{port}/store"  # another host, as a hub's
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def push(self, name: str, files: dict[str, bytes] | Path, branch: str = "main") -> str:
        """Makes a commit and returns it."""
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir()}
        parts = [f"{path} {hashlib.sha1(data).hexdigest()}" for path, data in files.items()]
        commit = hashlib.sha1("\n".join([branch, *sorted(parts)]).encode()).hexdigest()
        repository = self.repositories.setdefault(name, Repository())
        repository.branches[branch] = commit
        repository.commits[commit] = files
        return commit

    def environment(self, home: Path) -> dict[str, str]:
        """Of a process that downloads from here, into its own cache."""
        unset = {name for name in os.environ if name.startswith("HF_")}
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        return {**kept, "HF_ENDPOINT": self.url, "HF_HOME": str(home)}

    def downloads(self) -> Counter[str]:
        """How often each file was sent, or a part of it."""
        paths = [line.split()[1] for line in self.requests if line.startswith("GET ")]
        return Counter(path for path in paths if not path.startswith("/api/"))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    @property
    def hub(self) -> TinyHub:
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        part = self.headers.get("Range", "")
        self.hub.requests.append(f"{self.command} {path} {part}".strip())
        if self.hub.down:
            self._send(503, b"")
            return
        match path.strip("/").split("/"):
            case ["api", "models", org, name]:
                self._send_commit(f"{org}/{name}", "main")
            case ["api", "models", org, name, "revision", *revision]:
                self._send_commit(f"{org}/{name}", "%2F".join(revision))
            case ["api", "models", org, name, "tree", commit]:
                self._send_tree(f"{org}/{name}", commit)
            case [org, name, "resolve", commit, *file]:
                self._send_file(f"{org}/{name}", commit, "/".join(file))
            case ["store", digest]:
                self._send_stored(digest, part)
            case _:
                self._send(404, b"")

    def _repository(self, name: str) -> Repository | None:
        """Sends why, if there is none for the caller."""
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self._has_token):
            self._send(401 if not self._has_token else 404, b"", {"X-Error-Code": "RepoNotFound"})
            return None
        return found

    @property
    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _send_commit(self, name: str, revision: str) -> None:
        if repository := self._repository(name):
            commit = repository.branches.get(revision, revision)
            if commit in repository.commits:
                self._send_json({"id": name, "sha": commit, "siblings": []})
            else:
                self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})

    def _send_tree(self, name: str, commit: str) -> None:
        if repository := self._repository(name):
            entries = [_entry(*item) for item in repository.commits[commit].items()]
            self._send_json(entries)

    def _send_file(self, name: str, commit: str, file: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        if repository.gated and not self._has_token:
            self._send(401, b"", {"X-Error-Code": "GatedRepo"})
            return
        data = repository.commits[commit][file]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_git_id(data)}"'}
        if len(data) < LARGE:
            self._send(200, data, headers)
            return
        digest = hashlib.sha256(data).hexdigest()
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        self._send(302, b"", {**headers, "Location": f"{self.hub.store}/{digest}"})

    def _send_stored(self, digest: str, part: str) -> None:
        commits = [c for r in self.hub.repositories.values() for c in r.commits.values()]
        files = {hashlib.sha256(data).hexdigest(): data for c in commits for data in c.values()}
        data, start = files[digest], 0
        headers = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if part:
            start = int(part.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206 if part else 200, data[start:], headers)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if len(body) >= LARGE and self.hub.cuts:
            self.hub.cuts -= 1
            body, self.close_connection = body[: len(body) // 2], True
        self.wfile.write(body)


def _entry(path: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {
        "type": "file",
        "oid": _git_id(data),
        "size": len(data),
        "path": path,
    }
    if len(data) >= LARGE:
        digest = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
    return entry


def _git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

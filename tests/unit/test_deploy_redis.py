"""The Redis of deploy/kubernetes, started as its pod starts it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from kustomize import OVERLAYS, find, is_redis, pods, render
from serving import Command

from baton.cluster.ports import free_port


@pytest.mark.skipif(
    not shutil.which("redis-server"), reason="needs redis-server (apt-get install redis-server)"
)
def test_the_script_of_the_redis_starts_one_that_asks_for_its_password(tmp_path: Path) -> None:
    rendered = render(OVERLAYS / "gpu-rdma")
    (pod,) = [pod for pod in pods(rendered) if is_redis(pod)]
    (container,) = pod["spec"]["containers"]
    (script,) = container["args"]
    settings = find(rendered, "ConfigMap", "baton-redis-config")["data"]["redis.conf"]
    folders = {mount["mountPath"]: tmp_path / mount["name"] for mount in container["volumeMounts"]}
    for path in sorted(folders, key=len, reverse=True):
        folders[path].mkdir()
        script, settings = (
            re.sub(rf"{path}(?=[/\s]|$)", str(folders[path]), text) for text in (script, settings)
        )
    port = free_port("127.0.0.1")
    (tmp_path / "config" / "redis.conf").write_text(settings.replace("6379", str(port)))
    (tmp_path / "password" / "password").write_text("secret")
    command = Command(tmp_path / "redis", [*container["command"], script])
    try:
        command.wait_for("Ready to accept connections")
        assert ping(port) == "NOAUTH Authentication required."
        assert ping(port, "secret") == "PONG"
        assert (tmp_path / "data" / "appendonlydir").is_dir()
    finally:
        command.end()


def ping(port: int, password: str = "") -> str:
    asked = ["redis-cli", "-p", str(port), "ping"]
    environment = {**os.environ, "REDISCLI_AUTH": password} if password else None
    return subprocess.run(asked, env=environment, capture_output=True, text=True).stdout.strip()

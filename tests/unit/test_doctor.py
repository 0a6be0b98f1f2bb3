"""`baton doctor` on this machine, and what its checks make of a bad one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from baton.cli import doctor
from baton.cli.app import app
from baton.cli.doctor import check_device, check_memory, check_ports, check_transports
from baton.core.config import parse
from baton.kernels.cpu import compiler


@pytest.fixture
def sound(tmp_path: Path) -> dict[str, object]:
    """A configuration that this machine can serve."""
    (tmp_path / "config.json").write_text("{}")
    ports = {"port": 0, "http_port": 0, "metrics_port": 0}
    return {"model": str(tmp_path), "router": ports, "device": "cpu"}


def test_doctor_names_the_transport_and_its_measured_rate(
    sound: dict[str, object], tmp_path: Path
) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(yaml.safe_dump(sound))
    result = CliRunner().invoke(app, ["doctor", "--config", str(file)])
    assert result.exit_code == 0, result.output
    verdicts = {line[5:18].strip(): line for line in result.output.splitlines()}
    assert "two workers here use nixl" in verdicts["transport"]
    assert "GB/s" in verdicts["transport"]
    assert verdicts["torch"].startswith("ok")


def test_doctor_fails_when_the_model_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the model is missing from need not be measured.
    monkeypatch.setattr(doctor, "check_transports", lambda config, device: iter(()))
    file = tmp_path / "baton.yaml"
    file.write_text(yaml.safe_dump({"model": str(tmp_path), "router": {"port": 0}}))
    result = CliRunner().invoke(app, ["doctor", "--config", str(file)])
    assert result.exit_code == 1
    assert "is not a folder with a config.json" in result.output


def test_a_port_that_is_taken_fails_and_is_named(sound: dict[str, object]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = parse({**sound, "router": {"port": port, "http_port": 0, "metrics_port": 0}})
        first, *others = check_ports(config)
    assert [item.verdict for item in (first, *others)] == ["fail", "ok", "ok"]
    assert f"127.0.0.1:{port} (router.port)" in first.finding


def test_pools_that_do_not_fit_into_memory_are_a_warning(sound: dict[str, object]) -> None:
    found = check_memory(parse({**sound, "decode": {"kv_memory": "900TiB"}}), "cpu")
    assert found.verdict == "warn"
    assert "decode.kv_memory" in found.advice


def test_memory_that_linux_would_give_back_is_free(
    sound: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = "MemTotal:  8388608 kB\nMemFree:  1024 kB\nMemAvailable:  6291456 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda path: meminfo if "meminfo" in path.name else "")
    assert check_memory(parse(sound), "cpu").finding.endswith("and 6.0 GiB are free")


def test_a_missing_gpu_fails(sound: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    device, found = check_device(parse({**sound, "device": "cuda"}))
    assert (device, found.verdict) == ("cpu", "fail")


def test_a_cpu_is_named_with_its_dtype_and_kernels(
    sound: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for has_amx, dtype in ((False, "float32"), (True, "bfloat16")):
        monkeypatch.setattr(compiler, "has_amx", lambda has=has_amx: has)
        monkeypatch.setattr(compiler, "rounds_to_bfloat16", lambda: False)
        _, found = check_device(parse(sound))
        assert f"{os.cpu_count()} cores: {dtype}, kernels compiled for " in found.finding
    monkeypatch.setattr(compiler, "_obstacle", lambda: "llvmlite is not installed")
    _, found = check_device(parse({**sound, "dtype": "bfloat16"}))
    assert found.finding.endswith(
        ": bfloat16, torch's own kernels, since llvmlite is not installed"
    )


def test_a_transport_that_cannot_work_fails_with_its_reason(sound: dict[str, object]) -> None:
    (found,) = check_transports(parse({**sound, "transport": "cuda_ipc"}), "cpu")
    assert found.verdict == "fail"
    assert "between GPUs" in found.finding

"""`baton doctor`: checks whether this host can serve, and how fast it moves pages.

A check has a verdict, a finding and advice:

ok    it works
warn  it works, but less well than it could, or only in part
fail  a cluster with this configuration would not run here
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

import typer
from typer import Option

from baton.cli.exposure import exposure
from baton.cli.terminal import AsJson, print_json
from baton.cluster.ports import take_port
from baton.core import config as configs
from baton.core import model_store
from baton.core.config import Config, with_device_defaults
from baton.core.errors import BatonError, InvalidConfig
from baton.core.host_memory import available_bytes

Verdict = Literal["ok", "warn", "fail"]

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}

SHARED_MEMORY = "/dev/shm"
LEAST_SHARED_BYTES = 512 << 20

# A quantized model beyond these limits is worse than its original.
MOST_PERPLEXITY, LEAST_AGREEMENT = 0.01, 0.97

# Page bytes, pages and pushes: on CPUs those of a small model, on GPUs those of a large one.
_PROBES = {"cpu": (64 << 10, 256, 10), "cuda": (2 << 20, 128, 20)}

_ADVICE = {
    "auto": "install nixl for CPU memory; on a GPU check that nothing else fills its memory",
    "nixl": "install nixl; it brings its own UCX",
    "cuda_ipc": "set transport: auto to fall back on NIXL",
}


@dataclass(frozen=True, slots=True)
class Check:
    verdict: Verdict
    subject: str
    finding: str
    advice: str = ""


def doctor(
    config: Path | None = Option(None, metavar="FILE", help="The cluster's YAML file."),
    exposed: bool = Option(
        False, "--exposure", help="Only list what the running cluster listens on here."
    ),
    quality: bool = Option(
        False, "--quality", help="Only compare the configured model with itself in float32."
    ),
    as_json: AsJson = False,
) -> None:
    """Check this host: devices, packages, model, ports, and how fast pages travel."""
    if exposed:
        _print_exposure(as_json)
        return
    checks = []
    for check in (check_quality if quality else run_checks)(configs.load(config)):
        checks.append(check)
        if not as_json:
            _print(check)
    if as_json:
        print_json([dataclasses.asdict(check) for check in checks])
    raise typer.Exit(any(check.verdict == "fail" for check in checks))


def _print_exposure(as_json: bool) -> None:
    found = exposure()
    if as_json:
        print_json([dataclasses.asdict(each) for each in found])
        return
    for each in found:
        reach = typer.style(each.reach, fg=None if each.reach == "this machine" else "yellow")
        typer.echo(f"{f'{each.address}:{each.port}':28}{each.process:42}{reach}")
    if not found:
        typer.echo("neither Baton nor Ray listens on this machine")


def _print(check: Check) -> None:
    verdict = typer.style(f"{check.verdict:5}", fg=_COLOURS[check.verdict])
    typer.echo(f"{verdict}{check.subject:13}{check.finding}")
    if check.advice:
        typer.echo(f"{'':18}{check.advice}")


def run_checks(config: Config) -> Iterator[Check]:
    """Runs every check, and yields each when it is done."""
    yield from check_packages()
    device, found = check_device(config)
    yield found
    yield check_memory(config, device)
    yield from map(check_model, configs.served_configs(config))
    yield from check_ports(config)
    yield check_shared_memory()
    yield from check_transports(config, device)


def check_quality(config: Config) -> Iterator[Check]:
    """Loads the model twice and predicts a text of 2,700 tokens with each."""
    from baton.engine.model_choice import choose_dtype, uses_fallback
    from baton.engine.quality import measure

    if config.models:
        raise InvalidConfig("--quality compares one model; give a file without `models`")
    device, found = check_device(config)
    yield found
    folder = model_store.locate(config.model)
    fallback = uses_fallback(folder, config.engine)
    quality = measure(
        folder,
        device,
        dtype=choose_dtype(config.dtype, device, fallback=fallback),
        engine=config.engine,
        quantization=config.quantization,
        kv_dtype=config.kv_dtype,
    )
    for each in (quality.overall, *quality.by_depth):
        good = each.perplexity_change <= MOST_PERPLEXITY and each.top_agreement >= LEAST_AGREEMENT
        yield Check(
            "ok" if good else "warn",
            f"{each.start:,} to {each.end:,}",
            f"perplexity {each.perplexity:.3f} ({each.perplexity_change:+.2%}), likeliest token the"
            f" same for {each.top_agreement:.1%}, log probabilities change by"
            f" {each.mean_change:.3f}, 99.9% by less than {each.worst_change:.2f}",
        )
    recalled, before = quality.recalled, quality.recalled_in_float32
    yield Check(
        "ok" if recalled >= before else "warn",
        "recall",
        f"{recalled} of {quality.facts} facts, {before} in float32",
    )


def check_packages() -> Iterator[Check]:
    python = ".".join(str(part) for part in sys.version_info[:3])
    yield Check("ok", "python", python)
    yield _package("torch", "fail", "no worker runs without it: install Baton's dependencies")
    yield _package("triton", "warn", "workers on a GPU need it")
    yield _package("ray", "warn", "`baton serve` needs it; workers can be started one by one")
    yield _package("nixl", "warn", "workers on a CPU, and on several hosts, need it")


def _package(name: str, verdict: Verdict, advice: str) -> Check:
    try:
        return Check("ok", name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(verdict, name, "not installed", advice)


def check_device(config: Config) -> tuple[str, Check]:
    """The device that workers would use, and its description."""
    import torch

    from baton.engine.model_choice import choose_dtype, describe_cpu

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if config.device == "cuda" and not names:
        advice = f"torch is built for CUDA {torch.version.cuda}: check nvidia-smi and the driver"
        if torch.version.cuda is None:
            advice = "this torch is built for CPUs: install one that is built for CUDA"
        return "cpu", Check("fail", "device", "device is cuda, but torch sees no GPU", advice)
    if config.device == "cpu" or not names:
        dtype = choose_dtype(config.dtype, "cpu")
        found = f"CPU, {os.cpu_count()} cores: {describe_cpu(dtype)}"
        return "cpu", Check("ok", "device", found)
    return "cuda", Check("ok", "device", f"{len(names)} GPU: {', '.join(names)}")


def check_memory(config: Config, device: str) -> Check:
    """Checks that the page pools of one worker of each role and model fit. Weights come on top."""
    configured = [with_device_defaults(each, device) for each in configs.served_configs(config)]
    wanted = sum(
        each.prefill.kv_memory + each.decode.kv_memory + each.draft_kv_memory for each in configured
    )
    free = _free_bytes(device)
    finding = f"a pool of each role takes {_gib(wanted)}, and {_gib(free)} are free"
    if wanted < free:
        return Check("ok", "pools", finding)
    return Check("warn", "pools", finding, "lower prefill.kv_memory or decode.kv_memory")


def _free_bytes(device: str) -> int:
    if device == "cpu":
        return available_bytes()
    import torch

    return int(torch.cuda.mem_get_info()[0])


def check_model(config: Config) -> Check:
    try:
        return Check("ok", "model", str(model_store.locate(config.model, download=False)))
    except BatonError as error:
        known = model_store.hub_name(config.model) is not None
        return Check("warn" if known else "fail", "model", error.message)


def check_ports(config: Config) -> Iterator[Check]:
    host = config.router.host
    for name in ("port", "http_port", "metrics_port"):
        port, field = getattr(config.router, name), f"router.{name}"
        try:
            take_port(host, port, field).close()
            yield Check("ok", "port", f"{host}:{port} ({field}) is free")
        except InvalidConfig as error:
            advice = "a router runs there already, or choose another"
            yield Check("fail", "port", error.message, advice)


def check_shared_memory() -> Check:
    """Checks /dev/shm, which Ray's object store and UCX use."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return Check("warn", "shm", f"{SHARED_MEMORY}: {error.strerror}", "mount a tmpfs there")
    free = found.f_bavail * found.f_frsize
    finding = f"{SHARED_MEMORY} has {_gib(free)} free"
    if free >= LEAST_SHARED_BYTES:
        return Check("ok", "shm", finding)
    return Check("warn", "shm", finding, "give a container more with --shm-size")


def check_transports(config: Config, device: str) -> Iterator[Check]:
    """Pushes pages from this process to another, as two workers would."""
    yield _probe(config.transport, device, "transport", "fail")
    if device == "cuda" and config.transport == "auto":
        yield _probe("nixl", device, "other hosts", "warn")


def _probe(wanted: str, device: str, subject: str, verdict: Verdict) -> Check:
    """Measures one transport. `verdict` applies if no page can be moved."""
    from baton.cli.transfer_probe import measure
    from baton.kv_transfer.routed_transport import choose_transport

    page_bytes, pages, pushes = _PROBES[device]
    make_transport = partial(choose_transport, wanted, device)
    try:
        measured = measure(
            make_transport, device, page_bytes=page_bytes, pages=pages, pushes=pushes
        )
    except (BatonError, RuntimeError) as error:  # RuntimeError: torch's, as when memory is short
        return Check(verdict, subject, f"no pages over {wanted}: {error}", _ADVICE[wanted])
    memory = "GPU" if device == "cuda" else "CPU"
    reason = measured.choice.why or f"the best there is for {memory} memory of one host"
    return Check(
        "ok",
        subject,
        f"two workers here use {measured.choice.transport} ({reason}):"
        f" {measured.gigabytes_per_second:.1f} GB/s in scattered pages of {page_bytes >> 10} KiB",
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"

"""`baton serve` as a user meets it: start, answer, survive losses, stop, say what is wrong."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from monitoring import QUERIES, metrics_of
from network import why_not
from serving import BATON, FREE_PORTS, MODEST, Command, Serve, pids_of, run, thread_ticks
from tiny_models import TINY_MODELS, save
from typer.testing import CliRunner

from baton import Client
from baton.cli.app import app
from baton.cli.exposure import listeners
from baton.core.errors import BatonError
from baton.core.metrics import FILES_FAILING

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One cluster of the embedded model; every test leaves it whole."""
    with Serve(tmp_path_factory.mktemp("serve"), modest=False) as cluster:
        yield cluster.ready()


def answer(serve: Serve) -> str:
    with serve.client() as client:
        return client.chat([("user", QUESTION)]).text


def test_it_shows_how_far_it_is_and_how_to_use_it(serve: Serve) -> None:
    for worker in ("prefill-0", "decode-0"):
        # A step shorter than the time between two looks may be missed.
        shown = re.findall(rf"^ +\d+\.\d s  {worker} +(\S.*)$", serve.stdout, re.MULTILINE)
        steps = ("importing torch", "loading the model in ")
        assert any(each.startswith(steps) for each in shown)
        assert shown[-1] == "ready"
    assert f'baton generate --address {serve.address} "' in serve.stdout
    assert serve.stderr == ""


def test_ray_runs_no_agents(serve: Serve) -> None:
    """They would take a start's time, and nothing uses them."""
    titles = serve.processes().values()
    assert sum("idle_agent.py" in title and "/raylet" not in title for title in titles) == 2
    assert not [title for title in titles if title.startswith(("ray::Dash", "ray::RuntimeEnv"))]


def test_it_answers(serve: Serve) -> None:
    command = [BATON, "generate", QUESTION, "--address", serve.address]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    assert ended.stdout == f"{ANSWER}\n"


def test_it_speaks_http_where_it_says(serve: Serve) -> None:
    found = re.search(r"curl (http://\S+)", serve.stdout)
    assert found
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    response = httpx.post(found[1], json=body, timeout=60)
    assert response.json()["choices"][0]["message"]["content"] == ANSWER


def test_nothing_listens_beyond_this_machine(serve: Serve) -> None:
    """Workers, router, controller, Ray's own processes, and NIXL's sockets."""
    found = {where for pid in serve.processes() for where in listeners(pid)}
    assert {int(serve.address.rpartition(":")[2])} < {port for _, port in found}
    assert {address for address, _ in found} == {"127.0.0.1"}
    command = [BATON, "doctor", "--exposure", "--json"]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    here = {(each["address"], each["port"]) for each in listed if each["reach"] == "this machine"}
    assert found <= here


def test_prometheus_finds_every_series_of_the_dashboard_and_the_alerts(serve: Serve) -> None:
    """On the router, and on the workers that it lists for service discovery."""
    assert answer(serve) == ANSWER
    found = re.search(r"curl (http://\S+)/v1/", serve.stdout)
    assert found
    (group,) = httpx.get(f"{found[1]}/metrics/targets").json()
    assert len(group["targets"]) == 2
    urls = [f"{found[1]}/metrics", *(f"http://{each}/metrics" for each in group["targets"])]
    text = "\n".join(httpx.get(url).text for url in urls)
    series = {line.partition("{")[0].split(" ")[0] for line in text.splitlines()}
    asked = {name for query in QUERIES for name in metrics_of(query)} - {"up"}
    # This cluster has no second tier.
    assert {name for name in asked - series if "_tier_" not in name} <= {FILES_FAILING}
    # The dashboard shows the series of the chosen models.
    lines = [line for line in text.splitlines() if line.startswith(tuple(asked))]
    assert [line for line in lines if 'model="SmolLM2-135M-Instruct"' not in line] == []


def test_its_status_shows_both_workers_attached(serve: Serve) -> None:
    status = json.loads(serve.ask("status", "--json"))
    attached = {item["member"]["worker_id"]: item["attached"] for item in status["workers"]}
    assert attached == {"prefill-0": True, "decode-0": True}


def test_its_workers_compute_on_every_core(serve: Serve) -> None:
    """Ray tells its processes to use one thread and to let others go first."""
    for name, prompt, tokens in (("prefill-0", [7] * 250, 1), ("decode-0", [7] * 2, 25)):
        worker = serve.worker(name)
        before = thread_ticks(worker)
        with serve.client() as client:
            client.generate(prompt, max_tokens=tokens, ignore_eos=True)
        spent = [ticks - before.get(tid, 0) for tid, ticks in thread_ticks(worker).items()]
        busy = [ticks for ticks in spent if ticks > max(spent) / 3]
        assert len(busy) == len(os.sched_getaffinity(worker)), spent
        assert os.getpriority(os.PRIO_PROCESS, worker) == os.getpriority(os.PRIO_PROCESS, serve.pid)


def kill_worker(serve: Serve, name: str) -> None:
    """Kills a worker, and returns when it is back."""
    starts = len(re.findall(f"{name} +ready", serve.stdout))
    os.kill(serve.worker(name), signal.SIGKILL)
    serve.wait_for(f"{name} +ready", starts + 1)


@pytest.mark.fleet
def test_a_stream_outlives_any_number_of_killed_workers(serve: Serve) -> None:
    """Each new process reports to the controller that the one before was killed from outside."""
    options = {"max_tokens": 500, "ignore_eos": True, "temperature": 0.0, "timeout": 300.0}
    with serve.client() as client:
        undisturbed = client.generate([7] * 20, **options)
        stream = client.stream([7] * 20, **options)
        tokens = iter(stream)
        for _ in range(4):
            for _ in range(4):
                next(tokens)
            kill_worker(serve, "decode-0")
        whole = stream.read()
    assert whole.token_ids == undisturbed.token_ids
    assert len(whole.placements) == 5
    serve.wait_whole()


def test_a_killed_router_comes_back_on_its_port(serve: Serve) -> None:
    os.kill(serve.actor("RouterActor"), signal.SIGKILL)
    serve.wait_whole()
    assert answer(serve) == ANSWER


@pytest.mark.fleet
def test_a_decode_worker_killed_after_the_controller_comes_back(serve: Serve) -> None:
    """Both are away at once: the new controller learns of the new worker all the same."""
    os.kill(serve.actor("Controller"), signal.SIGKILL)
    assert answer(serve) == ANSWER
    kill_worker(serve, "decode-0")
    assert answer(serve) == ANSWER
    serve.wait_whole()


@pytest.mark.fleet
def test_a_second_cluster_with_a_file_and_flags_runs_beside_the_first(
    serve: Serve, tiny: Path, tmp_path: Path
) -> None:
    file, model = tmp_path / "cluster.yaml", tmp_path / "model"
    shutil.copytree(tiny, model)
    (model / "generation_config.json").write_text('{"repetition_penalty": 1.05}')
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 32768}))
    settings = {"model": str(model), "model_name": "tiny", "page_size": 32}
    file.write_text(yaml.safe_dump({**settings, **MODEST}))
    flags = ["--config", str(file), "--prefill", "2", "--decode", "2", "--routers", "2"]
    with Serve(tmp_path, *flags, "--kv-memory", "32MiB", "--page-size", "8") as second:
        workers = second.ready().wait_whole(4)
        assert "Its defaults for requests: repetition_penalty 1.05." in second.stdout
        # K and V of 3 layers, 8 tokens, 4 heads of 12 numbers of 4 bytes.
        page_bytes = 2 * 3 * 8 * 4 * 12 * 4
        assert {item.total_pages for item in workers} == {32 * 2**20 // page_bytes}
        with second.client() as client:
            assert [model.name for model in client.models()] == ["tiny"]
            first = client.generate([1, 2, 3], max_tokens=9).token_ids
        found = re.search(r"router-1 is at (\S+)", second.wait_for("router-1 is at"))
        assert found
        with Client(found[1]) as client:
            assert client.generate([1, 2, 3], max_tokens=9).token_ids == first
        assert answer(serve) == ANSWER
        with second.client() as client:
            stream = client.stream([1, 2, 3], max_tokens=25_000, ignore_eos=True)
            next(iter(stream))
            second.send(signal.SIGINT)
            second.wait_for("stopping …")
            second.send(signal.SIGINT)
            with pytest.raises(BatonError):
                stream.read()
        assert (second.wait(), second.stderr) == (0, "")
        second.wait_gone()
    assert answer(serve) == ANSWER


@pytest.mark.parametrize(
    ("moment", "later", "number"),
    [("starting Ray", 1.0, signal.SIGINT), ("importing torch", 0.0, signal.SIGTERM)],
)
def test_a_signal_during_the_start_leaves_nothing_behind(
    moment: str, later: float, number: signal.Signals, tmp_path: Path
) -> None:
    with Serve(tmp_path) as starting:
        starting.wait_for(moment)
        time.sleep(later)
        starting.send(number)
        assert (starting.wait(), starting.stderr) == (0, "")
        assert "Baton serves" not in starting.stdout
        starting.wait_gone()


def test_progress_that_nobody_reads_is_dropped(tmp_path: Path) -> None:
    read_a_line = ["bash", "-c", 'exec "$@" > >(head -n 1)', "bash"]
    buffered = {"PYTHONUNBUFFERED": ""}
    with Serve(tmp_path, before=read_a_line, environment=buffered) as starting:
        starting.wait_for("starting Ray")
        while not pids_of(starting.pid, "ray::WorkerActor"):
            assert starting.processes()
            time.sleep(0.1)
        time.sleep(1.0)  # it prints what workers do
        starting.send(signal.SIGTERM)
        assert (starting.wait(), starting.stderr) == (0, "")
        assert starting.stdout == "starting Ray …\n"
        starting.wait_gone()


def test_a_terminal_that_is_closed_stops_it_once(tmp_path: Path) -> None:
    """The kernel and a shell may both tell of its end, also while the command ends."""
    with Serve(tmp_path) as starting:
        starting.wait_for("importing torch")
        starting.send_until_the_end(signal.SIGHUP)
        assert (starting.wait(), starting.stderr) == (0, "")
        assert "stopping …" in starting.stdout
        assert "ending all requests" not in starting.stdout
        starting.wait_gone()


def test_under_nohup_it_outlives_the_terminal(tmp_path: Path) -> None:
    with Serve(tmp_path, before=["nohup"]) as starting:
        starting.wait_for("starting Ray")
        starting.send(signal.SIGHUP)
        starting.wait_for("importing torch")
        assert "stopping …" not in starting.stdout
        starting.send(signal.SIGTERM)
        assert starting.wait() == 0
        starting.wait_gone()


def test_a_signal_to_the_whole_group_leaves_nothing_behind(tmp_path: Path) -> None:
    """`timeout` and supervisors send SIGTERM to every process of a group."""
    with Serve(tmp_path) as starting:
        starting.wait_for("importing torch")
        os.killpg(starting.pid, signal.SIGTERM)
        assert (starting.wait(), starting.stderr) == (0, "")
        starting.wait_gone()


def test_a_signal_that_another_thread_receives_ends_the_start(tmp_path: Path) -> None:
    """The kernel may give a process's signal to any of its threads, and wakes only that one."""
    with Serve(tmp_path) as starting:
        starting.wait_for("importing torch")
        other = max(int(tid) for tid in os.listdir(f"/proc/{starting.pid}/task"))
        assert other != starting.pid
        assert ctypes.CDLL(None).tgkill(starting.pid, other, signal.SIGTERM) == 0
        assert (starting.wait(), starting.stderr) == (0, "")
        starting.wait_gone()


def test_a_third_signal_ends_a_stop_that_hangs(tmp_path: Path) -> None:
    """Every step of the stop waits for Ray's head, here for ever."""
    with Serve(tmp_path) as starting:
        starting.wait_for("importing torch")
        os.kill(starting.ray_head(), signal.SIGSTOP)
        for said in ("stopping …", "ending all requests …"):
            starting.send(signal.SIGINT)
            starting.wait_for(said)
        starting.send(signal.SIGINT)
        assert starting.wait() == 1
        assert "launch.py" in starting.stderr  # where it hung
        assert "baton: the cluster did not stop in time; all killed; logs are" in starting.stderr
        starting.wait_gone()


@pytest.mark.fleet
def test_a_ray_whose_head_is_killed_ends_the_command(tmp_path: Path) -> None:
    with Serve(tmp_path) as cluster:
        os.kill(cluster.ready().ray_head(), signal.SIGKILL)
        assert cluster.wait() == 1
        (line,) = cluster.stderr.splitlines()
        assert line.startswith("baton: Ray has ended; all killed; logs are in ")
        cluster.wait_gone()


@pytest.mark.fleet
def test_a_signal_to_every_process_leaves_nothing_behind(tmp_path: Path) -> None:
    """systemd sends SIGTERM to every process of a service."""
    with Serve(tmp_path) as cluster:
        for pid in cluster.ready().processes():
            with contextlib.suppress(ProcessLookupError):  # it has ended with another one
                os.kill(pid, signal.SIGTERM)
        assert cluster.wait() == 0
        cluster.wait_gone()


@pytest.mark.fleet
def test_a_stop_whose_ray_has_no_head_does_not_wait_for_another(tmp_path: Path) -> None:
    """The stop asks Ray's head, which is about to end."""
    with Serve(tmp_path) as cluster:
        os.kill(cluster.ready().ray_head(), signal.SIGTERM)
        cluster.send(signal.SIGTERM)
        cluster.wait()
        assert "within 60 seconds" not in cluster.stderr
        cluster.wait_gone()


@pytest.mark.fleet
def test_a_router_that_is_told_to_end_finishes_its_answers_and_returns(tmp_path: Path) -> None:
    with Serve(tmp_path) as cluster:
        router = cluster.ready().actor("RouterActor")
        with (
            cluster.client() as client,
            client.stream("Hello", max_tokens=100, ignore_eos=True) as stream,
        ):
            arrived = len(next(iter(stream)).token_ids)
            os.kill(router, signal.SIGTERM)
            arrived += sum(len(delta.token_ids) for delta in stream)
        assert arrived == 100
        cluster.wait_for("router-0 +ready", 2)
        assert answer(cluster) == ANSWER


MOUNT = 'mount -t tmpfs -o size=100m tmpfs "$TMPDIR" && exec "$@"'


@pytest.mark.fleet
def test_a_worker_that_dies_while_the_logs_disk_is_full_returns_once_it_is_not(
    tmp_path: Path,
) -> None:
    """Ray counts a process that cannot write its log as alive, although it runs nothing."""
    if reason := why_not():
        pytest.skip(reason)
    before = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNT, "sh"]
    with (
        tempfile.TemporaryDirectory() as folder,  # Ray's sockets need short names
        Serve(tmp_path, environment={"TMPDIR": folder}, before=before) as cluster,
    ):
        starts = len(re.findall("decode-0 +ready", cluster.ready().stdout))
        filling = Path(f"/proc/{cluster.pid}/root{folder}/filling")
        with contextlib.suppress(OSError), filling.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        os.kill(cluster.worker("decode-0"), signal.SIGKILL)
        cluster.wait_for("decode-0 +silent")
        filling.unlink()
        cluster.wait_for("decode-0 +ready", starts + 1)
        assert answer(cluster) == ANSWER


BROKEN = """
from baton.__main__ import main
from baton.cluster import launch

class Broken(launch.Controller):
    def __init__(self, *_, **__):
        raise OSError("no route to this host")

launch.Controller = Broken
main()
"""


FROZEN = """
import os, signal
import ray._private.worker
from baton.__main__ import main
from baton.cluster import own_ray, ray_session

connect = ray._private.worker.connect

def freeze_and_connect(*arguments, **options):
    for started in own_ray._started:
        os.kill(started.process.pid, signal.SIGSTOP)
    connect(*arguments, **options)

ray._private.worker.connect = freeze_and_connect
ray_session.INIT_SECONDS = 3.0
main()
"""


@pytest.mark.fleet
def test_a_ray_that_freezes_while_it_starts_ends_the_command(tmp_path: Path) -> None:
    """Ray holds Python's lock while it waits for its node."""
    frozen = Command(tmp_path, [sys.executable, "-c", FROZEN, "serve", *FREE_PORTS])
    assert frozen.wait() == 1
    assert frozen.stderr.startswith("Timeout (0:00:03)!")
    assert "ray_session.py" in frozen.stderr
    frozen.wait_gone()


DEAD = """
import os, signal
from baton.__main__ import main
from baton.cluster import own_ray

start_process = own_ray._start_process

def start_and_kill(command, *arguments, **options):
    started = start_process(command, *arguments, **options)
    if command[0].endswith("/raylet"):
        os.kill(started.process.pid, signal.SIGKILL)
    return started

own_ray._start_process = start_and_kill
main()
"""


@pytest.mark.fleet
def test_a_ray_that_ends_while_it_starts_is_reported_with_its_logs(tmp_path: Path) -> None:
    dead = Command(tmp_path, [sys.executable, "-c", DEAD, "serve", *FREE_PORTS])
    assert dead.wait() == 1
    (line,) = dead.stderr.splitlines()
    assert line.startswith("baton: Ray cannot start: ")
    assert "; its logs are in " in line
    dead.wait_gone()


@pytest.mark.fleet
def test_a_controller_that_cannot_start_ends_the_command(tmp_path: Path) -> None:
    broken = Command(tmp_path, [sys.executable, "-c", BROKEN, "serve", *FREE_PORTS])
    assert broken.wait() == 1
    assert "baton: the controller cannot start: OSError: no route to this host" in broken.stderr
    broken.wait_gone()


def test_a_ray_that_cannot_start_is_told_in_one_line(tmp_path: Path) -> None:
    """Sockets have short names, and Ray's are in its folder."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    with Serve(tmp_path, environment={"TMPDIR": str(folder)}) as starting:
        assert starting.wait() == 1
        (line,) = starting.stderr.splitlines()
        assert line.startswith("baton: Ray cannot start: ")
        assert line.endswith(f"; its logs are in {folder}/ray/session_latest/logs")
        starting.wait_gone()


@pytest.mark.fleet
def test_a_start_without_memory_says_so(tmp_path: Path) -> None:
    """Ray kills what it starts, as often as it starts it."""
    with Serve(tmp_path, environment={"RAY_memory_usage_threshold": "0.01"}) as starting:
        assert starting.wait() == 1
        assert "ended while the cluster started; is there enough memory?" in starting.stderr
        starting.wait_gone()


CASES = {
    "an unknown key": (["--config", "{config}"], "unknown key page_sise; did you mean page_size?"),
    "a wrong dtype": (["--dtype", "int8"], "dtype must be one of auto, float32"),
    "no such model": (["--model", "/nowhere"], "'/nowhere' is not a folder with a config.json"),
    "another architecture": (["--model", "{mamba}"], "MambaForCausalLM keeps a state"),
    "defaults that are not supported": (["--model", "{beams}"], "num_beams 4 is not supported"),
    "too little memory": (
        ["--kv-memory", "1000B"],
        "kv_memory of 1000 bytes holds no page",
    ),
    "a port that is taken": (["--port", "{taken}"], "Address already in use"),
    "an HTTP port that is taken": (["--http-port", "{taken}"], "Address already in use"),
    "a metrics port that is taken": (["--metrics-port", "{taken}"], "Address already in use"),
    "no file of keys": (["--keys", "/nowhere.yaml"], "cannot read the keys in /nowhere.yaml"),
    "no file of keys at home": (
        ["--keys", "~/nowhere.yaml"],
        f"cannot read the keys in {Path.home().resolve()}/nowhere.yaml",
    ),
    "a file for batches": (["--batches", "{config}"], "batches.folder: "),
    "a file for pages": (["--config", "{pages}"], "wrong.yaml is not a folder"),
    "a file above pages": (["--config", "{below}"], "wrong.yaml/pages': Not a directory"),
    "a large pool": (["--prefill", "100000"], "prefill.workers must be from 1 to 1024, not 100000"),
    "workers beyond memory": (["--config", "{crowd}"], "262144 workers do not fit into this"),
    "a host that is not here": (["--host", "192.0.2.77"], "192.0.2.77"),
}


# Which asks transformers, for seconds; tests/unit/test_fallback.py has its message.
SLOW = "another architecture"


def wrong_flags(case: str, folder: Path, taken: socket.socket) -> list[str]:
    config = folder / "wrong.yaml"
    config.write_text("page_sise: 8")
    mamba = folder / "mamba"
    mamba.mkdir()
    (mamba / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    beams = folder / "beams"
    save(TINY_MODELS["llama"], beams)
    (beams / "generation_config.json").write_text('{"num_beams": 4}')
    crowd = {f"m{index}": {"model": str(beams)} for index in range(128)}
    written = {
        "pages": {"cache": {"files": str(config)}},
        "below": {"cache": {"files": f"{config}/pages"}},
        "crowd": {"models": crowd, "prefill": {"workers": 1024}, "decode": {"workers": 1024}},
    }
    for name, tree in written.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    files = {name: folder / f"{name}.yaml" for name in written}
    values = {"config": config, "mamba": mamba, "beams": beams, "taken": taken.getsockname()[1]}
    values.update(files)
    return [flag.format(**values) for flag in CASES[case][0]]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.fleet] * (case == SLOW)) for case in CASES]
)
def test_what_is_wrong_is_told_in_one_line_before_ray_starts(case: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = CliRunner().invoke(app, ["serve", *wrong_flags(case, tmp_path, taken)])
    assert ended.exit_code == 1
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("baton: ")
    assert CASES[case][1] in line


def test_what_is_wrong_ends_the_command(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = run(tmp_path, *wrong_flags("a port that is taken", tmp_path, taken))
    assert (ended.wait(), ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert re.fullmatch("baton: .*Address already in use.*", line)

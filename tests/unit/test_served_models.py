"""Models by name: in the configuration, and in a router."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.core import config as configs
from baton.core.errors import InvalidConfig, InvalidRequest, UnknownModel
from baton.core.types import Adapter, Request, Sampling
from baton.router.observe.metrics import MetricsByModel
from baton.router.requests.adapter_names import AdapterNames
from baton.router.requests.serving import Serving
from baton.router.served_models import ServedModel, ServedModels
from baton.router.workers.membership import Membership

SQL = Adapter(b"sql", "/a/sql")
TREE: dict[str, object] = {
    "page_size": 8,
    "decode": {"workers": 3, "threads": 1},
    "models": {
        "small": {"model": "/small", "decode": {"workers": 1}, "adapters": {"sql": "/sql"}},
        "large": {"model": "/large", "quantization": "int8", "router": {"reasoning": "off"}},
    },
}


def served(name: str, *adapters: str) -> ServedModel:
    names = AdapterNames(name, ["/a"])
    for adapter in adapters:
        names.serve(adapter, SQL)
    serving = SimpleNamespace(adapters=names, embedding_model=None)
    return ServedModel(name, cast(Serving, serving), cast(Membership, None))


@pytest.fixture
def models() -> ServedModels:
    made = ServedModels()
    made.add(served("small", "sql"))
    made.add(served("large"))
    return made


def test_each_model_has_the_shared_keys_and_its_own() -> None:
    config = configs.parse(TREE)
    small, large = configs.served_configs(config)
    assert (small.model, small.model_name, small.adapters) == ("/small", "small", {"sql": "/sql"})
    assert (small.decode.workers, small.decode.threads, small.page_size) == (1, 1, 8)
    assert (large.decode.workers, large.quantization, large.adapters) == (3, "int8", {})
    assert (large.router.reasoning, small.router.reasoning) == ("off", "auto")
    assert configs.parse(configs.dump(config)) == config
    assert small.models == large.models == {}, "a worker's has one model alone"


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"models": {"a": {}}}, "models.a must have the key model"),
        ({"models": {"a": 3}}, "models.a must hold keys and values"),
        ({"models": 3}, "models must hold names"),
        ({"models": {"a b": {"model": "x"}}}, "a model's name has letters"),
        ({"models": {"a": {"model": "x", "tls": {}}}}, "models.a.tls is not a key of one model"),
        ({"models": {"a": {"model": "x", "router": {"port": 1}}}}, "and nothing else"),
        ({"models": {"a": {"model": "x", "decode": {"wokers": 1}}}}, "did you mean workers"),
        ({"models": {"a": {"model": "x", "dtype": "x"}}}, "models.a: dtype must be one of"),
        ({"model": "x", "models": {"a": {"model": "x"}}}, "model is a key of each model"),
        ({"adapters": {"s": "x"}, "models": {"a": {"model": "x"}}}, "adapters is a key of each"),
    ],
)
def test_bad_models_are_refused_by_name(tree: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        configs.parse(tree)


def test_a_name_leads_to_a_model_or_to_its_adapter(models: ServedModels) -> None:
    request = Request("id", "text", Sampling(), 1)
    small = models.find("sql")
    assert small.name == "small"
    assert small.addressed(request, "sql").adapter == SQL
    assert small.addressed(request, "sql").model == "sql"
    assert models.find("large").addressed(request, "large").adapter is None
    assert models.names() == ["small", "sql", "large"]


def test_an_unknown_name_lists_what_may_be_shown(models: ServedModels) -> None:
    with pytest.raises(UnknownModel, match="no model 'x' here; this cluster serves 'small', 'sql'"):
        models.find("x")
    with pytest.raises(UnknownModel, match=r"serves 'large'$"):
        models.find("x", lambda name: name == "large")


def test_a_request_without_a_name_needs_a_single_model(models: ServedModels) -> None:
    with pytest.raises(InvalidRequest, match="several models are served; name one: 'small'"):
        models.find("")
    models.remove("large")
    assert models.find("").name == "small"


def test_no_two_models_or_adapters_have_one_name(models: ServedModels) -> None:
    for taken in (served("sql"), served("small"), served("new", "large"), served("new", "sql")):
        with pytest.raises(InvalidRequest, match=r"is an adapter of|is a model"):
            models.add(taken)
    models.check_free("sql", but=models.find("small"))  # replaces its own


def test_series_carry_the_model_and_end_with_it() -> None:
    metrics = MetricsByModel()
    for name in ("small", "large"):
        metrics.of(name, []).requests.labels(outcome="STOP").inc()
    labels = {"model": "small", "outcome": "STOP"}
    assert metrics.registry.get_sample_value("baton_requests_total", labels) == 1
    metrics.forget("small")
    assert metrics.registry.get_sample_value("baton_requests_total", labels) is None
    assert metrics.registry.get_sample_value("baton_active_requests", {"model": "large"}) == 0


def test_a_command_refuses_two_models_of_one_name(tmp_path: Path) -> None:
    flags = ["--model", str(tmp_path / "a" / "tiny"), "--model", str(tmp_path / "b" / "tiny")]
    result = CliRunner().invoke(app, ["serve", *flags])
    assert result.exit_code != 0
    assert "two models have the name" in result.output

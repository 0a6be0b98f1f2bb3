"""The import directions of docs/DESIGN.md, read from the code itself."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What each package may import of ours, beside itself, core and baton.v1. "baton" is the client.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "baton": set(),
    "kernels": set(),
    "engine": {"kernels"},
    "kv_transfer": {"kernels"},
    "rpc": set(),
    "worker": {"engine", "kv_transfer", "rpc"},
    "prefill_worker": {"worker", "engine", "kv_transfer"},
    "decode_worker": {"worker", "engine", "kv_transfer"},
    "router": {"rpc"},
    "planner": {"router"},
    "cluster": {"planner", "router", "prefill_worker", "decode_worker", "worker", "engine", "rpc"},
    "cli": {"cluster", "planner", "engine", "kv_transfer", "baton"},
}

# Who may import what of others'.
ONLY = {
    "ray": {"cluster"},
    "nixl": {"kv_transfer"},
    "torch": {"engine", "kernels", "kv_transfer", "worker", "cli"},
    "triton": {"kernels"},
    "llvmlite": {"kernels"},
    "llguidance": {"engine", "router"},
    "grpc": {"rpc", "baton", "worker", "router", "cluster"},
    "transformers": {"core", "engine"},
}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Those of a module, at any depth. Expressions, which are most of its nodes, import nothing."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from statements(child)


@functools.cache
def imports_of(path: Path) -> tuple[str, ...]:
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[str]:
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            version = node.module == "baton" and node.names[0].name == "__version__"
            yield "" if version else node.module  # every package may import the version


def sources(package: str) -> list[Path]:
    # rglob does not follow links, so "baton" is the client alone.
    return [path for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name]


def package_of(module: str) -> str:
    """The package of ours that a module is part of; "" for others' modules."""
    top, _, rest = module.partition(".")
    if top != "baton":
        return ""
    name = rest.partition(".")[0]
    return name if name in ALLOWED else "baton"


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_the_design_allows(package: str) -> None:
    wrong = []
    for path in sources(package):
        for name in imports_of(path):
            of = package_of(name)
            common = of in (package, "core", "") or name.startswith("baton.v1")
            command = path == ROOT / "baton" / "__main__.py" and of == "cli"
            if not common and not command and of not in ALLOWED[package]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


@pytest.mark.parametrize("package", [*ALLOWED, "bench", "tests"])
def test_a_package_is_imported_by_one_name(package: str) -> None:
    """`import router` works in a checkout, and would load every module a second time."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(package)
        for name in imports_of(path)
        if name.split(".")[0] in ALLOWED.keys() - {"baton"}
    ]
    assert not wrong


@pytest.mark.parametrize("package", sorted(ALLOWED.keys() - {"baton"}))
def test_a_package_is_a_link_in_the_import_root(package: str) -> None:
    assert (ROOT / "baton" / package).readlink() == Path("..") / package


@pytest.mark.parametrize("library", ONLY)
def test_a_library_is_imported_only_where_the_design_allows(library: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in ALLOWED.keys() - ONLY[library]
        for path in sources(package)
        for name in imports_of(path)
        if name.split(".")[0] == library
    ]
    assert not wrong


def test_every_package_of_the_distribution_is_held_by_the_table() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"bench", "tests"} == set(ALLOWED)

"""One name, one thing: modules and public classes of the product have unique names."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from test_imports import ALLOWED, ROOT, sources

# A package's own, or a GPU's module beside that of the CPU.
SHARED_MODULES = {"__init__", "__main__", "metrics"}
# The client's values are what callers see of the router's.
SHARED_CLASSES = {"Answer", "Placement"}

CLASS = re.compile(r"^class ([A-Za-z]\w*)[(:]", re.MULTILINE)
"""Of a module itself, and public. To parse all modules takes seconds."""


def is_twin(path: Path) -> bool:
    return path.parent.name in ("gpu", "cpu")


def test_modules_have_unique_names() -> None:
    found: defaultdict[str, list[Path]] = defaultdict(list)
    for path in (path for package in ALLOWED for path in sources(package)):
        if not is_twin(path) and path.stem not in SHARED_MODULES:
            found[path.stem].append(path.relative_to(ROOT))
    assert [paths for paths in found.values() if len(paths) > 1] == []


def test_public_classes_have_unique_names() -> None:
    found: defaultdict[str, list[Path]] = defaultdict(list)
    for path in (path for package in ALLOWED for path in sources(package)):
        for name in CLASS.findall(path.read_text(encoding="utf-8")):
            found[name].append(path.relative_to(ROOT))
    repeated = {name for name, paths in found.items() if len(paths) > 1}
    assert repeated - SHARED_CLASSES == set()

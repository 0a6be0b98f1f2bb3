"""Checks the packages of every image's lock file for known vulnerabilities.

Fails on a vulnerability that is not waived below. Reports packages that could not be looked up,
because there is no network or the service does not know them; with --strict they fail too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent
LOCKS = ("cpu.lock", "cuda.lock")
# What pip-audit says when its service cannot be reached.
UNREACHED = ("Could not connect", "requests.exceptions.")

WAIVED: dict[str, str] = {}
"""Vulnerability ids, each with the reason why it does not affect Baton."""


@dataclass
class Audit:
    looked_up: int = 0
    not_looked_up: list[str] = field(default_factory=list)
    vulnerable: list[str] = field(default_factory=list)
    waived: list[str] = field(default_factory=list)


def parse(report: str, waived: dict[str, str]) -> Audit:
    """Sorts pip-audit's JSON report."""
    audit = Audit()
    for package in json.loads(report)["dependencies"]:
        if "skip_reason" in package:
            audit.not_looked_up.append(package["name"])
            continue
        audit.looked_up += 1
        for found in package["vulns"]:
            names = [found["id"], *found.get("aliases", ())]
            known = [waived[name] for name in names if name in waived]
            line = f"{package['name']} {package['version']}: {found['id']}"
            if known:
                audit.waived.append(f"{line}, waived: {known[0]}")
            else:
                fixed = ", ".join(found.get("fix_versions", ())) or "nothing yet"
                audit.vulnerable.append(f"{line}, fixed by {fixed}")
    return audit


def look_up(lock: Path) -> str:
    """pip-audit's report; empty when its service cannot be reached."""
    command = [sys.executable, "-m", "pip_audit", "--format=json", "--progress-spinner=off"]
    command += ["--disable-pip", f"--requirement={lock}"]
    # The arguments are fixed; the lock file is part of the repository.
    ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.stdout.startswith("{"):
        return ended.stdout
    if any(sign in ended.stderr for sign in UNREACHED):
        return ""
    raise SystemExit(f"pip-audit failed:\n{ended.stderr}")


def report(name: str, audit: Audit) -> bool:
    """Prints the findings. True if every package was looked up."""
    print(f"{name}: {audit.looked_up} packages looked up, {len(audit.vulnerable)} vulnerable")
    for line in (*audit.vulnerable, *audit.waived):
        print(f"  {line}")
    missing = audit.not_looked_up
    if missing:
        print(f"  NOT AUDITED: {len(missing)} packages, such as {missing[0]}")
    return not missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strict", action="store_true", help="fail where nothing can be looked up")
    strict = parser.parse_args().strict
    failed = False
    for name in LOCKS:
        if text := look_up(FOLDER / name):
            audit = parse(text, WAIVED)
            whole = report(name, audit)
            failed |= bool(audit.vulnerable) or (strict and not whole)
        else:
            print(f"{name}: NOT AUDITED, the database of vulnerabilities was not reached")
            failed |= strict
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Compare the installed versions of everything that vitfleet depends on with published security advisories.

    .venv/bin/python scripts/check_advisories.py

The advisories are those of https://osv.dev, which has PyPI's. Exit code 1 if one concerns an installed version; 0 if
none does, and where the source cannot be reached, which is printed: without a network nothing is known.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution

PACKAGE = "vitfleet"
SOURCE = os.environ.get("VITFLEET_ADVISORIES", "https://api.osv.dev/v1/querybatch")
TIMEOUT_S = 10.0
NAME = re.compile(r"[A-Za-z0-9._-]+")


def installed_versions(package: str = PACKAGE) -> dict[str, str]:
    """Return the version of every package that a package requires, directly or not, with all extras that are there."""
    versions: dict[str, str] = {}
    waiting = [package]
    while waiting:
        name = waiting.pop()
        try:
            found = distribution(name)
        except PackageNotFoundError:  # of an extra, or for another system
            continue
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in versions:
            continue
        versions[key] = found.version
        waiting += [match.group() for text in found.requires or [] if (match := NAME.match(text))]
    versions.pop(package, None)
    return versions


def query(versions: dict[str, str]) -> dict[str, list[str]]:
    """Return the ids of the advisories for these versions, by package."""
    queries = [
        # A build's own suffix, as in 2.6.0+cpu, is no version of the package index.
        {"package": {"name": name, "ecosystem": "PyPI"}, "version": version.partition("+")[0]}
        for name, version in versions.items()
    ]
    body = json.dumps({"queries": queries}).encode()
    request = urllib.request.Request(SOURCE, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        results = json.load(reply)["results"]
    return {
        name: [entry["id"] for entry in result["vulns"]]
        for name, result in zip(versions, results, strict=True)
        if result.get("vulns")
    }


def described(found: dict[str, list[str]], versions: dict[str, str]) -> Iterable[str]:
    """Return a line for every package with advisories."""
    for name, advisories in sorted(found.items()):
        yield f"{name} {versions[name]}: {', '.join(advisories)}"


def main() -> int:
    """Print what is found and return the exit code."""
    versions = installed_versions()
    try:
        found = query(versions)
    except (OSError, ValueError, KeyError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        print(f"advisories: not checked, {SOURCE} cannot be reached or read ({reason})")
        return 0
    for line in described(found, versions):
        print(line)
    print(f"advisories: {len(versions)} packages checked, {len(found)} have some")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

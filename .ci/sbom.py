"""Writes a list of everything that an installed bapo consists of: an SBOM in CycloneDX 1.6 (JSON).

    python .ci/sbom.py --extras math,lora --out bapo.cdx.json

It begins with the package bapo, and follows what each package requires to what is installed in this environment. A
requirement that is not installed, because its marker or its extra does not apply, is left out. Versions and licences
are those that the packages state themselves. The output depends on the environment alone, but for its serial number and
its time; SOURCE_DATE_EPOCH fixes both.
"""

from __future__ import annotations

import argparse
import json
import os
import uuid
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = "bapo"


def closure(root: str, extras: Iterable[str]) -> dict[str, tuple[Distribution, list[str]]]:
    """Each package that is needed and installed, by its canonical name, with the packages that it requires itself."""
    found: dict[str, tuple[Distribution, list[str]]] = {}
    wanted = {root: set(extras)}
    waiting = deque([root])
    while waiting:
        name = waiting.popleft()
        installed = distribution(name)
        needed: set[str] = set()
        for requirement, asked in _required(installed, wanted[name]):
            try:
                distribution(requirement)
            except PackageNotFoundError:
                continue
            needed.add(requirement)
            if requirement not in wanted or not asked <= wanted[requirement]:  # new, or with more extras than before
                wanted[requirement] = wanted.get(requirement, set()) | asked
                waiting.append(requirement)
        found[name] = installed, sorted(needed)
    return found


def _required(installed: Distribution, extras: set[str]) -> Iterable[tuple[str, set[str]]]:
    """What a package requires here, with these extras: canonical names, and the extras that it asks for."""
    for line in installed.requires or []:
        requirement = Requirement(line)
        markers = [{"extra": extra} for extra in extras] or [{"extra": ""}]
        if requirement.marker is None or any(requirement.marker.evaluate(marker) for marker in markers):
            yield canonicalize_name(requirement.name), set(requirement.extras)


def component(name: str, installed: Distribution, kind: str = "library") -> dict[str, Any]:
    """A package as CycloneDX describes it."""
    purl = f"pkg:pypi/{name}@{installed.version.replace('+', '%2B')}"
    described: dict[str, Any] = {"type": kind, "bom-ref": purl, "name": name, "version": installed.version}
    metadata = installed.metadata
    if summary := metadata.get("Summary"):
        described["description"] = summary
    if licences := _licences(metadata.get("License-Expression"), metadata.get("License"), metadata):
        described["licenses"] = licences
    return described | {"purl": purl}


def _licences(expression: str | None, text: str | None, metadata: Any) -> list[dict[str, Any]]:
    if expression:
        return [{"expression": expression}]
    classified = [line for line in metadata.get_all("Classifier") or [] if line.startswith("License :: ")]
    named = [line.rpartition(" :: ")[2] for line in classified if not line.endswith("OSI Approved")]
    if not named and text and "\n" not in text and len(text) < 100:  # some put the whole text there
        named = [text]
    return [{"license": {"name": name}} for name in dict.fromkeys(named)]


def bill(extras: Iterable[str]) -> dict[str, Any]:
    """The whole document."""
    packages = closure(ROOT, extras)
    parts = {name: component(name, installed) for name, (installed, _) in packages.items()}
    main = component(ROOT, packages[ROOT][0], "application")
    depends = [
        {"ref": parts[name]["bom-ref"], "dependsOn": [parts[other]["bom-ref"] for other in needed]}
        for name, (_, needed) in sorted(packages.items())
    ]
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    when = datetime.now(UTC) if epoch is None else datetime.fromtimestamp(int(epoch), UTC)
    listed = json.dumps([main, depends], sort_keys=True)
    serial = uuid.uuid4() if epoch is None else uuid.uuid5(uuid.NAMESPACE_URL, listed + epoch)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"timestamp": when.strftime("%Y-%m-%dT%H:%M:%SZ"), "component": main},
        "components": [part for name, part in sorted(parts.items()) if name != ROOT],
        "dependencies": depends,
    }


def main() -> None:
    """Write the document to a file, or print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extras", default="", help="extras of bapo that the release is installed with, by commas")
    parser.add_argument("--out", help="the file to write; without it, the document is printed")
    given = parser.parse_args()
    text = json.dumps(bill([extra for extra in given.extras.split(",") if extra]), indent=2) + "\n"
    if given.out is None:
        print(text, end="")
    else:
        with open(given.out, "w") as file:
            file.write(text)


if __name__ == "__main__":
    main()

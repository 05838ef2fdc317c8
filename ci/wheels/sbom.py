"""Software bill of materials of a release in CycloneDX 1.6.

Lists the released files with their hashes, the requirements of each package at the versions of
constraints.txt, against which the release is tested, and the foreign code inside the wheels.
"""

import hashlib
import importlib.metadata
import re
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

CONTAINS = {"nearlinear-collectives"}
"""Packages with the foreign code of `foreign`."""


def write(folder: Path, files: list[Path], root: Path) -> Path:
    """Write the bill of materials of released files and return its path.

    Args:
        folder: Destination.
        files: Wheels and source distributions of all packages.
        root: The repository, for constraints.txt and the versions of foreign code.

    Raises:
        ValueError: The document violates the schema of CycloneDX.
    """
    pins = dict(pinned(root / "constraints.txt"))
    bom = Bom()
    known: dict[str, Component] = {}
    packages: dict[str, Component] = {}
    for path in sorted(files):
        name, version = identity(path)
        if name not in packages:
            packages[name] = library(name, version, "Apache-2.0")
            bom.components.add(packages[name])
        packages[name].components.add(released_file(path))
    for wheel in (each for each in sorted(files) if each.suffix == ".whl"):
        owner = packages[identity(wheel)[0]]
        needed = []
        for requirement in requirements(wheel):
            name = canonicalize_name(requirement.name)
            if name not in packages and name not in known:
                known[name] = library(name, pins.get(name), None)
                bom.components.add(known[name])
            needed.append(packages.get(name) or known[name])
        if owner.name in CONTAINS:
            for component in foreign(root):
                if all(each.purl != component.purl for each in owner.components):
                    owner.components.add(component)
        bom.register_dependency(owner, needed)
    first = next(iter(packages.values()))
    bom.metadata.component = Component(
        name="nearlinear-release", version=first.version, type=ComponentType.APPLICATION
    )
    bom.register_dependency(bom.metadata.component, packages.values())
    text = JsonV1Dot6(bom).output_as_string(indent=1)
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise ValueError(f"the bill of materials violates CycloneDX 1.6: {error}")
    path = folder / f"nearlinear-{first.version}.cdx.json"
    path.write_text(text)
    return path


def identity(path: Path) -> tuple[str, str]:
    """Return name and version of the package of a wheel or source distribution."""
    name, version, *_ = (
        parse_wheel_filename(path.name)
        if path.suffix == ".whl"
        else parse_sdist_filename(path.name)
    )
    return str(name), str(version)


def library(name: str, version: str | None, licence: str | None) -> Component:
    """Return a package of the package index as a component."""
    url = PackageURL("pypi", name=name, version=version)
    licences = [LicenseExpression(licence)] if licence else []
    return Component(
        name=name, version=version, purl=url, bom_ref=str(url), licenses=licences,
        type=ComponentType.LIBRARY,
    )  # fmt: skip


def released_file(path: Path) -> Component:
    """Return a released file with its hash as a component."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Component(
        name=path.name,
        bom_ref=path.name,
        type=ComponentType.FILE,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
    )


def foreign(root: Path) -> Iterator[Component]:
    """Yield the code of others in the collectives' wheels: headers, and Zig's C++ library."""
    folder = "packages/collectives/src/nearlinear_collectives/engine/third_party/libfabric/LICENSE"
    found = re.search(r"libfabric (\d+\.\d+\.\d+)", (root / folder).read_text())
    if found is None:
        raise ValueError(f"{folder} does not state the version of libfabric")
    yield vendored("libfabric", found[1], "BSD-2-Clause", "https://github.com/ofiwg/libfabric")
    yield vendored(
        "libc++ of Zig",  # also libc++abi, libunwind and compiler-rt, linked statically
        importlib.metadata.version("ziglang"),
        "Apache-2.0 WITH LLVM-exception",
        "https://ziglang.org",
    )


def vendored(name: str, version: str, licence: str, home: str) -> Component:
    """Return a component that is not from the package index."""
    url = PackageURL("generic", name=name, version=version)
    link = ExternalReference(type=ExternalReferenceType.WEBSITE, url=XsUri(home))
    return Component(
        name=name, version=version, purl=url, bom_ref=str(url), type=ComponentType.LIBRARY,
        licenses=[LicenseExpression(licence)], external_references=[link],
    )  # fmt: skip


def requirements(wheel: Path) -> Iterator[Requirement]:
    """Yield the requirements of a wheel without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    for line in metadata.get_all("Requires-Dist") or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def pinned(constraints: Path) -> Iterator[tuple[str, str]]:
    """Yield names and versions of constraints.txt."""
    for line in constraints.read_text().splitlines():
        if "==" in line and not line.startswith("#"):
            name, version = line.split("==")
            yield str(canonicalize_name(name)), version.strip()

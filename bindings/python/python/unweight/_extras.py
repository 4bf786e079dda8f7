"""Imports of optional dependencies, and the versions of them that work."""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from typing import Any

# The first and the last minor version of each package that the tests have passed with, of one major version after
# another. Modules that replace or call private parts of a package refuse all others.
_TESTED = {
    "torch": [((2, 9), (2, 11))],
    "transformers": [((4, 57), (4, 57)), ((5, 3), (5, 17))],
    "vllm": [((0, 24), (0, 26))],
}


def _install(extra: str) -> str:
    """Returns the pip command that installs the requirements of an extra. It lists them instead of `unweight[extra]`,
    because the wheel may come from a file and not from a package index."""
    try:
        declared = metadata.requires("unweight") or []
    except metadata.PackageNotFoundError:
        declared = []
    declarations = (requirement.partition(";") for requirement in declared)
    of_extra = f'extra == "{extra}"'
    requirements = [
        name.strip() for name, _, marker in declarations if marker.replace("'", '"').strip() == of_extra
    ]
    return "pip install " + (" ".join(f"'{name}'" for name in requirements) or extra)


def require(extra: str, *modules: str) -> Any:
    """Imports the modules of an extra and returns the last one. Raises `ModuleNotFoundError` with the pip command if
    one is not installed."""
    imported = None
    for module in modules:
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # An installed module may fail to import a dependency of its own.
            if error.name != module:
                raise
            message = f"{module} is not installed; {_install(extra)}"
            raise ModuleNotFoundError(message, name=module) from error
    return imported


def supported(package: str) -> str:
    """Returns the package with the ranges of versions that the tests have passed with."""
    ranges = [
        f"{first[0]}.{first[1]}" + ("" if first == last else f" to {last[0]}.{last[1]}")
        for first, last in _TESTED[package]
    ]
    return f"{package} {' and '.join(ranges)}"


def requirement(package: str) -> str:
    """Returns pip's requirement for the versions of `supported`."""
    (first, _), *later = _TESTED[package]
    _, last = _TESTED[package][-1]
    untested = [f"!={major}.{minor}.*" for (major, start), _ in later for minor in range(start)]
    return package + ",".join([f">={first[0]}.{first[1]}", *untested, f"<{last[0]}.{last[1] + 1}"])


def refuse_untested(package: str, version: str) -> None:
    """Raises `ImportError` unless this version of a package is in one of the ranges of `supported`."""
    found = re.match(r"(\d+)\.(\d+)", version)
    minor = tuple(map(int, found.groups())) if found else ()
    if not any(first <= minor <= last for first, last in _TESTED[package]):
        raise ImportError(
            f"unweight supports {supported(package)}, but {version} is installed: pip install '{requirement(package)}'",
            name=package,
        )

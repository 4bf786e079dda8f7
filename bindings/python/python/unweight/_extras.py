"""Imports of optional dependencies."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any


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

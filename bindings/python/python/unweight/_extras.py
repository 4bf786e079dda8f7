"""Packages that only some features need."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any


def _install(extra: str) -> str:
    """The pip command for the requirements of an extra. It names them instead of `unweight[extra]`, because the wheel
    may come from a file and not from a package index."""
    try:
        declared = metadata.requires("unweight") or []
    except metadata.PackageNotFoundError:
        declared = []
    pairs = (requirement.partition(";") for requirement in declared)
    wanted = [name.strip() for name, _, marker in pairs if marker.replace("'", '"').strip() == f'extra == "{extra}"']
    return "pip install " + (" ".join(f"'{name}'" for name in wanted) or extra)


def require(extra: str, *modules: str) -> Any:
    """Imports the modules of an extra and returns the last one; says how to install a missing one."""
    imported = None
    for module in modules:
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # A module that is there may lack one of its own.
            if error.name != module:
                raise
            message = f"{module} is not installed; {_install(extra)}"
            raise ModuleNotFoundError(message, name=module) from error
    return imported

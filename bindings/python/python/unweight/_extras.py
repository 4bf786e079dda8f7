"""Packages that only some features need."""

from __future__ import annotations

import importlib
from typing import Any


def require(extra: str, *modules: str) -> Any:
    """Imports the modules of `unweight[extra]` and returns the last one; says how to install a missing one."""
    imported = None
    for module in modules:
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # A module that is there may lack one of its own.
            if error.name != module:
                raise
            message = f"{module} is not installed; pip install 'unweight[{extra}]'"
            raise ModuleNotFoundError(message, name=module) from error
    return imported

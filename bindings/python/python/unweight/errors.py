"""The exceptions of this package, one class per reaction of a caller. A message says what failed and what to do next.

Wrong arguments raise `ValueError` or `TypeError`.
"""

from __future__ import annotations

from typing import Optional


class UnweightError(Exception):
    """The base class of all errors of this package."""

    file: Optional[str]
    """The file that caused the error, if known."""
    tensor: Optional[str]
    """The tensor that caused the error, if known."""
    offset: Optional[int]
    """The offset of the error in that file in bytes, if known."""

    def __init__(
        self,
        message: str,
        *,
        file: Optional[str] = None,
        tensor: Optional[str] = None,
        offset: Optional[int] = None,
    ) -> None:
        super().__init__(message)
        self.file = file
        self.tensor = tensor
        self.offset = offset

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class DamagedError(UnweightError, ValueError):
    """A bundle's bytes changed after it was written: download or create it again."""


class NotABundleError(UnweightError):
    """There is no bundle at this path."""


class NewerVersionError(UnweightError):
    """The bundle has a newer format version: update this package."""


class OldVersionError(UnweightError):
    """The bundle has a development version of the format: compress the model again."""


class ModelError(UnweightError, ValueError):
    """The model cannot be compressed: it has no weights, or a file is broken or changed during the work."""


class OutputExistsError(UnweightError, FileExistsError):
    """The output already exists: choose another path, or pass `force=True`."""


class UnknownNameError(UnweightError, KeyError):
    """The bundle has no tensor or file with this name, or several files have a tensor with this name."""


class StorageError(UnweightError, OSError):
    """Reading or writing failed. `errno` is the error code of the system, if it returned one."""


class DeviceError(UnweightError, RuntimeError):
    """The GPU, its driver or the kernel compiler (NVRTC) is missing or has failed."""


class CancelledError(UnweightError):
    """The work was cancelled. It is the `__cause__` of the exception that cancelled it, usually `KeyboardInterrupt`."""

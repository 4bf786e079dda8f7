"""What can go wrong, by what a caller would do about it. The message says what, where and what to do next.

Wrong arguments are `ValueError` or `TypeError`, as everywhere.
"""

from __future__ import annotations

from typing import Optional


class UnweightError(Exception):
    """Whatever the library refuses or cannot do."""

    file: Optional[str]
    """The file it is about, where one is known."""
    tensor: Optional[str]
    """The tensor it is about, where one is known."""
    offset: Optional[int]
    """The first byte in that file it is about, where one is known."""

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
    """A bundle's bytes are not those that were written: fetch or make it again."""


class NotABundleError(UnweightError):
    """There is no bundle at this path."""


class NewerVersionError(UnweightError):
    """The bundle is of a newer version of the format: update this package."""


class OldVersionError(UnweightError):
    """The bundle is of a development version of the format: compress the model again."""


class ModelError(UnweightError, ValueError):
    """The model to compress cannot be used as it is: no weights, a broken file, or one that changes meanwhile."""


class OutputExistsError(UnweightError, FileExistsError):
    """The output is there already: choose another name, or say `force=True`."""


class UnknownNameError(UnweightError, KeyError):
    """The bundle has no tensor or file of this name, or a tensor of this name in several files."""


class StorageError(UnweightError, OSError):
    """The system refused to read or write. `errno` is its answer, where there is one."""


class DeviceError(UnweightError, RuntimeError):
    """The GPU, its driver or the compiler of its kernels is missing, or has failed."""


class CancelledError(UnweightError):
    """The work was stopped; the cause of the exception that stopped it, `KeyboardInterrupt` as a rule."""

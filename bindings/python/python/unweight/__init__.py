"""Lossless BF16 weight compression: models to bundles and back, and bundles read tensor by tensor.

Importing this package needs neither numpy nor torch, no CUDA and no GPU.
"""

from ._bundle import Bundle, TensorInfo
from ._native import __version__
from ._work import Progress, compress, decompress, inspect, plan, verify
from .errors import (
    CancelledError,
    DamagedError,
    DeviceError,
    ModelError,
    NewerVersionError,
    NotABundleError,
    OldVersionError,
    OutputExistsError,
    StorageError,
    UnknownNameError,
    UnweightError,
)

__all__ = [
    "Bundle",
    "CancelledError",
    "DamagedError",
    "DeviceError",
    "ModelError",
    "NewerVersionError",
    "NotABundleError",
    "OldVersionError",
    "OutputExistsError",
    "Progress",
    "StorageError",
    "TensorInfo",
    "UnknownNameError",
    "UnweightError",
    "__version__",
    "compress",
    "decompress",
    "inspect",
    "plan",
    "verify",
]

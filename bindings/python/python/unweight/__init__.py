"""Lossless BF16 weight compression: compress models to bundles, restore them, and read bundles tensor by tensor.

Importing this package needs neither numpy, torch, CUDA nor a GPU. `unweight.ops` multiplies by packed weights in torch;
`unweight.transformers` and `unweight.vllm` run models on them.
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

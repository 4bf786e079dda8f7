"""Lossless BF16 weight compression: compress models to bundles, restore them, and read bundles tensor by tensor.

Importing this package needs neither numpy, torch, CUDA nor a GPU. `unweight.ops` multiplies by packed weights in torch,
`unweight.pack_model` packs the layers of a module; `unweight.transformers` and `unweight.vllm` run models on them.
"""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from .modules import pack_model as pack_model
    from .modules import update_sparse_ as update_sparse_

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


def __getattr__(name: str) -> Any:
    # Imported on first use, because it imports torch.
    if name in ("pack_model", "update_sparse_"):
        from . import modules

        return getattr(modules, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")

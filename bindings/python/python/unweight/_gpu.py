"""The kernels of each GPU: one native runtime per process and GPU."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import threading
from typing import Optional

import torch
from torch import Tensor

from . import _native

# Reentrant, because a signal handler may copy or pack layers.
_lock = threading.RLock()
# Held while arenas change, and while `Placed` finds out how a change ended.
_changes = threading.RLock()


def _unlock() -> None:
    """Replaces the locks in a forked child: a thread that held one in the parent does not exist in the child."""
    global _lock, _changes
    _lock, _changes = threading.RLock(), threading.RLock()


os.register_at_fork(after_in_child=_unlock)


# Kernels may read so many bytes after the end of a section.
_PAD = 256
# The maximum batch of a launch; larger batches need several.
_MAX_BATCH = 16384
# Batches above this expand weights to BF16 for cuBLAS; `None` does so where it is predicted to be faster. For tests.
_EXPAND_ABOVE: Optional[int] = None
_runtimes: dict[int, _native.Runtime] = {}


def _runtime(device: torch.device) -> _native.Runtime:
    index = torch.cuda.current_device() if device.index is None else device.index
    runtime = _runtimes.get(index)
    if runtime is None:
        with _lock, torch.cuda.device(index):
            runtime = _runtimes.get(index)
            if runtime is None:
                _name_libraries()
                runtime = _runtimes.setdefault(index, _native.Runtime(index, _MAX_BATCH, _EXPAND_ABOVE))
    return runtime


def _prepare(device: torch.device, n: int, k: int) -> None:
    """Compiles the kernels that `place` and updates need for weights `[n, k]`, before the weights are loaded."""
    if _native.Runtime.buffer_nbytes(n, k) is not None:
        _runtime(device).prepare(n, k)


def _name_libraries() -> None:
    """Sets the environment variables for NVRTC and cuBLAS to the libraries installed with torch, unless they are set.
    Only this Python knows those directories."""
    spec = importlib.util.find_spec("nvidia")
    homes = (spec.submodule_search_locations if spec else None) or ()
    for variable, library, parts in (
        ("UNWEIGHT_NVRTC", "libnvrtc.so.*", ("cu13", "cuda_nvrtc")),
        ("UNWEIGHT_CUBLAS", "libcublas.so.*", ("cu13", "cublas")),
    ):
        folders = (pathlib.Path(home, part, "lib") for home in homes for part in parts)
        found = next((folder for folder in folders if any(folder.glob(library))), None)
        if found is not None and not os.environ.get(variable):
            os.environ[variable] = str(found)


def _memory(tensor: Tensor) -> tuple[int, int]:
    return (tensor.data_ptr(), tensor.nbytes)

"""The devices that packed weights run on."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from . import _native


def why_not(device: Union[torch.device, str, int]) -> Optional[str]:
    """Returns the reason why packed weights cannot run on a device, or `None` if they can.

    `device` is a `torch.device`, or what `torch.device()` takes: a name or the index of a GPU. Raises `TypeError` for
    other types, and `ValueError` for names that torch does not know.
    """
    device = _as_device(device)
    if device.type == "cpu":
        return None
    is_found = device.type == "cuda" and torch.version.cuda is not None and torch.cuda.is_available()
    if not is_found or (device.index or 0) >= torch.cuda.device_count():
        return f"packed weights run on CPUs and on NVIDIA GPUs that torch finds, not on {device}"
    return _without_kernels(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def _as_device(device: Any) -> torch.device:
    """Returns the device that `torch.device()` makes. Raises the errors of `why_not`."""
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        kind = type(device).__name__
        raise TypeError(f"device={device!r} is a {kind}; pass a torch.device, a name such as 'cuda:0' or a GPU's index")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: {error}; pass 'cpu', 'cuda' or the index of a GPU") from error


def _without_kernels(name: str, capability: tuple[int, int]) -> Optional[str]:
    if _native.has_kernels(*capability):
        return None
    return (
        f"there are no kernels for the compute capability of this GPU ({name}: {capability[0]}.{capability[1]}); "
        "supported are 8.0, 8.6, 8.9, 9.0, 10.0, 10.3 and 12.0"
    )

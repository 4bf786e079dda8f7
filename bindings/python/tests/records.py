"""What the records of programs say of their run."""

import datetime
import importlib
import platform
import sys
from typing import Any, Optional


def provenance(*packages: str, device: Optional[str] = None) -> dict[str, Any]:
    """Returns machine, date and command, and the versions of torch, this package and other packages.

    `device` is that of the measurements, "cpu" or "cuda"; by default, the GPU if there is one.
    """
    import torch

    is_on_gpu = torch.cuda.is_available() and not (device or "cuda").startswith("cpu")
    return {
        "machine": torch.cuda.get_device_name() if is_on_gpu else platform.processor() or "CPU",
        "date": datetime.date.today().isoformat(),
        "command": sys.argv,
        **{name: importlib.import_module(name).__version__ for name in (*packages, "torch", "unweight")},
    }

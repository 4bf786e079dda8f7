"""The operator `torch.ops.unweight.embedding`: rows of a packed matrix, so that an embedding and its head share one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._arena import _register_copy
from ._dispatch import _refuse_derivatives
from ._gpu import _runtime
from .ops import _check_devices, _library, unpack

_library.define(
    "embedding(Tensor ids, Tensor arena, int n, int k) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def _check(ids: Tensor, arena: Tensor) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"unweight::embedding expects ids in int32 or int64, got {ids.dtype}")
    if arena.dtype != torch.uint8:
        raise ValueError(f"unweight::embedding expects an arena in uint8, got {arena.dtype}; was the model converted?")


def _cpu(ids: Tensor, arena: Tensor, n: int, k: int) -> Tensor:
    _check(ids, arena)
    weight = unpack(arena)
    if weight.shape != (n, k):
        raise ValueError(f"weights are {list(weight.shape)}, but the operator was called for {[n, k]}")
    return F.embedding(ids, weight)


def _cuda(ids: Tensor, arena: Tensor, n: int, k: int) -> Tensor:
    """Looks up rows; an id outside of the weight gives zeros."""
    _check(ids, arena)
    device = ids.device
    if arena.device != device:
        raise ValueError(f"unweight::embedding expects ids and the arena on one device, got {device}, {arena.device}")
    if torch.cuda.current_device() != device.index:
        # The runtime changes the current device; the context manager restores it.
        with torch.cuda.device(device):
            return _cuda(ids, arena, n, k)
    runtime, at = _runtime(device), arena.data_ptr()
    # The name keeps the registration alive until the launch is enqueued.
    registered = None if runtime.is_registered(at) else _register_copy(arena)
    # What does not fit in 32 bits stays outside of the weight.
    ids32 = ids.clamp(-1, 2**31 - 1).to(torch.int32) if ids.dtype == torch.int64 else ids
    rows = ids32.reshape(-1).contiguous()
    y = torch.empty(*ids.shape, k, dtype=torch.bfloat16, device=device)
    fault = torch.empty(1, dtype=torch.int32, device=device)
    memory = (rows.data_ptr(), rows.numel(), y.data_ptr())
    runtime.embed(at, (n, k), memory, fault.data_ptr(), torch.cuda.current_stream().cuda_stream)
    del registered
    return y


def _fake(ids: Tensor, arena: Tensor, n: int, k: int) -> Tensor:
    _check(ids, arena)
    _check_devices("embedding", ids, arena)
    return ids.new_empty(*ids.shape, k, dtype=torch.bfloat16)


def _prepare_lookups(device: torch.device) -> None:
    """Compiles the kernel, which cannot be done while a CUDA graph is captured."""
    if device.type == "cuda":
        _runtime(device).prepare_embed()


_library.impl("embedding", _cpu, "CPU")
_library.impl("embedding", _cuda, "CUDA")
torch.library.register_fake("unweight::embedding", _fake, lib=_library)
_refuse_derivatives(_library, "embedding")

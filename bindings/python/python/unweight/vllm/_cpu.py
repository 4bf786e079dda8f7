"""The operator `torch.ops.unweight.vllm_linear`: on the CPU, vLLM's own BF16 product of the unpacked weight.

vLLM multiplies by oneDNN directly, which on some CPUs adds in another order than `torch.nn.functional.linear`.
"""

from __future__ import annotations

import types
from typing import Optional

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from .._dispatch import _refuse_derivatives
from ..ops import _cpu, _fake, _library

_library.define(
    "vllm_linear(Tensor x, Tensor arena, int n, Tensor? bias=None) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def _product(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    # A stand-in for the layer that vLLM prepares once; here the weight exists for one product.
    layer = types.SimpleNamespace(weight=nn.Parameter(weight, requires_grad=False), bias=bias)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return layer.cpu_linear(x, layer.weight, bias)


def _linear(x: Tensor, arena: Tensor, n: int, bias: Optional[Tensor] = None) -> Tensor:
    return _cpu(x, arena, n, bias, _product)


_library.impl("vllm_linear", _linear, "CPU")
torch.library.register_fake("unweight::vllm_linear", _fake, lib=_library)
_refuse_derivatives(_library, "vllm_linear")

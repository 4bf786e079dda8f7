"""Torch's dispatcher around the operators: derivatives are refused, observers of operators are detected, and lazy
operands are read."""

from __future__ import annotations

from typing import Any

import torch

from ._extras import refuse_untested

# This module uses private functions of torch.
refuse_untested("torch", torch.__version__)

from torch import Tensor
from torch._functorch import eager_transforms
from torch._library import autograd
from torch.autograd import forward_ad

from ._part import _Fixed

_NO_DERIVATIVES = "packed weights have no backward: they cannot be trained; load the model in BF16 for that"


def _refuse_tangents(*operands: Tensor) -> None:
    """Raises `NotImplementedError` for operands with a forward-mode tangent, or inside a derivative of torch.func."""
    # torch.func wraps every operand, even those that the derivative is not with respect to.
    if any(torch._C._functorch.is_gradtrackingtensor(operand) for operand in operands):
        raise NotImplementedError(_NO_DERIVATIVES)
    # torch.func counts its levels separately.
    if forward_ad._current_level < 0 and not eager_transforms.JVP_NESTING:
        return
    if any(forward_ad.unpack_dual(operand, level=0).tangent is not None for operand in operands):
        raise NotImplementedError(_NO_DERIVATIVES)


def _with_memory(tensor: Tensor) -> Tensor:
    """Returns a tensor whose address Rust can read: a lazy one is read. Raises `ValueError` for other subclasses
    without memory, such as a DTensor."""
    if isinstance(tensor, _Fixed):
        return tensor.read()
    if type(tensor) is not Tensor and tensor.numel() and tensor.data_ptr() == 0:
        kind = type(tensor).__name__
        raise ValueError(f"a {kind} has no memory of its own; pass a plain tensor, such as full_tensor() of a DTensor")
    return tensor


def _no_backward(context: Any, *gradients: Any) -> Any:
    raise NotImplementedError(_NO_DERIVATIVES)


def _save_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    """Saves nothing for the backward, because there is none."""


def _refuse_derivatives(library: torch.library.Library, name: str) -> None:
    """Registers an autograd kernel that refuses derivatives. `torch.library.register_autograd` does not refuse
    forward-mode derivatives, but returns zeros for them."""
    info = autograd.Info(_no_backward, _save_nothing)
    kernel = autograd.make_autograd_impl(getattr(torch.ops.unweight, name).default, info)

    def without_tangents(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_tangents(*(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))
        return kernel(keyset, *args, **kwargs)

    library.impl(name, without_tangents, "Autograd", with_keyset=True)


def _is_watched() -> bool:
    """Returns whether something observes operators: a trace, a dispatch mode, a profiler or a derivative."""
    return bool(
        # First, because torch.compile evaluates it as a constant and skips the rest.
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
        or forward_ad._current_level >= 0
        or eager_transforms.JVP_NESTING
    )

"""New weights of a running engine, by `load_weights`: all in one call, or some of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from ..ops import unpack
from ._account import arrivals_of, is_incomplete
from ._methods import NO_RELOAD, UnweightMethod

# Their layers have the same BF16 parameters when loading as when running, except packed ones.
_KEEPS_PARAMETERS = (type(None), UnweightMethod, UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class Session:
    """Updates of a running engine's weights by `load_weights`: vLLM restores each layer as it was before loading, loads
    and processes it, and copies the result to the tensors in use.

    A call may have any of the model's tensors. A layer that gets some of its tensors, such as q without k and v, keeps
    its other elements.
    """

    def __init__(self, model: nn.Module, model_config: ModelConfig) -> None:
        self._model, self._model_config, self._is_active = weakref.ref(model), model_config, False

    def load_weights(self, is_whole: bool, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a module's `load_weights`; `is_whole` says that the module is the model.

        Begins and ends an update unless the caller did, as `reload_weights` does. After an error, each layer has its
        old weight or its new one. Raises `NotImplementedError` for a part of the model, and what cannot be replaced.
        """
        if self._is_active:
            return load(*args, **kwargs)
        if not is_whole:
            raise NotImplementedError(NO_RELOAD.format("the weights of a part of the model"))
        model = self._model()
        refuse_fixed(model)
        is_begun = any(get_layerwise_info(layer).can_load() for layer in model.modules())
        self._is_active = True
        try:
            if is_begun:
                return load(*args, **kwargs)
            initialize_layerwise_reload(model)
            loaded = load(*args, **kwargs)
            _finish_part(model)
            finalize_layerwise_reload(model, self._model_config)
            return loaded
        except BaseException:
            for layer in model.modules():
                if get_layerwise_info(layer).can_load():
                    _put_back(layer)
            raise
        finally:
            self._is_active = False


def _finish_part(model: nn.Module) -> None:
    """Ends an update with a part of the model's tensors. In one with all of them, a missing tensor is an error."""
    # vLLM itself finishes attention, which has no weights.
    layers = [
        (name, layer, info)
        for name, layer in model.named_modules()
        if (info := get_layerwise_info(layer)).can_load() and not isinstance(layer, (Attention, MLAAttention))
    ]
    if all(info.load_numel > 0 for _, layer, info in layers if layer in arrivals_of):
        return
    for name, layer, info in layers:
        if info.load_numel == 0:
            _put_back(layer)
        elif is_incomplete(layer):
            _fill(name, layer)
            info.load_numel = info.load_numel_total
            _layerwise_process(layer, info)


def _fill(name: str, layer: nn.Module) -> None:
    """Gives the parameters of a layer to load their old elements. Raises `ValueError` if they are unknown."""
    info = get_layerwise_info(layer)
    materialize_layer(layer, info)
    is_kept = type(getattr(layer, "quant_method", None)) in _KEEPS_PARAMETERS
    before = info.kernel_tensors[0] if is_kept else {}
    for key, parameter in layer.named_parameters(recurse=False):
        is_packed = key == "weight" and hasattr(layer, "unweight_packed")
        old = unpack(layer.unweight_packed.arena) if is_packed else before.get(key)
        if old is None or (old.shape, old.dtype) != (parameter.shape, parameter.dtype):
            raise ValueError(f"unweight: {name} is not packed, so pass all of its tensors in one call of load_weights")
        parameter.data.copy_(old)


def _put_back(layer: nn.Module) -> None:
    """Ends the update of a layer with the tensors that it had before."""
    info = get_layerwise_info(layer)
    if info.kernel_tensors is not None:
        _place_kernel_tensors(layer, info)
    info.reset()


def refuse_fixed(model: nn.Module) -> None:
    """Raises `NotImplementedError` for a running model with weights that cannot be replaced."""
    for layer in model.modules():
        if hasattr(layer, "unweight_packed") and isinstance(layer, RoutedExperts):
            raise NotImplementedError(NO_RELOAD.format("packed experts"))
        if hasattr(layer, "unweight_packed") and "weight" in layer.__dict__:
            raise NotImplementedError(NO_RELOAD.format("the head next to adapters"))

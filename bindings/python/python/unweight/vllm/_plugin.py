"""Registers this package with vLLM: the quantization `unweight`, and the loader that replaces vLLM's file loader."""

from __future__ import annotations

import inspect
from typing import Any, Optional

import torch
from torch import nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from ._account import Arrivals, arrivals_of
from ._loader import UnweightLoader
from ._methods import NAME, UnweightExpertsMethod, UnweightMethod, are_plain


class UnweightConfig(QuantizationConfig):
    """The quantization config of packed weights. It has no options, because packing is lossless."""

    def __init__(self, weights_digest: Optional[str] = None) -> None:
        super().__init__()
        self.weights_digest = weights_digest
        """The digest of the bundle's weights; `None` for a model that is not a bundle."""
        self._is_checked = False

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        # The minimum for BF16. A newer GPU without kernels keeps the weights in BF16.
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        # A model that is packed when it is loaded has no quantization file to read.
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> UnweightConfig:
        return cls(config.get("manifest"))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Optional[QuantizeMethodBase]:
        """Returns the method that packs a layer, or `None` to keep vLLM's own, such as for embeddings."""
        if not self._is_checked:
            _refuse_unsupported_options(self)
            self._is_checked = True
        if isinstance(layer, RoutedExperts):
            if not are_plain(layer):
                return None
            arrivals_of[layer] = Arrivals(prefix, {})
            return UnweightExpertsMethod(layer.moe_config)
        if not isinstance(layer, (LinearBase, ParallelLMHead)):
            return None
        # The model class fills in the mapping before it builds layers.
        arrivals_of[layer] = Arrivals(prefix, self.packed_modules_mapping)
        return UnweightMethod()


def _refuse_unsupported_options(config: UnweightConfig) -> None:
    """Raises `ValueError` for options of vLLM that packed weights or bundles do not support."""
    vllm = get_current_vllm_config_or_none()
    if vllm is None:
        return
    offload = vllm.offload_config
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        raise ValueError(
            "unweight: packed weights cannot be offloaded to the CPU (--cpu-offload-gb, --offload-group-size): they "
            "are found by their address; omit the option, or use more GPUs (--tensor-parallel-size)"
        )
    parallel = vllm.parallel_config
    processes = parallel.tensor_parallel_size * parallel.data_parallel_size
    if parallel.enable_expert_parallel and processes > 1 and current_platform.is_cpu():
        raise ValueError(
            "unweight: vLLM's CPU backend has no expert parallelism (its processes crash, also with BF16); omit "
            "--enable-expert-parallel"
        )
    loader = _LOAD_FORMAT_TO_MODEL_LOADER.get(str(vllm.load_config.load_format))
    if config.weights_digest is not None and not (isinstance(loader, type) and issubclass(loader, UnweightLoader)):
        name = vllm.load_config.load_format
        raise ValueError(f"unweight: a bundle cannot be loaded by --load-format {name}; omit the option")


def install() -> None:
    """Registers the quantization and the loader; further calls do nothing.

    Raises:
        TypeError: vLLM's loader does not have the methods that ours overrides; nothing is registered.
    """
    if NAME in QUANTIZATION_METHODS:
        return
    _check_loader()
    # Every load format of the default loader, including `auto`, because a bundle looks like safetensors files.
    names = [name for name, loader in _LOAD_FORMAT_TO_MODEL_LOADER.items() if loader is DefaultModelLoader]
    register_quantization_config(NAME)(UnweightConfig)
    _LOAD_FORMAT_TO_MODEL_LOADER.update({name: UnweightLoader for name in names})


def _check_loader() -> None:
    """Raises `TypeError` unless vLLM's loader has the methods that ours overrides, with the same parameters.

    BF16 models use our loader, too, so a mismatch would break them.
    """
    if not hasattr(DefaultModelLoader, "_prepare_weights"):
        raise TypeError("its DefaultModelLoader has no _prepare_weights")
    for name in (
        "__init__",
        "load_model",
        "load_weights",
        "track_weights_loading",
        "get_all_weights",
        "_get_weights_iterator",
    ):
        theirs, ours = (getattr(loader, name, None) for loader in (DefaultModelLoader, UnweightLoader))
        if theirs is None:
            raise TypeError(f"its DefaultModelLoader has no {name}")
        if list(inspect.signature(theirs).parameters) != list(inspect.signature(ours).parameters):
            raise TypeError(f"its DefaultModelLoader.{name} has the parameters {inspect.signature(theirs)}")

"""Registers this package with vLLM: the quantization `unweight`, and the loader that replaces vLLM's file loader."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Optional

import torch
from vllm import __version__ as vllm_version

from .._extras import refuse_untested

# This package replaces parts of its loader.
refuse_untested("vllm", vllm_version)

from torch import nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    get_quantization_config,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from . import _sparse
from ._account import Arrivals, arrivals_of
from ._loader import UnweightLoader
from ._methods import NAME, UnweightExpertsMethod, UnweightMethod, are_plain, packs_embeddings


# The quantizations whose BF16 layers can be packed, by `quant_method` in config.json.
_OTHERS = ("awq", "compressed-tensors", "fp8", "gptq", "modelopt", "modelopt_fp4")
# Their implementations in vLLM that claim a checkpoint by `override_quantization_method`.
_CLAIMING = ("auto_gptq", "gptq", "auto_awq", "awq", "modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed")


class _PacksRest(QuantizationConfig):
    """A base class before that of another quantization's config: packs the layers that the other one leaves in BF16."""

    weights_digest: Optional[str] = None
    _is_checked = False
    _class_before: type[QuantizationConfig]
    """The other config's class."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Optional[QuantizeMethodBase]:
        """Returns the other quantization's method, or ours for a layer that it leaves in BF16."""
        _check_options(self)
        method = super().get_quant_method(layer, prefix)
        return (_packing_method(self, layer, prefix) or method) if _is_bf16(layer, method) else method

    def __reduce__(self) -> tuple[Any, ...]:
        # vLLM pickles it for its worker processes.
        return _empty_config, (self._class_before,), self.__dict__


def _is_bf16(layer: nn.Module, method: Optional[QuantizeMethodBase]) -> bool:
    """Returns whether another quantization leaves a layer in BF16."""
    if isinstance(layer, RoutedExperts):
        return method is None or type(method) is UnquantizedFusedMoEMethod
    if isinstance(layer, VocabParallelEmbedding):
        return method is None or type(method) in (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
    return isinstance(layer, LinearBase) and type(method) is UnquantizedLinearMethod


@functools.cache
def _class_over(before: type[QuantizationConfig]) -> type[QuantizationConfig]:
    return type(f"Unweight{before.__name__}", (_PacksRest, before), {"_class_before": before})


def _empty_config(before: type[QuantizationConfig]) -> QuantizationConfig:
    made = _class_over(before)
    return made.__new__(made)


def _config_over(config: dict[str, Any]) -> QuantizationConfig:
    """Returns the config of the checkpoint's own quantization, changed to pack the layers that it leaves in BF16."""
    named = config["quant_method"]
    if named not in _OTHERS:
        raise ValueError(
            f"unweight: the model is quantized by {named}, and --quantization unweight packs the BF16 rest only of "
            f"{', '.join(_OTHERS)}; omit the option"
        )
    name = named
    # As vLLM does without the option: the first implementation that claims the checkpoint is used.
    for candidate in QUANTIZATION_METHODS:
        if candidate in _CLAIMING:
            claimed = get_quantization_config(candidate).override_quantization_method(config, None, hf_config=None)
            if claimed is not None:
                name = claimed
                break
    made = get_quantization_config(name).from_config(config)
    # The class stays a subclass of its own, because models test for it.
    made.__class__ = _class_over(type(made))
    return made


def _packing_method(config: Any, layer: nn.Module, prefix: str) -> Optional[QuantizeMethodBase]:
    """Returns the method that packs a layer, or `None` if it is to stay in BF16."""
    if isinstance(layer, RoutedExperts):
        if not are_plain(layer):
            return None
        arrivals_of[layer] = Arrivals(prefix, {})
        return UnweightExpertsMethod(layer.moe_config)
    is_embedding = type(layer) is VocabParallelEmbedding and packs_embeddings()
    if not isinstance(layer, (LinearBase, ParallelLMHead)) and not is_embedding:
        return None
    # The model class fills in the mapping before it builds layers.
    arrivals_of[layer] = Arrivals(prefix, config.packed_modules_mapping)
    return UnweightMethod()


def _check_options(config: Any) -> None:
    """Raises the errors of `_refuse_unsupported_options` for the first layer of a model."""
    if not config._is_checked:
        _refuse_unsupported_options(config)
        config._is_checked = True


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
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """Returns the config of a bundle or, for a model with another quantization, the config of both."""
        is_ours = config.get("quant_method", NAME) == NAME
        return cls(config.get("weights_digest")) if is_ours else _config_over(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: Optional[str], hf_config: Any = None
    ) -> Optional[str]:
        """Returns our name if the user asks for it, also for models with another quantization."""
        return NAME if user_quant == NAME else None

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Optional[QuantizeMethodBase]:
        """Returns the method that packs a layer, or `None` to keep vLLM's own."""
        _check_options(self)
        return _packing_method(self, layer, prefix)


def _refuse_unsupported_options(config: Any) -> None:
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
    _sparse.install()


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

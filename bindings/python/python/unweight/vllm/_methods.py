"""vLLM's methods for packed linear layers and experts: they create, pack and multiply by weights.

A layer is packed as soon as this process's shard is complete; its BF16 weights are then freed.
"""

from __future__ import annotations

import functools
import types
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Optional

import torch
from torch import Tensor, nn
from vllm.config import CompilationMode, CUDAGraphMode, get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from .. import _native
from .._embedding import _prepare_lookups
from .._gpu import _prepare
from .._update import _pack_into
from ..ops import _pack, _pack_experts, unpack_experts, why_not
from . import _cpu  # noqa: F401 (defines an operator)
from ._account import arrivals_of, leave_unpacked, logger, missing_tensors, refuse_missing, wrap_loaders
from ._sparse import RunningWeight

NAME = "unweight"
NO_RELOAD = "unweight: {} of a running engine cannot be replaced (reload_weights); start another engine"


def are_plain(layer: RoutedExperts) -> bool:
    """Returns whether experts compute silu(gate) * up without extras, and nothing but the layer uses their weights."""
    config = layer.moe_config
    parallel = config.moe_parallel_config
    return (
        config.activation == MoEActivation.SILU
        and config.is_act_and_mul
        and not config.has_bias
        and not layer.apply_router_weight_on_input
        and layer.swiglu_limit is layer.swiglu_alpha is layer.swiglu_beta is None
        # All-to-all, load balancing of experts and LoRA adapters of experts need BF16 weights.
        and not parallel.use_all2all_kernels
        and not parallel.enable_eplb
        and not _has_adapters()
    )


def _has_adapters() -> bool:
    vllm = get_current_vllm_config_or_none()
    return vllm is not None and vllm.lora_config is not None


class _Kernels:
    """Compiles kernels on another thread while vLLM builds the model: the first ones take almost a second."""

    def __init__(self) -> None:
        self._compiling: dict[tuple[int, int], Future[None]] = {}
        self._pool: Optional[ThreadPoolExecutor] = None

    def prepare(self, n: int, k: int) -> None:
        """Starts compiling the kernels for weights `[n, k]`, once per shape."""
        if (n, k) in self._compiling or not current_platform.is_cuda():
            return
        device = torch.device("cuda", torch.cuda.current_device())
        if why_not(device) is None:
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="unweight")
            self._compiling[n, k] = self._pool.submit(_prepare, device, n, k)

    def finish(self) -> None:
        """Waits for all kernels. Errors are dropped: a layer that needs the kernel fails again, and raises."""
        for future in self._compiling.values():
            future.exception()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._compiling.clear()


_kernels = _Kernels()


class _Slab:
    """Memory for the arenas of several layers, allocated for the first of them."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._memory: Optional[Tensor] = None

    @property
    def is_full(self) -> bool:
        return self._memory is not None or self.nbytes >= _SLAB_BYTES

    def part(self, at: int, nbytes: int, device: torch.device) -> Tensor:
        """Returns the bytes from `at` on. The layers keep the memory."""
        if self._memory is None:
            self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        return self._memory[at : at + nbytes]


# Arenas are a little larger than a multiple of 2 MiB, to which torch rounds each allocation: alone, they waste 2 %.
_SLAB_BYTES = 512 << 20
_slab = _Slab()


def _reserve(layer: nn.Module, n: int, k: int) -> None:
    """Reserves memory for the arena of a linear layer. Other layers are large, and may be left in BF16."""
    global _slab
    sizes = _native.Runtime.buffer_nbytes(n, k)
    if sizes is None or isinstance(layer, VocabParallelEmbedding) or not current_platform.is_cuda():
        return
    if _slab.is_full:
        _slab = _Slab()
    layer.unweight_memory = functools.partial(_slab.part, _slab.nbytes, sizes[0])
    _slab.nbytes += sizes[0]


def _begin_packing(layer: nn.Module) -> bool:
    """Marks a layer as processed; returns false if it was processed before, as in vLLM's final pass over all layers.

    Raises `ValueError` if weights are missing.
    """
    if getattr(layer, "_already_called_process_weights_after_loading", False):
        return False
    if arrivals_of[layer].arrived:
        # Our loader has checked this by now; loaders without such a check, and dummy weights, are checked here.
        refuse_missing(missing_tensors(layer))
    layer._already_called_process_weights_after_loading = True
    return True


def _check_device(device: torch.device) -> bool:
    """Returns whether packed weights can run on a device; warns once if they cannot."""
    reason = why_not(device)
    if reason is not None:
        logger.warning_once("unweight: %s; weights stay in BF16, which is exact but not smaller", reason)
    return reason is None


# Architectures that read the weight of their embedding themselves.
_READ_EMBEDDING = ("Gemma3n", "DiffusionGemma")


def packs_embeddings() -> bool:
    """Returns whether embeddings may be packed: nothing but lookups and the head uses their weights."""
    vllm = get_current_vllm_config_or_none()
    if vllm is None:
        return True
    model = vllm.model_config
    is_read = any(name.startswith(_READ_EMBEDDING) for name in getattr(model.hf_config, "architectures", None) or ())
    # Adapters, draft models and models that return other outputs than tokens may read the weights.
    return not is_read and model.runner_type == "generate" and not _has_adapters() and vllm.speculative_config is None


def _bf16_method(layer: nn.Module) -> QuantizeMethodBase:
    return UnquantizedEmbeddingMethod() if isinstance(layer, VocabParallelEmbedding) else UnquantizedLinearMethod()


@register_weight_loader_v2_supported_method
class UnweightMethod(LinearMethodBase):
    """The method of a linear layer, embedding or output head, which packs the weight when it is complete."""

    uses_meta_device = True

    def __init__(self) -> None:
        vllm = get_current_vllm_config_or_none()
        mode = None if vllm is None else vllm.compilation_config.cudagraph_mode
        self._has_graphs = current_platform.is_cuda_alike() and mode is not None and mode != CUDAGraphMode.NONE
        # What torch.compile has traced uses the arena, whatever method the layer gets later.
        compiled = None if vllm is None else vllm.compilation_config.mode
        self._is_compiled = compiled is not None and compiled != CompilationMode.NONE

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Registers the weight that vLLM's loaders fill: a meta tensor until its data arrives.

        Its shape is `[sum(output_partition_sizes), input_size_per_partition]`.
        """
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, device="meta", dtype=params_dtype)
        loader = extra.get("weight_loader")
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)
        wrap_loaders(layer)
        _kernels.prepare(*data.shape)
        _reserve(layer, *data.shape)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Packs this process's shard of the weight. If that is not possible, the layer gets vLLM's BF16 method."""
        if not _begin_packing(layer):
            return
        weight = layer.weight.data
        if hasattr(layer, "unweight_packed"):
            self._exchange(layer, weight)
            return
        can_pack = _check_device(weight.device)
        _kernels.finish()
        memory = layer.__dict__.pop("unweight_memory", None)
        packed = _pack(weight, memory and memory(weight.device)) if can_pack else ""
        if isinstance(packed, str):
            # When all layers are loaded, vLLM processes each once more, and then calls this method.
            layer.quant_method = _bf16_method(layer)
            return
        del layer.weight
        # vLLM finds a layer's device by parameter names, of which this is one.
        layer.register_parameter("weight_packed", nn.Parameter(packed.arena, requires_grad=False))
        layer.unweight_packed, layer.unweight_n = packed, packed.n
        if type(layer) is VocabParallelEmbedding:
            _prepare_lookups(weight.device)
        if isinstance(layer, ParallelLMHead) and _has_adapters():
            # With LoRA, vLLM reads dtype and device from the head's weight. This stand-in takes 2 bytes; NaN cannot be
            # mistaken for a weight.
            layer.weight = weight.new_full((), torch.nan).expand(weight.shape)

    def _exchange(self, layer: nn.Module, weight: Tensor) -> None:
        """Packs a new weight of a running engine into the layer's arena, at the same address.

        A weight that cannot be packed stays in BF16, with a warning. Raises `ValueError` if the engine has CUDA graphs
        or uses torch.compile, which cannot use it. With CUDA graphs, also for one with another exponent window.
        """
        packed, prefix = layer.unweight_packed, arrivals_of[layer].prefix
        keep = RunningWeight(layer, self._has_graphs).keep
        reason = _pack_into(packed.arena, packed.escapes, weight, keep, self._has_graphs)
        if isinstance(reason, str) and (self._has_graphs or self._is_compiled):
            raise ValueError(
                f"unweight: the new weight of {prefix} cannot be packed into the old one's place: {reason}; other "
                "layers may have new weights already: start another engine, or use --enforce-eager for such updates"
            )
        if isinstance(reason, str):
            logger.warning("unweight: the new weight of %s cannot be packed and stays in BF16: %s", prefix, reason)
            # vLLM would put the arena back.
            get_layerwise_info(layer).kernel_tensors = None
            del layer.unweight_packed, layer.unweight_n
            layer.quant_method = _bf16_method(layer)
            layer.quant_method.process_weights_after_loading(layer)
            return
        del layer.weight
        # vLLM copies it to the former parameter, which has the same memory.
        layer.register_parameter("weight_packed", nn.Parameter(packed.arena, requires_grad=False))

    def unweight_packed_in(self, layer: nn.Module) -> Optional[RunningWeight]:
        """Returns the packed weight of a layer for `unweight.update_sparse_`; `None` before it is packed."""
        return RunningWeight(layer, self._has_graphs) if hasattr(layer, "unweight_packed") else None

    def apply(self, layer: nn.Module, x: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        """Returns `x @ weight.T + bias` for bfloat16 x `[..., k]`; on the CPU, with the bits of vLLM's BF16 method."""
        linear = torch.ops.unweight.vllm_linear if x.device.type == "cpu" else torch.ops.unweight.linear
        return linear(x, layer.weight_packed, layer.unweight_n, bias)

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        """Returns rows of the weight, bfloat16 `[..., k]`, for integer ids `[...]`."""
        return torch.ops.unweight.embedding(input_, layer.weight_packed, layer.unweight_n, layer.unweight_packed.k)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """Makes the head share the embedding's weight, packed or not."""
        share_weight(layer, embed_tokens)
        return layer


class _TiedHeadMethod(QuantizeMethodBase):
    """The method of a head without a weight, which multiplies by that of an embedding to pack."""

    def __init__(self, embedding: nn.Module) -> None:
        # Not an attribute of the head, whose submodule it would be.
        self._embedding = embedding

    def create_weights(self, layer: nn.Module, *_: Any, **__: Any) -> None:
        """Registers nothing."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        """Returns `x @ weight.T + bias`, by the method of the embedding, which may have become that for BF16."""
        return self._embedding.quant_method.apply(self._embedding, x, bias)


def share_weight(head: nn.Module, embedding: nn.Module) -> None:
    """Stops packing of a head that shares the weight of an embedding, which arrives with the embedding."""
    if isinstance(embedding.quant_method, UnweightMethod):
        del head.weight
        leave_unpacked(head, _TiedHeadMethod(embedding))
    else:
        head.weight = embedding.weight
        leave_unpacked(head, UnquantizedEmbeddingMethod())


class UnweightExpertsMethod(FusedMoEMethodBase):
    """The method of a mixture's experts, which packs them when all of this process are loaded. vLLM does the routing.

    On the CPU, each call unpacks them and runs vLLM's own BF16 method, with bit-identical results.
    """

    uses_meta_device = True

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        self._plain = UnquantizedFusedMoEMethod(moe)

    @property
    def is_monolithic(self) -> bool:
        """Whether the method does the routing from logits, as vLLM's method on the CPU does."""
        return current_platform.is_cpu()

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Registers the weights that vLLM's loaders fill. They are meta tensors until their data arrives.

        `w13_weight` is `[experts, 2 * intermediate, hidden]`, `w2_weight` is `[experts, hidden, intermediate]`.
        """
        shapes = {
            "w13_weight": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.empty(shape, device="meta", dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, extra)
        initialize_online_processing(layer)
        wrap_loaders(layer)
        self._loaders = {name: getattr(layer, name).weight_loader for name in shapes}

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Packs this process's experts. If that is not possible, the layer gets vLLM's BF16 method."""
        if not _begin_packing(layer):
            # vLLM's final pass, when all weights are loaded: remove the stand-ins set below.
            for name in self._loaders:
                layer.__dict__.pop(name, None)
            return
        gate_up, down = layer.w13_weight.data, layer.w2_weight.data
        packed = _pack_experts(gate_up, down) if _check_device(gate_up.device) else None
        if packed is None or isinstance(packed, str):
            if packed is not None:
                # The loader logs it.
                layer.unweight_unpackable = packed
            # When all layers are loaded, vLLM processes each once more, and then calls this method.
            layer._replace_quant_method(self._plain)
            return
        del layer.w13_weight, layer.w2_weight
        layer.register_parameter("w13_weight_packed", nn.Parameter(packed.gate_up, requires_grad=False))
        layer.register_parameter("w2_weight_packed", nn.Parameter(packed.down, requires_grad=False))
        layer.unweight_packed = packed
        for name, loader in self._loaders.items():
            # Experts of other processes may still arrive; vLLM passes them to the parameter's loader, which skips them.
            setattr(layer, name, types.SimpleNamespace(weight_loader=loader))

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        """Returns the config of BF16 experts: packed weights have no scales."""
        return self._plain.get_fused_moe_quant_config(layer)

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        """Returns `None`: no tokens are exchanged between processes."""
        return None

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Optional[Tensor],
    ) -> Tensor:
        """Returns the outputs of this process's experts, `[tokens, hidden]`, weighted and summed per token."""
        # `expert_map` has -1 for experts of other processes, which the operator skips.
        ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        packed = layer.unweight_packed
        return torch.ops.unweight.experts(
            x, layer.w13_weight_packed, layer.w2_weight_packed, ids, topk_weights, packed.experts
        )

    def apply_monolithic(
        self, layer: RoutedExperts, x: Tensor, router_logits: Tensor, input_ids: Optional[Tensor] = None
    ) -> Tensor:
        """Routes tokens by logits and returns the outputs of the experts `[tokens, hidden]`, on the CPU."""
        packed = layer.unweight_packed
        weights = unpack_experts(layer.w13_weight_packed, layer.w2_weight_packed, packed.experts)
        try:
            for name, weight in zip(("w13_weight", "w2_weight"), weights):
                layer.register_parameter(name, nn.Parameter(weight.contiguous(), requires_grad=False))
            # It rearranges the weights for its matmuls.
            self._plain.process_weights_after_loading(layer)
            return self._plain.apply_monolithic(layer, x, router_logits, input_ids)
        finally:
            del layer.w13_weight, layer.w2_weight

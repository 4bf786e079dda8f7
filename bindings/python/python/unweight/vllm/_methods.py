"""How vLLM multiplies by packed weights: the methods of linear layers and of experts. A layer is packed as soon as its
shard of this process is whole, and its BF16 weights go.
"""

from __future__ import annotations

import types
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Optional

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
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
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from ..ops import _prepare, pack, pack_experts, unpack_experts, why_not
from ._account import _lacking, _leave, _loads, _logger, _refuse_lacking, _watch

_NAME = "unweight"
_NO_EXCHANGE = "unweight: the weights of a running engine cannot be exchanged (reload_weights); start another one"


def _are_plain(layer: RoutedExperts) -> bool:
    """Whether experts are silu(gate) * up without more, that only the layer itself asks for."""
    config = layer.moe_config
    parallel = config.moe_parallel_config
    return (
        config.activation == MoEActivation.SILU
        and config.is_act_and_mul
        and not config.has_bias
        and not layer.apply_router_weight_on_input
        and layer.swiglu_limit is layer.swiglu_alpha is layer.swiglu_beta is None
        # Exchanges of tokens, of experts, and adapters of experts are made for BF16 tensors.
        and not parallel.use_all2all_kernels
        and not parallel.enable_eplb
        and not _has_adapters()
    )


def _has_adapters() -> bool:
    vllm = get_current_vllm_config_or_none()
    return vllm is not None and vllm.lora_config is not None


class _Kernels:
    """Makes kernels in a thread of its own, while vLLM makes the model: the first take almost a second."""

    def __init__(self) -> None:
        self._asked: dict[tuple[int, int], Future[None]] = {}
        self._pool: Optional[ThreadPoolExecutor] = None

    def prepare(self, n: int, k: int) -> None:
        """Asks for those of a shape, once."""
        if (n, k) in self._asked or not current_platform.is_cuda():
            return
        device = torch.device("cuda", torch.cuda.current_device())
        if why_not(device) is None:
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="unweight")
            self._asked[n, k] = self._pool.submit(_prepare, device, n, k)

    def finish(self) -> None:
        """Waits for all. What failed is told when a layer asks for it, if one does."""
        for made in self._asked.values():
            made.exception()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._asked.clear()


_kernels = _Kernels()


@register_weight_loader_v2_supported_method
class UnweightMethod(LinearMethodBase):
    """A linear layer, or an output head, that is packed when its weight is whole."""

    uses_meta_device = True

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
        """The weight as vLLM's loaders want it, without memory until it comes."""
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, device="meta", dtype=params_dtype)
        loader = extra.get("weight_loader")
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)
        _watch(layer)
        _kernels.prepare(*data.shape)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Packs the weight of this process; what cannot be packed is vLLM's from now on."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        if hasattr(layer, "unweight_packed"):
            raise NotImplementedError(_NO_EXCHANGE)
        if _loads[layer].came:
            # Our loader has looked by now; others, which have no such check, and dummy weights end up here.
            _refuse_lacking(_lacking(layer))
        layer._already_called_process_weights_after_loading = True
        weight = layer.weight.data
        reason = why_not(weight.device)
        if reason is not None:
            _logger.warning_once("unweight: %s; weights stay in BF16: exact, but not smaller", reason)
        _kernels.finish()
        packed = pack(weight) if reason is None else None
        if packed is None:
            is_head = isinstance(layer, ParallelLMHead)
            # vLLM goes over all layers once more when all are loaded, and then it is this one's turn.
            layer.quant_method = UnquantizedEmbeddingMethod() if is_head else UnquantizedLinearMethod()
            return
        del layer.weight
        # The name is one of those by which vLLM looks for a layer's device.
        layer.register_parameter("weight_packed", nn.Parameter(packed.arena, requires_grad=False))
        layer.unweight_packed, layer.unweight_n = packed, packed.n
        if isinstance(layer, ParallelLMHead) and _has_adapters():
            # vLLM asks a head's weight for its type and device. Two bytes, and no number that could be taken for a
            # weight.
            layer.weight = weight.new_full((), torch.nan).expand(weight.shape)

    def apply(self, layer: nn.Module, x: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        """The product."""
        return torch.ops.unweight.linear(x, layer.weight_packed, layer.unweight_n, bias)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """A head that is the embedding, which stays as it is."""
        layer.weight = embed_tokens.weight
        _leave(layer)
        return layer


class UnweightExpertsMethod(FusedMoEMethodBase):
    """The experts of a mixture, packed when all of this process are there; routing stays vLLM's.

    On the CPU they are unpacked for each call and given to vLLM's own products: the bits of BF16.
    """

    uses_meta_device = True

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        self._plain = UnquantizedFusedMoEMethod(moe)

    @property
    def is_monolithic(self) -> bool:
        """Whether it is given logits rather than what a router chose: as vLLM's products on the CPU are."""
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
        """The weights as vLLM's loaders want them, without memory until they come."""
        shapes = {
            "w13_weight": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.empty(shape, device="meta", dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, extra)
        initialize_online_processing(layer)
        _watch(layer)
        self._loaders = {name: getattr(layer, name).weight_loader for name in shapes}

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Packs the experts of this process; what cannot be packed is vLLM's from now on."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            # All have come: vLLM goes over all layers once more then.
            for name in self._loaders:
                layer.__dict__.pop(name, None)
            return
        if hasattr(layer, "unweight_packed"):
            raise NotImplementedError(_NO_EXCHANGE)
        if _loads[layer].came:
            # Our loader has looked by now; others, which have no such check, and dummy weights end up here.
            _refuse_lacking(_lacking(layer))
        layer._already_called_process_weights_after_loading = True
        gate_up, down = layer.w13_weight.data, layer.w2_weight.data
        packed = pack_experts(gate_up, down) if why_not(gate_up.device) is None else None
        if packed is None:
            # vLLM goes over all layers once more when all are loaded, and then it is this one's turn.
            layer._replace_quant_method(self._plain)
            return
        del layer.w13_weight, layer.w2_weight
        layer.register_parameter("w13_weight_packed", nn.Parameter(packed.gate_up, requires_grad=False))
        layer.register_parameter("w2_weight_packed", nn.Parameter(packed.down, requires_grad=False))
        layer.unweight_packed = packed
        for name, loader in self._loaders.items():
            # Experts of other processes come behind the last of this one, and are looked at by their parameter.
            setattr(layer, name, types.SimpleNamespace(weight_loader=loader))

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        """No scales: nothing was lost."""
        return self._plain.get_fused_moe_quant_config(layer)

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        """Tokens stay where they are."""
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
        """What the experts of this process make of tokens."""
        # An expert of another process is -1, and no work.
        ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        packed = layer.unweight_packed
        return torch.ops.unweight.experts(
            x, layer.w13_weight_packed, layer.w2_weight_packed, ids, topk_weights, packed.experts
        )

    def apply_monolithic(
        self, layer: RoutedExperts, x: Tensor, router_logits: Tensor, input_ids: Optional[Tensor] = None
    ) -> Tensor:
        """The same from a router's logits, on the CPU."""
        packed = layer.unweight_packed
        weights = unpack_experts(layer.w13_weight_packed, layer.w2_weight_packed, packed.experts)
        try:
            for name, weight in zip(("w13_weight", "w2_weight"), weights):
                layer.register_parameter(name, nn.Parameter(weight.contiguous(), requires_grad=False))
            # It lays them out for its products.
            self._plain.process_weights_after_loading(layer)
            return self._plain.apply_monolithic(layer, x, router_logits, input_ids)
        finally:
            del layer.w13_weight, layer.w2_weight

"""Packs weights in the loader of transformers 5, as a step after it has renamed, merged and sharded a tensor."""

from __future__ import annotations

from typing import Any, Optional, Union

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import modeling_utils
from transformers.core_model_loading import ConversionOps
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers.quantizers_utils import get_module_from_name

from ._transformers import BaseQuantizer, may_pack, packed_nbytes
from .ops import Experts, Linear


def _pack_experts(module: nn.Module, name: str, weight: Tensor) -> Optional[str]:
    """Replaces a weight of experts by its packed encoding; returns the reason, and changes nothing, if it cannot be
    packed."""
    experts = Experts._of(weight)
    if isinstance(experts, str):
        return experts
    whole = getattr(module, name)
    if isinstance(whole, DTensor):
        # An empty sharded parameter tells transformers that the output of this process is a partial sum.
        mesh = whole.device_mesh
        none = DTensor.from_local(weight.new_empty(0), mesh, [Shard(0)] * mesh.ndim, run_check=False)
        experts.register_parameter("part", nn.Parameter(none, requires_grad=False))
    delattr(module, name)
    setattr(module, name, experts)
    return None


def _product(weights: Union[Experts, Tensor], x: Tensor, expert: int) -> Tensor:
    if isinstance(weights, Experts):
        return weights.linear(x, expert)
    weights = weights.to_local() if isinstance(weights, DTensor) else weights
    return nn.functional.linear(x, weights[expert])


def _experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Returns the output of a module's experts for tokens, multiplying by the packed weights of one expert at a time.

    Adds in the order of transformers' default implementation, so that results on the CPU are bit-identical.
    """
    tokens, top_k = top_k_index.shape
    chosen = top_k_index.reshape(-1)
    out = hidden_states.new_zeros(tokens * top_k, hidden_states.shape[-1])
    for expert in chosen.unique().tolist():
        if expert >= module.num_experts:
            # The expert is on another process.
            continue
        slots = (chosen == expert).nonzero().squeeze(1)
        x = _product(module.gate_up_proj if module.has_gate else module.up_proj, hidden_states[slots // top_k], expert)
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        out[slots] = _product(module.down_proj, x, expert)
    weighted = out * top_k_weights.reshape(-1, 1)
    return weighted.view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register("unweight", _experts_forward)


def _set_experts_implementation(model: modeling_utils.PreTrainedModel) -> None:
    """Makes a model use `_experts_forward`: none of transformers' own implementations supports packed weights."""
    try:
        model.set_experts_implementation("unweight")
    except ValueError:
        # Before transformers 5.8, only its own names are accepted, but registered implementations are found.
        for part in model.modules():
            if isinstance(part, modeling_utils.PreTrainedModel):
                part.config._experts_implementation_internal = "unweight"


class _Pack(ConversionOps):
    """Packs a loaded weight, or this process's shard, as a step of transformers' loader. Adds experts that cannot
    be packed to `unpackable`: the name of the weight, and the reason."""

    def __init__(self, unpackable: dict[str, str]) -> None:
        self._unpackable = unpackable

    def convert(
        self,
        input_dict: dict[str, Any],
        full_layer_name: str = "",
        model: Any = None,
        missing_keys: Optional[set[str]] = None,
        **_: Any,
    ) -> dict[str, Any]:
        (weight,) = input_dict.values()
        weight = weight[0] if isinstance(weight, list) else weight
        module, name = get_module_from_name(model, full_layer_name)
        if not may_pack(weight):
            return {full_layer_name: weight}
        if isinstance(module, Linear):
            if not module.pack(weight):
                return {full_layer_name: weight}
        elif (reason := _pack_experts(module, name, weight)) is not None:
            self._unpackable[full_layer_name] = reason
            return {full_layer_name: weight}
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {}


class UnweightHfQuantizer(BaseQuantizer):
    """The hooks of transformers 5."""

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Returns the bytes per element on the device, so that "auto" plans memory for packed weights."""
        nbytes = packed_nbytes(param) if self.param_needs_quantization(model, param_name) else None
        if nbytes is None:
            return super().param_element_size(model, param_name, param)
        *_, n, k = param.shape
        return nbytes / (n * k)

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        tied = getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False)
        head = model.get_output_embeddings() if tied else None
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and module is not head:
                packed = Linear(module)
                # Makes tensor parallelism pass local shards instead of DTensors.
                packed._hf_quantized_needs_local_tp = True
                model.set_submodule(name, packed)

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Returns whether a parameter is to be packed: the weight of a linear layer, or of experts."""
        module, name = get_module_from_name(model, param_name)
        if isinstance(module, Linear):
            return name == "weight"
        return self.has_experts(module) and name in ("gate_up_proj", "up_proj", "down_proj")

    def has_experts(self, module: nn.Module) -> bool:
        """Returns whether a module has experts in the layout that is packed: `[experts, n, k]`, without a bias."""
        return getattr(module, "is_transposed", True) is False and getattr(module, "has_bias", True) is False

    def _process_model_after_weight_loading(self, model: Any, **arguments: Any) -> Any:
        if any(isinstance(module, Experts) for module in model.modules()):
            _set_experts_implementation(model)
        return super()._process_model_after_weight_loading(model, **arguments)

    def get_quantize_ops(self) -> ConversionOps:
        """Returns the operation that packs a weight."""
        return _Pack(self._unpackable)

"""Packs weights in the loader of transformers 5, after it has renamed, merged and sharded a tensor and compared its
shape with the parameter's.

Importing this module replaces one more private function of the loader.
"""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import core_model_loading, modeling_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers.quantizers_utils import get_module_from_name

from ._transformers import BaseQuantizer, logger, may_pack, packed_nbytes
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
    # transformers initializes what the checkpoint lacks, such as the other weights of this module.
    experts._is_hf_initialized = True
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


def _set_experts_implementation(module: nn.Module) -> None:
    """Makes a module with packed experts use `_experts_forward`, unless "eager" was chosen, which takes one expert at a
    time. None of transformers' other implementations supports packed weights."""
    chosen = module.config._experts_implementation
    if chosen == "eager":
        return
    if chosen not in (None, "grouped_mm", "unweight"):
        logger.warning_once(
            f"unweight: experts_implementation='{chosen}' does not support packed experts; they run one after another "
            "and round as 'grouped_mm'. Pass 'eager' to unpack each and round as 'eager'"
        )
    # Before transformers 5.8, `set_experts_implementation` takes its own names only.
    module.config._experts_implementation_internal = "unweight"


@torch.no_grad()
def _initialize_missing(model: modeling_utils.PreTrainedModel, loaded: set[str]) -> None:
    """Initializes parameters of linear layers to pack that were not loaded. transformers does so for `nn.Linear`."""
    # Compared by identity, because a parameter that was loaded may have another name, to which it is tied.
    known = {id(one) for name, one in model.named_parameters(remove_duplicate=False) if name in loaded}
    deviation = getattr(model.config.get_text_config(), "initializer_range", None) or 0.02
    for module in model.modules():
        missing = module.named_parameters(recurse=False) if isinstance(module, Linear) else ()
        for name, parameter in missing:
            if id(parameter) not in known:
                nn.init.zeros_(parameter) if name == "bias" else nn.init.normal_(parameter, std=deviation)


def _leave_meta_weight(module: Linear) -> None:
    """Gives a packed layer a weight on the meta device, which is no parameter and counts as initialized: until the
    model is loaded, the `_init_weights` of a parent may initialize the weight, as T5's and Mamba's do."""
    weight = torch.empty(module.out_features, module.in_features, dtype=torch.bfloat16, device="meta")
    weight._is_hf_initialized = True
    vars(module)["weight"] = weight


class UnweightHfQuantizer(BaseQuantizer):
    """The hooks of transformers 5."""

    def __init__(self, quantization_config: Any, **arguments: Any) -> None:
        super().__init__(quantization_config, **arguments)
        self._loaded: set[str] = set()
        """The parameters that were loaded."""

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Returns the bytes per element on the device, so that "auto" plans memory for packed weights."""
        nbytes = packed_nbytes(param) if self._is_to_pack(*get_module_from_name(model, param_name)) else None
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
        """Returns false: a parameter is packed once transformers has loaded it."""
        return False

    def pack_loaded(self, model: Any, param_name: str, weight: Tensor) -> None:
        """Packs a loaded parameter, or the shard of this process, if it is one to pack and can be packed."""
        self._loaded.add(param_name)
        module, name = get_module_from_name(model, param_name)
        if not self._is_to_pack(module, name) or not may_pack(weight):
            return
        if isinstance(module, Linear):
            if module.pack(weight):
                _leave_meta_weight(module)
        elif (reason := _pack_experts(module, name, weight)) is not None:
            self._unpackable[param_name] = reason

    def _is_to_pack(self, module: nn.Module, name: str) -> bool:
        """Returns whether a parameter is to be packed: the weight of a linear layer, or of experts."""
        if isinstance(module, Linear):
            return name == "weight"
        return self.has_experts(module) and name in ("gate_up_proj", "up_proj", "down_proj")

    def has_experts(self, module: nn.Module) -> bool:
        """Returns whether a module has experts in the layout that is packed: `[experts, n, k]`, without a bias."""
        return getattr(module, "is_transposed", True) is False and getattr(module, "has_bias", True) is False

    def _process_model_after_weight_loading(self, model: Any, **arguments: Any) -> Any:
        _initialize_missing(model, self._loaded)
        for module in model.modules():
            if isinstance(module, Linear) and module.is_packed:
                vars(module).pop("weight", None)
            if any(isinstance(child, Experts) for child in module.children()):
                _set_experts_implementation(module)
        return super()._process_model_after_weight_loading(model, **arguments)


_set_param = core_model_loading.set_param_for_module


def _set_and_pack(model: Any, name: str, weight: Tensor, loading_info: Any, *more: Any, **named: Any) -> None:
    """Replaces `set_param_for_module`, which compares no shapes if there is a quantizer: makes it compare those of
    every tensor, and packs the ones that fit."""
    quantizer = next((one for one in (*more, *named.values()) if isinstance(one, UnweightHfQuantizer)), None)
    if quantizer is not None:
        more = tuple(None if one is quantizer else one for one in more)
        named = {key: None if one is quantizer else one for key, one in named.items()}
    _set_param(model, name, weight, loading_info, *more, **named)
    if quantizer is not None and all(name != mismatched for mismatched, *_ in loading_info.mismatched_keys):
        quantizer.pack_loaded(model, name, weight)


core_model_loading.set_param_for_module = _set_and_pack

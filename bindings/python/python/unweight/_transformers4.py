"""Packs weights in the loader of transformers 4, which passes each tensor that a quantizer asks for to
`create_quantized_param`. The experts of most mixtures are linear layers there.

Importing this module replaces one more private function of the loader, and one method of `PretrainedConfig`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from transformers import modeling_utils
from transformers.configuration_utils import PretrainedConfig
from transformers.integrations.tensor_parallel import shard_and_distribute_module
from transformers.quantizers.quantizers_utils import get_module_from_name

from ._bundle import Bundle
from ._transformers import MANIFEST, BaseQuantizer, loading_bundles, may_pack, packed_nbytes
from .ops import Linear, _linear, _pack


class _ShardedLinear(Linear):
    """A packed shard of a layer. The hooks of tensor parallelism pass DTensors to the layer, and expect one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight: Any = linear.weight
        (placement,) = weight.placements
        self._mesh = weight.device_mesh
        # A shard of the rows has some of the outputs; one of the columns, a summand of each.
        self._placement = Shard(-1) if placement.is_shard(0) else Partial() if placement.is_shard(1) else Replicate()

    def forward(self, x: Any) -> Any:
        bias: Any = self.bias
        y = _linear(x.to_local(), self.weight_packed, self._n, None if bias is None else bias.to_local())
        return DTensor.from_local(y, self._mesh, [self._placement], run_check=False)


class UnweightHfQuantizer(BaseQuantizer):
    """The hooks of transformers 4."""

    # Makes transformers call `create_quantized_param`.
    requires_parameters_quantization = True

    def __init__(self, quantization_config: Any, **arguments: Any) -> None:
        super().__init__(quantization_config, **arguments)
        self._names: set[str] = set()
        """The weights to pack."""
        self._packed: dict[str, Linear] = {}
        """The packed layers. They replace others after loading, because the loader and accelerate need a state_dict."""
        self._knows_missing, self._is_loading = False, False
        self._planned: list[tuple[nn.Module, nn.Parameter]] = []
        """Layers that have a placeholder for their weight, and the weight."""
        self._bundles: list[Bundle] = []

    def update_dtype(self, dtype: Any) -> Any:
        """Makes the model's own dtype the default, as in transformers 5; it is checked when the model exists."""
        if dtype is None or dtype == "auto":
            return "auto"
        return super().update_dtype(getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    def get_special_dtypes_update(self, model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Replaces weights by placeholders of the packed sizes, so that "auto" plans memory for packed weights. After
        that, transformers calls `validate_environment` with the device map, which puts the weights back."""
        for name in self._names:
            module, _ = get_module_from_name(model, name)
            nbytes = packed_nbytes(module.weight)
            if nbytes is not None and module.weight.dtype == torch.bfloat16:
                self._planned.append((module, module.weight))
                placeholder = torch.empty(nbytes, dtype=torch.uint8, device="meta")
                module.weight = nn.Parameter(placeholder, requires_grad=False)
        return super().get_special_dtypes_update(model, dtype)

    def validate_environment(self, device_map: Any = None, **arguments: Any) -> None:
        for module, weight in self._planned:
            module.weight = weight
        self._planned.clear()
        super().validate_environment(device_map=device_map, **arguments)
        devices = {str(device) for device in device_map.values()} if isinstance(device_map, dict) else set()
        if len(devices) > 1:
            raise ValueError(
                f"device_map uses several devices ({', '.join(sorted(devices))}), which transformers "
                f"{transformers.__version__} cannot do with packed weights; pass one, such as device_map='cuda:0'"
            )

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        super().update_dtype(model.dtype)
        # The loader opens and closes one shard after another; this keeps the bundle open.
        self._bundles = loading_bundles()
        # Weights with several names, such as tied ones, are not packed.
        uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        for name, module in model.named_modules():
            if type(module) is nn.Linear and uses[id(module.weight)] == 1:
                self._names.add(f"{name}.weight")

    def update_missing_keys(self, model: Any, missing_keys: list[str], prefix: str) -> list[str]:
        """Changes nothing. Notes that the loader next makes weights that the checkpoint lacks."""
        self._knows_missing = True
        return missing_keys

    def update_expected_keys(self, model: Any, expected_keys: list[str], loaded_keys: list[str]) -> list[str]:
        """Changes nothing. Called before the missing keys are known, and before shards are loaded; notes the latter."""
        self._is_loading = self._knows_missing
        return expected_keys

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Returns whether `create_quantized_param` loads a parameter: the weight of a linear layer, from a shard."""
        return self._is_loading and param_name in self._names

    def create_quantized_param(
        self, model: Any, param_value: Any, param_name: str, target_device: Any, **sharding: Any
    ) -> None:
        """Loads a weight, or the shard of this process, and packs it if it can be packed."""
        module, name = get_module_from_name(model, param_name)
        if sharding:
            more = [sharding[key] for key in ("casting_dtype", "to_contiguous", "rank", "device_mesh")]
            shard_and_distribute_module(model, param_value, sharding["empty_param"], param_name, *more)
        else:
            module.load_state_dict({name: param_value.to(target_device)}, strict=False, assign=True)
        is_shard = isinstance(module.weight, DTensor)
        weight = module.weight.to_local() if is_shard else module.weight
        if not may_pack(weight):
            return
        layer = _ShardedLinear(module) if is_shard else Linear(module)
        if layer.pack(weight):
            module.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
            self._packed[param_name.removesuffix(".weight")] = layer
        elif ".experts." in param_name:
            # Only the first reason is logged.
            self._unpackable[param_name] = "" if self._unpackable else str(_pack(weight))

    def _process_model_after_weight_loading(self, model: Any, **arguments: Any) -> Any:
        for name, layer in self._packed.items():
            # It may have been loaded or tied since the weight was packed.
            module = model.get_submodule(name)
            layer.bias = module.bias
            # Those of tensor parallelism.
            layer._forward_pre_hooks.update(module._forward_pre_hooks)
            layer._forward_hooks.update(module._forward_hooks)
            model.set_submodule(name, layer.eval())
        self._packed, self._bundles = {}, []
        return super()._process_model_after_weight_loading(model, **arguments)


_infer_parameter_dtype = modeling_utils._infer_parameter_dtype


def _dtype(
    model: Any, param_name: str, empty_param: Tensor, keep_in_fp32_regex: Any = None, hf_quantizer: Any = None
) -> Any:
    """Replaces `_infer_parameter_dtype`, which rounds every tensor of a quantized model to one dtype, such as biases of
    routers that the model has in float32."""
    quantizer = None if isinstance(hf_quantizer, UnweightHfQuantizer) else hf_quantizer
    return _infer_parameter_dtype(model, param_name, empty_param, keep_in_fp32_regex, quantizer)


modeling_utils._infer_parameter_dtype = _dtype

_get_config_dict = PretrainedConfig.get_config_dict.__func__


def _config_dict(cls: Any, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replaces `PretrainedConfig.get_config_dict`: removes a bundle's `transformers_weights`, which the loader refuses
    before it calls a quantizer."""
    config, unused = _get_config_dict(cls, *args, **kwargs)
    if config.get("transformers_weights") == MANIFEST:
        del config["transformers_weights"]
    return config, unused


PretrainedConfig.get_config_dict = classmethod(_config_dict)

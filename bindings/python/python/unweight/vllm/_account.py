"""Counts the tensors that arrive for each layer to pack, and reports missing ones.

vLLM checks for missing weights only in models without a quantization.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Optional

from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

logger = init_logger("vllm.unweight")
TWICE = (
    "unweight: two tensors arrived for {}, but a packed weight accepts one; leave only the files of one checkpoint in "
    "the directory"
)


class Arrivals:
    """The weights that have arrived for a layer to pack."""

    def __init__(self, prefix: str, merged: dict[str, list[str]]) -> None:
        self.prefix, self.merged = prefix, merged
        self.arrived: dict[str, set[tuple[object, ...]]] = {}
        """For each parameter, the parts that arrived: shard (q, k, v, gate, up) and expert, as loader arguments."""
        self.numels: dict[str, int] = {}
        """For each parameter, the number of elements that arrived."""
        self.replaced: Optional[object] = None
        """vLLM's record of the tensors that arriving ones replace; a new object for each update of a running engine."""

    def begin(self, replaced: Optional[object]) -> None:
        """Counts from 0 if an update of a running engine has begun."""
        if replaced is not self.replaced:
            self.arrived, self.numels, self.replaced = {}, {}, replaced


arrivals_of: weakref.WeakKeyDictionary[nn.Module, Arrivals] = weakref.WeakKeyDictionary()


def leave_unpacked(head: ParallelLMHead, method: QuantizeMethodBase) -> None:
    """Gives a head another method, which does not pack: no weight arrives for it."""
    head.quant_method = method
    arrivals_of.pop(head, None)
    get_layerwise_info(head).reset()


def wrap_loaders(layer: nn.Module) -> None:
    """Wraps the weight loaders of a layer so that they count. vLLM itself ignores tensors for a layer that is already
    packed, and would pack uninitialized memory if a tensor is missing.
    """
    for name, parameter in _parameters_to_pack(layer):
        if not hasattr(parameter.weight_loader, "unweight_counts"):
            parameter.weight_loader = _counting_loader(weakref.ref(layer), name, parameter.weight_loader)


def _parameters_to_pack(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters with a loader of their own. Experts also hold the correction bias of their router, which
    arrives with the router.
    """
    return [(name, one) for name, one in layer.named_parameters(recurse=False) if hasattr(one, "weight_loader")]


def _counting_loader(
    layer_of: Callable[[], Optional[nn.Module]], name: str, load: Callable[..., Any]
) -> Callable[..., Any]:
    unwrapped = inspect.unwrap(load)
    signature = inspect.signature(unwrapped)

    # vLLM recognises and unwraps loaders by their name, so this one needs the name of the loader that it wraps.
    @functools.wraps(load)
    def counting(*args: Any, **kwargs: Any) -> Any:
        layer = layer_of()
        arrivals = None if layer is None else arrivals_of.get(layer)
        if arrivals is None:
            return load(*args, **kwargs)
        info = get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            arrivals.begin(info.kernel_tensors)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        not_part = ("param", "loaded_weight", "weight_name", "return_success")
        part = tuple(value for key, value in bound.arguments.items() if key not in not_part)
        arrived = arrivals.arrived.setdefault(name, set())
        if part in arrived:
            which = "".join(f" ({one})" for one in part if one is not None)
            raise ValueError(TWICE.format(f"{arrivals.prefix}.{name}{which}"))
        arrived.add(part)
        before = info.load_numel
        try:
            result = load(*args, **kwargs)
        except AssertionError as error:
            # vLLM's own has no text.
            tensor, parameter = bound.arguments.get("loaded_weight"), bound.arguments.get("param")
            if str(error) or not isinstance(tensor, Tensor) or not isinstance(parameter, Tensor):
                raise
            which = ", ".join(str(one) for one in part if one is not None and one != "")
            raise ValueError(
                f"unweight: a tensor of shape {list(tensor.shape)} does not fit into {arrivals.prefix}.{name} of shape "
                f"{list(parameter.shape)} ({which}): config.json has other sizes than the model; fetch both again"
            ) from error
        # The count of a complete layer restarts at 0, so the difference may be negative; such a layer is not checked.
        arrivals.numels[name] = arrivals.numels.get(name, 0) + max(0, info.load_numel - before)
        return result

    counting.unweight_counts = True
    return counting


def missing_tensors(layer: nn.Module) -> list[str]:
    """Returns the missing tensors of a layer to pack, by their names in vLLM's model."""
    arrivals = arrivals_of[layer]
    info = get_layerwise_info(layer)
    if not info.can_load() or info.load_numel >= info.load_numel_total:
        return []
    missing = []
    for name, parameter in _parameters_to_pack(layer):
        expected = _expected_numel(layer, parameter)
        if arrivals.numels.get(name, 0) < expected:
            missing += _missing_parts(layer, arrivals, name, expected)
    return missing


def _expected_numel(layer: nn.Module, parameter: nn.Parameter) -> int:
    """Returns how many elements of a parameter arrive."""
    if isinstance(layer, VocabParallelEmbedding):
        # The remaining rows are padding.
        return parameter.numel() // parameter.shape[0] * layer.shard_indices.num_org_elements
    return parameter.numel()


def is_incomplete(layer: nn.Module) -> bool:
    """Returns whether tensors of a layer to load are missing."""
    if layer in arrivals_of:
        return bool(missing_tensors(layer))
    expected = sum(_expected_numel(layer, parameter) for parameter in layer.parameters(recurse=False))
    return get_layerwise_info(layer).load_numel < expected


def _missing_parts(layer: nn.Module, arrivals: Arrivals, name: str, expected: int) -> list[str]:
    arrived = arrivals.arrived.get(name, set())
    whole = [f"{arrivals.prefix}.{name}"]
    if isinstance(layer, RoutedExperts):
        projections = {
            "w1": layer.ckpt_gate_proj_name,
            "w2": layer.ckpt_down_proj_name,
            "w3": layer.ckpt_up_proj_name,
        }
        shards = ("w2",) if name.startswith("w2") else ("w1", "w3")
        parts = [
            f"{arrivals.prefix}.{expert}.{projections[shard]}.weight"
            for expert in range(layer.moe_config.num_experts)
            for shard in shards
            if (shard, expert) not in arrived and layer._map_global_expert_id_to_local_expert_id(expert) != -1
        ]
        # If every tensor has arrived, they are too small.
        return parts or [f"{whole[0]} ({arrivals.numels.get(name, 0)} of {expected} elements; see config.json's sizes)"]
    parent, _, leaf = arrivals.prefix.rpartition(".")
    names = arrivals.merged.get(leaf, [])
    if isinstance(layer, QKVParallelLinear):
        shards = ("q", "k", "v")
    elif isinstance(layer, MergedColumnParallelLinear):
        shards = tuple(range(len(layer.output_sizes)))
    else:
        return whole
    if len(names) != len(shards):
        names = [f"{leaf} ({shard})" for shard in shards]
    parts = [f"{parent}.{part}.{name}" for part, shard in zip(names, shards) if (shard,) not in arrived]
    return parts or whole


def missing_parameters(model: nn.Module, loaded: set[str]) -> list[str]:
    """Returns the parameters for which no tensor arrived, of layers that are not to be packed."""
    named = dict(model.named_parameters(remove_duplicate=False))
    # A tied head is loaded with the embedding, so parameters are compared by identity.
    arrived = {id(named[name]) for name in loaded if name in named}
    missing = []
    for prefix, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        # Layers of another quantization may have scales, which a checkpoint need not contain.
        is_checked = method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        if is_checked and module not in arrivals_of:
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in arrived:
                    missing.append(f"{prefix}.{name}" if prefix else name)
    return missing


def refuse_missing(missing: list[str]) -> None:
    if missing:
        names = ", ".join(sorted(missing)[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise ValueError(
            f"unweight: weights are missing from the model's files: {names}; fetch the whole model again, or compress "
            "it as a whole"
        )

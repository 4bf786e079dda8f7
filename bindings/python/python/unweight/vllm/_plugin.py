"""What vLLM asks while it loads a model: the quantization `unweight`, its method for linear layers, and a loader.

The form is lossless, so vLLM is given the model's own BF16 tensors by name: its models rename, merge and shard them as
ever. A layer is packed as soon as its shard of this process is whole, and its BF16 weights go.
"""

from __future__ import annotations

import functools
import inspect
import os
import pathlib
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Optional

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import ModelConfig, VllmConfig, get_current_vllm_config_or_none
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.models.utils import is_pp_missing_parameter
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from .._bundle import Bundle, TensorInfo
from .._part import Part
from ..ops import _prepare, pack, pack_experts, unpack_experts, why_not

_logger = init_logger("vllm.unweight")
_NAME = "unweight"
_MANIFEST = "unweight.json"
# Tensors that are read and decoded while vLLM is busy with the ones before.
_THREADS = 8
_AHEAD_BYTES = 1 << 30
# Tensors above this come in other memory: locking so much takes longer than copying from there.
_PINNED_BYTES = 256 << 20
_TWICE = (
    "unweight: two tensors came for {}; a packed weight takes one: leave only the files of one checkpoint in the folder"
)
_NO_EXCHANGE = "unweight: the weights of a running engine cannot be exchanged (reload_weights); start another one"


class UnweightConfig(QuantizationConfig):
    """Asks for packed weights. There is nothing to choose: nothing is lost."""

    def __init__(self, manifest: Optional[str] = None) -> None:
        super().__init__()
        self.manifest = manifest
        """What a bundle's weights are called; `None` for a model that is packed when it is loaded."""
        self._is_checked = False

    def get_name(self) -> str:
        return _NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        # BF16 itself. A newer GPU without kernels keeps the weights in BF16.
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        # There is no file to be read for a model that is packed when it is loaded.
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> UnweightConfig:
        return cls(config.get("manifest"))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Optional[QuantizeMethodBase]:
        """How a layer is packed; `None`: it is vLLM's, as embeddings are."""
        if not self._is_checked:
            _refuse_what_cannot_be(self)
            self._is_checked = True
        if isinstance(layer, RoutedExperts):
            if not _are_plain(layer):
                return None
            _loads[layer] = _Loads(prefix, {})
            return UnweightExpertsMethod(layer.moe_config)
        if not isinstance(layer, (LinearBase, ParallelLMHead)):
            return None
        # The model class fills the mapping in before it makes layers.
        _loads[layer] = _Loads(prefix, self.packed_modules_mapping)
        return UnweightMethod()


class _Loads:
    """What has come for a layer that is to be packed."""

    def __init__(self, prefix: str, merged: dict[str, list[str]]) -> None:
        self.prefix, self.merged = prefix, merged
        self.came: dict[str, set[tuple[object, ...]]] = {}
        """For each parameter, which parts of it: q, k or v, the gate or the up, of which expert."""
        self.numels: dict[str, int] = {}
        """How many weights of each parameter that was."""


_loads: weakref.WeakKeyDictionary[nn.Module, _Loads] = weakref.WeakKeyDictionary()


def _leave(head: ParallelLMHead) -> None:
    """Takes back that a head is to be packed: its weight is the embedding's, and comes with that."""
    head.quant_method = UnquantizedEmbeddingMethod()
    _loads.pop(head, None)
    get_layerwise_info(head).reset()


def _leave_tied(model: nn.Module) -> None:
    """Some models set the head's weight to the embedding's without a word to its method."""
    embeddings = (one for one in model.modules() if isinstance(one, VocabParallelEmbedding))
    others = (one for one in embeddings if not isinstance(one, ParallelLMHead))
    tied = {id(weight) for one in others for weight in one.parameters(recurse=False)}
    for head in model.modules():
        is_ours = isinstance(head, ParallelLMHead) and isinstance(head.quant_method, UnweightMethod)
        if is_ours and id(getattr(head, "weight", None)) in tied:
            _leave(head)


def _watch(layer: nn.Module) -> None:
    """Keeps count of what comes for a layer. vLLM itself passes over tensors that come for a packed layer, and packs
    what was in memory where none came.
    """
    for name, parameter in layer.named_parameters(recurse=False):
        if not hasattr(parameter.weight_loader, "unweight_watches"):
            parameter.weight_loader = _watched(weakref.ref(layer), name, parameter.weight_loader)


def _watched(layer_of: Callable[[], Optional[nn.Module]], name: str, load: Callable[..., Any]) -> Callable[..., Any]:
    inner = inspect.unwrap(load)
    signature = inspect.signature(inner)

    # vLLM unwraps it by its name, which it has from what it wraps.
    @functools.wraps(load)
    def watched(*args: Any, **kwargs: Any) -> Any:
        layer = layer_of()
        loads = None if layer is None else _loads.get(layer)
        if loads is None:
            return load(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        others = ("param", "loaded_weight", "weight_name", "return_success")
        part = tuple(value for key, value in bound.arguments.items() if key not in others)
        came = loads.came.setdefault(name, set())
        if part in came:
            which = "".join(f" ({one})" for one in part if one is not None)
            raise ValueError(_TWICE.format(f"{loads.prefix}.{name}{which}"))
        came.add(part)
        info = get_layerwise_info(layer)
        before = info.load_numel
        answer = load(*args, **kwargs)
        # A layer that is whole begins at 0 again, and is not asked any more.
        loads.numels[name] = loads.numels.get(name, 0) + max(0, info.load_numel - before)
        return answer

    watched.unweight_watches = True
    return watched


def _lacking(layer: nn.Module) -> list[str]:
    """The tensors that did not come for a layer that is to be packed, by the names of vLLM's model."""
    loads = _loads[layer]
    info = get_layerwise_info(layer)
    if not info.can_load() or info.load_numel >= info.load_numel_total:
        return []
    lacking = []
    for name, parameter in layer.named_parameters(recurse=False):
        expected = parameter.numel()
        if isinstance(layer, VocabParallelEmbedding):
            # The rest is padding.
            expected = expected // parameter.shape[0] * layer.shard_indices.num_org_elements
        if loads.numels.get(name, 0) < expected:
            lacking += _parts_lacking(layer, loads, name)
    return lacking


def _parts_lacking(layer: nn.Module, loads: _Loads, name: str) -> list[str]:
    came = loads.came.get(name, set())
    whole = [f"{loads.prefix}.{name}"]
    if isinstance(layer, RoutedExperts):
        projections = {
            "w1": layer.ckpt_gate_proj_name,
            "w2": layer.ckpt_down_proj_name,
            "w3": layer.ckpt_up_proj_name,
        }
        shards = ("w2",) if name.startswith("w2") else ("w1", "w3")
        parts = [
            f"{loads.prefix}.{expert}.{projections[shard]}.weight"
            for expert in range(layer.moe_config.num_experts)
            for shard in shards
            if (shard, expert) not in came and layer._map_global_expert_id_to_local_expert_id(expert) != -1
        ]
        return parts or whole
    parent, _, leaf = loads.prefix.rpartition(".")
    names = loads.merged.get(leaf, [])
    if isinstance(layer, QKVParallelLinear):
        shards = ("q", "k", "v")
    elif isinstance(layer, MergedColumnParallelLinear):
        shards = tuple(range(len(layer.output_sizes)))
    else:
        return whole
    if len(names) != len(shards):
        names = [f"{leaf} ({shard})" for shard in shards]
    parts = [f"{parent}.{one}.{name}" for one, shard in zip(names, shards) if (shard,) not in came]
    return parts or whole


def _others_lacking(model: nn.Module, loaded: set[str]) -> list[str]:
    """The parameters of layers that are not to be packed for which nothing came."""
    named = dict(model.named_parameters(remove_duplicate=False))
    # A head that is the embedding has come with it.
    came = {id(named[name]) for name in loaded if name in named}
    lacking = []
    for prefix, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        # Others have scales, which no checkpoint needs to have.
        is_known = method is None or isinstance(module, (LinearBase, VocabParallelEmbedding))
        if is_known and module not in _loads:
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in came:
                    lacking.append(f"{prefix}.{name}" if prefix else name)
    return lacking


def _refuse_lacking(lacking: list[str]) -> None:
    if lacking:
        shown = ", ".join(sorted(lacking)[:8]) + (f" and {len(lacking) - 8} more" if len(lacking) > 8 else "")
        raise ValueError(
            f"unweight: the model's files lack weights: {shown}; fetch the whole model again, or compress the whole one"
        )


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


def _refuse_what_cannot_be(config: UnweightConfig) -> None:
    """Options that would lose packed weights, or load none."""
    vllm = get_current_vllm_config_or_none()
    if vllm is None:
        return
    offload = vllm.offload_config
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        raise ValueError(
            "unweight: packed weights cannot be offloaded to the CPU (--cpu-offload-gb, --offload-group-size): they "
            "are found by their address; leave the option away, or use more GPUs (--tensor-parallel-size)"
        )
    parallel = vllm.parallel_config
    processes = parallel.tensor_parallel_size * parallel.data_parallel_size
    if parallel.enable_expert_parallel and processes > 1 and current_platform.is_cpu():
        raise ValueError(
            "unweight: vLLM's CPU backend has no expert parallelism (its processes die, with BF16 as well); leave "
            "--enable-expert-parallel away"
        )
    loader = _LOAD_FORMAT_TO_MODEL_LOADER.get(str(vllm.load_config.load_format))
    if config.manifest is not None and not (isinstance(loader, type) and issubclass(loader, UnweightLoader)):
        name = vllm.load_config.load_format
        raise ValueError(f"unweight: a bundle cannot be loaded by --load-format {name}; leave the option away")


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


class UnweightLoader(DefaultModelLoader):
    """vLLM's loader of files, which reads bundles, too: their tensors by the names and with the bits of the model."""

    _is_ours = False
    # The weights that the configuration names.
    _named: Optional[str] = None
    # The quantization, if it is not ours.
    _other: Optional[str] = None
    _model: Optional[nn.Module] = None
    _read_bytes = 0
    _stored_bytes = 0

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """As vLLM's, and says what became of the weights."""
        self._named = getattr(vllm_config.quant_config, "manifest", None)
        model = super().load_model(vllm_config, model_config, prefix)
        if (self._is_ours or self._stored_bytes) and current_platform.is_cuda_alike():
            # Torch would keep what it locked for tensors that are gone, some GB, as long as this process runs.
            torch._C._host_emptyCache()
        if model_config.quantization == _NAME:
            _tell(model)
            # Weights that come in another way would find no layer to go to, when others have been replaced.
            for module in model.modules():
                if hasattr(module, "load_weights"):
                    module.load_weights = _no_exchange
            if self._stored_bytes:
                _logger.info("unweight: %d of %d bytes of the bundle read", self._read_bytes, self._stored_bytes)
        return model

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """As vLLM's, and nothing may be missing: vLLM itself looks for that in models without a quantization."""
        self._is_ours = model_config.quantization == _NAME
        self._other = None if self._is_ours else model_config.quantization
        if self._is_ours:
            self.enable_weights_track = True
        super().load_weights(model, model_config)

    def track_weights_loading(self, model: nn.Module, loaded_weights: Optional[set[str]]) -> None:
        """As vLLM's; for packed weights by what came for each layer."""
        if not self._is_ours:
            return super().track_weights_loading(model, loaded_weights)
        lacking = [name for layer in model.modules() if layer in _loads for name in _lacking(layer)]
        if loaded_weights is not None:
            lacking += _others_lacking(model, loaded_weights)
        _refuse_lacking(lacking)

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """As vLLM's, once: here a running engine is still whole."""
        if any(hasattr(layer, "unweight_packed") for layer in model.modules()):
            raise NotImplementedError(_NO_EXCHANGE)
        _leave_tied(model)
        for layer in model.modules():
            if isinstance(getattr(layer, "quant_method", None), (UnweightMethod, UnweightExpertsMethod)):
                # Once more, for biases: layers have them since.
                initialize_online_processing(layer)
                _watch(layer)
        self._model, self._read_bytes, self._stored_bytes = model, 0, 0
        if self.local_expert_ids is None:
            # As vLLM does with `--enable-ep-weight-filter`: what others multiply with is not read.
            self.local_expert_ids = _own_experts(model)
        weights = super().get_all_weights(model_config, model)
        return _each_once(weights) if self._is_ours else weights

    def _get_weights_iterator(self, source: DefaultModelLoader.Source) -> Iterator[tuple[str, Tensor]]:
        folder = self._bundle_folder(source)
        if folder is not None:
            if not self.counter_before_loading_weights:
                # What vLLM says of loading counts from here.
                self.counter_before_loading_weights = time.perf_counter()
            if not self._is_ours:
                became = (
                    "the weights are served in BF16, exact and not smaller"
                    if self._other is None
                    else f"the weights are given to another quantization ({self._other}), and what is served is its own"
                )
                _logger.warning(
                    "unweight: %s is a bundle, but its config.json does not say so: %s; --quantization unweight packs "
                    "them, if config.json names no other",
                    folder,
                    became,
                )
            bundle = Bundle(folder)
            if self._is_ours and not source.prefix:
                # With a prefix it is another model's, which is a part of this one.
                bundle.refuse_other(self._named)
            return self._tensors(bundle, self._of_model(bundle, folder, source), source.prefix)
        weights = super()._get_weights_iterator(source)
        if not self._is_ours:
            return weights
        return self._page_locked(_no_shards_of_bundles(weights, source.model_or_path))

    def _bundle_folder(self, source: DefaultModelLoader.Source) -> Optional[pathlib.Path]:
        """Where the bundle is; fetched, if it is on the hub. `None`: it is none."""
        if os.path.isdir(source.model_or_path):
            folder = pathlib.Path(source.model_or_path, source.subfolder or "")
            return folder if (folder / _MANIFEST).is_file() else None
        if not self._is_ours:
            return None
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            source.model_or_path,
            revision=source.revision,
            cache_dir=self.load_config.download_dir,
            allow_patterns=[f"**/{_MANIFEST}", _MANIFEST, "*.safetensors", "*.safetensors.index.json"],
        )
        folder = pathlib.Path(folder, source.subfolder or "")
        return folder if (folder / _MANIFEST).is_file() else None

    def _of_model(self, bundle: Bundle, folder: pathlib.Path, source: DefaultModelLoader.Source) -> list[TensorInfo]:
        """The tensors of the files that vLLM itself chooses in this folder, which has the names of the model's.

        A folder may have others: earlier states of a training below it, the same weights by other names beside it.
        """
        more = (source.fall_back_to_pt, source.allow_patterns_overrides)
        _, chosen, is_safetensors = self._prepare_weights(str(folder), None, None, *more)
        if not is_safetensors:
            raise ValueError(
                f"unweight: of the bundle {folder} vLLM would read {chosen[0]}, which is no file of safetensors; leave "
                "--load-format away"
            )
        names = [pathlib.Path(file).relative_to(folder).as_posix() for file in sorted(chosen)]
        tensors: dict[str, list[TensorInfo]] = {}
        for info in bundle.tensors():
            tensors.setdefault(info.file, []).append(info)
        for name in names:
            if name in tensors:
                continue
            with safe_open(folder / name, framework="pt") as file:
                is_empty = not list(file.keys())
            if not is_empty:
                raise ValueError(
                    f"unweight: {folder / name} is no file of the bundle, and vLLM would read it; move it away, or "
                    "compress the whole folder again"
                )
        return [info for name in names for info in tensors.get(name, ())]

    def _tensors(self, bundle: Bundle, infos: list[TensorInfo], prefix: str) -> Iterator[tuple[str, Tensor]]:
        def jobs() -> Iterator[_Job]:
            for info in infos:
                self._stored_bytes += info.stored_bytes
                name = prefix + info.name
                if should_skip_weight(name, self.local_expert_ids) or _is_elsewhere(name, self._model):
                    continue
                if has_parts and bundle.reads_parts(info.name, file=info.file) and len(info.shape) == 2:
                    yield _Job(name, functools.partial(Part, bundle, info, self._count), 0)
                else:
                    self._count(info.stored_bytes)
                    pin = is_cuda and info.original_bytes <= _PINNED_BYTES
                    make = functools.partial(bundle._torch_whole, info, pin=pin)
                    yield _Job(name, make, info.original_bytes)

        # Each process of several takes a part of most matrices; vLLM's layers cut it out.
        is_cuda, has_parts = current_platform.is_cuda_alike(), get_tensor_model_parallel_world_size() > 1
        return _ahead(jobs())

    def _page_locked(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same tensors, in memory that a GPU copies from fast. Files are mapped: threads read them, ahead."""
        is_on_gpu = str(self.load_config.load_format) in ("fastsafetensors", "instanttensor")
        if is_on_gpu or not current_platform.is_cuda_alike() or get_tensor_model_parallel_world_size() > 1:
            return weights
        if self._model is not None and any(isinstance(layer, RoutedExperts) for layer in self._model.modules()):
            # vLLM keeps tensors until their layer is whole: gigabytes of a mixture, which are better left in the file.
            return weights
        return _ahead(
            _Job(name, functools.partial(_same, tensor), 0)
            if _is_elsewhere(name, self._model)
            else _Job(name, functools.partial(_pinned, tensor), tensor.nbytes)
            for name, tensor in weights
        )

    def _count(self, nbytes: int) -> None:
        self._read_bytes += nbytes


class _Job(NamedTuple):
    name: str
    make: Callable[[], Tensor]
    nbytes: int
    """Of what it makes; 0: not worth a thread."""


def _ahead(jobs: Iterable[_Job]) -> Iterator[tuple[str, Tensor]]:
    """What jobs make, in their order, by threads that work while vLLM is busy with the ones before."""
    threads = min(_THREADS, os.cpu_count() or 1)
    ahead: deque[tuple[_Job, Callable[[], Tensor]]] = deque()
    ahead_bytes = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="unweight") as pool:
        for job in jobs:
            ahead.append((job, pool.submit(job.make).result if job.nbytes else job.make))
            ahead_bytes += job.nbytes
            while len(ahead) > threads or ahead_bytes > _AHEAD_BYTES:
                first, made = ahead.popleft()
                ahead_bytes -= first.nbytes
                yield first.name, made()
        for job, made in ahead:
            yield job.name, made()


def _pinned(tensor: Tensor) -> Tensor:
    if tensor.nbytes > _PINNED_BYTES:
        return tensor
    try:
        return tensor.pin_memory()
    except RuntimeError:
        # The system may lock less than there is.
        return tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _own_experts(model: nn.Module) -> Optional[set[int]]:
    """The experts of this process, where others have the rest; `None` where every expert may be asked for."""
    layers = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
    config = get_current_vllm_config_or_none()
    # With `--enable-eplb` a process keeps others' experts, too.
    if not layers or config is None or config.parallel_config.enable_eplb:
        return None
    known = {expert for layer in layers for expert in range(layer.moe_config.num_experts)}
    own = {
        expert
        for layer in layers
        for expert in range(layer.moe_config.num_experts)
        if layer._map_global_expert_id_to_local_expert_id(expert) != -1
    }
    return own if own < known else None


def _is_elsewhere(name: str, model: Optional[nn.Module]) -> bool:
    """Whether another stage of the pipeline has a tensor: then it is not read here."""
    if model is None:
        return False
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    names = [name] if mapper is None else mapper.apply_list([name])
    # Known to be elsewhere by all names that it has here.
    return bool(names) and all(is_pp_missing_parameter(name, model) for name in names)


def _each_once(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """In BF16 the last of several tensors of a name counts; a layer is packed when the first is there."""
    came = set()
    for name, tensor in weights:
        if name in came:
            raise ValueError(_TWICE.format(name))
        came.add(name)
        yield name, tensor


def _no_shards_of_bundles(weights: Iterator[tuple[str, Tensor]], model: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        if ".unweight." in name:
            raise ValueError(
                f"{model} has shards of a bundle, but no {_MANIFEST}; fetch the whole bundle (`hf download ORG/NAME`) "
                "and serve the folder"
            )
        yield name, tensor


def _no_exchange(*_: Any, **__: Any) -> None:
    raise NotImplementedError(_NO_EXCHANGE)


def _tell(model: nn.Module) -> None:
    """How many layers are packed, and what they are instead of."""
    kinds = (LinearBase, ParallelLMHead, RoutedExperts)
    layers = [layer for layer in model.modules() if isinstance(layer, kinds)]
    packed = [layer.unweight_packed for layer in layers if hasattr(layer, "unweight_packed")]
    gib = sum(weight.packed_nbytes for weight in packed) / 2**30
    bf16_gib = sum(weight.bf16_nbytes for weight in packed) / 2**30
    others = len(layers) - len(packed)
    _logger.info("unweight: %d layers packed, %.2f GiB of %.2f GiB; %d in BF16", len(packed), gib, bf16_gib, others)


def install() -> None:
    """Registers all of it, once; nothing, if this vLLM's loader is another than the one that ours is made of.

    Raises:
        TypeError: it is.
    """
    if _NAME in QUANTIZATION_METHODS:
        return
    _check_loader()
    # All formats of files, `auto` among them: a bundle looks like one of them.
    names = [name for name, loader in _LOAD_FORMAT_TO_MODEL_LOADER.items() if loader is DefaultModelLoader]
    register_quantization_config(_NAME)(UnweightConfig)
    _LOAD_FORMAT_TO_MODEL_LOADER.update({name: UnweightLoader for name in names})


def _check_loader() -> None:
    """BF16 models go through our loader, too: vLLM's has to have each method of it, with the same parameters."""
    if not hasattr(DefaultModelLoader, "_prepare_weights"):
        raise TypeError("its DefaultModelLoader has no _prepare_weights")
    for name in (
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
            raise TypeError(f"its DefaultModelLoader.{name} takes {inspect.signature(theirs)}")

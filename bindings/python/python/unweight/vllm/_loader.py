"""The loader that passes the tensors of a bundle to vLLM, with the names and bits of the original model.

vLLM's model classes rename, merge and shard them as usual.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Optional

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import LoadConfig, ModelConfig, VllmConfig, get_current_vllm_config_or_none
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.models.utils import is_pp_missing_parameter
from vllm.platforms import current_platform

from .._bundle import Bundle, TensorInfo
from .._part import Part
from ..ops import _bf16_experts, _sizes
from ._account import (
    TWICE,
    arrivals_of,
    logger,
    missing_parameters,
    missing_tensors,
    refuse_missing,
    wrap_loaders,
)
from ._methods import NAME, UnweightExpertsMethod, UnweightMethod, share_weight
from ._session import Session, refuse_fixed

_MANIFEST = "unweight.json"
# Threads that read and decode tensors ahead of vLLM, one tensor each, and the bytes of these tensors.
_THREADS_MAX = 8
_AHEAD_BYTES_MAX = 1 << 30
# Larger tensors are not pinned: pinning so much memory takes longer than a copy from pageable memory.
_PINNED_BYTES = 256 << 20


@dataclasses.dataclass
class _Load:
    """What is known about one load of a model."""

    named_digest: Optional[str] = None
    """The digest of the weights that the configuration names."""
    quantization: Optional[str] = None
    """The name of the model's quantization."""
    model: Optional[nn.Module] = None
    read_bytes: int = 0
    """The bytes of the bundle that were read."""
    stored_bytes: int = 0
    """The bytes of the bundle."""

    @property
    def is_ours(self) -> bool:
        return self.quantization == NAME


class UnweightLoader(DefaultModelLoader):
    """vLLM's file loader, extended to read bundles as if they were the original files."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._load = _Load()

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """Loads a model, as vLLM's loader, and logs how many layers are packed."""
        load = self._load = _Load(getattr(vllm_config.quant_config, "weights_digest", None))
        model = super().load_model(vllm_config, model_config, prefix)
        if (load.is_ours or load.stored_bytes) and current_platform.is_cuda_alike():
            # Torch caches pinned memory of freed tensors, gigabytes here, until the process ends.
            torch._C._host_emptyCache()
        if model_config.quantization == NAME:
            _log_packed(model)
            session = Session(model, model_config)
            for module in model.modules():
                if hasattr(module, "load_weights"):
                    module.load_weights = functools.partial(session.load_weights, module is model, module.load_weights)
            if load.stored_bytes:
                logger.info("unweight: %d of %d bytes of the bundle read", load.read_bytes, load.stored_bytes)
        return model

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Loads the weights, as vLLM's loader. Also checks for missing ones, which vLLM skips for quantized models."""
        self._load.quantization = model_config.quantization
        if self._load.is_ours:
            self.enable_weights_track = True
        super().load_weights(model, model_config)

    def track_weights_loading(self, model: nn.Module, loaded_weights: Optional[set[str]]) -> None:
        """Raises `ValueError` if weights are missing; for packed models, by the counts of `_account`."""
        if not self._load.is_ours:
            return super().track_weights_loading(model, loaded_weights)
        missing = [name for layer in model.modules() if layer in arrivals_of for name in missing_tensors(layer)]
        if loaded_weights is not None:
            missing += missing_parameters(model, loaded_weights)
        refuse_missing(missing)

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yields the names and tensors of a model, as vLLM's loader.

        Refuses here what cannot be reloaded, before the running engine is changed.
        """
        # A reload uses a new loader.
        self._load.quantization = model_config.quantization
        is_running = any(hasattr(layer, "unweight_packed") for layer in model.modules())
        if is_running:
            refuse_fixed(model)
        else:
            _share_tied_weights(model)
        for name, layer in model.named_modules():
            if layer in arrivals_of and not arrivals_of[layer].prefix:
                # Not every model names its embedding.
                arrivals_of[layer].prefix = name
            is_ours = isinstance(getattr(layer, "quant_method", None), (UnweightMethod, UnweightExpertsMethod))
            if is_ours and not is_running:
                # Repeated here, because layers have got their biases since `create_weights`.
                initialize_online_processing(layer)
                wrap_loaders(layer)
        self._load.model, self._load.read_bytes, self._load.stored_bytes = model, 0, 0
        if self.local_expert_ids is None:
            # As `--enable-ep-weight-filter` does: experts of other processes are not read.
            self.local_expert_ids = _local_experts(model)
        weights = super().get_all_weights(model_config, model)
        return _refuse_duplicates(weights) if self._load.is_ours else weights

    def _get_weights_iterator(self, source: DefaultModelLoader.Source) -> Iterator[tuple[str, Tensor]]:
        folder = self._bundle_folder(source)
        if folder is not None:
            if not self.counter_before_loading_weights:
                # vLLM logs the loading time from this start.
                self.counter_before_loading_weights = time.perf_counter()
            if not self._load.is_ours:
                other = self._load.quantization
                consequence = (
                    "the weights are served in BF16, which is exact but not smaller"
                    if other is None
                    else f"another quantization ({other}) loads the weights and may change them"
                )
                logger.warning(
                    "unweight: %s is a bundle, but its config.json does not say so: %s; pass --quantization unweight "
                    "to pack the BF16 layers",
                    folder,
                    consequence,
                )
            bundle = Bundle(folder)
            if self._load.is_ours and not source.prefix:
                # A source with a prefix is another model, which is a part of this one.
                bundle.refuse_other(self._load.named_digest)
            return self._tensors(bundle, self._model_tensors(bundle, folder, source), source.prefix)
        weights = super()._get_weights_iterator(source)
        if not self._load.is_ours:
            return weights
        return self._pinned_tensors(_refuse_shards_of_bundles(weights, source.model_or_path))

    def _bundle_folder(self, source: DefaultModelLoader.Source) -> Optional[pathlib.Path]:
        """Returns the directory of the bundle, downloaded if it is on the hub; `None` if the source is not a bundle."""
        if os.path.isdir(source.model_or_path):
            folder = pathlib.Path(source.model_or_path, source.subfolder or "")
            return folder if (folder / _MANIFEST).is_file() else None
        if not self._load.is_ours:
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

    def _model_tensors(
        self, bundle: Bundle, folder: pathlib.Path, source: DefaultModelLoader.Source
    ) -> list[TensorInfo]:
        """Returns the tensors of those files that vLLM would choose in this directory.

        A bundle has the file names of the original model. It may have more files, such as training checkpoints in a
        subdirectory, or the same weights under other names.
        """
        options = (source.fall_back_to_pt, source.allow_patterns_overrides)
        _, chosen, is_safetensors = self._prepare_weights(str(folder), None, None, *options)
        if not is_safetensors:
            raise ValueError(
                f"unweight: vLLM would read {chosen[0]} of the bundle {folder}, which is not a safetensors file; omit "
                "--load-format"
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
                    f"unweight: {folder / name} is not a file of the bundle, but vLLM would read it; move it away, or "
                    "compress the whole directory again"
                )
        return [info for name in names for info in tensors.get(name, ())]

    def _tensors(self, bundle: Bundle, infos: list[TensorInfo], prefix: str) -> Iterator[tuple[str, Tensor]]:
        def jobs() -> Iterator[_Job]:
            for info in infos:
                self._load.stored_bytes += info.stored_bytes
                name = prefix + info.name
                if should_skip_weight(name, self.local_expert_ids) or _is_on_other_stage(name, self._load.model):
                    continue
                if has_parts and bundle.reads_parts(info.name, file=info.file) and len(info.shape) == 2:
                    yield _Job(name, functools.partial(Part, bundle, info, self._count), 0)
                else:
                    self._count(info.stored_bytes)
                    pin = is_cuda and info.original_bytes <= _PINNED_BYTES
                    make = functools.partial(bundle._torch_whole, info, pin=pin)
                    yield _Job(name, make, info.original_bytes)

        # With tensor parallelism, a process uses a part of most matrices; vLLM's layers slice the `Part`.
        is_cuda, has_parts = current_platform.is_cuda_alike(), get_tensor_model_parallel_world_size() > 1
        return _prefetched(jobs())

    def _pinned_tensors(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the same tensors in pinned memory, for fast copies to a GPU. Threads read the mapped files ahead."""
        is_on_gpu = str(self.load_config.load_format) in ("fastsafetensors", "instanttensor")
        if is_on_gpu or not current_platform.is_cuda_alike() or get_tensor_model_parallel_world_size() > 1:
            return weights
        model = self._load.model
        if model is not None and any(isinstance(layer, RoutedExperts) for layer in model.modules()):
            # vLLM keeps tensors until their layer is complete: for a mixture, gigabytes better left in the mapped file.
            return weights
        return _prefetched(
            _Job(name, functools.partial(_identity, tensor), 0)
            if _is_on_other_stage(name, self._load.model)
            else _Job(name, functools.partial(_pinned, tensor), tensor.nbytes)
            for name, tensor in weights
        )

    def _count(self, nbytes: int) -> None:
        self._load.read_bytes += nbytes


def _share_tied_weights(model: nn.Module) -> None:
    """Stops packing of heads that share the embedding's weight. Some models tie them without calling `tie_weights`."""
    embeddings = (one for one in model.modules() if isinstance(one, VocabParallelEmbedding))
    others = (one for one in embeddings if not isinstance(one, ParallelLMHead))
    tied = {id(weight): one for one in others for weight in one.parameters(recurse=False)}
    for head in model.modules():
        is_ours = isinstance(head, ParallelLMHead) and isinstance(head.quant_method, UnweightMethod)
        if is_ours and id(getattr(head, "weight", None)) in tied:
            share_weight(head, tied[id(head.weight)])


class _Job(NamedTuple):
    name: str
    make: Callable[[], Tensor]
    nbytes: int
    """The size of the tensor in bytes; 0 makes it on the consumer's thread."""


def _prefetched(jobs: Iterable[_Job]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of jobs in order; threads make the next ones while vLLM uses the current one."""
    threads = min(_THREADS_MAX, os.cpu_count() or 1)
    pending: deque[tuple[_Job, Callable[[], Tensor]]] = deque()
    pending_bytes = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="unweight") as pool:
        for job in jobs:
            pending.append((job, pool.submit(job.make).result if job.nbytes else job.make))
            pending_bytes += job.nbytes
            while len(pending) > threads or pending_bytes > _AHEAD_BYTES_MAX:
                first, make = pending.popleft()
                pending_bytes -= first.nbytes
                yield first.name, make()
        for job, make in pending:
            yield job.name, make()


def _pinned(tensor: Tensor) -> Tensor:
    if tensor.nbytes > _PINNED_BYTES:
        return tensor
    try:
        return tensor.pin_memory()
    except RuntimeError:
        # The system may limit pinned memory.
        return tensor


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _local_experts(model: nn.Module) -> Optional[set[int]]:
    """Returns the experts of this process if other processes have the rest; `None` if it may need every expert."""
    layers = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
    config = get_current_vllm_config_or_none()
    # With `--enable-eplb`, a process also has experts of others.
    if not layers or config is None or config.parallel_config.enable_eplb:
        return None
    all_experts = {expert for layer in layers for expert in range(layer.moe_config.num_experts)}
    local = {
        expert
        for layer in layers
        for expert in range(layer.moe_config.num_experts)
        if layer._map_global_expert_id_to_local_expert_id(expert) != -1
    }
    return local if local < all_experts else None


def _is_on_other_stage(name: str, model: Optional[nn.Module]) -> bool:
    """Returns whether a tensor belongs to another pipeline stage, and need not be read."""
    if model is None:
        return False
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    names = [name] if mapper is None else mapper.apply_list([name])
    # It is elsewhere only if all of its names in vLLM's model are.
    return bool(names) and all(is_pp_missing_parameter(name, model) for name in names)


def _refuse_duplicates(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Raises `ValueError` if a name repeats. In BF16, the last tensor wins, but a layer is packed at the first."""
    names = set()
    for name, tensor in weights:
        if name in names:
            raise ValueError(TWICE.format(name))
        names.add(name)
        yield name, tensor


def _refuse_shards_of_bundles(weights: Iterator[tuple[str, Tensor]], model: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        if ".unweight." in name:
            raise ValueError(
                f"{model} has shards of a bundle, but no {_MANIFEST}; fetch the whole bundle (`hf download ORG/NAME`) "
                "and serve its directory"
            )
        yield name, tensor


def _log_packed(model: nn.Module) -> None:
    """Logs how many layers are packed, their size packed and in BF16, and experts that cannot be packed."""
    kinds = (LinearBase, VocabParallelEmbedding, RoutedExperts)
    # A head may share the weight of an embedding.
    layers = [layer for layer in model.modules() if isinstance(layer, kinds) and list(layer.parameters(recurse=False))]
    packed = [layer.unweight_packed for layer in layers if hasattr(layer, "unweight_packed")]
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
    bf16 = sum(type(layer.quant_method) in plain for layer in layers)
    others = len(layers) - len(packed) - bf16
    logger.info(
        "unweight: %d layers packed, %s of %s; %d in BF16%s",
        len(packed),
        *_sizes(sum(weight.packed_nbytes for weight in packed), sum(weight.bf16_nbytes for weight in packed)),
        bf16,
        f", {others} in another quantization" if others else "",
    )
    reasons = {name: getattr(layer, "unweight_unpackable", None) for name, layer in model.named_modules()}
    unpackable = {name: reason for name, reason in reasons.items() if reason is not None}
    if unpackable:
        logger.info(_bf16_experts(unpackable))

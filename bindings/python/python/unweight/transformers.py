"""Bundles and packed weights in transformers: `import unweight.transformers`, then use transformers as usual.

    AutoModelForCausalLM.from_pretrained("bundle")                                          # a bundle, any profile
    AutoModelForCausalLM.from_pretrained("model", quantization_config=UnweightConfig())     # any BF16 model

Both pass the original BF16 weights, tensor by tensor, to transformers, which renames, merges and shards them as usual.
A linear layer, or the experts of a mixture, is packed when its shard is loaded. So renamed and merged tensors work as
without this package, and so does tensor parallelism.
"""

from __future__ import annotations

import pathlib
import threading
import weakref
from types import TracebackType
from typing import Any, Iterator, Optional, Union

from ._extras import refuse_untested, require, supported

require("transformers", "torch", "transformers")

import torch  # noqa: E402
import transformers  # noqa: E402

# This module replaces private functions of its loader.
refuse_untested("transformers", transformers.__version__)

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import modeling_utils
from transformers.core_model_loading import ConversionOps
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import _native
from ._bundle import Bundle, TensorInfo
from .ops import Experts, Linear, _bf16_experts, why_not

__all__ = ["UnweightConfig"]

_logger = logging.get_logger(__name__)
_MANIFEST = "unweight.json"


@register_quantization_config("unweight")
class UnweightConfig(QuantizationConfigMixin):
    """The quantization config that packs weights: `quantization_config=UnweightConfig()`.

    It has no options, because packing is lossless. `manifest` is for the `config.json` of bundles.
    """

    def __init__(self, manifest: Optional[str] = None, **_: Any) -> None:
        self.quant_method = "unweight"
        self.manifest = manifest
        """The digest of the bundle's weights; `None` for a model that is not a bundle."""


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


def _has_kernels() -> bool:
    """Returns whether every GPU of this process has kernels."""
    return not any(why_not(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))


def _has_experts(module: nn.Module) -> bool:
    """Returns whether a module has experts in the common layout: `[experts, n, k]`, without a bias."""
    return getattr(module, "is_transposed", True) is False and getattr(module, "has_bias", True) is False


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
        if (reason := why_not(weight.device)) is not None:
            _logger.warning_once("unweight: %s; weights stay in BF16 there, which is exact but not smaller", reason)
            return {full_layer_name: weight}
        if weight.dtype != torch.bfloat16:
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


@register_quantizer("unweight")
class UnweightHfQuantizer(HfQuantizer):
    """The hooks that transformers calls while it loads a bundle, or a model with `UnweightConfig`."""

    def __init__(self, quantization_config: UnweightConfig, **arguments: Any) -> None:
        super().__init__(quantization_config, **arguments)
        # Even for a bundle, the loader reads BF16 tensors, which are then packed.
        self.pre_quantized = False
        self._unpackable: dict[str, str] = {}

    def validate_environment(self, device_map: Any = None, **_: Any) -> None:
        """Raises `ValueError` if `device_map` offloads layers: accelerate fetches them with a state_dict, which packed
        layers do not have. Called with the caller's map, and with the one computed for "auto".
        """
        # As in accelerate: "disk" means offloading, and so does "cpu" if the map has another device.
        devices = device_map if isinstance(device_map, dict) else {}
        on_cpu = all(device in ("cpu", "disk") for device in devices.values())
        offload_devices = {"disk"} if on_cpu else {"cpu", "disk"}
        offloaded = [
            f"{name or 'the model'} on '{device}'" for name, device in devices.items() if device in offload_devices
        ]
        if offloaded:
            names = ", ".join(offloaded[:3]) + (f" and {len(offloaded) - 3} more" if len(offloaded) > 3 else "")
            raise ValueError(
                f"device_map offloads {names}: packed weights cannot be offloaded; keep them on the device that runs "
                "them (more or larger GPUs, max_memory, or device_map='cpu' for all), or load the model in BF16 "
                "(without UnweightConfig; for a bundle, the original files: `unweight decompress BUNDLE -o MODEL`)"
            )

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Returns the bytes per element on the device, so that "auto" plans memory for packed weights."""
        stock = super().param_element_size(model, param_name, param)
        if not self.param_needs_quantization(model, param_name) or not _has_kernels():
            return stock
        *_, n, k = param.shape
        sizes = _native.Runtime.buffer_nbytes(n, k)
        return stock if sizes is None else sizes[0] / (n * k)

    def update_tp_plan(self, config: Any) -> Any:
        """Removes `transformers_weights` from a bundle's config. It names a file that is not a checkpoint, so that
        transformers without this package refuses the bundle. Also notes that the next model is to be packed.
        """
        if getattr(config, "transformers_weights", None) == _MANIFEST:
            config.transformers_weights = None
        _loading_state.is_packed, _loading_state.named_digest = True, self.quantization_config.manifest
        return config

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Raises `ValueError` for a dtype other than bfloat16, which would change the weights."""
        if dtype != torch.bfloat16:
            raise ValueError(
                f"unweight packs bfloat16 weights, but the model is to be loaded as {dtype}; pass "
                "dtype=torch.bfloat16, or load the original files (`unweight decompress BUNDLE -o MODEL`)"
            )
        return dtype

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
        return _has_experts(module) and name in ("gate_up_proj", "up_proj", "down_proj")

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if not _loading_state.bundles <= _loading_state.opened:
            raise ValueError(
                f"transformers {transformers.__version__} has read a bundle without unweight: it did not find its "
                f"tensors, and the model's weights are random; unweight supports {supported('transformers')}"
            )
        if self._unpackable:
            _logger.warning(_bf16_experts(self._unpackable))
        # The operator has no backward. Without gradients, a trace contains the operator itself.
        model.requires_grad_(False)
        if any(isinstance(module, Experts) for module in model.modules()):
            _set_experts_implementation(model)
        return model

    def get_quantize_ops(self) -> ConversionOps:
        """Returns the operation that packs a weight."""
        return _Pack(self._unpackable)

    def is_serializable(self) -> bool:
        """Returns false, with a warning that says what to do: packed weights cannot be saved."""
        _logger.warning(
            "save_pretrained does not write packed weights. If the model was loaded from a bundle, copy its directory. "
            "If it was packed while it was loaded, run `unweight compress MODEL -o BUNDLE`. To get the original files "
            "of a bundle, run `unweight decompress BUNDLE -o MODEL`."
        )
        return False

    @property
    def is_trainable(self) -> bool:
        """False: the operator has no backward."""
        return False

    @property
    def is_compileable(self) -> bool:
        """True: torch.compile traces each packed layer as one operator."""
        return True


class _Slice:
    """A lazy tensor with the interface of safetensors' slices; indexing decodes it."""

    def __init__(self, bundle: Bundle, info: TensorInfo) -> None:
        self._bundle, self._info = bundle, info

    def get_dtype(self) -> str:
        return self._info.dtype

    def get_shape(self) -> list[int]:
        return list(self._info.shape)

    def __getitem__(self, index: Any) -> Tensor:
        name, file, shape = self._info.name, self._info.file, self._info.shape
        axes = index if isinstance(index, tuple) else (index,)
        is_part = len(shape) == 2 and len(axes) <= 2 and self._bundle.reads_parts(name, file=file)
        if is_part and all(isinstance(axis, slice) and axis.step in (None, 1) for axis in axes):
            axes = (*axes, slice(None))[:2]
            # With tensor parallelism, a process takes a part of a matrix; the rest is not read.
            rows, cols = (axis.indices(extent)[:2] for axis, extent in zip(axes, shape))
            if rows[0] < rows[1] and cols[0] < cols[1]:
                return self._bundle.torch(name, file=file, rows=rows, cols=cols)
        return self._bundle.torch(name, file=file)[index]


class _Loading(threading.local):
    """The state of the model that this thread is loading."""

    def __init__(self) -> None:
        self.is_packed = False
        """Whether the model is to be packed."""
        self.named_digest: Optional[str] = None
        """The digest of the weights that the model's configuration names."""
        self.bundles: set[pathlib.Path] = set()
        """The bundles that the model is loaded from."""
        self.opened: set[pathlib.Path] = set()
        """The bundles of which transformers has opened shards."""


_loading_state = _Loading()
# The bundles that are being loaded. All shards of a model are open at once, and share one `Bundle`.
_open_bundles: weakref.WeakValueDictionary[tuple[pathlib.Path, int, int], Bundle] = weakref.WeakValueDictionary()


def _bundle(folder: pathlib.Path) -> Bundle:
    # The key has more than the path, because a traceback may keep alive a bundle that has since been replaced.
    stat = (folder / _MANIFEST).stat()
    key = (folder.resolve(), stat.st_ino, stat.st_mtime_ns)
    bundle = _open_bundles.get(key)
    if bundle is None:
        bundle = _open_bundles[key] = Bundle(folder)
    return bundle


class _Shard:
    """A shard of a bundle with the interface of `safetensors.safe_open` on the original file."""

    def __init__(self, path: pathlib.Path, device: Any) -> None:
        self._bundle, self._file, self._device = _bundle(path.parent), path.name, device
        self._infos = {info.name: info for info in self._bundle.tensors() if info.file == self._file}

    def __enter__(self) -> _Shard:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        pass

    def metadata(self) -> dict[str, str]:
        return {"format": "pt"}

    def keys(self) -> list[str]:
        return list(self._infos)

    def offset_keys(self) -> list[str]:
        return list(self._infos)

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._bundle, self._infos[name])

    def get_tensor(self, name: str) -> Tensor:
        return self._bundle.torch(name, device=self._device, file=self._file)


_safe_open = modeling_utils.safe_open
_resolved = modeling_utils._get_resolved_checkpoint_files


def _resolve(*args: Any, **kwargs: Any) -> Any:
    """Replaces `_get_resolved_checkpoint_files`: also finds the files of bundles, and records the bundles."""
    if kwargs.get("transformers_explicit_filename") == _MANIFEST:
        # The model has another quantization; `update_tp_plan` of ours would have removed the key.
        kwargs["transformers_explicit_filename"] = None
    # Reset first, so that an error does not carry this model's state to the next.
    is_packed, _loading_state.is_packed = _loading_state.is_packed, False
    named_digest, _loading_state.named_digest = _loading_state.named_digest, None
    files, metadata = _resolved(*args, **kwargs)
    folders = {pathlib.Path(file).parent for file in files or ()}
    _loading_state.bundles = {folder for folder in folders if (folder / _MANIFEST).is_file()}
    _loading_state.opened = set()
    for folder in _loading_state.bundles:
        _bundle(folder).refuse_other(named_digest)
        if not is_packed:
            _logger.warning(
                f"unweight: {folder} is a bundle, but the model's configuration does not say so: its weights are not "
                "packed, so exact but not smaller; pass quantization_config=UnweightConfig() to pack them"
            )
    return files, metadata


modeling_utils._get_resolved_checkpoint_files = _resolve


def _open(filename: Any, framework: str = "pt", device: Any = "cpu", **kwargs: Any) -> Any:
    """Replaces `safetensors.safe_open`: opens shards of bundles as the files that they were made from."""
    path = pathlib.Path(filename)
    if path.with_name(_MANIFEST).is_file():
        _loading_state.opened.add(path.parent)
        return _Shard(path, device)
    stock = _safe_open(filename, framework=framework, device=device, **kwargs)
    if any(".unweight." in name for name in stock.keys()):
        raise ValueError(
            f"{path} is a shard of a bundle, but there is no {_MANIFEST} next to it; fetch the whole bundle "
            "(`hf download ORG/NAME`) and load its directory. A directory inside a bundle is not a bundle: load it "
            "from the original files (`unweight decompress BUNDLE -o MODEL`)"
        )
    return stock


modeling_utils.safe_open = _open

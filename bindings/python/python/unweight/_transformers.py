"""What the integrations of transformers 4 and 5 share: bundles as checkpoint files, and hooks that both loaders call.

Importing this module replaces two functions of transformers' loader.
"""

from __future__ import annotations

import pathlib
import threading
import weakref
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Iterator, Optional

import torch
import transformers
from torch import Tensor, nn
from transformers import modeling_utils
from transformers.quantizers import HfQuantizer
from transformers.utils import logging

from . import _native
from ._bundle import Bundle, TensorInfo
from ._extras import supported
from .ops import Experts, _bf16_experts, why_not

if TYPE_CHECKING:
    from .transformers import UnweightConfig

logger = logging.get_logger("unweight.transformers")
MANIFEST = "unweight.json"


def may_pack(weight: Tensor) -> bool:
    """Returns whether a loaded weight has the dtype and a device for packing; warns once about the device."""
    if (reason := why_not(weight.device)) is not None:
        logger.warning_once("unweight: %s; weights stay in BF16 there, which is exact but not smaller", reason)
        return False
    return weight.dtype == torch.bfloat16


def packed_nbytes(weight: Tensor) -> Optional[int]:
    """Returns the size of a packed matrix, or of one of several, on the GPUs of this process; `None` if it stays in
    BF16."""
    if any(why_not(torch.device("cuda", index)) for index in range(torch.cuda.device_count())):
        return None
    *_, n, k = weight.shape
    sizes = _native.Runtime.buffer_nbytes(n, k)
    return None if sizes is None else sizes[0]


class BaseQuantizer(HfQuantizer):
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

    def update_tp_plan(self, config: Any) -> Any:
        """Removes `transformers_weights` from a bundle's config. It names a file that is not a checkpoint, so that
        transformers without this package refuses the bundle. Also notes that the next model is to be packed.
        """
        if getattr(config, "transformers_weights", None) == MANIFEST:
            config.transformers_weights = None
        _loading_state.is_packed, _loading_state.named_digest = True, self.quantization_config.weights_digest
        return config

    def update_dtype(self, dtype: Any) -> Any:
        """Raises `ValueError` for a dtype other than bfloat16, which would change the weights."""
        if dtype != torch.bfloat16:
            raise ValueError(
                f"unweight packs bfloat16 weights, but the model is to be loaded as {dtype}; pass "
                "dtype=torch.bfloat16, or load the original files (`unweight decompress BUNDLE -o MODEL`)"
            )
        return dtype

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if any(_opened[folder] == before for folder, before in _loading_state.bundles.items()):
            raise ValueError(
                f"transformers {transformers.__version__} has read a bundle without unweight: it did not find its "
                f"tensors, and the model's weights are random; unweight supports {supported('transformers')}"
            )
        for name, module in model.named_modules():
            if "Expert" in type(module).__name__ and not isinstance(module, Experts) and not self.has_experts(module):
                for part, weight in module.named_parameters(recurse=False):
                    is_matrix = weight.dim() > 1 and weight.dtype == torch.bfloat16 and not part.endswith("bias")
                    if is_matrix and why_not(weight.device) is None:
                        reason = f"a layout of transformers {transformers.__version__} that is not packed"
                        self._unpackable.setdefault(f"{name}.{part}", reason)
        if self._unpackable:
            logger.warning(_bf16_experts(self._unpackable))
        # The operator has no backward. Without gradients, a trace contains the operator itself.
        model.requires_grad_(False)
        return model

    def has_experts(self, module: nn.Module) -> bool:
        """Returns whether a module has experts in the layout that is packed."""
        return False

    def is_serializable(self, **_: Any) -> bool:
        """Returns false, with a warning that says what to do: packed weights cannot be saved."""
        logger.warning(
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
    """A lazy tensor with the interface of safetensors' slices; indexing decodes it to a device."""

    def __init__(self, bundle: Bundle, info: TensorInfo, device: Any) -> None:
        self._bundle, self._info, self._device = bundle, info, device

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
                return self._bundle.torch(name, device=self._device, file=file, rows=rows, cols=cols)
        return self._bundle.torch(name, device=self._device, file=file)[index]


class _Loading(threading.local):
    """The state of the model that this thread is loading."""

    def __init__(self) -> None:
        self.is_packed = False
        """Whether the model is to be packed."""
        self.named_digest: Optional[str] = None
        """The digest of the weights that the model's configuration names."""
        self.bundles: dict[pathlib.Path, int] = {}
        """The bundles that the model is loaded from, and how many of their shards had been opened before."""


_loading_state = _Loading()
# How many shards of each bundle transformers has opened, in any thread: it may load each shard in another one.
_opened: Counter[pathlib.Path] = Counter()
_opened_lock = threading.Lock()
# The bundles that are being loaded. All shards of a model share one `Bundle`.
_open_bundles: weakref.WeakValueDictionary[tuple[pathlib.Path, int, int], Bundle] = weakref.WeakValueDictionary()


def _bundle(folder: pathlib.Path) -> Bundle:
    # The key has more than the path, because a traceback may keep alive a bundle that has since been replaced.
    stat = (folder / MANIFEST).stat()
    key = (folder.resolve(), stat.st_ino, stat.st_mtime_ns)
    bundle = _open_bundles.get(key)
    if bundle is None:
        bundle = _open_bundles[key] = Bundle(folder)
    return bundle


def loading_bundles() -> list[Bundle]:
    """Returns the bundles of the model that this thread is loading; while there are references, they stay open."""
    return [_bundle(folder) for folder in _loading_state.bundles]


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
        return _Slice(self._bundle, self._infos[name], self._device)

    def get_tensor(self, name: str) -> Tensor:
        return self._bundle.torch(name, device=self._device, file=self._file)


_safe_open = modeling_utils.safe_open
_resolved = modeling_utils._get_resolved_checkpoint_files


def _resolve(*args: Any, **kwargs: Any) -> Any:
    """Replaces `_get_resolved_checkpoint_files`: also finds the files of bundles, and records the bundles."""
    if kwargs.get("transformers_explicit_filename") == MANIFEST:
        # The model has another quantization; `update_tp_plan` of ours would have removed the key.
        kwargs["transformers_explicit_filename"] = None
    # Reset first, so that an error does not carry this model's state to the next.
    is_packed, _loading_state.is_packed = _loading_state.is_packed, False
    named_digest, _loading_state.named_digest = _loading_state.named_digest, None
    files, metadata = _resolved(*args, **kwargs)
    folders = {pathlib.Path(file).parent for file in files or ()}
    _loading_state.bundles = {folder: _opened[folder] for folder in folders if (folder / MANIFEST).is_file()}
    for folder in _loading_state.bundles:
        _bundle(folder).refuse_other(named_digest)
        if not is_packed:
            logger.warning(
                f"unweight: {folder} is a bundle, but the model's configuration does not say so: its weights are not "
                "packed, so exact but not smaller; pass quantization_config=UnweightConfig() to pack them"
            )
    if metadata and _loading_state.bundles:
        # A bundle's index lists its own tensors.
        infos = [info for bundle in loading_bundles() for info in bundle.tensors()]
        metadata["all_checkpoint_keys"] = [info.name for info in infos]
        metadata["weight_map"] = {info.name: info.file for info in infos}
    return files, metadata


modeling_utils._get_resolved_checkpoint_files = _resolve


def _open(filename: Any, framework: str = "pt", device: Any = "cpu", **kwargs: Any) -> Any:
    """Replaces `safetensors.safe_open`: opens shards of bundles as the files that they were made from."""
    path = pathlib.Path(filename)
    if path.with_name(MANIFEST).is_file():
        with _opened_lock:
            _opened[path.parent] += 1
        return _Shard(path, device)
    stock = _safe_open(filename, framework=framework, device=device, **kwargs)
    if any(".unweight." in name for name in stock.keys()):
        raise ValueError(
            f"{path} is a shard of a bundle, but there is no {MANIFEST} next to it; fetch the whole bundle "
            "(`hf download ORG/NAME`) and load its directory. A directory inside a bundle is not a bundle: load it "
            "from the original files (`unweight decompress BUNDLE -o MODEL`)"
        )
    return stock


modeling_utils.safe_open = _open

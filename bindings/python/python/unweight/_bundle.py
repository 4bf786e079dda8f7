"""Reading of bundles, tensor by tensor."""

from __future__ import annotations

import operator
import os
import warnings
from contextlib import nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple, Optional, Union

from . import _native
from ._extras import require
from ._work import _unsigned
from .errors import DamagedError, DeviceError

if TYPE_CHECKING:
    import numpy
    import torch

# From the dtype names of safetensors to those of numpy and of torch.
_NUMPY = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
}
_TORCH = {
    **_NUMPY,
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
    "C64": "complex64",
}
# The encodings that `Bundle.torch` decodes on a GPU.
_GPU_ENCODINGS = ("exponents", "huffman", "packed", "compact")


class TensorInfo(NamedTuple):
    """The metadata of a tensor in a bundle."""

    name: str
    dtype: str
    """The dtype as safetensors names it: `"BF16"`, `"F32"`, ..."""
    shape: tuple[int, ...]
    encoding: str
    """How the tensor is stored: `"raw"`, `"huffman"`, `"palette"`, `"packed"`, `"compact"`,
    `"exponents"` or `"rans"`."""
    file: str
    role: str
    layer: Optional[int]
    original_bytes: int
    stored_bytes: int


class Bundle(_native.Bundle):
    """An open bundle: a read-only mapping of tensor names that decodes tensors on access.

    `Bundle(path)` checks the manifest and the header of every shard; other files may be missing or edited. A tensor is
    read, decoded and checked against its digest when a method requests it. Several threads may use a bundle at once;
    decoding releases the GIL. Pickling or copying keeps only the absolute path, and opens the bundle again.

    Methods that take a tensor `name` also take `file`, the name of the source file, needed if several files contain the
    name. They raise `UnknownNameError` for an unknown name, and those that read raise `DamagedError` or `StorageError`.

    Raises:
        NotABundleError: there is no bundle at `path`.
        DamagedError, NewerVersionError, OldVersionError, StorageError: the bundle cannot be opened.
    """

    def __new__(cls, path: Union[str, bytes, os.PathLike[str]]) -> Bundle:
        return super().__new__(cls, os.fsdecode(path))  # type: ignore[call-arg]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._folder,)

    def refuse_other(self, named: Optional[str]) -> None:
        """Checks that a model configuration belongs to this bundle.

        `named` is `weights_digest` in its `quantization_config`, or `None`. Opening the bundle checks the `config.json`
        in its directory; this checks a configuration that an engine got from elsewhere.

        Raises:
            DamagedError: the configuration names the weights of another bundle.
        """
        if named is not None and named != self.weights_digest:
            raise DamagedError(
                f"{self.path}: the configuration of the model belongs to another bundle: it names the weights {named}, "
                f"but this bundle has {self.weights_digest}; use the config.json of this directory, or fetch the "
                "bundle again if you already do"
            )

    def tensors(self) -> list[TensorInfo]:
        """Returns the metadata of every tensor, in the order of files and of the data in each file."""
        return list(self._tensors)

    def names(self) -> list[str]:
        """Returns the names of all tensors, in the order of `tensors()`."""
        return [info.name for info in self._tensors]

    def info(self, name: str, *, file: Optional[str] = None) -> TensorInfo:
        """Returns the metadata of one tensor; raises `UnknownNameError` for an unknown or ambiguous name."""
        matches = self._by_name.get(name, ()) if file is None else ()
        # A unique name is found here; the bundle resolves or refuses the others.
        return matches[0] if len(matches) == 1 else _info(self._row(name, file=file))

    # A bundle never changes while it is open.
    @cached_property
    def _tensors(self) -> list[TensorInfo]:
        return [_info(row) for row in self._rows()]

    @cached_property
    def _by_name(self) -> dict[str, list[TensorInfo]]:
        by_name: dict[str, list[TensorInfo]] = {}
        for info in self._tensors:
            by_name.setdefault(info.name, []).append(info)
        return by_name

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(info.name for info in self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Bundle({str(self.path)!r}, profile={self.profile!r}, tensors={len(self)})"

    def decode_into(self, name: str, address: int, nbytes: int, *, file: Optional[str] = None) -> None:
        """Decodes a tensor into the caller's CPU memory, as little-endian elements.

        `address` is that of `nbytes` writable bytes that nothing else uses; a wrong address is undefined behavior.
        After an error their contents are unspecified. Raises `ValueError` if `nbytes` is not the tensor's size.
        """
        super().decode_into(name, _unsigned("address", address), _unsigned("nbytes", nbytes), file=file)

    def numpy(
        self,
        name: str,
        *,
        bf16: str = "float32",
        file: Optional[str] = None,
        rows: Optional[tuple[int, int]] = None,
        cols: Optional[tuple[int, int]] = None,
    ) -> numpy.ndarray[Any, Any]:
        """Returns a tensor as a new array of its shape.

        `rows` and `cols` are pairs `(start, end)` that select a part of a matrix; the end is exclusive.

        numpy has no BF16, so `bf16` is the dtype of BF16 tensors: `"float32"` has the same values, `"uint16"` the same
        bits, and `"ml_dtypes"` is `ml_dtypes.bfloat16`, which needs the package `ml_dtypes`.

        Raises:
            TypeError: numpy lacks the tensor's dtype, or `rows` or `cols` is not a pair of integers.
            ValueError: `bf16` is unknown, the range is out of bounds or empty, or the tensor with `rows` or `cols` is
                not a matrix.
            ModuleNotFoundError: numpy or ml_dtypes is not installed.
        """
        np = require("numpy", "numpy")

        info = self.info(name, file=file)
        if info.dtype != "BF16":
            return self._numpy_part(info, _dtype(info, _NUMPY, "numpy"), rows, cols)
        if bf16 not in ("float32", "uint16", "ml_dtypes"):
            raise ValueError(f"bf16={bf16!r}; give 'float32', 'uint16' or 'ml_dtypes'")
        bits = self._numpy_part(info, "uint16", rows, cols)
        if bf16 == "uint16":
            return bits
        if bf16 == "float32":
            return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
        import ml_dtypes

        return bits.view(ml_dtypes.bfloat16)

    def _numpy_part(
        self, info: TensorInfo, dtype: str, rows: Optional[tuple[int, int]], cols: Optional[tuple[int, int]]
    ) -> numpy.ndarray[Any, Any]:
        """Returns a tensor, or a part of a matrix, as an array of `dtype`."""
        np = require("numpy", "numpy")
        if rows is None and cols is None:
            array = np.empty(info.shape, dtype=dtype)
            self.decode_into(info.name, array.ctypes.data, array.nbytes, file=info.file)
            return array
        rows, cols = _part(info, rows, cols)
        array = np.empty((rows[1] - rows[0], cols[1] - cols[0]), dtype=dtype)
        self.decode_part_into(info.name, rows, cols, (array.ctypes.data, array.nbytes), file=info.file)
        return array

    def torch(
        self,
        name: str,
        *,
        device: Union[str, torch.device, None] = None,
        file: Optional[str] = None,
        rows: Optional[tuple[int, int]] = None,
        cols: Optional[tuple[int, int]] = None,
    ) -> torch.Tensor:
        """Returns a tensor as a new `torch.Tensor` of its shape and dtype, on the CPU or on `device`.

        `rows` and `cols` are pairs `(start, end)` that select a part of a matrix; the end is exclusive. Only that part
        is read from disk if `reads_parts(name)` is true.

        A whole tensor for a GPU with kernels (`unweight.ops.why_not`) is decoded there if it is stored as `exponents`
        (FP8, F16, F32), `huffman`, `packed` or `compact`: the stored bytes are compared with their digests and copied.
        Other tensors are decoded on the CPU.

        Raises:
            TypeError: torch lacks the tensor's dtype, or for a part, its single elements (F4); or `rows` or `cols` is
                not a pair of integers.
            ValueError: the range is out of bounds or empty, or the tensor with `rows` or `cols` is not a matrix.
            ModuleNotFoundError: torch is not installed.
        """
        torch = require("torch", "torch")

        info = self.info(name, file=file)
        if rows is not None or cols is not None:
            tensor, _ = self._torch_part(info, rows, cols)
        else:
            to = torch.device("cpu" if device is None else device)
            decoded = self._torch_decoded_on(info, to) if to.type == "cuda" else None
            if decoded is not None:
                return decoded
            pin = to.type == "cuda" and torch.cuda.is_available()
            # Torch pins memory with a device that already has a context; without this, the first GPU would get one.
            with torch.cuda.device(to) if pin else nullcontext():
                tensor = self._torch_whole(info, pin=pin)
        return tensor if device is None else tensor.to(device)

    def _torch_decoded_on(self, info: TensorInfo, device: torch.device) -> Optional[torch.Tensor]:
        """Returns a tensor decoded on a GPU; `None` if it has to be decoded on the CPU."""
        if info.encoding not in _GPU_ENCODINGS or info.original_bytes == 0:
            return None
        torch = require("torch", "torch")
        from . import _gpu, ops

        dtype = getattr(torch, _dtype(info, _TORCH, "torch"))
        if not torch.cuda.is_available() or ops.why_not(device) is not None:
            return None
        try:
            runtime = _gpu._runtime(device)
            with torch.cuda.device(device):
                # Decoders need 256 more bytes.
                memory = torch.empty(info.original_bytes + _gpu._PAD, dtype=torch.uint8, device=device)
                # Earlier users of this memory must be done: the decoder has its own stream.
                torch.cuda.current_stream().synchronize()
                place = (memory.data_ptr(), info.original_bytes)
                if not runtime.decode(self, info.name, place, file=info.file):
                    return None
        except DeviceError as error:
            warnings.warn(f"tensors are decoded on the CPU, not on {device}: {error}", stacklevel=3)
            return None
        return memory[: info.original_bytes].view(dtype).view(info.shape)

    def _torch_whole(self, info: TensorInfo, *, pin: bool = False) -> torch.Tensor:
        """Returns a tensor on the CPU; with `pin`, in pinned memory if possible, which a GPU reads without a copy."""
        torch = require("torch", "torch")

        shape = info.shape
        if info.dtype == "F4":
            if not shape or shape[-1] % 2:
                raise TypeError(
                    f"tensor '{info.name}' of shape {list(shape)} is F4, of which torch has pairs only; read() returns "
                    "its bytes"
                )
            shape = (*shape[:-1], shape[-1] // 2)
        empty = partial(torch.empty, shape, dtype=getattr(torch, _dtype(info, _TORCH, "torch")), device="cpu")
        try:
            tensor = empty(pin_memory=pin)
        except RuntimeError:
            # The system may limit pinned memory.
            if not pin:
                raise
            tensor = empty()
        self.decode_into(info.name, tensor.data_ptr(), tensor.nbytes, file=info.file)
        return tensor

    def _torch_part(
        self, info: TensorInfo, rows: Optional[tuple[int, int]], cols: Optional[tuple[int, int]]
    ) -> tuple[torch.Tensor, int]:
        """Returns a part of a matrix on the CPU, and the number of stored bytes that were read."""
        torch = require("torch", "torch")

        # Checked before memory is allocated.
        rows, cols = _part(info, rows, cols)
        if info.dtype == "F4":
            raise TypeError(f"tensor '{info.name}' is F4, of which torch has no single elements; read the whole tensor")
        shape = tuple(end - start for start, end in (rows, cols))
        tensor = torch.empty(shape, dtype=getattr(torch, _dtype(info, _TORCH, "torch")), device="cpu")
        read = self.decode_part_into(info.name, rows, cols, (tensor.data_ptr(), tensor.nbytes), file=info.file)
        return tensor, read


def _part(
    info: TensorInfo, rows: Optional[tuple[int, int]], cols: Optional[tuple[int, int]]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the checked ranges of rows and columns of a matrix; `None` means all."""
    if len(info.shape) != 2:
        raise ValueError(f"tensor '{info.name}' of shape {list(info.shape)} is not a matrix; read the whole tensor")
    return _range("rows", rows, info, 0), _range("cols", cols, info, 1)


def _range(name: str, given: Optional[tuple[int, int]], info: TensorInfo, dim: int) -> tuple[int, int]:
    if given is None:
        return (0, info.shape[dim])
    is_pair = isinstance(given, (tuple, list)) and len(given) == 2
    if not is_pair or any(isinstance(one, bool) or not hasattr(one, "__index__") for one in given):
        raise TypeError(f"{name}={given!r}; give a pair of integers: the first, and the one after the last")
    start, end = (operator.index(one) for one in given)
    if not 0 <= start < end <= info.shape[dim]:
        raise ValueError(f"{name} {start}..{end} are empty or exceed the {info.shape[dim]} {name} of '{info.name}'")
    return (start, end)


def _info(row: dict[str, Any]) -> TensorInfo:
    return TensorInfo(**{key: row[key] for key in TensorInfo._fields} | {"shape": tuple(row["shape"])})


def _dtype(info: TensorInfo, names: dict[str, str], library: str) -> str:
    try:
        return names[info.dtype]
    except KeyError:
        message = f"tensor '{info.name}' is {info.dtype}, which {library} does not support; read() returns its bytes"
        raise TypeError(message) from None

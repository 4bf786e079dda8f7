"""Bundles, read tensor by tensor."""

from __future__ import annotations

import operator
import os
from contextlib import nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple, Optional, Union

from . import _native
from ._extras import require
from .errors import DamagedError

if TYPE_CHECKING:
    import numpy
    import torch

# Names as safetensors has them, to numpy's and torch's.
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
    "C64": "complex64",
}


class TensorInfo(NamedTuple):
    """What a bundle says about a tensor."""

    name: str
    dtype: str
    """As safetensors names it: `"BF16"`, `"F32"`, ..."""
    shape: tuple[int, ...]
    encoding: str
    """How it is stored: `"raw"`, `"huffman"`, `"palette"`, `"packed"`, `"compact"` or `"exponents"`."""
    file: str
    role: str
    layer: Optional[int]
    original_bytes: int
    stored_bytes: int


class Bundle(_native.Bundle):
    """An open bundle.

    Opening checks the manifest and the header of every shard; other files may be missing or edited. Weights are read,
    decoded and compared with their digests when they are asked for. May be used from several threads at once; the
    interpreter is free while it decodes.

    A name that several files have needs `file=`, too. A bundle that is pickled or copied is its path, as it was when
    this one was opened, and is opened again.
    """

    def __new__(cls, path: Union[str, bytes, os.PathLike[str]]) -> Bundle:
        return super().__new__(cls, os.fsdecode(path))  # type: ignore[call-arg]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._folder,)

    def refuse_other(self, named: Optional[str]) -> None:
        """Refuses a configuration that is not this bundle's: one that names the weights of another.

        The one in the folder was compared when the bundle was opened; engines take one from elsewhere, too.
        """
        if named is not None and named != self.weights_digest:
            raise DamagedError(
                f"{self.path}: the configuration of the model is of another bundle: it names the weights {named}, and "
                f"those here are {self.weights_digest}; take the config.json of this folder, and fetch the bundle "
                "again if that is the one"
            )

    def tensors(self) -> list[TensorInfo]:
        """Every tensor, in the order of files and of their data."""
        return list(self._tensors)

    def names(self) -> list[str]:
        """The names of all tensors."""
        return [info.name for info in self._tensors]

    def info(self, name: str, *, file: Optional[str] = None) -> TensorInfo:
        """What the bundle says about one tensor."""
        only = self._by_name.get(name, ()) if file is None else ()
        # A name that there is once is found here; of the others the bundle knows which is meant.
        return only[0] if len(only) == 1 else _info(self._row(name, file=file))

    # A bundle never changes while it is open.
    @cached_property
    def _tensors(self) -> list[TensorInfo]:
        return [_info(row) for row in self._rows()]

    @cached_property
    def _by_name(self) -> dict[str, list[TensorInfo]]:
        known: dict[str, list[TensorInfo]] = {}
        for info in self._tensors:
            known.setdefault(info.name, []).append(info)
        return known

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
        """Decodes a tensor into `nbytes` writable bytes of CPU memory at `address` that nothing else uses."""
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
        """A tensor as a new array.

        `rows` and `cols` select a part of a matrix: the first index, and the one after the last.

        numpy has no BF16. `bf16` says what comes instead: `"float32"` has the same values, `"uint16"` the same bits,
        and `"ml_dtypes"` is `ml_dtypes.bfloat16`, for which that package must be installed.
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
        """A tensor, or these rows and columns of it, as an array of `dtype`."""
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
        """A tensor as torch has it, BF16 as `torch.bfloat16`; on the CPU, or on `device`.

        `rows` and `cols`: these of a matrix, the first and the one after the last. The rest is not read, where
        `reads_parts` says so.
        """
        torch = require("torch", "torch")

        info = self.info(name, file=file)
        if rows is not None or cols is not None:
            tensor, _ = self._torch_part(info, rows, cols)
        else:
            to = torch.device("cpu" if device is None else device)
            pin = to.type == "cuda" and torch.cuda.is_available()
            # Torch locks pages by whatever device has a context already: there would be one on the first GPU, too.
            with torch.cuda.device(to) if pin else nullcontext():
                tensor = self._torch_whole(info, pin=pin)
        return tensor if device is None else tensor.to(device)

    def _torch_whole(self, info: TensorInfo, *, pin: bool = False) -> torch.Tensor:
        """A tensor on the CPU; with `pin` in page-locked memory, which a GPU reads without a copy, if there is some."""
        torch = require("torch", "torch")

        empty = partial(torch.empty, info.shape, dtype=getattr(torch, _dtype(info, _TORCH, "torch")), device="cpu")
        try:
            tensor = empty(pin_memory=pin)
        except RuntimeError:
            # The system may lock less than there is.
            if not pin:
                raise
            tensor = empty()
        self.decode_into(info.name, tensor.data_ptr(), tensor.nbytes, file=info.file)
        return tensor

    def _torch_part(
        self, info: TensorInfo, rows: Optional[tuple[int, int]], cols: Optional[tuple[int, int]]
    ) -> tuple[torch.Tensor, int]:
        """These rows and columns on the CPU, and the stored bytes that were read for them."""
        torch = require("torch", "torch")

        # Before there is memory for them.
        rows, cols = _part(info, rows, cols)
        shape = tuple(end - start for start, end in (rows, cols))
        tensor = torch.empty(shape, dtype=getattr(torch, _dtype(info, _TORCH, "torch")), device="cpu")
        read = self.decode_part_into(info.name, rows, cols, (tensor.data_ptr(), tensor.nbytes), file=info.file)
        return tensor, read


def _unsigned(name: str, given: int) -> int:
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(f"{name}={given!r}; give a whole number")
    if not 0 <= operator.index(given) < 2**64:
        raise ValueError(f"{name}={given!r}; give a number from 0 to 2**64 - 1")
    return operator.index(given)


def _part(
    info: TensorInfo, rows: Optional[tuple[int, int]], cols: Optional[tuple[int, int]]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The rows and columns of a matrix that are asked for, checked."""
    if len(info.shape) != 2:
        raise ValueError(f"tensor '{info.name}' of shape {list(info.shape)} is not a matrix; read all of it")
    return _range("rows", rows, info, 0), _range("cols", cols, info, 1)


def _range(name: str, given: Optional[tuple[int, int]], info: TensorInfo, dim: int) -> tuple[int, int]:
    if given is None:
        return (0, info.shape[dim])
    is_pair = isinstance(given, (tuple, list)) and len(given) == 2
    if not is_pair or any(isinstance(one, bool) or not hasattr(one, "__index__") for one in given):
        raise TypeError(f"{name}={given!r}; give a pair of integers: the first, and the one after the last")
    start, end = (operator.index(one) for one in given)
    if not 0 <= start < end <= info.shape[dim]:
        raise ValueError(f"tensor '{info.name}' has {info.shape[dim]} {name}, and no part {start}..{end} of them")
    return (start, end)


def _info(row: dict[str, Any]) -> TensorInfo:
    return TensorInfo(**{key: row[key] for key in TensorInfo._fields} | {"shape": tuple(row["shape"])})


def _dtype(info: TensorInfo, names: dict[str, str], library: str) -> str:
    try:
        return names[info.dtype]
    except KeyError:
        message = f"tensor '{info.name}' is {info.dtype}, which {library} does not have here; read() gives its bytes"
        raise TypeError(message) from None

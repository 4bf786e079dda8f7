"""What of the package is written in Rust. `Bundle` and the functions of `unweight` are made of it.

An address is that of memory on the CPU that the caller holds during the call, and that nobody else uses meanwhile; a
pair is an address and the number of bytes there. A wrong one is undefined behaviour, as everywhere.
"""

import os
import pathlib
from typing import Any, Callable, Optional, Union

_Path = Union[str, os.PathLike[str]]
_Memory = tuple[int, int]

__version__: str

class Bundle:
    def __init__(self, path: _Path) -> None: ...
    def __new__(cls, path: _Path) -> Bundle: ...
    @property
    def path(self) -> pathlib.Path:
        """As it was given."""
    @property
    def _folder(self) -> pathlib.Path:
        """The same, wherever the process goes."""
    @property
    def profile(self) -> str:
        """What the bundle was made for."""
    @property
    def manifest_digest(self) -> str:
        """Of everything in it: two bundles with the same digest are the same."""
    @property
    def weights_digest(self) -> str:
        """Of its weights: what `config.json` calls the bundle by, as `manifest` in `quantization_config`."""
    def _rows(self) -> list[dict[str, Any]]: ...
    def _row(self, name: str, *, file: Optional[str] = None) -> dict[str, Any]: ...
    def is_of_model(self, file: str) -> bool:
        """Whether a model is loaded from a file: `model.safetensors`, else `model-*-of-*.safetensors`, else any."""
    def _inspect(self) -> dict[str, Any]: ...
    def read(self, name: str, *, file: Optional[str] = None) -> bytes:
        """The original bytes of a tensor, little-endian, compared with their digest."""
    def decode_into(self, name: str, address: int, nbytes: int, *, file: Optional[str] = None) -> None:
        """As `read`, into `nbytes` writable bytes at `address`; `nbytes` must be the tensor's.

        After an error what is there means nothing: it may be another's, or in part the tensor's.
        """
    def reads_parts(self, name: str, *, file: Optional[str] = None) -> bool:
        """Whether a part of a tensor can be read without the rest: large packed matrices, of bundles from 1.3 on."""
    def decode_part_into(
        self,
        name: str,
        rows: tuple[int, int],
        cols: tuple[int, int],
        memory: _Memory,
        *,
        file: Optional[str] = None,
    ) -> int:
        """Rows and columns (first, and the one after the last) of a matrix, into `memory`: address and writable bytes.

        Returns how many stored bytes were read for them. Those are compared with their digests.
        """
    def copied(self, name: str, *, limit: int = ...) -> Optional[bytes]:
        """A file beside the weights, such as tokenizer.json; `None` if the bundle has none of this name."""

class Packed:
    """Packed weights that have no place yet."""

    @property
    def arena_nbytes(self) -> int: ...
    @property
    def escapes_nbytes(self) -> int: ...
    def store(self, arena: _Memory, escapes: _Memory) -> None: ...

def has_kernels(major: int, minor: int) -> bool:
    """Whether there are kernels for GPUs of a compute capability."""

class Runtime:
    """Kernels and known arenas of one GPU, `ordinal` as torch counts them; one a process and GPU.

    Above a batch of `expand_above` weights are expanded to BF16 for cuBLAS; `None`: where that is faster.

    Addresses are those of memory on this GPU; arenas and escapes begin at multiples of 256, and 256 more bytes behind
    `escapes` may be read. All calls but `linear` wait for a stream of their own: what other streams do with the memory
    is done before.
    """

    def __init__(self, ordinal: int, max_batch: int, expand_above: Optional[int] = None) -> None: ...
    def __new__(cls, ordinal: int, max_batch: int, expand_above: Optional[int] = None) -> Runtime: ...
    @staticmethod
    def room(rows: int, cols: int) -> Optional[tuple[int, int]]: ...
    def pack(self, weights: int, rows: int, cols: int, arena: _Memory, escapes: _Memory) -> Optional[int]: ...
    def prepare(self, rows: int, cols: int) -> None:
        """Makes the kernels that `register` asks for of a shape."""
    def register(self, arena: _Memory, escapes: _Memory) -> tuple[int, str]:
        """The caller holds both until `forget`, unchanged, and until all work with them is done. What `forget` takes,
        and the digest of the escapes."""
    def knows(self, arena: int) -> bool: ...
    def digest(self, arena: _Memory) -> str: ...
    def forget(self, arena: int, id: int) -> None: ...
    def shape(self, arena: int) -> tuple[int, int]: ...
    def scratch_nbytes(self, arena: int, m: int, shape: tuple[int, int], add: bool) -> int: ...
    def linear(self, arena: int, rows: tuple[int, int, int], scratch: _Memory, stream: int, add: bool) -> None:
        """`rows`: address of x, its rows, address of y. Enqueues on `stream`, a CUDA stream of this GPU. The caller holds all of it until the work is done."""
    def unpack(self, arena: int, out: _Memory) -> None: ...
    def register_experts(
        self, gate_up: tuple[_Memory, _Memory], down: tuple[_Memory, _Memory], experts: int
    ) -> int:
        """Each arena with its escapes, held as for `register`. What `forget_experts` takes."""
    def forget_experts(self, gate_up: int, id: int) -> None: ...
    def experts_scratch_nbytes(
        self, arenas: tuple[int, int], m: int, hidden: int, top_k: int, experts: int
    ) -> int: ...
    def experts(
        self,
        arenas: tuple[int, int],
        rows: tuple[int, int, int],
        routed: tuple[int, int, int],
        scratch: _Memory,
        stream: int,
    ) -> None:
        """As `linear`. `routed`: int32 ids and float32 weights `[m, top_k]`, and `top_k`; an id that is no expert's is
        no work."""

def compress(
    source: _Path,
    output: _Path,
    choice: dict[str, Any],
    more: dict[str, Any],
    progress: Optional[Callable[..., object]],
) -> dict[str, Any]: ...
def plan(source: _Path, choice: dict[str, Any]) -> dict[str, Any]: ...
def decompress(
    path: _Path,
    output: _Path,
    more: dict[str, Any],
    progress: Optional[Callable[..., object]],
) -> dict[str, Any]: ...
def verify(path: _Path, more: dict[str, Any], progress: Optional[Callable[..., object]]) -> dict[str, Any]: ...
def pack(address: int, rows: int, cols: int) -> Optional[Packed]: ...
def arena_head(address: int, nbytes: int) -> tuple[int, int, int, str]: ...
def unpack(arena: _Memory, escapes: _Memory, out: _Memory) -> None: ...

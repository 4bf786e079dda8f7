"""The Rust part of the package, on which `Bundle` and the functions of `unweight` are built.

An address is that of CPU memory that the caller keeps allocated during the call and that nothing else uses meanwhile.
`_Memory` is an address and a number of bytes. A wrong address or size is undefined behavior.
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
        """The path as passed to the constructor."""
    @property
    def _folder(self) -> pathlib.Path:
        """The absolute path, which stays valid when the process changes its directory."""
    @property
    def profile(self) -> str:
        """The profile that the bundle was compressed with, such as `"packed"`."""
    @property
    def manifest_digest(self) -> str:
        """The digest of the manifest, which has a digest of every file: equal digests mean equal bundles."""
    @property
    def weights_digest(self) -> str:
        """The digest of the weights. `config.json` names it as `weights_digest` in `quantization_config`."""
    def _rows(self) -> list[dict[str, Any]]: ...
    def _row(self, name: str, *, file: Optional[str] = None) -> dict[str, Any]: ...
    def is_of_model(self, file: str) -> bool:
        """Returns whether the model is loaded from this file.

        It is `model.safetensors` if the bundle has it, else each `model-*-of-*.safetensors`, else every file.
        """
    def _inspect(self) -> dict[str, Any]: ...
    def read(self, name: str, *, file: Optional[str] = None) -> bytes:
        """Returns the original little-endian bytes of a tensor, checked against their digest.

        `file` is the source file, needed if several files contain the name.
        """
    def decode_into(self, name: str, address: int, nbytes: int, *, file: Optional[str] = None) -> None:
        """Decodes a tensor into `nbytes` writable bytes at `address`; `nbytes` must be the size of the tensor.

        After an error, the contents of that memory are unspecified.
        """
    def reads_parts(self, name: str, *, file: Optional[str] = None) -> bool:
        """Returns whether a part of a tensor can be read alone: large packed matrices, from format version 1.3 on."""
    def decode_part_into(
        self,
        name: str,
        rows: tuple[int, int],
        cols: tuple[int, int],
        memory: _Memory,
        *,
        file: Optional[str] = None,
    ) -> int:
        """Decodes a part of a matrix into writable `memory`; `rows` and `cols` are ranges with an exclusive end.

        Returns the number of stored bytes that were read, which are checked against their digests.
        """
    def copied(self, name: str, *, limit: int = ...) -> Optional[bytes]:
        """Returns the bytes of a file next to the weights, such as `tokenizer.json`, checked against their digest.

        Returns `None` if the bundle has no such file. A file of more than `limit` bytes is an error.
        """

class Packed:
    """A packed matrix in Rust's memory. `store` copies it to an arena and escape lists of the caller."""

    @property
    def arena_nbytes(self) -> int: ...
    @property
    def escapes_nbytes(self) -> int: ...
    def store(self, arena: _Memory, escapes: _Memory) -> None: ...

def has_kernels(major: int, minor: int) -> bool:
    """Returns whether there are kernels for GPUs of a compute capability."""

class Registration:
    """A registration of an arena, or of the arenas of a mixture. Dropping it forgets them."""

    @property
    def id(self) -> int: ...
    @property
    def digest(self) -> str:
        """The digest of the escapes; empty for a mixture."""

class Runtime:
    """The kernels and registered arenas of one GPU. Make one per process and GPU; `ordinal` is torch's device index.

    Batches above `expand_above` expand weights to BF16 for cuBLAS; `None` does so where it is predicted to be faster.

    Addresses are those of memory on this GPU. Arenas and escapes are aligned to 256 bytes, and 256 bytes after
    `escapes` are readable. `linear` and `experts` enqueue on the caller's stream. Other methods that access this
    memory use a stream of their own and wait for it; the caller first waits for its streams that use the memory.
    """

    def __init__(self, ordinal: int, max_batch: int, expand_above: Optional[int] = None) -> None: ...
    def __new__(cls, ordinal: int, max_batch: int, expand_above: Optional[int] = None) -> Runtime: ...
    @staticmethod
    def buffer_nbytes(rows: int, cols: int) -> Optional[tuple[int, int]]: ...
    def pack(
        self, weights: int, rows: int, cols: int, arena: _Memory, escapes: _Memory
    ) -> tuple[Optional[int], Optional[str]]:
        """Returns the used bytes of `escapes`, or why the matrix cannot be packed."""
    def prepare(self, rows: int, cols: int) -> None:
        """Compiles and loads the kernels that `register` needs for a shape, and those of `update`."""
    def register(
        self, arena: _Memory, escapes: _Memory, room: int = 0, pending: Optional[int] = None
    ) -> Registration:
        """Registers an arena. The caller keeps both buffers until it has dropped the registration and all work with
        them is done. Between launches, it may write another matrix with the same window to them, whose escapes have
        at most `room` bytes. `pending` is the address of another arena, which `replace` will copy to this one; until
        then, launches use the registration before."""
    def replace(self, arena: _Memory, id: int, source: tuple[int, int, int]) -> None:
        """Copies a packed matrix into a registered arena, and its escape lists to those of registration `id`, then
        makes launches use that. `source` is the address of an arena of the same shape, the address of its lists, and
        their bytes. No Python code runs in between. Raises `ValueError` if there is no room for the lists."""
    def is_registered(self, arena: int) -> bool: ...
    def activate(self, arena: int, id: int) -> None:
        """Makes later launches use the registration `id`, if several arenas share this address one after another."""
    def escapes(self, arena: _Memory) -> tuple[int, str]:
        """Returns the bytes of the escapes of an arena, and their digest."""
    def is_active(self, arena: int, id: int) -> bool:
        """Returns whether launches use the registration `id`."""
    def shape(self, arena: int) -> tuple[int, int]: ...
    def scratch_nbytes(self, arena: int, m: int, shape: tuple[int, int], add: bool) -> int: ...
    def takes_bias(self, arena: int, m: int) -> bool:
        """Returns whether `linear` can add a bias to a batch of `m`."""
    def linear(
        self,
        arena: int,
        rows: tuple[int, int, int],
        scratch: _Memory,
        stream: int,
        bias: Optional[int] = None,
    ) -> None:
        """Enqueues `y = x @ weight.T` on `stream`, a CUDA stream of this GPU.

        `rows` is the address of x, its number of rows, and the address of y. With `bias`, the address of bfloat16
        `[n]`, `y = bias +`; if it is 0, `y +=`. The caller keeps all buffers allocated until the work is done.
        """
    def unpack(self, arena: int, out: _Memory) -> None: ...
    def update_scratch_nbytes(self, arenas: list[int]) -> int: ...
    def update(
        self, updates: list[tuple[int, int, int, int]], scratch: _Memory
    ) -> list[tuple[str, int, str]]:
        """Replaces elements of registered arenas, each listed once: addresses of arena, of int64 places in the
        flattened matrix, and of bfloat16 values, and their number.

        Returns for each what was done, the bytes of its escape lists and their digest: `"updated"`, or without a change
        `"whole"` (another window or more escapes than there is room for), `"outside"`, `"skipped"` (a place
        of another arena is outside), `"unsorted"` (places do not ascend); `"differs"` is a bug. Raises
        `ValueError` for address 0.
        """
    def prepare_embed(self) -> None:
        """Compiles and loads the kernel of `embed`, which cannot be done while a CUDA graph is captured."""
    def embed(
        self, arena: int, shape: tuple[int, int], rows: tuple[int, int, int], fault: int, stream: int
    ) -> None:
        """Enqueues `y = weight[ids]` on `stream`; `rows` is the address of u32 ids, their number, and the address of y,
        `fault` that of a u32. Ids outside of the weight give zeros. `shape` is that of the weight."""
    def decode(self, bundle: Bundle, name: str, out: _Memory, *, file: Optional[str] = None) -> bool:
        """Decodes a tensor of a bundle to `out`, which has the tensor's size and 256 more bytes.

        The stored sections are compared with their digests before. Returns false if the encoding has no decoder for
        GPUs.
        """
    def register_experts(
        self, gate_up: tuple[_Memory, _Memory], down: tuple[_Memory, _Memory], experts: int
    ) -> Registration:
        """Registers two arenas, each with its escapes, kept as for `register`."""
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
        """Enqueues the products of `m` tokens with their experts; `rows` and `stream` are as for `linear`.

        `routed` is the addresses of int32 ids and float32 weights `[m, top_k]`, and `top_k`. Ids outside of
        `0..experts` are skipped.
        """

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
def pack(address: int, rows: int, cols: int) -> tuple[Optional[Packed], Optional[str]]:
    """Returns the packed matrix, or why it cannot be packed."""

def arena_head(address: int, nbytes: int) -> tuple[int, int, int, str]: ...
def escapes_digest(address: int, nbytes: int) -> str: ...
def unpack(arena: _Memory, escapes: _Memory, out: _Memory) -> None: ...

"""CPU offload of packed layers: their arenas stay in pinned memory, and the next block is copied while one runs.

    pinned memory    [ block 0 ][ block 1 ][ block 2 ] ...         a copy on a side stream
                           |         |                                    |
    GPU              [  slot 0  ][  slot 1  ]              a block runs in one slot, the next arrives in the other

A layer asks for its arena when it runs (`Offload.arena`), so blocks may run in any order. The block that followed last
time is prefetched.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional, Protocol, Sequence

import torch
from torch import Tensor, nn

from ._arena import _holder, _lists_of
from ._gpu import _runtime
from .ops import Placed, place, unpack

if TYPE_CHECKING:
    from .modules import PackedLinear

# A block runs in one slot while the next arrives in the other.
_SLOTS = 2


class Copies(Protocol):
    """Copies blocks to slots. `CudaCopies` is the implementation for GPUs; tests have one that is late on purpose."""

    device: torch.device

    def slot(self, nbytes: int) -> Tensor:
        """Returns a new slot, uint8 `[nbytes]` on the device."""

    def start(self, source: Tensor, slot: int, to: Tensor) -> None:
        """Starts a copy to a slot, which begins after the last `release` of the slot."""

    def wait(self, slot: int) -> None:
        """Makes later work on the current stream wait for the last copy to a slot."""

    def release(self, slot: int) -> None:
        """Lets the next copy to a slot begin when the work so far on the current stream is done."""

    def follow(self) -> None:
        """Makes later work on the current stream wait for the work so far on the stream of the last `follow`."""


class CudaCopies:
    """Copies on a stream of their own, ordered with the work of the current stream by events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._arrived = [torch.cuda.Event() for _ in range(_SLOTS)]
        self._released = [torch.cuda.Event() for _ in range(_SLOTS)]
        self._followed: Optional[torch.cuda.Stream] = None

    def slot(self, nbytes: int) -> Tensor:
        """Returns a slot; waits for the device, so that no earlier user of the memory is still running."""
        slot = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        return slot

    def start(self, source: Tensor, slot: int, to: Tensor) -> None:
        # An event that was never recorded does not block.
        self._stream.wait_event(self._released[slot])
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            self._arrived[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        torch.cuda.current_stream(self.device).wait_event(self._arrived[slot])

    def release(self, slot: int) -> None:
        self._released[slot].record(torch.cuda.current_stream(self.device))

    def follow(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        if self._followed is not None and self._followed != stream:
            stream.wait_stream(self._followed)
        self._followed = stream


class _Place(NamedTuple):
    """Where the arena of an offloaded layer is."""

    block: int
    host: Tensor
    """The arena in CPU memory, a part of the block's buffer."""
    slots: tuple[Tensor, ...]
    """The arena in each slot, valid while its block is there."""


class Offload:
    """The offloaded blocks of a module, and the slots on the device that runs them.

    They run on one thread: another one would replace the block that this one uses. Streams may change.
    """

    def __init__(self, blocks: Sequence[Sequence[PackedLinear]], copies: Copies) -> None:
        self.device, self._copies = copies.device, copies
        sizes = [sum(layer.weight_packed.nbytes for layer in layers) for layers in blocks]
        self._slots = [copies.slot(max(sizes)) for _ in range(_SLOTS)]
        self._block_in: list[Optional[int]] = [None] * _SLOTS
        self._current: Optional[int] = None
        # The thread that runs the blocks, once one does.
        self._thread: Optional[threading.Thread] = None
        # The block that followed each one last time.
        self._next = [(block + 1) % len(blocks) for block in range(len(blocks))]
        self._buffers: list[Tensor] = []
        self._places: dict[int, _Place] = {}
        # For each block and slot, the registrations of its arenas.
        self._placed: list[list[list[Placed]]] = []
        for layers, nbytes in zip(blocks, sizes):
            self._buffers.append(self._pinned(nbytes))
            self._add(layers)

    def _pinned(self, nbytes: int) -> Tensor:
        """Returns a CPU buffer, pinned if the device is a GPU."""
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        if self.device.type == "cuda":
            # Torch rounds its pinned allocations up to powers of two, so the buffer is registered instead.
            with torch.cuda.device(self.device):
                error = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), nbytes, 0))
            if error == 0:
                # When the process exits, CUDA may be gone before the finalizer.
                weakref.finalize(self, _unpin, buffer, self.device).atexit = False
            else:
                warnings.warn(
                    f"cannot pin {nbytes} bytes of CPU memory (CUDA error {error}): offloaded weights are copied from "
                    "pageable memory, which does not overlap with compute; free memory or raise `ulimit -l`",
                    stacklevel=5,
                )
        return buffer

    def _add(self, layers: Sequence[PackedLinear]) -> None:
        """Moves the arenas of the last block to its buffer, and registers them in every slot."""
        from .modules import _Held

        block, at = len(self._buffers) - 1, 0
        for layer in layers:
            arena, holder = layer._registered()
            view = slice(at, at + arena.nbytes)
            host = self._buffers[block][view]
            host.copy_(arena)
            self._places[id(layer)] = _Place(block, host, tuple(slot[view] for slot in self._slots))
            del layer.weight_packed
            # A layer that shares the weight and stays on the device keeps its own.
            layer._held.is_offloaded = True
            # The layer keeps its escape lists in CPU memory, to unpack the arena there.
            layer._held, layer._offload = _Held(host, _holder(host, _lists_of(host, holder))), self
            at += arena.nbytes
        placed: list[list[Placed]] = []
        if self.device.type == "cuda":
            # Registration checks an arena, so it has to be in the slot. The copied escape lists stay on the GPU.
            for index, slot in enumerate(self._slots):
                slot[:at].copy_(self._buffers[block])
                placed.append([place(self._places[id(layer)].slots[index], layer._escapes.data) for layer in layers])
        self._placed.append(placed)

    def host_arena(self, layer: PackedLinear) -> Tensor:
        """Returns the arena of a layer in CPU memory, uint8 `[bytes]`."""
        return self._places[id(layer)].host

    def unpacked_on_cpu(self, layer: PackedLinear) -> Tensor:
        """Returns the BF16 weight of a layer on the CPU."""
        return unpack(self._places[id(layer)].host)

    def unpacked(self, layer: PackedLinear) -> Tensor:
        """Returns the BF16 weight of a layer on the device."""
        return unpack(self.arena(layer))

    @torch.compiler.disable
    def arena(self, layer: PackedLinear) -> Tensor:
        """Returns the arena of a layer on the device; work on the current stream may use it until another block runs.

        Fetches the block of the layer unless it is there, and starts to fetch the next one.
        """
        if self._thread is not threading.current_thread():
            self._own()
        # Before anything that would end the capture with an error of CUDA.
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("offloaded layers cannot be captured in a CUDA graph; pack the module without offload")
        self._copies.follow()
        where = self._places[id(layer)]
        slot = self._enter(where.block) if where.block != self._current else self._block_in.index(where.block)
        return where.slots[slot]

    def _own(self) -> None:
        """Makes the current thread the one that runs the blocks; raises `RuntimeError` if there is another one."""
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError(
                f"offloaded layers run on one thread, '{self._thread.name}', but '{threading.current_thread().name}' "
                "calls them; use a ThreadPoolExecutor(max_workers=1), or pack the module without offload"
            )
        self._thread = threading.current_thread()

    def __reduce_ex__(self, _: Any) -> Any:
        raise NotImplementedError(
            "a layer is offloaded and cannot be copied or saved; save its state_dict, or copy the module before "
            "offloading"
        )

    def _enter(self, block: int) -> int:
        """Makes a block current, and returns its slot."""
        left: Optional[int] = None
        if self._current is not None:
            left = self._block_in.index(self._current)
            self._copies.release(left)
            self._next[self._current] = block
        if block not in self._block_in:
            # Not predicted. The slot of the previous block is the one to be filled with the next.
            self._fetch(block, 0 if left is None else 1 - left)
        slot = self._block_in.index(block)
        self._copies.wait(slot)
        if self._placed[block]:
            runtime = _runtime(self.device)
            for placed in self._placed[block][slot]:
                runtime.activate(placed.arena.data_ptr(), placed.registration)
        self._current = block
        if self._next[block] not in self._block_in:
            self._fetch(self._next[block], 1 - slot)
        return slot

    def _fetch(self, block: int, slot: int) -> None:
        buffer = self._buffers[block]
        self._block_in[slot] = None  # also if the copy does not start
        self._copies.start(buffer, slot, self._slots[slot][: buffer.nbytes])
        self._block_in[slot] = block


def _unpin(buffer: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


def offload_blocks(module: nn.Module, device: torch.device) -> None:
    """Offloads the packed layers of the elements of each outermost `nn.ModuleList`; `pack_model` documents it."""
    from .modules import PackedLinear

    blocks = blocks_of(module, lambda part: isinstance(part, PackedLinear))
    # Values may have kept `pack_model` from packing the layers of some blocks, which then stay on the device.
    if blocks:
        Offload(blocks, CudaCopies(device))


def require_two(blocks: Sequence[object]) -> None:
    """Raises `ValueError` for fewer than two blocks."""
    if len(blocks) < 2:
        raise ValueError(
            f"offload needs two blocks, elements of an nn.ModuleList with linear layers that can be packed, but the "
            f"module has {len(blocks)}; omit offload"
        )


def blocks_of(module: nn.Module, is_ours: Callable[[nn.Module], bool]) -> list[list[Any]]:
    """Returns some layers of each element of the outermost `nn.ModuleList`s, without those that are offloaded already,
    and without empty blocks."""
    blocks: list[list[Any]] = []
    seen: set[int] = set()

    def is_new(part: nn.Module) -> bool:
        return is_ours(part) and id(part) not in seen and getattr(part, "_offload", None) is None

    def visit(part: nn.Module) -> None:
        for child in part.children():
            if isinstance(part, nn.ModuleList):
                layers = [one for one in child.modules() if is_new(one)]
                seen.update(map(id, layers))
                blocks.append(layers)
            else:
                visit(child)

    visit(module)
    return [layers for layers in blocks if layers]

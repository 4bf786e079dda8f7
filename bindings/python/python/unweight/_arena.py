"""Arenas of packed weights, their escape lists, and their registration on a GPU."""

from __future__ import annotations

import copy
import warnings
import weakref
from typing import Any, Callable, Optional, Union

import torch
from torch import Tensor, nn

from . import _gpu, _native
from ._gpu import _PAD, _memory, _runtime


class Escapes:
    """The escape lists of an arena: the few weights outside of its exponent window.

    The size of an arena depends on its shape alone, so layers of one shape share a compiled graph. The lists vary in
    size; the operator finds them by the digest in the arena. Keep this object as long as the arena. It is immutable,
    so copying returns the same object.
    """

    __slots__ = ("__weakref__", "digest", "data", "is_shared", "replaces")

    def __init__(self, digest: str, data: Tensor) -> None:
        self.digest, self.data, self.is_shared = digest, data, False
        # `is_shared`: arenas with equal weights may use it. `replaces`: an interrupt may leave those in the arena.
        self.replaces: list[Escapes] = []

    def named(self, digest: str) -> Optional[Escapes]:
        """Returns these lists or those that they replace, whichever have this digest."""
        found, seen = [self], set()
        while found:
            one = found.pop()
            if one.digest == digest:
                return one
            # Lists that are replaced and then packed again replace each other.
            seen.add(one)
            found += [other for other in one.replaces if other not in seen]
        return None

    def __copy__(self) -> Escapes:
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> Escapes:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _escapes, (self.digest, self.data)


_escapes_by_digest: weakref.WeakValueDictionary[tuple[torch.device, str], Escapes] = weakref.WeakValueDictionary()


def _escapes(digest: str, data: Tensor) -> Escapes:
    """Returns the `Escapes` with this digest on the device of `data`; makes it if there is none."""
    made = Escapes(digest, data)
    with _gpu._lock:
        escapes = _escapes_by_digest.setdefault((data.device, digest), made)
        escapes.is_shared |= escapes is not made
        return escapes


class _Registration:
    """An arena as the runtime of its GPU knows it, and the memory of its escape lists."""

    __slots__ = ("native", "lists", "room")

    def __init__(self, arena: Tensor, lists: Tensor, pending: Optional[Tensor] = None) -> None:
        """Registers an arena; or the arena `pending`, which is going to be copied there."""
        self.room = lists.nbytes and lists.nbytes * 5 // 4 // 4 * 4 + 4096
        """The bytes that the lists of other weights may have there."""
        self.lists, runtime = _padded_copy(lists, arena.device, self.room), _runtime(arena.device)
        with torch.cuda.device(arena.device):
            torch.cuda.current_stream().synchronize()
            address = None if pending is None else pending.data_ptr()
            self.native = runtime.register(_memory(arena), _memory(self.lists), self.room, address)


class Placed:
    """A registered arena on a GPU with its escape lists, or the two arenas of a mixture of experts.

    The operators find a registered arena by its address. Keep this object as long as the arena: it unregisters the
    arena when it is freed. It references the arena's memory, so that the address is not reused. `copy.deepcopy` copies
    the arena and registers the copy.
    """

    __slots__ = (
        "__weakref__",
        "arenas",
        "_is_changing",
        "_kept",
        "_lists",
        "_mixture",
        "_pending",
        "_place",
        "_registered",
        "_shared",
    )

    def __init__(
        self,
        place: Callable[..., Placed],
        arenas: tuple[Tensor, ...],
        lists: tuple[Tensor, ...],
        registered: Optional[_Registration] = None,
        mixture: Optional[_native.Registration] = None,
    ) -> None:
        self.arenas, self._lists, self._place = arenas, lists, place
        # The registered memory. `arenas` have other memory if their `data` is assigned, as diffusers' offloading does.
        self._kept = tuple(arena.detach() for arena in arenas)
        self._registered, self._mixture = registered, mixture
        # With the digest, `_register_copy` finds the lists for a copy of the arena.
        self._shared = None if registered is None else _escapes(registered.native.digest, registered.lists)
        self._pending: Optional[_Registration] = None
        self._is_changing = False

    @property
    def arena(self) -> Tensor:
        """The registered arena, uint8 `[bytes]`; `ValueError` if there are two."""
        (arena,) = self._kept
        return arena

    @property
    def lists(self) -> tuple[Tensor, ...]:
        """The escape lists of each arena, uint8 `[bytes]`."""
        self._settle()
        return self._lists

    @property
    def data(self) -> Tensor:
        """The escape lists of the arena, uint8 `[bytes]`; `ValueError` if there are two arenas."""
        (lists,) = self.lists
        return lists

    @property
    def registration(self) -> int:
        """The id of the arena's registration, for `Runtime.activate`; 0 for experts."""
        self._settle()
        return 0 if self._registered is None else self._registered.native.id

    def has_room(self, lists: Tensor) -> bool:
        """Returns whether the memory of the escape lists has room for these; false for experts."""
        self._settle()
        return self._registered is not None and lists.nbytes <= self._registered.room

    def __deepcopy__(self, memo: dict[int, Any]) -> Placed:
        return self._place(*(copy.deepcopy(arena, memo) for arena in self.arenas), *self.lists)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._place, (*self.arenas, *self.lists)

    def replace(self, arena: Tensor, lists: Tensor, in_place: bool) -> None:
        """Copies another packed matrix into the arena. With `in_place`, it has the same window, and room for its lists;
        otherwise, the arena gets another registration, so captured CUDA graphs become invalid. An interrupt at any
        point leaves the old matrix or the new one."""
        with _gpu._changes:
            self.begin_change()
            self._pending = None if in_place else _Registration(self.arena, lists, arena)
            registered, runtime = self._pending or self._registered, _runtime(arena.device)
            assert registered is not None
            source = (arena.data_ptr(), lists.data_ptr(), lists.nbytes if in_place else 0)
            with torch.cuda.device(arena.device):
                torch.cuda.current_stream().synchronize()
                runtime.replace(_memory(self.arena), registered.native.id, source)
            self._settle()

    def begin_change(self) -> None:
        """Called before the arena changes, with `_gpu._changes` held until `end_change`. In between, the head of the
        arena says which lists it has."""
        self._settle()
        shared = self._shared
        # Another arena with equal weights may use the same `Escapes`.
        if shared is not None and shared.is_shared and shared.data.data_ptr() == self.data.data_ptr():
            shared.data = shared.data.clone()
        self._is_changing = True

    def end_change(self, nbytes: int, digest: str) -> None:
        """Takes the size and the digest of the escape lists in the arena's head."""
        assert self._registered is not None
        lists = self._registered.lists.as_strided((nbytes,), (1,))
        self._shared, self._lists = _escapes(digest, lists), (lists,)
        self._pending, self._is_changing = None, False

    def cancel_change(self) -> None:
        """Called instead of `end_change` if the arena did not change."""
        self._is_changing = False

    def _settle(self) -> None:
        """Ends a change if one has begun; it may have been interrupted."""
        if not self._is_changing:
            return
        with _gpu._changes:
            if not self._is_changing:
                return
            runtime, memory = _runtime(self.arena.device), _memory(self.arena)
            if self._pending is not None and runtime.is_active(memory[0], self._pending.native.id):
                self._registered = self._pending
            with torch.cuda.device(self.arena.device):
                torch.cuda.current_stream().synchronize()
                self.end_change(*runtime.escapes(memory))


def _padded_copy(lists: Tensor, device: torch.device, room: int = 0) -> Tensor:
    """Copies escape lists to their own memory on a device, with the padding that kernels may read after them."""
    return torch.empty(max(lists.nbytes, room) + _PAD, dtype=torch.uint8, device=device)[: lists.nbytes].copy_(lists)


def place(arena: Tensor, escapes: Tensor) -> Placed:
    """Registers an arena on a GPU with its escape lists; returns a `Placed` to keep as long as the arena.

    `arena` is uint8 `[bytes]` on the GPU. `escapes` is uint8 `[bytes]`, the `data` of its `Escapes` or `Placed`, and is
    copied. Compiles the kernels of the shape, or loads them from the cache; do not call it during the capture of a
    CUDA graph. Raises `ValueError` if they do not belong together or are not such tensors, and `DeviceError` if the
    GPU or NVRTC fails.
    """
    _check_arena(arena)
    if not isinstance(escapes, Tensor) or escapes.dtype != torch.uint8 or escapes.dim() != 1:
        given = f"{escapes.dtype} {list(escapes.shape)}" if isinstance(escapes, Tensor) else type(escapes).__name__
        raise ValueError(f"escape lists are a uint8 vector, the `data` of an `Escapes` or `Placed`, got {given}")
    if arena.device.type != "cuda":
        raise ValueError(f"place registers an arena on a GPU, got one on {arena.device}; move it there first")
    registered = _Registration(arena, escapes)
    return Placed(place, (arena,), (registered.lists,), registered)


def _check_arena(arena: Tensor) -> None:
    if arena.dtype != torch.uint8 or arena.dim() != 1 or not arena.is_contiguous():
        raise ValueError(f"an arena is a contiguous uint8 vector, got {arena.dtype} {list(arena.shape)}")


def _digest_in(arena: Tensor) -> str:
    """Returns the digest of the escape lists that the head of an arena names, on the CPU or, after work on the current
    stream, on a GPU."""
    if arena.device.type != "cuda":
        _, _, _, digest = _native.arena_head(*_memory(arena))
        return digest
    with torch.cuda.device(arena.device):
        torch.cuda.current_stream().synchronize()
        _, digest = _runtime(arena.device).escapes(_memory(arena))
    return digest


def _register_copy(arena: Tensor) -> Optional[Placed]:
    """Registers a copy of an arena, if its escape lists are known and no capture is running; else returns `None`.

    Torch copies operands when it tests operators. Each call copies the head of the arena to the CPU and waits for it.
    """
    if torch.cuda.is_current_stream_capturing() or not arena.is_contiguous():
        return None
    escapes = _escapes_by_digest.get((arena.device, _digest_in(arena)))
    if escapes is None:
        return None
    warnings.warn(
        "unweight::linear registers a copy of an arena in each call; register it once with unweight.ops.place",
        stacklevel=3,
    )
    return place(arena, escapes.data)


def _holder_of_moved(arena: Tensor, holder: Union[Escapes, Placed]) -> Union[Escapes, Placed]:
    """Returns the object to keep with an arena that may have been moved; `holder` is the object of the original."""
    if arena.device.type == "cuda":
        is_held = isinstance(holder, Placed) and holder.arena.data_ptr() == arena.data_ptr()
    else:
        is_held = arena.device.type != "cpu" or isinstance(holder, Escapes)
    return holder if is_held else _holder(arena, _lists_of(arena, holder))


def _lists_of(arena: Tensor, holder: Union[Escapes, Placed]) -> Tensor:
    """Returns the escape lists of an arena, uint8 `[bytes]`: those of `holder`, or after an interrupted update, those
    that they were to replace. The arena may have been moved."""
    if isinstance(holder, Escapes) and holder.replaces and arena.device.type in ("cpu", "cuda"):
        holder = holder.named(_digest_in(arena)) or holder
    return holder.data


def _holder(arena: Tensor, data: Tensor) -> Union[Escapes, Placed]:
    """Returns the object to keep with an arena: `Placed` on a GPU, `Escapes` on the CPU."""
    if arena.device.type == "cuda":
        # The tensor of a parameter is replaced when it moves, so it would not keep the memory at this address.
        return place(arena.data if isinstance(arena, nn.Parameter) else arena, data)
    digest, lists = _digest_in(arena), data.cpu()
    if _native.escapes_digest(*_memory(lists)) != digest:
        raise ValueError("these escapes do not belong to this arena; pass those that were packed with it")
    return _escapes(digest, lists)

"""Replaces packed weights in the memory that they are in: all of a matrix, or some of its elements."""

from __future__ import annotations

from typing import Callable, Union

import torch
from torch import Tensor

from . import _gpu
from ._dispatch import _with_memory
from ._gpu import _memory, _runtime
from .errors import UnweightError
from .ops import Escapes, Placed, _pack, _packed_cuda, unpack


def _pack_into(
    arena: Tensor,
    holder: Union[Escapes, Placed],
    weight: Tensor,
    keep: Callable[[Escapes], None],
    keep_graphs: bool = False,
) -> Union[bool, str]:
    """Packs other weights of the same shape, on the device of the arena, into it. Returns whether CUDA graphs that have
    captured the arena stay valid, or why they cannot be packed, which changes nothing. Compares the packed bits with
    the weights.

    An exception at any point, such as `KeyboardInterrupt`, leaves the old weights or the new ones. On the CPU, `keep`
    stores other escape lists before the arena changes. On a GPU, graphs stay valid if the window stays and the lists
    fit in their room. With `keep_graphs`, other weights are not packed.
    """
    weight = _with_memory(weight.detach()).resolve_neg().contiguous()
    # Tensors that were made in inference mode may be changed only in it.
    with torch.inference_mode():
        packed = _pack_into_unchecked(arena, holder, weight, keep, keep_graphs)
    if not isinstance(packed, str) and not torch.equal(unpack(arena).view(torch.int16), weight.view(torch.int16)):
        raise UnweightError("new weights were packed wrongly: please report this bug")
    return packed


def _pack_into_unchecked(
    arena: Tensor,
    holder: Union[Escapes, Placed],
    weight: Tensor,
    keep: Callable[[Escapes], None],
    keep_graphs: bool,
) -> Union[bool, str]:
    if not isinstance(holder, Placed):
        packed = _pack(weight)
        if isinstance(packed, str):
            return packed
        packed.escapes.replaces.append(holder)
        keep(packed.escapes)
        arena.copy_(packed.arena)
        packed.escapes.replaces.remove(holder)
        return True
    packed = _packed_cuda(weight)
    if isinstance(packed, str):
        return packed
    made, lists = packed
    # Another update in between would make the decision wrong.
    with _gpu._changes:
        # Of the head, 64 bytes depend on shape and lists; the rest is the window.
        keeps_window = torch.equal(made[-256 + 64 :], arena[-256 + 64 :])
        in_place = keeps_window and holder.has_room(lists)
        if keep_graphs and not in_place:
            what = "their exponent window is another"
            if keeps_window:
                what = "they have more escapes than there is room for"
            return f"{what}, so captured CUDA graphs cannot use them"
        holder.replace(made, lists, in_place)
        return in_place


def _ascending(index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts positions and their values; the last value of a repeated position counts."""
    index, order = index.sort(stable=True)
    is_last = torch.ones_like(index, dtype=torch.bool)
    is_last[:-1] = index[1:] != index[:-1]
    return index[is_last], values[order[is_last]]


def _with_elements(weight: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Replaces elements of a contiguous weight at checked positions, and returns it."""
    index, values = _ascending(index, values)
    weight.view(-1)[index] = values
    return weight


def _update_in_place(updates: list[tuple[Tensor, Placed, Tensor, Tensor]]) -> list[str]:
    """Replaces elements of registered arenas of one GPU: arena, its object, int64 positions, bfloat16 values.

    Returns for each what was done, as `Runtime.update`, after sorting what was not sorted. An arena that was not
    updated is unchanged. The kernels compare a digest of each updated matrix with that of the new weights.
    """
    done = _update_sorted(updates)
    unsorted = [at for at, what in enumerate(done) if what == "unsorted"]
    if unsorted and "outside" not in done:
        arenas = ((updates[at][:2], _ascending(*updates[at][2:])) for at in unsorted)
        for at, what in zip(unsorted, _update_sorted([(*arena, *elements) for arena, elements in arenas])):
            done[at] = what
    return done


def _update_sorted(updates: list[tuple[Tensor, Placed, Tensor, Tensor]]) -> list[str]:
    device = updates[0][0].device
    runtime = _runtime(device)
    jobs = [(arena.data_ptr(), index.data_ptr(), one.data_ptr(), len(index)) for arena, _, index, one in updates]
    with _gpu._changes, torch.cuda.device(device):
        for _, holder, _, _ in updates:
            holder.begin_change()
        nbytes = runtime.update_scratch_nbytes([job[0] for job in jobs])
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
        torch.cuda.current_stream().synchronize()
        done = runtime.update(jobs, _memory(scratch))
        for (_, holder, _, _), (what, nbytes, digest) in zip(updates, done):
            if what == "updated":
                holder.end_change(nbytes, digest)
            else:
                holder.cancel_change()
    return [what for what, _, _ in done]

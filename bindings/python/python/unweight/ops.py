"""Linear layers on packed weights, for torch: the operator `torch.ops.unweight.linear`, and a module that uses it.

`pack` turns a BF16 matrix into an arena of 12.03 bits a weight; the operator multiplies by it, and `unpack` gives the
bits back. The operator works under `torch.compile` and knows fake tensors. It has an implementation for the CPU, which
unpacks the weights and calls `torch.nn.functional.linear`: the same bits as without packing. It has none for CUDA in
this version, and no backward.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _native
from .errors import UnweightError

__all__ = ["Escapes", "Linear", "Packed", "linear", "pack", "unpack"]

_library = torch.library.Library("unweight", "DEF")
_library.define("linear(Tensor x, Tensor arena, int n, Tensor? bias=None) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


class Escapes:
    """The lists of escapes of an arena: the few weights that its window does not hold.

    An arena's size follows from its shape alone, which keeps compiled graphs alike; these lists vary, and are found by
    the digest that the arena has of them. Whoever holds an arena holds this object, too. It never changes, so a copy of
    it is the same object.
    """

    __slots__ = ("__weakref__", "digest", "data")

    def __init__(self, digest: str, data: Tensor) -> None:
        self.digest, self.data = digest, data

    def __copy__(self) -> Escapes:
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> Escapes:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _escapes, (self.digest, self.data)


_known: weakref.WeakValueDictionary[str, Escapes] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _escapes(digest: str, data: Tensor) -> Escapes:
    """The one object with these lists."""
    with _lock:
        known = _known.get(digest)
        if known is None:
            known = _known[digest] = Escapes(digest, data)
        return known


class Packed(NamedTuple):
    """A packed matrix."""

    arena: Tensor
    """uint8: what the operator takes."""
    escapes: Escapes
    """To be kept as long as the arena."""
    n: int
    k: int


def _memory(tensor: Tensor) -> tuple[int, int]:
    return (tensor.data_ptr(), tensor.nbytes)


def pack(weight: Tensor) -> Optional[Packed]:
    """Packs a BF16 matrix `[n, k]` on the CPU; `None` if that cannot be.

    That is so if n or k is no multiple of 64, or if more than one weight in 256 lies outside of every window of 16
    exponents, which trained models do not have.
    """
    if weight.dtype != torch.bfloat16 or weight.dim() != 2:
        raise ValueError(f"pack takes a bfloat16 matrix, got {weight.dtype} {list(weight.shape)}")
    if weight.device.type != "cpu":
        raise ValueError(f"pack takes a matrix on the CPU, got one on {weight.device}; give weight.cpu()")
    # Held by this name until Rust has read it: rows of a shard are strided, and become a temporary here.
    held = weight.detach().contiguous()
    n, k = held.shape
    packed = _native.pack(held.data_ptr(), n, k)
    if packed is None:
        return None
    arena = torch.empty(packed.arena_nbytes, dtype=torch.uint8)
    lists = torch.empty(packed.escapes_nbytes, dtype=torch.uint8)
    packed.store(_memory(arena), _memory(lists))
    _, _, _, digest = _native.arena_head(*_memory(arena))
    return Packed(arena, _escapes(digest, lists), n, k)


def unpack(arena: Tensor) -> Tensor:
    """The BF16 matrix of an arena on the CPU, bit for bit."""
    if arena.dtype != torch.uint8 or arena.dim() != 1 or not arena.is_contiguous() or arena.device.type != "cpu":
        raise ValueError(
            f"an arena is a contiguous uint8 vector on the CPU, got {arena.dtype} {list(arena.shape)} on {arena.device}"
        )
    n, k, nbytes, digest = _native.arena_head(*_memory(arena))
    lists = (0, 0)
    if nbytes:
        known = _known.get(digest)
        if known is None:
            raise UnweightError(
                f"the escapes of an arena [{n}, {k}] are gone; keep `escapes` of what pack() returned as long as its arena"
            )
        lists = _memory(known.data)
    if lists[1] != nbytes:
        raise UnweightError(f"an arena [{n}, {k}] has {nbytes} bytes of escapes, those with its digest {lists[1]}")
    weight = torch.empty(n, k, dtype=torch.bfloat16)
    _native.unpack(_memory(arena), lists, _memory(weight))
    return weight


def _check(x: Tensor, arena: Tensor, bias: Optional[Tensor]) -> None:
    if x.dtype != torch.bfloat16:
        raise ValueError(f"unweight::linear takes x in bfloat16, got {x.dtype}; convert it, or run the model in bfloat16")
    if arena.dtype != torch.uint8:
        raise ValueError(f"unweight::linear takes an arena in uint8, got {arena.dtype}; was the model converted?")
    if bias is not None and bias.dtype != torch.bfloat16:
        raise ValueError(f"unweight::linear takes a bias in bfloat16, got {bias.dtype}")


def _cpu(x: Tensor, arena: Tensor, n: int, bias: Optional[Tensor] = None) -> Tensor:
    _check(x, arena, bias)
    weight = unpack(arena)
    if weight.shape[0] != n or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weights are {list(weight.shape)}, but n is {n} and x has {x.shape[-1]} columns")
    return F.linear(x, weight, bias).contiguous()


def _cuda(x: Tensor, arena: Tensor, n: int, bias: Optional[Tensor] = None) -> Tensor:
    raise NotImplementedError(
        "unweight::linear has no CUDA implementation in this version; keep the model on the CPU, load it in BF16, or "
        "run the bundle by `unweight generate` or `unweight serve`"
    )


def _fake(x: Tensor, arena: Tensor, n: int, bias: Optional[Tensor] = None) -> Tensor:
    _check(x, arena, bias)
    return x.new_empty(*x.shape[:-1], n)


def _no_backward(context: Any, *gradients: Any) -> Any:
    raise NotImplementedError(
        "unweight::linear has no backward: packed weights cannot be trained; load the model in BF16 for that"
    )


_library.impl("linear", _cpu, "CPU")
_library.impl("linear", _cuda, "CUDA")
torch.library.register_fake("unweight::linear", _fake, lib=_library)
torch.library.register_autograd("unweight::linear", _no_backward, lib=_library)


def linear(x: Tensor, packed: Packed, bias: Optional[Tensor] = None) -> Tensor:
    """`x @ weight.T + bias` by a packed weight."""
    return torch.ops.unweight.linear(x, packed.arena, packed.n, bias)


class Linear(nn.Module):
    """`nn.Linear` whose weight can be packed; until then, and if it cannot be, it computes as `nn.Linear` does."""

    weight_packed: Optional[Tensor]
    weight: Optional[nn.Parameter]
    bias: Optional[nn.Parameter]

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("weight", linear.weight)
        self.register_parameter("bias", linear.bias)
        self._escapes: Optional[Escapes] = None
        self._n = 0

    @property
    def is_packed(self) -> bool:
        """Whether the weight is packed."""
        return self._escapes is not None

    def pack(self, weight: Optional[Tensor] = None) -> bool:
        """Packs `weight`, or the one that is here, in its place; false if it cannot be, and then nothing changes."""
        packed = pack(self.weight if weight is None else weight)
        if packed is None:
            return False
        # Gone rather than None: who looks for it is to be told.
        del self.weight
        self.register_buffer("weight_packed", packed.arena)
        self._escapes, self._n = packed.escapes, packed.n
        return True

    def unpacked(self) -> Tensor:
        """The weight, bit for bit."""
        return unpack(self.weight_packed) if self.is_packed else self.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        if self._escapes is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.unweight.linear(x, self.weight_packed, self._n, self.bias)

    def extra_repr(self) -> str:
        form = "packed" if self.is_packed else "not packed"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {form}"

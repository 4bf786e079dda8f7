"""Linear layers on packed weights, for torch: the operator `torch.ops.unweight.linear`, and modules that use it.

`pack` converts a BF16 matrix to an arena, a uint8 tensor with 12.03 bits per weight. The operator multiplies by an
arena, and `unpack` returns the original matrix bit for bit. The operator supports `torch.compile` and fake tensors, but
has no backward. On the CPU, it unpacks the weights and calls `torch.nn.functional.linear`, with bit-identical results.
On NVIDIA GPUs from Ampere on, its kernels multiply by the packed weights, on any stream and in CUDA graphs.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Callable, NamedTuple, Optional, Union

from ._extras import require

require("torch", "torch")

import torch  # noqa: E402
import torch.nn.functional as F
from torch import Tensor, nn

from . import _native
from ._arena import (
    Escapes,
    Placed,
    _check_arena,
    _escapes,
    _escapes_by_digest,
    _holder,
    _holder_of_moved,
    _padded_copy,
    _register_copy,
    place,
)
from ._devices import why_not
from ._dispatch import _is_watched, _refuse_derivatives, _with_memory
from ._gpu import _PAD, _memory, _runtime
from .errors import UnweightError

__all__ = [
    "Escapes",
    "Experts",
    "Linear",
    "Packed",
    "PackedExperts",
    "Placed",
    "linear",
    "pack",
    "pack_experts",
    "place",
    "unpack",
    "unpack_experts",
    "why_not",
]

_library = torch.library.Library("unweight", "DEF")
_library.define(
    "experts(Tensor x, Tensor gate_up, Tensor down, Tensor ids, Tensor weights, int experts) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "linear(Tensor x, Tensor arena, int n, Tensor? bias=None) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


class Packed(NamedTuple):
    """A packed matrix `[n, k]`."""

    arena: Tensor
    """uint8 `[bytes]`: the operand of `torch.ops.unweight.linear`."""
    escapes: Union[Escapes, Placed]
    """The escape lists; keep this object as long as the arena."""
    n: int
    k: int

    @property
    def packed_nbytes(self) -> int:
        """Size of the arena in bytes, without the escape lists."""
        return self.arena.nbytes

    @property
    def bf16_nbytes(self) -> int:
        """Size of the BF16 matrix in bytes."""
        return self.n * self.k * 2


def pack(weight: Tensor) -> Optional[Packed]:
    """Packs a BF16 matrix `[n, k]` on its device, the CPU or a GPU; returns `None` if it cannot be packed.

    A matrix cannot be packed if `n` or `k` is not a multiple of 64, if more than one weight in 256 is outside of every
    window of 16 exponents, or if one of these has no exact operand, such as the largest BF16 values. Trained models
    rarely exceed the last two limits. Raises `ValueError` if `weight` is not a bfloat16 matrix or its device has no
    kernels (`why_not`), and `DeviceError` if the GPU or NVRTC fails.
    """
    packed = _pack(weight)
    return None if isinstance(packed, str) else packed


def _pack(weight: Tensor, memory: Optional[Tensor] = None) -> Union[Packed, str]:
    """Packs a matrix as `pack`; returns the reason if it cannot be packed. On a GPU, `memory` becomes the arena."""
    if weight.dtype != torch.bfloat16 or weight.dim() != 2:
        raise ValueError(f"pack expects a bfloat16 matrix, got {weight.dtype} {list(weight.shape)}")
    if (reason := why_not(weight.device)) is not None:
        raise ValueError(f"{reason}; pass weight.cpu()")
    # This may be a temporary copy (rows of a shard are strided); the name keeps it alive until Rust has read it.
    contiguous = _with_memory(weight.detach()).resolve_neg().contiguous()
    n, k = contiguous.shape
    if contiguous.device.type == "cuda":
        return _pack_cuda(contiguous, memory)
    packed, reason = _native.pack(contiguous.data_ptr(), n, k)
    if packed is None:
        return reason or "it cannot be packed"
    arena = torch.empty(packed.arena_nbytes, dtype=torch.uint8)
    lists = torch.empty(packed.escapes_nbytes, dtype=torch.uint8)
    packed.store(_memory(arena), _memory(lists))
    _, _, _, digest = _native.arena_head(*_memory(arena))
    return Packed(arena, _escapes(digest, lists), n, k)


def _pack_cuda(weight: Tensor, memory: Optional[Tensor]) -> Union[Packed, str]:
    packed = _packed_cuda(weight, memory)
    return packed if isinstance(packed, str) else Packed(packed[0], place(*packed), *weight.shape)


# Why matrices of other shapes cannot be packed.
_SHAPE = "rows or columns are not a multiple of 64"


def _packed_cuda(weight: Tensor, memory: Optional[Tensor] = None) -> Union[tuple[Tensor, Tensor], str]:
    """Packs on a GPU; returns an arena that is not registered yet, and its escape lists, or why it cannot be packed."""
    n, k = weight.shape
    sizes = _native.Runtime.buffer_nbytes(n, k)
    if sizes is None:
        return _SHAPE
    runtime = _runtime(weight.device)
    with torch.cuda.device(weight.device):
        arena = torch.empty(sizes[0], dtype=torch.uint8, device=weight.device) if memory is None else memory
        lists = torch.empty(sizes[1] + _PAD, dtype=torch.uint8, device=weight.device)
        # Wait until the weights are written, and until earlier users of the new buffers are done.
        torch.cuda.current_stream().synchronize()
        nbytes, reason = runtime.pack(weight.data_ptr(), n, k, _memory(arena), (lists.data_ptr(), sizes[1]))
    return (reason or "it cannot be packed") if nbytes is None else (arena, lists[:nbytes])


class PackedExperts(NamedTuple):
    """The packed experts of a mixture: operands of `torch.ops.unweight.experts`."""

    gate_up: Tensor
    """Arena of all gates and ups, uint8 `[bytes]`. Experts are stacked; 8 rows of a gate alternate with 8 of its up."""
    down: Tensor
    """Arena of all downs, uint8 `[bytes]`. Experts are stacked."""
    kept: tuple[object, ...]
    """Objects to keep as long as the arenas."""
    experts: int
    bf16_nbytes: int
    """Size of the BF16 matrices in bytes."""

    @property
    def packed_nbytes(self) -> int:
        """Size of the arenas in bytes, without the escape lists."""
        return self.gate_up.nbytes + self.down.nbytes


# Consecutive rows of a gate, and then of its up, in the arena `gate_up`.
_GATE_ROWS = 8


def pack_experts(gate_up: Tensor, down: Tensor) -> Optional[PackedExperts]:
    """Packs the experts of a mixture on their device; returns `None` if they cannot be packed, as for `pack`.

    `gate_up` is BF16 `[experts, 2 * intermediate, hidden]`, for each expert the gate and then the up; `down` is BF16
    `[experts, hidden, intermediate]`. All experts share an exponent window. Raises the errors of `pack`, and
    `ValueError` if the shapes are not those of one mixture.
    """
    packed = _pack_experts(gate_up, down)
    return None if isinstance(packed, str) else packed


def _pack_experts(gate_up: Tensor, down: Tensor) -> Union[PackedExperts, str]:
    """Packs experts as `pack_experts`; returns the reason if they cannot be packed."""
    if gate_up.dim() != 3 or down.dim() != 3:
        raise ValueError(f"expected weights [experts, n, k], got {list(gate_up.shape)} and {list(down.shape)}")
    experts, rows, hidden = gate_up.shape
    if down.shape != (experts, hidden, rows // 2) or rows % 2:
        shapes = f"{list(gate_up.shape)} and {list(down.shape)}"
        raise ValueError(f"gate_up and down are {shapes}, which are not the shapes of one mixture")
    if rows % 128 or hidden % 64:
        return _SHAPE
    gate_up, down = (_with_memory(one.detach()).resolve_neg() for one in (gate_up, down))
    interleaved = gate_up.reshape(experts, 2, rows // 2 // _GATE_ROWS, _GATE_ROWS, hidden).transpose(1, 2)
    upper, lower = interleaved.reshape(experts * rows, hidden), down.reshape(experts * hidden, rows // 2)
    if gate_up.device.type != "cuda":
        first, second = _pack(upper), _pack(lower)
        if isinstance(first, str):
            return first
        if isinstance(second, str):
            return second
        kept = (first.escapes, second.escapes)
        return PackedExperts(first.arena, second.arena, kept, experts, gate_up.nbytes + down.nbytes)
    if (reason := why_not(gate_up.device)) is not None:
        raise ValueError(f"{reason}; pass weights on the CPU")
    first, second = _packed_cuda(upper), _packed_cuda(lower.contiguous())
    if isinstance(first, str):
        return first
    if isinstance(second, str):
        return second
    placed = _place_experts(experts, first[0], second[0], first[1], second[1])
    return PackedExperts(*placed.arenas, (placed,), experts, gate_up.nbytes + down.nbytes)


def _bf16_experts(reasons: dict[str, str]) -> str:
    """Returns a line on experts that cannot be packed, from their names with the reason of each."""
    first, reason = next(iter(reasons.items()))
    names = ", ".join(list(reasons)[:3]) + (f" and {len(reasons) - 3} more" if len(reasons) > 3 else "")
    return f"unweight: {names} cannot be packed and stay in BF16 ({first}: {reason})"


def _sizes(*sizes: int) -> list[str]:
    """Returns sizes in bytes as text in one unit: GiB, or MiB if all are below 0.1 GiB."""
    unit, name = (2**30, "GiB") if max(sizes) >= 2**30 / 10 else (2**20, "MiB")
    return [f"{size / unit:.2f} {name}" for size in sizes]


def _place_experts(experts: int, gate_up: Tensor, down: Tensor, upper: Tensor, lower: Tensor) -> Placed:
    """Registers both arenas of a mixture, as `place`; `upper` and `lower` are their escape lists."""
    runtime = _runtime(gate_up.device)
    upper, lower = _padded_copy(upper, gate_up.device), _padded_copy(lower, gate_up.device)
    with torch.cuda.device(gate_up.device):
        torch.cuda.current_stream().synchronize()
        operands = (_memory(gate_up), _memory(upper)), (_memory(down), _memory(lower))
        mixture = runtime.register_experts(*operands, experts)
    return Placed(functools.partial(_place_experts, experts), (gate_up, down), (upper, lower), mixture=mixture)


def unpack_experts(gate_up: Tensor, down: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Returns `gate_up` and `down` as passed to `pack_experts`, bit for bit, from its arenas. Raises `ValueError` if
    they are not those of `experts` experts, and the errors of `unpack`."""
    upper, lower = unpack(gate_up), unpack(down)
    (rows, hidden), intermediate = upper.shape, lower.shape[1]
    if experts < 1 or rows % (2 * _GATE_ROWS * experts) or lower.shape[0] != experts * hidden:
        raise ValueError(f"arenas of {list(upper.shape)} and {list(lower.shape)} do not hold {experts} experts")
    interleaved = upper.view(experts, rows // experts // 2 // _GATE_ROWS, 2, _GATE_ROWS, hidden).transpose(1, 2)
    return interleaved.reshape(experts, rows // experts, hidden), lower.view(experts, hidden, intermediate)


def unpack(arena: Tensor) -> Tensor:
    """Returns the BF16 matrix `[n, k]` of an arena (uint8 `[bytes]`), bit for bit, on its device.

    Raises `ValueError` if `arena` is not an arena, and `UnweightError` if its escape lists are gone or, on a GPU, it is
    not registered.
    """
    _check_arena(arena)
    if arena.device.type == "cuda":
        runtime = _runtime(arena.device)
        # The name keeps the registration alive until the weights are unpacked.
        registered = None if runtime.is_registered(arena.data_ptr()) else _register_copy(arena)
        with torch.cuda.device(arena.device):
            weight = torch.empty(runtime.shape(arena.data_ptr()), dtype=torch.bfloat16, device=arena.device)
            torch.cuda.current_stream().synchronize()
            runtime.unpack(arena.data_ptr(), _memory(weight))
        del registered
        return weight
    if arena.device.type != "cpu":
        raise ValueError(f"an arena must be on the CPU or on an NVIDIA GPU, got one on {arena.device}")
    n, k, nbytes, digest = _native.arena_head(*_memory(arena))
    lists = (0, 0)
    if nbytes:
        escapes = _escapes_by_digest.get((arena.device, digest))
        if escapes is None:
            raise UnweightError(
                f"the escapes of an arena [{n}, {k}] were freed; keep the `escapes` that pack() returned as long as "
                "the arena"
            )
        lists = _memory(escapes.data)
    if lists[1] != nbytes:
        raise UnweightError(f"an arena [{n}, {k}] needs {nbytes} bytes of escapes, but those found have {lists[1]}")
    weight = torch.empty(n, k, dtype=torch.bfloat16)
    _native.unpack(_memory(arena), lists, _memory(weight))
    return weight


def _check(x: Tensor, arena: Tensor, bias: Optional[Tensor]) -> None:
    if x.dtype != torch.bfloat16:
        raise ValueError(
            f"unweight::linear expects x in bfloat16, got {x.dtype}; convert it, or run the model in bfloat16"
        )
    if arena.dtype != torch.uint8:
        raise ValueError(f"unweight::linear expects an arena in uint8, got {arena.dtype}; was the model converted?")
    if bias is not None and bias.dtype != torch.bfloat16:
        raise ValueError(f"unweight::linear expects a bias in bfloat16, got {bias.dtype}")


def _cpu(
    x: Tensor, arena: Tensor, n: int, bias: Optional[Tensor] = None, product: Callable[..., Tensor] = F.linear
) -> Tensor:
    _check(x, arena, bias)
    weight = unpack(arena)
    if weight.shape[0] != n or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weights are {list(weight.shape)}, but n is {n} and x has {x.shape[-1]} columns")
    # The operator declares BF16 output, so autocast must not change it; the GPU path is not subject to autocast.
    with torch.autocast("cpu", enabled=False):
        return product(x, weight, bias).contiguous()


def _cuda(x: Tensor, arena: Tensor, n: int, bias: Optional[Tensor] = None) -> Tensor:
    _check(x, arena, bias)
    device = x.device
    if arena.device != device:
        raise ValueError(f"unweight::linear expects x and the arena on one device, got {device} and {arena.device}")
    if torch.cuda.current_device() != device.index:
        # The runtime changes the current device; the context manager restores it.
        with torch.cuda.device(device):
            return _cuda(x, arena, n, bias)
    runtime, at, k = _runtime(device), arena.data_ptr(), x.shape[-1]
    rows = x.reshape(-1, k).contiguous()
    if rows.data_ptr() % 16:
        # Kernels need 16-byte alignment.
        rows = rows.clone()
    m, add = rows.shape[0], bias is not None
    registered: Optional[Placed] = None
    try:
        scratch_nbytes = runtime.scratch_nbytes(at, m, (n, k), add)
    except UnweightError:
        # The name keeps the registration alive until the launch is enqueued.
        registered = None if runtime.is_registered(at) else _register_copy(arena)
        if registered is None:
            raise
        scratch_nbytes = runtime.scratch_nbytes(at, m, (n, k), add)
    y = x.new_empty(m, n)
    # The kernel adds before it rounds, so there is one rounding.
    bias_at = None if bias is None else 0
    if bias is not None:
        if bias.device == device and bias.shape == (n,) and not bias.is_neg() and runtime.takes_bias(at, m):
            # Aligned as x. The name keeps a copy alive until the launch is enqueued.
            bias = bias.contiguous()
            bias = bias.clone() if bias.data_ptr() % 16 else bias
            bias_at = bias.data_ptr()
        else:
            y.copy_(bias)
    scratch = (0, 0)
    if scratch_nbytes:
        # The name keeps it alive until the launch is enqueued; the allocator orders its reuse after the launch.
        buffer = torch.empty(scratch_nbytes, dtype=torch.uint8, device=device)
        scratch = _memory(buffer)
    memory = (rows.data_ptr(), m, y.data_ptr())
    runtime.linear(at, memory, scratch, torch.cuda.current_stream().cuda_stream, bias_at)
    return y.view(*x.shape[:-1], n)


def _check_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: int) -> None:
    if experts < 1:
        raise ValueError(f"unweight::experts expects at least 1 expert, got {experts}")
    if ids.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        raise ValueError(f"unweight::experts expects ids of an integer type, got {ids.dtype}")
    if x.dtype != torch.bfloat16 or x.dim() != 2:
        raise ValueError(f"unweight::experts expects x [tokens, hidden] in bfloat16, got {x.dtype} {list(x.shape)}")
    if ids.dim() != 2 or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"unweight::experts expects ids and weights [tokens, top_k], got {list(ids.shape)} and "
            f"{list(weights.shape)} for x {list(x.shape)}"
        )


@torch.autocast("cpu", enabled=False)
def _experts_cpu(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    _check_experts(x, ids, weights, experts)
    upper, lower = unpack_experts(gate_up, down, experts)
    out = x.new_zeros((x.shape[0], ids.shape[1], x.shape[1]), dtype=torch.float32)
    for expert in ids.unique().tolist():
        if 0 <= expert < experts:
            tokens, slots = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[tokens], upper[expert]).float().chunk(2, dim=-1)
            rows = F.linear((F.silu(gate) * up).to(x.dtype), lower[expert])
            out[tokens, slots] = rows.float() * weights[tokens, slots, None].float()
    # Summed in float32 over the experts of a token, then rounded once.
    return out.sum(dim=1).to(x.dtype)


def _experts_cuda(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    _check_experts(x, ids, weights, experts)
    device = x.device
    if not gate_up.device == down.device == ids.device == weights.device == device:
        raise ValueError("unweight::experts expects all operands on one device")
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return _experts_cuda(x, gate_up, down, ids, weights, experts)
    runtime, arenas = _runtime(device), (gate_up.data_ptr(), down.data_ptr())
    rows = x.contiguous()
    if rows.data_ptr() % 16:
        rows = rows.clone()
    ids, weights = ids.to(torch.int32).contiguous(), weights.to(torch.float32).contiguous()
    (m, hidden), top_k = rows.shape, ids.shape[1]
    nbytes = runtime.experts_scratch_nbytes(arenas, m, hidden, top_k, experts)
    y = torch.empty_like(rows)
    # The name keeps it alive until the launches are enqueued; the allocator orders its reuse after them.
    scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
    routed = (ids.data_ptr(), weights.data_ptr(), top_k)
    stream = torch.cuda.current_stream().cuda_stream
    runtime.experts(arenas, (rows.data_ptr(), m, y.data_ptr()), routed, _memory(scratch), stream)
    return y


def _experts_fake(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    _check_experts(x, ids, weights, experts)
    _check_devices("experts", x, gate_up, down, ids, weights)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake(x: Tensor, arena: Tensor, n: int, bias: Optional[Tensor] = None) -> Tensor:
    _check(x, arena, bias)
    _check_devices("linear", x, arena, bias)
    return x.new_empty(*x.shape[:-1], n)


def _check_devices(name: str, x: Tensor, *others: Optional[Tensor]) -> None:
    """Raises `ValueError` unless all operands are on one device. A meta tensor among real ones would give garbage."""
    for other in others:
        if other is not None and other.device != x.device:
            raise ValueError(
                f"unweight::{name} expects all operands on one device, got {x.device} and {other.device}; were weights "
                "left out when the model was loaded?"
            )


_library.impl("experts", _experts_cpu, "CPU")
_library.impl("experts", _experts_cuda, "CUDA")
torch.library.register_fake("unweight::experts", _experts_fake, lib=_library)
_refuse_derivatives(_library, "experts")
_library.impl("linear", _cpu, "CPU")
_library.impl("linear", _cuda, "CUDA")
torch.library.register_fake("unweight::linear", _fake, lib=_library)
_refuse_derivatives(_library, "linear")


def _linear(x: Tensor, arena: Tensor, n: int, bias: Optional[Tensor]) -> Tensor:
    """Calls the operator. If nothing observes it, bypasses the dispatcher, which takes longer than a small matmul."""
    if not _is_watched() and type(x) is Tensor and x.is_cuda and not x.is_neg():
        return _cuda(x, arena, n, bias)
    return torch.ops.unweight.linear(x, arena, n, bias)


def linear(x: Tensor, packed: Packed, bias: Optional[Tensor] = None) -> Tensor:
    """Returns `x @ weight.T + bias`, bfloat16 `[..., n]`, for a packed weight `[n, k]`.

    `x` is bfloat16 `[..., k]`, `bias` bfloat16 `[n]` or `None`, both on the arena's device. Raises `ValueError` for
    other dtypes, shapes or devices, `UnweightError` as `unpack`, and `NotImplementedError` for derivatives.
    """
    return _linear(x, packed.arena, packed.n, bias)


class _PackedState:
    """What modules with one packed weight share, a base class next to `nn.Module`: the arena and its escape lists."""

    weight_packed: Tensor
    bias: Optional[nn.Parameter]
    _escapes: Union[Escapes, Placed, None] = None
    _n = 0

    @property
    def is_packed(self) -> bool:
        """Whether the weight is packed."""
        return self._escapes is not None

    def unpacked(self) -> Tensor:
        """Returns the weight `[n, k]`, bit for bit, on its device."""
        return unpack(self.weight_packed) if self.is_packed else self.weight.detach()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._use_arena()
        return self

    def _use_arena(self) -> None:
        """Keeps the object that belongs to the arena, which may have been moved, such as by `to`."""
        if self._escapes is not None:
            self._escapes = _holder_of_moved(self.weight_packed, self._escapes)

    def extra_repr(self) -> str:
        state = "packed" if self.is_packed else "not packed"
        has_bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}, {state}"


class Linear(_PackedState, nn.Module):
    """A linear layer whose weight can be packed; until `pack()` succeeds, it computes as `nn.Linear`.

    `Linear(linear)` shares the parameters of an `nn.Linear`. A packed layer has the arena as its buffer `weight_packed`
    and no parameter `weight`. It refuses `state_dict` and `load_state_dict` with `NotImplementedError`.
    """

    weight: Optional[nn.Parameter]

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("weight", linear.weight)
        self.register_parameter("bias", linear.bias)

    def pack(self, weight: Optional[Tensor] = None) -> bool:
        """Replaces the layer's weight by its packed encoding, or by that of `weight`, bfloat16 `[n, k]`.

        Returns false, and changes nothing, if the matrix cannot be packed. Raises `ValueError` if the layer is packed
        already, and the errors of the function `pack`.
        """
        if self.is_packed:
            raise ValueError("the weight of this layer is already packed; create another Linear to pack another weight")
        packed = pack(self.weight if weight is None else weight)
        if packed is None:
            return False
        # `_escapes` decides which weight is used, so an interrupt leaves a layer that works.
        self._n = packed.n
        self.register_buffer("weight_packed", packed.arena)
        self._escapes = packed.escapes
        # Deleted rather than None, so that an access raises AttributeError.
        del self.weight
        return True

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _refuse_state(self.is_packed or f"{prefix}weight_packed" in state_dict)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        _refuse_state(self.is_packed)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def forward(self, x: Tensor) -> Tensor:
        if self._escapes is None:
            return F.linear(x, self.weight, self.bias)
        return _linear(x, self.weight_packed, self._n, self.bias)


def _refuse_state(is_packed: bool) -> None:
    if is_packed:
        raise NotImplementedError(
            "packed weights have no state_dict, because it would lack their escape lists; copy the bundle instead, or "
            "the module with torch.save or copy.deepcopy"
        )


_INDEX_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Experts(nn.Module):
    """Packed matrices of one shape, such as those of a layer's experts, each with its own exponent window.

    `len()` is the number of matrices. It refuses `state_dict` and `load_state_dict` with `NotImplementedError`.
    """

    arenas: Tensor
    """uint8 `[experts, bytes]`: one arena per matrix."""

    def __init__(self, arenas: Tensor, escapes: list[Tensor], n: int, k: int) -> None:
        super().__init__()
        self.register_buffer("arenas", arenas)
        self.n, self.k = n, k
        self._escapes = [_holder(arena, data) for arena, data in zip(arenas, escapes)]

    @classmethod
    def of(cls, weights: Tensor) -> Optional[Experts]:
        """Packs BF16 `[experts, n, k]` on its device; returns `None` if one of the matrices cannot be packed. Raises
        `ValueError` if `weights` has another rank, and the errors of `pack`."""
        experts = cls._of(weights)
        return None if isinstance(experts, str) else experts

    @classmethod
    def _of(cls, weights: Tensor) -> Union[Experts, str]:
        """Packs experts as `of`; returns the reason if one of them cannot be packed."""
        if weights.dim() != 3:
            raise ValueError(f"Experts.of expects weights [experts, n, k], got {list(weights.shape)}")
        arenas: Optional[Tensor] = None
        escapes = []
        for index, weight in enumerate(weights):
            packed = _pack(weight)
            if isinstance(packed, str):
                return f"expert {index}: {packed}"
            if arenas is None:
                arenas = packed.arena.new_empty(len(weights), packed.arena.nbytes)
            arenas[index].copy_(packed.arena)
            escapes.append(packed.escapes.data)
        return "there are no experts" if arenas is None else cls(arenas, escapes, *weights.shape[1:])

    def linear(self, x: Tensor, expert: int) -> Tensor:
        """Returns `x @ weight.T`, bfloat16 `[..., n]`, for x `[..., k]` and the matrix with index `expert`."""
        return _linear(x, self.arenas[expert], self.n, None)

    def __getitem__(self, expert: Any) -> Tensor:
        """Returns `unpacked(expert)`, as a model expects that indexes its weights `[experts, n, k]`."""
        # A tensor as an index would copy the arena.
        is_whole = not isinstance(expert, (bool, Tensor)) or (
            isinstance(expert, Tensor) and expert.dim() == 0 and expert.dtype in _INDEX_TYPES
        )
        try:
            expert = operator.index(expert) if is_whole else None
        except TypeError:
            expert = None
        if expert is None:
            raise TypeError(
                "packed experts are indexed by one whole number; in transformers, call "
                "model.set_experts_implementation('eager'), which takes one after another"
            )
        return self.unpacked(expert)

    def _load_from_state_dict(self, *_: Any) -> None:
        _refuse_state(True)

    def _save_to_state_dict(self, *_: Any) -> None:
        _refuse_state(True)

    def unpacked(self, expert: int) -> Tensor:
        """Returns the BF16 matrix `[n, k]` with index `expert`, bit for bit."""
        return unpack(self.arenas[expert])

    def __len__(self) -> int:
        return len(self.arenas)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Experts:
        super()._apply(fn, recurse)
        # They may have been moved, such as by `to`.
        self._escapes = [_holder_of_moved(arena, holder) for arena, holder in zip(self.arenas, self._escapes)]
        return self

    def extra_repr(self) -> str:
        return f"experts={len(self)}, in_features={self.k}, out_features={self.n}, packed"

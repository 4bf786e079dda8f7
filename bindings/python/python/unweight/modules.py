"""Packs the linear layers of any torch module in place: `unweight.pack_model`.

A packed layer stays the same object with the same hooks and parents. Its class changes to a subclass of its own class,
which has the arena as the buffer `weight_packed` and a read-only property `weight`: a tensor without memory of its
own that unpacks when it is used. So code that reads `layer.weight.dtype`, passes `layer.weight` to `F.linear`, or tests
`isinstance(layer, nn.Linear)` works as before.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import warnings
from typing import TYPE_CHECKING, Any, Iterator, Mapping, NamedTuple, Optional, Protocol, Sequence, Union

from ._extras import require

require("torch", "torch")

import torch  # noqa: E402
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ._arena import _holder, _holder_of_moved, _lists_of
from ._devices import _as_device, why_not
from ._dispatch import _with_memory
from ._part import _Fixed
from ._update import _ascending, _pack_into, _update_in_place, _with_elements
from .errors import UnweightError
from .ops import _SHAPE, Escapes, Placed, _linear, _pack, _PackedState, _sizes

if TYPE_CHECKING:
    from ._offload import Offload

__all__ = ["LayerReport", "ModelReport", "PackedLinear", "PackedWeight", "pack_model", "update_sparse_"]


class LayerReport(NamedTuple):
    """The result for one linear layer, or for a mixture's experts that are not linear layers."""

    name: str
    """The name of the layer in the module; empty for the module itself."""
    bytes_before: int
    """The bytes of its BF16 weights; 0 if another layer that shares the weight has them."""
    bytes_after: int
    """The bytes of its packed weight with the escape lists; `bytes_before` if it stays as it is."""
    reason: Optional[str]
    """Why it is not packed; `None` if it is."""


class ModelReport(NamedTuple):
    """The result of `pack_model`. `str()` is a summary in one line."""

    layers: tuple[LayerReport, ...]
    """One report for each linear layer, in the order of `named_modules()`, then one for each module of experts."""
    bytes_before: int
    """The bytes of all parameters and buffers of the module before packing."""
    bytes_after: int
    """The bytes of all parameters, buffers and escape lists after packing."""

    @property
    def packed(self) -> list[str]:
        """The names of the packed layers."""
        return [layer.name for layer in self.layers if layer.reason is None]

    @property
    def kept(self) -> dict[str, str]:
        """The names of the layers that stay as they are, with the reasons."""
        return {layer.name: layer.reason for layer in self.layers if layer.reason is not None}

    def __str__(self) -> str:
        packed, kept = len(self.packed), len(self.kept)
        before, after = _sizes(self.bytes_before, self.bytes_after)
        return f"{packed} layers packed, {kept} kept; {before} before, {after} after"


class PackedWeight(_Fixed):
    """The weight of a packed layer, BF16 `[n, k]`, without memory of its own.

    Its shape, dtype and device are those of the weight. `F.linear` multiplies by the packed weight. Any other operation
    unpacks for this one use. It cannot be changed in place.
    """

    _layer: PackedLinear
    _instead = "replace it with update_(), or change it before packing"

    @staticmethod
    def __new__(cls, layer: PackedLinear) -> PackedWeight:
        shape = (layer.out_features, layer.in_features)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=layer._runs_on)
        self._layer, self._what = layer, f"the weight of {layer._describe()} is packed"
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def read(self) -> Tensor:
        """Returns the BF16 weight as a plain tensor."""
        return self._layer._unpacked_where_run()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Optional[dict[str, Any]] = None
    ) -> Any:
        if func is F.linear:
            return _product(*args, **(kwargs or {}))
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"PackedWeight({list(self.shape)}, device='{self.device}')"


def _product(input: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """`F.linear` with a `PackedWeight` among its operands."""
    if isinstance(weight, PackedWeight) and not isinstance(input, _Fixed) and not isinstance(bias, _Fixed):
        return weight._layer._multiply(input, bias)
    plain = (one.read() if isinstance(one, _Fixed) else one for one in (input, weight, bias))
    return F.linear(*plain)


def _autocast_dtype(device: str) -> Optional[torch.dtype]:
    """Returns the dtype to which autocast converts operands of `F.linear`; `None` if it is off."""
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


class _Held:
    """An arena and the object to keep with it, for all layers that share it. A copy has only the escape lists, until
    the first of its layers uses the copied arena."""

    __slots__ = ("arena", "holder", "lists", "is_offloaded", "address")

    def __init__(
        self, arena: Optional[Tensor], holder: Union[Escapes, Placed, None], lists: Optional[Tensor] = None
    ) -> None:
        self.arena, self.holder, self.lists = arena, holder, lists
        self.address = None if arena is None else arena.data_ptr()
        self.is_offloaded = False
        """Whether one of these layers was offloaded: it has a copy, which an update would not reach."""

    def __reduce__(self) -> tuple[Any, ...]:
        if self.holder is None or self.arena is None:
            return _Held, (None, None, self.lists)
        return _Held, (None, None, _lists_of(self.arena, self.holder))

    def use(self, arena: Tensor) -> Tensor:
        """Returns the arena to use for a layer that has `arena`, which may have been copied or moved."""
        if not self.holds(arena):
            if self.arena is not None and self.arena is not arena and self.arena.device == arena.device:
                # Another layer was moved first.
                return self.use(self.arena)
            before = self.holder
            self.holder = _holder(arena, self.lists) if before is None else _holder_of_moved(arena, before)
            self.arena, self.lists, self.address = arena, None, arena.data_ptr()
        return arena

    def holds(self, arena: Tensor) -> bool:
        """Returns whether this is the arena, with the memory that it had: `arena.data` may be assigned."""
        return arena is self.arena and arena.data_ptr() == self.address


class PackedLinear(_PackedState, nn.Linear):
    """An `nn.Linear` whose weight is packed; `pack_model` changes the class of layers to it, or to a subclass.

    It computes what the BF16 layer computes, on the CPU bit for bit. Without BF16 operands, such as under autocast to
    float16, it unpacks the weight for the call. There is no backward. `state_dict` has a copy of the BF16 weight.
    `load_state_dict` packs a new one, and rounds other dtypes to BF16, as it does for a BF16 `nn.Linear`.
    """

    weight_packed: Tensor
    """The arena, uint8 `[bytes]`, a buffer; absent if the layer is offloaded."""
    _held: _Held
    _offload: Optional[Offload] = None
    _layer_name = ""

    def _use_arena(self) -> None:
        """Registers the arena, or takes that of a layer that shares it, if it was copied or moved."""
        arena = self._buffers.get("weight_packed")
        # That of an offloaded layer is elsewhere.
        if arena is not None and not self._held.holds(arena):
            self._buffers["weight_packed"] = self._held.use(arena)

    @property
    def _escapes(self) -> Union[Escapes, Placed, None]:  # type: ignore[override]
        self._use_arena()
        return self._held.holder

    @property
    def weight(self) -> PackedWeight:  # type: ignore[override]
        """The BF16 weight `[n, k]`, unpacked when it is used; read-only. `update_` replaces it."""
        return PackedWeight(self)

    @property
    def _runs_on(self) -> torch.device:
        """The device that the layer runs on."""
        return self.weight_packed.device if self._offload is None else self._offload.device

    def _describe(self) -> str:
        return f"layer '{self._layer_name}'" if self._layer_name else "this layer"

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.bias)

    def _multiply(self, x: Tensor, bias: Optional[Tensor]) -> Tensor:
        autocast = _autocast_dtype(x.device.type)
        dtypes = (torch.bfloat16,) if autocast is None else (torch.bfloat16, torch.float16, torch.float32)
        is_cast = autocast is None or autocast is torch.bfloat16
        if not is_cast or x.dtype not in dtypes or bias is not None and bias.dtype not in dtypes:
            # As nn.Linear, including its error.
            return F.linear(x, self._unpacked_where_run(), bias)
        bias = None if bias is None else bias.to(torch.bfloat16)
        return _linear(x.to(torch.bfloat16), self._arena(), self._n, bias)

    def _arena(self) -> Tensor:
        """Returns the arena on the device that the layer runs on."""
        if self._offload is not None:
            return self._offload.arena(self)
        # A compiled module's arena is in use already.
        if not torch.compiler.is_compiling():
            self._use_arena()
        return self.weight_packed

    def _refuse_change(self) -> None:
        """Raises `NotImplementedError` if the weight is offloaded, also for another layer that shares it."""
        if self._offload is not None or self._held.is_offloaded:
            shares = "" if self._offload is not None else "shares its weight with a layer that "
            raise NotImplementedError(
                f"{self._describe()} {shares}is offloaded: its weight cannot be replaced; pack it again"
            )

    def _unpacked_where_run(self) -> Tensor:
        return self.unpacked() if self._offload is None else self._offload.unpacked(self)

    def unpacked(self) -> Tensor:
        """Returns the BF16 weight `[n, k]`, bit for bit, on its device: the CPU if the layer is offloaded."""
        return super().unpacked() if self._offload is None else self._offload.unpacked_on_cpu(self)

    def update_(self, weight: Tensor) -> bool:
        """Replaces the weight by another, bfloat16 `[n, k]` on any device, and compares the packed bits with it.

        Returns whether CUDA graphs that have captured this layer stay valid. They do unless the exponent window changes
        or the escape lists outgrow their room, a quarter more than before; then capture them again. No work with this
        layer may run meanwhile. Raises `ValueError`, and changes nothing, if `weight` has another shape or dtype or
        cannot be packed, `TypeError` if it is not a tensor, and `NotImplementedError` if the layer is offloaded.
        """
        self._refuse_change()
        if not isinstance(weight, Tensor):
            raise TypeError(f"the weight of {self._describe()} is a tensor, got {type(weight).__name__}")
        if weight.shape != (self.out_features, self.in_features) or weight.dtype != torch.bfloat16:
            raise ValueError(
                f"the weight of {self._describe()} is bfloat16 {[self.out_features, self.in_features]}, got "
                f"{weight.dtype} {list(weight.shape)}"
            )
        arena, holder = self._registered()
        packed = _pack_into(arena, holder, weight.to(arena.device), self._keep)
        if isinstance(packed, str):
            raise ValueError(
                f"the new weight of {self._describe()} cannot be packed: {packed}; the layer keeps its old weight; to "
                "replace it by a BF16 layer, load the module in BF16 and pack it again"
            )
        return packed

    def _keep(self, escapes: Escapes) -> None:
        self._held.holder = escapes

    def update_sparse_(self, index: Tensor, values: Tensor) -> bool:
        """Replaces some elements of the weight; the others keep their bits. Returns and raises the same as `update_`.

        `index` is an integer tensor `[m]` of positions in the flattened weight, `values` is bfloat16 `[m]`. The last
        value of a repeated position counts. Positions that ascend are fastest. On a GPU, only the touched parts of the
        arena change, unless the exponent window or the room for escapes does. Raises `ValueError` for other shapes and
        dtypes, `TypeError` for other types, and `IndexError` for a position outside of the weight.
        """
        return _update_layers([self._sparse(index, values)])

    def _sparse(self, index: Tensor, values: Tensor) -> tuple[PackedLinear, Tensor, Tensor]:
        """Checks new elements, except their positions, and moves them to the device of the arena."""
        self._refuse_change()
        elements = _elements(index, values, torch.bfloat16, f"sparse weights of {self._describe()}")
        return self, *_moved(*elements, self.weight_packed.device)

    def _registered(self) -> tuple[Tensor, Union[Escapes, Placed]]:
        """Returns the arena without history, and the object to keep with it."""
        holder = self._escapes
        return self.weight_packed.data, holder

    def _sparse_what(self) -> tuple[int, str, str]:
        """Returns the elements of the weight, and what errors call the positions and the weight."""
        return self.out_features * self.in_features, f"sparse weights of {self._describe()}", "weight"

    def _update_sparse_whole(self, index: Tensor, values: Tensor) -> bool:
        """Unpacks the weight, replaces elements at checked positions and packs it again."""
        return self.update_(_with_elements(self.unpacked(), index, values))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.unpacked()
        # Without the arena, a buffer that is not persistent.
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}weight"
        rest = {name: value for name, value in state_dict.items() if name.startswith(prefix) and name != key}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        # The arena stays; the new weight is packed into it.
        if key in state_dict:
            try:
                if not self.update_(_as_loaded(state_dict[key], local_metadata)):
                    warnings.warn(
                        f"the new weight of {self._describe()} has another exponent window or more escapes than there "
                        "was room for: capture CUDA graphs with this layer again",
                        stacklevel=2,
                    )
            except (TypeError, ValueError, NotImplementedError) as error:
                error_msgs.append(f'while packing the parameter named "{key}": {error}')
        elif strict:
            missing_keys.append(key)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(f"the weight of {self._describe()} is packed; replace it with update_(weight)")
        super().__setattr__(name, value)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return _empty_layer, (type(self)._class_before,), self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._use_arena()

    _class_before: type[nn.Linear] = nn.Linear
    """The class before packing."""


def _as_loaded(weight: Any, local_metadata: Mapping[str, Any]) -> Tensor:
    """Returns a weight of a state_dict as `load_state_dict` stores it: in BF16, but with `assign` in its own dtype."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"expected a tensor, got {type(weight).__name__}")
    return weight if local_metadata.get("assign_to_params_buffers", False) else weight.to(torch.bfloat16)


@functools.cache
def _packed_class(before: type[nn.Linear]) -> type[PackedLinear]:
    """Returns the class of packed layers of a class."""
    if before is nn.Linear:
        return PackedLinear
    members: dict[str, Any] = {"_class_before": before, "__module__": before.__module__, "__doc__": before.__doc__}
    if before.forward is not nn.Linear.forward:
        # Its own forward gets the weight from the property.
        members["forward"] = before.forward
    return type(f"Packed{before.__name__}", (PackedLinear, before), members)


def _empty_layer(before: type[nn.Linear]) -> PackedLinear:
    made = _packed_class(before)
    return made.__new__(made)


def _become_packed(layer: nn.Linear, held: _Held, name: str) -> None:
    """Changes a layer to a packed one with this arena."""
    packed_class, parameters = _packed_class(type(layer)), layer._parameters
    layer._held, layer._n, layer._layer_name = held, layer.out_features, name
    layer.register_buffer("weight_packed", held.arena, persistent=False)
    try:
        layer.__class__ = packed_class
    finally:
        # Also after an interrupt, or where the class has another layout: one weight stays.
        if type(layer) is packed_class:
            del parameters["weight"]
        else:
            del layer.weight_packed, layer._held, layer._n, layer._layer_name


class _Updated(Protocol):
    """A packed weight whose elements can be replaced: a `PackedLinear`, or that of a layer of a running vLLM engine."""

    weight_packed: Tensor
    _held: Any
    """The same object for layers that share the weight."""

    def _describe(self) -> str: ...
    def _sparse(self, index: Tensor, values: Tensor) -> tuple[_Updated, Tensor, Tensor]: ...
    def _registered(self) -> tuple[Tensor, Union[Escapes, Placed]]: ...
    def _sparse_what(self) -> tuple[int, str, str]: ...
    def _update_sparse_whole(self, index: Tensor, values: Tensor) -> bool: ...


def _without_adapters(layer: nn.Module) -> nn.Module:
    """Returns the layer that one of vLLM with adapters contains; another layer itself."""
    return getattr(layer, "base_layer", layer)


def _packed_in(layer: nn.Module) -> Optional[_Updated]:
    """Returns the packed weight of a layer, or `None` if it has none."""
    if isinstance(layer, PackedLinear):
        return layer
    layer = _without_adapters(layer)
    of = getattr(getattr(layer, "quant_method", None), "unweight_packed_in", None)
    return None if of is None else of(layer)


def _update_layers(updates: list[tuple[_Updated, Tensor, Tensor]]) -> bool:
    """Replaces elements of layers, each listed once; returns whether captured CUDA graphs stay valid."""
    by_device: dict[torch.device, list[tuple[_Updated, Tensor, Tensor]]] = {}
    for update in updates:
        if update[1].numel() != 0:
            by_device.setdefault(update[0].weight_packed.device, []).append(update)
    for device, rest in by_device.items():
        # Before anything changes; the kernels of one GPU check by themselves.
        for layer, index, _ in rest if device.type != "cuda" or len(by_device) > 1 else ():
            _check_positions(index, *layer._sparse_what())
    is_valid = True
    for device, rest in by_device.items():
        if device.type == "cuda":
            done = _update_in_place([(*layer._registered(), *one) for layer, *one in rest])
            for (layer, index, _), what in zip(rest, done):
                if what == "outside":
                    raise _outside(index, *layer._sparse_what())
                if what == "whole":
                    _check_positions(index, *layer._sparse_what())
                if what == "differs":
                    raise UnweightError(f"{layer._describe()}: new weights were packed wrongly: please report this bug")
            rest = [update for update, what in zip(rest, done) if what == "whole"]
        for layer, index, values in rest:
            is_valid &= layer._update_sparse_whole(index, values)
    return is_valid


def update_sparse_(module: nn.Module, updates: Mapping[str, tuple[Tensor, Tensor]]) -> bool:
    """Replaces some elements of weights of a module; the others keep their bits. On a GPU, packed layers are updated
    together, which takes less time than one after another.

    Args:
        module: a module whose layers `pack_model` has packed, or the model of a running vLLM engine.
        updates: for names of parameters as in `state_dict()`, an integer index `[m]` into the flattened parameter and
            the new values `[m]`, as for `PackedLinear.update_sparse_`. Parameters that are not packed change in place.
            A vLLM model has names of its own, such as `qkv_proj.weight` with the rows of q, k and v; a tied head has
            that of the embedding.

    Returns:
        Whether CUDA graphs that have captured the layers stay valid, as `PackedLinear.update_` says.

    Raises:
        KeyError: the module has no such parameter, or it belongs to packed experts.
        TypeError: an index or values are not tensors.
        ValueError: wrong shapes or dtypes, or elements that cannot be replaced in place, which changes nothing; or a
            new weight cannot be packed, or not for the CUDA graphs of vLLM: its layer keeps the old one, like layers
            after it and parameters that are not packed; layers before it have changed.
        IndexError: a position is outside of its parameter; nothing has changed.
        NotImplementedError: a layer is offloaded, or of vLLM: in tensor parallelism, a head next to adapters, one of
            which attention keeps products (`kv_b_proj`), or on the CPU not packed.
    """
    packed: dict[int, tuple[_Updated, Tensor, Tensor]] = {}
    plain = []
    for key, (index, values) in updates.items():
        name, _, leaf = key.rpartition(".")
        try:
            packed_in = _packed_in(owner := module.get_submodule(name))
            parameter = None if packed_in is not None and leaf == "weight" else owner.get_parameter(leaf)
        except AttributeError as error:
            raise KeyError(f"the module has no parameter '{key}'") from error
        if leaf.endswith("weight_packed") and (packed_in is not None or hasattr(owner, "unweight_packed")):
            raise KeyError(f"'{key}' is an arena; name the weight")
        if name.rpartition(".")[2] == "kv_b_proj" and hasattr(_without_adapters(owner), "quant_method"):
            # Of MLA in vLLM: it multiplies by copies of parts of this weight, which only loading renews.
            raise NotImplementedError(f"attention keeps copies of '{key}': pass it to load_weights")
        if parameter is not None:
            if _may_be_copied(owner, parameter):
                raise NotImplementedError(
                    f"'{key}' is not packed, and vLLM's CPU kernels may use a copy of it: pass it to load_weights"
                )
            index, values = _elements(index, values, parameter.dtype, what := f"sparse values of '{key}'")
            _check_positions(index, parameter.numel(), what, "parameter")
            _check_memory(parameter, key)
            plain.append((parameter, *_ascending(*_moved(index, values, parameter.device))))
        elif id(packed_in._held) in packed:
            raise ValueError(f"'{key}' shares its weight with another layer of the update; name one of them")
        else:
            packed[id(packed_in._held)] = packed_in._sparse(index, values)
    is_valid = _update_layers(list(packed.values()))
    # In inference mode, tensors that were made in it may be changed, too.
    with torch.inference_mode():
        for parameter, index, values in plain:
            bits = _BITS[parameter.element_size()]
            # `put_` takes flat positions also if the parameter is not contiguous.
            parameter.data.view(bits).put_(index, values.view(bits))
    return is_valid


def _may_be_copied(owner: nn.Module, parameter: Tensor) -> bool:
    """Returns whether vLLM's CPU kernels may use a copy of a parameter, or another layout: they do for layers with a
    method that is not ours."""
    method = getattr(_without_adapters(owner), "quant_method", None)
    return parameter.device.type == "cpu" and method is not None and not hasattr(method, "unweight_packed_in")


# Integers as wide as the elements of a parameter: `put_` does not take every dtype.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _check_memory(parameter: Tensor, key: str) -> None:
    """Raises `ValueError` if the elements of a parameter that is not packed cannot be replaced in place."""
    tensor = parameter.data
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type != "meta"
    if not is_plain or torch._debug_has_internal_overlap(tensor) == 1 or tensor.element_size() not in _BITS:
        raise ValueError(
            f"'{key}' is a {tensor.dtype} {type(tensor).__name__} on {tensor.device} without memory of its own for "
            "each element: replace it as a whole"
        )


def _elements(index: Tensor, values: Tensor, dtype: torch.dtype, what: str) -> tuple[Tensor, Tensor]:
    """Returns positions and as many values of a dtype, as tensors with memory; raises `ValueError` for others."""
    for one in (index, values):
        if not isinstance(one, Tensor):
            raise TypeError(f"{what} are two tensors, an index and values, got {type(one).__name__}")
    is_integer = not index.is_floating_point() and not index.is_complex() and index.dtype != torch.bool
    if index.dim() != 1 or index.shape != values.shape or not is_integer or values.dtype != dtype:
        raise ValueError(
            f"{what} are an integer index [m] and {str(dtype).removeprefix('torch.')} values [m], got {index.dtype} "
            f"{list(index.shape)} and {values.dtype} {list(values.shape)}"
        )
    index, values = (_with_memory(one.detach()).resolve_neg().resolve_conj() for one in (index, values))
    return index, values


def _moved(index: Tensor, values: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    return index.to(device, torch.int64).contiguous(), values.to(device).contiguous()


def _check_positions(index: Tensor, numel: int, what: str, flattened: str) -> None:
    """Raises `IndexError` if a position is outside of a flattened parameter."""
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < numel:
        raise _outside(index, numel, what, flattened)


def _outside(index: Tensor, numel: int, what: str, flattened: str) -> IndexError:
    bounds = f"positions {int(index.min())} to {int(index.max())}"
    return IndexError(f"{what} have {bounds}, but the {flattened} has {numel} elements")


def _reason_to_keep(layer: nn.Linear, others: dict[int, str]) -> Optional[str]:
    """Returns why a layer cannot be packed, as far as is known without packing."""
    if isinstance(layer, PackedLinear):
        return "it is packed already"
    if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention passes its weight to a fused kernel"
    weight = layer._parameters.get("weight")
    if weight is None:
        return "its weight is computed from other parameters (weight_norm, a parametrization or pruning)"
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
        return f"its weight is a {type(weight.data if type(weight) is nn.Parameter else weight).__name__}"
    if weight.dtype != torch.bfloat16:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}, not bfloat16"
    if weight.device.type == "meta":
        return "its weight is on the meta device"
    if weight.layout != torch.strided:
        return f"the layout of its weight is {weight.layout}"
    if weight.shape != (layer.out_features, layer.in_features):
        return f"its weight is {list(weight.shape)}, but the layer is {[layer.out_features, layer.in_features]}"
    if weight.shape[0] % 64 or weight.shape[1] % 64:
        return _SHAPE
    if id(weight) in others:
        return f"it shares its weight with '{others[id(weight)]}', which is not a linear layer"
    return None


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yields all parameters and buffers, and the escape lists and offloaded arenas of packed layers."""
    yield from module.parameters()
    yield from module.buffers()
    for layer in module.modules():
        if isinstance(layer, PackedLinear):
            yield layer._escapes.data
            if layer._offload is not None:
                yield layer._offload.host_arena(layer)


def _nbytes(module: nn.Module) -> int:
    known = (tensor for tensor in _tensors(module) if not is_lazy(tensor))
    seen = {(tensor.device, tensor.data_ptr() or id(tensor)): tensor.nbytes for tensor in known}
    return sum(seen.values())


def pack_model(
    module: nn.Module,
    *,
    device: Union[torch.device, str, int, None] = None,
    exclude: Sequence[str] = (),
    offload: bool = False,
) -> ModelReport:
    """Packs every BF16 `nn.Linear` of a module in place, also subclasses and the module itself.

    Layers that cannot be packed stay as they are, and so do experts that are not `nn.Linear` layers; the report has the
    reasons. The module is for inference afterwards: its parameters have `requires_grad` false, and a backward through a
    packed layer raises `NotImplementedError`. `state_dict()` has the original names and bits; its tensors are copies,
    so writes to them change no packed layer.

    Args:
        module: any module, such as a diffusion transformer, a text encoder or an embedding model.
        device: the device to pack on and to move the module to, layer by layer; `None` packs where each weight is.
        exclude: glob patterns (`*`, `?`) of names of layers to leave as they are. A pattern without a layer warns.
        offload: keep packed weights of blocks in pinned CPU memory. While a block runs, the next one is copied to the
            GPU `device`. Blocks are the elements of each `nn.ModuleList`; everything else stays on the GPU. All calls
            must come from one thread.

    Raises:
        TypeError: `module`, `device` or `exclude` has another type.
        ValueError: `device` is unknown or has no kernels, or a tensor on the meta device cannot be moved to it, or
            `offload` is given without a GPU or without two blocks. The module is unchanged.
        DeviceError: the GPU or NVRTC failed.
    """
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise TypeError(f"pack_model packs an nn.Module, got a {kind}; of a pipeline, pass a part, as its transformer")
    target = None if device is None else _as_device(device)
    if target is not None and (reason := why_not(target)) is not None:
        raise ValueError(f"{reason}; omit device to pack where the weights are")
    if target is not None and target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    if offload and (target is None or target.type != "cuda"):
        raise ValueError(f"offload needs a GPU to copy weights to, got device={device!r}; pass device='cuda'")
    if isinstance(exclude, str):
        raise TypeError(f"exclude is a string; give a list of patterns: [{exclude!r}]")
    if target is not None:
        _refuse_meta(module, target)
    layers = _layers_of(module, tuple(exclude))
    if offload:
        from ._offload import blocks_of, offload_blocks, require_two

        # Checked before anything is packed.
        packable = {id(layer) for _, layer, reason in layers if reason is None}
        require_two(blocks_of(module, lambda part: isinstance(part, PackedLinear) or id(part) in packable))
    before = _nbytes(module)
    reports = _pack_layers(layers, target, offload) + _experts_in(module)
    for parameter in module.parameters():
        if not is_lazy(parameter):
            parameter.requires_grad_(False)
    if offload:
        offload_blocks(module, target)
    if target is not None:
        module.to(target)
    return ModelReport(tuple(reports), before, _nbytes(module))


class _Layer(NamedTuple):
    """A linear layer of a module to pack."""

    name: str
    layer: nn.Linear
    reason: Optional[str]
    """Why it is not packed, as far as is known without packing."""


def _layers_of(module: nn.Module, exclude: Sequence[str]) -> list[_Layer]:
    """Returns the linear layers of a module. Warns if a pattern of `exclude` names none of them."""
    others = {
        id(parameter): name or type(part).__name__
        for name, part in module.named_modules()
        if not isinstance(part, nn.Linear)
        for parameter in part.parameters(recurse=False)
    }
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    # A layer may have several names.
    every = module.named_modules(remove_duplicate=False) if exclude else ()
    names = [(name, id(layer)) for name, layer in every if isinstance(layer, nn.Linear)]
    matched = {pattern: {at for name, at in names if fnmatch.fnmatchcase(name, pattern)} for pattern in exclude}
    for pattern in (pattern for pattern, found in matched.items() if not found):
        warnings.warn(f"exclude={pattern!r} is the name of no linear layer of the module", stacklevel=3)
    excluded = set().union(*matched.values())
    stays = {id(layer._parameters.get("weight")): name for name, layer in layers if id(layer) in excluded}
    found = []
    for name, layer in layers:
        reason = _reason_to_keep(layer, others)
        if reason is None and id(layer) in excluded:
            reason = "excluded"
        if reason is None and (at := id(layer._parameters.get("weight"))) in stays:
            reason = f"it shares its weight with '{stays[at]}', which is excluded"
        found.append(_Layer(name, layer, reason))
    return found


def _pack_layers(layers: Sequence[_Layer], target: Optional[torch.device], to_cpu: bool) -> list[LayerReport]:
    """Packs layers on `target`; with `to_cpu`, moves each to the CPU."""
    # By the id of the weight: the arena of the layers that share it, or why it cannot be packed. An id stays unique,
    # because the weights of all layers existed at once.
    done: dict[int, Union[_Held, str]] = {}
    reports = []
    for name, layer, reason in layers:
        weight = layer._parameters.get("weight")
        nbytes = 0 if weight is None or is_lazy(weight) or id(weight) in done else weight.nbytes
        if reason is None and id(weight) not in done:
            done[id(weight)] = _pack_weight(weight.data, target, to_cpu)
        result = reason or done[id(weight)]
        if not isinstance(result, str):
            try:
                _become_packed(layer, result, name)
            except Exception as error:  # Also what `__init_subclass__` of its class raises.
                result = f"its class cannot be changed: {error}"
        if isinstance(result, str):
            reports.append(LayerReport(name, nbytes, nbytes, result))
        else:
            after = result.arena.nbytes + result.holder.data.nbytes if nbytes else 0
            reports.append(LayerReport(name, nbytes, after, None))
    return reports


def _experts_in(module: nn.Module) -> list[LayerReport]:
    """Returns reports on experts that stay BF16, because their weights are parameters of one module."""
    reports = []
    for name, part in module.named_modules():
        if "Expert" in type(part).__name__ and not isinstance(part, nn.Linear):
            weights = [one for own, one in part.named_parameters(recurse=False) if not own.endswith("bias")]
            # The dimensions of a lazy parameter are unknown.
            known = (one for one in weights if not is_lazy(one))
            nbytes = sum(one.nbytes for one in known if one.dim() > 1 and one.dtype == torch.bfloat16)
            if nbytes:
                reports.append(LayerReport(name, nbytes, nbytes, _EXPERTS))
    return reports


_EXPERTS = "pack_model packs nn.Linear only; UnweightConfig packs most layouts of experts while transformers loads them"


def _pack_weight(weight: Tensor, target: Optional[torch.device], to_cpu: bool) -> Union[_Held, str]:
    """Returns the arena of a weight packed on `target`, or why it cannot be packed; with `to_cpu`, on the CPU."""
    weight = weight if target is None else weight.to(target)
    if (reason := why_not(weight.device)) is not None:
        return reason
    packed = _pack(weight)
    if isinstance(packed, str):
        return packed
    arena, holder = packed.arena, packed.escapes
    if to_cpu and arena.device.type != "cpu":
        arena = arena.cpu()
        holder = _holder(arena, _lists_of(arena, holder))
    return _Held(arena, holder)


def _refuse_meta(module: nn.Module, target: torch.device) -> None:
    """Raises `ValueError` for a tensor without contents, which cannot be moved to a device."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if tensor.device.type == "meta" and not is_lazy(tensor):
            raise ValueError(
                f"'{name}' is on the meta device and cannot be moved to {target}: load it first, or omit device"
            )

"""Lazy tensors. `Part` is a matrix of a bundle: only the slice that an operation uses is read, when it is used.

vLLM's tensor parallelism slices whole matrices. With `Part`, each process reads only its own slice.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ._bundle import Bundle, TensorInfo

_aten = torch.ops.aten


class _Fixed(Tensor):
    """A tensor subclass that refuses in-place changes, which would be lost."""

    _what: str
    """What it is, the start of a sentence in errors."""
    _instead = "clone() it first"
    """What to do instead of a change in place."""

    @property
    def data(self) -> Tensor:
        """Returns `self.detach()`; setting it raises `NotImplementedError`."""
        return self.detach()

    @data.setter
    def data(self, _: Tensor) -> None:
        raise _no_change("data =", self._what, self._instead)

    def read(self) -> Tensor:
        """Returns the contents as a plain tensor."""
        raise NotImplementedError

    def share_memory_(self) -> Tensor:
        """Raises `NotImplementedError`, because the tensor has no memory to share."""
        raise _no_memory("share_memory_", self._what)

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        """Raises `NotImplementedError`, because the tensor has no memory to export."""
        raise _no_memory("__dlpack__", self._what)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Optional[dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default and args[0].device.type == "meta":
            # A copy to a meta tensor needs only the shape and dtype.
            return func(args[0], torch.empty(args[1].shape, dtype=args[1].dtype, device="meta"))
        if func.namespace in ("c10d", "_c10d_functional"):
            # Schemas of collectives do not say what they write.
            fixed = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, _Fixed))
            raise _no_change(func, fixed._what, fixed._instead)
        parameters, source = func._schema.arguments, None
        # A `_Fixed` may be a positional or keyword argument, or in a list.
        for argument, value in [*zip(parameters, args), *((one, kwargs.get(one.name)) for one in parameters)]:
            if argument.alias_info is not None:
                fixed = next((one for one in tree_leaves(value) if isinstance(one, _Fixed)), None)
                if fixed is not None and argument.alias_info.is_write:
                    raise _no_change(func, fixed._what, fixed._instead)
                source = fixed if source is None else source
        args, kwargs = tree_map(lambda one: one.read() if isinstance(one, _Fixed) else one, (args, kwargs))
        results = func(*args, **kwargs)
        if source is None:
            return results
        return tree_map(lambda one: _View(one, source._what) if isinstance(one, Tensor) else one, results)


def _no_change(operation: object, what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"{operation}: {what}, and cannot be changed in place; {instead}")


def _no_memory(operation: str, what: str) -> NotImplementedError:
    return NotImplementedError(f"{operation}: {what}, and has no memory of its own; clone() it first")


class _View(_Fixed):
    """A view of a part, with contents that were read once."""

    _read: Tensor

    @staticmethod
    def __new__(cls, read: Tensor, what: str) -> _View:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            read.shape,
            strides=read.stride(),
            storage_offset=read.storage_offset(),
            dtype=read.dtype,
            device=read.device,
        )
        self._read, self._what = read, what
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def read(self) -> Tensor:
        """Returns the contents."""
        return self._read

    def __repr__(self, **_: Any) -> str:
        return f"view of {self._read!r}: {self._what}"


class Part(_Fixed):
    """A rectangle of a BF16 matrix in a bundle, as a CPU tensor without memory of its own.

    A slice with step 1 is another `Part` and reads nothing. Any other operation reads, checks and decodes the contents
    for this one use. Other views keep the contents that they read, and are read-only, too. A copy to a meta tensor
    reads nothing.
    """

    _bundle: Bundle
    _info: TensorInfo
    _rows: tuple[int, int]
    _cols: tuple[int, int]
    _on_read: Callable[[int], None]

    @staticmethod
    def __new__(
        cls,
        bundle: Bundle,
        info: TensorInfo,
        on_read: Callable[[int], None],
        rows: Optional[tuple[int, int]] = None,
        cols: Optional[tuple[int, int]] = None,
    ) -> Part:
        """Makes a part of the tensor `info`; `rows` and `cols` are ranges with an exclusive end, `None` for all.

        Each read calls `on_read` with the number of stored bytes read.
        """
        rows, cols = rows or (0, info.shape[0]), cols or (0, info.shape[1])
        shape = (rows[1] - rows[0], cols[1] - cols[0])
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device="cpu")
        self._bundle, self._info, self._on_read = bundle, info, on_read
        self._what = f"a part of tensor '{info.name}' is read from a bundle"
        self._rows, self._cols = rows, cols
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def read(self) -> Tensor:
        """Reads and decodes the contents into a new tensor."""
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        tensor, read = self._bundle._torch_part(self._info, self._rows, self._cols)
        self._on_read(read)
        return tensor

    def _of(self, rows: tuple[int, int], cols: tuple[int, int]) -> Part:
        return Part(self._bundle, self._info, self._on_read, rows, cols)

    def _sliced(self, dim: int = 0, start: Optional[int] = None, end: Optional[int] = None, step: int = 1) -> Part:
        first, last, _ = slice(start, end).indices(self.shape[dim])
        first, last = (of + (self._cols if dim % 2 else self._rows)[0] for of in (first, max(first, last)))
        return self._of(self._rows, (first, last)) if dim % 2 else self._of((first, last), self._cols)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Optional[dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.slice.Tensor and (args[4] if len(args) > 4 else kwargs.get("step", 1)) == 1:
            return args[0]._sliced(*args[1:], **kwargs)
        if func in (_aten.detach.default, _aten.alias.default):
            return args[0]._of(args[0]._rows, args[0]._cols)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __repr__(self, **_: Any) -> str:
        return f"Part({self._info.name!r}, rows={self._rows}, cols={self._cols})"

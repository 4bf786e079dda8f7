"""New values for some weights of a running engine, by `unweight.update_sparse_` and vLLM's sparse weight transfer."""

from __future__ import annotations

import functools
from typing import Any, Union

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size

from .._update import _pack_into, _with_elements
from ..modules import _elements, _moved, update_sparse_
from ..ops import Escapes, Placed, unpack
from ._account import arrivals_of


class RunningWeight:
    """The packed weight of a layer of a running engine, as `update_sparse_` changes it."""

    def __init__(self, layer: nn.Module, keep_graphs: bool) -> None:
        self._layer, self._keep_graphs = layer, keep_graphs
        self._held = self.weight_packed = layer.unweight_packed.arena
        self._prefix = arrivals_of[layer].prefix

    def _describe(self) -> str:
        return f"'{self._prefix}'"

    def _sparse(self, index: Tensor, values: Tensor) -> tuple[RunningWeight, Tensor, Tensor]:
        """Checks new elements, except their positions, and moves them to the device of the arena."""
        if "weight" in self._layer.__dict__:
            raise NotImplementedError(f"{self._describe()} is a head next to adapters: its weight cannot be replaced")
        if get_tensor_model_parallel_world_size() > 1:
            raise NotImplementedError("weights that processes share (--tensor-parallel-size) have no sparse updates")
        elements = _elements(index, values, torch.bfloat16, f"sparse weights of {self._describe()}")
        return self, *_moved(*elements, self.weight_packed.device)

    def _registered(self) -> tuple[Tensor, Union[Escapes, Placed]]:
        """Returns the arena, and the object to keep with it."""
        return self.weight_packed, self._layer.unweight_packed.escapes

    def _sparse_what(self) -> tuple[int, str, str]:
        """Returns the elements of the weight, and what errors call the positions and the weight."""
        packed = self._layer.unweight_packed
        return packed.n * packed.k, f"sparse weights of {self._describe()}", "weight"

    def _update_sparse_whole(self, index: Tensor, values: Tensor) -> bool:
        """Unpacks the weight, replaces elements at checked positions and packs it again, at the same address."""
        weight = _with_elements(unpack(self.weight_packed), index, values)
        packed = _pack_into(*self._registered(), weight, self.keep, self._keep_graphs)
        if isinstance(packed, str):
            raise ValueError(
                f"the new weight of {self._describe()} cannot be packed into the old one's place: {packed}; the layer "
                "keeps its old weight"
            )
        return True

    def keep(self, escapes: Escapes) -> None:
        """Stores the escape lists of the arena."""
        self._layer.unweight_packed = self._layer.unweight_packed._replace(escapes=escapes)


def install() -> None:
    """Makes vLLM's sparse weight transfer, which vLLM 0.24 lacks, write to packed weights, too."""
    try:
        from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLWeightTransferEngine as Engine
    except ImportError:
        return
    before = Engine._apply_patch

    @functools.wraps(before)
    def apply_patch(engine: Any, patch: Any) -> None:
        name, _, leaf = patch.name.rpartition(".")
        try:
            is_packed = hasattr(engine.model.get_submodule(name), "unweight_packed")
        except AttributeError:
            is_packed = False  # vLLM's own method raises the error of an unknown name.
        if is_packed and (leaf == "weight" or leaf.endswith("weight_packed")):
            # Refuses the name of an arena.
            update_sparse_(engine.model, {patch.name: (patch.indices, patch.values)})
        else:
            before(engine, patch)

    Engine._apply_patch = apply_patch

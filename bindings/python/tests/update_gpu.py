"""Times new weights for packed layers on a GPU, without vLLM: full and sparse updates of Llama-3.1-8B's shapes.

    python update_gpu.py --out update.json                # 8B, a GPU with 60 GB, about a minute
    python update_gpu.py --layers 2 --out small.json
    python update_gpu.py --device cpu --geometry tiny --out tiny.json

Needs torch and the wheel. Weights are random. A full update gives each layer another BF16 weight, a sparse one 1 % of
its elements, layer by layer, or all layers together by `update_sparse_`. After each kind, digests of arenas and
unpacked weights must equal those of the same weights when packed, and a CUDA graph captured before must give the new
product. Exit status 1 if one differs.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterable

import torch
import unweight
from models import GEOMETRIES, MIXTURES, digest
from records import provenance
from torch import Tensor, nn
from unweight.ops import pack

# The goals in seconds, for all layers.
GOALS = {"full": 1.0, "sparse": 0.05, "together": 0.05}
BATCH = 4


def shapes_of(geometry: str, layers: int) -> list[tuple[int, int]]:
    """Returns the shapes of a model's linear layers as vLLM merges them: qkv, o, gate and up, down; then the head."""
    hidden, intermediate, own, heads, kv_heads, head, vocabulary = GEOMETRIES[geometry]
    layer = [
        ((heads + 2 * kv_heads) * head, hidden),
        (hidden, heads * head),
        (2 * intermediate, hidden),
        (hidden, intermediate),
    ]
    return layer * (layers or own) + [(vocabulary, hidden)]


def drawn(shape: tuple[int, int], seed: int, device: torch.device) -> Tensor:
    random = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=random, device=device).mul_(0.02).to(torch.bfloat16)


def made(shapes: list[tuple[int, int]], seed: int, device: torch.device) -> nn.ModuleList:
    """Returns packed layers with random weights, which depend on the seed."""
    layers = nn.ModuleList()
    for at, shape in enumerate(shapes):
        layer = nn.Linear(shape[1], shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(drawn(shape, 10_000 * seed + at, device), requires_grad=False)
        report = unweight.pack_model(layer)
        if report.kept:
            raise SystemExit(f"a layer of {shape} was not packed: {report.kept}")
        layers.append(layer)
    return layers


def equal_fresh_ones(layers: nn.ModuleList, weights: Iterable[Tensor]) -> bool:
    """Returns whether layers have the digests of these weights, and of arenas into which they are packed."""
    is_equal = True
    for layer, weight in zip(layers, weights, strict=True):
        is_equal &= digest(layer.unpacked()) == digest(weight)
        is_equal &= digest(layer.weight_packed) == digest(pack(weight).arena)
    return is_equal


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(layers: nn.ModuleList, device: torch.device, rounds: int, update) -> dict:
    """Updates all layers in each round; returns the seconds of the rounds.

    `update(layer, index, round)` makes the new values, which is not timed, and returns a function that stores them.
    """
    seconds, are_valid = [], True
    for turn in range(rounds):
        total = 0.0
        for at, layer in enumerate(layers):
            store = update(layer, at, turn)
            synchronize(device)
            start = time.perf_counter()
            are_valid &= store()
            synchronize(device)
            total += time.perf_counter() - start
        seconds.append(total)
    return {"seconds": seconds, "median_s": statistics.median(seconds), "graphs_stay_valid": are_valid}


def drawn_elements(size: int, share: float, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns ascending positions and values for a share of the elements of a weight."""
    random = torch.Generator(device).manual_seed(seed)
    index = torch.randint(size, (max(1, round(size * share)),), generator=random, device=device).unique()
    return index, torch.randn(len(index), generator=random, device=device).mul_(0.02).to(torch.bfloat16)


def sparse_updates(layers: nn.ModuleList, device: torch.device, given: argparse.Namespace, whole: bool = False) -> dict:
    """Times updates of a share of the elements, at random places, and compares the layers with fresh ones. `whole`
    unpacks and packs each layer instead, as for another exponent window."""
    expected = [layer.unpacked() for layer in layers]

    def sparse(layer: nn.Module, at: int, turn: int):
        index, values = drawn_elements(expected[at].numel(), given.share, (turn + 200 * whole) * 10_000 + at, device)
        expected[at].view(-1)[index] = values
        update = layer._update_sparse_whole if whole else layer.update_sparse_
        return lambda: update(index, values)

    record = timed(layers, device, given.rounds, sparse)
    record["digests_equal_a_fresh_pack"] = equal_fresh_ones(layers, expected)
    return record


def updates_together(layers: nn.ModuleList, device: torch.device, given: argparse.Namespace) -> dict:
    """Times updates as `sparse_updates`, of all layers in one call."""
    expected = [layer.unpacked() for layer in layers]
    seconds, are_valid = [], True
    for turn in range(given.rounds):
        updates = {}
        for at, weight in enumerate(expected):
            index, values = drawn_elements(weight.numel(), given.share, (100 + turn) * 10_000 + at, device)
            weight.view(-1)[index] = values
            updates[f"{at}.weight"] = index, values
        synchronize(device)
        start = time.perf_counter()
        are_valid &= unweight.update_sparse_(layers, updates)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    record = {"seconds": seconds, "median_s": statistics.median(seconds), "graphs_stay_valid": are_valid}
    record["digests_equal_a_fresh_pack"] = equal_fresh_ones(layers, expected)
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES.keys() - MIXTURES.keys()), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=0, help="layers of the model; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.01, help="share of the elements of a sparse update")
    parser.add_argument("--seconds", type=float, default=1e9, help="leave out the sparse updates after this time")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    parser.add_argument("--plan", action="store_true", help="say what would be measured, and do nothing")
    given = parser.parse_args()
    shapes = shapes_of(given.geometry, given.layers)
    weights = sum(n * k for n, k in shapes)
    if given.plan:
        print(f"{len(shapes)} layers of {weights} weights: full updates, updates of {given.share:.1%}, digests")
        return 0
    begin, device = time.monotonic(), torch.device(given.device)
    record: dict = {
        **provenance(device=given.device),
        "layers": len(shapes),
        "weights": weights,
    }
    layers = made(shapes, 1, device)
    x, graph = drawn((BATCH, shapes[0][1]), 5, device), None
    with torch.no_grad():
        out = layers[0](x)
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = layers[0](x)

        def replayed() -> bool:
            """Returns whether the graph gives the product of the new weight."""
            if graph is None:
                return True
            graph.replay()
            synchronize(device)
            return bool(torch.equal(out, layers[0](x)))

        def full(layer: nn.Module, at: int, turn: int):
            weight = drawn(shapes[at], 10_000 * (2 + turn) + at, device)
            return lambda: layer.update_(weight)

        record["full"] = timed(layers, device, given.rounds, full)
        record["full"]["graph_gives_the_new_product"] = record["full"]["graphs_stay_valid"] and replayed()
        last = (drawn(shape, 10_000 * (1 + given.rounds) + at, device) for at, shape in enumerate(shapes))
        record["full"]["digests_equal_a_fresh_pack"] = equal_fresh_ones(layers, last)
        if time.monotonic() - begin < given.seconds:
            record["sparse"] = sparse_updates(layers, device, given)
            record["sparse"]["graph_gives_the_new_product"] = record["sparse"]["graphs_stay_valid"] and replayed()
            record["sparse_packed_whole"] = sparse_updates(layers, device, given, whole=True)
            record["together"] = updates_together(layers, device, given)
            record["together"]["graph_gives_the_new_product"] = record["together"]["graphs_stay_valid"] and replayed()
        else:
            record["left_out"] = ["sparse", "together"]
    kinds = {kind: goal for kind, goal in GOALS.items() if kind in record}
    for kind, goal in kinds.items():
        record[kind]["goal_s"], record[kind]["is_met"] = goal, record[kind]["median_s"] <= goal
    print(json.dumps(record, indent=1))
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    checks = ("graphs_stay_valid", "graph_gives_the_new_product", "digests_equal_a_fresh_pack")
    return 0 if all(record[kind][check] for kind in kinds for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())

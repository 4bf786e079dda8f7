"""Checks and times `unweight.pack_model` on a transformer with the shapes of FLUX.1 and random weights.

    python pack_gpu.py --out pack.json                                   # 12B, a GPU with 60 GB, about 5 minutes
    python pack_gpu.py --double 2 --single 2 --out small.json            # a quick run
    python pack_gpu.py --device cpu --hidden 128 --double 1 --single 1 --tokens 16 --text-tokens 8 --steps 1

Needs torch and the wheel. Exit status 1 if a bit is wrong. Steps of resident modules alternate.
"""

import argparse
import copy
import gc
import importlib.util
import json
import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F
import unweight
from records import provenance
from torch import Tensor, nn
from unweight.modules import PackedLinear


class Shape:
    def __init__(self, given: argparse.Namespace) -> None:
        self.hidden, self.heads = given.hidden, given.heads or max(1, given.hidden // 128)
        self.double, self.single = given.double, given.single


class Stream(nn.Module):
    """The image or the text half of a double block."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(hidden, 6 * hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


def split_heads(qkv: Tensor, heads: int) -> Tensor:
    """`[batch, tokens, 3 * hidden]` to `[3, batch, heads, tokens, head]`."""
    batch, tokens, width = qkv.shape
    return qkv.view(batch, tokens, 3, heads, width // 3 // heads).permute(2, 0, 3, 1, 4)


def attention(qkv: Tensor) -> Tensor:
    q, k, v = qkv
    mixed = F.scaled_dot_product_attention(F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:]), v)
    return mixed.transpose(1, 2).flatten(2)


class DoubleBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.image, self.text = Stream(shape.hidden), Stream(shape.hidden)

    def forward(self, image: Tensor, text: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        streams, states = (self.text, self.image), [text, image]
        parts = [stream.modulation(condition)[:, None].chunk(6, dim=-1) for stream in streams]
        qkv = [
            split_heads(stream.qkv(modulated(x, part[0], part[1])), self.heads)
            for stream, x, part in zip(streams, states, parts)
        ]
        mixed = attention(torch.cat(qkv, dim=3)).split([text.shape[1], image.shape[1]], dim=1)
        for at, (stream, part) in enumerate(zip(streams, parts)):
            x = states[at] + part[2] * stream.proj(mixed[at])
            x = x + part[5] * stream.down(F.gelu(stream.up(modulated(x, part[3], part[4])), approximate="tanh"))
            states[at] = x
        return states[1], states[0]


class SingleBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads, self.widths = shape.heads, [3 * hidden, 4 * hidden]
        self.modulation = nn.Linear(hidden, 3 * hidden)
        self.first, self.second = nn.Linear(hidden, 7 * hidden), nn.Linear(5 * hidden, hidden)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(condition)[:, None].chunk(3, dim=-1)
        qkv, mlp = self.first(modulated(x, shift, scale)).split(self.widths, dim=-1)
        mixed = attention(split_heads(qkv, self.heads))
        return x + gate * self.second(torch.cat([mixed, F.gelu(mlp, approximate="tanh")], dim=-1))


class Transformer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.image_in, self.text_in = nn.Linear(64, hidden), nn.Linear(4096, hidden)
        self.condition_in = nn.Sequential(nn.Linear(256, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.double_blocks = nn.ModuleList(DoubleBlock(shape) for _ in range(shape.double))
        self.single_blocks = nn.ModuleList(SingleBlock(shape) for _ in range(shape.single))
        self.out = nn.Linear(hidden, 64)

    def forward(self, image: Tensor, text: Tensor, condition: Tensor) -> Tensor:
        image, text = self.image_in(image), self.text_in(text)
        condition = F.silu(self.condition_in(condition))
        for block in self.double_blocks:
            image, text = block(image, text, condition)
        x = torch.cat([text, image], dim=1)
        for block in self.single_blocks:
            x = block(x, condition)
        return self.out(F.layer_norm(x[:, text.shape[1] :], x.shape[-1:]))


def draw(parameter_shape: torch.Size, index: int, device: torch.device) -> Tensor:
    """Returns normally distributed values that depend only on shape, index and kind of device."""
    chance = torch.Generator(device).manual_seed(index)
    return torch.randn(parameter_shape, generator=chance, device=device).mul_(0.02).to(torch.bfloat16)


def made(shape: Shape, device: torch.device) -> Transformer:
    with torch.device("meta"):
        module = Transformer(shape)
    for index, (name, parameter) in enumerate(list(module.named_parameters())):
        owner, _, leaf = name.rpartition(".")
        value = nn.Parameter(draw(parameter.shape, index, device), requires_grad=False)
        setattr(module.get_submodule(owner), leaf, value)
    return module.eval()


def wrong_bits(module: Transformer, shape: Shape, device: torch.device) -> int:
    """Returns the number of weights whose bits are not those that were drawn."""
    with torch.device("meta"):
        names = [(name, parameter.shape) for name, parameter in Transformer(shape).named_parameters()]
    wrong = 0
    for index, (name, parameter_shape) in enumerate(names):
        owner, _, leaf = name.rpartition(".")
        layer = module.get_submodule(owner)
        is_packed = leaf == "weight" and isinstance(layer, PackedLinear)
        got = layer._unpacked_where_run() if is_packed else getattr(layer, leaf)
        wrong += (got.view(torch.int16) != draw(parameter_shape, index, device).view(torch.int16)).sum().item()
    return wrong


class PlainOffload:
    """CPU offload of BF16 blocks with the method of `pack_model`: pinned, double-buffered, on a side stream."""

    def __init__(self, module: Transformer, device: torch.device) -> None:
        self.blocks = [*module.double_blocks, *module.single_blocks]
        self.layers = [[one for one in block.modules() if isinstance(one, nn.Linear)] for block in self.blocks]
        sizes = [sum(layer.weight.numel() for layer in layers) for layers in self.layers]
        self.slots = [torch.empty(max(sizes), dtype=torch.bfloat16, device=device) for _ in range(2)]
        self.buffers, self.stream = [], torch.cuda.Stream(device)
        self.arrived = [torch.cuda.Event() for _ in range(2)]
        self.released = [torch.cuda.Event() for _ in range(2)]
        self.inside, self.slot_of_next = None, 0
        for index, (block, layers, size) in enumerate(zip(self.blocks, self.layers, sizes)):
            buffer = torch.empty(size, dtype=torch.bfloat16)
            error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
            assert int(error) == 0, f"cudaHostRegister: {error}"
            at = 0
            for layer in layers:
                buffer[at : at + layer.weight.numel()].copy_(layer.weight.data.view(-1))
                at += layer.weight.numel()
                layer.weight.data = torch.empty(0, dtype=torch.bfloat16, device=device)
            self.buffers.append(buffer)
            block.register_forward_pre_hook(lambda _, __, index=index: self.enter(index))
            block.register_forward_hook(lambda *_: self.leave())
        self.start(0, 0)

    def start(self, index: int, slot: int) -> None:
        self.stream.wait_event(self.released[slot])
        with torch.cuda.stream(self.stream):
            self.slots[slot][: self.buffers[index].numel()].copy_(self.buffers[index], non_blocking=True)
            self.arrived[slot].record(self.stream)
        self.slot_of_next = slot

    def enter(self, index: int) -> None:
        slot = self.inside = self.slot_of_next
        torch.cuda.current_stream().wait_event(self.arrived[slot])
        at = 0
        for layer in self.layers[index]:
            shape = (layer.out_features, layer.in_features)
            layer.weight.data = self.slots[slot][at : at + math.prod(shape)].view(shape)
            at += math.prod(shape)
        self.start((index + 1) % len(self.blocks), 1 - slot)

    def leave(self) -> None:
        self.released[self.inside].record(torch.cuda.current_stream())

    def close(self) -> None:
        torch.cuda.synchronize()
        for buffer in self.buffers:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


def timed(runs: dict, steps: int, device: torch.device) -> dict:
    """Returns for each function the median, minimum and maximum of its time in ms. Steps alternate."""
    times: dict = {name: [] for name in runs}
    for step in range(steps + 2):
        for name, run in runs.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if step >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {
        name: {"median_ms": statistics.median(all_of), "min_ms": min(all_of), "max_ms": max(all_of), "steps": steps}
        for name, all_of in times.items()
    }


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def resident(shape: Shape, operands: tuple, given: argparse.Namespace, device: torch.device) -> tuple[dict, Tensor]:
    """Compares the packed module with BF16, both on the device. Returns the record and the packed output."""
    stock = made(shape, device)
    module = copy.deepcopy(stock)
    start = time.perf_counter()
    report = unweight.pack_model(module, device=device)
    record: dict = {
        "parameters": sum(parameter.numel() for parameter in stock.parameters()),
        "packing_s": time.perf_counter() - start,
        "report": str(report),
        "kept": report.kept,
        "bytes_bf16": report.bytes_before,
        "bytes_packed": report.bytes_after,
        "memory_ratio": report.bytes_after / report.bytes_before,
        "wrong_weights": wrong_bits(module, shape, device),
    }
    expected, got = stock(*operands), module(*operands)
    record["output_deviation"] = ((got - expected).float().norm() / expected.float().norm()).item()
    record["output_is_finite"] = bool(got.isfinite().all())
    runs = {"bf16": lambda: stock(*operands), "packed": lambda: module(*operands)}
    if device.type == "cuda":
        runs |= {f"{name}_graph": captured(run) for name, run in runs.items()}
    record["times"] = timed(runs, given.steps, device)
    of = {name: entry["median_ms"] for name, entry in record["times"].items()}
    record["packed_to_bf16"] = of["packed"] / of["bf16"]
    if "packed_graph" in of:
        record["packed_to_bf16_graph"] = of["packed_graph"] / of["bf16_graph"]
    if device.type == "cpu":
        record["outputs_equal"] = bool(torch.equal(got, expected))
    return record, got.clone()


def captured(run):
    """Returns the replay of a CUDA graph of a function."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    return lambda: (graph.replay(), kept)


def offloaded(shape: Shape, operands: tuple, given: argparse.Namespace, device: torch.device, packed: Tensor) -> dict:
    """Compares offload of packed weights with offload of BF16 weights. `packed` is the output without offload."""
    record: dict = {}
    # Each is alone on the GPU, so that its peak memory is its own.
    module = made(shape, device)
    plain = PlainOffload(module, device)
    free(device)
    record["bf16_plain"] = timed({"": lambda: module(*operands)}, given.steps, device)[""]
    record["bf16_plain"]["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
    plain.close()
    del module, plain
    free(device)
    module = made(shape, device)
    report = unweight.pack_model(module, device=device, offload=True)
    free(device)
    record["packed"] = timed({"": lambda: module(*operands)}, given.steps, device)[""]
    record["packed"]["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
    record["packed"]["report"] = str(report)
    record["packed"]["output_equals_resident"] = bool(torch.equal(module(*operands), packed))
    record["packed"]["wrong_weights"] = wrong_bits(module, shape, device)
    del module
    free(device)
    has_accelerate = not given.no_accelerate and importlib.util.find_spec("accelerate") is not None
    if has_accelerate and given.end - time.monotonic() > 60:
        import accelerate

        module = made(shape, device).to("cpu")
        free(device)
        module = accelerate.cpu_offload(module, execution_device=device)
        record["bf16_accelerate"] = timed({"": lambda: module(*operands)}, max(1, given.steps // 5), device)[""]
        record["bf16_accelerate"]["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
        record["bf16_accelerate"]["version"] = accelerate.__version__
        del module
        free(device)
    for name in ("bf16_plain", "bf16_accelerate"):
        if name in record:
            record[f"speedup_to_{name}"] = record[name]["median_ms"] / record["packed"]["median_ms"]
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--heads", type=int, help="attention heads; hidden / 128 by default")
    parser.add_argument("--double", type=int, default=19, help="double blocks")
    parser.add_argument("--single", type=int, default=38, help="single blocks")
    parser.add_argument("--tokens", type=int, default=4096, help="image tokens")
    parser.add_argument("--text-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-offload", action="store_true")
    parser.add_argument("--no-accelerate", action="store_true", help="skip accelerate's offload, about 2 s per step")
    parser.add_argument("--seconds", type=float, default=math.inf, help="leave out later parts after this time")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--plan", action="store_true", help="say what would be compared, and do nothing")
    given = parser.parse_args()
    if given.plan:
        print(f"{given.double} double and {given.single} single blocks, hidden {given.hidden}: BF16, packed, offloaded")
        return 0
    given.end, given.seconds = time.monotonic() + given.seconds, None
    device, shape = torch.device(given.device), Shape(given)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    widths = ((1, given.tokens, 64), (1, given.text_tokens, 4096), (1, 256))
    operands = tuple(draw(torch.Size(width), 10**6 + at, device).mul_(50) for at, width in enumerate(widths))
    record: dict = {
        **provenance(device=given.device),
        "options": {name: value for name, value in vars(given).items() if name not in ("out", "plan", "end")},
    }
    with torch.no_grad():
        record["resident"], output = resident(shape, operands, given, device)
        free(device)
        if device.type == "cuda" and not given.no_offload and given.end - time.monotonic() > 60:
            record["offloaded"] = offloaded(shape, operands, given, device, output)
    checks = {
        "weights": record["resident"]["wrong_weights"] == 0 and record["resident"]["output_is_finite"],
        # Products round their sums differently; over 57 blocks this stays far below 0.1.
        "outputs": record["resident"]["output_deviation"] < 0.1,
    }
    if "offloaded" in record:
        packed = record["offloaded"]["packed"]
        checks["offload"] = packed["wrong_weights"] == 0 and packed["output_equals_resident"]
    record["checks"] = checks
    text = json.dumps(record, indent=1)
    print(text)
    if given.out:
        with open(given.out, "w") as file:
            file.write(text + "\n")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

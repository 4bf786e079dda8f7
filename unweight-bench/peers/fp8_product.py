"""Times torch._scaled_mm, which is cuBLASLt's product of E4M3 matrices, at small batches on a GPU.

    python fp8_product.py > fp8-product.json        # torch with CUDA, compute capability 8.9 or newer

Weights come from memory: a CUDA graph rotates through copies of the weights, at least five copies and 440 MB.
cuBLASLt requires multiples of 16 rows, so batches 1 and 8 are padded with zeros to 16 rows. The first output is checked
against the product in float32 before timing.
"""

import json
import statistics

import torch

SHAPES = [(14336, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (28672, 4096)]
ROUNDS, WARMUP = 60, 10


def measure(n, k, batch):
    rows = -(-batch // 16) * 16
    copies = max(5, -(-440_000_000 // (n * k)))
    generator = torch.Generator(device="cuda").manual_seed(1)

    def normal(rows, cols):
        return torch.randn(rows, cols, device="cuda", generator=generator)

    whole = normal(n, k)
    weights = [whole.to(torch.float8_e4m3fn) for _ in range(copies)]
    x = normal(rows, k)
    x[batch:] = 0
    x = x.to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")

    def product(weight):
        return torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    expected = x.float() @ weights[0].float().t()
    error = ((product(weights[0]).float() - expected).norm() / expected.norm()).item()
    if not error < 1e-2:
        raise SystemExit(f"[{n}, {k}] batch {batch}: the product differs by {error:.2e}")
    launches = max(20, copies)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for weight in weights:
            product(weight)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            product(weights[i % copies])
    times = []
    for turn in range(WARMUP + ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Keep the device busy while the host enqueues the timed launches.
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn >= WARMUP:
            times.append(start.elapsed_time(end) * 1e3 / launches)
    return {"n": n, "k": k, "m": batch, "median_us": statistics.median(times), "copies": copies, "error": error}


def main():
    rows = [measure(n, k, batch) for n, k in SHAPES for batch in (1, 8, 16)]
    device = torch.cuda.get_device_name(0)
    print(json.dumps({"device": device, "torch": torch.__version__, "cuda": torch.version.cuda, "rows": rows}, indent=1))


main()

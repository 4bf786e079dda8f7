"""Compares CPU offload of a transformers model: `pack_model`, the package dfloat11, and accelerate in BF16.

    python offload_gpu.py --out offload.json        # random weights of Llama-3.1-8B's shapes, a prompt of 512 tokens

Needs transformers, accelerate, dfloat11, cupy and this package. All blocks are in CPU memory; embedding and head are on
the GPU, except accelerate's. Exit status 1: logits of dfloat11 are not those of BF16, those of packed blocks not those
of packed blocks on the GPU, or a method failed.
"""

import argparse
import gc
import json
import math
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any, Callable

import torch
import unweight
from models import GEOMETRIES, of_geometry
from records import provenance
from torch import Tensor, nn
from transformers_gpu import dfloat11_model, load, logits

# Runs that are not timed, and runs that are.
WARM_UP, ROUNDS = 2, 7


def timed(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """Returns the milliseconds of each forward pass, and the peak of allocated GPU memory."""
    torch.cuda.reset_peak_memory_stats()
    times = []
    for turn in range(WARM_UP + ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        logits(model, ids)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    times = sorted(times[WARM_UP:])
    return {"ms": times, "median_ms": statistics.median(times), "peak_gpu_bytes": torch.cuda.max_memory_allocated()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("offload.json"))
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=math.inf, help="leave out later methods after this time")
    parser.add_argument("--plan", action="store_true", help="print what would run, and run nothing")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    if given.plan:
        print(f"{given.geometry}, a prompt of {given.prompt} tokens: packed, dfloat11, accelerate, all offloaded")
        return
    device, expected = torch.device("cuda", 0), {}
    record: dict[str, Any] = {
        **provenance("transformers"),
        "prompt": given.prompt,
        "methods": {},
        "left_out": [],
        "faults": [],
    }

    def packed(folder: pathlib.Path, _: pathlib.Path) -> nn.Module:
        model, _ = load(folder, device)
        expected["bf16"] = logits(model, ids)
        unweight.pack_model(model)
        expected["packed"] = logits(model, ids)
        del model
        model, _ = load(folder, torch.device("cpu"))
        # Also moves what is not packed.
        unweight.pack_model(model, device=device, offload=True)
        return model

    def dfloat11(folder: pathlib.Path, converted: pathlib.Path) -> nn.Module:
        return dfloat11_model(folder, converted, device, cpu_offload=True)

    def accelerate(folder: pathlib.Path, _: pathlib.Path) -> nn.Module:
        from accelerate import cpu_offload

        return cpu_offload(load(folder, torch.device("cpu"))[0], execution_device=device)

    methods: dict[str, tuple[Callable[..., nn.Module], str]] = {
        "packed": (packed, "packed"),
        "dfloat11": (dfloat11, "bf16"),
        "accelerate": (accelerate, "bf16"),
    }
    ids = torch.randint(2, 500, (1, given.prompt), generator=torch.Generator().manual_seed(1)).to(device)
    with tempfile.TemporaryDirectory() as scratch:
        home = pathlib.Path(scratch)
        of_geometry(home / "model", given.geometry, given.layers)
        for name, (make, same) in methods.items():
            if time.monotonic() > end:
                record["left_out"].append(name)
                continue
            try:
                model = make(home / "model", home / "dfloat11")
                record["methods"][name] = found = timed(model, ids)
                if not torch.equal(logits(model, ids).to(device), expected[same]):
                    record["faults"].append(f"{name}: its logits are not those of {same} weights on the GPU")
                print(f"{name}: {found['median_ms']:.1f} ms, {found['peak_gpu_bytes'] / 2**30:.2f} GiB", flush=True)
            except Exception as error:
                # The other methods still give results.
                record["faults"].append(f"{name}: {type(error).__name__}: {error}")
            model = None
            gc.collect()
            torch.cuda.empty_cache()
            given.out.write_text(json.dumps(record, indent=1) + "\n")
    if record["faults"]:
        sys.exit("; ".join(record["faults"]))


if __name__ == "__main__":
    main()

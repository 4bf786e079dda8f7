"""Compares vLLM with the packed BF16 rest of quantized checkpoints to the same checkpoints without this package.

    python vllm_quantized_gpu.py --out quantized.json                    # MLPs quantized in four ways, 16 layers
    python vllm_quantized_gpu.py --out fp8.json --only fp8 --no-compile
    python vllm_quantized_gpu.py --out int4.json --only int4 --bundle    # also compress the checkpoint, and run that

Needs vLLM and this package. Weights are random, of Llama-3.1-8B's shapes; attention, embedding and head stay BF16. Each
engine runs in its own process, the one without this package first. On a GPU, packed products round their sums
differently, so the check compares logprobs of forced tokens, as `vllm_gpu.py` does. Quantized activations magnify
rounding: the limit is at least twice the difference that the engine without this package has to itself, with the same
prompts in other batches. The record has the number of equal greedy tokens of both. Exit status 1: a check failed.
`--seconds` limits the whole run; the result names what was left out.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from models import GEOMETRIES, MIXTURES, of_geometry
from records import provenance
from vllm_gpu import MEAN_DIFFERENCE, SECONDS_MIN, compared, faults, numbers, over_bf16, run

if TYPE_CHECKING:
    from torch import Tensor

GROUP, BLOCK, GROUP_NVFP4 = 128, 128, 16
FP8_MAX, FP4_MAX = 448.0, 6.0
# The goals: the packed bytes of the rest to its BF16 bytes, and tokens per second to those without this package.
REST_GOAL, RATE_GOAL = 0.8, 1.0
# The largest mean difference of forced logprobs to those of the engine without this package, relative to that of its
# own logprobs in other batches.
DIFFERENCE_RATIO = 2.0


def fp8(weight: Tensor) -> dict[str, Tensor]:
    """Float8 with one scale."""
    import torch

    scale = weight.float().abs().amax() / FP8_MAX
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale.reshape(1)}


def fp8_block(weight: Tensor) -> dict[str, Tensor]:
    """Float8 with a scale for each block of 128 x 128."""
    import torch

    n, k = weight.shape
    blocks = weight.float().view(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / FP8_MAX
    values = (blocks / scale).view(n, k).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale.view(n // BLOCK, k // BLOCK)}


def int4(weight: Tensor) -> dict[str, Tensor]:
    """Four-bit integers in groups of 128 along k, with a BF16 scale each; 8 in an int32, the lowest bits first."""
    import torch

    n, k = weight.shape
    groups = weight.float().view(n, k // GROUP, GROUP)
    scale = (groups.abs().amax(dim=2, keepdim=True) / 7).bfloat16()
    values = (groups / scale.float()).round().clamp(-8, 7).view(n, k // 8, 8).to(torch.int64) + 8
    words = (values << (4 * torch.arange(8, device=weight.device))).sum(dim=2)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    return {"weight_packed": words, "weight_scale": scale.view(n, -1), "weight_shape": torch.tensor([n, k])}


def nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """E2M1 in groups of 16 along k with a float8 scale each, and a scale of the matrix; the first of two is low."""
    import torch

    n, k = weight.shape
    groups = weight.float().view(n, k // GROUP_NVFP4, GROUP_NVFP4)
    whole = groups.abs().amax() / (FP8_MAX * FP4_MAX)
    scale = (groups.abs().amax(dim=2, keepdim=True) / FP4_MAX / whole).to(torch.float8_e4m3fn)
    values = groups / (scale.float() * whole).clamp(min=1e-12)
    # The midpoints of 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=weight.device)
    codes = (torch.bucketize(values.abs(), middles) + 8 * (values < 0)).view(n, k // 2, 2).to(torch.uint8)
    one = torch.ones((), dtype=torch.float32)
    return {
        "weight": codes[..., 0] | codes[..., 1] << 4,
        "weight_scale": scale.view(n, -1),
        "weight_scale_2": whole,
        "input_scale": one,
    }


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
# For each format: how a matrix is quantized, and `quantization_config`, in which REST stands for the layers left BF16.
REST = ["lm_head", "re:.*self_attn.*"]
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": "NAMES"}),
    "int4": (
        int4,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"weights": INT4, "input_activations": None, "targets": ["Linear"]}},
            "ignore": REST,
        },
    ),
    "nvfp4": (
        nvfp4,
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": GROUP_NVFP4,
            "ignore": ["lm_head", "*self_attn*"],
        },
    ),
    "fp8-block": (
        fp8_block,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "ignored_layers": "NAMES",
        },
    ),
}


def quantize(model: pathlib.Path, output: pathlib.Path, kind: str) -> None:
    """Writes a copy of a model in which the matrices of the MLPs are quantized."""
    import safetensors.torch
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix, quantization = FORMATS[kind]
    output.mkdir()
    places: dict[str, str] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors = safetensors.torch.load_file(file)
        for name in [name for name in tensors if ".mlp." in name]:
            parts = matrix(tensors.pop(name).to(device))
            prefix = name.removesuffix("weight")
            tensors |= {prefix + part: tensor.cpu().contiguous() for part, tensor in parts.items()}
        safetensors.torch.save_file(tensors, output / file.name, {"format": "pt"})
        places.update(dict.fromkeys(tensors, file.name))
    (output / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = json.loads((model / "config.json").read_text())
    names = [f"model.layers.{at}.self_attn.{one}_proj" for at in range(config["num_hidden_layers"]) for one in "qkvo"]
    whole = {key: ["lm_head", *names] if value == "NAMES" else value for key, value in quantization.items()}
    (output / "config.json").write_text(json.dumps({**config, "quantization_config": whole}, indent=1))
    if device == "cuda":
        # Free the memory for the engines, which are other processes.
        torch.cuda.empty_cache()


def sizes(model: pathlib.Path) -> dict[str, int]:
    """Returns the bytes of a checkpoint: all, those of BF16 matrices without the embedding, and the embedding's."""
    from safetensors import safe_open

    total = {"all": 0, "rest": 0, "embedding": 0}
    for file in model.glob("*.safetensors"):
        total["all"] += file.stat().st_size
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                if part.get_dtype() == "BF16" and len(part.get_shape()) == 2 and name.endswith("weight"):
                    n, k = part.get_shape()
                    total["embedding" if "embed" in name else "rest"] += 2 * n * k
    return total


def rest(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the size of the packed rest, as the engine logged it, to its BF16 size."""
    found = re.search(r"([\d.]+) [GM]iB of ([\d.]+) [GM]iB", " ".join(result["loading"].get("packed", [])))
    packed, bf16 = (0.0, 0.0) if found is None else (float(one) for one in found.groups())
    # Otherwise nothing is packed.
    return {"ratio": packed / bf16} if bf16 else {}


def engines_of(model: pathlib.Path, bundle: pathlib.Path | None) -> dict[str, dict[str, Any]]:
    engines: dict[str, dict[str, Any]] = {
        "stock": {"model": str(model)},
        "packed": {"model": str(model), "quantization": "unweight"},
    }
    if bundle is not None:
        engines["bundle"] = {"model": str(bundle), "quantization": "unweight"}
    return engines


def measured(
    arguments: argparse.Namespace, kind: str, home: pathlib.Path, options: dict[str, Any], end: float
) -> dict[str, Any]:
    """Runs the engines of one format and compares them."""
    record: dict[str, Any] = {"engines": {}, "left_out": [], "faults": []}
    start = time.monotonic()
    model, bundle = home / kind, home / f"{kind}-bundle" if arguments.bundle else None
    quantize(home / "model", model, kind)
    record["bytes"] = sizes(model)
    if bundle is not None:
        import unweight

        unweight.compress(model, bundle, profile="packed", verify="none")
        record["bundle_bytes"] = sum(file.stat().st_size for file in bundle.glob("*.safetensors"))
    record["prepare_seconds"] = time.monotonic() - start
    for name, more in engines_of(model, bundle).items():
        log, left = arguments.out.with_suffix(f".{kind}.{name}.log"), end - time.monotonic()
        result, fault = None, None
        if left > SECONDS_MIN:
            result, fault = run({**options, "llm": {**options["llm"], **more}}, log, left)
        if fault is not None:
            record["faults"].append(f"{kind}, {name}: {fault}")
        elif result is None or not result.get("is_whole"):
            record["left_out"].append(f"{kind}, {name}")
        if result is None:
            continue
        kernels = set(re.findall(r"(?:Using|Selected) (\w*Kernel)\b", log.read_text(errors="replace")))
        record["engines"][name] = result | {"kernels": sorted(kernels)}
        record["faults"] += [f"{kind}, {name}: {one}" for one in result["faults"]]
        stock = record["engines"].get("stock")
        if stock is None or name == "stock":
            continue
        record[f"{name}_to_stock"] = {**compared(stock, result), **over_bf16(stock, result)}
        record["rest"] = rest(result)
        alone = {**stock, "tokens": stock["tokens_alone"], "forced_logprobs": stock["forced_alone"]}
        record["stock_in_other_batches"] = itself = compared(stock, alone)
        limit = max(MEAN_DIFFERENCE, DIFFERENCE_RATIO * itself["forced_logprob_difference"]["mean"])
        record["faults"] += faults(f"{kind}, {name}", result, stock, limit)
        if not result["loading"].get("packed"):
            record["faults"].append(f"{kind}, {name}: no layer is packed")
        rates = record[f"{name}_to_stock"]["tokens_per_second"]
        met = {f"tokens per second at {batch}: {RATE_GOAL}": rate >= RATE_GOAL for batch, rate in rates.items()}
        met[f"bytes of the rest: {REST_GOAL}"] = record["rest"].get("ratio", 1.0) <= REST_GOAL
        record[f"{name}_goals"] = met
    shutil.rmtree(model)
    if bundle is not None:
        shutil.rmtree(bundle)
    return record


def say(kind: str, record: dict[str, Any]) -> None:
    """Prints the figures of one format."""
    print(f"{kind}: {record['bytes']}, rest {record.get('rest')}; faults {record['faults']}")
    for name, result in record["engines"].items():
        rates = {of: round(statistics.median(values), 1) for of, values in result["tokens_per_second"].items()}
        print(f"  {name}: load {result['load_seconds']:.1f} s, {result['kernels']}, tokens/s {rates}")
        to_stock = record.get(f"{name}_to_stock")
        if to_stock is not None:
            ratios = {of: round(value, 3) for of, value in to_stock["tokens_per_second"].items()}
            print(f"    to stock {ratios}, KV tokens x {to_stock['kv_tokens']:.3f}, equal {to_stock['tokens_agreed']}")
            print(f"    forced logprobs differ by {to_stock['forced_logprob_difference']}")
            itself = record["stock_in_other_batches"]
            print(f"    stock in other batches: {itself['tokens_agreed']}, {itself['forced_logprob_difference']}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("vllm-quantized.json"))
    parser.add_argument("--only", action="append", choices=FORMATS, help="only this format; may be repeated")
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES.keys() - MIXTURES.keys()), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--bundle", action="store_true", help="also compress the checkpoint, and run the bundle")
    parser.add_argument("--no-compile", action="store_true", help="CUDA graphs of decoding without torch.compile")
    parser.add_argument("--eager", action="store_true", help="neither CUDA graphs nor torch.compile")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--memory", type=float, default=0.25, help="vLLM's share of GPU memory")
    parser.add_argument("--seconds", type=float, default=1e9, help="limit of the whole run")
    parser.add_argument("--plan", action="store_true", help="print what would run, and run nothing")
    arguments = parser.parse_args()
    kinds, batches = arguments.only or list(FORMATS), numbers(parser, "--batches", arguments.batches)
    llm: dict[str, Any] = {"max_model_len": arguments.max_model_len, "enforce_eager": arguments.eager}
    if not arguments.eager:
        llm["compilation_config"] = {"cudagraph_capture_sizes": batches}
        if arguments.no_compile:
            llm["compilation_config"] |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    options = {
        "batches": batches,
        "first": [],
        "prompt": arguments.prompt,
        "tokens": arguments.tokens,
        "alone": True,
        "llm": llm,
    }
    if arguments.plan:
        for kind in kinds:
            bundle = pathlib.Path(f"SCRATCH/{kind}-bundle") if arguments.bundle else None
            for name, more in engines_of(pathlib.Path(f"SCRATCH/{kind}"), bundle).items():
                print(f"{kind}, {name}: {json.dumps({**options, 'llm': {**llm, **more}})}")
        return
    # As an exception, so that `run` kills the engine's processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    end = time.monotonic() + arguments.seconds

    import torch

    if torch.cuda.is_available():
        llm["gpu_memory_utilization"] = arguments.memory
    report: dict[str, Any] = {
        **provenance("vllm"),
        "options": options,
        "formats": {},
        "left_out": [],
        "faults": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        home = pathlib.Path(scratch)
        of_geometry(home / "model", arguments.geometry, arguments.layers)
        for kind in kinds:
            if end - time.monotonic() < SECONDS_MIN:
                report["left_out"].append(kind)
                continue
            record = measured(arguments, kind, home, options, end)
            report["left_out"] += record.pop("left_out")
            report["faults"] += record["faults"]
            report["formats"][kind] = record
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
            say(kind, record)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    if report["faults"]:
        sys.exit("; ".join(report["faults"]))


if __name__ == "__main__":
    main()

"""Compares transformers with packed weights to BF16 on one GPU: tokens per second of `generate` at batch 1, with a
dynamic cache and with a static, compiled one; logits against BF16 and float32; and every weight bit for bit.

    python transformers_gpu.py --out transformers.json               # Llama-3.1-8B's shapes: under four minutes
    python transformers_gpu.py --out transformers.json --bundle      # load the packed model from a bundle
    python transformers_gpu.py --out transformers.json --dfloat11    # also run the package dfloat11 on the same weights

Weights are random. Exit status 1: a weight differs, or the error of logits against float32 is more than 1.25 times that
of BF16. `--seconds` limits the whole run; the result names the steps left out. `--dfloat11` needs the packages dfloat11
and cupy. It loads the model as converted by `unweight convert --to dfloat11`, and its logits must be bit-identical to
those of BF16.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any, Callable, Optional

import torch
import transformers
import unweight
import unweight.transformers
from torch import Tensor, nn
from unweight.ops import Linear
from models import GEOMETRIES, of_geometry
from records import provenance

ROUNDS = 3
# The maximum error of logits against float32, in units of the error of BF16.
BOUND = 1.25


def load(folder: pathlib.Path, device: torch.device, **more: Any) -> tuple[nn.Module, float]:
    """Loads a model to a device; returns it and the seconds of loading."""
    start = time.monotonic()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, device_map={"": device}, **more
        )
    except (ImportError, ValueError) as error:
        if "accelerate" not in str(error):
            raise
        # Without accelerate, weights are packed on the CPU and moved.
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **more).to(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return model.eval(), time.monotonic() - start


def generated(model: nn.Module, ids: Tensor, tokens: int, cache: Optional[transformers.StaticCache]) -> Tensor:
    """Returns greedy tokens after a prompt. With a static cache on a GPU, transformers compiles the decoding."""
    more = {}
    if cache is not None:
        cache.reset()
        more["past_key_values"] = cache
    with torch.no_grad():
        # Random weights have no meaningful end token, so the length is fixed. The prompt has no padding.
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            **more,
        )
    return out[0, ids.shape[1] :]


def rates(model: nn.Module, ids: Tensor, tokens: int, static: bool) -> dict[str, Any]:
    """Measures tokens per second of decoding. The difference of runs of two lengths excludes their common overhead."""
    short = max(2, tokens // 8)
    # All runs use one cache, because the compiled code depends on its size.
    cache = transformers.StaticCache(config=model.config, max_cache_len=ids.shape[1] + tokens) if static else None
    start = time.monotonic()
    said = generated(model, ids, tokens, cache)
    first = time.monotonic() - start

    def seconds(count: int) -> float:
        begin = time.monotonic()
        generated(model, ids, count, cache).tolist()
        return time.monotonic() - begin

    seconds(short)
    found = []
    for _ in range(ROUNDS):
        brief = seconds(short)
        found.append((tokens - short) / (seconds(tokens) - brief))
    return {"tokens_per_second": sorted(found), "first_seconds": first, "tokens": said.tolist()}


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits.float()


def differing(packed: nn.Module, model: nn.Module) -> tuple[int, list[str]]:
    """Returns the number of packed layers, and the names of those with a bit that differs from the model."""
    layers, wrong = 0, []
    for name, layer in packed.named_modules():
        if isinstance(layer, Linear) and layer.is_packed:
            layers += 1
            weight = model.get_submodule(name).weight
            if not torch.equal(layer.unpacked().view(torch.int16), weight.detach().view(torch.int16)):
                wrong.append(name)
    return layers, wrong


def dfloat11_model(folder: pathlib.Path, converted: pathlib.Path, device: torch.device, **more: Any) -> nn.Module:
    """Converts a model directory to DFloat11 and loads that with the package dfloat11."""
    import dfloat11

    # Transformers 5 only.
    from transformers.initialization import no_init_weights

    command = [sys.executable, "-m", "unweight", "convert", str(folder), "-o", str(converted), "--to", "dfloat11"]
    subprocess.run(command, check=True)
    # The package's own model construction uses a function that transformers has moved, so it gets a model to fill.
    config = transformers.AutoConfig.from_pretrained(folder)
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return dfloat11.DFloat11Model.from_pretrained(str(converted), device=str(device), bfloat16_model=model, **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("transformers.json"))
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--bundle", action="store_true", help="load the packed model from a bundle")
    parser.add_argument("--dfloat11", action="store_true", help="run that package as well, with the same weights")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=235.0)
    parser.add_argument("--plan", action="store_true", help="print what would run, and run nothing")
    arguments = parser.parse_args()
    begin = time.monotonic()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    report: dict[str, Any] = {
        **provenance("transformers"),
        "models": {},
        "left_out": [],
        "faults": [],
    }
    models: dict[str, nn.Module] = {}

    def left() -> float:
        return arguments.seconds - (time.monotonic() - begin)

    def step(name: str, least: float, work: Callable[[], object]) -> None:
        """Runs a step if `least` seconds are left, and writes the report so far."""
        if arguments.plan:
            print(f"{name}, with {least:.0f} s left")
            return
        said = name
        if left() >= least:
            try:
                work()
            except Exception as error:
                # The other steps still give results.
                traceback.print_exc()
                report["faults"].append(f"{name}: {type(error).__name__}: {error}")
                said = f"{name}: failed"
        else:
            report["left_out"].append(name)
            said = f"{name}: no time left"
        report["seconds"] = time.monotonic() - begin
        arguments.out.write_text(json.dumps(report, indent=1))
        print(f"{report['seconds']:6.1f} s: {said}", flush=True)

    def loaded(name: str, folder: pathlib.Path, **more: Any) -> None:
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        models[name], seconds = load(folder, device, **more)
        gc.collect()
        after = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        report["models"][name] = {"load_seconds": seconds, "gpu_gib": (after - before) / 2**30}

    def timed(name: str, static: bool) -> None:
        found = report["models"][name]["static cache, compiled" if static else "dynamic cache"] = rates(
            models[name], prompt, arguments.tokens, static
        )
        middle = statistics.median(found["tokens_per_second"])
        print(f"  {name}, {'static cache, compiled' if static else 'dynamic cache'}: {middle:.1f} tokens/s")

    def weights() -> None:
        layers, wrong = differing(models["packed"], models["bf16"])
        report["packed_layers"] = layers
        if not layers:
            report["faults"].append("no layer is packed")
        report["faults"] += [f"{name}: its weight is not the model's" for name in wrong]

    def theirs(folder: pathlib.Path) -> None:
        start = time.monotonic()
        models["dfloat11"] = dfloat11_model(folder, folder.with_name("dfloat11"), device)
        report["models"]["dfloat11"] = {"convert_and_load_seconds": time.monotonic() - start}

    def same_as_bf16() -> None:
        same = torch.equal(logits(models["dfloat11"], batch), logits(models["bf16"], batch))
        report["models"]["dfloat11"]["logits_are_bf16s"] = same
        if not same:
            report["faults"].append("dfloat11: its logits are not those of the BF16 model")

    def held() -> None:
        """Compares logits with float32. Converts the BF16 model in place, so this is the last step."""
        ours = {name: logits(model, batch) for name, model in models.items() if name in ("bf16", "packed")}
        exact = logits(models["bf16"].float(), batch)
        errors = {name: (one - exact).pow(2).mean().sqrt().item() for name, one in ours.items()}
        apart = (ours["packed"] - ours["bf16"]).abs()
        report["logits"] = {
            "rms": exact.pow(2).mean().sqrt().item(),
            "error_beside_float32": errors,
            "ratio": errors["packed"] / max(errors["bf16"], 1e-30),
            "largest_beside_bf16": apart.max().item(),
            "mean_beside_bf16": apart.mean().item(),
            "argmax_agrees": (ours["packed"].argmax(-1) == ours["bf16"].argmax(-1)).float().mean().item(),
        }
        print(f"  logits: {report['logits']}")
        # `not <=` also catches NaN.
        if not report["logits"]["ratio"] <= BOUND:
            report["faults"].append(f"logits are {report['logits']['ratio']:.3f} times as far from float32 as BF16's")

    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "model"
        step("model", 0, lambda: of_geometry(folder, arguments.geometry, arguments.layers))
        vocabulary = GEOMETRIES[arguments.geometry][-1]
        random = torch.Generator().manual_seed(3)
        prompt = torch.randint(2, vocabulary, (1, arguments.prompt), generator=random).to(device)
        batch = torch.randint(2, vocabulary, (4, 64), generator=random).to(device)
        step("bf16", 0, lambda: loaded("bf16", folder))
        step("bf16, dynamic cache", 0, lambda: timed("bf16", False))
        source, more = folder, {"quantization_config": unweight.transformers.UnweightConfig()}
        if arguments.bundle:
            source, more = folder.with_name("bundle"), {}
            step("compress", 0, lambda: unweight.compress(folder, source, profile="packed", verify="none"))
        step("packed", 0, lambda: loaded("packed", source, **more))
        step("packed, dynamic cache", 0, lambda: timed("packed", False))
        step("weights", 0, weights)
        if arguments.dfloat11:
            step("dfloat11", 90, lambda: theirs(folder))
            if arguments.plan or "dfloat11" in models:
                step("dfloat11, dynamic cache", 20, lambda: timed("dfloat11", False))
                step("dfloat11, logits", 0, same_as_bf16)
        step("packed, static cache", 75, lambda: timed("packed", True))
        step("bf16, static cache", 70, lambda: timed("bf16", True))
        step("logits", 0, held)
    if arguments.plan:
        return
    for how in ("dynamic cache", "static cache, compiled"):
        both = [report["models"].get(name, {}).get(how) for name in ("bf16", "packed")]
        if all(both):
            one, other = (statistics.median(found["tokens_per_second"]) for found in both)
            report[f"{how}: packed over BF16"] = other / one
            same = (left == right for left, right in zip(both[0]["tokens"], both[1]["tokens"]))
            agreed = next((at for at, is_same in enumerate(same) if not is_same), arguments.tokens)
            report[f"{how}: tokens agreed"] = agreed
    arguments.out.write_text(json.dumps(report, indent=1))
    if report["faults"]:
        sys.exit("; ".join(report["faults"]))


if __name__ == "__main__":
    main()

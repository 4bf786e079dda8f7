"""Replaces the weights of a running vLLM engine with CUDA graphs, and compares it with a new engine.

    python vllm_live_gpu.py --out live.json                        # 8B, a GPU with 80 GB, about 5 minutes
    python vllm_live_gpu.py --geometry tiny --out live.json

Needs vLLM and the wheel. Exit status 1 if a token, a log probability or a digest differs, or outputs stay the same. The
new weights are those of the model with rows rotated by one, so their exponent windows stay. Then 1 % of the weights are
replaced.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from models import digest, of_geometry
from records import provenance

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")


def rotated(source: pathlib.Path, device: str):
    """Yields the names and new weights of a model, file by file."""
    import safetensors.torch

    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in safetensors.torch.load_file(file, device=device).items():
            yield name, tensor.roll(1, 0) if tensor.dim() == 2 else tensor


def write_rotated(source: pathlib.Path, output: pathlib.Path) -> None:
    import safetensors.torch

    output.mkdir()
    for file in sorted(source.iterdir()):
        if file.suffix != ".safetensors":
            (output / file.name).write_bytes(file.read_bytes())
            continue
        tensors = safetensors.torch.load_file(file)
        made = {name: one.roll(1, 0) if one.dim() == 2 else one for name, one in tensors.items()}
        safetensors.torch.save_file(made, output / file.name, {"format": "pt"})


def replace_some(inner) -> dict:
    """Replaces 1 % of every packed weight, three times, each time by other values; the first time also compiles
    kernels. Returns the seconds, and the layers with other bits."""
    import torch
    from unweight import update_sparse_
    from unweight.ops import unpack

    layers = {name: layer for name, layer in inner.named_modules() if hasattr(layer, "weight_packed")}
    seconds = []
    for turn in range(3):
        updates, expected = {}, {}
        for name, layer in layers.items():
            weight = unpack(layer.weight_packed.data).view(-1)
            random = torch.Generator(weight.device).manual_seed(3 + turn)
            index = torch.randint(len(weight), (len(weight) // 100,), generator=random, device=weight.device).unique()
            updates[f"{name}.weight"] = index, values = index, weight[index.roll(1)]
            weight[index] = values
            expected[name] = digest(weight)
        if index.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        update_sparse_(inner, updates)
        if index.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    made = {name: digest(unpack(layer.weight_packed.data).view(-1)) for name, layer in layers.items()}
    differs = [name for name in layers if made[name] != expected[name]]
    return {"sparse_s": seconds, "sparse_layers": len(layers), "sparse_layers_that_differ": differs}


def replace(weights: list, inner) -> float:
    """Loads new weights into the running model; returns the seconds."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    inner.load_weights(iter(weights))
    torch.cuda.synchronize()
    return time.perf_counter() - start


def run(given: argparse.Namespace) -> dict:
    """Runs one engine; with `--replace`, updates it twice: the first update also warms up."""
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=given.model,
        quantization="unweight",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=512,
        gpu_memory_utilization=given.memory,
        seed=0,
        # Without torch.compile, which chooses kernels by timing: with it, two engines with the same weights have other
        # logprobs.
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            # For the batches here only: capturing all takes longer than the rest.
            **({"cudagraph_capture_sizes": [1, 2, 4]} if given.few_graphs else {}),
        },
    )
    record: dict = {}
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 500, (length,), generator=random).tolist() for length in (5, 17, 40)]
    sampling = SamplingParams(temperature=0, max_tokens=64, logprobs=1, detokenize=False, ignore_eos=True)

    def outputs() -> list:
        done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
        return [
            [[token, step[token].logprob] for token, step in zip(one.outputs[0].token_ids, one.outputs[0].logprobs)]
            for one in done
        ]

    record["outputs"] = outputs()
    if given.replace:
        weights = list(rotated(pathlib.Path(given.model), "cuda"))
        record["update_s"] = [llm.apply_model(functools.partial(replace, weights))[0] for _ in range(2)]
        llm.reset_prefix_cache()
        record["before"], record["outputs"] = record["outputs"], outputs()
    record["digests"] = llm.apply_model(packed_digests)[0]
    if given.replace:
        record |= llm.apply_model(replace_some)[0]
        llm.reset_prefix_cache()
        record["sparse_outputs_changed"] = outputs() != record["outputs"]
    return record


def packed_digests(inner) -> dict[str, int]:
    """Returns the digests of a model's parameters, by name; of packed weights, those of the arena and the BF16 bits."""
    from unweight.ops import unpack

    made = {}
    for name, parameter in inner.named_parameters():
        made[name] = digest(parameter.data)
        if name.endswith("weight_packed"):
            made[f"{name}, unpacked"] = digest(unpack(parameter.data))
    return made


def child(end: float, *arguments: str) -> dict:
    command = [sys.executable, __file__, *arguments]
    timeout = None if end == math.inf else max(1.0, end - time.monotonic())
    with tempfile.TemporaryFile("w+") as log:
        try:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True, timeout=timeout)
        except subprocess.SubprocessError as error:
            log.seek(0)
            sys.exit(f"{log.read()[-6000:]}\nthe engine failed: {error}")
        log.seek(0)
        lines = [line for line in log if line.startswith("RECORD ")]
    return json.loads(lines[-1].removeprefix("RECORD "))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--geometry", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="layers of the model; all by default")
    parser.add_argument("--memory", type=float, default=0.5, help="vLLM's share of GPU memory")
    parser.add_argument("--source", type=pathlib.Path, help="a BF16 model directory; without it one is made")
    parser.add_argument("--few-graphs", action="store_true", help="capture graphs for the batches of this check only")
    parser.add_argument("--seconds", type=float, default=math.inf, help="limit of the whole run")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--plan", action="store_true", help="say what would be compared, and do nothing")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--replace", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plan:
        print(f"{given.geometry}, layers {given.layers or 'all'}: an updated engine, and a new one of the new weights")
        return 0
    if given.model is not None:
        print("RECORD", json.dumps(run(given)))
        return 0
    end = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as folder:
        home, options = pathlib.Path(folder), ["--memory", str(given.memory), *["--few-graphs"] * given.few_graphs]
        source = given.source or home / "model"
        if given.source is None:
            of_geometry(source, given.geometry, given.layers)
        updated = child(end, "--model", str(source), "--replace", *options)
        write_rotated(source, home / "other")
        fresh = child(end, "--model", str(home / "other"), *options)
    record = {
        **provenance("vllm"),
        "geometry": given.geometry,
        "layers": given.layers,
        "update_s": updated["update_s"],
        "outputs_equal_a_new_engine": updated["outputs"] == fresh["outputs"],
        "outputs_changed": updated["outputs"] != updated["before"],
        **{name: updated[name] for name in updated if name.startswith("sparse_")},
        "digests": len(fresh["digests"]),
        "digests_that_differ": [name for name, one in fresh["digests"].items() if updated["digests"].get(name) != one],
    }
    print(json.dumps(record, indent=1))
    if given.out:
        pathlib.Path(given.out).write_text(json.dumps({**record, "updated": updated, "fresh": fresh}, indent=1) + "\n")
    is_equal = record["outputs_equal_a_new_engine"] and not record["digests_that_differ"]
    is_changed = record["outputs_changed"] and record["sparse_outputs_changed"]
    return 0 if is_equal and is_changed and not record["sparse_layers_that_differ"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""vLLM with packed weights beside the same vLLM in BF16: tokens, logprobs, tokens per second, time to the first token,
and tokens of KV cache. Needs vLLM and this package; each engine runs in a process of its own, BF16 first.

    python vllm_gpu.py --out vllm.json                       # a model with random weights of Llama-3.1-8B's shapes
    python vllm_gpu.py --out vllm.json --model DIR --tp 2
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

# hidden, intermediate, layers, heads, heads of keys and values, head, vocabulary
GEOMETRIES = {
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128, 128256),
    "tiny": (256, 512, 2, 4, 2, 64, 512),
}
ROUNDS = 3


def make(home: pathlib.Path, geometry: str, layers: int | None) -> None:
    """A Llama with random weights: a bell curve, as trained ones are. Made on the GPU, if there is one."""
    import torch
    from safetensors.torch import save_file

    hidden, intermediate, own_layers, heads, kv_heads, head, vocabulary = GEOMETRIES[geometry]
    layers = layers or own_layers
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator(device).manual_seed(0)

    def matrix(n: int, k: int) -> torch.Tensor:
        return (torch.randn(n, k, generator=random, device=device) * 0.02).to(torch.bfloat16).cpu()

    home.mkdir(parents=True)
    places: dict[str, str] = {}

    def save(part: int, tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{part:05}.safetensors"
        save_file(tensors, home / name, {"format": "pt"})
        places.update(dict.fromkeys(tensors, name))

    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (heads * head, hidden),
            "self_attn.k_proj": (kv_heads * head, hidden),
            "self_attn.v_proj": (kv_heads * head, hidden),
            "self_attn.o_proj": (hidden, heads * head),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }
        tensors = {f"model.layers.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        save(layer, tensors)
    ends = {"model.embed_tokens.weight": matrix(vocabulary, hidden), "lm_head.weight": matrix(vocabulary, hidden)}
    save(layers, {**ends, "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)})
    (home / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (home / "config.json").write_text(json.dumps(config, indent=1))


def engine(options: dict[str, Any]) -> dict[str, Any]:
    """What one engine says and how fast it is."""
    import torch
    from vllm import LLM, SamplingParams

    start = time.monotonic()
    llm = LLM(
        skip_tokenizer_init=True,
        dtype="bfloat16",
        # A prompt that came before is to be read again.
        enable_prefix_caching=False,
        seed=0,
        **options["llm"],
    )
    loaded = time.monotonic() - start
    cache = llm.llm_engine.vllm_config.cache_config
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    random = torch.Generator().manual_seed(1)

    def prompts(count: int, length: int) -> list[dict[str, list[int]]]:
        ids = torch.randint(2, vocabulary, (count, length), generator=random).tolist()
        return [{"prompt_token_ids": one} for one in ids]

    def seconds(batch: int, length: int, tokens: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        given = prompts(batch, length)
        begin = time.monotonic()
        done = llm.generate(given, sampling, use_tqdm=False)
        taken = time.monotonic() - begin
        assert all(len(one.outputs[0].token_ids) == tokens for one in done)
        return taken

    sampling = SamplingParams(temperature=0, max_tokens=32, logprobs=1, ignore_eos=True, detokenize=False)
    said = [one.outputs[0] for one in llm.generate(prompts(8, 64), sampling, use_tqdm=False)]
    result: dict[str, Any] = {
        "load_seconds": loaded,
        "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        "tokens": [list(one.token_ids) for one in said],
        "logprobs": [[step[token].logprob for step, token in zip(one.logprobs, one.token_ids)] for one in said],
        "tokens_per_second": {},
        "first_token_ms": {},
    }
    for batch in options["batches"]:
        rates = []
        for turn in range(ROUNDS + 1):
            first = seconds(batch, options["prompt"], 1)
            whole = seconds(batch, options["prompt"], options["tokens"])
            if turn > 0:
                rates.append(batch * (options["tokens"] - 1) / (whole - first))
        result["tokens_per_second"][str(batch)] = sorted(rates)
    for length in options["first"]:
        times = [seconds(1, length, 1) * 1e3 for _ in range(2 * ROUNDS + 1)]
        result["first_token_ms"][str(length)] = sorted(times[1:])
    return result


def compared(bf16: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """How far two engines agree: greedy tokens up to the first that differs, and the logprobs of those."""
    agreed, difference = [], 0.0
    for tokens, expected, logprobs, expected_logprobs in zip(
        other["tokens"], bf16["tokens"], other["logprobs"], bf16["logprobs"]
    ):
        same = next((at for at, pair in enumerate(zip(tokens, expected)) if pair[0] != pair[1]), len(expected))
        agreed.append(same)
        pairs = zip(logprobs[:same], expected_logprobs[:same])
        difference = max([difference, *(abs(one - two) for one, two in pairs)])
    return {"tokens_agreed": agreed, "of": len(bf16["tokens"][0]), "largest_logprob_difference": difference}


def run(options: dict[str, Any], log: pathlib.Path) -> dict[str, Any]:
    with open(log, "w") as output:
        command = [sys.executable, __file__, "--engine", json.dumps(options)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=output, text=True)
        output.write(done.stdout)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    sys.exit(f"an engine failed (rc {done.returncode}); see {log}:\n" + log.read_text()[-3000:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("vllm.json"))
    parser.add_argument("--model", type=pathlib.Path, help="a BF16 model directory; without it one is made")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--bundle", action="store_true", help="compress the model, and run the bundle, too")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="neither CUDA graphs nor torch.compile")
    parser.add_argument("--batches", default="1,8,32,64,256")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--first", default="128,2048", help="prompts whose first token is timed")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--memory", type=float, help="share of the GPU; default: twice the weights in BF16")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        print("RESULT " + json.dumps(engine(json.loads(given.engine))), flush=True)
        return

    import torch
    import vllm

    import unweight

    with tempfile.TemporaryDirectory() as scratch:
        home = pathlib.Path(scratch)
        model = given.model or home / "model"
        if given.model is None:
            make(model, given.geometry, given.layers)
        weight_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        llm: dict[str, Any] = {
            "tensor_parallel_size": given.tp,
            "enforce_eager": given.eager,
            "max_model_len": given.max_model_len,
        }
        is_cuda = torch.cuda.is_available()
        if is_cuda:
            total = torch.cuda.get_device_properties(0).total_memory * given.tp
            llm["gpu_memory_utilization"] = given.memory or min(0.9, max(0.15, 2 * weight_bytes / total))
        report: dict[str, Any] = {
            "machine": torch.cuda.get_device_name(0) if is_cuda else platform.processor(),
            "date": datetime.date.today().isoformat(),
            "command": sys.argv,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "unweight": unweight.__version__,
            "weight_bytes": weight_bytes,
            "llm": llm,
            "engines": {},
        }
        engines: dict[str, dict[str, Any]] = {
            "bf16": {"model": str(model)},
            "packed while loading": {"model": str(model), "quantization": "unweight"},
        }
        if given.bundle:
            unweight.compress(model, home / "bundle", profile="resident", verify="none")
            engines["bundle"] = {"model": str(home / "bundle")}
        common = {
            "batches": [int(batch) for batch in given.batches.split(",")],
            "first": [int(length) for length in given.first.split(",")],
            "prompt": given.prompt,
            "tokens": given.tokens,
        }
        for name, own in engines.items():
            log = given.out.with_suffix(f".{name.replace(' ', '-')}.log")
            result = run({"llm": {**llm, **own}, **common}, log)
            report["engines"][name] = result
            bf16 = report["engines"]["bf16"]
            if result is not bf16:
                result["beside_bf16"] = compared(bf16, result)
                result["kv_tokens_gained"] = result["kv_tokens"] / max(1, bf16["kv_tokens"])
            given.out.write_text(json.dumps(report, indent=1))
            print(f"{name}: load {result['load_seconds']:.1f} s, KV cache of {result['kv_tokens']} tokens")
            for what, unit in (("tokens_per_second", "tokens/s"), ("first_token_ms", "ms to the first token")):
                for of, values in result[what].items():
                    middle, beside = statistics.median(values), statistics.median(bf16[what][of])
                    print(f"  {of:>5}: {middle:10.1f} {unit}, {middle / beside:.3f} of BF16")
            if result is not bf16:
                print(f"  {result['beside_bf16']}, KV tokens x {result['kv_tokens_gained']:.3f}", flush=True)


if __name__ == "__main__":
    main()

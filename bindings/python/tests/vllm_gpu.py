"""Compares vLLM with packed weights to vLLM in BF16: tokens, logprobs, tokens per second, time to the first token, and
tokens of KV cache. Needs vLLM and this package. Each engine runs in its own process, BF16 first.

    python vllm_gpu.py --out vllm.json                       # a model with random weights of Llama-3.1-8B's shapes
    python vllm_gpu.py --out vllm.json --model DIR --tp 2
    python vllm_gpu.py --out bundle.json --quick             # a bundle with a LoRA adapter: under four minutes
    python vllm_gpu.py --out mixture.json --geometry qwen3-30b-a3b --layers 4 --bundle

Use two GPUs with `--tp 2` (and `--expert-parallel` for a mixture) or `--pp 2`; with `--quick`, each process has the
adapter. `--no-packed` and `--few-graphs` save time if only the bundle matters. `--plan` lists the engines and their
options and starts none; it needs neither vLLM nor a GPU.

`--quick` uses 4 of the 32 layers, compresses the model, and runs BF16 and the bundle with `--enable-lora`. Outputs
without the adapter are compared as well. Greedy tokens diverge at the first near tie, so the check compares logprobs of
forced tokens with those of BF16. Logprobs with the adapter must differ from those without. Exit status 1: a check
failed. `--seconds` limits the whole run; the result names the engines left out. Goals of speed, memory and loading are
reported as met or missed, and do not affect the exit status.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from models import GEOMETRIES, of_geometry
from records import provenance

ROUNDS = 3
RANK = 16
# The minimum time to start an engine with: it needs about 45 seconds on a GPU before its first result.
SECONDS_MIN = 60
# Goals as ratios to BF16: tokens per second by batch, and tokens of KV cache in twice the memory of the weights.
GOALS = {"1": 1.25, "8": 1.25, "16": 1.25, "64": 1.1, "256": 1.0}
KV_GOALS = {"twice the BF16 weights": 1.29, "24 GB": 1.70}
# Mean differences of logprobs: the maximum from BF16, and the minimum due to the adapter. With random weights, logprobs
# are about -12 +- 1, and wrong weights would move them by about 1.
MEAN_DIFFERENCE, MOVED_MIN = 0.1, 0.2
# The prefix of an engine's result lines.
RESULT_PREFIX = "RESULT "
# Patterns of what vLLM and this package log about loading.
LOADED = {
    "read_seconds": r"Loading weights took ([\d.]+) seconds",
    "gpu_gib": r"Model loading took ([\d.]+) GiB",
    "packed": r"unweight: (.* packed, .* [GM]iB of .* [GM]iB; \d+ in BF16)",
    "read": r"unweight: (\d+ of \d+ bytes of the bundle read)",
}


def make_adapter(home: pathlib.Path, config: dict[str, Any]) -> None:
    """Writes a LoRA adapter in PEFT's format for all linear layers but the head and the experts. It is large enough to
    change the output."""
    import torch
    from safetensors.torch import save_file

    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[of] * config["head_dim"] for of in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
    }
    if config["model_type"] == "llama":
        shapes |= {
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }
    random = torch.Generator().manual_seed(2)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (n, k) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("lora_A", (RANK, k)), ("lora_B", (n, RANK))):
                # The product of both parts is half as large as a weight.
                drawn = torch.randn(shape, generator=random) * (0.01 / RANK**0.5) ** 0.5
                tensors[f"{prefix}.{part}.weight"] = drawn.to(torch.bfloat16)
    home.mkdir()
    save_file(tensors, home / "adapter_model.safetensors")
    targets = [name.split(".")[1] for name in shapes]
    adapter = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    (home / "adapter_config.json").write_text(json.dumps(adapter))


def engine(options: dict[str, Any]) -> None:
    """Runs one engine in this process, and prints its outputs and timings."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    start = time.monotonic()
    llm = LLM(
        skip_tokenizer_init=True,
        dtype="bfloat16",
        # A repeated prompt must be processed again.
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

    adapter = options.get("adapter")
    lora = None if adapter is None else LoRARequest("adapter", 1, adapter)

    def seconds(batch: int, length: int, tokens: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        batch_prompts = prompts(batch, length)
        begin = time.monotonic()
        done = llm.generate(batch_prompts, sampling, lora_request=lora, use_tqdm=False)
        elapsed = time.monotonic() - begin
        assert all(len(one.outputs[0].token_ids) == tokens for one in done)
        return elapsed

    free = SamplingParams(temperature=0, max_tokens=32, logprobs=1, ignore_eos=True, detokenize=False)
    requests, forced_prompts = prompts(8, 64), prompts(16, 64)
    # Each prompt allows one token, a different one per prompt. Its logprob is computed before the others are masked.
    forced = [
        SamplingParams(max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False, allowed_token_ids=[2 + 7 * index])
        for index in range(len(forced_prompts))
    ]

    def quality(lora: LoRARequest | None) -> dict[str, Any]:
        def logprobs(requests: Any, sampling: Any) -> tuple[list[list[int]], list[list[float]]]:
            outputs = [one.outputs[0] for one in llm.generate(requests, sampling, lora_request=lora, use_tqdm=False)]
            tokens = [list(one.token_ids) for one in outputs]
            return tokens, [[step[at].logprob for step, at in zip(one.logprobs, one.token_ids)] for one in outputs]

        tokens, chosen = logprobs(requests, free)
        found = {"tokens": tokens, "logprobs": chosen, "forced_logprobs": logprobs(forced_prompts, forced)[1]}
        if options.get("alone"):
            # The same prompts in batches of one, whose products are rounded differently.
            found["tokens_alone"] = [logprobs([one], free)[0][0] for one in requests]
            found["forced_alone"] = [logprobs([one], [only])[1][0] for one, only in zip(forced_prompts, forced)]
        return found

    result: dict[str, Any] = {
        "load_seconds": loaded,
        "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        **quality(lora),
        "without_adapter": None if lora is None else quality(None),
        "tokens_per_second": {},
        "first_token_ms": {},
        "faults": [],
    }
    print_result(result)

    def timed(batch: int) -> tuple[float, float]:
        return seconds(batch, options["prompt"], 1), seconds(batch, options["prompt"], options["tokens"])

    for batch in options["batches"]:
        # The first calls of a size may compile.
        timed(batch)
    for batch in options["batches"]:
        rates, fault = rates_of(functools.partial(timed, batch), batch * (options["tokens"] - 1))
        if rates:
            result["tokens_per_second"][str(batch)] = sorted(rates)
        if fault is not None:
            result["faults"].append(f"batch {batch}: {fault}")
        print_result(result)
    for length in options["first"]:
        times = [seconds(1, length, 1) * 1e3 for _ in range(2 * ROUNDS + 1)]
        result["first_token_ms"][str(length)] = sorted(times[1:])
    result["is_whole"] = True
    print_result(result)


def rates_of(timed: Callable[[], tuple[float, float]], tokens: int) -> tuple[list[float], str | None]:
    """Returns the rates of `ROUNDS` rounds, and a fault if there were fewer.

    `timed` returns the seconds to the first tokens and to all, of which `tokens` are later. A round in which the first
    took as long as all gives no rate and is repeated, at most `ROUNDS` times in all.
    """
    rates: list[float] = []
    rejected: list[str] = []
    while len(rates) < ROUNDS and len(rejected) <= ROUNDS:
        first, whole = timed()
        if whole > first:
            rates.append(tokens / (whole - first))
        else:
            rejected.append(f"{first:.3f} s and {whole:.3f} s")
    if len(rates) == ROUNDS:
        return rates, None
    return rates, f"the first token took as long as all in {len(rejected)} rounds: {', '.join(rejected)}"


def print_result(result: dict[str, Any]) -> None:
    """Prints the results so far, so that an engine that is stopped early still has results."""
    print(RESULT_PREFIX + json.dumps(result), flush=True)


def compared(bf16: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Compares two engines: the number of equal greedy tokens, the difference of their logprobs, and that of forced
    tokens."""
    agreed, difference = [], 0.0
    for tokens, expected, logprobs, expected_logprobs in zip(
        other["tokens"], bf16["tokens"], other["logprobs"], bf16["logprobs"]
    ):
        same = next((at for at, pair in enumerate(zip(tokens, expected)) if pair[0] != pair[1]), len(expected))
        agreed.append(same)
        pairs = zip(logprobs[:same], expected_logprobs[:same])
        difference = max([difference, *(abs(one - two) for one, two in pairs)])
    mean, largest = apart(bf16, other)
    return {
        "tokens_agreed": agreed,
        "of": len(bf16["tokens"][0]),
        "largest_logprob_difference": difference,
        "forced_logprob_difference": {"mean": mean, "largest": largest},
    }


def apart(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """Returns the mean and maximum difference of the logprobs of forced tokens."""
    pairs = zip(sum(one["forced_logprobs"], []), sum(other["forced_logprobs"], []))
    differences = [abs(left - right) for left, right in pairs]
    return statistics.fmean(differences), max(differences)


def over_bf16(bf16: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Returns ratios of an engine's figures to those of BF16: medians, and the reading time of the slowest process."""
    over: dict[str, Any] = {
        what: {
            of: statistics.median(values) / statistics.median(bf16[what][of])
            for of, values in other[what].items()
            if of in bf16[what]
        }
        for what in ("tokens_per_second", "first_token_ms")
    }
    over["kv_tokens"] = other["kv_tokens"] / max(1, bf16["kv_tokens"])
    read = [max(map(float, one["loading"].get("read_seconds", [0]))) for one in (other, bf16)]
    over["read_seconds"] = read[0] / read[1] if read[1] else None
    return over


def goals(over: dict[str, Any], is_dense: bool) -> dict[str, bool]:
    """Returns whether each goal is met. Goals apply to complete dense models; for others, returns none."""
    if not is_dense:
        return {}
    rates = over["tokens_per_second"]
    met = {f"tokens per second at {of}: {goal}": rates[of] >= goal for of, goal in GOALS.items() if of in rates}
    for memory, ratio in over.get("kv_tokens_at", {}).items():
        met[f"tokens of KV cache in {memory}: {KV_GOALS[memory]}"] = ratio >= KV_GOALS[memory]
    if over["read_seconds"] is not None:
        met["reading the weights: 1.0"] = over["read_seconds"] <= 1.0
    return met


def kv_tokens_at(
    bf16: dict[str, Any], other: dict[str, Any], weight_bytes: int, used: float, config: dict[str, Any]
) -> dict[str, float]:
    """Returns the ratio of KV tokens in other memories than the `used` bytes of the engines: all but the KV cache
    has the same size there."""
    token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    more = {"twice the BF16 weights": 2 * weight_bytes - used, "24 GB": 24e9 - used}
    return {
        memory: (other["kv_tokens"] + nbytes / token) / max(1, bf16["kv_tokens"] + nbytes / token)
        for memory, nbytes in more.items()
    }


def faults(name: str, result: dict[str, Any], bf16: dict[str, Any], limit: float = MEAN_DIFFERENCE) -> list[str]:
    """Returns the failed checks of an engine; `limit` is that of the mean difference of forced logprobs."""
    found = []
    pairs = [(name, result, bf16)]
    if result["without_adapter"] is not None:
        pairs.append((f"{name}, without it", result["without_adapter"], bf16["without_adapter"]))
        moved, _ = apart(result["without_adapter"], result)
        if not moved > MOVED_MIN:
            found.append(f"{name}: the adapter moves logprobs by {moved:.4f} only")
    for what, one, expected in pairs:
        mean, _ = apart(expected, one)
        # `not <` also catches NaN.
        if not mean < limit:
            found.append(f"{what}: logprobs of forced tokens are {mean:.4f} apart on average, the limit is {limit:.4f}")
    return found


def run(options: dict[str, Any], log: pathlib.Path, seconds: float) -> tuple[dict[str, Any] | None, str | None]:
    """Runs an engine in its own process for at most `seconds`; returns its last results and an error, or `None`s."""
    fault = None
    with open(log, "w") as output:
        command = [sys.executable, __file__, "--engine", json.dumps(options)]
        # In its own process group, because an engine starts processes that must end with it.
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(seconds)
        finally:
            if child.poll():
                fault = f"the engine failed (rc {child.returncode}); see {log}"
            # In any case, because the next engine needs the memory.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    text = log.read_text(errors="replace")
    if fault is not None:
        print(text[-3000:])
    results = [line for line in text.splitlines() if line.startswith(RESULT_PREFIX)]
    if not results:
        return None, fault
    matches = {what: re.findall(pattern, text) for what, pattern in LOADED.items()}
    # Each process logs one line.
    loading = {what: found for what, found in matches.items() if found}
    return {**json.loads(results[-1].removeprefix(RESULT_PREFIX)), "loading": loading}, fault


def numbers(parser: argparse.ArgumentParser, option: str, text: str) -> list[int]:
    found = [int(one) if one.strip().isdigit() else 0 for one in text.split(",")]
    if not all(found):
        parser.error(f"{option} {text!r}; pass comma-separated numbers of 1 or more")
    return found


def engines_of(arguments: argparse.Namespace, home: pathlib.Path) -> dict[str, tuple[dict[str, Any], str]]:
    """Returns the options of each engine and the name of its BF16 baseline, in the order in which they run."""
    model = str(arguments.model or home / "model")
    engines: dict[str, tuple[dict[str, Any], str]] = {"bf16": ({"model": model}, "bf16")}
    if not arguments.no_packed:
        engines["packed while loading"] = ({"model": model, "quantization": "unweight"}, "bf16")
    if arguments.bundle:
        engines["bundle"] = ({"model": str(home / "bundle")}, "bf16")
    if arguments.lora:
        for name in ("bf16", list(engines)[-1]):
            options = {**engines[name][0], "enable_lora": True, "max_lora_rank": RANK}
            engines[f"{name} with an adapter"] = (options, "bf16 with an adapter")
    if arguments.quick:
        engines = {name: engine for name, engine in engines.items() if "enable_lora" in engine[0]}
    return engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("vllm.json"))
    parser.add_argument("--model", type=pathlib.Path, help="a BF16 model directory; without it one is made")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--bundle", action="store_true", help="compress the model, and run the bundle, too")
    parser.add_argument("--lora", action="store_true", help="run BF16 and the last of the others with an adapter, too")
    parser.add_argument("--no-packed", action="store_true", help="leave out the engine that packs while it loads")
    parser.add_argument("--quick", action="store_true", help="4 layers; --bundle and --lora, nothing else")
    parser.add_argument("--seconds", type=float, help="time limit for all engines; default: none, with --quick 235")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size")
    parser.add_argument("--expert-parallel", action="store_true", help="distribute experts over the processes of --tp")
    parser.add_argument("--eager", action="store_true", help="neither CUDA graphs nor torch.compile")
    parser.add_argument("--few-graphs", action="store_true", help="capture the measured sizes only; --quick does")
    parser.add_argument("--batches", default="1,8,16,32,64,256")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--first", default="128,2048", help="prompts whose first token is timed")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--memory", type=float, help="share of the GPU; default: twice the weights in BF16")
    parser.add_argument("--plan", action="store_true", help="print what would run, and run nothing")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        engine(json.loads(arguments.engine))
        return
    # As an exception, so that `run` kills the engine's processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begin = time.monotonic()
    if arguments.quick:
        arguments.bundle = arguments.lora = arguments.no_packed = arguments.few_graphs = True
        arguments.layers = arguments.layers or 4
        arguments.batches, arguments.first = "1,8,16,32", "128"
        arguments.seconds = arguments.seconds or 235.0
    common = {
        "batches": numbers(parser, "--batches", arguments.batches),
        "first": numbers(parser, "--first", arguments.first),
        "prompt": arguments.prompt,
        "tokens": arguments.tokens,
    }
    llm: dict[str, Any] = {
        "tensor_parallel_size": arguments.tp,
        "pipeline_parallel_size": arguments.pp,
        "enable_expert_parallel": arguments.expert_parallel,
        "enforce_eager": arguments.eager,
        "max_model_len": arguments.max_model_len,
    }
    if arguments.few_graphs and not arguments.eager:
        # Only for the measured sizes: capturing all takes longer than measuring.
        llm["compilation_config"] = {"cudagraph_capture_sizes": common["batches"]}
    if arguments.plan:
        for name, (engine_options, baseline) in engines_of(arguments, pathlib.Path("SCRATCH")).items():
            print(f"{name}, compared with {baseline}: {json.dumps({**llm, **engine_options, **common})}")
        return

    import torch

    import unweight

    with tempfile.TemporaryDirectory() as scratch:
        home = pathlib.Path(scratch)
        model = arguments.model or home / "model"
        if arguments.model is None:
            of_geometry(model, arguments.geometry, arguments.layers)
        weight_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        is_cuda = torch.cuda.is_available()
        if is_cuda:
            total = torch.cuda.get_device_properties(0).total_memory * arguments.tp * arguments.pp
            llm["gpu_memory_utilization"] = arguments.memory or min(0.9, max(0.15, 2 * weight_bytes / total))
        report: dict[str, Any] = {
            **provenance("vllm"),
            "weight_bytes": weight_bytes,
            "llm": llm,
            "engines": {},
            "left_out": [],
            "faults": [],
        }
        if arguments.bundle:
            start = time.monotonic()
            unweight.compress(model, home / "bundle", profile="packed", verify="none")
            report["compress_seconds"] = time.monotonic() - start
            report["bundle_bytes"] = sum(file.stat().st_size for file in (home / "bundle").glob("*.safetensors"))
        config = json.loads((model / "config.json").read_text())
        is_whole = is_cuda and arguments.layers is None and not any("experts" in key for key in config)
        if arguments.lora:
            make_adapter(home / "adapter", config)
        for name, (engine_options, baseline) in engines_of(arguments, home).items():
            log = arguments.out.with_suffix(f".{name.replace(' ', '-')}.log")
            more = {"adapter": str(home / "adapter")} if "enable_lora" in engine_options else {}
            left = (arguments.seconds or 1e9) - (time.monotonic() - begin)
            result, fault = None, None
            if left > (SECONDS_MIN if is_cuda else 0):
                result, fault = run({"llm": {**llm, **engine_options}, **common, **more}, log, left)
            if fault is not None:
                report["faults"].append(f"{name}: {fault}")
            elif result is None or not result.get("is_whole"):
                report["left_out"].append(name)
            if result is None:
                arguments.out.write_text(json.dumps(report, indent=1))
                print(f"{name}: {fault or 'no time left'}", flush=True)
                continue
            report["engines"][name] = result
            report["faults"] += [f"{name}: {one}" for one in result["faults"]]
            bf16 = report["engines"].get(baseline)
            if bf16 is not None and result is not bf16:
                result["beside_bf16"] = compared(bf16, result)
                if result["without_adapter"] is not None:
                    result["beside_bf16_without_adapter"] = compared(
                        bf16["without_adapter"], result["without_adapter"]
                    )
                result["over_bf16"] = over_bf16(bf16, result)
                if is_whole and arguments.tp * arguments.pp == 1:
                    used = llm["gpu_memory_utilization"] * total
                    result["over_bf16"]["kv_tokens_at"] = kv_tokens_at(bf16, result, weight_bytes, used, config)
                result["goals"] = goals(result["over_bf16"], is_whole and "enable_lora" not in engine_options)
                report["faults"] += faults(name, result, bf16)
            report["seconds"] = time.monotonic() - begin
            arguments.out.write_text(json.dumps(report, indent=1))
            print(f"{name}: load {result['load_seconds']:.1f} s, KV cache of {result['kv_tokens']} tokens")
            print(f"  {result['loading']}")
            for what, unit in (("tokens_per_second", "tokens/s"), ("first_token_ms", "ms to the first token")):
                for of, values in result[what].items():
                    over = result.get("over_bf16", {}).get(what, {}).get(of)
                    over = "" if over is None else f", {over:.3f} of BF16"
                    print(f"  {of:>5}: {statistics.median(values):10.1f} {unit}{over}")
            if "over_bf16" in result:
                ratios = result["over_bf16"]
                print(f"  {result['beside_bf16']}, KV tokens x {ratios['kv_tokens']:.3f}, {ratios.get('kv_tokens_at')}")
                for goal, is_met in result["goals"].items():
                    print(f"  {'met' if is_met else 'MISSED'}: {goal}")
            sys.stdout.flush()
        if report["faults"]:
            sys.exit("; ".join(report["faults"]))


if __name__ == "__main__":
    main()

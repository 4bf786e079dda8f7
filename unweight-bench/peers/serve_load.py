"""Latency of an OpenAI-compatible server under load: `unweight serve`, two of its builds, or any server by its URL.

    python3 serve_load.py --unweight unweight --out serve_load.json              # a random model of Llama-3.1-8B's shapes
    python3 serve_load.py --unweight unweight --before old/unweight --out serve_load.json
    python3 serve_load.py --unweight unweight --vllm python3 --out serve_load.json    # next to vLLM in BF16
    python3 serve_load.py --url http://127.0.0.1:8000 --model llama --out other.json

Prompts are random token ids, greedy decoding, streamed. Arrivals are a Poisson process; every server gets the same
prompts at the same times. `--vllm` runs vLLM's server first, on the model that the bundle is made from, with
default settings except for `--max-model-len`, `--max-num-seqs` and `--gpu-memory-utilization`. Loads:

- `long`: 3 requests/s, 6,000 prompt tokens, 64 new tokens.
- `short`: 16 requests/s, 512 prompt tokens, 128 new tokens.
- `closed`: 1, 8, 32, 64 and 128 clients, each of which sends its next request when the last one ends: 512 + 128 tokens.
- `prefix`: pairs of requests that share 4,000 tokens; the text of the second must equal that of a fresh server of
  ours.
- `bench` (needs `--vllm`): the closed loop by vLLM's client, `vllm bench serve`; not a default.
- `no_limit` (own servers only): 256 chats without `max_tokens` in 24 GB of GPU memory and a context of 1,024 tokens,
  next to `unweight generate` with the same prompts.

Each load reports the time to the first token, gaps between the parts of one stream, the mean time per output token of
a request, and tokens per second. For a server that this script starts, `server` holds the CPU seconds of its processes
during the load and their resident memory after it; shared pages count once per process. `--only LOAD` selects loads,
`--seconds` sets the length of `long` and `short`. Times in `_ms` are in ms. The output file is written after each load.
Exit status 1 if vLLM does not start, a request failed, or texts differ.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 32, 8, 128, 128256
# Loads of any server, all loads, and what `--only` takes besides.
SERVED = ("long", "short", "closed", "prefix")
LOADS = (*SERVED, "no_limit")
BENCH = "bench"
# `vllm bench serve` for each list of options, in one process, because its imports take long.
BENCH_PROGRAM = """
import json, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
with open(sys.argv[2], "w") as results:
    for options in json.loads(sys.argv[1]):
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        print(json.dumps(main(parser.parse_args(options))), file=results)
"""
# The results that are kept.
BENCH_KEYS = (
    "completed",
    "failed",
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_itl_ms",
    "p99_itl_ms",
)
# Requests per second, prompt tokens, new tokens.
OPEN = {"long": (3.0, 6000, 64), "short": (16.0, 512, 128)}
# Clients, requests.
CLOSED = ((1, 6), (8, 24), (32, 96), (64, 192), (128, 256))
CONTEXT, MAX_BATCH = 8192, 128
# Seconds for vLLM to load, compile and capture its graphs.
START_LIMIT = 300
PREFIX_TOKENS, PREFIX_PAIRS = 4000, 8
CHATS, CHAT_CONTEXT, CHAT_MEMORY = 256, 1024, "24000000000"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def make_model(home: Path) -> None:
    """Makes a model with random weights and a tokenizer of one word per token, so that every token adds text to a
    stream."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def matrix(n: int, k: int):
        return (torch.randn(n, k, generator=generator, device=device) * 0.02).to(torch.bfloat16).cpu()

    def norm():
        return torch.ones(HIDDEN, dtype=torch.bfloat16)

    home.mkdir(parents=True)
    files = {}

    def save(name: str, tensors: dict) -> None:
        save_file(tensors, home / name, {"format": "pt"})
        files.update(dict.fromkeys(tensors, name))

    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors = {f"{prefix}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {f"{prefix}.{name}.weight": norm() for name in ("input_layernorm", "post_attention_layernorm")}
        save(f"model-{layer:05}.safetensors", tensors)
    ends = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN)}
    save(f"model-{LAYERS:05}.safetensors", {**ends, "model.norm.weight": norm()})
    (home / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    (home / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(home / "tokenizer.json"))
    (home / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    if device == "cuda":
        torch.cuda.empty_cache()


def processes(root: int) -> dict[int, list[str]]:
    """Returns the fields of /proc/PID/stat, from the state on, of a process and its descendants."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(stat.parent.name)] = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
    tree = [pid for pid in (root,) if pid in found]
    for parent in tree:
        tree.extend(pid for pid, fields in found.items() if int(fields[1]) == parent)
    return {pid: found[pid] for pid in tree}


def usage(root: int) -> dict:
    """Returns the CPU seconds, ended children included, and the resident memory of a process and its descendants."""
    fields = processes(root).values()
    ticks = sum(int(value) for of in fields for value in of[11:15])
    pages = sum(int(of[21]) for of in fields)
    return {
        "cpu_s": round(ticks / os.sysconf("SC_CLK_TCK"), 2),
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "processes": len(fields),
    }


def stop(process: subprocess.Popen) -> None:
    """Stops a server and its descendants, so that the next server has the whole GPU."""
    started = {pid: of[19] for pid, of in processes(process.pid).items()}

    def running() -> list[int]:
        alive = []
        for pid, start in started.items():
            now = processes(pid).get(pid)
            # A different start time means that the id was reused.
            if now and now[0] != "Z" and now[19] == start:
                alive.append(pid)
        return alive

    process.send_signal(signal.SIGINT)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    # Children exit after their parent. Kill those that still run after five seconds.
    for tenth in range(100):
        left = running()
        if not left:
            break
        if tenth == 50:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


class Server:
    """One of our servers, run as a process. Its log is next to the bundle."""

    def __init__(self, binary: str, bundle: Path, log: Path, *options: str):
        self.log = log.open("w")
        command = [binary, "serve", str(bundle), "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        line = self.process.stdout.readline()
        if "http://" not in line:
            raise SystemExit(f"{' '.join(command)}: {line}{log.read_text()[-2000:]}")
        self.url = "http://" + line.split("http://")[1].split()[0].removesuffix("/v1")

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        stop(self.process)
        self.log.close()


def vllm_environment(path: Path | None) -> dict[str, str]:
    """Returns the environment of vLLM's processes."""
    environment = dict(os.environ)
    # Disable downloads, usage reports, and FlashInfer's sampler. Greedy decoding does not use the sampler, and
    # FlashInfer may be missing.
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if path:
        others = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(path.absolute()), *([others] if others else [])])
    return environment


class Vllm:
    """The server of vLLM in BF16, run as a process. Its log is next to the model."""

    def __init__(self, python: str, path: Path | None, model: Path, log: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "bfloat16"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(CONTEXT)]
        command += ["--max-num-seqs", str(MAX_BATCH), "--gpu-memory-utilization", "0.9"]
        self.log = log.open("w")
        environment = vllm_environment(path)
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, env=environment)
        self.url = f"http://127.0.0.1:{port}"
        try:
            self.wait(START_LIMIT)
        except BaseException as error:
            self.__exit__()
            if isinstance(error, RuntimeError):
                raise RuntimeError(f"{' '.join(command)}: {error}\n{log.read_text(errors='replace')[-6000:]}") from None
            raise

    def wait(self, seconds: float) -> None:
        """Waits until the server answers."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"exit status {self.process.returncode}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise RuntimeError(f"not ready after {seconds:.0f} s")

    def __enter__(self) -> "Vllm":
        return self

    def __exit__(self, *_) -> None:
        stop(self.process)
        self.log.close()


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, model: str | None):
        self.session, self.url, self.model = session, url, model
        self.failures: list[str] = []

    async def complete(self, prompt: list[int], new_tokens: int) -> dict:
        """Sends one streamed completion. Returns the arrival times of its parts, in seconds from the start, its text,
        and its number of tokens: a server under load may send several tokens in one part."""
        body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.model:
            body["model"] = self.model
        began, times, text, tokens = time.perf_counter(), [], [], None
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"status {answer.status}: {(await answer.text())[:300]}")
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(str(event["error"]))
                    if event.get("usage"):
                        tokens = event["usage"]["completion_tokens"]
                    part = event["choices"][0]["text"] if event["choices"] else ""
                    if part:
                        times.append(time.perf_counter() - began)
                        text.append(part)
        except (RuntimeError, aiohttp.ClientError, asyncio.TimeoutError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")
        return {"times": times, "text": "".join(text), "tokens": len(times) if tokens is None else tokens}

    async def chat(self, content: str) -> int:
        """Sends a chat without `max_tokens`. Returns the number of tokens in the answer."""
        try:
            body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
            async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as answer:
                whole = await answer.json()
                if answer.status != 200:
                    raise RuntimeError(f"status {answer.status}: {str(whole)[:300]}")
                return whole["usage"]["completion_tokens"]
        except (RuntimeError, aiohttp.ClientError, asyncio.TimeoutError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            return 0


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def figures(answers: list[dict], seconds: float) -> dict:
    first = [1e3 * answer["times"][0] for answer in answers if answer["times"]]
    pairs = (itertools.pairwise(answer["times"]) for answer in answers)
    gaps = [1e3 * (after - before) for before, after in itertools.chain.from_iterable(pairs)]
    long = [answer for answer in answers if answer["times"] and answer["tokens"] > 1]
    per_token = [1e3 * (of["times"][-1] - of["times"][0]) / (of["tokens"] - 1) for of in long]
    tokens = sum(answer["tokens"] for answer in answers)
    shares = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    return {
        "requests": len(answers),
        "tokens": tokens,
        "parts": sum(len(answer["times"]) for answer in answers),
        "seconds": round(seconds, 2),
        "tokens_per_s": round(tokens / seconds, 1),
        "first_token_ms": {name: round(percentile(first, share), 2) for name, share in shares},
        "gap_ms": {name: round(percentile(gaps, share), 2) for name, share in shares},
        "time_per_output_token_ms": {
            "mean": round(statistics.fmean(per_token), 2) if per_token else None,
            **{name: round(percentile(per_token, share), 2) for name, share in shares},
        },
    }


def prompt(source: random.Random, tokens: int) -> list[int]:
    return [source.randrange(VOCAB) for _ in range(tokens)]


async def open_load(client: Client, name: str, seconds: float) -> dict:
    rate, prompt_tokens, new_tokens = OPEN[name]
    source, at, requests = random.Random(f"{name} 1"), 0.0, []
    while (at := at + source.expovariate(rate)) < seconds:
        requests.append((at, prompt(source, prompt_tokens)))
    began = time.perf_counter()

    async def send(at: float, ids: list[int]) -> dict:
        await asyncio.sleep(max(0.0, at - (time.perf_counter() - began)))
        return await client.complete(ids, new_tokens)

    answers = await asyncio.gather(*(send(*request) for request in requests))
    return figures(answers, time.perf_counter() - began)


async def closed_load(client: Client, clients: int, requests: int) -> dict:
    source = random.Random(f"closed {clients}")
    prompts = iter([prompt(source, 512) for _ in range(requests)])
    answers = []

    async def run() -> None:
        for ids in prompts:
            answers.append(await client.complete(ids, 128))

    began = time.perf_counter()
    await asyncio.gather(*(run() for _ in range(clients)))
    return {"clients": clients, **figures(answers, time.perf_counter() - began)}


def prefix_prompts() -> list[tuple[list[int], list[int]]]:
    source = random.Random("prefix")
    shared = [prompt(source, PREFIX_TOKENS) for _ in range(PREFIX_PAIRS)]
    return [(ids + prompt(source, 40), ids + prompt(source, 40)) for ids in shared]


async def prefix_load(client: Client) -> dict:
    firsts, seconds = [], []
    for one, two in prefix_prompts():
        firsts.append(await client.complete(one, 32))
        seconds.append(await client.complete(two, 32))
    times = [[1e3 * answer["times"][0] for answer in answers if answer["times"]] for answers in (firsts, seconds)]
    return {
        "pairs": PREFIX_PAIRS,
        "first_request_ms": [round(value, 2) for value in times[0]],
        "second_request_ms": [round(value, 2) for value in times[1]],
        "second_request_median_ms": round(statistics.median(times[1]), 2) if times[1] else None,
        "texts": [answer["text"] for answer in seconds],
    }


async def metrics(client: Client) -> dict:
    async with client.session.get(f"{client.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    wanted = ("unweight_prompt_tokens_shared_total", "unweight_prompt_tokens_total", "unweight_preempted_total")
    split = (line.rsplit(" ", 1) for line in lines if line.startswith(wanted))
    return {name: float(value) for name, value in split}


def client_session() -> aiohttp.ClientSession:
    limits = aiohttp.ClientTimeout(total=300)
    # A server may close an idle connection just as a request is sent on it.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=limits, read_bufsize=1 << 22)


async def with_usage(load: Awaitable[dict], process: int | None) -> dict:
    """Returns the figures of a load and the resources that the processes of its server used."""
    if process is None:
        return await load
    before = usage(process)
    found = await load
    after = usage(process)
    return {**found, "server": {**after, "cpu_s": round(after["cpu_s"] - before["cpu_s"], 2)}}


async def measure(
    url: str,
    loads: list[str],
    seconds: float,
    result: dict,
    save: Callable[[], None],
    model: str | None = None,
    process: int | None = None,
    ours: bool = False,
) -> None:
    """Adds the figures of each load to `result` and saves them."""
    async with client_session() as session:
        client = Client(session, url, model)
        result["failures"] = client.failures
        # Compile the kernels and capture the graphs of every batch before the first measurement.
        warm = random.Random("warm")
        await asyncio.gather(*(client.complete(prompt(warm, 700), 24) for _ in range(64)))
        for name in loads:
            if name in OPEN:
                result[name] = await with_usage(open_load(client, name, seconds), process)
            elif name == "closed":
                result[name] = []
                for of in CLOSED:
                    result[name].append(await with_usage(closed_load(client, *of), process))
                    save()
            elif name == "prefix":
                result[name] = await with_usage(prefix_load(client), process)
            save()
            print(name, json.dumps({**result[name], "texts": None} if name == "prefix" else result[name]), flush=True)
        if ours:
            result["metrics"] = await metrics(client)


async def texts_alone(url: str) -> list[str]:
    """Returns the second texts of `prefix` from a server that saw none of the first requests."""
    async with client_session() as session:
        client = Client(session, url, None)
        return [(await client.complete(two, 32))["text"] for _, two in prefix_prompts()]


def chats() -> list[str]:
    source = random.Random("chats")
    return [" ".join(f"t{token}" for token in prompt(source, 64)) for _ in range(CHATS)]


async def no_limit(url: str) -> dict:
    async with client_session() as session:
        client = Client(session, url, None)
        began = time.perf_counter()
        tokens = await asyncio.gather(*(client.chat(text) for text in chats()))
        seconds = time.perf_counter() - began
        served = {"requests": CHATS, "tokens": sum(tokens), "tokens_per_s": round(sum(tokens) / seconds, 1)}
        return {**served, "seconds": round(seconds, 2), "metrics": await metrics(client), "failures": client.failures}


def offline(binary: str, bundle: Path, memory: str) -> dict:
    """Runs `generate` with the prompts of `no_limit`."""
    prompts = [part for text in chats() for part in ("--tokens", ",".join(word[1:] for word in text.split()))]
    options = ["--max-batch", str(CHATS), "--context", str(CHAT_CONTEXT), "--memory", memory, "--json", "-n"]
    new_tokens = CHAT_CONTEXT - 64
    command = [binary, "generate", str(bundle), *prompts, *options, str(new_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"failed": done.stderr[-600:]}
    whole = json.loads(done.stdout)
    return {key: value for key, value in whole.items() if not isinstance(value, (list, dict))}


def bench(url: str, model: Path, arguments) -> list[dict]:
    """Runs vLLM's own client against a server, at each number of clients."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
        name = json.load(answer)["data"][0]["id"]
    common = ["--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", name]
    common += ["--tokenizer", str(model), "--dataset-name", "random", "--random-input-len", "512", "--ignore-eos"]
    common += ["--random-output-len", "128", "--temperature", "0", "--disable-tqdm"]
    runs = [
        [*common, "--num-prompts", str(requests), "--max-concurrency", str(clients), "--seed", str(clients)]
        for clients, requests in CLOSED
    ]
    results = model.parent / "bench.jsonl"
    command = [arguments.vllm, "-c", BENCH_PROGRAM, json.dumps(runs), str(results)]
    environment = vllm_environment(arguments.vllm_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"vllm bench serve: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = [json.loads(line) for line in results.read_text().splitlines()]
    found = [
        {"clients": clients, **{key: of[key] for key in BENCH_KEYS if key in of}}
        for (clients, _), of in zip(CLOSED, found, strict=True)
    ]
    print(BENCH, json.dumps(found), flush=True)
    return found


def run_vllm(model: Path, arguments, result: dict, save: Callable[[], None]) -> None:
    loads = [load for load in arguments.only if load in SERVED]
    began = time.perf_counter()
    try:
        with Vllm(arguments.vllm, arguments.vllm_path, model, model.parent / "vllm.log") as server:
            result["start_s"] = round(time.perf_counter() - began, 2)
            result["started"] = usage(server.process.pid)
            asyncio.run(measure(server.url, loads, arguments.seconds, result, save, process=server.process.pid))
            if BENCH in arguments.only:
                result[BENCH] = bench(server.url, model, arguments)
    except RuntimeError as error:
        result["failed"] = str(error)
        print(error, flush=True)
    result.get("prefix", {}).pop("texts", None)
    save()


def run(binary: str, bundle: Path, arguments, name: str, result: dict, save: Callable[[], None]) -> None:
    work = bundle.parent
    sizes = ["--max-batch", str(MAX_BATCH)]
    loads = [load for load in arguments.only if load in SERVED]
    if loads or BENCH in arguments.only:
        began = time.perf_counter()
        with Server(binary, bundle, work / f"{name}.log", *sizes, *arguments.option) as server:
            result["start_s"] = round(time.perf_counter() - began, 2)
            pid = server.process.pid
            result["started"] = usage(pid)
            asyncio.run(measure(server.url, loads, arguments.seconds, result, save, process=pid, ours=True))
            if BENCH in arguments.only:
                result[BENCH] = bench(server.url, work / "model", arguments)
    if "prefix" in loads:
        with Server(binary, bundle, work / f"{name}-alone.log", *sizes, *arguments.option) as server:
            alone = asyncio.run(texts_alone(server.url))
        result["prefix"]["texts_equal"] = alone == result["prefix"].pop("texts")
    if "no_limit" in arguments.only:
        sizes = ["--max-batch", str(CHATS), "--context", str(CHAT_CONTEXT), "--memory", CHAT_MEMORY]
        with Server(binary, bundle, work / f"{name}-24.log", *sizes, *arguments.option) as server:
            result["no_limit"] = asyncio.run(no_limit(server.url))
        result["no_limit"]["generate"] = offline(binary, bundle, CHAT_MEMORY)
        print("no_limit", json.dumps(result["no_limit"]), flush=True)
    save()


def failed(result: dict) -> bool:
    unequal = not result.get("prefix", {}).get("texts_equal", True)
    broken = "failed" in result or bool(result.get("failures"))
    return broken or bool(result.get("no_limit", {}).get("failures")) or unequal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--unweight", help="the command")
    which.add_argument("--url", help="a running server")
    parser.add_argument("--before", help="another build, measured before this one")
    parser.add_argument("--vllm", metavar="PYTHON", help="Python that has vLLM; its server runs first, in BF16")
    parser.add_argument("--vllm-path", type=Path, metavar="DIR", help="directory put first in PYTHONPATH of --vllm")
    parser.add_argument("--model", help="name of the model at --url")
    parser.add_argument("--bundle", type=Path, help="a bundle made by an earlier run with --keep")
    parser.add_argument("--work", type=Path, help="directory for the model, 30 GB")
    parser.add_argument("--keep", action="store_true", help="keep the bundle, with --vllm also the model, in --work")
    parser.add_argument("--only", nargs="+", choices=[*LOADS, BENCH], default=list(LOADS))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--option", action="append", default=[], help="option of `unweight serve`; repeatable")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.vllm and arguments.url:
        parser.error("--vllm needs --unweight: it measures the model that the bundle is made from")
    if BENCH in arguments.only and not arguments.vllm:
        parser.error("--only bench needs --vllm")
    results = {}

    def save() -> None:
        part = arguments.out.with_name(f"{arguments.out.name}.part")
        part.write_text(json.dumps(results, indent=1))
        part.replace(arguments.out)

    if arguments.url:
        loads = [load for load in arguments.only if load in SERVED]
        result = results["server"] = {}
        asyncio.run(measure(arguments.url, loads, arguments.seconds, result, save, model=arguments.model))
    else:
        work = arguments.work or Path(tempfile.mkdtemp())
        model, bundle = work / "model", arguments.bundle or work / "bundle"
        # The tokenizer's configuration is the last file of a model.
        made = not (model / "tokenizer_config.json").exists() and (arguments.vllm or not bundle.exists())
        if made:
            make_model(model)
        if not bundle.exists():
            command = [arguments.unweight, "compress", model, "-o", bundle, "--profile", "packed"]
            subprocess.run([*map(str, command), "--verify", "none"], check=True)
        if arguments.vllm:
            print("-- vllm", flush=True)
            run_vllm(model, arguments, results.setdefault("vllm", {}), save)
        # `bench` reads the tokenizer.
        if made and not (arguments.keep and arguments.vllm) and BENCH not in arguments.only:
            shutil.rmtree(model)
        builds = [("now", arguments.unweight)]
        if arguments.before:
            builds.insert(0, ("before", arguments.before))
        for name, binary in builds:
            print(f"-- {name}", flush=True)
            run(binary, bundle, arguments, name, results.setdefault(name, {}), save)
        if not arguments.keep:
            shutil.rmtree(bundle)
            if made:
                shutil.rmtree(model, ignore_errors=True)
    save()
    return int(any(failed(result) for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())

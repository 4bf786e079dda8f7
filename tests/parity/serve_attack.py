"""Attacks `unweight serve` on a GPU: 500 clients with shared prefixes, cancellations, slow readers and preemptions.

    python3 serve_attack.py --unweight ../bin/unweight [--clients 500] [--seconds 60] [--out FILE]

Makes a small Llama with random weights, and serves it with a KV cache that holds a fraction of the load, so sequences
are preempted. Each client sends requests until the time is over. Prompts begin with one of a few prefixes, cut or
changed at a random token, so that cached prefixes nearly match. A request is read to its end, read slowly, cancelled
after some tokens, or dropped before its first token; some have several choices, adjusted logits or log probabilities.
Afterwards it checks that

- each greedy token is the likeliest by an f32 reference in PyTorch, given the tokens before it, within the error of
  BF16: a key or value of another sequence would change the logits by far more;
- no request failed but by 429, and each answer has its `max_tokens` tokens;
- tokens never stopped for longer than `STALL` seconds while a request was open;
- all sequences have ended, and every page and every BF16 unit is free again.

Runs once per KV cache, `bf16` and `packed`, with drafts. Needs torch (CUDA), transformers and aiohttp. Exit status 1 if
a check fails.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, CONTEXT, MAX_BATCH = 8192, 2048, 64
PREFIXES, PREFIX_TOKENS = 6, 1400
# Seconds without any token of any request.
STALL = 5.0
# The largest distance of a greedy token's logit from the maximum, in standard deviations of the logits. A random token
# is 3.7 away on average; the BF16 error of this model is below 0.1.
DISTANCE = 0.4
# What a client does with a request, as often as it stands here.
KINDS = ("whole", "whole", "whole", "slow", "cancelled", "dropped", "choices", "adjusted", "sampled")
# Checked answers: the reference computes each of them.
CHECKED = 6000


def make_model(home: Path) -> None:
    """Makes a model with random weights and a tokenizer of one word per token, so that text shows token ids."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(home)
    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(home / "tokenizer.json"))
    (home / "tokenizer_config.json").write_text("{}")


class Attack:
    """All clients of one server, and what they observed."""

    def __init__(self, url: str, session: aiohttp.ClientSession, seed: int):
        self.url, self.session = url, session
        source = random.Random(seed)
        self.prefixes = [[source.randrange(VOCAB) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]
        self.answers: list[tuple[list[int], list[int]]] = []
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self.newest = time.perf_counter()
        self.longest_pause = 0.0

    def prompt(self, source: random.Random) -> list[int]:
        """Returns part of a prefix, sometimes with one changed token, then tokens of its own; or a repeated pattern,
        for which drafts are right."""
        if source.random() < 0.1:
            return [source.randrange(VOCAB) for _ in range(source.randrange(2, 9))] * 12
        prefix = self.prefixes[source.randrange(PREFIXES)][: source.choice((0, 63, 64, 65, 512, 700, 1024, 1400))]
        if prefix and source.random() < 0.3:
            prefix = list(prefix)
            prefix[source.randrange(len(prefix))] = source.randrange(VOCAB)
        return prefix + [source.randrange(VOCAB) for _ in range(source.randrange(1, 80))]

    def note_token(self) -> None:
        now = time.perf_counter()
        self.longest_pause = max(self.longest_pause, now - self.newest)
        self.newest = now

    async def request(self, source: random.Random) -> None:
        kind = source.choice(KINDS)
        prompt, new = self.prompt(source), source.randrange(1, 200)
        if source.random() < 0.3:
            # Such sequences grow by many pages, so others are preempted.
            new = source.randrange(300, min(900, CONTEXT - len(prompt)))
        body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True, "ignore_eos": True}
        if kind == "choices":
            body["n"] = 3
        elif kind == "adjusted":
            body |= {"logit_bias": {str(source.randrange(VOCAB)): 5}, "frequency_penalty": 0.5, "logprobs": 2}
        elif kind == "sampled":
            body |= {"temperature": 1, "seed": source.randrange(1 << 30)}
        most = source.randrange(1, 30) if kind == "cancelled" else new
        texts: dict[int, str] = {}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as answer:
            if answer.status == 429:
                self.counts["refused"] += 1
                await asyncio.sleep(source.random())
                return
            if answer.status != 200:
                raise RuntimeError(f"{kind}: status {answer.status}: {(await answer.text())[:200]}")
            if kind == "dropped":
                self.counts[kind] += 1
                return
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"{kind}: {event['error']}")
                self.note_token()
                for choice in event["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                    if choice["finish_reason"] not in (None, "length"):
                        raise RuntimeError(f"{kind}: ended with {choice['finish_reason']}")
                if kind == "cancelled" and len(texts.get(0, "").split()) >= most:
                    break
                if kind == "slow":
                    await asyncio.sleep(source.random() * 0.05)
        self.counts[kind] += 1
        for text in texts.values():
            ids = [int(word[1:]) for word in text.split()]
            if kind != "cancelled" and len(ids) != new:
                raise RuntimeError(f"{kind}: {len(ids)} of {new} tokens")
            if kind in ("whole", "slow", "cancelled", "choices"):
                self.answers.append((prompt, ids))

    async def client(self, seed: str, end: float) -> None:
        source = random.Random(seed)
        while time.perf_counter() < end:
            try:
                await self.request(source)
            except (RuntimeError, aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    async def metrics(self) -> dict[str, float]:
        async with self.session.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        values = (line.rsplit(" ", 1) for line in lines if line.startswith("unweight_") and "{" not in line)
        return {name: float(value) for name, value in values}

    async def idle_metrics(self) -> dict[str, float]:
        """Returns the metrics once no sequence runs or waits."""
        for _ in range(200):
            metrics = await self.metrics()
            if metrics["unweight_sequences_running"] + metrics["unweight_sequences_waiting"] == 0:
                break
            await asyncio.sleep(0.1)
        return metrics


async def attack(url: str, clients: int, seconds: float, seed: int) -> tuple[Attack, dict, dict]:
    limits, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=limits, read_bufsize=1 << 22) as session:
        run = Attack(url, session, seed)
        before = await run.idle_metrics()
        run.newest = time.perf_counter()
        end = run.newest + seconds
        await asyncio.gather(*(run.client(f"{seed} {index}", end) for index in range(clients)))
        after = await run.idle_metrics()
        return run, before, after


def distances(reference: LlamaForCausalLM, answers: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Returns how far the logit of each generated token is from the maximum, in standard deviations."""
    found = []
    answers = sorted(answers, key=lambda answer: len(answer[0]) + len(answer[1]))
    for start in range(0, len(answers), 16):
        batch = answers[start : start + 16]
        longest = max(len(prompt) + len(ids) for prompt, ids in batch)
        rows = [prompt + ids + [0] * (longest - len(prompt) - len(ids)) for prompt, ids in batch]
        with torch.no_grad():
            hidden = reference.model(torch.tensor(rows, device="cuda")).last_hidden_state
            for (prompt, ids), row in zip(batch, hidden, strict=True):
                if not ids:
                    continue
                logits = reference.lm_head(row[len(prompt) - 1 : len(prompt) + len(ids) - 1])
                chosen = logits.gather(1, torch.tensor(ids, device="cuda").unsqueeze(1)).squeeze(1)
                found.append((logits.max(1).values - chosen) / logits.std(1))
    return torch.cat(found).cpu()


def run(unweight: str, bundle: Path, reference: LlamaForCausalLM, kv_cache: str, arguments: argparse.Namespace) -> dict:
    # About 200 pages, which some of 64 sequences fill.
    command = [unweight, "serve", str(bundle), "--port", "0", "--context", str(CONTEXT), "--kv-cache", kv_cache]
    command += ["--max-batch", str(MAX_BATCH), "--max-waiting", "400", "--memory", arguments.memory, "--speculate", "3"]
    log = (bundle.parent / f"{kv_cache}.log").open("w+")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = server.stdout.readline()
        if "http://" not in line:
            raise SystemExit(f"{' '.join(command)}: {line}{Path(log.name).read_text()[-2000:]}")
        url = "http://" + line.split("http://")[1].split()[0].removesuffix("/v1")
        seen, before, after = asyncio.run(attack(url, arguments.clients, arguments.seconds, arguments.seed))
        alive = server.poll() is None
    finally:
        server.terminate()
        server.wait(60)
    checked = random.Random(0).sample(seen.answers, min(CHECKED, len(seen.answers)))
    distance = distances(reference, checked)
    changed = lambda name: after[f"unweight_{name}"] - before[f"unweight_{name}"]
    problems = [] if alive else ["the server has ended"]
    if wrong := int((distance > DISTANCE).sum()):
        problems.append(f"{wrong} tokens are not the likeliest: {distance.max():.2f} standard deviations away")
    if seen.failures:
        problems.append(f"{len(seen.failures)} requests failed: {Counter(seen.failures).most_common(5)}")
    if seen.longest_pause > STALL:
        problems.append(f"no token for {seen.longest_pause:.1f} s")
    for name in ("sequences_running", "sequences_waiting", "body_bytes"):
        if after[f"unweight_{name}"] != 0:
            problems.append(f"{name} is {after[f'unweight_{name}']}")
    for name in ("preempted_total", "cancelled_total", "prompt_tokens_shared_total"):
        if changed(name) == 0:
            problems.append(f"{name} did not change: nothing was tested")
    for name in ("kv_pages_free", "kv_units_free"):
        if f"unweight_{name}" in before and changed(name) != 0:
            problems.append(f"{name} changed by {changed(name)}")
    return {
        "kv_cache": kv_cache,
        "requests": dict(seen.counts),
        "checked_answers": len(checked),
        "checked_tokens": len(distance),
        "largest_distance": round(float(distance.max()), 3),
        "longest_pause_s": round(seen.longest_pause, 2),
        "pages": before["unweight_kv_pages"],
        "preempted": changed("preempted_total"),
        "cancelled": changed("cancelled_total"),
        "shared_prompt_tokens": changed("prompt_tokens_shared_total"),
        "prompt_tokens": changed("prompt_tokens_total"),
        "drafted": changed("spec_decode_num_draft_tokens_total"),
        "accepted": changed("spec_decode_num_accepted_tokens_total"),
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unweight", required=True, help="the command")
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--memory", default="240M", help="GPU memory of the server")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write a JSON report to this file")
    arguments = parser.parse_args()
    unweight = os.path.abspath(arguments.unweight)
    torch.backends.cuda.matmul.allow_tf32 = False
    reports = []
    with tempfile.TemporaryDirectory() as home:
        model, bundle = Path(home) / "model", Path(home) / "bundle"
        make_model(model)
        command = [unweight, "compress", str(model), "-o", str(bundle), "--profile", "packed", "--quiet"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        reference = LlamaForCausalLM.from_pretrained(model, torch_dtype=torch.float32).cuda().eval()
        for kv_cache in ("bf16", "packed"):
            reports.append(run(unweight, bundle, reference, kv_cache, arguments))
            print(json.dumps(reports[-1]), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(reports, indent=1))
    sys.exit(any(report["problems"] for report in reports))


if __name__ == "__main__":
    main()

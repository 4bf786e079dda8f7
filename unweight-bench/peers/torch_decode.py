"""Times a decode step of Llama-3.1-8B in BF16 with PyTorch on one GPU, for comparison with `unweight-bench decode`.

    python3 torch_decode.py --context 1024 --prefill 2048 --transformers > torch_decode.json

The model is what a careful user would write by hand: merged qkv and gate/up, `scaled_dot_product_attention` over a
static KV cache with grouped heads, PyTorch's `rms_norm`, rotary embedding and SiLU. A step replays one CUDA graph from
embedding to argmax. Weights and KV cache are random and nonzero. At context C a step stores token C and attends to all
C tokens. Every SDPA backend that supports the shape is timed inside the whole step; the fastest one counts.
Each row has the median, p10 and p90 of `--rounds` replays after a warm-up, each timed with its own events.
`--prefill N`: time to first token of an N-token prompt, from ids on the host to the token on the host. Measured for the
model above without a graph, and with --transformers for `LlamaForCausalLM`.
`--transformers`: tokens/s of `generate` at batch 1 after `--context` tokens, as the difference of long and short runs.
`--check` compares a small model with `LlamaForCausalLM` with the same weights and exits; `--device cpu` is for this.
Prints one JSON object with rows of `what` decode, prefill and generate. Times are in milliseconds.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}


@dataclass(frozen=True)
class Geometry:
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 14336
    vocab: int = 128256
    eps: float = 1e-5
    theta: float = 500000.0


LLAMA3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SMALL = Geometry(layers=2, hidden=256, heads=8, kv_heads=2, head_dim=32, intermediate=512, vocab=1000)


def config(of: Geometry):
    """Returns the geometry as a transformers configuration."""
    import transformers

    return transformers.LlamaConfig(
        num_hidden_layers=of.layers,
        hidden_size=of.hidden,
        num_attention_heads=of.heads,
        num_key_value_heads=of.kv_heads,
        head_dim=of.head_dim,
        intermediate_size=of.intermediate,
        vocab_size=of.vocab,
        rms_norm_eps=of.eps,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        rope_parameters={"rope_theta": of.theta, **LLAMA3_1},
        # No token ends a text.
        eos_token_id=None,
        pad_token_id=0,
    )


class Llama:
    """Random weights, and a forward pass over a static KV cache."""

    def __init__(self, of: Geometry, device: str, dtype: torch.dtype):
        self.of, self.device, self.dtype = of, device, dtype
        q, kv = of.heads * of.head_dim, of.kv_heads * of.head_dim
        self.widths = (q, kv, kv)
        self.embed = self.random(of.vocab, of.hidden)
        self.head = self.random(of.vocab, of.hidden)
        self.norm = torch.ones(of.hidden, device=device, dtype=dtype)
        self.layers = [
            {
                "attention_norm": torch.ones(of.hidden, device=device, dtype=dtype),
                "qkv": self.random(q + 2 * kv, of.hidden),
                "o": self.random(of.hidden, q),
                "mlp_norm": torch.ones(of.hidden, device=device, dtype=dtype),
                "gate_up": self.random(2 * of.intermediate, of.hidden),
                "down": self.random(of.hidden, of.intermediate),
            }
            for _ in range(of.layers)
        ]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype).mul_(0.02)

    def prepare(self, batch: int, positions: int) -> None:
        """Fills the KV cache with random keys and values, and makes the table of angles."""
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        of = self.of
        shape = (batch, of.kv_heads, positions, of.head_dim)
        # Free the previous cache first: two may not fit in memory.
        self.cache = None
        drawn = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(2 * of.layers))
        self.cache = list(zip(drawn, drawn))
        rope = LlamaRotaryEmbedding(config(of)).to(self.device)
        ids = torch.arange(positions, device=self.device)[None]
        cos, sin = rope(torch.empty(0, device=self.device, dtype=self.dtype), ids)
        self.cos, self.sin = cos[0], sin[0]

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, length: int, all_rows: bool = False) -> torch.Tensor:
        """Returns the logits of the last token of each row, or of all tokens. `ids` [batch, n] are at `positions` [n]
        and attend to the first `length` tokens of the cache, up to themselves. n is 1, or the rows begin at position
        0."""
        of, (batch, n) = self.of, ids.shape
        cos, sin = self.cos[positions], self.sin[positions]

        def rotate(x):
            left, right = x.chunk(2, dim=-1)
            return x * cos + torch.cat((-right, left), dim=-1) * sin

        x = F.embedding(ids, self.embed)
        for layer, (keys, values) in zip(self.layers, self.cache):
            normed = F.rms_norm(x, (of.hidden,), layer["attention_norm"], of.eps)
            parts = F.linear(normed, layer["qkv"]).split(self.widths, dim=-1)
            q, k, v = (part.view(batch, n, -1, of.head_dim).transpose(1, 2) for part in parts)
            keys.index_copy_(2, positions, rotate(k))
            values.index_copy_(2, positions, v)
            attended = F.scaled_dot_product_attention(
                rotate(q), keys[:, :, :length], values[:, :, :length], is_causal=n > 1, enable_gqa=True
            )
            x = x + F.linear(attended.transpose(1, 2).reshape(batch, n, -1), layer["o"])
            normed = F.rms_norm(x, (of.hidden,), layer["mlp_norm"], of.eps)
            gate, up = F.linear(normed, layer["gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        x = x if all_rows else x[:, -1]
        return F.linear(F.rms_norm(x, (of.hidden,), self.norm, of.eps), self.head)


def quantiles(times: list[float]) -> dict:
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return {"median": statistics.median(times), "p10": cuts[0], "p90": cuts[-1], "rounds": len(times)}


def graph_times(replay, rounds: int) -> list[float]:
    for _ in range(5):
        replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Keep the device busy while the host launches the timed work.
        replay()
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def decode(model: Llama, batch: int, context: int, rounds: int) -> dict:
    """Times a step with every backend that supports it, the fastest one for all rounds."""
    model.prepare(batch, context)
    ids = torch.randint(model.of.vocab, (batch, 1), device=model.device)
    position = torch.tensor([context - 1], device=model.device)
    found, refused = {}, {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                found[name] = capture(model, ids, position, context)
            found[name] = (statistics.median(graph_times(found[name].replay, 5)), found[name])
        except RuntimeError as error:
            refused[name] = str(error).splitlines()[0][:200]
            found.pop(name, None)
    if not found:
        raise SystemExit(f"batch {batch}: no SDPA backend takes it: {refused}")
    fastest = min(found, key=lambda name: found[name][0])
    row = {"what": "decode", "batch": batch, "context": context}
    row["step_ms"] = quantiles(graph_times(found[fastest][1].replay, rounds))
    others = {name: time for name, (time, _) in found.items()}
    return row | {"attention": fastest, "attention_step_ms": others, "attention_refused": refused}


def capture(model: Llama, ids: torch.Tensor, position: torch.Tensor, context: int) -> torch.cuda.CUDAGraph:
    """Captures a step in a graph that writes its token where the next step reads it. Checks the graph against eager
    execution."""
    first = ids.clone()

    def step():
        logits = model.forward(ids, position, context)
        ids.copy_(logits.argmax(-1, keepdim=True))
        return logits

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            ids.copy_(first)
            eager = step()
    torch.cuda.current_stream().wait_stream(stream)
    ids.copy_(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    ids.copy_(first)
    graph.replay()
    torch.cuda.synchronize()
    # Under capture, cuBLAS may select another algorithm, which rounds differently.
    error = ((captured.float() - eager.float()).square().mean() / eager.float().square().mean()).sqrt().item()
    if not error <= 0.03:
        raise SystemExit(f"the graph's logits differ from those of its operations by {error}")
    return graph


def host_times(run, rounds: int) -> list[float]:
    """Returns wall-clock milliseconds. `run` must return when its result is on the host."""
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def prefill(model: Llama, tokens: int, rounds: int) -> dict:
    model.prepare(1, tokens)
    ids = torch.randint(model.of.vocab, (1, tokens)).pin_memory()
    positions = torch.arange(tokens, device=model.device)

    def run():
        return model.forward(ids.to(model.device, non_blocking=True), positions, tokens).argmax(-1).item()

    times = {}
    for name in ("flash", "cudnn"):
        with sdpa_kernel(BACKENDS[name]):
            try:
                times[name] = host_times(run, rounds)
            except RuntimeError as error:
                print(f"prefill by {name}: {str(error).splitlines()[0]}", file=sys.stderr)
    if not times:
        raise SystemExit(f"prefill of {tokens} tokens: no SDPA backend takes it")
    fastest = min(times, key=lambda name: statistics.median(times[name]))
    row = {"what": "prefill", "contender": "torch", "tokens": tokens, "attention": fastest}
    return row | {"first_token_ms": quantiles(times[fastest])}


def by_transformers(of: Geometry, context: int, prompt: int, rounds: int) -> list[dict]:
    """Times prefill and `generate` of an unmodified `LlamaForCausalLM`."""
    import transformers

    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config(of), dtype=torch.bfloat16).eval()
    rows = []
    if prompt:
        ids = torch.randint(of.vocab, (1, prompt)).pin_memory()

        def first():
            out = model(input_ids=ids.to("cuda", non_blocking=True), use_cache=True, logits_to_keep=1)
            return out.logits[0, -1].argmax(-1).item()

        row = {"what": "prefill", "contender": "transformers", "tokens": prompt}
        rows.append(row | {"first_token_ms": quantiles(host_times(first, rounds))})
    ids = torch.randint(of.vocab, (1, context), device="cuda")
    mask = torch.ones_like(ids)

    def seconds(new: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = model.generate(
            input_ids=ids, attention_mask=mask, min_new_tokens=new, max_new_tokens=new, do_sample=False
        )
        torch.cuda.synchronize()
        if out.shape[1] != context + new:
            raise SystemExit(f"generate made {out.shape[1] - context} tokens, not {new}")
        return time.perf_counter() - start

    seconds(8)
    more = 128
    speeds = [more / (seconds(1 + more) - seconds(1)) for _ in range(5)]
    row = {"what": "generate", "contender": "transformers", "batch": 1, "context": context, "new_tokens": more}
    return [*rows, row | {"tokens_per_s": quantiles(speeds)}]


@torch.no_grad()
def check(device: str) -> None:
    """Checks that the model above gives the logits of LlamaForCausalLM for the same weights: on a prompt and on
    steps."""
    import transformers

    theirs = transformers.LlamaForCausalLM(config(SMALL)).to(device).eval()
    ours = Llama(SMALL, device, torch.float32)
    ours.embed, ours.head = theirs.model.embed_tokens.weight, theirs.lm_head.weight
    for mine, layer in zip(ours.layers, theirs.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        mine["qkv"] = torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
        mine["o"], mine["down"] = attention.o_proj.weight, mlp.down_proj.weight
        mine["gate_up"] = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    batch, n = 3, 50
    ids = torch.randint(SMALL.vocab, (batch, n), device=device)
    expected = theirs(input_ids=ids).logits
    ours.prepare(batch, n)
    positions = torch.arange(n, device=device)
    whole = ours.forward(ids, positions, n, all_rows=True)
    ours.prepare(batch, n)
    steps = [ours.forward(ids[:, i : i + 1], positions[i : i + 1], i + 1) for i in range(n)]
    for name, logits in (("prompt", whole), ("steps", torch.stack(steps, dim=1))):
        error, size = (logits - expected).abs().max().item(), expected.abs().max().item()
        print(f"{name}: largest difference {error:.2g} of {size:.2g}")
        if not error <= 1e-4 * size:
            raise SystemExit("the logits differ from LlamaForCausalLM by more than 1e-4 of the largest")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--context", type=int, default=1024, help="tokens that a step attends to")
    parser.add_argument("--prefill", type=int, default=0, help="tokens of the prompt to time; 0 disables it")
    parser.add_argument("--transformers", action="store_true", help="also time transformers' own model")
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds, at least 20")
    parser.add_argument("--check", action="store_true", help="only compare the results with transformers")
    parser.add_argument("--device", default="cuda", help="cuda; cpu only with --check")
    arguments = parser.parse_args()
    if arguments.rounds < 20:
        parser.error(f"--rounds {arguments.rounds}: pass at least 20")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    if arguments.check:
        check(arguments.device)
        return
    if arguments.device != "cuda" or not torch.cuda.is_available():
        parser.error("timing needs a GPU; --check runs without one")
    import transformers

    transformers.logging.set_verbosity_error()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    record = {
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "geometry": vars(Geometry()),
        "rows": [],
    }
    rows = record["rows"]
    model = Llama(Geometry(), "cuda", torch.bfloat16)
    for batch in arguments.batch:
        rows.append(decode(model, batch, arguments.context, arguments.rounds))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if arguments.prefill:
        rows.append(prefill(model, arguments.prefill, arguments.rounds))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    if arguments.transformers:
        rows += by_transformers(Geometry(), arguments.context, arguments.prefill, arguments.rounds)
    json.dump(record, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

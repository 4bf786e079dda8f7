"""Checks that two builds of `unweight` compute the same bits: sections of bundles, logits, tokens. Needs a GPU.

Makes the models of `models.py`, compresses and runs each with both builds, and compares bytes:

    python3 same_bits.py BEFORE AFTER --texts texts --out out [--only NAME] [--renames FILE]

The comparison covers, for every profile:
- every section of the bundle (`*.safetensors` shards, tensor by tensor; manifests may differ),
- logits of prompts of many lengths: whole prompts in a batch, one step per token in a batch, each prompt alone, and the
  BF16 baseline on cuBLAS,
- 64 greedy and 64 sampled tokens of a batch of prompts.

`--packed-kv` runs BEFORE with `--kv-cache bf16` and AFTER with `--kv-cache packed`; give the same program twice to
compare the two caches. Prompts in chunks of 64 tokens are compared, too.

If BEFORE spells options differently, FILE lists them: a JSON list of `[words of AFTER, words of BEFORE]`, each a list
of arguments. Prints a table, and writes all results to OUT/same_bits.json. The exit status is 1 if anything differs.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open

import models
from truth import LENGTHS

PROFILES = ["packed", "distribution", "inference", "palette", "compact", "archive"]
NEW_TOKENS = ("--max-new-tokens", "64", "--ignore-eos")
BATCH = ("--max-batch", "16")
SAMPLED = ("--temperature", "0.8", "--top-p", "0.95", "--seed", "7")
# Name of the case -> arguments of `generate`; `alone` runs each prompt by itself.
LOGITS = {
    "prefill": BATCH,
    "steps": ("--by-steps", *BATCH),
    "baseline, prefill": ("--placement", "bf16", *BATCH),
    "baseline, steps": ("--placement", "bf16", "--by-steps", *BATCH),
}
TOKENS = {"greedy": (), "sampled": SAMPLED}
# Additional cases for bundles of a profile.
MORE = {
    "compact": {"compact, steps": ("--placement", "compact", "--by-steps", *BATCH)},
    "inference": {"stored, steps": ("--placement", "stored", "--by-steps", *BATCH)},
}
# Families that `--placement stored` runs.
PIPELINES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
# Additional cases with --packed-kv: later chunks read packed pages.
CHUNKS = {"chunks of 64": ("--chunk", "64", *BATCH)}
# The options of a build whose `generate` has no --placement.
OLD_PLACEMENTS = [
    (["--placement", "bf16"], ["--linears", "cublas"]),
    (["--placement", "compact"], ["--resident", "small"]),
    (["--placement", "stored"], ["--mlp", "stored"]),
]


class Build:
    """One of the two programs."""

    def __init__(self, program: Path, renames: list[tuple[list[str], list[str]]], kv_cache: str | None = None):
        told = subprocess.run([str(program), "generate", "--help"], capture_output=True, text=True, check=True)
        old = [] if "--placement" in told.stdout else OLD_PLACEMENTS
        self.program, self.renames = program, [*renames, *old]
        self.kv_cache = ["--kv-cache", kv_cache] if kv_cache else []

    def __call__(self, *arguments: object) -> dict:
        words = [str(argument) for argument in arguments]
        for new, old in self.renames:
            for at in range(len(words) - len(new), -1, -1):
                if words[at : at + len(new)] == new:
                    words[at : at + len(new)] = old
        own = self.kv_cache if words[0] == "generate" else []
        command = [str(self.program), *words, *own, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)[:200]}: exit status {done.returncode}: {done.stderr[-400:]}")
        return json.loads(done.stdout)

    def sections(self, bundle: Path) -> dict[str, str]:
        """Returns the digest of every tensor of every shard."""
        found = {}
        for shard in sorted(bundle.rglob("*.safetensors")):
            raw = shard.read_bytes()
            header = int.from_bytes(raw[:8], "little")
            for name, entry in json.loads(raw[8 : 8 + header]).items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    data = raw[8 + header + begin : 8 + header + end]
                    found[f"{shard.name}: {name}"] = hashlib.sha256(data).hexdigest()
        return found

    def logits(self, bundle: Path, work: Path, prompts: list[list[int]], flags: tuple[str, ...]) -> list[bytes]:
        file = work / "logits.safetensors"
        file.unlink(missing_ok=True)
        tokens = [part for prompt in prompts for part in ("--tokens", ",".join(map(str, prompt)))]
        self("generate", bundle, *tokens, "--max-new-tokens", "0", "--dump-logits", file, *flags)
        with safe_open(file, "pt") as opened:
            tensors = [opened.get_tensor(f"logits.{index}") for index in range(len(prompts))]
        return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]

    def tokens(self, bundle: Path, prompts: list[list[int]], flags: tuple[str, ...]) -> list[list[int]]:
        tokens = [part for prompt in prompts for part in ("--tokens", ",".join(map(str, prompt)))]
        return [said["tokens"] for said in self("generate", bundle, *tokens, *NEW_TOKENS, *flags)["sequences"]]


def compare(spec: models.Spec, before: Build, after: Build, texts: list[str], steps: int, record: list[dict]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        spec.save(work / "model", texts, "cuda", steps)
        generator = torch.Generator().manual_seed(7)
        vocab = json.loads((work / "model/config.json").read_text())["vocab_size"]
        prompts = [torch.randint(5, vocab, (length,), generator=generator).tolist() for length in LENGTHS]

        def case(name: str, what) -> None:
            try:
                old, new = what(before), what(after)
                passed, details = old == new, {} if old == new else {"differs": differs(old, new)}
            except Exception as error:  # a case that cannot run is a case that failed
                passed, details = False, {"error": f"{type(error).__name__}: {error}"}
            record.append({"model": spec.name, "case": name, "passed": passed, **details})
            print("same  " if passed else "OTHER ", spec.name, name, *details.values(), flush=True)

        for profile in PROFILES:
            bundles = {}
            for build, name in ((before, "before"), (after, "after")):
                bundles[build] = work / f"{name}-{profile}"
                build("compress", work / "model", "-o", bundles[build], "--profile", profile)
            case(f"{profile}: sections", lambda build: build.sections(bundles[build]))
            more = MORE.get(profile, {})
            if spec.family not in PIPELINES:
                more = {name: flags for name, flags in more.items() if "stored" not in flags}
            more = {**more, **(CHUNKS if after.kv_cache else {})}
            for name, flags in {**LOGITS, **more}.items():
                case(f"{profile}: {name}", lambda build: build.logits(bundles[build], work, prompts, flags))
            if profile == PROFILES[0]:
                for at in (0, LENGTHS.index(65), LENGTHS.index(700)):
                    alone = [prompts[at]]
                    for flags in ((), ("--by-steps",)):
                        name = f"{profile}: {LENGTHS[at]} tokens alone {' '.join(flags)}".strip()
                        case(name, lambda build: build.logits(bundles[build], work, alone, flags))
            for name, flags in TOKENS.items():
                case(f"{profile}: {name}", lambda build: build.tokens(bundles[build], prompts[4:], flags))


def differs(old, new) -> str:
    """Describes the first difference."""
    if isinstance(old, dict):
        names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
        return f"{len(names)} of {len(old)}, first {names[0]}"
    at = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
    return f"prompt {at} of {len(old)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the reference program")
    parser.add_argument("after", type=Path, help="the program to check")
    parser.add_argument("--texts", type=Path, required=True, help="directory of *.md files to train on")
    parser.add_argument("--out", type=Path, default=Path("out"), help="directory for same_bits.json")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--packed-kv", action="store_true", help="compare a packed KV cache (AFTER) with a BF16 one")
    parser.add_argument("--renames", type=Path, help="JSON: [[words of AFTER, words of BEFORE], ...]")
    arguments = parser.parse_args()
    renames = json.loads(arguments.renames.read_text()) if arguments.renames else []
    caches = ("bf16", "packed") if arguments.packed_kv else (None, None)
    before, after = Build(arguments.before, renames, caches[0]), Build(arguments.after, [], caches[1])
    texts, record = models.read_texts(arguments.texts), []
    arguments.out.mkdir(parents=True, exist_ok=True)
    for spec in models.ALL:
        if arguments.only in spec.name:
            compare(spec, before, after, texts, arguments.steps, record)
            (arguments.out / "same_bits.json").write_text(json.dumps(record, indent=1) + "\n")
    failed = sum(not case["passed"] for case in record)
    print(f"{len(record)} comparisons, {failed} differ")
    sys.exit(1 if failed or not record else 0)


if __name__ == "__main__":
    main()

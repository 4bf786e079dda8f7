"""Measures how well keys and values fit packed KV pages: escapes and BF16 units per layer and head.

    python3 kv_coverage.py --texts ../../docs --out kv-coverage.json [--models DIR] [--device cpu]

Runs the trained models of `models.py` with transformers in BF16, and captures K after RoPE and V of every layer and
head. A unit is K or V of one KV head in 64 tokens; its bases are chosen as docs/kv-cache.md describes. The record has
the entropy of the exponents, the share of values outside the windows, escapes per unit, and the share of units that
need BF16. It also has stress cases and synthetic keys, from a fixed seed. `single` is the result with one window per
unit.

`--models DIR` has a directory per model; a missing model is trained and saved. `--golden FILE` contains the choices
of the Rust oracle (`kv_golden.json`), which the choices here must equal. `--no-models` runs without torch.
"""

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path

import numpy as np

TOKENS = 64
STEP = 16
WINDOW = 16
CODES_BELOW = 31
# With one window per unit: bases below the highest, and codes below and above the window.
SINGLE_BASES_BELOW, SINGLE_CODES_BELOW, SINGLE_CODES_ABOVE = 7, 24, 7
# Factors of large channels.
FACTORS = (10, 30, 100, 300, 1000)
ROWS, ROW_TOKENS = 24, 512
SYNTHETIC_UNITS = 2000
NONE = -1
MODELS = ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe"]
# With heads of 64 and of 128.
STRESSED = ["llama", "qwen3"]


def slots(head_dim: int) -> int:
    return (record_bytes(head_dim) - 16) // 2


def single_slots(head_dim: int) -> int:
    """Returns the slots of a record with a single base, which leaves room for four more."""
    return slots(head_dim) + 4


def record_bytes(head_dim: int) -> int:
    return 32 if head_dim <= 80 else 48


def exponents(values: np.ndarray) -> np.ndarray:
    """Returns the exponents of bf16 values given as uint16."""
    return (values >> 7) & 0xFF


def choose(unit_exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the bases of the steps [units, steps] for exponents [units, TOKENS, head_dim].

    Also returns the number of escapes, and whether every escape has a code, both [units]. Ignores the number of slots:
    a unit with more escapes than slots is stored as BF16.
    """
    units, tokens, head_dim = unit_exponents.shape
    of_steps = unit_exponents.reshape(units, tokens, head_dim // STEP, STEP)
    bases = np.maximum(of_steps.max((1, 3)).astype(np.int64), WINDOW - 1) - (WINDOW - 1)
    base = bases[:, None, :, None]
    # Zeros and subnormals always have a code.
    no_code = (of_steps != 0) & (of_steps < base - CODES_BELOW)
    return bases, (of_steps < base).sum((1, 2, 3)), ~no_code.any((1, 2, 3))


def choose_single(unit_exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the base with the fewest escapes (the largest on ties) for exponents [units, values], and its escapes.

    Both are [units], NONE where no base has a code for every value.
    """
    units, values = unit_exponents.shape
    histogram = np.zeros((units, 256), dtype=np.int64)
    np.add.at(histogram, (np.arange(units)[:, None], unit_exponents), 1)
    # below[:, e]: values with an exponent below e.
    below = np.concatenate([np.zeros((units, 1), dtype=np.int64), histogram.cumsum(1)], axis=1)
    rows = np.arange(units)

    def count(first: np.ndarray, end: np.ndarray) -> np.ndarray:
        first, end = np.clip(first, 0, 256), np.clip(end, 0, 256)
        return below[rows, np.maximum(first, end)] - below[rows, first]

    top = np.maximum(unit_exponents.max(1), WINDOW - 1) - (WINDOW - 1)
    best = np.full(units, NONE, dtype=np.int64)
    fewest = np.full(units, NONE, dtype=np.int64)
    for step in range(SINGLE_BASES_BELOW + 1):
        base = top - step
        escapes = values - count(base, base + WINDOW)
        # Zeros and subnormals always have a code.
        too_small = count(np.ones_like(base), base - SINGLE_CODES_BELOW)
        too_large = count(base + WINDOW + SINGLE_CODES_ABOVE, np.full_like(base, 256))
        better = (base >= 0) & (too_small + too_large == 0) & ((best == NONE) | (escapes < fewest))
        best, fewest = np.where(better, base, best), np.where(better, escapes, fewest)
    return best, fewest


def check_golden(path: Path) -> int:
    """Exits unless every choice here equals the Rust oracle's."""
    cases = json.loads(path.read_text())["cases"]
    for case in cases:
        steps = [np.repeat([run[0] for run in step], [run[1] for run in step]) for step in case["steps"]]
        values = np.stack([step.reshape(TOKENS, STEP) for step in steps], 1).reshape(1, TOKENS, -1)
        bases, escapes, coded = (part[0] for part in choose(exponents(values)))
        packs = coded and escapes <= slots(values.shape[2])
        found = {"bases": bases.tolist(), "escapes": int(escapes)} if packs else None
        if found != case["choice"]:
            sys.exit(f"{path}: {case['name']}: got {found}, but the oracle chose {case['choice']}; fix `choose`")
    return len(cases)


def coverage(values: np.ndarray) -> dict:
    """Returns statistics of units [units, TOKENS, head_dim], bf16 as uint16."""
    units, _, head_dim = values.shape
    unit_exponents = exponents(values.reshape(units, -1))
    histogram = np.bincount(unit_exponents.ravel(), minlength=256) / unit_exponents.size
    present = histogram[histogram > 0]
    _, escapes, coded = choose(exponents(values))
    packs = coded & (escapes <= slots(head_dim))
    base, single = choose_single(unit_exponents)

    def bits(packs: np.ndarray) -> float:
        """Returns bits per value: the packed encoding, its record, and additional BF16 units."""
        return 12 + 8 * record_bytes(head_dim) / (TOKENS * head_dim) + 16 * float(1 - packs.mean())

    single_packs = (base != NONE) & (single <= single_slots(head_dim))
    return {
        "units": units,
        "entropy_bits": float(-(present * np.log2(present)).sum()) + 0.0,
        "bf16_units": float(1 - packs.mean()),
        "no_code": float(1 - coded.mean()),
        "bits_per_value": bits(packs),
        "outside": float(escapes.mean() / unit_exponents.shape[1]),
        "escapes_mean": float(escapes.mean()),
        "escapes_p99": float(np.percentile(escapes, 99)),
        "escapes_max": int(escapes.max()),
        "single": {"bf16_units": float(1 - single_packs.mean()), "bits_per_value": bits(single_packs)},
    }


def large_channels(head_dim: int) -> list[tuple[str, list[int]]]:
    """Returns sets of large channels: one, two that RoPE rotates together, four of one step, and four of four steps."""
    spread = list(range(0, head_dim, head_dim // 4))
    pair = [0, head_dim // 2]
    four = [("4 channels of a step", [0, 1, 2, 3]), ("4 channels of 4 steps", spread)]
    return [("1 channel", [0]), ("a pair of RoPE", pair), *four]


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Rounds f32 to bf16, ties to even, as uint16. Does not support NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def synthetic() -> list[dict]:
    """Returns rows for N(0, 1) with some much larger channels, and for the cases that must stay exact."""
    random = np.random.default_rng(28)
    rows = []

    def case(name: str, head_dim: int, values: np.ndarray) -> None:
        rows.append({"case": name, "head_dim": head_dim, "slots": slots(head_dim), **coverage(values)})

    for head_dim in (64, 128):
        normal = random.standard_normal((SYNTHETIC_UNITS, TOKENS, head_dim), dtype=np.float32)
        case("N(0, 1)", head_dim, to_bf16(normal))
        for factor in FACTORS:
            for place, channels in large_channels(head_dim):
                values = normal.copy()
                values[:, :, channels] *= factor
                case(f"N(0, 1), x{factor} in {place}", head_dim, to_bf16(values))
        # A channel with a constant offset, as from a bias of K.
        values = normal.copy()
        values[:, :, 0] += 30
        case(f"N(0, 1), + 30 in 1 of {head_dim} channels", head_dim, to_bf16(values))
        few = to_bf16(normal[:64])
        case("zeros", head_dim, np.zeros_like(few))
        case("constants", head_dim, np.full_like(few, 0x3F80))
        case("subnormals", head_dim, few & 0x807F)
        for name, pattern in (("zero", 0x0000), ("subnormal", 0x8001), ("Inf", 0x7F80), ("NaN", 0xFFC1)):
            for count in (1, slots(head_dim) + 1):
                values = few.copy()
                values.reshape(64, -1)[:, 7 : 7 + 3 * count : 3] = pattern
                case(f"N(0, 1), {count} x {name}", head_dim, values)
    return rows


def captured(folder: Path, texts: list[str], device: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns K after RoPE and V of each layer, bf16 as uint16 [units, kv_heads, TOKENS, head_dim]."""
    import torch
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    layers: dict[int, list[list[np.ndarray]]] = {}

    def units(tensor) -> np.ndarray:
        rows, heads, tokens, head_dim = tensor.shape
        bits = tensor.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
        pages = bits.reshape(rows, heads, tokens // TOKENS, TOKENS, head_dim)
        return pages.transpose(0, 2, 1, 3, 4).reshape(-1, heads, TOKENS, head_dim)

    def attention(module, query, key, value, *arguments, **options):
        layer = layers.setdefault(module.layer_idx, [[], []])
        layer[0].append(units(key))
        layer[1].append(units(value))
        return sdpa_attention_forward(module, query, key, value, *arguments, **options)

    transformers.AttentionInterface.register("coverage", attention)
    transformers.AttentionMaskInterface.register("coverage", sdpa_mask)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.bfloat16, attn_implementation="coverage").to(device).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer.encode("\n\n".join(texts), add_special_tokens=False)
    stride = (len(ids) - ROW_TOKENS) // ROWS
    batch = torch.tensor([ids[row * stride : row * stride + ROW_TOKENS] for row in range(ROWS)], device=device)
    with torch.no_grad():
        for part in batch.split(4):
            model(input_ids=part, use_cache=False)
    return [tuple(np.concatenate(parts) for parts in layers[layer]) for layer in sorted(layers)]


def caches(arguments) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Returns K and V of every layer by model. Trains missing models."""
    import models

    models.ROWS = arguments.rows
    texts = models.read_texts(arguments.texts)
    found = {}
    for spec in (spec for spec in models.TRAINED if spec.name in arguments.only):
        folder = arguments.models / spec.name
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            training = {"steps": arguments.steps, "rows": arguments.rows}
            training |= spec.save(folder, texts, arguments.device, arguments.steps)
            (folder / "training.json").write_text(json.dumps(training))
        found[spec.name] = captured(folder, texts, arguments.device)
    return found


def of_heads(name: str, layers: list[tuple[np.ndarray, np.ndarray]]) -> list[dict]:
    """Returns a row per layer, head, and K or V of a model."""
    rows = []
    for layer, halves in enumerate(layers):
        for half, values in zip("KV", halves):
            for head in range(values.shape[1]):
                key = {"model": name, "layer": layer, "head": head, "half": half}
                rows.append({**key, "head_dim": values.shape[3], **coverage(values[:, head])})
    return rows


def stress(name: str, layers: list[tuple[np.ndarray, np.ndarray]]) -> list[dict]:
    """Returns rows for K and V of a model with some much larger channels, over all layers and heads."""
    rows = []
    for half, parts in zip("KV", zip(*layers)):
        values = np.concatenate([layer.reshape(-1, *layer.shape[2:]) for layer in parts])
        wide = (values.astype(np.uint32) << 16).view(np.float32)
        key = {"model": name, "half": half, "head_dim": values.shape[2]}
        rows.append({**key, "case": "as they are", **coverage(values)})
        for factor in FACTORS:
            for place, channels in large_channels(values.shape[2]):
                scaled = wide.copy()
                scaled[:, :, channels] *= factor
                rows.append({**key, "case": f"x{factor} in {place}", **coverage(to_bf16(scaled))})
    return rows


def summary(rows: list[dict]) -> list[dict]:
    """Returns a row per model and half (K or V) over all layers and heads; maxima are the worst."""
    found = []
    for key in sorted({(row["model"], row["half"]) for row in rows}):
        group = [row for row in rows if (row["model"], row["half"]) == key]
        averaged = ("outside", "escapes_mean", "bf16_units", "bits_per_value")
        mean = {name: float(np.mean([row[name] for row in group])) for name in averaged}
        found.append(
            {
                "model": key[0],
                "half": key[1],
                "units": sum(row["units"] for row in group),
                "entropy_bits": [min(row["entropy_bits"] for row in group), max(row["entropy_bits"] for row in group)],
                **mean,
                "single": {
                    name: float(np.mean([row["single"][name] for row in group]))
                    for name in ("bf16_units", "bits_per_value")
                },
                "escapes_p99_worst_head": max(row["escapes_p99"] for row in group),
                "escapes_max": max(row["escapes_max"] for row in group),
                "bf16_units_worst_head": max(row["bf16_units"] for row in group),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    golden = Path(__file__).with_name("kv_golden.json")
    parser.add_argument("--golden", type=Path, default=golden, help="JSON file with the choices of the Rust oracle")
    parser.add_argument("--texts", type=Path, help="directory of *.md files to train on and to run")
    parser.add_argument("--models", type=Path, help="directory of trained models; missing ones are trained there")
    parser.add_argument("--only", nargs="+", default=MODELS, choices=MODELS, metavar="NAME", help="models to run")
    parser.add_argument("--no-models", action="store_true", help="only synthetic values; needs no torch")
    parser.add_argument("--out", type=Path, default=Path("kv-coverage.json"), help="output file")
    parser.add_argument("--device", default="cpu", help="device of transformers: cuda or cpu")
    parser.add_argument("--steps", type=int, default=600, help="training steps of a missing model")
    parser.add_argument("--rows", type=int, default=12, help="rows of 768 tokens in a training step")
    arguments = parser.parse_args()
    record = {"numpy": np.__version__, "python": platform.python_version()}
    record["golden_cases"] = check_golden(arguments.golden)
    record |= {"window": WINDOW, "tokens_per_unit": TOKENS, "synthetic": synthetic()}
    if not arguments.no_models:
        if not arguments.texts:
            parser.error("--texts is needed to run models; see also --no-models")
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        record |= {"torch": torch.__version__, "transformers": transformers.__version__, "device": arguments.device}
        with tempfile.TemporaryDirectory() as temporary:
            arguments.models = arguments.models or Path(temporary)
            by_model = caches(arguments)
            record["heads"] = [row for name, layers in by_model.items() for row in of_heads(name, layers)]
            trained = sorted(arguments.models.glob("*/training.json"))
            record["training"] = [{"model": file.parent.name, **json.loads(file.read_text())} for file in trained]
            stressed = [name for name in STRESSED if name in by_model]
            record["stress"] = [row for name in stressed for row in stress(name, by_model[name])]
        record["models"] = summary(record["heads"])
    arguments.out.write_text(to_text(record))


def to_text(record: dict) -> str:
    """Returns JSON with one table row per line."""
    rounded = json.loads(json.dumps(record), parse_float=lambda text: float(f"{float(text):.5g}"))
    parts = []
    for key, value in rounded.items():
        if isinstance(value, list):
            lines = ",\n  ".join(json.dumps(row) for row in value)
            parts.append(f" {json.dumps(key)}: [\n  {lines}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()

"""Measures how far BF16 rounding moves the margin between the two most likely tokens, on a GPU.

Trains models of `models.py` and runs their texts, in windows of 200 tokens, through transformers in f32 and BF16, and
through the engine: prefill, steps, and prefill of the BF16 weights by cuBLAS. Counts the positions whose most likely
token is not that of f32 although the margin in f32 is above 6 x the BF16 error of transformers, once that of logits,
once that of margins. This is the control of the bound of `hf_parity.py`: what transformers does not keep is no bound.

    python3 margins.py --unweight ../bin/unweight --texts texts --out margins.csv --only glm4 llama
"""

import argparse
import csv
import tempfile
from pathlib import Path

import torch
import transformers

import models
from hf_parity import Cli, dump_logits
from truth import CLEAR, Truth, margin_errors, top_margin

WINDOW = 200
WINDOWS = 400
# Prompts of a command.
PROMPTS = 40
RUNS = {"prefill": (), "steps": ("--by-steps",), "cublas": ("--placement", "bf16")}
COLUMNS = (
    "model by positions logit_error margin_error departures beyond_logit_bound beyond_margin_bound "
    "worst_in_logit_errors worst_in_margin_errors"
).split()


def compare(logits: torch.Tensor, true: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Returns for each position: the margin, the squared errors of the margin and of a logit, that of transformers'
    BF16, and whether the most likely token differs."""
    errors = [(other - true).square().mean(-1) for other in (logits, rounded)]
    departs = (logits.argmax(-1) != true.argmax(-1)).float()
    return torch.stack([top_margin(true), margin_errors(logits, true).square(), *errors, departs], 1)


def measure(spec: models.Spec, cli: Cli, work: Path, texts: list[str]) -> list[list]:
    folder, bundle, file = work / "model", work / "bundle", work / "logits.safetensors"
    spec.save(folder, texts, "cuda", steps=600)
    truth = Truth(folder, "cuda")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    cli("compress", folder, "-o", bundle, "--profile", "packed")
    corpus = tokenizer.encode("\n\n".join(texts), add_special_tokens=False)
    starts = range(0, min(len(corpus) - WINDOW, WINDOWS * WINDOW), WINDOW)
    windows = [corpus[start : start + WINDOW] for start in starts]
    found = {name: [] for name in ("transformers", *RUNS)}
    for first in range(0, len(windows), PROMPTS):
        prompts = windows[first : first + PROMPTS]
        true, rounded = ([truth.routed(model, one)[0] for one in prompts] for model in (truth.f32, truth.bf16))
        all_logits = {"transformers": rounded}
        for name, flags in RUNS.items():
            logits = dump_logits(cli, bundle, file, prompts, "--max-batch", 16, *flags)
            all_logits[name] = [one.float() for one in logits]
        for name, logits in all_logits.items():
            found[name] += map(compare, logits, true, rounded)
    rows, bounds = [], None
    for name, parts in found.items():
        margins, margin_squares, squares, rounded_squares, departs = torch.cat(parts).unbind(1)
        logit_error, margin_error = squares.mean().sqrt(), margin_squares.mean().sqrt()
        # Transformers comes first.
        bounds = bounds or (logit_error, margin_error)
        in_logit_errors = margins / rounded_squares.sqrt().clamp(min=bounds[0]) * departs
        in_margin_errors = in_logit_errors * bounds[0] / bounds[1]
        beyond = [int((own > CLEAR).sum()) for own in (in_logit_errors, in_margin_errors)]
        worst = [f"{own.max():.2f}" for own in (in_logit_errors, in_margin_errors)]
        errors = [f"{error:.4f}" for error in (logit_error, margin_error)]
        rows.append([spec.name, name, len(margins), *errors, int(departs.sum()), *beyond, *worst])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unweight", default="unweight", help="the binary")
    parser.add_argument("--texts", type=Path, required=True, help="directory of *.md files to train on")
    parser.add_argument("--out", type=Path, default=Path("margins.csv"), help="the table")
    names = [spec.name for spec in models.TRAINED if "moe" not in spec.name and spec.name != "mixtral"]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME", help="these models")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_float32_matmul_precision("highest")
    texts = models.read_texts(arguments.texts)
    with open(arguments.out, "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for spec in models.TRAINED:
            if spec.name not in arguments.only:
                continue
            with tempfile.TemporaryDirectory() as work:
                table.writerows(measure(spec, Cli(arguments.unweight), Path(work), texts))
            file.flush()


if __name__ == "__main__":
    main()

"""Compares `unweight generate` with transformers on whole models, on a GPU.

Makes the models of `models.py` (trained models of every family, random models of odd shapes), compresses each with
every profile and compares the engine's results with those of transformers:

    python3 hf_parity.py --unweight ../bin/unweight --texts texts --out out

The truth is transformers' f32 forward pass of the BF16 weights (without TF32). The `bf16 error` is the RMS difference
between its BF16 forward pass and the truth, over all logits of prompts of one length. The checks are:
- prefill and steps (one token each), also of the BF16 baseline on cuBLAS, against the truth: the RMS error is at
  most 1.25 x the bf16 error, and the most likely token is the truth's wherever the truth's margin is above 6 x its
  bf16 error: the bf16 error of the length, or of the position if that is larger, times the ratio of the RMS errors of
  margins and of logits (without this ratio, transformers' own BF16 fails: `margins.py`);
- for a mixture, the same at the nearest nine of ten positions of all prompts where every router's choice is clear of
  rounding (`truth.py`), and one in a hundred of these may have another most likely token;
- steps = prefill, a row alone = the row in a batch, packed = cuBLAS: the RMS difference is at most 1.25 x sqrt(2) x
  the bf16 error, by which two results within the first bound differ if they round independently;
- the bytes are the same in every run, and with a bundle that the GPU made (`compress --device cuda`);
- 256 greedy tokens of trained models, for a text, a conversation and a batch: every token is the truth's most likely,
  or the truth's margin there is below 6 x its bf16 error. Of a mixture, this is the bf16 error of all tokens, and
  positions whose experts rounding may choose do not count. The text is the tokenizer's decoding of the tokens. The
  record has the number of tokens that equal transformers' `generate` in f32 and in BF16, and each position where they
  differ.

Prints a table, and writes all results to OUT/parity.json, even if the run is aborted. The exit status is 1 if a check
failed. `--only NAME` and `--profiles` select cases; `--jobs N` runs N models at a time, each in its own process.
`--no-unweight --device cpu --steps 3` runs only transformers.
"""

import argparse
import gc
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

import models
from truth import CLEAR, LENGTHS, Truth, rms_by_length, top_margin, worst

PROFILES = ["packed", "distribution", "inference", "palette", "compact", "archive"]
# Maximum RMS error, as a multiple of that of transformers' BF16.
BOUND = 1.25
# Maximum difference of two results that round independently.
APART = BOUND * math.sqrt(2.0)
# A length of a mixture with fewer compared positions has no RMS error.
POSITIONS_MIN = 4
# Share of the positions of a mixture that are not compared whose most likely token may differ.
WRONG_SHARE = 0.1
ALL_PROMPTS = range(len(LENGTHS))
NEW_TOKENS = 256
PROMPT_TOKENS = 64
MINUTES = 10


class CommandFailed(Exception):
    """The binary failed."""


class Cli:
    def __init__(self, binary: str):
        self.binary = binary

    def __call__(self, *arguments) -> dict:
        """Runs a command with --json."""
        command = [self.binary, *map(str, arguments), "--json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MINUTES * 60)
        except subprocess.TimeoutExpired:
            raise CommandFailed(f"`{' '.join(command)[:300]}` ran for more than {MINUTES} minutes") from None
        if done.returncode != 0:
            output = (done.stderr.strip() or done.stdout.strip())[-600:]
            raise CommandFailed(f"`{' '.join(command)[:300]}`: exit status {done.returncode}: {output}")
        return json.loads(done.stdout)


def tokens_of(prompts: list[list[int]]) -> list[str]:
    return [part for prompt in prompts for part in ("--tokens", ",".join(map(str, prompt)))]


def dump_logits(cli: Cli, bundle: Path, file: Path, prompts: list[list[int]], *flags) -> list[torch.Tensor]:
    """Returns the engine's logits of each prompt in BF16, `[tokens, vocabulary]`; `file` is replaced."""
    file.unlink(missing_ok=True)
    cli("generate", bundle, *tokens_of(prompts), "--max-new-tokens", 0, "--dump-logits", file, *flags)
    tensors = load_file(file)
    if len(tensors) != len(prompts) or any(tensor.dtype != torch.bfloat16 for tensor in tensors.values()):
        dtypes = {name: str(tensor.dtype) for name, tensor in tensors.items()}
        raise CommandFailed(f"{len(prompts)} prompts, but {file.name} has {dtypes}")
    logits = [tensors[f"logits.{index}"] for index in range(len(prompts))]
    # Also where nothing is compared: sorting and masks would hide them.
    infinite = [index for index, one in enumerate(logits) if not one.float().isfinite().all()]
    if infinite:
        raise CommandFailed(f"the logits of prompts {infinite} are not finite")
    return logits


class Model:
    """The cases of one model; each is a dict in `cases`."""

    def __init__(self, spec: models.Spec, cli: Cli | None, work: Path, arguments):
        self.spec, self.cli, self.work, self.arguments = spec, cli, work, arguments
        self.folder = work / "model"
        self.cases: list[dict] = []

    def case(self, name: str, passed: bool, **more) -> None:
        case = {"model": self.spec.name, "case": name, "passed": passed, **more}
        self.cases.append(case)
        shown = " ".join(f"{key}={show(value)}" for key, value in more.items() if not isinstance(value, (dict, list)))
        print(f"{'ok  ' if passed else 'FAIL'} {self.spec.name:15} {name:48} {shown}", flush=True)

    def run(self) -> None:
        start = time.perf_counter()
        texts = models.read_texts(self.arguments.texts)
        training = self.spec.save(self.folder, texts, self.arguments.device, self.arguments.steps)
        self.truth = Truth(self.folder, self.arguments.device)
        self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(self.folder) if self.spec.trained else None
        if self.spec.trained:
            # Prompts like those that the model was trained on.
            corpus = self.tokenizer.encode("\n\n".join(texts), add_special_tokens=False)
            step = (len(corpus) - max(LENGTHS)) // len(LENGTHS)
            starts = (index * step for index in range(len(LENGTHS)))
            self.truth.prompts = [corpus[start : start + length] for start, length in zip(starts, LENGTHS)]
        self.truth.forward()
        clear = [
            (top_margin(logits) > CLEAR * self.truth.margin_ratio * self.truth.errors[length]).float().mean().item()
            for logits, length in zip(self.truth.logits, self.truth.lengths)
            if length in self.truth.errors
        ]
        routed = torch.cat(self.truth.clear).float().mean().item()
        size = math.sqrt(sum(float(l.square().mean()) for l in self.truth.logits) / len(LENGTHS))
        largest = max(self.truth.errors.values())
        # The truth must be useful: far from noise, and with margins to compare.
        useful = largest < 0.1 * size and max(clear) > 0.0 and routed > 0.5
        values = {"bf16_error": self.truth.errors, "logits_rms": size, "worst_bf16_error": largest}
        values["margin_ratio"] = self.truth.margin_ratio
        values |= {"clear": sum(clear) / len(clear), "clear_routing": routed, **training}
        values["seconds"] = time.perf_counter() - start
        self.case("transformers", useful, **values)
        if self.spec.trained:
            self.texts_to_continue(texts)
        if self.cli:
            for profile in self.arguments.profiles:
                self.guard(f"{profile}: logits", self.logits, profile)
                if self.spec.trained:
                    self.guard(f"{profile}: greedy", self.greedy, profile)
                shutil.rmtree(self.work / profile, ignore_errors=True)

    def guard(self, name: str, check, *arguments) -> None:
        """Turns any exception, such as an error or undocumented output, into a failed case. Others still run."""
        try:
            check(*arguments)
        except Exception as error:
            self.case(name, False, error=f"{type(error).__name__}: {error}")

    # Logits.

    def dump(self, bundle: Path, prompts: list[list[int]], *flags) -> tuple[list[torch.Tensor], bytes]:
        logits = dump_logits(self.cli, bundle, self.work / "logits.safetensors", prompts, *flags)
        raw = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in logits)
        return [tensor.float() for tensor in logits], raw

    def against_truth(self, name: str, logits: list[torch.Tensor], which=ALL_PROMPTS) -> None:
        lengths, truth = [self.truth.lengths[i] for i in which], [self.truth.logits[i] for i in which]
        masks = [self.truth.clear[i] for i in which]
        bounds, kept = self.truth.errors, self.truth.kept
        every_prompt = len(which) == len(LENGTHS)
        if not every_prompt:
            bounds = rms_by_length([self.truth.rounded[i] for i in which], truth, lengths, masks, kept)
        errors = rms_by_length(logits, truth, lengths, masks, kept)
        ratios = {n: error / bounds[n] for n, error in errors.items()}
        if kept < 1.0:
            # One or two positions of a mixture say nothing: rounding decides their experts.
            compared = {n: sum(int(mask.sum()) for m, mask in zip(lengths, masks) if m == n) for n in ratios}
            ratios = {n: ratio for n, ratio in ratios.items() if compared[n] >= POSITIONS_MIN}
        passed = all(ratio <= BOUND for ratio in ratios.values())
        wrong, checked = [], 0
        rounded = [self.truth.rounded[i] for i in which]
        for ours, true, bf16, length, mask in zip(logits, truth, rounded, lengths, masks):
            if length not in bounds:
                continue
            # Some positions are more sensitive to rounding than others of their length.
            position_errors = (bf16 - true).square().mean(-1).sqrt().clamp(min=bounds[length])
            margins = top_margin(true) / (self.truth.margin_ratio * position_errors)
            clear = mask & (margins > CLEAR)
            missed = (ours.argmax(-1) != true.argmax(-1)) & clear
            positions = missed.nonzero()[:, 0].tolist()
            wrong += [{"prompt": length, "at": at, "margin_in_errors": float(margins[at])} for at in positions]
            checked += int(clear.sum())
        passed &= len(wrong) <= (1.0 - kept) * WRONG_SHARE * checked
        # A check of nothing is none.
        passed &= checked > 0 or not every_prompt
        more = {"ratio": worst(ratios), "argmax_wrong": len(wrong), "argmax_checked": checked, "ratios": ratios}
        self.case(f"{name} = truth", passed, **more, **({"wrong": wrong} if wrong else {}))

    def equal(self, name: str, left: list[torch.Tensor], right: list[torch.Tensor], which=ALL_PROMPTS) -> None:
        masks = [self.truth.clear[i] for i in which]
        differences = rms_by_length(left, right, [self.truth.lengths[i] for i in which], masks, self.truth.kept)
        ratios = {n: difference / self.truth.errors[n] for n, difference in differences.items()}
        if not ratios and self.truth.experts_per_token:
            # Rounding may choose the experts of every position: there is nothing to compare.
            return
        passed = bool(ratios) and all(ratio <= APART for ratio in ratios.values())
        self.case(name, passed, ratio=worst(ratios), ratios=ratios)

    def logits(self, profile: str) -> None:
        bundle, prompts = self.work / profile, self.truth.prompts
        report = self.cli("compress", self.folder, "-o", bundle, "--profile", profile)
        encodings = {e["encoding"]: e["tensors"] for e in report["encodings"]}
        batch = ("--max-batch", 16)
        prefill, prefill_bytes = self.dump(bundle, prompts, *batch)
        self.against_truth(f"{profile}: prefill", prefill)
        self.cases[-1]["encodings"] = encodings
        steps, steps_bytes = self.dump(bundle, prompts, "--by-steps", *batch)
        self.against_truth(f"{profile}: steps of a batch", steps)
        self.equal(f"{profile}: steps = prefill", steps, prefill)
        if profile != self.arguments.profiles[0]:
            return
        same = self.dump(bundle, prompts, *batch)[1] == prefill_bytes
        self.case(f"{profile}: prefill again, same bytes", same)
        same = self.dump(bundle, prompts, "--by-steps", *batch)[1] == steps_bytes
        self.case(f"{profile}: steps again, same bytes", same)
        for index in (0, LENGTHS.index(65), LENGTHS.index(200)):
            one = f"prompt of {LENGTHS[index]}"
            modes = (("prefill", prefill, ()), ("steps", steps, ("--by-steps", "--max-batch", 1)))
            for mode, together, flags in modes:
                alone, _ = self.dump(bundle, prompts[index : index + 1], *flags)
                self.equal(f"{profile}: {one}, {mode}, alone = in a batch", alone, [together[index]], [index])
                # The error of a single row is mostly chance.
                if LENGTHS[index] > 1:
                    self.against_truth(f"{profile}: {one}, {mode}, alone", alone, [index])
        for mode, packed, flags in (("prefill", prefill, ()), ("steps", steps, ("--by-steps",))):
            baseline, _ = self.dump(bundle, prompts, "--placement", "bf16", *flags, *batch)
            self.against_truth(f"{profile}: cublas, {mode}", baseline)
            self.equal(f"{profile}: packed = cublas, {mode}", packed, baseline)
        if self.arguments.device.startswith("cuda"):
            by_gpu = self.work / "by-gpu"
            self.cli("compress", self.folder, "-o", by_gpu, "--profile", profile, "--device", "cuda")
            same = self.dump(by_gpu, prompts, *batch)[1] == prefill_bytes
            self.case(f"{profile}: bundle made by the GPU, same bytes", same)
            shutil.rmtree(by_gpu)

    # Tokens.

    def texts_to_continue(self, texts: list[str]) -> None:
        """Makes prompts as text, each with its tokens and the continuation by transformers."""
        whole = max(texts, key=len)
        ids = self.tokenizer.encode(whole, add_special_tokens=False)
        self.greedy_cases = []
        for share in (0.1, 0.35, 0.6):
            start = int(share * len(ids))
            text = self.tokenizer.decode(ids[start : start + PROMPT_TOKENS])
            self.add_greedy(text, False, self.tokenizer.encode(text))
        question = models.conversations(texts)[3][0]
        chat = self.tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
        self.add_greedy(question["content"], True, self.tokenizer.encode(chat, add_special_tokens=False))
        for case in self.greedy_cases:
            same = identical(case["bf16"], case["f32"])
            name = "transformers: f32 = bf16, " + ("chat" if case["chat"] else "text")
            self.case(name, True, identical=same, tokens=len(case["f32"]))

    def add_greedy(self, text: str, chat: bool, ids: list[int]) -> None:
        f32, bf16 = (self.truth.greedy(model, ids, NEW_TOKENS) for model in (self.truth.f32, self.truth.bf16))
        self.greedy_cases.append({"text": text, "chat": chat, "ids": ids, "f32": f32, "bf16": bf16})

    def greedy(self, profile: str) -> None:
        bundle, new = self.work / profile, ("--max-new-tokens", NEW_TOKENS)
        kinds = [()] if profile != self.arguments.profiles[0] else [(), ("--placement", "bf16")]
        for flags in kinds:
            name = f"{profile}{': cublas' if flags else ''}"
            for case in self.greedy_cases:
                chat = ("--chat",) if case["chat"] else ()
                answer = self.cli("generate", bundle, "--prompt", case["text"], *chat, *new, *flags)
                self.continuation(f"{name}: greedy, {'chat' if chat else 'text'}", case, answer["sequences"][0])
            together = self.cli("generate", bundle, *tokens_of([c["ids"] for c in self.greedy_cases]), *new, *flags)
            for case, sequence in zip(self.greedy_cases, together["sequences"], strict=True):
                self.continuation(f"{name}: greedy, in a batch", case, sequence)

    def continuation(self, name: str, case: dict, sequence: dict) -> None:
        tokens, ends = sequence["tokens"], {models.EOS, models.END}
        ids = case["ids"]
        # The token that ends a text does not count, whether it is listed or not.
        ours = tokens[:-1] if tokens and tokens[-1] in ends else tokens
        problems = []
        if sequence["prompt_tokens"] != len(ids):
            problems.append(f"the prompt has {sequence['prompt_tokens']} tokens, but {len(ids)} by the tokenizer")
        if ends & set(ours):
            problems.append("tokens follow an end token")
        text = self.tokenizer.decode(ours, skip_special_tokens=True)
        if sequence["text"] != text:
            problems.append(f"the text is {sequence['text'][-80:]!r}, but the tokens decode to {text[-80:]!r}")
        stopped = sequence["finish"] == "stop"
        if not stopped and (sequence["finish"] != "length" or len(tokens) != NEW_TOKENS):
            problems.append(f"{len(tokens)} tokens instead of {NEW_TOKENS}, finish is {sequence['finish']}")
        # Teacher-forced along our tokens: row i has the truth's logits after everything before token i.
        all_ids = ids + ours
        first = len(ids) - 1
        true, router = self.truth.routed(self.truth.f32, all_ids)
        true, all_clear = true[first:], self.truth.clear_routing(router).tolist()
        rounded = self.truth.routed(self.truth.bf16, all_ids)[0][first:]
        position_errors = (rounded - true).square().mean(-1).sqrt()
        error = float((rounded - true).square().mean().sqrt())
        # Of a mixture, `error` includes positions that used another expert: it is more than that of a margin.
        margin_error = error if self.truth.experts_per_token else self.truth.margin_ratio * error
        clear = all_clear[first:]
        margins, likeliest = top_margin(true).tolist(), true.argmax(-1).tolist()
        departs = [i for i, token in enumerate(ours) if token != likeliest[i]]
        if stopped and likeliest[len(ours)] not in ends:
            departs.append(len(ours))
        wrong = [i for i in departs if clear[i] and margins[i] > CLEAR * margin_error]
        if wrong:
            margin = margins[wrong[0]] / margin_error
            problems.append(f"token {wrong[0]} is not the reference's; the margin is {margin:.1f} x its bf16 error")
        more = {"identical_f32": identical(ours, case["f32"]), "identical_bf16": identical(ours, case["bf16"])}
        checked = sum(of_position and margin > CLEAR * margin_error for of_position, margin in zip(clear, margins))
        more |= {"tokens": len(ours), "truth_tokens": len([t for t in case["f32"] if t not in ends])}
        more["checked"] = checked
        if not checked:
            problems.append("no token could be checked: rounding may change each, or its experts")
        more |= {"distinct": len(set(ours)), "near_ties": len(departs) - len(wrong), "finish": sequence["finish"]}
        more["departures"] = [
            {
                "at": i,
                "clear_routing": clear[i],
                # Tokens that `at` attends to and whose experts rounding may choose.
                "unclear_before": all_clear[: first + i].count(False),
                "margin_in_errors": margins[i] / margin_error,
                "position_error_in_errors": float(position_errors[i]) / error,
                "bf16_departs": int(rounded[i].argmax()) != likeliest[i],
            }
            for i in departs
        ]
        if problems:
            more["error"] = "; ".join(problems)
        self.case(name, not problems, **more)


def identical(left: list[int], right: list[int]) -> int:
    """Returns the length of the common prefix."""
    pairs = enumerate(zip(left, right))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def to_json(record: dict) -> str:
    """Returns JSON, with NaN and infinities as strings."""
    return json.dumps(json.loads(json.dumps(record), parse_constant=str), indent=1) + "\n"


def show(value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def save(record: dict, out: Path) -> None:
    record["failed"] = sum(not case["passed"] for case in record["cases"])
    (out / "parity.json").write_text(to_json(record))


def in_sequence(specs: list[models.Spec], arguments) -> dict:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")
    on_cuda = arguments.device.startswith("cuda")
    record = {
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "bound": BOUND,
        "apart": APART,
        "clear": CLEAR,
        "lengths": LENGTHS,
        "steps": arguments.steps,
        "cases": [],
    }
    cli = None if arguments.no_unweight else Cli(arguments.unweight)
    for spec in specs:
        with tempfile.TemporaryDirectory() as folder:
            model = Model(spec, cli, Path(folder), arguments)
            model.guard("model", model.run)
        record["cases"] += model.cases
        save(record, arguments.out)
        del model
        gc.collect()
        if on_cuda:
            torch.cuda.empty_cache()
    return record


def in_processes(specs: list[models.Spec], arguments) -> dict:
    """Runs one process per model, `jobs` at a time. A process that ends without a record is a failed case."""

    def one(spec: models.Spec) -> dict:
        out = arguments.out / spec.name
        (out / "parity.json").unlink(missing_ok=True)
        command = [sys.executable, __file__, "--only", spec.name, "--out", out, "--texts", arguments.texts]
        command += ["--unweight", arguments.unweight, "--device", arguments.device, "--steps", arguments.steps]
        command += ["--profiles", *arguments.profiles, *(["--no-unweight"] if arguments.no_unweight else [])]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        print(done.stdout, end="", flush=True)
        if (out / "parity.json").exists():
            return json.loads((out / "parity.json").read_text())
        error = f"exit status {done.returncode}: {done.stderr.strip()[-600:]}"
        print(f"FAIL {spec.name}: {error}", flush=True)
        return {"cases": [{"model": spec.name, "case": "process", "passed": False, "error": error}]}

    record = {"cases": []}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for part in pool.map(one, specs):
            record = {**part, **record, "cases": record["cases"] + part["cases"]}
            save(record, arguments.out)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unweight", default="unweight", help="the binary")
    parser.add_argument("--no-unweight", action="store_true", help="transformers' side alone")
    parser.add_argument("--texts", type=Path, required=True, help="directory of *.md files to train on")
    parser.add_argument("--out", type=Path, default=Path("out"), help="directory for parity.json")
    parser.add_argument("--device", default="cuda", help="where transformers runs: cuda or cpu")
    parser.add_argument("--steps", type=int, default=600, help="training steps")
    names = [spec.name for spec in models.ALL]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME", help="these models")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--profiles", nargs="+", default=PROFILES, choices=PROFILES, help="the first gets all checks")
    arguments = parser.parse_args()
    specs = [spec for spec in models.ALL if spec.name in arguments.only]
    if not arguments.no_unweight and not shutil.which(arguments.unweight):
        parser.error(f"--unweight {arguments.unweight}: no such program; build it, or see --no-unweight")
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = in_processes(specs, arguments) if arguments.jobs > 1 else in_sequence(specs, arguments)
    print(f"{len(record['cases'])} cases of {len(specs)} models, {record['failed']} failed")
    sys.exit(1 if record["failed"] else 0)


if __name__ == "__main__":
    main()

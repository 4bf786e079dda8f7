"""Runs all GPU checks of the Python package within a time limit, one after the other, the most important first.

    python gpu_checks.py --out results --seconds 1500          # the checks for which there are time and GPUs
    python gpu_checks.py --out results --seconds 540 --only vllm --only operator       # repeat until all have passed
    python gpu_checks.py --plan                                # list the commands; needs no GPU

Each check is another program in this directory, run in its own process. `results/checks.json` is updated after each; a
later call skips checks that have passed. The programs write their own JSON files as they run, so an interrupted call
loses no figures. Two calls may run at once, each with its own GPUs (`CUDA_VISIBLE_DEVICES`) and directory. Exit status
1: a check failed or was not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent


class Check(NamedTuple):
    """A program with its arguments, and the number of GPUs and seconds that it needs."""

    arguments: str
    gpus: int
    seconds: int
    """Typical time on H200s, with loading and compiling. The check is not started with less than half of that left."""


# In order of importance.
CHECKS = {
    "operator": Check("-m unittest -v gpu_ops", 1, 40),
    "vllm": Check("vllm_gpu.py --bundle", 1, 390),
    "transformers": Check("transformers_gpu.py --bundle --dfloat11", 1, 230),
    "mixture": Check(
        "vllm_gpu.py --geometry qwen3-30b-a3b --layers 4 --bundle --batches 1,8,16,32,64 --first 128 --few-graphs",
        1,
        220,
    ),
    "adapter": Check("vllm_gpu.py --quick", 1, 170),
    # Their times are estimates.
    "modules": Check("pack_gpu.py", 1, 240),
    "offload": Check("offload_gpu.py", 1, 180),
    "update": Check("update_gpu.py", 1, 60),
    "live": Check("vllm_live_gpu.py", 1, 300),
    "quantized": Check("vllm_quantized_gpu.py", 1, 480),
    "two-operator": Check("-m unittest -v gpu_ops.Module.test_two_gpus", 2, 30),
    "two-bundle": Check("vllm_gpu.py --tp 2 --bundle --no-packed --few-graphs --first 128 --tokens 64", 2, 260),
    "two-adapter": Check("vllm_gpu.py --tp 2 --quick", 2, 235),
    "two-experts": Check(
        "vllm_gpu.py --tp 2 --expert-parallel --geometry qwen3-30b-a3b --layers 4 --bundle --eager --batches 1,8 "
        "--tokens 32 --first 128",
        2,
        165,
    ),
    "two-stages": Check(
        "vllm_gpu.py --pp 2 --layers 8 --bundle --no-packed --eager --batches 1,8 --tokens 32 --first 128", 2, 120
    ),
}


def command(check: Check, out: pathlib.Path, seconds: float) -> list[str]:
    """Returns the command line of a check, to be run in this directory."""
    arguments = [sys.executable, *check.arguments.split()]
    if arguments[1].endswith(".py"):
        # The program stops before `run` kills it.
        arguments += ["--out", str(out), "--seconds", f"{max(1.0, seconds - 10):.0f}"]
    return arguments


def gpus() -> int:
    """Returns the number of GPUs that this process sees."""
    import torch

    return torch.cuda.device_count()


def end(child: subprocess.Popen[bytes]) -> None:
    """Ends a check: SIGTERM first, so that it can end children in other process groups, then SIGKILL to its group."""
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def run(name: str, check: Check, out: pathlib.Path, seconds: float) -> dict[str, Any]:
    """Runs a check and returns its result for `checks.json`."""
    begin = time.monotonic()
    figures = out / f"{name}.json"
    if figures.exists():
        # Keep the figures of an interrupted call, separate from those of this call.
        figures.replace(out / f"{name}.before.json")
    arguments = command(check, figures, seconds)
    with open(out / f"{name}.log", "w") as log:
        # In its own process group, which `end` kills as a whole.
        child = subprocess.Popen(arguments, cwd=HERE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(seconds)
        finally:
            if child.poll() is None:
                end(child)
    wall = time.monotonic() - begin
    result: dict[str, Any] = {"command": arguments[1:], "rc": child.returncode, "seconds": round(wall, 1)}
    try:
        report = json.loads(figures.read_text())
    except (OSError, ValueError):
        report = {}
    result |= {key: report[key] for key in ("faults", "left_out") if report.get(key)}
    result["passed"] = child.returncode == 0 and not result.keys() & {"faults", "left_out"}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"), help="directory for the results")
    parser.add_argument("--seconds", type=float, default=1500.0, help="time limit for all checks")
    parser.add_argument("--only", action="append", choices=CHECKS, help="run only this check; may be repeated")
    parser.add_argument("--plan", action="store_true", help="print what would run, and run nothing")
    options = parser.parse_args()
    chosen = {name: check for name, check in CHECKS.items() if name in (options.only or CHECKS)}
    if options.plan:
        for name, check in chosen.items():
            arguments = command(check, options.out / f"{name}.json", options.seconds)
            print(f"{name}: GPUs: {check.gpus}, about {check.seconds} s: {' '.join(arguments[1:])}", flush=True)
            if arguments[1].endswith(".py"):
                subprocess.run([*arguments, "--plan"], cwd=HERE, check=True)
        print(f"{sum(check.seconds for check in chosen.values())} s in total")
        return
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    results_path = out / "checks.json"
    try:
        results = json.loads(results_path.read_text()) if results_path.exists() else {}
    except ValueError as error:
        sys.exit(f"{results_path}: {error}; move it away, or pass another --out")
    gpu_count = gpus()
    for name, check in chosen.items():
        if results.get(name, {}).get("passed"):
            print(f"{name}: passed before", flush=True)
            continue
        left = options.seconds - (time.monotonic() - begin)
        why = None
        if gpu_count < check.gpus:
            why = f"it needs {check.gpus} GPUs, and {gpu_count} are available"
        elif left < check.seconds / 2:
            why = f"it needs about {check.seconds} s, and {left:.0f} s are left"
        if why is None:
            results[name] = run(name, check, out, left)
        elif "rc" not in results.get(name, {}):
            # Only if there is no result of an earlier call, which is kept.
            results[name] = {"passed": False, "not_run": why}
        # Replaced atomically, so that an interruption leaves a complete file.
        partial = results_path.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1))
        partial.replace(results_path)
        print(f"{time.monotonic() - begin:6.1f} s: {name}: {json.dumps(results[name])}", flush=True)
    missing = [name for name in chosen if not results[name]["passed"]]
    if missing:
        sys.exit(f"not passed: {', '.join(missing)}")


if __name__ == "__main__":
    main()

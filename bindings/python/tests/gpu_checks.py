"""All that the Python side has to show on GPUs, one check after the other, the most wanted first, within a time.

    python gpu_checks.py --out results --seconds 1500          # what there is time for, and GPUs
    python gpu_checks.py --out results --seconds 540 --only vllm --only operator       # as many calls as it takes
    python gpu_checks.py --plan                                # what each would start; needs no GPU

A check is one of the programs beside this one, in a process of its own. What is done is in `results/checks.json` after
each of them, and a later call goes on there: a check that passed is not run again. The programs write a JSON file of
their own as they go, so a call that is cut off loses no figure. Two calls may run at once, each with GPUs
(`CUDA_VISIBLE_DEVICES`) and a folder of its own. Exit status 1: a check did not hold, or was not run.
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
    """A program with its arguments, and what it takes."""

    arguments: str
    gpus: int
    seconds: int
    """About what it takes on H200s, loading and compiling included; it is not begun with less than half of that."""


# In order of worth.
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
    """What is run beside this file."""
    told = [sys.executable, *check.arguments.split()]
    if told[1].endswith(".py"):
        # It ends by itself before it is ended.
        told += ["--out", str(out), "--seconds", f"{max(1.0, seconds - 10):.0f}"]
    return told


def gpus() -> int:
    """How many there are for this process."""
    import torch

    return torch.cuda.device_count()


def end(child: subprocess.Popen[bytes]) -> None:
    """Asked first: it ends what it has started in groups of their own."""
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def run(name: str, check: Check, out: pathlib.Path, seconds: float) -> dict[str, Any]:
    """What came of a check."""
    begin = time.monotonic()
    figures = out / f"{name}.json"
    if figures.exists():
        # Of a call that was cut off: no figure is lost, and none is taken for this one's.
        figures.replace(out / f"{name}.before.json")
    told = command(check, figures, seconds)
    with open(out / f"{name}.log", "w") as log:
        # Of its own group, which goes with it.
        child = subprocess.Popen(told, cwd=HERE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(seconds)
        finally:
            if child.poll() is None:
                end(child)
    wall = time.monotonic() - begin
    result: dict[str, Any] = {"command": told[1:], "rc": child.returncode, "seconds": round(wall, 1)}
    try:
        report = json.loads(figures.read_text())
    except (OSError, ValueError):
        report = {}
    result |= {key: report[key] for key in ("faults", "left_out") if report.get(key)}
    result["passed"] = child.returncode == 0 and not result.keys() & {"faults", "left_out"}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"), help="a folder")
    parser.add_argument("--seconds", type=float, default=1500.0, help="for all of it")
    parser.add_argument("--only", action="append", choices=CHECKS, help="this one; may be given several times")
    parser.add_argument("--plan", action="store_true", help="say what would be started, and start nothing")
    given = parser.parse_args()
    chosen = {name: check for name, check in CHECKS.items() if name in (given.only or CHECKS)}
    if given.plan:
        for name, check in chosen.items():
            told = command(check, given.out / f"{name}.json", given.seconds)
            print(f"{name}: GPUs: {check.gpus}, about {check.seconds} s: {' '.join(told[1:])}", flush=True)
            if told[1].endswith(".py"):
                subprocess.run([*told, "--plan"], cwd=HERE, check=True)
        print(f"{sum(check.seconds for check in chosen.values())} s in all")
        return
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out.resolve()
    told = out / "checks.json"
    try:
        results = json.loads(told.read_text()) if told.exists() else {}
    except ValueError as error:
        sys.exit(f"{told}: {error}; move it away, or give another --out")
    there = gpus()
    for name, check in chosen.items():
        if results.get(name, {}).get("passed"):
            print(f"{name}: passed before", flush=True)
            continue
        left = given.seconds - (time.monotonic() - begin)
        why = None
        if there < check.gpus:
            why = f"{there} GPUs are there, and it takes {check.gpus}"
        elif left < check.seconds / 2:
            why = f"{left:.0f} s are left, and it takes about {check.seconds}"
        if why is None:
            results[name] = run(name, check, out, left)
        elif "rc" not in results.get(name, {}):
            # What came of an earlier call stays.
            results[name] = {"passed": False, "not_run": why}
        # Whole or as before, whenever this is stopped.
        partial = told.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1))
        partial.replace(told)
        print(f"{time.monotonic() - begin:6.1f} s: {name}: {json.dumps(results[name])}", flush=True)
    missing = [name for name in chosen if not results[name]["passed"]]
    if missing:
        sys.exit(f"not passed: {', '.join(missing)}")


if __name__ == "__main__":
    main()

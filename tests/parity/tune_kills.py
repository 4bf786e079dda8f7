"""Kills `unweight tune` (SIGKILL) at ten random points on a GPU and restarts it each time.

    python3 tune_kills.py --unweight ../bin/unweight [--size 512M] [--seed N] [--json FILE]

Makes the demo model (profile inference), tunes it once without kills, then with kills on another journal. Checks that
- after each kill, the next process keeps every complete line of the journals in its place, and adds no duplicates;
- the last run ends, and another run on the same journals measures nothing, finds the same plan, and saves it;
- the steps of the plan take at most a tenth longer than those of the run without kills. Measurements are noisy, so the
  plans may differ: the last line states which ones do.

Needs only Python. Fails if the test takes more than `--limit` seconds (120).
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KILLS = 10
BATCHES = [1, 64]
# Maximum seconds from a point to its kill (a few comparisons), or from a process's start if the point has passed.
SOON = 0.05
START = 1.0
# Maximum time of a step, relative to the run without kills.
BOUND = 1.1
PLAN = ["batch", "hard", "easy", "decode_sms", "consumers"]


class Failed(Exception):
    """A check failed."""


def whole_lines(path: Path) -> list[bytes]:
    """Returns the complete lines of a file, without a line that a kill truncated; none if there is no file."""
    text = path.read_bytes() if path.exists() else b""
    return text[: text.rfind(b"\n") + 1].splitlines(keepends=True)


class Tuning:
    """The searches of one journal."""

    def __init__(self, unweight: str, bundle: Path, journal: Path, ends: float):
        journals = [journal.with_name(f"{journal.name}.{batch}") for batch in BATCHES]
        batches = ",".join(str(batch) for batch in BATCHES)
        command = [unweight, "tune", str(bundle), "--batch", batches, "--rounds", "3", "--journal", str(journal)]
        self.command, self.journals, self.ends = command, journals, ends
        self.stderr = journal.with_name(f"{journal.name}.stderr")

    def lines(self) -> list[list[bytes]]:
        return [whole_lines(path) for path in self.journals]

    def comparisons(self) -> int:
        # The first line of each journal is its header.
        return sum(max(len(lines) - 1, 0) for lines in self.lines())

    def begin(self) -> subprocess.Popen:
        with self.stderr.open("ab") as stderr:
            return subprocess.Popen([*self.command, "--json"], stdout=subprocess.PIPE, stderr=stderr)

    def end(self, *more: str) -> list[dict]:
        """Runs to the end and returns the rows."""
        with self.stderr.open("ab") as stderr:
            ran = subprocess.run(
                [*self.command, *more, "--json"],
                stdout=subprocess.PIPE,
                stderr=stderr,
                timeout=max(self.ends - time.monotonic(), 1),
            )
        if ran.returncode != 0:
            raise Failed(f"{' '.join(self.command)}: exit {ran.returncode}\n{self.stderr.read_text()[-2000:]}")
        return json.loads(ran.stdout)["rows"]

    def killed(self, point: int, share: float) -> None:
        """Kills a run soon after the journals have `point` comparisons, or during its start if they already have."""
        wait = share * (START if self.comparisons() >= point else SOON)
        process = self.begin()
        try:
            while self.comparisons() < point:
                if process.poll() is not None:
                    output = self.stderr.read_text()[-2000:]
                    raise Failed(f"unweight tune ended by itself before comparison {point}:\n{output}")
                if time.monotonic() > self.ends:
                    raise Failed("the time limit is over; pass a larger --limit")
                time.sleep(0.001)
            time.sleep(wait)
        finally:
            process.kill()
            process.communicate()
        if process.returncode != -9:
            status = process.returncode
            raise Failed(f"unweight tune ended with exit status {status} before it was killed; try another --seed")


def plans(rows: list[dict]) -> list[dict]:
    return [{key: row[key] for key in PLAN} for row in rows]


def check_lines(before: list[list[bytes]], after: list[list[bytes]], number: int) -> None:
    for batch, old, new in zip(BATCHES, before, after):
        if new[: len(old)] != old:
            raise Failed(f"kill {number}, batch {batch}: existing lines of the journal have changed")
        keys = ("phase", "incumbent", "challenger")
        comparisons = [json.dumps([line[key] for key in keys]) for line in parsed(new[1:])]
        if len(set(comparisons)) != len(comparisons):
            raise Failed(f"kill {number}, batch {batch}: the journal has a comparison twice")


def parsed(lines: list[bytes]) -> list[dict]:
    return [json.loads(line) for line in lines]


def run(options: argparse.Namespace, folder: Path) -> dict:
    begun = time.monotonic()
    ends = begun + options.limit
    demo = [options.unweight, "demo", "--size", options.size, "--profile", "inference", "--dir", str(folder / "demo")]
    subprocess.run(demo, check=True, stdout=subprocess.DEVNULL, timeout=options.limit)
    bundle = folder / "demo" / "bundle"
    plain = Tuning(options.unweight, bundle, folder / "plain", ends)
    # The first run also compiles kernels.
    undisturbed = plain.end()
    whole = plain.comparisons()
    seconds = time.monotonic()
    killed = Tuning(options.unweight, bundle, folder / "killed", ends)
    draw = random.Random(options.seed)
    # Noise may make a search shorter than the first, so no point is in the last third.
    points = sorted(draw.randrange(max(whole * 2 // 3, 1)) for _ in range(KILLS))
    torn, before = 0, killed.lines()
    for number, point in enumerate(points, start=1):
        killed.killed(point, draw.random())
        after = killed.lines()
        check_lines(before, after, number)
        sizes = zip(killed.journals, after)
        torn += sum(path.exists() and path.stat().st_size > sum(map(len, lines)) for path, lines in sizes)
        before = after
        print(f"kill {number}: at {point}, {killed.comparisons()} comparisons in the journals", flush=True)
    rows = killed.end()
    check_lines(before, killed.lines(), KILLS + 1)
    files = [path.read_bytes() for path in killed.journals]
    again = killed.end("--save")
    if any(row["measured"] for row in again):
        raise Failed("the journal was finished, but something was measured again")
    if [path.read_bytes() for path in killed.journals] != files:
        raise Failed("the journal was finished, but it was written to")
    if plans(again) != plans(rows):
        raise Failed(f"the same journal gave different plans: {plans(rows)}, {plans(again)}")
    inspect = subprocess.run([options.unweight, "inspect", str(bundle), "--json"], check=True, capture_output=True)
    if not json.loads(inspect.stdout)["attached_plan"]:
        raise Failed("the plan is not saved next to the bundle")
    for row, other in zip(again, undisturbed):
        if row["step_us"] > other["step_us"] * BOUND:
            limit = f"{BOUND} x the {other['step_us']:.0f} us of the undisturbed run"
            raise Failed(f"batch {row['batch']}: {row['step_us']:.0f} us per step; the limit is {limit}")
    same = [row["batch"] for row, other in zip(plans(again), plans(undisturbed)) if row == other]
    return {
        "seed": options.seed,
        "points": points,
        "torn_lines": torn,
        "comparisons": [whole, killed.comparisons()],
        "rows": again,
        "undisturbed": undisturbed,
        "same_plan_at": same,
        "killed_seconds": time.monotonic() - seconds,
        "seconds": time.monotonic() - begun,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="unweight tune, killed ten times")
    parser.add_argument("--unweight", default="unweight")
    parser.add_argument("--size", default="512M", help="size of the demo model")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--limit", type=float, default=120.0, help="time limit of the whole test in seconds")
    parser.add_argument("--json", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="unweight-tune-kills-"))
    try:
        record = run(options, folder)
    except (Failed, subprocess.SubprocessError) as error:
        print(f"FAILED: {error}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"{KILLS} kills, {record['torn_lines']} torn lines, {record['comparisons'][1]} comparisons "
        f"({record['comparisons'][0]} undisturbed), nothing measured twice; the undisturbed run's plan at batches "
        f"{record['same_plan_at']} of {BATCHES}; {record['seconds']:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

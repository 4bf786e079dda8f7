"""Measures compress and decompress file to file, next to ZipNN and to a copy of the same files.

`cargo xtask bench-peers --files` installs ZipNN, builds the command line and calls this.

Data, written to a directory below `--folder`, which should be in memory (tmpfs):
- `big`: two safetensors files of four matrices of N(0, 0.02^2), 14336x4096 (0.94 GB);
- `small`: one file of 1280 tensors in the shapes of all-MiniLM-L6-v2's layers (0.28 GB).

Contenders; all use `--threads` threads:
- unweight: the processes `unweight compress` and `unweight decompress`, from start to end. Compress digests the source
  and every section, decodes every tensor and compares it; decompress checks every digest.
- unweight, unverified: `unweight compress --verify none`.
- ZipNN: reads a file, converts it with one call of `ZipNN(bytearray_dtype="bfloat16", threads=n)`, and writes it. Only
  the work is timed, not the start of Python. ZipNN neither digests nor verifies.
- ZipNN by tensors: one call per tensor, in one stored file.
- copy: reads and writes the source files in pieces of 4 MiB, a file or a part of one per thread. It is a bound: no
  program that writes these bytes from memory takes less.
Each round runs every contender once; the order rotates. Restored files are compared with the source in every round,
outside of the times.
"""

import argparse
import csv
import datetime
import filecmp
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from peers import import_zipnn, processor

PIECE = 4 << 20
COLUMNS = [
    "data", "codec", "step", "threads", "rounds", "seconds_median", "seconds_best", "seconds_worst",
    "cpu_seconds_median", "cpu_seconds_best", "unweight_times_faster_median", "unweight_times_faster_least",
    "unweight_times_faster_most", "bytes",
]  # fmt: skip
# Shapes of a layer of all-MiniLM-L6-v2.
LAYER = [(384, 384)] * 4 + [(1536, 384), (384, 1536), (1536,)] + [(384,)] * 9


def weights(generator, shape):
    """Returns N(0, 0.02^2) as BF16 bytes: float32 rounded to the nearest, ties to even."""
    bits = (generator.standard_normal(shape, dtype=np.float32) * np.float32(0.02)).view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype("<u2").tobytes()


def write_model(path, tensors, generator):
    """Writes a safetensors file of tensors {name: shape}."""
    header, at = {}, 0
    for name, shape in tensors.items():
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in tensors.values():
            file.write(weights(generator, shape))


def write_data(folder, scale):
    """Writes both models to `folder` and returns their directories. `scale` divides their size."""
    generator = np.random.default_rng(0)
    big, small = folder / "big", folder / "small"
    for directory in (big, small):
        directory.mkdir()
    shape = (14336 // scale, 4096)
    for index in (1, 2):
        tensors = {f"layers.{index}.matrix.{at}.weight": shape for at in range(4)}
        write_model(big / f"model-{index:05}-of-00002.safetensors", tensors, generator)
    layers = range(80 // scale)
    tensors = {f"layers.{layer}.{at}.weight": shape for layer in layers for at, shape in enumerate(LAYER)}
    write_model(small / "model.safetensors", tensors, generator)
    return {"big": big, "small": small}


def tensor_ranges(data):
    """Returns the byte range of every tensor of a safetensors file, after the range of its header."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:start]))
    ranges = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    return [(0, start), *((start + first, start + end) for first, end in ranges)]


class Unweight:
    """The command line, as processes."""

    def __init__(self, program, threads, name="unweight", options=()):
        self.program, self.threads, self.name, self.options = program, threads, name, options

    def call(self, *arguments):
        command = [self.program, *arguments, "--threads", str(self.threads), "--quiet"]
        start = time.perf_counter()
        process = subprocess.Popen([str(part) for part in command])
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(map(str, command))}: exit status {process.returncode}")
        return seconds, usage.ru_utime + usage.ru_stime

    def compress(self, source, stored):
        return self.call("compress", source, "--output", stored, *self.options)

    def decompress(self, stored, restored):
        return self.call("decompress", stored, "--output", restored)


class InProcess:
    """A contender that runs in this process. `pack` and `unpack` convert one file."""

    def timed(self, convert, source, target):
        target.mkdir()
        files = sorted(path for path in source.iterdir() if path.is_file())
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        for path in files:
            convert(path, target / path.name)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def compress(self, source, stored):
        return self.timed(self.pack, source, stored)

    def decompress(self, stored, restored):
        return self.timed(self.unpack, stored, restored)


class ZipNnFiles(InProcess):
    name = "ZipNN"

    def __init__(self, zipnn, threads):
        self.codec = zipnn(bytearray_dtype="bfloat16", threads=threads)

    def pack(self, source, target):
        target.write_bytes(self.codec.compress(bytearray(source.read_bytes())))

    def unpack(self, source, target):
        target.write_bytes(self.codec.decompress(source.read_bytes()))


class ZipNnTensors(ZipNnFiles):
    name = "ZipNN by tensors"

    def pack(self, source, target):
        data = bytearray(source.read_bytes())
        ranges = tensor_ranges(data)
        with target.open("wb") as file:
            # The header is stored as it is.
            file.write(data[: ranges[0][1]])
            for first, end in ranges[1:]:
                packed = self.codec.compress(data[first:end])
                file.write(len(packed).to_bytes(8, "little"))
                file.write(packed)

    def unpack(self, source, target):
        data = memoryview(source.read_bytes())
        at = 8 + int.from_bytes(data[:8], "little")
        with target.open("wb") as file:
            file.write(data[:at])
            while at < len(data):
                end = at + 8 + int.from_bytes(data[at : at + 8], "little")
                file.write(self.codec.decompress(bytes(data[at + 8 : end])))
                at = end


class Copy(InProcess):
    name = "copy"

    def __init__(self, threads):
        self.threads = threads

    def pack(self, source, target):
        size = source.stat().st_size
        with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as written:

            def part(first, end):
                buffer = memoryview(bytearray(PIECE))
                for at in range(first, end, PIECE):
                    piece = buffer[: min(PIECE, end - at)]
                    done = os.preadv(read.fileno(), [piece], at)
                    if done != len(piece) or os.pwrite(written.fileno(), piece, at) != done:
                        raise OSError(f"{source}: a piece at {at} was not copied as a whole")

            step = -(-size // self.threads // PIECE) * PIECE
            threads = [
                threading.Thread(target=part, args=(first, min(size, first + step))) for first in range(0, size, step)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    unpack = pack


def check_restored(source, restored, name):
    """Exits if a file of `source` is missing in `restored` or differs."""
    for path in source.iterdir():
        again = restored / path.name
        if not again.is_file() or not filecmp.cmp(path, again, shallow=False):
            raise SystemExit(f"{name}: {again} differs from {path}")


def measure(contenders, source, folder, rounds):
    """Returns {contender: [(compress seconds, CPU, decompress seconds, CPU, stored bytes)]}."""
    records = {contender.name: [] for contender in contenders}
    for round_index in range(rounds + 1):
        for step in range(len(contenders)):
            contender = contenders[(round_index + step) % len(contenders)]
            stored, restored = folder / "stored", folder / "restored"
            compress = contender.compress(source, stored)
            stored_bytes = sum(path.stat().st_size for path in stored.rglob("*") if path.is_file())
            decompress = contender.decompress(stored, restored)
            check_restored(source, restored, contender.name)
            for directory in (stored, restored):
                shutil.rmtree(directory)
            # The first round warms up.
            if round_index > 0:
                records[contender.name].append((*compress, *decompress, stored_bytes))
    return records


def rows(data, source, records, threads):
    """Returns the rows of the record. Speed relative to `unweight` is taken within each round."""
    original = sum(path.stat().st_size for path in source.iterdir())
    ours = records["unweight"]
    for name, all_rounds in records.items():
        for step, column in (("compress", 0), ("decompress", 2)):
            seconds = [each[column] for each in all_rounds]
            cpu = [each[column + 1] for each in all_rounds]
            ratios = [each[column] / mine[column] for each, mine in zip(all_rounds, ours)]
            size = all_rounds[0][4] if step == "compress" else original
            times = [statistics.median(seconds), min(seconds), max(seconds), statistics.median(cpu), min(cpu)]
            times += [statistics.median(ratios), min(ratios), max(ratios)]
            yield [data, name, step, threads, len(seconds), *(f"{value:.3f}" for value in times), size]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unweight", required=True, help="path of the built command line")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds, at least 3")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", default="/dev/shm", help="where data is written: 5 GB, in memory")
    parser.add_argument("--scale", type=int, default=1, help="divide the sizes by this, to try the script")
    parser.add_argument("--only", nargs="+", choices=["big", "small"], default=["big", "small"])
    parser.add_argument("--out", type=Path, help="CSV file to write")
    arguments = parser.parse_args()
    if arguments.rounds < 3:
        parser.error(f"--rounds {arguments.rounds}: pass at least 3, because a median of fewer rounds is noise")
    zipnn, threads = import_zipnn(), arguments.threads
    contenders = [
        Unweight(arguments.unweight, threads),
        Unweight(arguments.unweight, threads, "unweight, unverified", ("--verify", "none")),
        ZipNnFiles(zipnn, threads),
        ZipNnTensors(zipnn, threads),
        Copy(threads),
    ]
    from importlib.metadata import version

    heading = (
        f"# {datetime.date.today().isoformat()}: {processor()}, {threads} threads, {arguments.folder}, "
        f"zipnn {version('zipnn')}, {arguments.rounds} interleaved rounds after one to warm up; files compared"
    )
    table = [COLUMNS]
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="unweight-files-") as folder:
        folder = Path(folder)
        models = write_data(folder, arguments.scale)
        for data in arguments.only:
            table += rows(data, models[data], measure(contenders, models[data], folder, arguments.rounds), threads)
    for file in [sys.stdout, *([arguments.out.open("w")] if arguments.out else [])]:
        print(heading, file=file)
        csv.writer(file, lineterminator="\n").writerows(table)


if __name__ == "__main__":
    main()

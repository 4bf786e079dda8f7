"""Measures the codec next to its peers: same bytes, same thread counts, interleaved in one run.

`cargo xtask bench-peers [MODEL]` installs the peers, builds our side and calls this. It prints a section for docs/benchmarks.md.

All contenders convert one matrix after the other in memory, with freshly allocated outputs. Reading input is not timed.
- ours: unweight-format/examples/codec_speed.rs. Encoding includes the digests of the original and of
  every stored section, decoding the digest of the result. The peers do not hash.
- ZipNN: `ZipNN(bytearray_dtype="bfloat16", threads=n)`. ZipNN changes its input in place, so each call gets a copy,
  made before timing.
- zstd: level 3, each matrix unmodified. Compression uses `threads` workers; decompression is single-threaded by design.
Each round runs every contender once; the order rotates. The table gives the median and the full range of the rounds.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import numpy as np
import zstandard


def import_zipnn():
    """Returns ZipNN's class. Its package imports torch, but calls it only for tensors, never for bytearrays.
    If torch is not installed, a stub module replaces it, to avoid a download of gigabytes."""
    try:
        import torch  # noqa: F401
    except ImportError:

        class Inert(types.ModuleType):
            def __getattr__(self, name):
                if name.startswith("__"):
                    raise AttributeError(name)
                value = type(name, (), {})
                setattr(self, name, value)
                return value

        torch = Inert("torch")
        torch.jit = types.SimpleNamespace(script=lambda function: function)
        safetensors_torch = Inert("safetensors.torch")
        sys.modules["torch"] = torch
        sys.modules["safetensors.torch"] = safetensors_torch
    from zipnn import ZipNN

    return ZipNN


class Ours:
    name = "unweight"

    def __init__(self, program, path, shapes, threads):
        text = ";".join(f"{n},{k}" for n, k in shapes)
        self.process = subprocess.Popen(
            [program, path, text, "--threads", str(threads), "--on-demand"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def round(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"codec_speed ended with status {self.process.wait()}")
        record = json.loads(line)
        return record["encode_seconds"], record["decode_seconds"], record["stored_bytes"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Peer:
    """A peer that runs in this process: `compress` and `decompress` of one matrix."""

    def __init__(self, matrices):
        self.matrices = matrices

    def round(self):
        inputs = [bytearray(matrix) for matrix in self.matrices]
        start = time.perf_counter()
        stored = [self.compress(matrix) for matrix in inputs]
        encode_seconds = time.perf_counter() - start
        del inputs
        start = time.perf_counter()
        restored = [self.decompress(matrix) for matrix in stored]
        decode_seconds = time.perf_counter() - start
        for matrix, again in zip(self.matrices, restored):
            if bytes(again) != matrix:
                raise SystemExit(f"{self.name}: the restored matrix differs")
        return encode_seconds, decode_seconds, sum(len(matrix) for matrix in stored)

    def close(self):
        pass


class ZipNnPeer(Peer):
    name = "ZipNN"

    def __init__(self, zipnn, matrices, threads):
        super().__init__(matrices)
        codec = zipnn(bytearray_dtype="bfloat16", threads=threads)
        self.compress, self.decompress = codec.compress, codec.decompress


class ZstdPeer(Peer):
    name = "zstd -3"

    def __init__(self, matrices, threads):
        super().__init__(matrices)
        # 0 is zstd's single-threaded mode; n is n workers.
        self.compress = zstandard.ZstdCompressor(level=3, threads=0 if threads == 1 else threads).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


def gaussian():
    """Returns N(0, 0.02^2) weights of shape [14336, 4096]: float32 rounded to the nearest BF16, ties to even."""
    values = np.random.default_rng(0).standard_normal((14336, 4096), dtype=np.float32) * np.float32(0.02)
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return [rounded.astype("<u2").tobytes()], [(14336, 4096)]


def model(folder):
    """Yields every BF16 tensor of rank 2 in a directory of safetensors files."""
    matrices, shapes = [], []
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise SystemExit(f"{folder}: no *.safetensors files")
    for file in files:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
            for name, entry in sorted(header.items()):
                if name == "__metadata__" or entry["dtype"] != "BF16" or len(entry["shape"]) != 2:
                    continue
                start, end = entry["data_offsets"]
                opened.seek(8 + size + start)
                matrices.append(opened.read(end - start))
                shapes.append(tuple(entry["shape"]))
    if not matrices:
        raise SystemExit(f"{folder}: no BF16 matrices")
    return matrices, shapes


def measure(zipnn, program, matrices, shapes, threads, rounds):
    with tempfile.NamedTemporaryFile(suffix=".bf16") as file:
        for matrix in matrices:
            file.write(matrix)
        file.flush()
        contenders = [
            Ours(program, file.name, shapes, threads),
            ZipNnPeer(zipnn, matrices, threads),
            ZstdPeer(matrices, threads),
        ]
        records = {contender.name: [] for contender in contenders}
        for round_index in range(rounds + 1):
            for step in range(len(contenders)):
                contender = contenders[(round_index + step) % len(contenders)]
                record = contender.round()
                # The first round warms up: it pages in code and lets the allocators grow.
                if round_index > 0:
                    records[contender.name].append(record)
        for contender in contenders:
            contender.close()
    return records


def processor():
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def table(title, matrices, all_records):
    original = sum(len(matrix) for matrix in matrices)
    print(f"\n#### {title}: {len(matrices)} matrices, {original / 1e6:.1f} MB\n")
    print("| threads | codec | compress MB/s (range) | decompress MB/s (range) | bits/element | ours: compress | ours: decompress | ours: size |")
    print("|---|---|---|---|---|---|---|---|")
    for threads, records in all_records.items():
        summary = {}
        for name, rows in records.items():
            cells = []
            for column in (0, 1):
                speeds = [original / 1e6 / row[column] for row in rows]
                cells.append((statistics.median(speeds), min(speeds), max(speeds)))
            summary[name] = (*cells, rows[0][2])
        ours = summary["unweight"]
        for name, (compress, decompress, stored) in summary.items():
            ratios = ["", "", ""]
            if name != "unweight":
                ratios = [
                    f"{ours[0][0] / compress[0]:.2f}x",
                    f"{ours[1][0] / decompress[0]:.2f}x",
                    f"{ours[2] / stored:.4f}x",
                ]
            speed = ["{:.0f} ({:.0f}-{:.0f})".format(*cell) for cell in (compress, decompress)]
            print(f"| {threads} | {name} | {speed[0]} | {speed[1]} | {stored * 16 / original:.3f} | {' | '.join(ratios)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="directory of safetensors files to measure, too")
    parser.add_argument("--codec-speed", required=True, help="path of the built codec_speed example")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds, at least 7")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    if arguments.rounds < 7:
        parser.error(f"--rounds {arguments.rounds}: pass at least 7, because a median of fewer rounds is noise")
    zipnn = import_zipnn()
    inputs = [("N(0, 0.02^2) [14336, 4096]", *gaussian())]
    if arguments.model:
        inputs.append((Path(arguments.model).resolve().name, *model(arguments.model)))
    from importlib.metadata import version

    print(f"### {datetime.date.today().isoformat()}: {processor()}, {os.cpu_count()} CPUs\n")
    command = " ".join(["cargo xtask bench-peers", *([inputs[1][0]] if arguments.model else [])])
    print(f"`{command}`; medians of {arguments.rounds} interleaved rounds after one to warm up.")
    print(f"zipnn {version('zipnn')}, zstandard {version('zstandard')}, Python {platform.python_version()}.")
    for title, matrices, shapes in inputs:
        records = {
            threads: measure(zipnn, arguments.codec_speed, matrices, shapes, threads, arguments.rounds)
            for threads in arguments.threads
        }
        table(title, matrices, records)


if __name__ == "__main__":
    main()

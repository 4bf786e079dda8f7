"""Small models for tests, by the standard library alone."""

import json
import pathlib
import random
import struct


def bf16(count: int, seed: int) -> bytes:
    """Weights as models have them: a bell curve, rounded to BF16 by cutting."""
    chance = random.Random(seed)
    return b"".join(struct.pack("<f", chance.gauss(0.0, 0.02))[2:] for _ in range(count))


def safetensors(path: pathlib.Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """Writes one file: names to (dtype, shape, bytes)."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def small(home: pathlib.Path, layers: int = 2) -> dict[str, tuple[str, list[int], bytes]]:
    """A model directory; returns its tensors."""
    home.mkdir(parents=True)
    tensors = {}
    for layer in range(layers):
        for index, part in enumerate(("gate_proj", "up_proj", "down_proj")):
            name = f"model.layers.{layer}.mlp.{part}.weight"
            shape = [64, 128] if part == "down_proj" else [128, 64]
            tensors[name] = ("BF16", shape, bf16(128 * 64, 10 * layer + index))
    tensors["model.norm.weight"] = ("BF16", [64], bf16(64, 99))
    tensors["scale"] = ("F32", [2, 3], struct.pack("<6f", *range(6)))
    tensors["flags"] = ("BOOL", [4], bytes([1, 0, 0, 1]))
    safetensors(home / "model.safetensors", tensors)
    (home / "config.json").write_text('{"architectures": ["Nothing"]}\n')
    return tensors

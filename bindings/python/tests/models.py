"""Small models for tests. All but `of_transformers` need only the standard library."""

import json
import pathlib
import random
import struct

# A configuration of transformers in which every kind of linear layer can be packed.
SMALL = dict(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=512,
    max_position_embeddings=512,
    dtype="bfloat16",
)
MOE = dict(tie_word_embeddings=False, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2)


def of_transformers(
    home: pathlib.Path, config: str, deviation: float, options: dict[str, object], **more: object
) -> pathlib.Path:
    """Writes a model directory of transformers with random weights; `more` is passed to `save_pretrained`."""
    import torch
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**SMALL, **options})
    model = transformers.AutoModelForCausalLM.from_config(made).to(torch.bfloat16)
    for parameter in model.parameters():
        # Drawn in float32, because torch draws many zeros in BF16, unlike trained models. Biases and norms are changed,
        # because neutral ones would hide mistakes.
        drawn = torch.randn(parameter.shape).mul(deviation).to(torch.bfloat16)
        parameter.data = drawn if parameter.dim() > 1 else parameter.data + drawn
    model.save_pretrained(home, **more)
    return home


def bf16(count: int, seed: int) -> bytes:
    """Returns the bytes of normally distributed weights, truncated to BF16."""
    chance = random.Random(seed)
    return b"".join(struct.pack("<f", chance.gauss(0.0, 0.02))[2:] for _ in range(count))


def safetensors(path: pathlib.Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """Writes a safetensors file from a dict of names to (dtype, shape, bytes)."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def small(home: pathlib.Path, layers: int = 2) -> dict[str, tuple[str, list[int], bytes]]:
    """Writes a model directory; returns its tensors as for `safetensors`."""
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

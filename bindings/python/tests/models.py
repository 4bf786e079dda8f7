"""Models with random weights for tests. `of_transformers`, `zero_experts` and `of_geometry` need more than the standard
library."""

import json
import pathlib
import random
import struct
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    import torch

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
# The first layer has an MLP, the second one experts and a shared expert.
GLM = dict(
    tie_word_embeddings=False,
    moe_intermediate_size=128,
    n_routed_experts=4,
    num_experts_per_tok=2,
    attention_bias=True,
)
# Biases of norms, attention and head, and a router that chooses one expert after the other.
PHI = dict(tie_word_embeddings=False, num_local_experts=4, attention_bias=True, lm_head_bias=True)
# hidden size, intermediate size, layers, heads, KV heads, head size, vocabulary size
GEOMETRIES = {
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128, 128256),
    "mixtral-8x7b": (4096, 14336, 32, 32, 8, 128, 32000),
    "qwen3-30b-a3b": (2048, 768, 48, 32, 4, 128, 151936),
    "tiny": (256, 512, 2, 4, 2, 64, 512),
    "tiny-mixtral": (256, 512, 2, 4, 2, 64, 512),
    "tiny-qwen3-moe": (256, 128, 2, 4, 2, 64, 512),
}
# The mixtures of experts: model type, experts per layer, experts per token.
MIXTURES = {
    "mixtral-8x7b": ("mixtral", 8, 2),
    "qwen3-30b-a3b": ("qwen3_moe", 128, 8),
    "tiny-mixtral": ("mixtral", 4, 2),
    "tiny-qwen3-moe": ("qwen3_moe", 8, 2),
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


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


def zero_experts(model: pathlib.Path) -> pathlib.Path:
    """Sets every 50th weight of a model's experts to zero, too many for the packed encoding."""
    import safetensors.torch

    for file in model.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(file)
        for name, tensor in tensors.items():
            if ".experts." in name:
                tensor.view(-1)[::50] = 0
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return model


def of_geometry(home: pathlib.Path, geometry: str, layers: Optional[int]) -> None:
    """Writes a model of one of `GEOMETRIES` with normally distributed random weights, on a GPU if there is one."""
    import safetensors.torch
    import torch

    hidden, intermediate, own_layers, heads, kv_heads, head, vocabulary = GEOMETRIES[geometry]
    kind, experts, chosen = MIXTURES.get(geometry, ("llama", 0, 0))
    layers = layers or own_layers
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def matrix(n: int, k: int) -> torch.Tensor:
        return (torch.randn(n, k, generator=generator, device=device) * 0.02).to(torch.bfloat16).cpu()

    home.mkdir(parents=True)
    places: dict[str, str] = {}

    def save(part: int, tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{part:05}.safetensors"
        safetensors.torch.save_file(tensors, home / name, {"format": "pt"})
        places.update(dict.fromkeys(tensors, name))

    attention = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (kv_heads * head, hidden),
        "self_attn.v_proj": (kv_heads * head, hidden),
        "self_attn.o_proj": (hidden, heads * head),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if kind == "qwen3_moe":
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    if kind == "mixtral":
        mlp, mlps, router = ("w1", "w3", "w2"), "block_sparse_moe.experts.{}", "block_sparse_moe.gate"
    else:
        mlp, mlps, router = ("gate_proj", "up_proj", "down_proj"), "mlp.experts.{}" if experts else "mlp", "mlp.gate"
    places_of_mlps = [mlps.format(expert) for expert in range(max(1, experts))]
    for layer in range(layers):
        shapes = dict(attention)
        for place in places_of_mlps:
            for name, shape in zip(mlp, 2 * [(intermediate, hidden)] + [(hidden, intermediate)]):
                shapes[f"{place}.{name}"] = shape
        if experts:
            shapes[router] = (experts, hidden)
        prefix = f"model.layers.{layer}"
        tensors = {f"{prefix}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for norm, width in norms.items():
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(width, dtype=torch.bfloat16)
        save(layer, tensors)
    ends = {"model.embed_tokens.weight": matrix(vocabulary, hidden), "lm_head.weight": matrix(vocabulary, hidden)}
    save(layers, {**ends, "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)})
    (home / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "torch_dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if kind == "mixtral":
        config |= {"num_local_experts": experts, "num_experts_per_tok": chosen, "sliding_window": None}
    elif kind == "qwen3_moe":
        config |= {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": intermediate}
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    (home / "config.json").write_text(json.dumps(config, indent=1))
    if device == "cuda":
        # Free the memory for the engines, which are other processes.
        torch.cuda.empty_cache()


def digest(tensor: "torch.Tensor") -> int:
    """Returns a digest of a tensor's bytes and their order, computed where the tensor is."""
    import torch

    data, total = tensor.contiguous().view(-1).view(torch.uint8), 0
    for at, part in enumerate(data.split(1 << 26)):
        place = torch.arange(1, len(part) + 1, device=part.device) * 0x9E3779B1 + at
        total += int((place * (part.to(torch.int64) + 1) ^ place >> 15).sum())
    return total % 2**64


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

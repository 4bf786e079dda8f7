"""Small models for `hf_parity.py`: trained models of every family, and random models of odd shapes.

`Spec.save(folder, ...)` makes a model and writes it with `save_pretrained`, weights in BF16. Trained models memorize
texts, so that rounding does not change their next tokens. They have their own tokenizer and a chat template.
Run directly, this file only saves models:

    python3 models.py OUT --texts docs --device cpu --steps 3 [--only llama]
"""

import argparse
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers.models.deepseek_v2 import modeling_deepseek_v2

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
BOS, EOS, USER, ASSISTANT, END = range(5)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB = 2048
POSITIONS = 2048
# Tokens of a training row: more than any prompt with its generated tokens.
ROW_TOKENS = 768
ROWS = 12
FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "phi3": "Phi3",
    "smollm3": "SmolLM3",
    "granite": "Granite",
    "olmo2": "Olmo2",
    "glm4": "Glm4",
    "cohere": "Cohere",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "qwen2_moe": "Qwen2Moe",
    "olmoe": "Olmoe",
    "granitemoe": "GraniteMoe",
    "granitemoeshared": "GraniteMoeShared",
    "glm4_moe": "Glm4Moe",
    "deepseek": "Deepseek",
    "phimoe": "Phimoe",
}


class DeepseekConfig(transformers.LlamaConfig):
    """The configuration of DeepSeek-MoE, a family that transformers does not have."""

    model_type = "deepseek"
    attribute_map = {"num_experts": "n_routed_experts"}


class DeepseekForCausalLM(transformers.LlamaForCausalLM):
    """DeepSeek-MoE: Llama with the experts of DeepSeek-V2, which equal its own if weights are not normalized."""

    config_class = DeepseekConfig

    def __init__(self, config: DeepseekConfig):
        super().__init__(config)
        for layer in self.model.layers[config.first_k_dense_replace :]:
            layer.mlp = modeling_deepseek_v2.DeepseekV2Moe(config)
            for parameter in layer.mlp.parameters():
                torch.nn.init.normal_(parameter, std=config.initializer_range)


transformers.AutoConfig.register("deepseek", DeepseekConfig)
transformers.AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM)
# Families whose norms multiply by one plus their weight.
PLUS_ONE = ("gemma2", "gemma3_text")


@dataclass(frozen=True)
class Spec:
    """A model; `config` has keys of its family's configuration."""

    name: str
    family: str
    config: dict
    trained: bool = False
    # Share of the weights of each matrix that is moved out of the window of 16 exponents.
    escapes: float = 0.0
    # The `max_shard_size` of `save_pretrained`: small for several files.
    shard: str = "1GB"
    rope: dict = field(default_factory=dict)

    def build(self, seed: int) -> transformers.PreTrainedModel:
        """Returns a random model in f32."""
        keys = {
            "num_hidden_layers": 4,
            "vocab_size": VOCAB,
            "max_position_embeddings": POSITIONS,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": None,
            "tie_word_embeddings": False,
            **self.config,
        }
        keys["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, **self.rope}
        if self.family == "gemma3_text":
            local = {"rope_type": "default", "rope_theta": 1000.0}
            keys["rope_parameters"] = {"full_attention": keys["rope_parameters"], "sliding_attention": local}
        # Products of queries and keys are about 1, so attention is neither flat nor concentrated on one token.
        keys["initializer_range"] = 0.02 if self.trained else keys["hidden_size"] ** -0.5
        name = FAMILIES[self.family]
        kind = "TextConfig" if self.family == "gemma3_text" else "Config"
        of = lambda name: globals().get(name) or getattr(transformers, name)
        config = of(f"{name}{kind}")(**keys)
        torch.manual_seed(seed)
        model = of(f"{name}ForCausalLM")(config)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                # Training leaves it as it is.
                buffer.copy_(0.1 * torch.randn(buffer.shape))
        return model

    def save(self, folder: Path, texts: list[str], device: str, steps: int, seed: int = 1) -> dict:
        """Makes the model and saves it. Returns values to report."""
        values = {}
        model = self.build(seed).to(device)
        if self.trained:
            tokenizer = train_tokenizer(texts)
            values["loss"] = train(model, tokenizer, texts, device, steps, seed)
            tokenizer.save_pretrained(folder)
            model.generation_config.eos_token_id = [EOS, END]
        else:
            disturb(model, self.escapes, seed, 0.0 if self.family in PLUS_ONE else 1.0)
        model.generation_config.do_sample = False
        model.to(torch.bfloat16)
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):
                # F32 in checkpoints.
                module.e_score_correction_bias = torch.nn.Buffer(module.e_score_correction_bias.float())
        model.save_pretrained(folder, max_shard_size=self.shard)
        values["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        return values


def sizes(hidden: int, intermediate: int, heads: int, kv_heads: int, **more) -> dict:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LINEAR = {"rope_type": "linear", "factor": 2.0}
# Layers 2 and 3 have the window, 0 and 1 do not.
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2}
# Odd layers see all tokens, with another rotary embedding in Gemma 3.
GEMMA3 = {"sliding_window": 64, "sliding_window_pattern": 2}
# Mixtral's: four experts per layer, two per token. Few layers, so that most choices of all routers are clear.
TAILS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
# Eight experts per layer, two per token.
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
# OLMoE's: eight experts of the width that the MLP of a dense model has.
SMALL_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
# GLM-4.5's: a dense first layer, and a shared expert.
GLM = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "routed_scaling_factor": 1.5}
# DeepSeek-MoE's: a dense first layer, and shared experts as wide as two.
DEEPSEEK = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax",
    # Of DeepSeek-V2.
    "routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": None, "topk_group": None,
}
# Phi-3.5-MoE's, with biases.
PHI = {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True}
# Granite's.
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}

MULTIPLIERS = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}


def longrope(pairs: int, **more) -> dict:
    """Returns LongRoPE factors for `pairs` pairs of three quarters of a head, and for both kinds of contexts."""
    return {
        "rope_type": "longrope",
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + i / pairs for i in range(pairs)],
        "long_factor": [1.5 + 8.0 * i / pairs for i in range(pairs)],
        **more,
    }


def mscales(pairs: int) -> dict:
    """Returns Phi-3.5-MoE's LongRoPE, the same in all contexts: transformers 5.17 uses its short factors in long
    contexts, too. Fixtures of unweight-model have different ones."""
    factors = [1.0 + i / pairs for i in range(pairs)]
    return {
        "rope_type": "longrope", "short_factor": factors, "long_factor": factors,
        "short_mscale": 1.2, "long_mscale": 1.2,
        "original_max_position_embeddings": 512,
    }


# transformers uses the long factors for texts of more than one token, the engine for contexts of more than one. Both
# give the same result at position 0, the only position of a text of one token.
LONG = {"original_max_position_embeddings": 1}

TRAINED = [
    Spec("llama", "llama", sizes(384, 1024, 6, 2), trained=True, rope={"rope_theta": 500000.0}),
    Spec("mistral", "mistral", sizes(256, 768, 8, 2, head_dim=64, sliding_window=64), trained=True),
    Spec("qwen2", "qwen2", sizes(512, 1024, 8, 2, tie_word_embeddings=True), trained=True),
    Spec("qwen3", "qwen3", sizes(256, 768, 4, 2, head_dim=128), trained=True, shard="2MB"),
    Spec("mixtral", "mixtral", sizes(256, 512, 4, 2, num_local_experts=4, num_experts_per_tok=2), trained=True),
    Spec("qwen3-moe", "qwen3_moe", sizes(256, 512, 4, 2, head_dim=64, **EXPERTS), trained=True),
    Spec("phi3", "phi3", sizes(256, 768, 4, 2, **LONG), trained=True, rope=longrope(24, attention_factor=1.1)),
    Spec("smollm3", "smollm3", sizes(256, 768, 4, 2, no_rope_layer_interval=2), trained=True),
    Spec("granite", "granite", sizes(256, 768, 4, 2, tie_word_embeddings=True, **MULTIPLIERS), trained=True),
    Spec("olmo2", "olmo2", sizes(256, 768, 4, 2), trained=True),
    Spec("glm4", "glm4", sizes(256, 768, 4, 2, head_dim=64), trained=True, rope={"partial_rotary_factor": 0.5}),
    Spec("cohere", "cohere", sizes(256, 768, 4, 2, tie_word_embeddings=True, logit_scale=0.5), trained=True),
    Spec("falcon3", "llama", sizes(256, 768, 4, 2, head_dim=256), trained=True, rope={"rope_theta": 1000042.0}),
    Spec("gemma2", "gemma2", sizes(256, 768, 4, 2, tie_word_embeddings=True, sliding_window=64), trained=True),
    Spec("gemma3", "gemma3_text", sizes(256, 768, 4, 1, tie_word_embeddings=True, **GEMMA3), trained=True, rope=LINEAR),
    Spec("qwen2-moe", "qwen2_moe", sizes(256, 512, 4, 2, shared_expert_intermediate_size=512, **EXPERTS), trained=True),
    Spec("olmoe", "olmoe", sizes(256, 256, 4, 4, **SMALL_EXPERTS), trained=True),
    Spec("granite-moe", "granitemoe", sizes(256, 256, 4, 2, **LOCAL_EXPERTS, **MULTIPLIERS), trained=True),
    Spec(
        "granite-moe-shared", "granitemoeshared",
        sizes(256, 256, 4, 2, shared_intermediate_size=512, **LOCAL_EXPERTS, **MULTIPLIERS), trained=True,
    ),
    Spec("deepseek-moe", "deepseek", sizes(256, 768, 4, 4, **DEEPSEEK), trained=True),
    # Two layers: a SparseMixer's choices are clear of rounding at fewer positions than those of other routers.
    Spec("phi-moe", "phimoe", sizes(256, 256, 4, 2, num_hidden_layers=2, **PHI), trained=True, rope=mscales(32)),
    Spec(
        "glm4-moe", "glm4_moe", sizes(256, 768, 4, 2, head_dim=64, attention_bias=True, **GLM), trained=True,
        rope={"partial_rotary_factor": 0.5},
    ),
]
# `hidden_size` 280, 264, 136 and 328 are not multiples of 64; no `intermediate_size` is a multiple of 32; 1003 is odd.
RANDOM = [
    Spec("llama-group7", "llama", sizes(280, 328, 7, 1, head_dim=64, vocab_size=1003)),
    Spec("llama-llama3", "llama", sizes(256, 520, 4, 2, vocab_size=1000, tie_word_embeddings=True), rope=LLAMA3),
    Spec("llama-linear", "llama", sizes(320, 456, 4, 4, vocab_size=1003, tie_word_embeddings=True), rope=LINEAR),
    Spec("mistral-window", "mistral", sizes(264, 520, 4, 1, head_dim=128, sliding_window=48, vocab_size=1003)),
    Spec("mistral-yarn", "mistral", sizes(256, 328, 4, 2, sliding_window=None, vocab_size=1003), rope=YARN),
    Spec("qwen2-hd80", "qwen2", sizes(320, 456, 4, 2, vocab_size=1003), shard="1MB"),
    Spec("qwen2-window", "qwen2", sizes(256, 520, 4, 1, vocab_size=1003, **QWEN_WINDOW), rope=YARN),
    Spec("qwen3-group7", "qwen3", sizes(136, 200, 7, 1, head_dim=128, vocab_size=1003, tie_word_embeddings=True)),
    Spec("qwen3-window", "qwen3", sizes(328, 200, 2, 2, head_dim=80, vocab_size=1003, **QWEN_WINDOW), rope=LLAMA3),
    # Short contexts, a window, and a merged gate and up with a separate kernel for the activation.
    Spec("phi3-short", "phi3", sizes(384, 328, 4, 4, sliding_window=48, vocab_size=1003), rope=longrope(36)),
    Spec("smollm3-window", "smollm3", sizes(264, 520, 4, 1, head_dim=80, vocab_size=1003, **QWEN_WINDOW)),
    Spec("granite-odd", "granite", sizes(280, 328, 7, 1, head_dim=64, vocab_size=1003, **MULTIPLIERS)),
    Spec("olmo2-odd", "olmo2", sizes(320, 456, 4, 1, vocab_size=1003), rope=LINEAR),
    Spec("glm4-group16", "glm4", sizes(264, 200, 16, 1, head_dim=48, vocab_size=1003), rope={"partial_rotary_factor": 0.5}),
    Spec("cohere-odd", "cohere", sizes(328, 520, 4, 1, head_dim=128, vocab_size=1003, logit_scale=0.25)),
    # Scores and logits large enough for soft caps to matter.
    Spec(
        "gemma2-odd", "gemma2",
        sizes(288, 328, 6, 2, head_dim=80, vocab_size=1003, sliding_window=48, query_pre_attn_scalar=160,
              attn_logit_softcapping=4.0, final_logit_softcapping=3.0),
    ),
    Spec("gemma3-odd", "gemma3_text", sizes(280, 520, 7, 1, vocab_size=1003, **GEMMA3)),
    # Biases of attention: in a parallel family, before norms of all heads together, with a factor of what is added.
    Spec("llama-bias", "llama", sizes(264, 328, 4, 2, head_dim=64, vocab_size=1003, attention_bias=True)),
    Spec("olmo2-bias", "olmo2", sizes(320, 456, 4, 1, vocab_size=1003, attention_bias=True)),
    Spec("cohere-bias", "cohere", sizes(328, 520, 4, 1, head_dim=128, vocab_size=1003, attention_bias=True)),
    Spec(
        "granite-bias", "granite",
        sizes(280, 328, 7, 1, head_dim=64, vocab_size=1003, attention_bias=True, **MULTIPLIERS),
    ),
    # As `phi-moe`, with large biases and a window; one layer. The head has an odd number of rows.
    Spec(
        "phi-moe-bias", "phimoe",
        sizes(256, 320, 4, 1, vocab_size=1003, sliding_window=48, num_hidden_layers=1, router_jitter_noise=0.1, **PHI),
    ),
    # Few enough escapes to be packed, and too many.
    Spec("llama-escapes", "llama", sizes(256, 512, 4, 2, vocab_size=1024), escapes=0.002),
    Spec("qwen3-escapes", "qwen3", sizes(256, 512, 4, 2, head_dim=64, vocab_size=1024), escapes=0.03),
    # Experts with heavy tails, which run as BF16.
    # As `glm4-moe`, with norms of queries and keys, as GLM-4.5 has; one layer has experts.
    Spec(
        "glm4-moe-norms", "glm4_moe",
        sizes(256, 512, 4, 1, head_dim=64, vocab_size=1003, attention_bias=True, use_qk_norm=True, num_hidden_layers=2,
              **GLM),
        rope={"partial_rotary_factor": 0.5},
    ),
    Spec("mixtral-tails", "mixtral", sizes(256, 512, 4, 2, vocab_size=1024, **TAILS), escapes=0.03),
]
ALL = TRAINED + RANDOM


@torch.no_grad()
def disturb(model: torch.nn.Module, escapes: float, seed: int, norm: float) -> None:
    """Sets norms near `norm`, nonzero biases, and escapes: one in 20 far above the other weights, the rest below. Large
    escapes are placed where they cannot concentrate attention on one token."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            middle, spread = (0.0, 0.3) if name.endswith("bias") else (norm, 0.1)
            values = middle + spread * torch.randn(parameter.shape, generator=generator)
        elif escapes:
            values = parameter.cpu()
            draw = torch.rand(parameter.shape, generator=generator)
            may_be_large = any(part in name for part in ("v_proj", "o_proj", "up_proj", "down_proj"))
            large = escapes / 20 if may_be_large else 0.0
            values = torch.where(draw < escapes, values * 2.0**-24, values)
            values = torch.where(draw < large, values * 2.0**48, values)
            values = torch.where(draw < large, values.sign() * 64.0, values)
        else:
            continue
        parameter.copy_(values)


def read_texts(folder: Path) -> list[str]:
    """Reads every Markdown file below a directory."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.md"))]
    if not texts:
        raise SystemExit(f"{folder}: no *.md files to learn from; give another directory to --texts")
    return texts


def train_tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer with a BOS token and a chat template, as Llama's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=POSITIONS,
    )


def conversations(texts: list[str]) -> list[list[dict]]:
    """Returns conversations: a paragraph's first sentence is the question, the rest the answer."""
    pairs = []
    for paragraph in (paragraph for text in texts for paragraph in text.split("\n\n")):
        question, dot, answer = paragraph.strip().partition(". ")
        if dot and 20 < len(question) < 200 and len(answer) > 100:
            pairs.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    return pairs


def train(model, tokenizer, texts: list[str], device: str, steps: int, seed: int) -> float:
    """Trains on the texts and returns the last loss. Three of four rows are excerpts, the fourth has conversations."""
    draw = random.Random(seed)
    parts = [tokenizer.encode(text, add_special_tokens=False, verbose=False) for text in texts]
    stream = [id for part in parts for id in (BOS, *part, EOS)]
    chats = [tokenizer.apply_chat_template(pair, tokenize=False) for pair in conversations(texts)]
    chats = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    if len(stream) <= ROW_TOKENS or not chats:
        told = f"{len(stream)} tokens, {len(chats)} paragraphs with an answer"
        raise SystemExit(f"the texts are too short: {told}; give more to --texts")

    def row(kind: int) -> list[int]:
        if kind % 4:
            start = draw.randrange(len(stream) - ROW_TOKENS)
            return [BOS, *stream[start : start + ROW_TOKENS - 1]]
        ids = []
        while len(ids) < ROW_TOKENS:
            ids += draw.choice(chats)
        return ids[:ROW_TOKENS]

    on_cuda = device.startswith("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
    warm_up, loss = max(steps // 20, 1), torch.tensor(math.nan)
    model.train()
    for step in range(steps):
        done = step / steps
        rate = 2e-3 * min((step + 1) / warm_up, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = torch.tensor([row(kind) for kind in range(ROWS)], device=device)
        with torch.autocast("cuda", torch.bfloat16, enabled=on_cuda):
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory for the models, one directory each")
    parser.add_argument("--texts", type=Path, required=True, help="directory of *.md files to train on")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--steps", type=int, default=600, help="training steps")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    arguments = parser.parse_args()
    texts = read_texts(arguments.texts)
    for spec in ALL:
        if arguments.only in spec.name:
            values = spec.save(arguments.out / spec.name, texts, arguments.device, arguments.steps)
            print(spec.name, *(f"{key} {value:g}" for key, value in values.items()), flush=True)


if __name__ == "__main__":
    main()

"""What transformers makes of a model, and how far its BF16 forward is from its f32 one. For `hf_parity.py`."""

import math
from collections import Counter
from pathlib import Path

import torch
import transformers

# Short prompts several times: of one alone the error is a matter of luck.
LENGTHS = [1] * 4 + [2] * 3 + [63, 64, 65, 200, 700]


class Truth:
    """A model in transformers: logits of the prompts in f32, and the errors of its BF16 forward."""

    def __init__(self, folder: Path, device: str):
        self.device = device
        load = transformers.AutoModelForCausalLM.from_pretrained
        # The plain products and softmax: with a mask, one of PyTorch's f32 kernels was far off at 65 tokens.
        self.f32 = load(folder, dtype=torch.float32, attn_implementation="eager").to(device).eval()
        self.bf16 = load(folder, dtype=torch.bfloat16).to(device).eval()
        self.vocab = self.f32.config.vocab_size
        generator = torch.Generator().manual_seed(7)
        self.prompts = [torch.randint(0, self.vocab, (n,), generator=generator).tolist() for n in LENGTHS]

    def forward(self) -> None:
        self.logits = [self.of(self.f32, prompt) for prompt in self.prompts]
        self.rounded = [self.of(self.bf16, prompt) for prompt in self.prompts]
        self.errors = rms_by_length(self.rounded, self.logits, LENGTHS)
        if any(not math.isfinite(error) or error == 0.0 for error in self.errors.values()):
            raise ValueError(f"transformers' own errors are {self.errors}: nothing can be held against them")

    @torch.no_grad()
    def of(self, model, prompt: list[int]) -> torch.Tensor:
        return model(input_ids=torch.tensor([prompt], device=self.device)).logits[0].float().cpu()

    @torch.no_grad()
    def greedy(self, model, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt], device=self.device)
        mask = torch.ones_like(ids)
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
        return out[0, len(prompt) :].tolist()


def rms_by_length(left: list[torch.Tensor], right: list[torch.Tensor], lengths: list[int]) -> dict[int, float]:
    squares, counts = Counter(), Counter()
    for a, b, length in zip(left, right, lengths, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"logits of a prompt of {length} tokens are {tuple(a.shape)}, expected {tuple(b.shape)}")
        squares[length] += float((a.double() - b.double()).square().sum())
        counts[length] += a.numel()
    return {length: math.sqrt(squares[length] / counts[length]) for length in counts}


def top_margin(logits: torch.Tensor) -> torch.Tensor:
    first, second = logits.topk(2, dim=-1).values.unbind(-1)
    return first - second


def worst(ratios: dict[int, float]) -> float:
    """The largest, or one that is no number."""
    return next((ratio for ratio in ratios.values() if not math.isfinite(ratio)), max(ratios.values()))

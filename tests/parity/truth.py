"""Logits of transformers in f32, and the error of its BF16 forward pass. Used by `hf_parity.py`."""

import math
from collections import defaultdict
from pathlib import Path

import torch
import transformers

# Many short prompts, because the error of a few positions is mostly chance: 1.28 x that of BF16 was seen with four.
LENGTHS = [1] * 24 + [2] * 12 + [63, 64, 65, 200, 700]


# Rounding does not explain a margin of this many RMS errors.
CLEAR = 6.0
# Share of the clear positions of a mixture that is compared.
MIXTURE_KEPT = 0.9


class RouterScores:
    """What each router of a model ranks experts by, in `layers`: its logits, or sigmoids plus their correction bias.

    Read from the modules: in transformers 5.17, the outputs of Granite and GLM-4.5 have no router logits.
    """

    def __init__(self, model: torch.nn.Module, experts: int):
        self.model, self.experts, self.layers, self.hooks = model, experts, [], []

    def __enter__(self) -> "RouterScores":
        routers = [module for name, module in self.model.named_modules() if name.endswith((".gate", ".router"))]
        self.hooks = [module.register_forward_hook(self.read) for module in routers]
        return self

    def __exit__(self, *_) -> None:
        for hook in self.hooks:
            hook.remove()

    def read(self, router: torch.nn.Module, _, output) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        # Next to them are the chosen experts and their weights.
        logits = next(part for part in parts if part.is_floating_point() and part.shape[-1] == self.experts)
        logits = logits.float().reshape(-1, self.experts)
        if (bias := getattr(router, "e_score_correction_bias", None)) is not None:
            logits = logits.sigmoid() + bias
        self.layers.append(logits.cpu())


class Truth:
    """A model in transformers: logits of the prompts in f32, and the errors of its BF16 forward pass.

    The router of a mixture chooses experts. If the last chosen and the first rejected expert are almost equal, rounding
    decides, and a token with another expert is far from the truth although nothing is wrong. Positions of a mixture are
    therefore compared only where every router's choice is clear: the margin between the two is above `CLEAR` x the RMS
    error of the router's logits in BF16. A SparseMixer has further margins. `clear` has a mask for each
    prompt, which is all True for a dense model.

    A position also attends to earlier positions, some of which used another expert. A few positions of a mixture are
    therefore 50 times as far off as most, and which ones depends on the rounding. The errors are those of the `kept`
    positions nearest to the truth, of prompts of all lengths together: an expert that rounding chose early in a prompt
    of 64 tokens can change most of its positions.
    """

    def __init__(self, folder: Path, device: str):
        self.device = device
        load = transformers.AutoModelForCausalLM.from_pretrained
        # Eager attention: with a mask, one of PyTorch's f32 attention kernels was far off at 65 tokens.
        self.f32 = load(folder, dtype=torch.float32, attn_implementation="eager").to(device).eval()
        self.bf16 = load(folder, dtype=torch.bfloat16).to(device).eval()
        self.vocab = self.f32.config.vocab_size
        self.experts_per_token = getattr(self.f32.config, "num_experts_per_tok", None)
        self.experts = getattr(self.f32.config, "num_local_experts", None) or getattr(self.f32.config, "num_experts", 0)
        self.kept = MIXTURE_KEPT if self.experts_per_token else 1.0
        # The lengths that are compared separately, one for each prompt.
        self.lengths = [0] * len(LENGTHS) if self.experts_per_token else LENGTHS
        generator = torch.Generator().manual_seed(7)
        self.prompts = [torch.randint(0, self.vocab, (n,), generator=generator).tolist() for n in LENGTHS]

    def forward(self) -> None:
        self.logits, routers = map(list, zip(*(self.routed(self.f32, prompt) for prompt in self.prompts)))
        self.rounded, rounded_routers = map(list, zip(*(self.routed(self.bf16, prompt) for prompt in self.prompts)))
        if self.experts_per_token:
            differences = torch.cat([a - b for a, b in zip(rounded_routers, routers)])
            # One error per layer.
            self.router_errors = differences.square().mean((0, 2)).sqrt()
        self.clear = [self.clear_routing(router) for router in routers]
        self.errors = rms_by_length(self.rounded, self.logits, self.lengths, self.clear, self.kept)
        self.margin_ratio = self.margin_ratio_of_bf16()
        if any(not math.isfinite(error) or error == 0.0 for error in self.errors.values()):
            raise ValueError(f"transformers' own errors are {self.errors}: nothing can be held against them")

    def margin_ratio_of_bf16(self) -> float:
        """Returns how many times larger the BF16 error of the margin between the two most likely tokens is than that of
        a logit: about 2. It is the difference of two errors, and of the largest logits, which BF16 rounds most
        coarsely."""
        squares, margins = [], []
        for rounded, true, mask in zip(self.rounded, self.logits, self.clear):
            rounded, true = rounded[mask].double(), true[mask].double()
            squares.append((rounded - true).square().mean(-1))
            margins.append(margin_errors(rounded, true).square())
        squares, margins = torch.cat(squares), torch.cat(margins)
        nearest = squares.argsort()[: math.ceil(self.kept * len(squares))]
        return float((margins[nearest].mean() / squares[nearest].mean()).sqrt())

    @torch.no_grad()
    def routed(self, model, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logits [tokens, vocabulary] and what routers rank [tokens, layers, experts]; 0 layers if dense."""
        ids = torch.tensor([prompt], device=self.device)
        if not self.experts_per_token:
            return model(input_ids=ids).logits[0].float().cpu(), torch.zeros(len(prompt), 0, 0)
        with RouterScores(model, self.experts) as scores:
            logits = model(input_ids=ids).logits[0]
        return logits.float().cpu(), torch.stack(scores.layers, 1)

    def clear_routing(self, router: torch.Tensor) -> torch.Tensor:
        if not self.experts_per_token:
            return torch.ones(len(router), dtype=torch.bool)
        ranked = router.sort(-1, descending=True).values
        margin = ranked[..., self.experts_per_token - 1] - ranked[..., self.experts_per_token]
        if self.f32.config.model_type == "phimoe":
            margin = torch.minimum(margin, self.sparse_mixer_margin(ranked))
        return (margin > CLEAR * self.router_errors).all(-1)

    def sparse_mixer_margin(self, ranked: torch.Tensor) -> torch.Tensor:
        """Returns how far a SparseMixer is from another order of its two experts, and from others near either."""
        cutoff = 2.0 * self.f32.config.router_jitter_noise
        margins = [ranked[..., 0] - ranked[..., 1]]
        for place in range(2):
            best, rest = ranked[..., place : place + 1], ranked[..., place + 1 :]
            edges = best - rest - cutoff * torch.maximum(rest.abs(), best)
            margins.append(edges.abs().amin(-1))
        return torch.stack(margins).amin(0)

    @torch.no_grad()
    def greedy(self, model, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt], device=self.device)
        mask = torch.ones_like(ids)
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
        return out[0, len(prompt) :].tolist()


def rms_by_length(
    left: list[torch.Tensor], right: list[torch.Tensor], lengths: list[int], masks: list[torch.Tensor], kept: float
) -> dict[int, float]:
    """Returns RMS differences by length, over the share `kept` of the masked positions with the smallest differences.
    Lengths without such positions are left out."""
    squares = defaultdict(list)
    for a, b, length, mask in zip(left, right, lengths, masks, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"logits of a prompt are {tuple(a.shape)}, expected {tuple(b.shape)}")
        own = (a[mask].double() - b[mask].double()).square().mean(-1)
        if not own.isfinite().all():
            raise ValueError(f"logits of a prompt of length {length} are not finite")
        squares[length] += own.tolist()
    nearest = {length: sorted(own)[: math.ceil(kept * len(own))] for length, own in squares.items() if own}
    return {length: math.sqrt(sum(own) / len(own)) for length, own in nearest.items()}


def margin_errors(logits: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Returns how far off the margin between the truth's two most likely tokens is, for each position."""
    two = true.topk(2, dim=-1).indices
    first, second = (logits - true).gather(-1, two).unbind(-1)
    return first - second


def top_margin(logits: torch.Tensor) -> torch.Tensor:
    first, second = logits.topk(2, dim=-1).values.unbind(-1)
    return first - second


def worst(ratios: dict[int, float]) -> float:
    """Returns the largest ratio, or one that is not finite; 0 if no position could be compared."""
    return next((ratio for ratio in ratios.values() if not math.isfinite(ratio)), max(ratios.values(), default=0.0))

"""Compares models in vLLM, loaded from bundles or packed while loading, with BF16. Needs vLLM for the CPU.

Run as a program, it runs engines one after the other in one process, and prints their tokens and logprobs as JSON.
"""

import functools
import importlib.util
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request
from typing import Callable, Optional

from models import GLM, MOE, PHI, SMALL, of_transformers, zero_experts

PROMPTS = 3
TOKENS = 12
READ = r"unweight: (\d+) of (\d+) bytes of the bundle read"
RANK = 8
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
}
# Configuration class, options, and the number of packed layers: q, k and v are one layer, and so are gate and up.
KINDS = {
    "llama": ("LlamaConfig", dict(tie_word_embeddings=False), 10),
    # Has biases, and an embedding with 12 rows of padding: too many zeros to pack.
    "qwen2, tied": ("Qwen2Config", dict(tie_word_embeddings=True, vocab_size=500), 8),
    # A few padding rows of zeros can be packed, too.
    "llama, padded head": ("LlamaConfig", dict(tie_word_embeddings=False, vocab_size=511), 10),
    # Matrices have several blocks, so two processes can read different ones.
    "llama, wide": (
        "LlamaConfig",
        dict(
            tie_word_embeddings=False,
            hidden_size=1024,
            intermediate_size=2048,
            num_attention_heads=16,
            num_key_value_heads=16,
        ),
        10,
    ),
    # 500 is not a multiple of 64, so MLPs are not packed.
    "odd": ("LlamaConfig", dict(tie_word_embeddings=False, intermediate_size=500), 6),
    "qwen3": ("Qwen3Config", dict(tie_word_embeddings=False), 10),
    "mistral": ("MistralConfig", dict(tie_word_embeddings=False), 10),
    "gemma3": ("Gemma3TextConfig", dict(tie_word_embeddings=True), 9),
    # The head is a module of its own with the embedding's packed weight. Here, `tie_weights` ties it.
    "llama, tied": ("LlamaConfig", dict(tie_word_embeddings=True), 9),
    # The experts of a layer count as one layer.
    "qwen3 moe": ("Qwen3MoeConfig", MOE, 8),
    # Here, an assignment ties the head, and the embedding stays BF16: its class gets no quantization.
    "mixtral, tied": (
        "MixtralConfig",
        dict(tie_word_embeddings=True, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2),
        6,
    ),
    # vLLM's class gives its head and its embedding no quantization.
    "phi moe": ("PhimoeConfig", {**PHI, "intermediate_size": 128}, 6),
}

# A model whose logits differ in their last bits, as the product of a dense layer does on the CPU. Logits near 4 are
# BF16, in steps of 1 / 32.
ROUNDED = {"glm4 moe": ("Glm4MoeConfig", GLM, 10)}

VALUE = "model.layers.0.self_attn.v_proj.weight"
# Quantizations that vLLM runs on the CPU.
QUANTIZED = ("compressed-tensors, int4", "compressed-tensors, int8", "gptq", "awq")
# Models split over two processes: the option, the model, and whether it has a LoRA adapter.
SHARED = (
    ("tensor_parallel_size", "llama, padded head", False),
    ("tensor_parallel_size", "llama, wide", False),
    ("tensor_parallel_size", "llama, padded head", True),
    ("tensor_parallel_size", "qwen3 moe", False),
    ("pipeline_parallel_size", "llama", False),
)


def make(home: pathlib.Path, kind: str, **more: object) -> pathlib.Path:
    """Writes a model directory with random weights and a word-level tokenizer."""
    import tokenizers
    import transformers

    config, options, _ = {**KINDS, **ROUNDED}[kind]
    of_transformers(home, config, 0.05, options, **more)
    if kind == "phi moe":
        # Published models name vLLM's class.
        text = (home / "config.json").read_text()
        (home / "config.json").write_text(text.replace("PhimoeForCausalLM", "PhiMoEForCausalLM"))
    words = {f"w{index}": index for index in range(options.get("vocab_size", SMALL["vocab_size"]))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(home)
    return home


def bundle_of(model: pathlib.Path, profile: str = "packed") -> pathlib.Path:
    import unweight

    bundle = model.with_name("bundle-" + profile)
    unweight.compress(model, bundle, profile=profile)
    return bundle


def without(model: pathlib.Path, copy: pathlib.Path, name: str) -> pathlib.Path:
    """Copies a model without the tensor `name`."""
    import safetensors.torch

    shutil.copytree(model, copy)
    tensors = safetensors.torch.load_file(copy / "model.safetensors")
    del tensors[name]
    safetensors.torch.save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def make_two(home: pathlib.Path, kind: str, change: Callable[..., object]) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes a model, and a copy of which each tensor is what `change` returns for its name, itself and a generator."""
    import safetensors.torch
    import torch

    model, other = make(home / "model", kind), home / "other" / "model"
    shutil.copytree(model, other)
    random = torch.Generator().manual_seed(7)
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    changed = {name: change(name, tensor, random) for name, tensor in tensors.items()}
    safetensors.torch.save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    return model, other


def quantize(model: pathlib.Path, method: str) -> pathlib.Path:
    """Replaces the MLPs of a model by random weights of another quantization; attention and head stay BF16."""
    import safetensors.torch
    import torch

    random, group = torch.Generator().manual_seed(3), 64
    tensors = safetensors.torch.load_file(model / "model.safetensors")

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=random).int()

    for name in [name for name in tensors if ".mlp." in name]:
        (n, k), prefix = tensors.pop(name).shape, name.removesuffix("weight")
        scales = torch.rand(n, k // group, generator=random).mul(0.004).add(0.006).bfloat16()
        if method == "compressed-tensors, int4":
            shape = torch.tensor([n, k])
            parts = dict(weight_packed=words(n, k // 8), weight_scale=scales, weight_shape=shape)
        elif method == "compressed-tensors, int8":
            weight = torch.randint(-127, 128, (n, k), generator=random).to(torch.int8)
            parts = dict(weight=weight, weight_scale=scales[:, :1].float().mul(0.1).contiguous())
        elif method == "gptq":
            parts = dict(
                qweight=words(k // 8, n),
                scales=scales.t().contiguous(),
                # Zero points are stored minus 1, 4 bits each; symmetric weights have 8.
                qzeros=torch.full((k // group, n // 8), 0x77777777, dtype=torch.int32),
                g_idx=torch.arange(k, dtype=torch.int32) // group,
            )
        else:
            zeros = torch.full((k // group, n // 8), -0x77777778, dtype=torch.int32)
            parts = dict(qweight=words(k, n // 8), scales=scales.t().contiguous(), qzeros=zeros)
        tensors |= {prefix + part: tensor for part, tensor in parts.items()}
    safetensors.torch.save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    ignored = [f"model.layers.{layer}.self_attn.{one}_proj" for layer in range(2) for one in "qkvo"]
    if method.startswith("compressed-tensors"):
        int4 = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group, dynamic=False)
        int8 = dict(num_bits=8, type="int", symmetric=True, strategy="channel", dynamic=False)
        inputs = dict(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
        is_int4 = method.endswith("int4")
        scheme = dict(weights=int4 if is_int4 else int8, input_activations=None if is_int4 else inputs)
        config = dict(
            quant_method="compressed-tensors",
            format="pack-quantized" if is_int4 else "int-quantized",
            quantization_status="compressed",
            config_groups={"group_0": dict(scheme, targets=["Linear"])},
            ignore=[*ignored, "lm_head"],
        )
    elif method == "gptq":
        config = dict(quant_method="gptq", bits=4, group_size=group, desc_act=False, sym=True, lm_head=False)
        # GPTQModel's way to leave layers in BF16.
        config["dynamic"] = {r"-:.*self_attn.*": {}}
    else:
        config = dict(quant_method="awq", bits=4, group_size=group, zero_point=True, version="gemm")
        config["modules_to_not_convert"] = ["self_attn"]
    text = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**text, "quantization_config": config}))
    return model


def adapter(home: pathlib.Path) -> pathlib.Path:
    """Writes a LoRA adapter in PEFT's format for all linear layers but the head, large enough to change the output."""
    import safetensors.torch
    import torch

    home.mkdir()
    hidden, inner, heads, keys = SMALL["hidden_size"], SMALL["intermediate_size"], 256, 128
    shapes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    random = torch.Generator().manual_seed(2)
    tensors = {}
    for layer in range(SMALL["num_hidden_layers"]):
        for name, (n, k) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("lora_A", (RANK, k)), ("lora_B", (n, RANK))):
                tensors[f"{prefix}.{part}.weight"] = torch.randn(shape, generator=random).mul(0.1).bfloat16()
    safetensors.torch.save_file(tensors, home / "adapter_model.safetensors")
    config = dict(peft_type="LORA", r=RANK, lora_alpha=RANK, target_modules=[name.split(".")[1] for name in shapes])
    (home / "adapter_config.json").write_text(json.dumps(config))
    return home


def engines(runs: list[dict]) -> tuple[list, str]:
    """Runs engines with these options one after the other in a new process; returns their outputs and the log."""
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(runs)],
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    log = done.stdout + done.stderr
    for line in done.stdout.splitlines():
        if line.startswith("ANSWERS "):
            return json.loads(line.removeprefix("ANSWERS ")), log
    raise AssertionError(f"rc {done.returncode}: {log[-6000:]}")


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.home = pathlib.Path(folder.name)

    def hold_equal(self, runs: list[dict], **more) -> str:
        """Asserts that all runs have bit-identical outputs; the first is BF16. Returns the log."""
        answers, log = engines([{**run, **more} for run in runs])
        self.assertEqual(len(answers), len(runs))
        for run, answer in zip(runs, answers):
            self.assertEqual(len(answer), PROMPTS)
            for one in answer:
                self.assertEqual((len(one["tokens"]), len(one["logprobs"])), (TOKENS, TOKENS))
            self.assertEqual(answer, answers[0], run)
        # The output depends on the prompt.
        self.assertNotEqual(answers[0][0]["tokens"], answers[0][1]["tokens"])
        return log


class Engine(Case):
    def test_bundles_generate_the_tokens_of_the_model(self):
        for kind, (_, _, layers) in KINDS.items():
            with self.subTest(kind):
                self.home = pathlib.Path(tempfile.mkdtemp(dir=self.home))
                model = make(self.home / "model", kind)
                runs = [dict(model=str(model)), dict(model=str(bundle_of(model)))]
                if kind in ("llama", "llama, tied", "mixtral, tied"):
                    runs.append(dict(model=str(model), quantization="unweight"))
                if kind == "llama":
                    runs += [dict(model=str(bundle_of(model, profile))) for profile in ("distribution", "palette")]
                log = self.hold_equal(runs, enforce_eager=True)
                self.assertEqual(log.count(f"unweight: {layers} layers packed"), len(runs) - 1, log[-4000:])

    def test_experts_with_a_correction_bias_and_layers_without_experts_are_packed(self):
        model = make(self.home / "model", "glm4 moe")
        answers, log = engines([dict(model=str(path), enforce_eager=True) for path in (model, bundle_of(model))])
        self.assertIn("unweight: 10 layers packed", log)
        for expected, got in zip(*answers):
            self.assertEqual(got["tokens"], expected["tokens"])
            for one, other in zip(got["logprobs"], expected["logprobs"]):
                self.assertAlmostEqual(one, other, delta=1 / 16)

    def test_experts_that_cannot_be_packed_stay_in_bf16(self):
        model = zero_experts(make(self.home / "model", "qwen3 moe"))
        runs = [dict(model=str(model)), dict(model=str(bundle_of(model)))]
        runs.append(dict(model=str(model), quantization="unweight"))
        log = self.hold_equal(runs, enforce_eager=True)
        self.assertEqual(log.count("unweight: 6 layers packed"), 2, log[-4000:])
        lines = re.findall(r"unweight: \S*layers\.0\.\S*, \S* cannot be packed and stay in BF16 \(\S*: .*outside", log)
        self.assertEqual(len(lines), 2, log[-4000:])

    def test_a_head_in_the_files_of_a_tied_model_is_ignored(self):
        model = make(self.home / "model", "llama")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        runs = [dict(model=str(model)), dict(model=str(bundle_of(model)))]
        runs.append(dict(model=str(model), quantization="unweight"))
        log = self.hold_equal(runs, enforce_eager=True)
        self.assertEqual(log.count("unweight: 9 layers packed"), 2, log[-4000:])

    def test_weights_of_a_running_engine_are_replaced(self):
        import safetensors.torch
        import torch

        model = make(self.home / "model", "llama")
        tensors = safetensors.torch.load_file(model / "model.safetensors")
        random, others = torch.Generator().manual_seed(7), {}
        for name, tensor in tensors.items():
            others[name] = torch.randn(tensor.shape, generator=random).mul(0.05).bfloat16()
            if tensor.dim() == 2:
                # More weights are outside of the window than before.
                others[name].view(-1)[::300] = 2.0**-60
        other, wide = self.home / "other" / "model", self.home / "wide" / "model"
        for path in (other, wide):
            shutil.copytree(model, path)
        safetensors.torch.save_file(others, other / "model.safetensors", metadata={"format": "pt"})
        # Too many zeros for the packed encoding.
        others["model.layers.1.self_attn.o_proj.weight"].view(-1)[::50] = 0
        safetensors.torch.save_file(others, wide / "model.safetensors", metadata={"format": "pt"})
        bundle = str(bundle_of(model))
        for path, more in ((other, [dict(model=bundle, reload=str(bundle_of(other)))]), (wide, [])):
            runs = [dict(model=str(path)), dict(model=str(model), quantization="unweight", exchange=str(path)), *more]
            log = self.hold_equal(runs, enforce_eager=True)
            said = "the new weight of model.layers.1.self_attn.o_proj cannot be packed and stays in BF16"
            self.assertEqual(said in log, path == wide, log[-4000:])
        (first,), _ = engines([dict(model=str(model), enforce_eager=True)])
        (second,), _ = engines([dict(model=str(other), enforce_eager=True)])
        self.assertNotEqual(first, second)

    def test_new_weights_arrive_in_parts(self):
        """One or a few tensors per call, after calls that are errors."""
        import torch

        def others(_, tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
            return torch.randn(tensor.shape, generator=random).mul(0.05).bfloat16()

        # The second has biases, and an embedding with padding that stays BF16.
        for kind in ("llama", "qwen2, tied"):
            with self.subTest(kind):
                self.home = pathlib.Path(tempfile.mkdtemp(dir=self.home))
                model, other = make_two(self.home, kind, others)
                packed = dict(model=str(model), quantization="unweight", exchange=str(other))
                runs = [dict(model=str(other)), *(dict(packed, pieces=size) for size in (1, 4))]
                self.hold_equal(runs, enforce_eager=True)

    def test_some_weights_of_a_running_engine_are_replaced(self):
        """By `update_sparse_`, and by vLLM's sparse weight transfer."""
        import torch

        def others(name: str, tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
            if kind == "llama" or "embed_tokens" not in name:
                at = torch.randperm(tensor.numel(), generator=random)[: tensor.numel() // 20 + 1]
                tensor.view(-1)[at] = torch.randn(len(at), generator=random).mul(0.2).bfloat16()
            return tensor

        # The second has biases, and an embedding with padding that stays BF16, which cannot change.
        for kind in ("llama", "qwen2, tied"):
            with self.subTest(kind):
                self.home = pathlib.Path(tempfile.mkdtemp(dir=self.home))
                model, other = make_two(self.home, kind, others)
                packed = dict(model=str(model), quantization="unweight", sparse=[str(model), str(other)])
                runs = [dict(model=str(other)), dict(packed)]
                # vLLM 0.24 has none.
                if importlib.util.find_spec("vllm.distributed.weight_transfer.sparse_nccl_engine") is not None:
                    runs.append(dict(packed, transfers=True))
                self.hold_equal(runs, enforce_eager=True)
        (first,), _ = engines([dict(model=str(model), enforce_eager=True)])
        (second,), _ = engines([dict(model=str(other), enforce_eager=True)])
        self.assertNotEqual(first, second)

    def test_sparse_updates_that_would_miss_copies_are_refused(self):
        (refused,), _ = engines([dict(sparse_refusals=True)])
        self.assertIn("attention keeps copies of 'kv_b_proj.weight'", refused["kv_b_proj"])
        self.assertIn("attention keeps copies of 'plain.kv_b_proj.weight'", refused["kv_b_proj, not packed"])
        self.assertIn("--tensor-parallel-size", refused["q_proj"])
        self.assertIn("vLLM's CPU kernels may use a copy", refused["plain"])
        self.assertIn("is an arena", refused["arena"])
        self.assertIn("is an arena", refused["arena below adapters"])
        self.assertEqual(refused["norm"], "")

    def test_new_weights_of_a_compiled_model(self):
        """Without CUDA graphs: as packed ones they are used, as BF16 ones they are refused."""
        import safetensors.torch
        import torch

        model = make(self.home / "model", "llama")
        other, wide = self.home / "other" / "model", self.home / "wide" / "model"
        tensors, random = safetensors.torch.load_file(model / "model.safetensors"), torch.Generator().manual_seed(7)
        others = {name: torch.randn(one.shape, generator=random).mul(0.05).bfloat16() for name, one in tensors.items()}
        for path in (other, wide):
            shutil.copytree(model, path)
            safetensors.torch.save_file(others, path / "model.safetensors", metadata={"format": "pt"})
            # For the second: too many zeros for the packed encoding.
            others["model.layers.1.self_attn.o_proj.weight"].view(-1)[::50] = 0
        packed = dict(model=str(model), quantization="unweight")
        runs = [dict(model=str(other)), dict(packed, exchange=str(other))]
        log = self.hold_equal(runs, enforce_eager=False)
        self.assertIn("CompilationMode.DYNAMO_TRACE_ONCE", log)
        (said,), _ = engines([dict(packed, exchange=str(wide), enforce_eager=False, refused=True)])
        self.assertIn("the new weight of model.layers.1.self_attn.o_proj cannot be packed", str(said))

    def test_experts_of_a_running_engine_are_not_replaced(self):
        model = make(self.home / "model", "qwen3 moe")
        bundle, more = bundle_of(model), dict(refused=True, enforce_eager=True)
        runs = [dict(model=str(bundle), **one, **more) for one in ({"exchange": str(model)}, {"reload": str(bundle)})]
        for answer in engines(runs)[0]:
            self.assertIn("packed experts of a running engine cannot be replaced (reload_weights); start", str(answer))

    def test_graphs_are_compiled(self):
        model = make(self.home / "model", "llama")
        self.hold_equal([dict(model=str(model)), dict(model=str(bundle_of(model)))], enforce_eager=False)

    def test_adapters_work_with_packed_weights(self):
        model = make(self.home / "model", "llama")
        bundle, adapter_path = bundle_of(model), str(adapter(self.home / "adapter"))
        runs = [dict(model=str(model), adapter=adapter_path), dict(model=str(bundle), adapter=adapter_path)]
        runs.append(dict(model=str(model), quantization="unweight", adapter=adapter_path))
        log = self.hold_equal(runs, enforce_eager=True)
        self.assertEqual(log.count("unweight: 9 layers packed"), 2, log[-4000:])
        # The adapter changes the output, so no engine ignores it.
        (without,), _ = engines([dict(model=str(model), enforce_eager=True)])
        (with_adapter,), _ = engines([dict(runs[0], enforce_eager=True)])
        self.assertNotEqual(without, with_adapter)

    def test_processes_share_a_model(self):
        for option, kind, adapted in SHARED:
            with self.subTest(option, kind=kind, adapted=adapted):
                self.home = pathlib.Path(tempfile.mkdtemp(dir=self.home))
                model = make(self.home / "model", kind)
                more = {"adapter": str(adapter(self.home / "adapter"))} if adapted else {}
                # An engine's worker processes live until the main process ends, so each engine gets its own.
                answers = []
                for path in (model, bundle_of(model)):
                    answer, log = engines([{"model": str(path), "enforce_eager": True, option: 2, **more}])
                    answers += answer
                    self.assertEqual("layers packed" in log, path != model)
                if option == "pipeline_parallel_size":
                    # Each stage reads its own layers; together they read the bundle once.
                    read = [tuple(map(int, pair)) for pair in re.findall(READ, log)]
                    (whole,) = {stored for _, stored in read}
                    self.assertEqual((len(read), sum(part for part, _ in read)), (2, whole))
                    self.assertTrue(all(part < whole * 2 / 3 for part, _ in read), read)
                elif kind == "llama, wide":
                    # Each process reads half of the linear layers, by rows or columns, and all of the rest.
                    read = [tuple(map(int, pair)) for pair in re.findall(READ, log)]
                    self.assertEqual(len(read), 2)
                    self.assertTrue(all(part < whole * 0.6 for part, whole in read), read)
                self.assertEqual(answers[0], answers[1])

    def test_experts_of_other_processes_are_skipped(self):
        import safetensors.torch
        import torch
        import unweight

        model = make(self.home / "model", "qwen3 moe")
        tensors = safetensors.torch.load_file(model / "model.safetensors")

        def digests(layer: int, expert: int) -> list[str]:
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            gate, up, down = (tensors[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            return [digest(torch.cat([gate, up])), digest(down)]

        for options in (dict(model=str(model), quantization="unweight"), dict(model=str(bundle_of(model)))):
            # Experts arrive in order: those of rank 0 before the other's, those of rank 1 after them.
            for rank in (0, 1):
                with self.subTest(rank=rank, **options):
                    [layers], log = engines([dict(options, rank=rank)])
                    self.assertEqual(len(layers), SMALL["num_hidden_layers"])
                    for layer, (gate_up, down) in enumerate(layers):
                        expected = [digests(layer, expert) for expert in (2 * rank, 2 * rank + 1)]
                        self.assertEqual([list(pair) for pair in zip(gate_up, down)], expected)
                    if "quantization" not in options:
                        # Experts of the other process are not read.
                        others = re.compile(rf"\.experts\.[{2 - 2 * rank}{3 - 2 * rank}]\.")
                        infos = unweight.Bundle(options["model"]).tensors()
                        own = sum(info.stored_bytes for info in infos if not others.search(info.name))
                        [(read, whole)] = re.findall(READ, log)
                        self.assertEqual((int(read), int(whole)), (own, sum(info.stored_bytes for info in infos)))

    def test_a_bundle_of_the_hub(self):
        """vLLM gets only the name of a bundle in the hub's cache, laid out as the hub's client does."""
        model = make(self.home / "model", "llama", max_shard_size="400KB")
        bundle = bundle_of(model)
        cache, revision = self.home / "hub", "0" * 40
        repository = cache / "models--somebody--bundle"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(revision)
        shutil.copytree(bundle, repository / "snapshots" / revision)
        os.environ["HF_HUB_CACHE"] = str(cache)
        self.addCleanup(os.environ.pop, "HF_HUB_CACHE")
        log = self.hold_equal([dict(model=str(model)), dict(model="somebody/bundle")], enforce_eager=True)
        self.assertIn("10 layers packed", log)

    def test_unsupported_options_are_refused_by_name(self):
        bundle = bundle_of(make(self.home / "model", "llama"))
        experts = bundle_of(make(self.home / "experts" / "model", "qwen3 moe"))
        broken, partial = self.home / "broken", self.home / "partial"
        shutil.copytree(bundle, broken)
        shard = broken / "model.safetensors"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        shutil.copytree(bundle, partial)
        (partial / "unweight.json").unlink()
        # Another bundle of the same model. Shapes are equal, so only the digests differ.
        other, mixed = bundle_of(self.home / "model", "distribution"), self.home / "mixed"
        shutil.copytree(bundle, mixed)
        shutil.copy(other / "config.json", mixed / "config.json")
        expected = {
            "float16 is not supported for quantization method unweight": dict(model=str(bundle), dtype="float16"),
            "packed weights cannot be offloaded": dict(model=str(bundle), cpu_offload_gb=1),
            "cannot be loaded by --load-format dummy": dict(model=str(bundle), load_format="dummy"),
            "the weights of a part of the model of a running engine cannot be replaced": dict(
                model=str(bundle), exchange_inner=True
            ),
            "weights are missing from the model's files: model.layers.0.self_attn.v_proj.weight": dict(
                model=str(bundle), exchange=str(without(self.home / "model", self.home / "part", VALUE))
            ),
            "vLLM's CPU backend has no expert parallelism": dict(
                model=str(experts), configure=True, tensor_parallel_size=2, enable_expert_parallel=True
            ),
            "the file is damaged": dict(model=str(broken)),
            "no unweight.json; fetch the whole bundle": dict(model=str(partial)),
            "mixed/config.json: it belongs to another bundle": dict(model=str(mixed)),
            "the configuration of the model belongs to another": dict(model=str(bundle), hf_config_path=str(other)),
        }
        answers, log = engines([{**run, "refused": True, "enforce_eager": True} for run in expected.values()])
        for says, answer in zip(expected, answers):
            self.assertIn(says, answer, log[-2000:])

    def test_missing_weights_are_refused_by_name(self):
        llama, moe = make(self.home / "llama", "llama"), make(self.home / "moe", "qwen3 moe")
        norm, down = "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.down_proj.weight"
        bias = "model.layers.1.self_attn.k_proj.bias"
        cases = [(llama, name, False) for name in (norm, "model.layers.0.self_attn.k_proj.weight", down)]
        cases += [(llama, "lm_head.weight", False), (llama, "model.embed_tokens.weight", False)]
        cases += [(llama, norm, True), (llama, down, True)]
        cases += [(make(self.home / "qwen2", "qwen2, tied"), bias, False)]
        cases += [(moe, f"model.layers.1.mlp.experts.2.{one}_proj.weight", False) for one in ("down", "up")]
        runs = []
        for index, (model, name, is_bundle) in enumerate(cases):
            path = without(model, self.home / str(index) / "model", name)
            runs.append(dict(model=str(bundle_of(path) if is_bundle else path)))
            if not is_bundle:
                runs[-1]["quantization"] = "unweight"
        answers, log = engines([{**run, "refused": True, "enforce_eager": True} for run in runs])
        for (_, name, _), answer in zip(cases, answers):
            self.assertIn(f"weights are missing from the model's files: {name}; fetch", str(answer), log[-2000:])

    def test_experts_of_another_size_are_refused_with_both_sizes(self):
        runs = []
        for size in (64, 256):
            path = make(self.home / str(size), "mixtral, tied")
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps({**config, "intermediate_size": size}))
            runs.append(dict(model=str(path), quantization="unweight", refused=True, enforce_eager=True))
        (smaller, larger), _ = engines(runs)
        self.assertRegex(str(smaller), r"shape \[128, 256\] does not fit into .*w13_weight of shape \[4, 128, 256\]")
        self.assertIn("w13_weight (262144 of 524288 elements; see config.json's sizes)", str(larger))

    def test_files_next_to_and_below_the_model_are_ignored(self):
        import safetensors.torch
        import torch

        model = make(self.home / "model", "llama")
        tensors = safetensors.torch.load_file(model / "model.safetensors")
        random = torch.Generator().manual_seed(7)
        others = {name: torch.randn(one.shape, generator=random).mul(0.05).bfloat16() for name, one in tensors.items()}
        below, indexed, twice = (self.home / name / "model" for name in ("below", "indexed", "twice"))
        for path in (below, indexed, twice):
            shutil.copytree(model, path)
        (below / "checkpoint-500").mkdir()
        safetensors.torch.save_file(others, below / "checkpoint-500" / "model.safetensors")
        # Only the index tells which of these files belong to the model.
        names = sorted(tensors)
        parts = {"weights-1.safetensors": names[:5], "weights-2.safetensors": names[5:]}
        (indexed / "model.safetensors").unlink()
        for file, part in parts.items():
            safetensors.torch.save_file({name: tensors[name] for name in part}, indexed / file)
        safetensors.torch.save_file(others, indexed / "extra.safetensors")
        index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
        (indexed / "model.safetensors.index.json").write_text(json.dumps(index))
        runs = [dict(model=str(model)), dict(model=str(bundle_of(below))), dict(model=str(bundle_of(indexed)))]
        self.hold_equal(runs, enforce_eager=True)

        # Without an index, two tensors with one name are ambiguous.
        name = "model.layers.0.mlp.down_proj.weight"
        safetensors.torch.save_file({name: others[name]}, twice / "other.safetensors")
        stray = bundle_of(model)
        shutil.copy(twice / "other.safetensors", stray / "other.safetensors")
        both = str(bundle_of(twice))
        runs = [dict(model=str(twice), quantization="unweight"), dict(model=both)]
        runs += [dict(model=str(stray)), dict(model=both, load_format="pt")]
        answers, log = engines([{**run, "refused": True, "enforce_eager": True} for run in runs])
        for answer in answers[:2]:
            self.assertIn(f"two tensors arrived for {name}, but a packed weight accepts one", str(answer), log[-2000:])
        self.assertIn("other.safetensors is not a file of the bundle", str(answers[2]), log[-2000:])
        self.assertIn("Cannot find any model weights", str(answers[3]), log[-2000:])

    def test_mistral_files_come_first_as_in_vllm(self):
        import safetensors.torch
        import torch

        model, both = make(self.home / "model", "llama"), self.home / "both" / "model"
        tensors = safetensors.torch.load_file(model / "model.safetensors")
        random = torch.Generator().manual_seed(7)
        others = {name: torch.randn(one.shape, generator=random).mul(0.05).bfloat16() for name, one in tensors.items()}
        shutil.copytree(model, both)
        safetensors.torch.save_file(others, both / "consolidated.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
        (both / "model.safetensors.index.json").write_text(json.dumps(index))
        bundle = str(bundle_of(both))
        runs = [dict(model=str(both)), dict(model=bundle), dict(model=str(model))]
        # `load_format` selects the other files.
        runs.append(dict(model=bundle, load_format="safetensors"))
        said, _ = engines([dict(run, enforce_eager=True) for run in runs])
        self.assertEqual(said[0], said[1])
        self.assertEqual(said[2], said[3])
        self.assertNotEqual(said[0], said[2])

    def test_a_bundle_with_an_unmarked_config_is_served_with_a_warning(self):
        model = make(self.home / "model", "llama")
        bundle = bundle_of(model)
        shutil.copy(model / "config.json", bundle / "config.json")
        log = self.hold_equal([dict(model=str(model)), dict(model=str(bundle))], enforce_eager=True)
        served = "the weights are served in BF16, which is exact but not smaller;"
        self.assertIn(f"its config.json does not say so: {served}", log)
        # With another quantization, the log does not claim exactness. Not every CPU build of vLLM supports fp8, so the
        # engine may fail; others multiply by FP8 so slowly that a batch of the usual size takes minutes.
        config = json.loads((model / "config.json").read_text())
        other = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
        (bundle / "config.json").write_text(json.dumps({**config, **other}))
        small = dict(max_num_batched_tokens=128, max_num_seqs=4)
        _, log = engines([dict(model=str(bundle), enforce_eager=True, refused=True, **small)])
        self.assertIn("another quantization (fp8) loads the weights and may change them", log)
        self.assertNotIn("exact but not smaller", log)

    def test_the_bf16_rest_of_quantized_models_is_packed(self):
        import torch
        import unweight

        for method in QUANTIZED:
            with self.subTest(method):
                if "int8" not in method and not torch.cpu._is_avx512_supported():
                    self.skipTest("vLLM has products of 4-bit weights for CPUs with AVX-512 only")
                self.home = pathlib.Path(tempfile.mkdtemp(dir=self.home))
                model = quantize(make(self.home / "model", "llama"), method)
                bundle = bundle_of(model)
                for info in unweight.Bundle(bundle).tensors():
                    is_packed = info.dtype == "BF16" and len(info.shape) == 2 and "scale" not in info.name
                    self.assertEqual(info.encoding == "packed", is_packed, info)
                runs = [dict(model=str(model)), dict(model=str(model), quantization="unweight")]
                runs += [dict(model=str(bundle)), dict(model=str(bundle), quantization="unweight")]
                log = self.hold_equal(runs, enforce_eager=True)
                # qkv and o of each layer, the embedding and the head; gate_up and down are quantized.
                said = "unweight: 6 layers packed, .* 0 in BF16, 4 in another quantization"
                self.assertEqual(len(re.findall(said, log)), 2, log[-4000:])
                self.assertIn("pass --quantization unweight to pack the BF16 layers", log)

    def test_configs_of_quantized_models(self):
        program = (
            "import copy, json, pickle, sys\n"
            "from vllm.model_executor.layers.quantization import get_quantization_config\n"
            "import unweight.vllm\n"
            "unweight.vllm.register()\n"
            "ours = get_quantization_config('unweight')\n"
            "said = []\n"
            "for config in json.loads(sys.argv[1]):\n"
            "    assert ours.override_quantization_method(config, None) is None\n"
            "    assert ours.override_quantization_method(config, 'unweight') == 'unweight'\n"
            "    try:\n"
            "        made = ours.from_config(config)\n"
            "    except ValueError as error:\n"
            "        said.append(str(error))\n"
            "        continue\n"
            "    for copied in (made, pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):\n"
            "        assert type(copied) is type(made) and vars(copied).keys() == vars(made).keys()\n"
            "        assert [str(one) for one in copied.get_supported_act_dtypes()] == ['torch.bfloat16']\n"
            "    said.append(f'{type(made).__name__} {made.get_name()} {type(made).__mro__[2].__name__}')\n"
            "print('SAID', json.dumps(said))\n"
        )
        nvfp4 = dict(quant_algo="NVFP4", group_size=16, exclude_modules=["lm_head"], kv_cache_quant_algo=None)
        expected = {
            "UnweightCompressedTensorsConfig compressed-tensors CompressedTensorsConfig": dict(
                quant_method="compressed-tensors", format="pack-quantized", config_groups={}, ignore=["lm_head"]
            ),
            "UnweightFp8Config fp8 Fp8Config": dict(quant_method="fp8", activation_scheme="dynamic"),
            "UnweightModelOptFp8Config modelopt ModelOptFp8Config": dict(
                quant_method="modelopt", quant_algo="FP8", ignore=["lm_head"]
            ),
            "UnweightModelOptNvFp4Config modelopt_fp4 ModelOptNvFp4Config": dict(
                quant_method="modelopt", quantization=nvfp4
            ),
            "unweight: the model is quantized by bitsandbytes, and --quantization unweight packs the BF16 rest only of "
            "awq, compressed-tensors, fp8, gptq, modelopt, modelopt_fp4; omit the option": dict(
                quant_method="bitsandbytes"
            ),
        }
        command = [sys.executable, "-c", program, json.dumps(list(expected.values()))]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT})
        said = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
        self.assertEqual(len(said), 1, done.stderr[-4000:])
        self.assertEqual(json.loads(said[0].removeprefix("SAID ")), list(expected))

    def test_an_unsupported_vllm_runs_without_unweight(self):
        program = (
            "import vllm\n"
            "import vllm.model_executor.model_loader as loader\n"
            "from vllm.model_executor.model_loader.default_loader import DefaultModelLoader\n"
            "from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS\n"
            "import unweight.vllm\n"
            "before = dict(loader._LOAD_FORMAT_TO_MODEL_LOADER)\n"
            "stock, version = DefaultModelLoader.get_all_weights, vllm.__version__\n"
            "def refused():\n"
            "    unweight.vllm.register()\n"
            "    assert loader._LOAD_FORMAT_TO_MODEL_LOADER == before\n"
            "    assert 'unweight' not in QUANTIZATION_METHODS\n"
            "vllm.__version__ = '0.27.1'\n"
            "refused()\n"
            "vllm.__version__ = version\n"
            "DefaultModelLoader.get_all_weights = lambda self, model: iter(())\n"
            "refused()\n"
            "DefaultModelLoader.get_all_weights = stock\n"
            "unweight.vllm.register()\n"
            "assert loader._LOAD_FORMAT_TO_MODEL_LOADER['auto'] is not before['auto']\n"
            "assert 'unweight' in QUANTIZATION_METHODS\n"
        )
        # Disables plugins, because vLLM would load this package before the program does.
        environment = {**os.environ, **ENVIRONMENT, "VLLM_PLUGINS": ""}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr[-4000:])
        warnings = re.findall("unweight does not support this vLLM, so [^:]*: (.*)", done.stdout + done.stderr)
        self.assertEqual(len(warnings), 2, done.stderr[-4000:])
        self.assertIn("unweight supports vllm 0.24 to 0.26, but 0.27.1 is installed: pip install 'vllm>=", warnings[0])
        self.assertIn("its DefaultModelLoader.get_all_weights has the parameters (self, model)", warnings[1])

    def test_experts_on_a_device_without_kernels_stay_in_bf16_with_a_warning(self):
        program = (
            "import torch\n"
            "from unittest import mock\n"
            "from unweight.vllm import _methods\n"
            "_methods.why_not = lambda device: 'there are no kernels'\n"
            "_methods._begin_packing = lambda layer: True\n"
            "method = object.__new__(_methods.UnweightExpertsMethod)\n"
            "method._plain, method._loaders = 'bf16', {}\n"
            "layer = mock.Mock(w13_weight=torch.zeros(1), w2_weight=torch.zeros(1))\n"
            "method.process_weights_after_loading(layer)\n"
            "layer._replace_quant_method.assert_called_once_with('bf16')\n"
        )
        environment = {**os.environ, **ENVIRONMENT}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr[-4000:])
        self.assertIn("unweight: there are no kernels; weights stay in BF16", done.stdout + done.stderr)


class Serve(Case):
    def test_vllm_serve_needs_only_the_folder(self):
        model = make(self.home / "model", "llama")
        texts = [self.completion(path) for path in (model, bundle_of(model))]
        self.assertEqual(len(texts[0].split()), TOKENS)
        self.assertEqual(texts[0], texts[1])

    def completion(self, path: pathlib.Path) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        command = ["-m", "vllm.entrypoints.cli.main", "serve", str(path), "--port", str(port), "--host", "127.0.0.1"]
        log = open(self.home / f"{path.name}.log", "w+")
        self.addCleanup(log.close)
        server = subprocess.Popen(
            [sys.executable, *command, "--enforce-eager", "--max-model-len", "128", "--dtype", "bfloat16"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        )
        try:
            for _ in range(300):
                self.assertIsNone(server.poll(), pathlib.Path(log.name).read_text()[-4000:])
                try:
                    urllib.request.urlopen(url + "/health", timeout=1).close()
                    break
                except (urllib.error.URLError, OSError):
                    time.sleep(1)
            body = {"model": str(path), "prompt": "w5 w17 w40", "max_tokens": TOKENS, "temperature": 0}
            request = urllib.request.Request(
                url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["choices"][0]["text"]
        finally:
            server.terminate()
            server.wait(60)


def refused_updates(tensors: dict, inner) -> None:
    """Makes calls that are errors, and one without tensors; the model stays whole."""
    value = tensors[VALUE]
    whole = {name: tensor for name, tensor in tensors.items() if name != VALUE}
    # Some models of vLLM ignore unknown names.
    for refused, says in (({VALUE: value[:-1]}, ""), ({"model.layers.0.surplus": value}, None), (whole, VALUE)):
        try:
            inner.load_weights(refused.items())
        except Exception as error:
            assert says is None or says in str(error), error
        else:
            assert says is None, f"accepted: {list(refused)[:3]}"
        assert not any(one.is_meta for one in inner.parameters())
    before = {name: one.clone() for name, one in inner.named_parameters()}
    inner.load_weights([])
    assert all(one.equal(before[name]) for name, one in inner.named_parameters())


def replace(source: pathlib.Path, pieces: int, inner) -> None:
    """Replaces the weights of a running model by those of a file, in calls of so many tensors; 0 are all. Arenas stay
    where they are."""
    import safetensors.torch

    def addresses() -> dict[str, int]:
        return {name: one.data_ptr() for name, one in inner.named_parameters() if name.endswith("weight_packed")}

    before = addresses()
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    if pieces:
        refused_updates(tensors, inner)
        rest = list(tensors.items())
        while rest:
            inner.load_weights(rest[:pieces])
            rest = rest[pieces:]
    else:
        inner.load_weights(tensors.items())
    after = addresses()
    assert before and all(after[name] == before[name] for name in after), (before, after)


# vLLM's layers of several tensors.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def replace_elements(before: pathlib.Path, after: pathlib.Path, transfers: bool, inner) -> None:
    """Replaces the elements of a running model that differ between two files. Errors change nothing, and arenas stay
    where they are."""
    import safetensors.torch
    import torch
    import unweight

    old, new = (safetensors.torch.load_file(path / "model.safetensors") for path in (before, after))
    updates: dict[str, list] = {}
    for name in new:
        fused, first = name, 0
        for made, parts in FUSED.items():
            for part, others in ((part, parts[:at]) for at, part in enumerate(parts) if f".{part}." in name):
                fused = name.replace(part, made)
                first = sum(old[name.replace(part, other)].numel() for other in others)
        differs = old[name].view(-1).view(torch.int16) != new[name].view(-1).view(torch.int16)
        at = differs.nonzero().view(-1)
        if len(at):
            updates.setdefault(fused, []).append((at + first, new[name].view(-1)[at]))
    whole = {name: tuple(map(torch.cat, zip(*parts))) for name, parts in updates.items()}
    memory = {name: one.data_ptr() for name, one in inner.named_parameters()}
    kept = {name: one.clone() for name, one in inner.named_parameters()}
    name = "model.layers.1.mlp.down_proj.weight"
    at, values = whole[name]
    unpacked = "model.embed_tokens.weight"
    is_unpacked = unpacked in memory
    more = [({unpacked: (at, values)}, NotImplementedError)] * is_unpacked
    for refused, error in (
        *more,
        ({name: (at + old[name].numel(), values)}, IndexError),
        ({name: (at, values.float())}, ValueError),
        ({"model.layers.1.mlp.down_proj.weight_packed": (at, values)}, KeyError),
        ({"model.layers.1.mlp.up_proj.weight": (at, values)}, KeyError),
        # Too many zeros for the packed encoding.
        ({name: (torch.arange(old[name].numel()), torch.zeros(old[name].numel(), dtype=torch.bfloat16))}, ValueError),
    ):
        try:
            unweight.update_sparse_(inner, refused)
        except error:
            assert all(one.equal(kept[name]) for name, one in inner.named_parameters())
        else:
            raise AssertionError(f"accepted: {list(refused)}")
    if transfers:
        from vllm.distributed.weight_transfer.sparse_nccl_engine import (
            SparseNCCLWeightTransferEngine,
            SparseWeightPatch,
        )

        # Without the group of processes that receives patches, which needs GPUs.
        engine = object.__new__(SparseNCCLWeightTransferEngine)
        engine.model = inner
        for name, (at, values) in whole.items():
            engine._apply_patch(SparseWeightPatch(name, at.int(), values))
        name = next(name for name in memory if name.endswith("weight_packed"))
        try:
            engine._apply_patch(SparseWeightPatch(name, torch.tensor([0]).int(), torch.tensor([1]).byte()))
        except KeyError as error:
            assert "is an arena" in str(error)
        else:
            raise AssertionError(f"accepted: {name}")
    else:
        assert unweight.update_sparse_(inner, whole)
    assert memory == {name: one.data_ptr() for name, one in inner.named_parameters()}


def sparse_refusals() -> dict[str, str]:
    """Returns the messages with which sparse updates of layers are refused, as if two processes shared the model."""
    from unittest import mock

    import torch
    import unweight
    from torch import nn
    from unweight.ops import _pack
    from unweight.vllm import _sparse
    from unweight.vllm._account import Arrivals, arrivals_of
    from unweight.vllm._methods import UnweightMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    module = nn.ModuleDict({name: nn.Module() for name in ("kv_b_proj", "q_proj", "plain", "norm", "adapters")})
    for name in ("kv_b_proj", "q_proj"):
        layer = module[name]
        layer.quant_method, layer.unweight_packed = UnweightMethod(), _pack(torch.randn(64, 64).bfloat16())
        layer.weight_packed = nn.Parameter(layer.unweight_packed.arena, requires_grad=False)
        arrivals_of[layer] = Arrivals(f"model.layers.0.self_attn.{name}", {})
    module["adapters"].base_layer = module["q_proj"]
    module["plain"].kv_b_proj = nn.Module()
    for layer in (module["plain"], module["plain"].kv_b_proj):
        layer.quant_method = UnquantizedLinearMethod()
    for layer in (module["plain"], module["plain"].kv_b_proj, module["norm"]):
        layer.weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16), requires_grad=False)
    at, values, made = torch.tensor([1]), torch.tensor([2.0]).bfloat16(), {}
    names = {name: f"{name}.weight" for name in ("kv_b_proj", "q_proj", "plain", "norm")}
    names |= {"arena": "q_proj.weight_packed", "arena below adapters": "adapters.base_layer.weight_packed"}
    names["kv_b_proj, not packed"] = "plain.kv_b_proj.weight"
    with mock.patch.object(_sparse, "get_tensor_model_parallel_world_size", return_value=2):
        for what, name in names.items():
            try:
                made[what] = "" if unweight.update_sparse_(module, {name: (at, values)}) else "false"
            except (KeyError, NotImplementedError) as error:
                made[what] = str(error)
    return made


def answers(
    model: str,
    sparse: Optional[list[str]] = None,
    transfers: bool = False,
    reload: Optional[str] = None,
    exchange: Optional[str] = None,
    pieces: int = 0,
    exchange_inner: bool = False,
    adapter: Optional[str] = None,
    **options: object,
) -> list[dict]:
    """Returns the greedy tokens and logprobs of an engine for a few prompts."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options = {"dtype": "bfloat16", **options}
    if adapter is not None:
        options = {"enable_lora": True, "max_lora_rank": RANK, **options}
    llm = LLM(model=model, skip_tokenizer_init=True, max_model_len=128, seed=0, **options)
    if reload is not None:
        llm.collective_rpc("reload_weights", kwargs=dict(weights_path=reload))
    if exchange is not None:
        llm.apply_model(functools.partial(replace, pathlib.Path(exchange), pieces))
    if sparse is not None:
        llm.apply_model(functools.partial(replace_elements, *map(pathlib.Path, sparse), transfers))
    if exchange_inner:
        llm.apply_model(lambda outer: outer.model.load_weights(iter(())))
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 500, (length,), generator=random).tolist() for length in (5, 17, 40)]
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, detokenize=False, ignore_eos=True)
    lora = None if adapter is None else LoRARequest("adapter", 1, adapter)
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = [one.outputs[0] for one in llm.generate(requests, sampling, lora_request=lora)]
    return [
        {
            "tokens": list(one.token_ids),
            "logprobs": [step[token].logprob for step, token in zip(one.logprobs, one.token_ids)],
        }
        for one in outputs
    ]


def experts_of_one_of_two(rank: int, **options: object) -> list[list[list[str]]]:
    """Loads a mixture as rank `rank` of two, and returns, per layer, the digests of its experts' gate-up and down.

    vLLM has no expert parallelism on the CPU, so its configuration is patched during loading; nothing is multiplied.
    """
    import dataclasses
    from unittest import mock

    from unweight.ops import unpack_experts
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader import get_model

    alone = FusedMoEParallelConfig.make

    def of_two(*args: object, **more: object) -> FusedMoEParallelConfig:
        return dataclasses.replace(alone(*args, **more), ep_size=2, ep_rank=rank, use_ep=True)

    config = EngineArgs(dtype="bfloat16", skip_tokenizer_init=True, max_model_len=128, **options)
    config = config.create_engine_config()
    with tempfile.TemporaryDirectory() as home, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{home}/one", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with mock.patch.object(FusedMoEParallelConfig, "make", of_two):
            model = get_model(vllm_config=config)
    layers = []
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            # The stand-ins for experts of other processes have been removed.
            assert not hasattr(layer, "w13_weight") and not hasattr(layer, "w2_weight")
            weights = unpack_experts(layer.w13_weight_packed, layer.w2_weight_packed, layer.unweight_packed.experts)
            layers.append([[digest(one) for one in experts] for experts in weights])
    return layers


def digest(tensor: object) -> str:
    """Returns the SHA-256 of a tensor's bits."""
    import hashlib

    import torch

    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()


def configured(**options: object) -> None:
    """Builds an engine's configuration and runs the quantization's checks, without starting processes."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(dtype="bfloat16", **options).create_engine_config()
    with set_current_vllm_config(config):
        config.quant_config.get_quant_method(torch.nn.Linear(64, 64), "layer")


def main(runs: list[dict]) -> None:
    import gc

    from vllm.distributed import cleanup_dist_env_and_memory

    results: list[object] = []
    for run in runs:
        if run.pop("sparse_refusals", False):
            results.append(sparse_refusals())
        elif run.pop("refused", False):
            try:
                results.append((configured if run.pop("configure", False) else answers)(**run))
            except Exception as error:
                causes = []
                while error is not None:
                    causes.append(str(error))
                    error = error.__cause__ or error.__context__
                results.append("\n".join(causes))
        else:
            results.append((experts_of_one_of_two if "rank" in run else answers)(**run))
        gc.collect()
        cleanup_dist_env_and_memory()
    print("ANSWERS " + json.dumps(results), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        main(json.loads(sys.argv[1]))
    else:
        unittest.main()

"""Compares models in transformers, loaded from bundles or packed while loading, with BF16. Needs transformers.

Run as a program under torchrun, it is one process of tensor parallelism.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
import unweight
import unweight.transformers
from models import GLM, MOE, PHI, of_transformers, zero_experts
from processes import running
from transformers import AutoModelForCausalLM
from unweight import _transformers
from unweight.ops import Experts, Linear
from unweight.transformers import UnweightConfig

# transformers 4 has another loader.
IS_4 = transformers.__version__.startswith("4.")
# Packed modules of a mixture with 2 layers: `Experts` of gates and ups, and of downs. In transformers 4, each of the 3
# matrices of 4 experts is a linear layer.
EXPERTS = 24 if IS_4 else 4
# Configuration class, options, and the number of packed modules.
KINDS = {
    "llama": ("LlamaConfig", dict(tie_word_embeddings=False), 15),
    "llama, tied": ("LlamaConfig", dict(tie_word_embeddings=True), 14),
    "qwen2": ("Qwen2Config", dict(tie_word_embeddings=False), 15),
    "qwen3": ("Qwen3Config", dict(tie_word_embeddings=False), 15),
    "mistral": ("MistralConfig", dict(tie_word_embeddings=False), 15),
    "gemma3": ("Gemma3TextConfig", dict(tie_word_embeddings=True), 14),
    "odd": ("LlamaConfig", dict(tie_word_embeddings=False, intermediate_size=500), 9),
    "qwen3 moe": ("Qwen3MoeConfig", MOE, 9 + EXPERTS),
    "mixtral": ("MixtralConfig", dict(tie_word_embeddings=False, num_local_experts=4), 9 + EXPERTS),
    "glm4 moe": ("Glm4MoeConfig", GLM, 9 + 6 + EXPERTS // 2),
    "phi moe": ("PhimoeConfig", PHI, 9 + EXPERTS),
    # Downs have 96 columns, not a multiple of 64. Gates and ups are packed together, but each alone has 96 rows.
    "qwen3 moe, odd": ("Qwen3MoeConfig", {**MOE, "moe_intermediate_size": 96}, 9 if IS_4 else 9 + 2),
}
# Models whose tensors have other shapes than config.json says: tensors to drop, or to add where the name starts with a
# plus sign, and keys of config.json.
SHAPES = {
    "mixtral": [
        (["experts.0."], {}),
        (["experts.1."], {}),
        (["experts.3."], {}),
        (["experts.2.w2."], {}),
        (["+experts.4."], {}),
        ([], dict(num_local_experts=2)),
        ([], dict(num_local_experts=8)),
        ([], dict(num_attention_heads=8)),
        ([], dict(num_key_value_heads=1)),
        ([], dict(intermediate_size=256)),
        ([], dict(vocab_size=1024)),
    ],
    "qwen3 moe": [
        (["experts.0."], {}),
        (["experts.2."], {}),
        (["experts.3."], {}),
        (["+experts.9."], {}),
        ([], dict(num_experts=2)),
        ([], dict(num_experts=8)),
        ([], dict(num_attention_heads=8)),
        ([], dict(moe_intermediate_size=64)),
    ],
    "llama": [
        ([], dict(num_attention_heads=8)),
        ([], dict(num_key_value_heads=4)),
        ([], dict(intermediate_size=256)),
        ([], dict(intermediate_size=1024)),
        ([], dict(vocab_size=1024)),
        ([], dict(hidden_size=128)),
    ],
}
TOKENS = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(3))


def make(home: pathlib.Path, kind: str, **more: object) -> pathlib.Path:
    """Writes a model directory with random weights."""
    config, options, _ = KINDS[kind]
    return of_transformers(home, config, 0.02, options, **more)


def changed(model: pathlib.Path, home: pathlib.Path, drops: list[str], config: dict[str, object]) -> pathlib.Path:
    """Copies a model without tensors of layer 1 with parts of names, or with more experts, and with another config."""
    import safetensors.torch

    shutil.copytree(model, home)
    tensors = safetensors.torch.load_file(home / "model.safetensors")
    for part in drops:
        matching = [name for name in tensors if ".layers.1." in name and part in name]
        if part.startswith("+"):
            expert = {name: tensor for name, tensor in tensors.items() if ".layers.1." in name and "experts.0." in name}
            more = {name.replace("experts.0.", part[1:]): tensor.clone() for name, tensor in expert.items()}
            assert more
            tensors |= more
        else:
            assert matching
            tensors = {name: tensor for name, tensor in tensors.items() if name not in matching}
    safetensors.torch.save_file(tensors, home / "model.safetensors", metadata={"format": "pt"})
    transformers.AutoConfig.from_pretrained(home, **config).save_pretrained(home)
    return home


def original(path: pathlib.Path, **more: object) -> torch.nn.Module:
    """Loads a model without this package's quantizer, in BF16, which is not the default of transformers 4."""
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto", **more)


def packed(model: torch.nn.Module) -> int:
    modules = list(model.modules())
    linears = sum(isinstance(module, Linear) and module.is_packed for module in modules)
    return linears + sum(isinstance(module, Experts) for module in modules)


@torch.inference_mode()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


class Models(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.home = pathlib.Path(folder.name)

    def bundle(self, kind="llama", profile="packed", **more):
        make(self.home / "model", kind, **more)
        unweight.compress(self.home / "model", self.home / "bundle", profile=profile)
        return self.home / "model", self.home / "bundle"

    def test_bundles_give_the_logits_of_the_model(self):
        for kind, (_, _, layers) in KINDS.items():
            with self.subTest(kind):
                self.home = pathlib.Path(tempfile.mkdtemp(dir=self.home))
                model, bundle = self.bundle(kind)
                expected = original(model)
                got, info = AutoModelForCausalLM.from_pretrained(bundle, output_loading_info=True)
                self.assertFalse({name: value for name, value in info.items() if value})
                self.assertTrue(torch.equal(logits(got), logits(expected)))
                self.assertEqual(packed(got), layers)
                self.assertEqual(got.dtype, torch.bfloat16)

    def test_every_profile_and_several_shards(self):
        for profile in ("distribution", "palette", "inference", "archive"):
            with self.subTest(profile):
                self.home = pathlib.Path(tempfile.mkdtemp(dir=self.home))
                model, bundle = self.bundle(profile=profile, max_shard_size="400KB")
                self.assertTrue((bundle / "model.safetensors.index.json").exists())
                expected, got = original(model), AutoModelForCausalLM.from_pretrained(bundle)
                self.assertTrue(torch.equal(logits(got), logits(expected)))
                self.assertEqual(packed(got), 15)

    def test_any_model_is_packed_when_it_is_loaded(self):
        model = make(self.home / "model", "llama")
        expected = original(model)
        got = AutoModelForCausalLM.from_pretrained(model, quantization_config=UnweightConfig())
        self.assertEqual(packed(got), 15)
        self.assertTrue(torch.equal(logits(got), logits(expected)))
        self.assertLess(got.get_memory_footprint(), expected.get_memory_footprint() * 0.85)

    def test_weights_that_a_parent_initializes_are_packed(self):
        sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
        image = dict(**sizes, image_size=32, patch_size=8)
        text = dict(**sizes, num_key_value_heads=2, head_dim=32, vocab_size=512)
        gemma = dict(text_config=text, vision_config=image, mm_tokens_per_image=4)
        gemma |= dict(image_token_index=500, boi_token_index=501, eoi_token_index=502)
        siglip = dict(text_config=dict(**sizes, vocab_size=512, projection_size=128), vision_config=image)
        mamba = dict(hidden_size=128, num_hidden_layers=2, vocab_size=512)
        pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(4)).bfloat16()
        for name, options, inputs, count in [
            ("Gemma3ForConditionalGeneration", gemma, {}, 28),
            ("SiglipModel", siglip, dict(pixel_values=pixels), 27),
            ("MambaForCausalLM", mamba, {}, 4),
        ]:
            with self.subTest(name), torch.no_grad():
                kind = getattr(transformers, name)
                torch.manual_seed(5)
                model = kind(kind.config_class(**options))
                for parameter in model.parameters():
                    if parameter.dim() == 2:
                        parameter.normal_(0, 0.02)
                model.to(torch.bfloat16).save_pretrained(self.home / name)
                plain = kind.from_pretrained(self.home / name, dtype="auto")
                loaded = kind.from_pretrained(self.home / name, dtype="auto", quantization_config=UnweightConfig())
                self.assertEqual(packed(loaded), count)
                for layer in loaded.modules():
                    self.assertFalse(isinstance(layer, Linear) and layer.is_packed and hasattr(layer, "weight"))
                wanted, outputs = (one(input_ids=TOKENS[:1], **inputs).to_tuple() for one in (plain, loaded))
                torch.testing.assert_close(outputs[0], wanted[0], rtol=0, atol=0)

    @unittest.skipIf(IS_4, "in transformers 4, experts are linear layers")
    def test_experts_are_packed_and_their_bf16_is_freed(self):
        model = make(self.home / "model", "mixtral")
        expected = original(model)
        got = AutoModelForCausalLM.from_pretrained(model, quantization_config=UnweightConfig())
        experts = got.model.layers[0].mlp.experts
        self.assertEqual({name for name, _ in experts.named_parameters()}, set())
        for expert in range(4):
            stock = expected.model.layers[0].mlp.experts.down_proj[expert]
            self.assertTrue(torch.equal(experts.down_proj.unpacked(expert), stock))
        self.assertLess(got.get_memory_footprint(), expected.get_memory_footprint() * 0.85)
        more = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
        self.assertTrue(torch.equal(expected.generate(TOKENS, **more), got.generate(TOKENS, **more)))
        for other, error in (("grouped_mm", AttributeError), ("batched_mm", TypeError)):
            with self.assertRaisesRegex(error, "Experts|experts are indexed by one .*implementation.'eager'."):
                got.set_experts_implementation(other)
                logits(got)

    @unittest.skipIf(IS_4, "transformers 4 has one implementation")
    def test_eager_experts_are_unpacked(self):
        for kind in ("mixtral", "qwen3 moe"):
            with self.subTest(kind):
                self.home = pathlib.Path(tempfile.mkdtemp(dir=self.home))
                model, bundle = self.bundle(kind)
                expected = logits(original(model, experts_implementation="eager"))
                if kind == "mixtral":
                    self.assertFalse(torch.equal(expected, logits(original(model))), "the sums have the same order")
                got = AutoModelForCausalLM.from_pretrained(bundle, experts_implementation="eager")
                self.assertEqual(packed(got), KINDS[kind][2])
                self.assertTrue(torch.equal(logits(got), expected))
                got = AutoModelForCausalLM.from_pretrained(bundle)
                self.assertTrue(torch.equal(logits(got), logits(original(model))))
                got.set_experts_implementation("eager")
                self.assertTrue(torch.equal(logits(got), expected))

    @unittest.skipIf(IS_4, "transformers 4 has one implementation")
    def test_another_implementation_of_experts_is_replaced_with_a_warning(self):
        model, bundle = self.bundle("mixtral")
        _transformers.logger.warning_once.cache_clear()
        with self.assertLogs("unweight.transformers", "WARNING") as logs:
            got = AutoModelForCausalLM.from_pretrained(bundle, experts_implementation="batched_mm")
        (line,) = logs.output
        self.assertIn("experts_implementation='batched_mm' does not support packed experts", line)
        self.assertTrue(torch.equal(logits(got), logits(original(model))))

    def test_experts_that_cannot_be_packed_stay_in_bf16(self):
        for kind in ("mixtral", "qwen3 moe"):
            with self.subTest(kind):
                self.home = pathlib.Path(tempfile.mkdtemp(dir=self.home))
                model = zero_experts(make(self.home / "model", kind))
                unweight.compress(model, self.home / "bundle", profile="packed")
                expected = original(model)
                for path, more in ((self.home / "bundle", {}), (model, dict(quantization_config=UnweightConfig()))):
                    with self.assertLogs("unweight.transformers", "WARNING") as logs:
                        got = AutoModelForCausalLM.from_pretrained(path, **more)
                    self.assertEqual(packed(got), 9)
                    self.assertTrue(torch.equal(logits(got), logits(expected)))
                    (line,) = [line for line in logs.output if "cannot be packed" in line]
                    more = EXPERTS - 3
                    self.assertRegex(
                        line, rf"layers\.0\..*\.experts.* and {more} more cannot be packed and stay in BF16"
                    )
                    self.assertIn("% of the elements lie outside the best window", line)

    @unittest.skipUnless(IS_4, "in transformers 5, the experts of a layer are one tensor")
    def test_experts_of_transformers_4_are_packed_as_linear_layers(self):
        model, bundle = self.bundle("mixtral")
        expected, got = original(model), AutoModelForCausalLM.from_pretrained(bundle)
        for expert, stock in zip(*(one.model.layers[0].block_sparse_moe.experts for one in (got, expected))):
            self.assertTrue(torch.equal(expert.w2.unpacked(), stock.w2.weight))
        self.assertLess(got.get_memory_footprint(), expected.get_memory_footprint() * 0.85)
        more = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
        self.assertTrue(torch.equal(expected.generate(TOKENS, **more), got.generate(TOKENS, **more)))

    def test_experts_in_another_layout_stay_in_bf16(self):
        config, options = "GptOssConfig", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=64)
        if IS_4:
            config, options = "GraniteMoeConfig", dict(tie_word_embeddings=False, num_local_experts=4)
        model = of_transformers(self.home / "model", config, 0.02, options)
        with self.assertLogs("unweight.transformers", "WARNING") as logs:
            got = AutoModelForCausalLM.from_pretrained(model, quantization_config=UnweightConfig())
        self.assertEqual(packed(got), 9)
        self.assertTrue(torch.equal(logits(got), logits(original(model))))
        (line,) = logs.output
        self.assertRegex(line, r"layers\.0.* cannot be packed .*: a layout of transformers .* that is not packed")

    def test_experts_that_would_be_packed_elsewhere_are_not_named(self):
        from unittest import mock

        model = make(self.home / "model", "mixtral")
        with mock.patch("unweight._transformers.why_not", return_value="no kernels"):
            with self.assertLogs("unweight.transformers", "WARNING") as logs:
                got = AutoModelForCausalLM.from_pretrained(model, quantization_config=UnweightConfig())
        self.assertEqual(packed(got), 0)
        self.assertFalse([line for line in logs.output if "layout" in line], logs.output)

    def test_what_the_model_has_in_float32_is_not_rounded(self):
        import safetensors.torch

        model = make(self.home / "model", "glm4 moe")
        file, name = self.home / "model" / "model.safetensors", "model.layers.1.mlp.gate.e_score_correction_bias"
        tensors = safetensors.torch.load_file(file)
        tensors[name] = torch.tensor([0.1, 0.2, 0.3, 0.4])
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
        unweight.compress(model, self.home / "bundle", profile="packed")
        expected, got = original(model), AutoModelForCausalLM.from_pretrained(self.home / "bundle")
        self.assertTrue(torch.equal(got.get_buffer(name), tensors[name]))
        self.assertTrue(torch.equal(logits(got), logits(expected)))

    def test_shards_in_any_order_and_in_threads(self):
        """The first shard has all weights, so that biases are loaded into packed layers."""
        from unittest import mock

        import safetensors.torch

        model = make(self.home / "model", "qwen2")
        tensors = safetensors.torch.load_file(model / "model.safetensors")
        places = {name: f"model-0000{1 + name.endswith('bias')}-of-00002.safetensors" for name in tensors}
        for file in set(places.values()):
            one = {name: tensor for name, tensor in tensors.items() if places[name] == file}
            safetensors.torch.save_file(one, model / file, metadata={"format": "pt"})
        (model / "model.safetensors").unlink()
        (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        unweight.compress(model, self.home / "bundle", profile="packed")
        expected = original(model)
        for parallel in ("0", "1"):
            with self.subTest(parallel), mock.patch.dict(os.environ, HF_ENABLE_PARALLEL_LOADING=parallel):
                got = AutoModelForCausalLM.from_pretrained(self.home / "bundle")
                self.assertEqual(packed(got), 15)
                self.assertTrue(torch.equal(logits(got), logits(expected)))

    def test_a_missing_weight_is_reported_and_not_packed(self):
        import safetensors.torch

        model, name = make(self.home / "model", "llama"), "model.layers.0.mlp.up_proj.weight"
        tensors = safetensors.torch.load_file(model / "model.safetensors")
        del tensors[name]
        safetensors.torch.save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        unweight.compress(model, self.home / "bundle", profile="packed")
        got, info = AutoModelForCausalLM.from_pretrained(self.home / "bundle", output_loading_info=True)
        self.assertEqual([*info["missing_keys"]], [name])
        self.assertEqual(packed(got), 14)

    def ways(self, model: pathlib.Path) -> list[tuple[pathlib.Path, dict[str, object]]]:
        """Returns the two ways to load a model packed: while loading, and from a bundle."""
        bundle = model.with_name(f"{model.name}-bundle")
        unweight.compress(model, bundle, profile="packed")
        return [(model, dict(quantization_config=UnweightConfig())), (bundle, {})]

    @unittest.skipIf(IS_4, "in transformers 4, each expert is a tensor, which may be missing")
    def test_another_shape_ends_as_in_bf16(self):
        for kind in SHAPES:
            stock = make(self.home / kind, kind)
            for number, (drops, config) in enumerate(SHAPES[kind]):
                with self.subTest(kind, drops=drops, config=config):
                    model = changed(stock, self.home / f"{kind}-{number}", drops, config)
                    expected = self.refused(model, {})
                    self.assertRegex(expected[1][0], r"ckpt: torch.Size\(.*\) vs model:\s?torch.Size\(")
                    for path, more in self.ways(model):
                        self.assertEqual(self.refused(path, more), expected)

    def refused(self, path: pathlib.Path, more: dict[str, object]) -> tuple[str, list[str]]:
        """Returns the error of a model that must not load, and what transformers reports of shapes."""
        logger = transformers.utils.logging.get_logger("transformers.modeling_utils")
        with self.assertLogs(logger, "WARNING") as logs, self.assertRaises(RuntimeError) as caught:
            AutoModelForCausalLM.from_pretrained(path, **more)
        report = "\n".join(logs.output).splitlines()
        # The other rows are those of stock tensors of the bundle.
        return str(caught.exception), sorted(row for row in report if "MISMATCH" in row and "ckpt:" in row)

    @unittest.skipIf(IS_4, "transformers 4 has its own comparison")
    def test_ignored_shapes_and_missing_weights_are_initialized(self):
        for kind, (drops, config) in (
            ("mixtral", SHAPES["mixtral"][0]),
            ("mixtral", (["experts.1.w2.weight"], {})),
            ("qwen2", ([], dict(num_key_value_heads=4))),
            ("qwen2", (["up_proj.weight", "q_proj.bias"], {})),
        ):
            with self.subTest(kind, drops=drops, config=config):
                self.home = pathlib.Path(tempfile.mkdtemp(dir=self.home))
                model = changed(make(self.home / "stock", kind), self.home / "model", drops, config)
                more = dict(ignore_mismatched_sizes=True, output_loading_info=True)
                expected, keys = AutoModelForCausalLM.from_pretrained(model, dtype="auto", **more)
                replaced = {*keys["missing_keys"], *(name for name, *_ in keys["mismatched_keys"])}
                self.assertTrue(replaced)
                for path, options in self.ways(model):
                    # Otherwise, uninitialized memory might have the right values by chance.
                    garbage = [torch.full((512, 512), torch.nan, dtype=torch.bfloat16) for _ in range(16)]
                    del garbage
                    got, found = AutoModelForCausalLM.from_pretrained(path, **more, **options)
                    for which in ("missing_keys", "mismatched_keys"):
                        self.assertEqual(set(found[which]), set(keys[which]))
                    for name, parameter in got.named_parameters():
                        stock = expected.get_parameter(name)
                        self.assertEqual(parameter.shape, stock.shape, name)
                        if name not in replaced:
                            self.assertTrue(torch.equal(parameter, stock), name)
                        elif name.endswith("bias"):
                            self.assertEqual(parameter.abs().max(), 0, name)
                        else:
                            self.assertAlmostEqual(parameter.float().std().item(), 0.02, delta=0.002, msg=name)
                    self.assertLessEqual(replaced, {name for name, _ in got.named_parameters()})
                    self.assertTrue(logits(got).isfinite().all())

    @unittest.skipUnless(IS_4, "the error of transformers 4")
    def test_weights_of_another_shape_are_not_packed(self):
        model, bundle = self.bundle()
        config = transformers.AutoConfig.from_pretrained(bundle, intermediate_size=448)
        with self.assertRaisesRegex(RuntimeError, "size mismatch for weight: .*256, 512.* current model .*256, 448"):
            AutoModelForCausalLM.from_pretrained(bundle, config=config)
        got = AutoModelForCausalLM.from_pretrained(bundle, config=config, ignore_mismatched_sizes=True)
        self.assertEqual(packed(got), 9)
        self.assertTrue(logits(got).isfinite().all())

    def test_tokens_equal_the_model_s_and_graphs_are_whole(self):
        model, bundle = self.bundle()
        expected, got = original(model), AutoModelForCausalLM.from_pretrained(bundle)
        more = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
        self.assertTrue(torch.equal(expected.generate(TOKENS, **more), got.generate(TOKENS, **more)))
        torch._dynamo.reset()
        compiled = torch.compile(got, fullgraph=True, backend="eager")
        self.assertTrue(torch.equal(logits(compiled), logits(expected)))

    def test_save_pretrained_says_what_to_do(self):
        _, bundle = self.bundle()
        got = AutoModelForCausalLM.from_pretrained(bundle)
        with self.assertLogs("unweight.transformers", "WARNING") as logs, self.assertRaises(ValueError):
            got.save_pretrained(self.home / "saved")
        self.assertIn("copy its directory", logs.output[0])
        self.assertFalse((self.home / "saved" / "model.safetensors").exists())

    def test_another_dtype_is_refused(self):
        _, bundle = self.bundle()
        with self.assertRaisesRegex(ValueError, "packs bfloat16 weights.*unweight decompress"):
            AutoModelForCausalLM.from_pretrained(bundle, dtype=torch.float32)

    def test_a_model_of_another_dtype_is_refused(self):
        model = make(self.home / "model", "llama")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
        for more in ({}, dict(dtype="auto")):
            with self.subTest(more), self.assertRaisesRegex(ValueError, "to be loaded as torch.float16; pass dtype="):
                AutoModelForCausalLM.from_pretrained(model, quantization_config=UnweightConfig(), **more)
        for dtype in (torch.bfloat16, "bfloat16"):
            got = AutoModelForCausalLM.from_pretrained(model, quantization_config=UnweightConfig(), dtype=dtype)
            self.assertEqual(packed(got), 15)

    def test_offloading_is_refused_by_name(self):
        model, bundle = self.bundle()
        layers = {f"model.layers.{index}": "cpu" for index in range(2)}
        rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
        with_gpu = {**dict.fromkeys(rest, 0), **layers}
        for source, more in ((bundle, {}), (model, dict(quantization_config=UnweightConfig()))):
            for name, device_map, message in (
                ("disk", {**rest, **layers, "model.layers.1": "disk"}, "offloads model.layers.1 on 'disk':"),
                ("cpu and a GPU", with_gpu, "offloads model.layers.0 on 'cpu', model.layers.1 on 'cpu':"),
                ("all of it", {"": "disk"}, "offloads the model on 'disk':"),
                ("many", {**dict.fromkeys(rest, "disk"), **layers}, "'disk' and 1 more: packed .*unweight decompress"),
            ):
                with self.subTest(name, bundle=source == bundle), self.assertRaisesRegex(ValueError, message):
                    AutoModelForCausalLM.from_pretrained(source, device_map=device_map, **more)
            # The offloading is known only after transformers has computed the device map.
            with self.subTest("auto"), self.assertRaisesRegex(ValueError, "offloads .* on 'disk'"):
                AutoModelForCausalLM.from_pretrained(source, device_map="auto", max_memory={"cpu": "1MB"}, **more)
            with self.subTest("cpu"):
                got = AutoModelForCausalLM.from_pretrained(source, device_map={**rest, **layers}, **more)
                self.assertEqual(packed(got), 15)

    @unittest.skipUnless(IS_4, "transformers 5 fails before it calls the quantizer")
    def test_several_devices_are_refused_in_transformers_4(self):
        _, bundle = self.bundle()
        # Names of one device, which accelerate takes for two.
        device_map = {"model": torch.device("cpu"), "lm_head": "cpu:0"}
        with self.assertRaisesRegex(ValueError, r"several devices \(cpu, cpu:0\).*; pass one, such as device_map="):
            AutoModelForCausalLM.from_pretrained(bundle, device_map=device_map)
        for device_map in ("cpu", "auto", {"": "cpu"}):
            with self.subTest(device_map):
                self.assertEqual(packed(AutoModelForCausalLM.from_pretrained(bundle, device_map=device_map)), 15)

    def test_auto_fits_packed_weights_into_memory(self):
        for kind in ("llama", "mixtral", "odd"):
            with self.subTest(kind):
                self.home = pathlib.Path(tempfile.mkdtemp(dir=self.home))
                model, bundle = self.bundle(kind)
                expected = original(model)
                room = int(AutoModelForCausalLM.from_pretrained(bundle).get_memory_footprint() * 1.04)
                self.assertLess(room, expected.get_memory_footprint())
                got = AutoModelForCausalLM.from_pretrained(bundle, device_map="auto", max_memory={"cpu": room})
                self.assertTrue(torch.equal(logits(got), logits(expected)))

    def test_a_shard_without_its_manifest_is_refused(self):
        _, bundle = self.bundle()
        (bundle / "unweight.json").unlink()
        with self.assertRaisesRegex(ValueError, "no unweight.json next to it; fetch the whole bundle"):
            AutoModelForCausalLM.from_pretrained(bundle)

    def test_damage_is_an_error(self):
        _, bundle = self.bundle()
        shard = bundle / "model.safetensors"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        with self.assertRaisesRegex(unweight.DamagedError, "the file is damaged: fetch or compress it again"):
            AutoModelForCausalLM.from_pretrained(bundle)

    def test_a_configuration_of_another_bundle_is_refused(self):
        model, bundle = self.bundle()
        # Another bundle of the same model. Shapes are equal, so only the digests differ.
        other = self.home / "other"
        unweight.compress(model, other, profile="distribution")
        config = transformers.AutoConfig.from_pretrained(other)
        with self.assertRaisesRegex(unweight.DamagedError, "the configuration of the model belongs to another bundle"):
            AutoModelForCausalLM.from_pretrained(bundle, config=config)
        # The refusal does not affect the next load.
        self.assertEqual(packed(AutoModelForCausalLM.from_pretrained(bundle)), 15)
        shutil.copy(other / "config.json", bundle / "config.json")
        with self.assertRaisesRegex(unweight.DamagedError, "config.json: it belongs to another bundle"):
            AutoModelForCausalLM.from_pretrained(bundle)

    def test_without_unweight_transformers_refuses(self):
        """The bundle's `config.json` makes stock transformers fail instead of returning random weights."""
        model, bundle = self.bundle()
        config = json.loads((model / "config.json").read_text())
        null = self.home / "null"
        # Some tools write the key with the value null, which means unset.
        (model / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
        unweight.compress(model, null, profile="packed")
        program = (
            "import sys, transformers\n"
            "for path in sys.argv[1:]:\n"
            "    try: transformers.AutoModelForCausalLM.from_pretrained(path)\n"
            "    except ValueError as error: assert 'unweight.json' in str(error), error\n"
            "    else: sys.exit(path + ' is loaded')\n"
        )
        done = subprocess.run([sys.executable, "-c", program, str(bundle), str(null)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        try:
            expected = original(model)
        except AttributeError:
            self.assertLess(tuple(map(int, transformers.__version__.split(".")[:2])), (5, 12))
            self.skipTest("this version of transformers reads no configuration with null")
        got = AutoModelForCausalLM.from_pretrained(null)
        self.assertEqual(packed(got), 15)
        self.assertTrue(torch.equal(logits(got), logits(expected)))

    def test_a_bundle_with_an_unmarked_config_is_loaded_with_a_warning(self):
        model, bundle = self.bundle()
        shutil.copy(model / "config.json", bundle / "config.json")
        expected = original(model)
        with self.assertLogs("unweight.transformers", "WARNING") as logs:
            got = original(bundle)
        self.assertIn("its weights are not packed", logs.output[0])
        self.assertEqual(packed(got), 0)
        self.assertTrue(torch.equal(logits(got), logits(expected)))
        with self.assertNoLogs("unweight.transformers", "WARNING"):
            got = AutoModelForCausalLM.from_pretrained(bundle, quantization_config=UnweightConfig())
        self.assertEqual(packed(got), 15)

    def test_a_failed_load_leaves_no_state(self):
        model, bundle = self.bundle()
        (self.home / "empty").mkdir()
        shutil.copy(bundle / "config.json", self.home / "empty")
        other = self.home / "other"
        unweight.compress(model, other, profile="distribution")
        shutil.copy(model / "config.json", other)
        with self.assertRaisesRegex(OSError, "no file named"):
            AutoModelForCausalLM.from_pretrained(self.home / "empty")
        with self.assertLogs("unweight.transformers", "WARNING") as logs:
            got = original(other)
        self.assertIn("its weights are not packed", logs.output[0])
        self.assertTrue(torch.equal(logits(got), logits(original(model))))

    def test_a_replaced_bundle_is_opened_again(self):
        home, models = self.home, {}
        self.addCleanup(os.chdir, os.getcwd())
        for name in ("here", "there"):
            self.home = home / name
            models[name], _ = self.bundle("llama" if name == "here" else "qwen2")
        os.chdir(home / "here")
        # Keeps the bundle open, as the traceback of a failed load does.
        held = _transformers._Shard(pathlib.Path("bundle/model.safetensors"), "cpu")
        os.chdir(home / "there")
        got, expected = AutoModelForCausalLM.from_pretrained("bundle"), original(models["there"])
        self.assertTrue(torch.equal(logits(got), logits(expected)))
        self.assertNotIn("model.layers.0.self_attn.q_proj.bias", held.keys())

    def test_other_versions_of_transformers_are_refused(self):
        for version in ("4.56.2", "5.2.0", "5.18.0", "6.0.0"):
            program = (
                "import sys, transformers\n"
                f"transformers.__version__ = {version!r}\n"
                "before = set(sys.modules)\n"
                "try: import unweight.transformers\n"
                "except ImportError as error: print(error)\n"
                "assert 'transformers.modeling_utils' not in set(sys.modules) - before\n"
            )
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
            self.assertIn(
                f"4.57 and 5.3 to 5.17, but {version} is installed: pip install 'tr", done.stdout, done.stderr
            )

    def test_a_bundle_read_without_unweight_is_refused(self):
        from unittest import mock

        from transformers import modeling_utils

        _, bundle = self.bundle()
        # Something else has replaced the function that opens shards.
        with mock.patch.object(modeling_utils, "safe_open", _transformers._safe_open):
            # transformers 4 itself refuses the format of the file.
            with self.assertRaisesRegex(ValueError, "unweight$" if IS_4 else "has read a bundle without unweight"):
                AutoModelForCausalLM.from_pretrained(bundle)

    def test_two_threads_load_one_bundle(self):
        """The second load starts when the first has read all shards, and opens one only after the first has ended."""
        import threading
        from unittest import mock

        from transformers import modeling_utils
        from unweight._transformers import _open
        from unweight.transformers import UnweightHfQuantizer

        model, bundle = self.bundle()
        expected = logits(original(model))
        opening, done, others = threading.Event(), threading.Event(), []
        second = threading.Thread(target=lambda: others.append(AutoModelForCausalLM.from_pretrained(bundle)))
        after = UnweightHfQuantizer._process_model_after_weight_loading

        def process(*args, **more):
            if threading.current_thread() is not second:
                second.start()
                self.assertTrue(opening.wait(120))
            return after(*args, **more)

        def opened(*args, **more):
            if threading.current_thread() is second:
                opening.set()
                self.assertTrue(done.wait(120))
            return _open(*args, **more)

        with (
            mock.patch.object(UnweightHfQuantizer, "_process_model_after_weight_loading", process),
            mock.patch.object(modeling_utils, "safe_open", opened),
        ):
            try:
                first = AutoModelForCausalLM.from_pretrained(bundle)
            finally:
                done.set()
                second.join(120)
        for got in (first, *others):
            self.assertTrue(torch.equal(logits(got), expected))
        self.assertEqual(len(others), 1)

    def test_it_compiles_with_gradients_enabled(self):
        model, bundle = self.bundle()
        expected, got = original(model), AutoModelForCausalLM.from_pretrained(bundle)
        self.assertFalse([name for name, one in got.named_parameters() if one.requires_grad])
        torch._dynamo.reset()
        self.assertTrue(torch.is_grad_enabled())
        # torch.compile would trace a backward if a parameter required gradients.
        compiled = torch.compile(got, fullgraph=True, backend="aot_eager")
        self.assertTrue(torch.equal(compiled(TOKENS).logits, logits(expected)))

    def test_a_rate_is_of_a_positive_time(self):
        from vllm_gpu import ROUNDS, rates_of

        fine, wrong = (0.5, 2.5), (3.0, 2.5)
        for rounds, rates in (
            ([fine] * ROUNDS, ROUNDS),
            ([wrong, fine, (2.5, 2.5), *[fine] * (ROUNDS - 1)], ROUNDS),
            ([fine, *[wrong] * (ROUNDS + 1)], 1),
            ([wrong] * (ROUNDS + 1), 0),
        ):
            with self.subTest(rounds):
                left = iter(rounds)
                found, fault = rates_of(lambda: next(left), 100)
                self.assertEqual(found, [50.0] * rates)
                self.assertEqual(fault is None, rates == ROUNDS)
                self.assertEqual(list(left), [])
        self.assertIn("took as long as all in 4 rounds: 3.000 s and 2.500 s", fault)

    def test_gpu_checks_are_planned_without_a_gpu(self):
        import gpu_checks

        programs = pathlib.Path(gpu_checks.__file__)
        run = [sys.executable, "-W", "default", programs]
        planned = subprocess.run([*run, "--plan"], capture_output=True, text=True)
        self.assertEqual(planned.returncode, 0, planned.stderr)
        adapters = "bundle with an adapter, compared with bf16 with an adapter"
        for name in (*gpu_checks.CHECKS, adapters, "dfloat11, logits"):
            self.assertIn(f"\n{name}", "\n" + planned.stdout)
        # A check that runs too long is killed with its children; a failure is recorded.
        slow = "-c __import__('subprocess').run(['sleep','60.125'])"
        for arguments, seconds, passed in (("-c pass", 60, True), ("-c 1/0", 60, False), (slow, 2, False)):
            result = gpu_checks.run("one", gpu_checks.Check(arguments, 0, 1), self.home, seconds)
            self.assertEqual((result["passed"], result["rc"] == 0), (passed, passed), result)
            self.assertLess(result["seconds"], 50)
        # A killed process may exist a moment longer.
        until = time.monotonic() + 20
        while (left := running(b"sleep\x0060.125\x00")) and time.monotonic() < until:
            time.sleep(0.05)
        self.assertEqual(left, [])
        earlier = {"operator": {"passed": True}, "vllm": {"passed": False, "rc": 1}}
        (self.home / "checks.json").write_text(json.dumps(earlier))
        if not torch.cuda.is_available():
            done = subprocess.run([*run, "--out", self.home, "--seconds", "9"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("not passed: vllm, transformers, mixture", done.stderr)
            result = json.loads((self.home / "checks.json").read_text())
            self.assertEqual({name: result[name] for name in earlier}, earlier)
            self.assertEqual(result["mixture"]["not_run"], "it needs 1 GPUs, and 0 are available")

    def test_a_slice_reads_its_part(self):
        from unittest import mock

        from safetensors.torch import save_file
        from unweight._transformers import _Shard

        weight = torch.randn(1152, 640, generator=torch.Generator().manual_seed(5)).mul(0.02).to(torch.bfloat16)
        (self.home / "one").mkdir()
        save_file({"w": weight, "v": weight[0].clone()}, self.home / "one" / "model.safetensors")
        unweight.compress(self.home / "one", self.home / "bundle", profile="packed")
        shard = _Shard(self.home / "bundle" / "model.safetensors", None)
        whole = "decode_into"
        for index, is_part in (
            (slice(0, 576), True),
            ((slice(None), slice(320, 640)), True),
            ((slice(576, 1152), slice(None)), True),
            (slice(None, None, 2), False),
            (5, False),
            (slice(4, 4), False),
            (..., False),
        ):
            with self.subTest(index), mock.patch.object(unweight.Bundle, whole, side_effect=AssertionError):
                if is_part:
                    self.assertTrue(torch.equal(shard.get_slice("w")[index], weight[index]))
                else:
                    self.assertRaises(AssertionError, lambda: shard.get_slice("w")[index])
            self.assertTrue(torch.equal(shard.get_slice("w")[index], weight[index]))
        self.assertTrue(torch.equal(shard.get_slice("v")[3:9], weight[0][3:9]))

    def test_two_processes_share_a_model(self):
        for kind in ("llama", "qwen2", "qwen3 moe"):
            with self.subTest(kind):
                self.home = pathlib.Path(tempfile.mkdtemp(dir=self.home))
                model, bundle = self.bundle(kind)
                run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
                done = subprocess.run(
                    [*run, __file__, str(model), str(bundle)],
                    capture_output=True,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                )
                self.assertEqual(done.returncode, 0, done.stderr[-4000:])
                self.assertIn("equal", done.stdout)


def shared(model: str, bundle: str) -> None:
    """Runs one of two processes: compares logits of a bundle with those of BF16, both sharded by transformers."""
    from transformers.distributed import DistributedConfig

    try:
        options = dict(distributed_config=DistributedConfig(tp_plan="auto"))
    except TypeError:
        # Before transformers 5.14.
        options = dict(tp_plan="auto")

    def load(path):
        return AutoModelForCausalLM.from_pretrained(path, dtype="auto", **options)

    expected, got = load(model), load(bundle)
    q = got.model.layers[0].self_attn.q_proj
    assert packed(got) >= 8, packed(got)
    assert q.unpacked().shape == (128, 256), f"not sharded: {list(q.unpacked().shape)}"
    if hasattr(got.model.layers[0].mlp, "experts"):
        experts = got.model.layers[0].mlp.experts
        if IS_4:
            shapes = [tuple(layer.unpacked().shape) for layer in (experts[3].up_proj, experts[3].down_proj)]
            assert shapes == [(64, 256), (256, 64)], f"not sharded: {shapes}"
        else:
            shapes = [(matrices.n, matrices.k) for matrices in (experts.gate_up_proj, experts.down_proj)]
            assert shapes == [(128, 256), (256, 64)], f"not sharded: {shapes}"
    assert torch.equal(logits(got), logits(expected)), "other logits"
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        print("equal", flush=True)
    # Skips the interpreter's shutdown, during which a gloo thread may still need the GIL to free a tensor of the last
    # all-reduce. Python would end that thread, and torch would abort, for BF16 models as well.
    os._exit(0)


if __name__ == "__main__":
    if "RANK" in os.environ:
        shared(*sys.argv[1:])
    else:
        unittest.main()

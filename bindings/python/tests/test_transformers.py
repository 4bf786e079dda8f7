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
from models import GLM, MOE, of_transformers, zero_experts
from processes import running
from transformers import AutoModelForCausalLM
from unweight.ops import Experts, Linear
from unweight.transformers import UnweightConfig

# Packed `Experts` modules of a mixture: gate-up and down, in each of 2 layers.
EXPERTS = 4
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
    # Only gates and ups are packed: downs have 96 columns, not a multiple of 64.
    "qwen3 moe, odd": ("Qwen3MoeConfig", {**MOE, "moe_intermediate_size": 96}, 9 + 2),
}
TOKENS = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(3))


def make(home: pathlib.Path, kind: str, **more: object) -> pathlib.Path:
    """Writes a model directory with random weights."""
    config, options, _ = KINDS[kind]
    return of_transformers(home, config, 0.02, options, **more)


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
                expected = AutoModelForCausalLM.from_pretrained(model)
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
                expected, got = (AutoModelForCausalLM.from_pretrained(path) for path in (model, bundle))
                self.assertTrue(torch.equal(logits(got), logits(expected)))
                self.assertEqual(packed(got), 15)

    def test_any_model_is_packed_when_it_is_loaded(self):
        model = make(self.home / "model", "llama")
        expected = AutoModelForCausalLM.from_pretrained(model)
        got = AutoModelForCausalLM.from_pretrained(model, quantization_config=UnweightConfig())
        self.assertEqual(packed(got), 15)
        self.assertTrue(torch.equal(logits(got), logits(expected)))
        self.assertLess(got.get_memory_footprint(), expected.get_memory_footprint() * 0.85)

    def test_experts_are_packed_and_their_bf16_is_freed(self):
        model = make(self.home / "model", "mixtral")
        expected = AutoModelForCausalLM.from_pretrained(model)
        got = AutoModelForCausalLM.from_pretrained(model, quantization_config=UnweightConfig())
        experts = got.model.layers[0].mlp.experts
        self.assertEqual({name for name, _ in experts.named_parameters()}, set())
        for expert in range(4):
            stock = expected.model.layers[0].mlp.experts.down_proj[expert]
            self.assertTrue(torch.equal(experts.down_proj.unpacked(expert), stock))
        self.assertLess(got.get_memory_footprint(), expected.get_memory_footprint() * 0.85)
        more = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
        self.assertTrue(torch.equal(expected.generate(TOKENS, **more), got.generate(TOKENS, **more)))
        with self.assertRaisesRegex(AttributeError, "Experts"):
            got.set_experts_implementation("grouped_mm")
            logits(got)

    def test_experts_that_cannot_be_packed_stay_in_bf16(self):
        for kind in ("mixtral", "qwen3 moe"):
            with self.subTest(kind):
                self.home = pathlib.Path(tempfile.mkdtemp(dir=self.home))
                model = zero_experts(make(self.home / "model", kind))
                unweight.compress(model, self.home / "bundle", profile="packed")
                expected = AutoModelForCausalLM.from_pretrained(model)
                for path, more in ((self.home / "bundle", {}), (model, dict(quantization_config=UnweightConfig()))):
                    with self.assertLogs("unweight.transformers", "WARNING") as logs:
                        got = AutoModelForCausalLM.from_pretrained(path, **more)
                    self.assertEqual(packed(got), 9)
                    self.assertTrue(torch.equal(logits(got), logits(expected)))
                    (line,) = [line for line in logs.output if "cannot be packed" in line]
                    self.assertRegex(line, r"layers\.0\.mlp\.experts.* and 1 more cannot be packed and stay in BF16 \(")
                    self.assertIn("% of the elements lie outside the best window", line)

    def test_tokens_equal_the_model_s_and_graphs_are_whole(self):
        model, bundle = self.bundle()
        expected, got = (AutoModelForCausalLM.from_pretrained(path) for path in (model, bundle))
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

    def test_auto_fits_packed_weights_into_memory(self):
        for kind in ("llama", "mixtral", "odd"):
            with self.subTest(kind):
                self.home = pathlib.Path(tempfile.mkdtemp(dir=self.home))
                model, bundle = self.bundle(kind)
                expected = AutoModelForCausalLM.from_pretrained(model)
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
            expected = AutoModelForCausalLM.from_pretrained(model)
        except AttributeError:
            self.assertLess(tuple(map(int, transformers.__version__.split(".")[:2])), (5, 12))
            self.skipTest("this version of transformers reads no configuration with null")
        got = AutoModelForCausalLM.from_pretrained(null)
        self.assertEqual(packed(got), 15)
        self.assertTrue(torch.equal(logits(got), logits(expected)))

    def test_a_bundle_with_an_unmarked_config_is_loaded_with_a_warning(self):
        model, bundle = self.bundle()
        shutil.copy(model / "config.json", bundle / "config.json")
        expected = AutoModelForCausalLM.from_pretrained(model)
        with self.assertLogs("unweight.transformers", "WARNING") as logs:
            got = AutoModelForCausalLM.from_pretrained(bundle)
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
            got = AutoModelForCausalLM.from_pretrained(other)
        self.assertIn("its weights are not packed", logs.output[0])
        self.assertTrue(torch.equal(logits(got), logits(AutoModelForCausalLM.from_pretrained(model))))

    def test_a_replaced_bundle_is_opened_again(self):
        home, models = self.home, {}
        self.addCleanup(os.chdir, os.getcwd())
        for name in ("here", "there"):
            self.home = home / name
            models[name], _ = self.bundle("llama" if name == "here" else "qwen2")
        os.chdir(home / "here")
        # Keeps the bundle open, as the traceback of a failed load does.
        held = unweight.transformers._Shard(pathlib.Path("bundle/model.safetensors"), "cpu")
        os.chdir(home / "there")
        got, expected = (AutoModelForCausalLM.from_pretrained(path) for path in ("bundle", models["there"]))
        self.assertTrue(torch.equal(logits(got), logits(expected)))
        self.assertNotIn("model.layers.0.self_attn.q_proj.bias", held.keys())

    def test_other_versions_of_transformers_are_refused(self):
        for version in ("4.57.6", "5.2.0", "5.18.0", "6.0.0"):
            program = (
                "import sys, transformers\n"
                f"transformers.__version__ = {version!r}\n"
                "before = set(sys.modules)\n"
                "try: import unweight.transformers\n"
                "except ImportError as error: print(error)\n"
                "assert 'transformers.modeling_utils' not in set(sys.modules) - before\n"
            )
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
            self.assertIn(f"5.3 to 5.17, but {version} is installed: pip install 'tr", done.stdout, done.stderr)

    def test_a_bundle_read_without_unweight_is_refused(self):
        from unittest import mock

        from transformers import modeling_utils

        _, bundle = self.bundle()
        # Something else has replaced the function that opens shards.
        with mock.patch.object(modeling_utils, "safe_open", unweight.transformers._safe_open):
            with self.assertRaisesRegex(ValueError, "has read a bundle without unweight"):
                AutoModelForCausalLM.from_pretrained(bundle)

    def test_two_threads_load_one_bundle(self):
        """The second load starts when the first has read all shards, and opens one only after the first has ended."""
        import threading
        from unittest import mock

        from transformers import modeling_utils
        from unweight.transformers import UnweightHfQuantizer, _open

        model, bundle = self.bundle()
        expected = logits(AutoModelForCausalLM.from_pretrained(model))
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
        expected, got = (AutoModelForCausalLM.from_pretrained(path) for path in (model, bundle))
        self.assertFalse([name for name, one in got.named_parameters() if one.requires_grad])
        torch._dynamo.reset()
        self.assertTrue(torch.is_grad_enabled())
        # torch.compile would trace a backward if a parameter required gradients.
        compiled = torch.compile(got, fullgraph=True, backend="aot_eager")
        self.assertTrue(torch.equal(compiled(TOKENS).logits, logits(expected)))

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
        from unweight.transformers import _Shard

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
        for kind in ("llama", "qwen3 moe"):
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
        return AutoModelForCausalLM.from_pretrained(path, **options)

    expected, got = load(model), load(bundle)
    q = got.model.layers[0].self_attn.q_proj
    assert packed(got) >= 8, packed(got)
    assert q.unpacked().shape == (128, 256), f"not sharded: {list(q.unpacked().shape)}"
    if hasattr(got.model.layers[0].mlp, "experts"):
        experts = got.model.layers[0].mlp.experts
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

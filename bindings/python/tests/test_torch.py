"""Tests of the operator `unweight::linear` and of torch tensors from bundles. Needs torch."""

import copy
import gc
import pathlib
import pickle
import subprocess
import sys
import tempfile
import textwrap
import unittest
import warnings
from unittest import mock

import models
import torch
import unweight
import unweight._embedding
import unweight.ops
from processes import forked
from torch import nn
from unweight._devices import _without_kernels
from unweight.ops import (
    Experts,
    Linear,
    _bf16_experts,
    _pack_experts,
    linear,
    pack,
    pack_experts,
    place,
    unpack,
    unpack_experts,
)


def weights(n: int, k: int, seed: int = 0, wide: int = 0) -> torch.Tensor:
    """Returns normally distributed weights, of which `wide` are outside of every window."""
    chance = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=chance).mul(0.02).to(torch.bfloat16)
    for place in torch.randperm(n * k, generator=chance)[:wide].tolist():
        weight.view(-1)[place] = 2.0**-60
    return weight


def inputs(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


class Versions(unittest.TestCase):
    def run_with(self, versions: dict[str, str], program: str) -> None:
        """Runs a program in a process in which these packages have other versions."""
        program = (
            "import pathlib, sys, types\n"
            "import torch, unweight\n"
            "home = pathlib.Path(sys.argv[1])\n"
            f"for name, version in {versions}.items():\n"
            "    sys.modules.setdefault(name, types.ModuleType(name)).__version__ = version\n"
        ) + textwrap.dedent(program)
        with tempfile.TemporaryDirectory() as home:
            run = [sys.executable, "-c", program, home]
            done = subprocess.run(run, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])

    def test_an_unknown_torch_is_refused_where_its_private_parts_are_used(self):
        for version in ("2.8.0", "2.12.0+cu130", "3.0.0", "unknown"):
            program = """
                from safetensors.torch import save_file
                (home / "model").mkdir()
                save_file({"w": torch.ones(64, 64, dtype=torch.bfloat16)}, home / "model" / "model.safetensors")
                unweight.compress(home / "model", home / "bundle")
                assert unweight.Bundle(home / "bundle").torch("w").sum() == 64 * 64
                try:
                    unweight.pack_model(torch.nn.Linear(64, 64))
                except ImportError as error:
                    says = f"unweight supports torch 2.9 to 2.11, but {torch.__version__} is installed: pip install "
                    assert str(error).startswith(says), error
                else:
                    sys.exit("it is not refused")
            """
            with self.subTest(version):
                self.run_with({"torch": version}, program)

    def test_versions_of_packages_that_are_not_used_do_not_matter(self):
        others = {name: "99.0" for name in ("transformers", "vllm", "accelerate", "safetensors", "numpy")}
        self.run_with(others, "assert unweight.pack_model(torch.nn.Linear(64, 64).bfloat16()).kept == {}")


class Parts(unittest.TestCase):
    """Parts of a matrix of 3 x 2 blocks of 512 x 512, as processes of tensor parallelism read them."""

    def setUp(self):
        from safetensors.torch import save_file
        from unweight._part import Part

        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        home = pathlib.Path(folder.name)
        (home / "model").mkdir()
        self.weight = weights(1152, 960, wide=700)
        save_file({"large": self.weight, "small": self.weight[:512, :512].clone()}, home / "model/model.safetensors")
        unweight.compress(home / "model", home / "bundle", profile="packed")
        self.bundle = unweight.Bundle(home / "bundle")
        self.info, self.read = self.bundle.info("large"), []
        self.part = Part(self.bundle, self.info, self.read.append)

    def same(self, got: torch.Tensor, expected: torch.Tensor):
        got = got.read() if hasattr(got, "read") else got
        self.assertEqual((got.shape, got.dtype), (expected.shape, expected.dtype))
        self.assertTrue(torch.equal(got.contiguous().view(torch.int16), expected.contiguous().view(torch.int16)))

    def test_rows_and_columns_of_a_bundle(self):
        for rows, cols in ((None, None), ((0, 576), None), ((512, 1152), (5, 700)), (None, (959, 960))):
            expected = self.weight[slice(*rows or (None,)), slice(*cols or (None,))]
            self.same(self.bundle.torch("large", rows=rows, cols=cols), expected)
        self.assertTrue(self.bundle.reads_parts("large"))
        self.assertFalse(self.bundle.reads_parts("small"))
        self.same(self.bundle.torch("small", rows=(64, 65)), self.weight[64:65, :512])
        # The last needs petabytes, so this fails if memory is allocated before the range is checked.
        for rows in ((0, 0), (5, 4), (0, 1153), (-2, 5), (0, -1), (0, 2**40)):
            with self.assertRaisesRegex(ValueError, "exceed the 1152 rows of 'large'"):
                self.bundle.torch("large", rows=rows)
        for rows in ((), (True, 64), (0, 64.0), 5, (0, 1, 2)):
            with self.assertRaisesRegex(TypeError, "rows=.*give a pair of integers"):
                self.bundle.torch("large", rows=rows)
        self.same(self.bundle.torch("large", rows=[0, 64]), self.weight[:64])

    def test_slices_of_ranks_make_the_whole_product(self):
        """Each rank of tensor parallelism multiplies by its rows, or by its columns and sums."""
        x = inputs(7, 960)
        exact, magnitude = x.double() @ self.weight.double().T, x.double().abs() @ self.weight.double().abs().T
        for ranks in (1, 2, 3, 6):
            packed = [pack(self.part.narrow(0, first, 1152 // ranks)) for first in range(0, 1152, 1152 // ranks)]
            self.same(torch.cat([unpack(one.arena) for one in packed]), self.weight)
            y = torch.cat([linear(x, one) for one in packed], dim=-1).double()
            self.assertTrue(((y - exact).abs() <= exact.abs() * 2.0**-8 + magnitude * 2.0**-18).all(), ranks)
        for ranks in (1, 3, 5):
            size = 960 // ranks
            packed = [pack(self.part.narrow(1, first, size)) for first in range(0, 960, size)]
            self.same(torch.cat([unpack(one.arena) for one in packed], dim=1), self.weight)
            products = [linear(x[:, at * size : (at + 1) * size], one).double() for at, one in enumerate(packed)]
            bound = sum(one.abs() for one in products) * 2.0**-7 + magnitude * 2.0**-18
            self.assertTrue(((sum(products) - exact).abs() <= bound).all(), ranks)

    def test_a_part_is_not_changed_in_place(self):
        for change in (
            lambda part: part.zero_(),
            lambda part: part.copy_(torch.zeros_like(self.weight)),
            lambda part: part.__setitem__(slice(5), 0),
            lambda part: torch.add(self.weight, 1, out=part),
            # Views, some of which have read the contents:
            lambda part: part[5:].zero_(),
            lambda part: part.t().zero_(),
            lambda part: part.view(-1).zero_(),
            lambda part: part[::2].zero_(),
            lambda part: part.t()[3].view(torch.int16).fill_(7),
            lambda part: part.chunk(2)[0].zero_(),
            lambda part: part.unbind()[7].mul_(2),
            lambda part: part[7].__setitem__(5, 0),
            # Lists of tensors, and `data`:
            lambda part: torch._foreach_mul_([part], 2.0),
            lambda part: torch._foreach_copy_([part.t()], [self.weight.t()]),
            lambda part: setattr(part, "data", self.weight),
            lambda part: setattr(part.t(), "data", self.weight.t()),
        ):
            with self.assertRaisesRegex(NotImplementedError, "cannot be changed in place; clone"):
                change(self.part)
        for ask in (
            lambda part: part.share_memory_(),
            lambda part: torch.from_dlpack(part),
            lambda part: part.t().share_memory_(),
        ):
            with self.assertRaisesRegex(NotImplementedError, "has no memory of its own; clone"):
                ask(self.part)
        self.same(self.part.clone().add_(0), self.weight)
        self.same(self.part.t().clone().mul_(1), self.weight.t())
        self.same(self.part.data, self.weight)
        self.same(torch.empty_like(self.weight).copy_(self.part), self.weight)

    def test_only_the_copied_part_is_read(self):
        part = self.part.narrow(0, 576, 576)[:, 480:960].narrow(1, 0, 480)
        self.assertEqual((type(part), list(part.shape), self.read), (type(self.part), [576, 480], []))
        meta = torch.empty(576, 480, device="meta", dtype=torch.bfloat16)
        meta.copy_(part)
        self.assertEqual(self.read, [])
        copy = torch.zeros(576, 480, dtype=torch.bfloat16)
        copy.copy_(part)
        self.same(copy, self.weight[576:, 480:])
        # It needs two of the three rows of blocks, and both columns.
        self.assertEqual(len(self.read), 1)
        self.assertLess(self.read[0], self.info.stored_bytes * 0.6)

    def test_other_operations_read_the_contents(self):
        for ask in (
            lambda matrix: matrix.t(),
            lambda matrix: matrix[7],
            lambda matrix: matrix[3:900:7, ::2],
            lambda matrix: matrix[-100:, :-900],
            lambda matrix: matrix + 1,
            lambda matrix: torch.cat([matrix, matrix]),
            lambda matrix: matrix.detach().clone(),
            lambda matrix: matrix[2000:],
            lambda matrix: matrix.t()[5:700].t(),
            lambda matrix: matrix.view(3, 384, 960).transpose(0, 1).reshape(1152, 960)[:, 5:],
            lambda matrix: matrix.unflatten(0, (2, -1)).select(0, 1).narrow(1, 7, 900),
            lambda matrix: torch.empty(960, 1152, dtype=torch.bfloat16).copy_(matrix.t()),
        ):
            self.same(ask(self.part), ask(self.weight))
        # It has no memory that could be mistaken for the contents.
        self.assertEqual(self.part.data_ptr(), 0)


class Grouped(unittest.TestCase):
    """The operator for experts of a mixture."""

    def setUp(self):
        self.gate_up = weights(3 * 128, 192, wide=90).view(3, 128, 192)
        self.down = weights(3 * 192, 64, seed=1).view(3, 192, 64)
        self.packed = pack_experts(self.gate_up, self.down)
        chance = torch.Generator().manual_seed(4)
        self.ids = torch.rand(17, 3, generator=chance).topk(2).indices
        self.share = torch.rand(17, 2, generator=chance)

    def output(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        packed = self.packed
        return torch.ops.unweight.experts(x, packed.gate_up, packed.down, ids, self.share, packed.experts)

    def test_round_trips_bit_for_bit(self):
        for got, weight in zip(
            unpack_experts(self.packed.gate_up, self.packed.down, 3), (self.gate_up, self.down)
        ):
            self.assertTrue(torch.equal(got.contiguous().view(torch.int16), weight.view(torch.int16)))
        self.assertLess(self.packed.packed_nbytes, self.packed.bf16_nbytes * 0.85)

    def test_each_token_has_its_experts(self):
        x = inputs(17, 192)
        ids = self.ids.clone()
        ids[3, 1], ids[5] = -1, 3
        y = self.output(x, ids)
        for token in range(17):
            exact = torch.zeros(192, dtype=torch.float64)
            for expert, share in zip(ids[token].tolist(), self.share[token].tolist()):
                if 0 <= expert < 3:
                    gate, up = (self.gate_up[expert].double() @ x[token].double()).chunk(2)
                    exact += self.down[expert].double() @ (nn.functional.silu(gate) * up) * share
            error = (y[token].double() - exact).abs().max()
            self.assertLessEqual(error.item(), 0.03 * exact.abs().max().item())
        self.assertEqual(y[5].abs().max().item(), 0)

    def test_it_passes_opcheck_and_compiles(self):
        packed, x = self.packed, inputs(17, 192)
        arguments = (x, packed.gate_up, packed.down, self.ids, self.share, 3)
        torch.library.opcheck(torch.ops.unweight.experts, arguments)
        compiled = torch.compile(torch.ops.unweight.experts, fullgraph=True, backend="eager")
        self.assertTrue(torch.equal(compiled(*arguments), self.output(x, self.ids)))

    def test_unpackable_experts_return_none_and_wrong_ones_raise(self):
        self.assertIsNone(pack_experts(self.gate_up[:, :96], self.down[:, :, :48]))
        everything = torch.full_like(self.down, torch.nan)
        self.assertIsNone(pack_experts(self.gate_up, everything))
        self.assertRegex(_pack_experts(self.gate_up, everything), "100.00 % of the elements lie outside")
        self.assertIn("multiple of 64", _pack_experts(self.gate_up[:, :96], self.down[:, :, :48]))
        reasons = {f"experts.{index}": f"reason {index}" for index in range(5)}
        names = "experts.0, experts.1, experts.2 and 2 more"
        line = f"unweight: {names} cannot be packed and stay in BF16 (experts.0: reason 0)"
        self.assertEqual(_bf16_experts(reasons), line)
        with self.assertRaisesRegex(ValueError, "not the shapes of one mixture"):
            pack_experts(self.gate_up, self.down[:2])
        x = inputs(17, 192)
        for x, ids in ((x.float(), self.ids), (x[:16], self.ids), (x, self.ids[:9])):
            with self.assertRaisesRegex(ValueError, "unweight::experts expects"):
                self.output(x, ids)
        x = inputs(17, 192)
        with self.assertRaisesRegex(ValueError, "expects ids of an integer type, got torch.float32"):
            self.output(x, self.ids.float())
        for experts, says in ((0, "expects at least 1 expert"), (2, "do not hold 2 experts")):
            with self.assertRaisesRegex(ValueError, says):
                packed = self.packed
                torch.ops.unweight.experts(x, packed.gate_up, packed.down, self.ids, self.share, experts)


class Pack(unittest.TestCase):
    def test_round_trips_bit_for_bit(self):
        for n, k, wide in ((64, 64, 0), (128, 192, 0), (192, 128, 90), (64, 640, 1)):
            with self.subTest(n=n, k=k, wide=wide):
                weight = weights(n, k, wide=wide)
                packed = pack(weight)
                self.assertEqual((packed.n, packed.k, packed.escapes.data.nbytes > 0), (n, k, wide > 1))
                self.assertTrue(torch.equal(unpack(packed.arena).view(torch.int16), weight.view(torch.int16)))

    def test_the_size_of_an_arena_depends_on_its_shape_only(self):
        sizes = {pack(weights(128, 128, wide=wide)).arena.nbytes for wide in (0, 10, 60)}
        self.assertEqual(len(sizes), 1)
        self.assertLess(sizes.pop(), 128 * 128 * 2 * 0.8)

    def test_a_forked_child_packs_while_its_parent_holds_the_lock(self):
        weight = weights(64, 64)
        with unweight._gpu._lock:
            status = forked(lambda: torch.equal(unpack(pack(weight).arena), weight), 30)
        self.assertEqual(status, 0)

    def test_strided_rows_are_packed_as_they_are(self):
        whole = weights(128, 256)
        shard = whole[:, 64:192]
        self.assertTrue(torch.equal(unpack(pack(shard).arena), shard))

    def test_unpackable_weights_return_none(self):
        self.assertIsNone(pack(weights(64, 65)))
        self.assertIsNone(pack(weights(63, 64)))
        self.assertIsNone(pack(torch.full((64, 64), float("nan"), dtype=torch.bfloat16)))
        spread = torch.arange(64 * 64, dtype=torch.int32).mul(7919).to(torch.int16).view(torch.bfloat16)
        self.assertIsNone(pack(spread.view(64, 64)))

    def test_other_shapes_and_dtypes_are_refused(self):
        for wrong in (torch.zeros(64, 64), torch.zeros(64, dtype=torch.bfloat16)):
            with self.assertRaisesRegex(ValueError, "expects a bfloat16 matrix"):
                pack(wrong)

    def test_a_damaged_arena_is_refused(self):
        packed = pack(weights(128, 128, wide=40))
        for place in (packed.arena.numel() - 256, packed.arena.numel() - 256 + 8, packed.arena.numel() - 256 + 24):
            arena = packed.arena.clone()
            arena[place] ^= 0x55
            with self.subTest(place=place), self.assertRaises((ValueError, unweight.UnweightError)):
                unpack(arena)
        for wrong in (packed.arena[:-1], packed.arena[:200], packed.arena.view(torch.int8), packed.arena[::2]):
            with self.assertRaises(ValueError):
                unpack(wrong)

    def test_freed_escapes_are_an_error(self):
        packed = pack(weights(128, 128, seed=5, wide=40))
        arena = packed.arena
        del packed
        gc.collect()
        with self.assertRaisesRegex(unweight.UnweightError, "were freed; keep"):
            unpack(arena)


class Operator(unittest.TestCase):
    def test_it_is_linear_bit_for_bit(self):
        for n, k, wide in ((64, 64, 0), (192, 128, 50)):
            weight, bias = weights(n, k, wide=wide), inputs(n, seed=2)
            packed = pack(weight)
            for shape in ((1, k), (3, 5, k), (0, k), (k,), (200, k)):
                for bias_or_none in (None, bias):
                    with self.subTest(n=n, k=k, shape=shape, bias=bias_or_none is not None):
                        x = inputs(*shape)
                        expected = nn.functional.linear(x, weight, bias_or_none)
                        got = linear(x, packed, bias_or_none)
                        self.assertTrue(torch.equal(got, expected))
                        self.assertEqual((got.shape, got.dtype), (expected.shape, expected.dtype))

    def test_torch_s_own_checks_of_operators_pass(self):
        for wide in (0, 20):
            packed = pack(weights(128, 64, wide=wide))
            for x in (inputs(4, 64), inputs(2, 3, 64), inputs(6, 64)[::2], inputs(64, 5).t()):
                for bias in (None, inputs(128)):
                    result = torch.library.opcheck(torch.ops.unweight.linear.default, (x, packed.arena, packed.n, bias))
                    self.assertEqual(set(result.values()), {"SUCCESS"})

    def test_it_compiles_to_one_graph(self):
        layers = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64, bias=False)).to(torch.bfloat16)
        packed = copy.deepcopy(layers)
        for at in (0, 2):
            packed[at] = Linear(packed[at])
            self.assertTrue(packed[at].pack())
        torch._dynamo.reset()
        compiled = torch.compile(packed, fullgraph=True, backend="eager")
        with torch.inference_mode():
            for rows in (1, 2, 7, 33):
                x = inputs(rows, 64, seed=rows)
                self.assertTrue(torch.equal(compiled(x), layers(x)))

    def test_gradients_are_refused_and_forward_is_not(self):
        packed = pack(weights(64, 64))
        x = inputs(2, 64).requires_grad_()
        y = linear(x, packed)
        with self.assertRaisesRegex(NotImplementedError, "no backward.*load the model in BF16"):
            y.float().sum().backward()

    def test_forward_derivatives_are_refused(self):
        from torch.autograd import forward_ad

        packed, x = pack(weights(64, 64)), inputs(2, 64)
        with warnings.catch_warnings(), forward_ad.dual_level():
            # torch raises a DeprecationWarning in its own code for the first dual tensor.
            warnings.simplefilter("ignore", DeprecationWarning)
            forward_ad.make_dual(x, x)
        with self.assertRaisesRegex(NotImplementedError, "no backward.*load the model in BF16"):
            torch.func.jvp(lambda x: linear(x, packed), (x,), (x,))
        for take in (
            lambda: torch.func.grad(lambda x: linear(x, packed).float().sum())(x),
            lambda: torch.func.vjp(lambda x: linear(x, packed), x),
            lambda: torch.func.vmap(torch.func.grad(lambda x: linear(x, packed).float().sum()))(x),
        ):
            with self.assertRaisesRegex(NotImplementedError, "no backward.*load the model in BF16"):
                take()
        with forward_ad.dual_level():
            with self.assertRaisesRegex(NotImplementedError, "no backward"):
                linear(forward_ad.make_dual(x, x), packed)
            # Without a tangent, no derivative is lost.
            self.assertEqual(linear(x, packed).shape, (2, 64))

    def test_observers_of_operators_see_it(self):
        from torch.autograd import forward_ad, profiler
        from torch.overrides import TorchFunctionMode
        from torch.utils._python_dispatch import TorchDispatchMode
        from unweight.ops import _is_watched

        results = []

        def observed(x):
            results.append(_is_watched())
            return x

        x = inputs(2, 64)
        self.assertTrue(_is_watched(), "gradients are enabled")
        with torch.inference_mode():
            self.assertFalse(_is_watched())
        with torch.no_grad():
            self.assertFalse(_is_watched())
            torch.func.vmap(observed)(x)
            torch.func.functionalize(observed)(x)
            with warnings.catch_warnings():
                # torch raises a DeprecationWarning in its own code.
                warnings.simplefilter("ignore", DeprecationWarning)
                torch.jit.trace(observed, x, check_trace=False)
            for context in (TorchDispatchMode(), TorchFunctionMode(), forward_ad.dual_level(), profiler.profile()):
                with context:
                    observed(x)
            torch._dynamo.reset()
            compiled = torch.compile(lambda x: x + _is_watched(), fullgraph=True, backend="eager")
            self.assertTrue(torch.equal(compiled(x), x + 1), "a compiler takes it for a constant")
            self.assertFalse(_is_watched())
        self.assertEqual(results, [True] * len(results))
        self.assertGreaterEqual(len(results), 7)

    def test_autocast_changes_no_type(self):
        weight, x = weights(64, 128), weights(3, 128)
        packed, plain = pack(weight), nn.functional.linear(x, weight)
        for dtype in (torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype=dtype):
                y = linear(x, packed)
            self.assertEqual(y.dtype, torch.bfloat16)
            self.assertTrue(torch.equal(y, plain))

    def test_meta_operands_are_refused(self):
        packed, x = pack(weights(128, 64)), inputs(2, 64)
        with self.assertRaisesRegex(ValueError, "expects all operands on one device, got cpu and meta"):
            linear(x, packed._replace(arena=packed.arena.to("meta")))
        self.assertEqual(linear(x.to("meta"), packed._replace(arena=packed.arena.to("meta"))).device.type, "meta")

    def test_a_negative_view_is_packed_negated(self):
        weight = weights(64, 64)
        self.assertTrue(torch.equal(unpack(pack(torch._neg_view(weight)).arena), -weight))

    def test_wrong_operands_are_refused(self):
        packed = pack(weights(128, 64))
        op = torch.ops.unweight.linear
        for says, operands in (
            ("expects x in bfloat16", (torch.zeros(2, 64), packed.arena, 128)),
            ("x has 65 columns", (inputs(2, 65), packed.arena, 128)),
            ("n is 64", (inputs(2, 64), packed.arena, 64)),
            ("arena in uint8", (inputs(2, 64), packed.arena.float(), 128)),
            ("bias in bfloat16", (inputs(2, 64), packed.arena, 128, torch.zeros(128))),
        ):
            with self.subTest(says), self.assertRaisesRegex(ValueError, says):
                op(*operands)

    def test_other_devices_are_refused_by_name(self):
        self.assertIsNone(unweight.ops.why_not(torch.device("cpu")))
        self.assertIn("not on meta", unweight.ops.why_not(torch.device("meta")))
        with self.assertRaisesRegex(ValueError, "NVIDIA GPUs that torch finds, not on meta; pass weight.cpu"):
            pack(torch.empty(64, 64, dtype=torch.bfloat16, device="meta"))
        # The operator is also registered for CUDA.
        self.assertIn("CUDA:", torch._C._dispatch_dump("unweight::linear"))

    def test_only_arenas_on_a_gpu_are_placed(self):
        packed = pack(weights(64, 64))
        for says, arena, escapes in (
            ("on a GPU, got one on cpu; move it there", packed.arena, packed.escapes.data),
            (r"contiguous uint8 vector, got torch\.float32 \[", packed.arena.float(), packed.escapes.data),
            ("the `data` of an `Escapes` or `Placed`, got Escapes", packed.arena, packed.escapes),
            (r"got torch\.int32 \[1\]", packed.arena, torch.zeros(1, dtype=torch.int32)),
        ):
            with self.assertRaisesRegex(ValueError, says):
                place(arena, escapes)
        meta = torch.empty(4096, dtype=torch.uint8, device="meta")
        with self.assertRaisesRegex(ValueError, "on a GPU, got one on meta"):
            place(meta, packed.escapes.data)

    def test_devices_are_given_as_to_torch(self):
        self.assertIsNone(unweight.ops.why_not("cpu"))
        self.assertIn("not on meta", unweight.ops.why_not("meta"))
        # No machine has that many GPUs.
        for device in (99, "cuda:99", torch.device("cuda", 99)):
            self.assertIn("that torch finds, not on cuda:99", unweight.ops.why_not(device))
        layer = torch.nn.Linear(64, 64)
        for call in (unweight.ops.why_not, lambda device: unweight.pack_model(layer, device=device)):
            for device, kind in ((1.5, "float"), (True, "bool"), (b"cpu", "bytes"), (layer, "Linear")):
                with self.assertRaisesRegex(TypeError, rf"is a {kind}; pass a torch\.device, a name such as 'cuda:0'"):
                    call(device)
            for device in ("gpu", "cuda:-1", -1):
                with self.assertRaisesRegex(ValueError, rf"device={device!r}: .*; pass 'cpu', 'cuda' or the index"):
                    call(device)
        with self.assertRaisesRegex(TypeError, "device=None is a NoneType"):
            unweight.ops.why_not(None)

    def test_every_gpu_from_ampere_on_has_kernels(self):
        for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)):
            self.assertIsNone(_without_kernels("a GPU", capability), capability)
        for capability in ((7, 0), (7, 5), (8, 7), (11, 0), (12, 1)):
            reason = _without_kernels("Quadro", capability)
            self.assertRegex(reason, r"Quadro: \d+\.\d\); supported are 8\.0, ")

    @unittest.skipIf(torch.cuda.is_available(), "this machine has a GPU: gpu_ops.py is for that")
    def test_without_a_gpu_the_runtime_says_what_is_missing(self):
        with self.assertRaisesRegex(unweight.DeviceError, "libcuda"):
            unweight._native.Runtime(0, 64)
        self.assertEqual(unweight._native.Runtime.buffer_nbytes(64, 65), None)
        arena, escapes = unweight._native.Runtime.buffer_nbytes(256, 512)
        self.assertEqual(arena, pack(weights(256, 512)).arena.nbytes)
        # One weight in 256 may be an escape, with 6 bytes each.
        self.assertEqual(escapes, 256 * 512 // 256 * 6)


class Embedding(unittest.TestCase):
    def test_it_is_a_lookup_bit_for_bit(self):
        weight = weights(192, 128, wide=50)
        packed = pack(weight)
        for ids in (torch.tensor([0, 191, 5, 5]), torch.arange(192, dtype=torch.int32).view(12, 16), torch.tensor(7)):
            expected = nn.functional.embedding(ids, weight)
            self.assertTrue(torch.equal(torch.ops.unweight.embedding(ids, packed.arena, 192, 128), expected))
        operands = (torch.tensor([[3, 191], [7, 0]]), packed.arena, 192, 128)
        result = torch.library.opcheck(torch.ops.unweight.embedding.default, operands)
        self.assertEqual(set(result.values()), {"SUCCESS"})

    def test_wrong_operands_are_refused(self):
        packed, op = pack(weights(128, 64)), torch.ops.unweight.embedding
        ids = torch.tensor([3])
        for says, operands in (
            ("expects ids in int32", (ids.float(), packed.arena, 128, 64)),
            ("arena in uint8", (ids, packed.arena.float(), 128, 64)),
            ("called for .128, 128", (ids, packed.arena, 128, 128)),
        ):
            with self.subTest(says), self.assertRaisesRegex(ValueError, says):
                op(*operands)
        with self.assertRaises(IndexError):
            op(torch.tensor([128]), packed.arena, 128, 64)


class Module(unittest.TestCase):
    def layer(self, wide: int = 40) -> tuple[nn.Linear, Linear]:
        stock = nn.Linear(128, 192).to(torch.bfloat16)
        stock.weight.data = weights(192, 128, seed=3, wide=wide)
        packed = Linear(stock)
        self.assertTrue(packed.pack())
        return stock, packed

    def test_copies_and_pickles_are_the_same_layer(self):
        stock, packed = self.layer()
        x, expected = inputs(4, 128), stock.weight.detach().clone()
        with torch.inference_mode():
            for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
                self.assertTrue(torch.equal(other(x), stock(x)))
            copied = copy.deepcopy(packed)
            del packed
            gc.collect()
            self.assertTrue(torch.equal(copied(x), stock(x)))
            self.assertTrue(torch.equal(copied.unpacked(), expected))

    def test_state_dict_is_refused(self):
        stock, packed = self.layer()
        x = inputs(4, 128)
        expected = packed(x)
        with self.assertRaisesRegex(NotImplementedError, "packed weights have no state_dict"):
            packed.state_dict()
        state = {"weight_packed": pack(weights(192, 128, seed=5)).arena}
        for layer in (packed, Linear(stock)):
            with self.assertRaisesRegex(NotImplementedError, "packed weights have no state_dict"):
                layer.load_state_dict(state, strict=False)
        self.assertTrue(torch.equal(packed(x), expected))
        # A layer that is not packed has a normal state_dict.
        plain = Linear(nn.Linear(128, 192).to(torch.bfloat16))
        plain.load_state_dict(stock.state_dict())
        self.assertEqual(set(plain.state_dict()), {"weight", "bias"})
        with self.assertRaisesRegex(ValueError, "is already packed"):
            packed.pack()

    def test_the_weight_and_its_memory_are_freed(self):
        stock, packed = self.layer(wide=0)
        self.assertFalse(hasattr(packed, "weight"))
        self.assertEqual({name for name, _ in packed.named_parameters()}, {"bias"})
        self.assertLess(packed.weight_packed.nbytes, stock.weight.nbytes * 0.78)
        self.assertIn("packed", repr(packed))

    def test_an_unpackable_layer_computes_as_before(self):
        stock = nn.Linear(65, 64).to(torch.bfloat16)
        layer = Linear(stock)
        self.assertFalse(layer.pack())
        x = inputs(2, 65)
        self.assertTrue(torch.equal(layer(x), stock(x)))

    def test_a_dtype_conversion_is_an_error(self):
        _, packed = self.layer()
        with self.assertRaisesRegex(ValueError, "bfloat16"):
            packed.float()(inputs(2, 128).float())


class Mixture(unittest.TestCase):
    def test_each_expert_has_its_own_window(self):
        # No weight of the third is in the window of the others.
        matrices = torch.stack([weights(128, 64, seed=1, wide=9), weights(128, 64, seed=2), weights(128, 64) * 2.0**40])
        experts = Experts.of(matrices)
        self.assertEqual((len(experts), experts.arenas.shape[0]), (3, 3))
        self.assertLess(experts.arenas.nbytes, matrices.nbytes * 0.8)
        del matrices
        gc.collect()
        expected = [weights(128, 64, seed=1, wide=9), weights(128, 64, seed=2), weights(128, 64) * 2.0**40]
        x = inputs(5, 64)
        for these in (experts, copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
            for index, weight in enumerate(expected):
                self.assertTrue(torch.equal(these.unpacked(index), weight), index)
                self.assertTrue(torch.equal(these.linear(x, index), nn.functional.linear(x, weight)), index)

    def test_one_unpackable_expert_leaves_all_unpacked(self):
        everything = torch.arange(128 * 64, dtype=torch.int32).mul(8).to(torch.int16).view(torch.bfloat16).view(128, 64)
        self.assertIsNone(pack(everything))
        self.assertIsNone(Experts.of(torch.stack([weights(128, 64), everything])))
        self.assertRegex(Experts._of(torch.stack([weights(128, 64), everything])), "^expert 1: .* % of the elements")
        self.assertIsNone(Experts.of(torch.empty(0, 64, 64, dtype=torch.bfloat16)))
        with self.assertRaisesRegex(ValueError, r"\[experts, n, k\], got \[128, 64\]"):
            Experts.of(everything)


class Tensors(unittest.TestCase):
    def test_tensors_of_bundles(self):
        from safetensors import safe_open

        with tempfile.TemporaryDirectory() as home:
            home = pathlib.Path(home)
            tensors = models.small(home / "model")
            for profile in ("distribution", "palette", "packed", "archive"):
                unweight.compress(home / "model", home / profile, profile=profile)
                bundle = unweight.Bundle(home / profile)
                with safe_open(home / "model" / "model.safetensors", "pt") as stock:
                    for name in tensors:
                        expected, got = stock.get_tensor(name), bundle.torch(name)
                        self.assertEqual(got.dtype, expected.dtype)
                        self.assertTrue(torch.equal(got, expected), name)
                self.assertEqual(bundle.torch("scale", device="meta").device.type, "meta")

    def test_tensors_of_every_small_float(self):
        from safetensors.torch import save_file

        names = ("e4m3fn", "e5m2", "e8m0fnu", "e4m3fnuz", "e5m2fnuz")
        dtypes = [*(getattr(torch, f"float8_{name}") for name in names), torch.float4_e2m1fn_x2]
        with tempfile.TemporaryDirectory() as home:
            home = pathlib.Path(home)
            (home / "model").mkdir()
            tensors = {str(dtype): torch.arange(256, dtype=torch.uint8).view(8, 32).view(dtype) for dtype in dtypes}
            save_file(tensors, home / "model" / "model.safetensors")
            unweight.compress(home / "model", home / "bundle")
            bundle = unweight.Bundle(home / "bundle")
            for name, expected in tensors.items():
                got = bundle.torch(name)
                self.assertEqual((got.dtype, got.shape), (expected.dtype, expected.shape))
                self.assertTrue(torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), name)
            with self.assertRaisesRegex(TypeError, "is F4, of which torch has no single elements; read the whole"):
                bundle.torch(str(torch.float4_e2m1fn_x2), rows=(0, 1))

    @unittest.skipIf(torch.cuda.is_available(), "this machine has a GPU: gpu_ops.py is for that")
    def test_tensors_are_decoded_on_the_cpu_if_the_gpu_cannot(self):
        with tempfile.TemporaryDirectory() as home:
            home = pathlib.Path(home)
            models.small(home / "model")
            unweight.compress(home / "model", home / "bundle", profile="packed")
            bundle = unweight.Bundle(home / "bundle")
            infos, gpu = bundle.tensors(), torch.device("cuda", 0)
            self.assertLessEqual({"raw", "packed"}, {info.encoding for info in infos})
            for info in infos:
                self.assertIsNone(bundle._torch_decoded_on(info, gpu))
            # A GPU without kernels, and one that fails: only tensors with a decoder get there.
            asked = []
            runtime = mock.Mock(side_effect=lambda _: asked.append(1) or self.fail_as_a_gpu())
            with mock.patch.object(torch.cuda, "is_available", lambda: True):
                with mock.patch.object(unweight.ops, "why_not", lambda _: "no kernels"):
                    self.assertEqual([bundle._torch_decoded_on(info, gpu) for info in infos], [None] * len(infos))
                with mock.patch.object(unweight.ops, "why_not", lambda _: None), mock.patch.object(
                    unweight._gpu, "_runtime", runtime
                ):
                    for info in infos:
                        with warnings.catch_warnings(record=True) as caught:
                            warnings.simplefilter("always")
                            self.assertIsNone(bundle._torch_decoded_on(info, gpu))
                        self.assertEqual(len(caught), info.encoding != "raw")
                        for warning in caught:
                            self.assertIn("decoded on the CPU, not on cuda:0: it is gone", str(warning.message))
            self.assertEqual(len(asked), sum(info.encoding != "raw" for info in infos))

    def fail_as_a_gpu(self):
        raise unweight.DeviceError("it is gone")

    def test_tensors_load_without_pinned_memory(self):
        empty, pin_requests = torch.empty, []

        def refused(*shape, pin_memory=False, **kwargs):
            pin_requests.append(pin_memory)
            if pin_memory:
                raise torch.AcceleratorError("CUDA error: out of memory")
            return empty(*shape, **kwargs)

        with tempfile.TemporaryDirectory() as home:
            home = pathlib.Path(home)
            models.small(home / "model")
            unweight.compress(home / "model", home / "bundle", profile="packed")
            bundle = unweight.Bundle(home / "bundle")
            expected = {info: bundle.torch(info.name) for info in bundle.tensors()}
            with mock.patch.object(torch, "empty", refused):
                for info, tensor in expected.items():
                    self.assertTrue(torch.equal(bundle._torch_whole(info, pin=True), tensor), info.name)
        self.assertEqual(pin_requests, [True, False] * len(expected))


if __name__ == "__main__":
    unittest.main()

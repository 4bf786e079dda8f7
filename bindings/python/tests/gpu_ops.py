"""The operator on an NVIDIA GPU: `python -m unittest gpu_ops`. Needs torch; fails without a GPU that has kernels."""

import copy
import gc
import io
import pathlib
import pickle
import tempfile
import threading
import unittest
import warnings

import interrupts
import torch
import unweight
import unweight._embedding
import unweight.ops
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from unweight._gpu import _runtime
from unweight.ops import Experts, Linear, linear, pack, pack_experts, place, unpack

DEVICE = torch.device("cuda", 0)
# The minimum shape, and some of real models. Some batches of the largest use stream-K.
SHAPES = ((64, 64), (192, 320), (1024, 4096), (4096, 4096), (6144, 4096), (4096, 14336))
BATCHES = (
    1,
    2,
    3,
    5,
    8,
    9,
    16,
    31,
    32,
    33,
    64,
    65,
    100,
    127,
    128,
    129,
    256,
    300,
    512,
    1000,
    2048,
    4096,
    4097,
    8192,
    20000,
)


def weights(n: int, k: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed weights, of which one in 1000 is scaled by 2**-20 to be an escape."""
    random = torch.Generator(DEVICE).manual_seed(seed)
    weight = torch.randn(n, k, generator=random, device=DEVICE) * 0.02
    wide = torch.rand(n, k, generator=random, device=DEVICE) < 0.001
    return torch.where(wide, weight * 2.0**-20, weight).to(torch.bfloat16)


def inputs(*shape: int, seed: int = 1) -> torch.Tensor:
    random = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=random, device=DEVICE).to(torch.bfloat16)


# Values outside of every window: zeros, infinities, NaN with a payload, and a subnormal.
SPECIAL = (0x0000, -0x8000, 0x7F80, -0x0080, 0x7FC1, 0x0003)


class Sparse(unittest.TestCase):
    """Elements of packed layers are replaced in place: all bytes equal those of the packed new weight."""

    def made(self, n: int, k: int, seed: int = 0) -> nn.Linear:
        layer = nn.Linear(k, n, bias=False, device="meta")
        layer.weight = nn.Parameter(weights(n, k, seed), requires_grad=False)
        self.assertEqual(unweight.pack_model(layer).kept, {})
        return layer

    def drawn(self, size: int, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator(DEVICE).manual_seed(seed)
        index = (torch.rand(size, generator=random, device=DEVICE) < share).nonzero().view(-1)
        values = weights(1, len(index), seed).view(-1)
        special = torch.tensor(SPECIAL, dtype=torch.int16, device=DEVICE).view(torch.bfloat16)
        at = torch.arange(0, len(index), max(2000, len(index) // 50), device=DEVICE)
        values[at] = special[torch.arange(len(at), device=DEVICE) % len(SPECIAL)]
        return index, values

    def same(self, layer: nn.Linear, expected: torch.Tensor) -> None:
        self.assertTrue(torch.equal(layer.unpacked().view(torch.int16), expected.view(torch.int16)))
        fresh = pack(expected)
        self.assertTrue(torch.equal(layer.weight_packed, fresh.arena))
        self.assertTrue(torch.equal(layer._escapes.data, fresh.escapes.data))

    def test_updates_equal_a_fresh_pack(self):
        for n, k in ((64, 64), (192, 320), (1024, 4096), (4096, 14336)):
            layer, x = self.made(n, k), inputs(5, k)
            expected, in_place = layer.unpacked(), 0
            with torch.no_grad():
                layer(x)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = layer(x)
                for seed, share in enumerate((0.01, 0.0001, 0.2, 0.01, 1.0, 0.003)):
                    with self.subTest(n=n, k=k, share=share):
                        index, values = self.drawn(n * k, share, 10 + seed)
                        expected.view(-1)[index] = values
                        is_valid = layer.update_sparse_(index, values)
                        self.same(layer, expected)
                        in_place += is_valid
                        if is_valid and not expected.isnan().any():
                            graph.replay()
                            torch.cuda.synchronize()
                            self.assertTrue(torch.equal(out, layer(x)))
            # Only small matrices may get another window.
            self.assertTrue(in_place == 6 or n < 1024, in_place)

    def test_any_order_and_the_last_of_equal_positions(self):
        layer = self.made(192, 320)
        expected = layer.unpacked()
        index = torch.randint(192 * 320, (900,), device=DEVICE, dtype=torch.int32)
        index[700:] = index[:200]
        values = weights(1, 900, 5).view(-1)
        for at, value in zip(index.tolist(), values):
            expected.view(-1)[at] = value
        self.assertTrue(layer.update_sparse_(index, values))
        self.same(layer, expected)

    def test_wrong_positions_and_values_change_nothing(self):
        layer = self.made(128, 64)
        expected, one = layer.unpacked(), torch.ones(2, device=DEVICE, dtype=torch.bfloat16)
        for index in ([0, 128 * 64], [-1, 5], [5, 2**40]):
            with self.assertRaises(IndexError):
                layer.update_sparse_(torch.tensor(index), one)
            self.same(layer, expected)
        for bits in (0x7F7F, 0x0000):
            # No exact operand; too many escapes.
            values = torch.full((300,), bits, dtype=torch.int16, device=DEVICE).view(torch.bfloat16)
            with self.assertRaisesRegex(ValueError, "cannot be packed"):
                layer.update_sparse_(torch.arange(300), values)
            self.same(layer, expected)

    def test_another_window_is_packed_again(self):
        layer = self.made(128, 64)
        values = layer.unpacked().view(-1) * 2.0**12
        self.assertFalse(layer.update_sparse_(torch.arange(128 * 64), values))
        self.same(layer, values.view(128, 64))

    def test_values_without_memory_or_with_a_negative_bit(self):
        layer, other = self.made(128, 64, 1), self.made(128, 64, 2)
        expected = other.unpacked()
        # A lazy view, which has no address.
        layer.update_sparse_(torch.arange(128 * 64, device=DEVICE), other.weight.view(-1))
        self.same(layer, expected)
        values = torch._neg_view(weights(1, 40, 3).view(-1))
        expected.view(-1)[:40] = values
        layer.update_sparse_(torch._neg_view(-torch.arange(40, device=DEVICE)), values)
        self.same(layer, expected)
        arena, scratch = layer.weight_packed, torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
        for index, one in ((0, values.data_ptr()), (scratch.data_ptr(), 0)):
            with self.assertRaisesRegex(ValueError, "one begins at address 0; pass plain tensors"):
                _runtime(DEVICE).update([(arena.data_ptr(), index, one, 1)], (scratch.data_ptr(), scratch.nbytes))
        self.same(layer, expected)

    def test_a_position_outside_on_one_device_changes_no_other(self):
        module = nn.ModuleDict({"host": nn.Linear(64, 128, bias=False).bfloat16(), "device": self.made(128, 64)})
        module["host"].weight.data = weights(128, 64, 1).cpu()
        unweight.pack_model(module["host"])
        before, one = module["host"].unpacked(), torch.ones(2).bfloat16()
        updates = {"host.weight": (torch.tensor([0, 1]), one), "device.weight": (torch.tensor([0, 8192]), one)}
        with self.assertRaises(IndexError):
            unweight.update_sparse_(module, updates)
        self.assertTrue(torch.equal(module["host"].unpacked(), before))

    def test_layers_with_equal_weights_share_no_lists(self):
        x, index = inputs(3, 512), torch.arange(0, 1024 * 512, 97, device=DEVICE)
        for update in (
            lambda layer: layer.update_(weights(1024, 512, 22)),
            lambda layer: layer.update_sparse_(index, weights(1, len(index), 23).view(-1)),
        ):
            first, second = self.made(1024, 512, 21), self.made(1024, 512, 21)
            expected = second.unpacked()
            self.assertTrue(update(first))
            self.same(second, expected)
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # A copy, which is registered with the lists that its digest names.
                y = torch.ops.unweight.linear(x, second.weight_packed.clone(), 1024)
                self.assertTrue(torch.equal(y, second(x)))

    def test_layers_are_updated_together(self):
        module = nn.ModuleDict({name: self.made(n, 256, n) for name, n in (("a", 64), ("b", 1024), ("c", 192))})
        expected, updates = {}, {}
        for seed, (name, layer) in enumerate(module.items()):
            updates[f"{name}.weight"] = self.drawn(layer.out_features * 256, 0.02, seed)
            expected[name] = layer.unpacked()
        # One with another window, one in another order.
        updates["a.weight"] = torch.arange(64 * 256, device=DEVICE), expected["a"].view(-1) * 2.0**12
        updates["c.weight"] = tuple(one.flip(0) for one in updates["c.weight"])
        for name in module:
            index, values = updates[f"{name}.weight"]
            expected[name].view(-1)[index] = values
        self.assertFalse(unweight.update_sparse_(module, updates))
        for name, layer in module.items():
            self.same(layer, expected[name])
        # Nothing changes if one position is outside.
        updates["b.weight"] = updates["b.weight"][0] + 1024 * 256, updates["b.weight"][1]
        updates["a.weight"] = updates["a.weight"][0], torch.ones_like(updates["a.weight"][1])
        with self.assertRaises(IndexError):
            unweight.update_sparse_(module, updates)
        for name, layer in module.items():
            self.same(layer, expected[name])


class Embedding(unittest.TestCase):
    def test_rows_are_those_of_the_weight(self):
        op = torch.ops.unweight.embedding
        for n, k in ((64, 64), (1024, 320), (32000, 4096)):
            weight = weights(n, k)
            packed = pack(weight)
            for shape in ((1,), (7,), (3, 50), (4096,), (0,)):
                for dtype in (torch.int32, torch.int64):
                    ids = torch.randint(n, shape, device=DEVICE, dtype=dtype)
                    self.assertTrue(torch.equal(op(ids, packed.arena, n, k), nn.functional.embedding(ids, weight)))
            ids = torch.randint(n, (33,), device=DEVICE)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = op(ids, packed.arena, n, k)
            ids.copy_(torch.arange(33, device=DEVICE))
            graph.replay()
            torch.cuda.synchronize()
            self.assertTrue(torch.equal(out, weight[:33]))

    def test_ids_outside_give_zeros(self):
        weight = weights(128, 64)
        packed = pack(weight)
        got = torch.ops.unweight.embedding(torch.tensor([5, 128, -1, 7], device=DEVICE), packed.arena, 128, 64)
        self.assertTrue(torch.equal(got[[0, 3]], weight[[5, 7]]))
        self.assertEqual(got[1:3].count_nonzero().item(), 0)
        ids = torch.tensor([2**32 + 7, -(2**32) + 9, 2**31, -(2**63), 6], device=DEVICE)
        got = torch.ops.unweight.embedding(ids, packed.arena, 128, 64)
        self.assertEqual(got[:4].count_nonzero().item(), 0)
        self.assertTrue(torch.equal(got[4], weight[6]))


def check_product(case: unittest.TestCase, y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias=None) -> None:
    """Asserts that `y` is the product, up to the order of float32 sums and one rounding. Compares with float64, 512
    rows at a time."""
    case.assertEqual((y.dtype, y.shape), (torch.bfloat16, (*x.shape[:-1], weight.shape[0])))
    k = x.shape[-1]
    w = weight.double()
    for rows, got in zip(x.reshape(-1, k).split(512), y.reshape(-1, weight.shape[0]).split(512)):
        exact = rows.double() @ w.T
        magnitude = rows.double().abs() @ w.abs().T
        if bias is not None:
            exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
        # Half an ulp of BF16, and the error of float32 sums.
        bound = exact.abs() * 2.0**-8 + magnitude * 2.0**-20 + 1e-30
        if isinstance(case, Expanded) and rows.numel() > 0:
            # cuBLAS may round partial sums, so the bound includes the error of torch's own product.
            rounded = nn.functional.linear(rows, weight, bias).double()
            bound = bound + 2 * (rounded - exact).abs().amax()
        wrong = ((got.double() - exact).abs() > bound).sum().item()
        case.assertEqual(wrong, 0, f"{wrong} of {got.numel()} elements, {list(x.shape)} by {list(weight.shape)}")


class Gpu(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if (reason := unweight.ops.why_not(DEVICE)) is not None:
            raise AssertionError(f"these tests need a GPU with kernels: {reason}")

    def setUp(self):
        torch.cuda.synchronize()


class Packing(Gpu):
    def test_packing_equals_the_cpu_and_round_trips(self):
        for n, k in SHAPES[:4]:
            weight = weights(n, k)
            packed, on_cpu = pack(weight), pack(weight.cpu())
            self.assertTrue(torch.equal(unpack(packed.arena).view(torch.int16), weight.view(torch.int16)))
            self.assertTrue(torch.equal(packed.arena.cpu(), on_cpu.arena))
            self.assertTrue(torch.equal(packed.escapes.data.cpu(), on_cpu.escapes.data))

    def test_unpackable_weights_return_none(self):
        self.assertIsNone(pack(weights(100, 64)))
        everything = torch.arange(1 << 16, device=DEVICE, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        self.assertIsNone(pack(everything.view(256, 256)))

    def test_memory_is_freed(self):
        def once():
            pack(weights(4096, 4096))
            gc.collect()
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated()

        once()
        before, free = once(), torch.cuda.mem_get_info()[0]
        for _ in range(5):
            self.assertEqual(once(), before)
        self.assertLess(free - torch.cuda.mem_get_info()[0], 64 << 20)

    def test_strided_weights(self):
        weight = weights(256, 1024)[:, 256:768]
        packed = pack(weight)
        self.assertTrue(torch.equal(unpack(packed.arena), weight))


class Ranks(Gpu):
    """The products of all ranks of tensor parallelism, one after the other on one GPU."""

    BATCHES = (1, 3, 16, 64, 300, 2048)

    def test_rows_of_merged_matrices(self):
        # q, k and v; gate and up. Each rank has its rows of each.
        for k, parts in ((1024, (1024, 512, 512)), (1024, (2048, 2048)), (4096, (4096, 1024, 1024))):
            whole = pack(weights(sum(parts), k, seed=k))
            weight = unpack(whole.arena)
            for ranks in (2, 4, 8):
                slices = [torch.cat([one.chunk(ranks)[rank] for one in weight.split(parts)]) for rank in range(ranks)]
                packed = [pack(one) for one in slices]
                sizes = [one // ranks for one in parts]
                for m in self.BATCHES:
                    x = inputs(m, k, seed=m)
                    products = [linear(x, one).split(sizes, dim=1) for one in packed]
                    y = torch.cat([torch.cat(part, dim=1) for part in zip(*products)], dim=1)
                    check_product(self, y, x, weight)
                    check_product(self, linear(x, whole), x, weight)

    def test_columns(self):
        for n, k in ((1024, 2048), (4096, 14336)):
            whole = pack(weights(n, k, seed=k))
            weight = unpack(whole.arena)
            for ranks in (2, 4, 7):
                if k % (64 * ranks):
                    continue
                packed = [pack(one) for one in weight.chunk(ranks, dim=1)]
                for m in self.BATCHES:
                    x = inputs(m, k, seed=m)
                    products = [linear(part, one).double() for part, one in zip(x.chunk(ranks, dim=1), packed)]
                    exact = x.double() @ weight.double().T
                    magnitude = x.double().abs() @ weight.double().abs().T
                    # Each product is rounded once.
                    bound = sum(one.abs() for one in products) * 2.0**-8 + magnitude * 2.0**-20 + 1e-30
                    self.assertTrue(((sum(products) - exact).abs() <= bound).all(), (n, k, ranks, m))


class Grouped(Gpu):
    """The operator for experts of a mixture."""

    def made(self, experts: int, hidden: int, intermediate: int):
        gate_up = weights(experts * 2 * intermediate, hidden, seed=5).view(experts, 2 * intermediate, hidden)
        down = weights(experts * hidden, intermediate, seed=6).view(experts, hidden, intermediate)
        return gate_up, down, pack_experts(gate_up, down)

    def chosen(self, m: int, top_k: int, experts: int, seed: int):
        random = torch.Generator(DEVICE).manual_seed(seed)
        ids = torch.rand(m, experts, generator=random, device=DEVICE).topk(top_k).indices
        return ids.int(), torch.rand(m, top_k, generator=random, device=DEVICE)

    def output(self, packed, x, ids, share):
        return torch.ops.unweight.experts(x, packed.gate_up, packed.down, ids, share, packed.experts)

    def check_product(self, y, x, gate_up, down, ids, share):
        exact, magnitude = torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(x, dtype=torch.float64)
        for expert in range(len(gate_up)):
            tokens, places = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[tokens].double() @ gate_up[expert].double().T).chunk(2, dim=-1)
            gated = (nn.functional.silu(gate) * up).to(torch.bfloat16).double()
            part = share[tokens, places, None].double()
            exact.index_add_(0, tokens, gated @ down[expert].double().T * part)
            magnitude.index_add_(0, tokens, gated.abs() @ down[expert].double().abs().T * part.abs())
        # Half an ulp of BF16 for the result, for the gated columns, and for the row of each expert.
        bound = exact.abs() * 2.0**-8 + magnitude * 2.0**-8 + 1e-30
        wrong = ((y.double() - exact).abs() > bound).sum().item()
        self.assertEqual((wrong, y.dtype, y.shape), (0, torch.bfloat16, x.shape))
        # The bound is tight enough to detect the output of a wrong expert.
        self.assertGreater((exact.abs() > 4 * bound).double().mean().item(), 0.5)

    def test_products_match_float64(self):
        for experts, hidden, intermediate, top_k in ((4, 128, 64, 2), (64, 512, 192, 8), (8, 1024, 1792, 2)):
            gate_up, down, packed = self.made(experts, hidden, intermediate)
            on_cpu = pack_experts(gate_up.cpu(), down.cpu())
            self.assertTrue(torch.equal(packed.gate_up.cpu(), on_cpu.gate_up))
            self.assertTrue(torch.equal(packed.down.cpu(), on_cpu.down))
            for m in (1, 2, 7, 33, 200, 1000, 4097):
                with self.subTest(experts=experts, hidden=hidden, m=m):
                    x = inputs(m, hidden, seed=m)
                    ids, share = self.chosen(m, top_k, experts, seed=m)
                    self.check_product(self.output(packed, x, ids, share), x, gate_up, down, ids, share)
            none = self.output(packed, inputs(0, hidden), *self.chosen(0, top_k, experts, seed=0))
            self.assertEqual(list(none.shape), [0, hidden])

    def test_experts_of_other_processes_are_skipped(self):
        gate_up, down, packed = self.made(16, 256, 128)
        x = inputs(100, 256)
        ids, share = self.chosen(100, 4, 16, seed=1)
        ids = torch.where(ids % 3 == 0, -1, ids)
        ids[5] = -1
        y = self.output(packed, x, ids, share)
        self.check_product(y, x, gate_up, down, ids, share)
        self.assertEqual(y[5].abs().max().item(), 0)

    def test_results_are_deterministic_also_in_graphs(self):
        _, _, packed = self.made(32, 512, 256)
        x = inputs(64, 512)
        ids, share = self.chosen(64, 4, 32, seed=2)
        first = self.output(packed, x, ids, share)
        for _ in range(2000):
            self.assertTrue(torch.equal(self.output(packed, x, ids, share), first))
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(x)
        with torch.cuda.graph(graph):
            out.copy_(self.output(packed, x, ids, share))
        # A replay uses the current contents of ids and weights.
        for seed in range(20):
            for held, new in zip((ids, share), self.chosen(64, 4, 32, seed=seed)):
                held.copy_(new)
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            self.assertTrue(torch.equal(out, self.output(packed, x, ids, share)))

    def test_experts_are_unregistered_with_their_holder(self):
        _, _, packed = self.made(4, 128, 64)
        arenas = packed.gate_up, packed.down
        x, (ids, share) = inputs(3, 128), self.chosen(3, 2, 4, seed=0)
        del packed
        gc.collect()
        with self.assertRaisesRegex(unweight.UnweightError, "experts are not registered"):
            torch.ops.unweight.experts(x, *arenas, ids, share, 4)

    def test_copies_are_registered(self):
        _, _, packed = self.made(4, 128, 64)
        x, (ids, share) = inputs(3, 128), self.chosen(3, 2, 4, seed=0)
        expected = self.output(packed, x, ids, share)
        saved = io.BytesIO()
        torch.save(packed, saved)
        saved.seek(0)
        copies = copy.deepcopy(packed), torch.load(saved, weights_only=False)
        del packed
        gc.collect()
        for one in copies:
            self.assertTrue(torch.equal(self.output(one, x, ids, share), expected))


class Mixture(Gpu):
    def test_each_expert_has_its_product_before_and_after_a_move(self):
        matrices = torch.stack([weights(256, 320, seed=seed) * 2.0 ** (30 * seed) for seed in range(3)])
        for experts in (Experts.of(matrices), Experts.of(matrices.cpu()).to(DEVICE)):
            for index, weight in enumerate(matrices):
                self.assertTrue(torch.equal(experts.unpacked(index), weight))
                for m in (1, 33, 300):
                    x = inputs(m, 320, seed=m)
                    check_product(self, experts.linear(x, index), x, weight)
        moved = experts.cpu()
        self.assertTrue(torch.equal(moved.unpacked(2), matrices[2].cpu()))


class Operator(Gpu):
    def test_products_are_correct_at_any_batch(self):
        for n, k in SHAPES:
            weight, bias = weights(n, k), inputs(n, seed=2)
            packed = pack(weight)
            for m in BATCHES:
                with self.subTest(n=n, k=k, m=m):
                    x = inputs(m, k, seed=m)
                    y = linear(x, packed)
                    check_product(self, y, x, weight)
                    self.assertTrue(torch.equal(y, linear(x, packed)), "the same bits each time")
                    if m in (1, 64, 300, 8192):
                        check_product(self, linear(x, packed, bias), x, weight, bias)

    def test_operands_of_any_shape_and_stride(self):
        weight = weights(192, 320)
        packed = pack(weight)
        wide = inputs(50, 327)
        for x in (inputs(0, 320), inputs(320), inputs(2, 3, 320), wide[:, :320], wide[:, 7:], inputs(320, 40).t()):
            check_product(self, linear(x, packed), x, weight)
        bias = inputs(192)
        before = bias.clone()
        check_product(self, linear(inputs(1, 320), packed, bias), inputs(1, 320), weight, bias)
        self.assertTrue(torch.equal(bias, before))
        # Not aligned, not contiguous, negated when it is read, for each row, and the same for all features.
        for bias in (inputs(193)[1:], inputs(384)[::2], torch._neg_view(inputs(192)), inputs(300, 192), inputs(1)):
            x = inputs(300, 320)
            expected = bias.resolve_neg().expand(300, 192).contiguous()
            check_product(self, linear(x, packed, bias), x, weight, expected)

    def test_wrong_operands_are_refused(self):
        packed = pack(weights(192, 320))
        op = torch.ops.unweight.linear
        errors = (ValueError, unweight.UnweightError, RuntimeError)
        for message, call in (
            ("x has 328 columns", lambda: op(inputs(1, 328), packed.arena, 192)),
            ("n is 191", lambda: op(inputs(1, 320), packed.arena, 191)),
            ("bfloat16", lambda: op(inputs(1, 320).float(), packed.arena, 192)),
            ("not an arena", lambda: place(torch.zeros(4096, dtype=torch.uint8, device=DEVICE), packed.escapes.data)),
            ("do not belong to this arena|bytes of escapes", lambda: place(packed.arena, packed.escapes.data[:-4])),
        ):
            with self.subTest(message), self.assertRaisesRegex(errors, message):
                call()
        freed = packed.arena
        del packed
        gc.collect()
        for arena in (freed, freed.clone()):
            with self.assertRaisesRegex(unweight.UnweightError, "not registered"):
                op(inputs(1, 320), arena, 192)

    def test_a_copied_arena_works_while_its_escapes_exist(self):
        weight, other = weights(192, 320), weights(192, 320, seed=9)
        packed, packed_other = pack(weight), pack(other)
        op, x = torch.ops.unweight.linear, inputs(33, 320)
        expected = linear(x, packed)
        for _ in range(3):
            with self.assertWarnsRegex(UserWarning, "register it once with unweight.ops.place"):
                self.assertTrue(torch.equal(op(x, packed.arena.clone(), 192), expected))
        self.assertTrue(torch.equal(unpack(packed.arena.clone()), weight))
        # A registration made for one call ends with it, and does not release the escapes of other arenas.
        copied = packed.arena.clone()
        placed = place(copied, packed.escapes.data)
        del packed
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertTrue(torch.equal(op(x, copied, 192), expected))
            self.assertTrue(torch.equal(op(x, packed_other.arena, 192), linear(x, packed_other)))
        self.assertTrue(torch.equal(op(x, placed.arena.clone(), 192), expected))
        graph = torch.cuda.CUDAGraph()
        clone = copied.clone()
        torch.cuda.synchronize()
        with self.assertRaisesRegex(unweight.UnweightError, "capture"), torch.cuda.graph(graph):
            op(x, clone, 192)

    def test_an_arena_registered_twice_stays_registered_until_both_are_freed(self):
        packed, op, x = pack(weights(192, 320)), torch.ops.unweight.linear, inputs(33, 320)
        arena, lists, expected = packed.arena, packed.escapes.data, linear(x, packed)
        with warnings.catch_warnings():
            # If the arena were not registered, the operator would register it as a copy, with a warning.
            warnings.simplefilter("error")
            again = place(arena, lists)
            del again
            gc.collect()
            self.assertTrue(torch.equal(op(x, arena, 192), expected))
            again = place(arena, lists)
            del packed
            gc.collect()
            self.assertTrue(torch.equal(op(x, arena, 192), expected))
            del again
            gc.collect()
            with self.assertRaisesRegex(unweight.UnweightError, "not registered"):
                op(x, arena, 192)

    def test_torch_s_own_checks_of_operators_pass(self):
        packed = pack(weights(192, 320))
        for x in (inputs(4, 320), inputs(2, 3, 320)):
            for bias in (None, inputs(192)):
                result = torch.library.opcheck(torch.ops.unweight.linear.default, (x, packed.arena, packed.n, bias))
                self.assertEqual(set(result.values()), {"SUCCESS"})

    def test_streams_and_threads_are_independent(self):
        weight = weights(4096, 4096)
        packed, failures = pack(weight), []
        torch.cuda.synchronize()

        def run(m: int) -> None:
            try:
                x = inputs(m, 4096, seed=m)
                expected = linear(x, packed)
                torch.cuda.synchronize()
                with torch.cuda.stream(torch.cuda.Stream()):
                    for _ in range(200):
                        if not torch.equal(linear(x, packed), expected):
                            failures.append(m)
                            return
            except Exception as error:
                failures.append((m, error))

        threads = [threading.Thread(target=run, args=(m,)) for m in (1, 8, 129, 300, 1024, 2048)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    def test_graphs_on_side_streams_replay_concurrently(self):
        weight = weights(4096, 4096)
        packed = pack(weight)
        runs = []
        for m in (1, 64, 300, 300, 2048):
            x, stream = inputs(m, 4096, seed=m), torch.cuda.Stream()
            expected = linear(x, packed)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                y = linear(linear(x, packed) * 0 + x, packed)
            runs.append((graph, x, y, expected, torch.cuda.Stream()))
        for _ in range(50):
            for graph, _, _, _, stream in runs:
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for _, x, y, expected, _ in runs:
            self.assertTrue(torch.equal(y, expected), list(x.shape))

    def test_it_compiles_to_one_graph(self):
        layers = nn.Sequential(nn.Linear(512, 1024), nn.SiLU(), nn.Linear(1024, 512, bias=False)).to(
            DEVICE, torch.bfloat16
        )
        for at in (0, 2):
            layers[at].weight.data = weights(*layers[at].weight.shape)
        packed = copy.deepcopy(layers)
        for at in (0, 2):
            packed[at] = Linear(packed[at])
            self.assertTrue(packed[at].pack())
        for mode in (None, "reduce-overhead"):
            torch._dynamo.reset()
            compiled = torch.compile(packed, fullgraph=True, mode=mode)
            with torch.inference_mode():
                for rows in (1, 2, 33, 33, 33):
                    x = inputs(rows, 512, seed=rows)
                    torch.testing.assert_close(compiled(x).clone(), packed(x), atol=2e-2, rtol=2e-2)
                    torch.testing.assert_close(packed(x), layers(x), atol=2e-2, rtol=2e-2)


class Expanded(Operator):
    """The same tests with weights expanded for cuBLAS above batch 64, as GPUs other than Hopper do if it is faster."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.before = unweight._gpu._runtimes
        # An arena is registered with the runtime that packed it, so these tests need new runtimes.
        unweight._gpu._runtimes, unweight._gpu._EXPAND_ABOVE = {}, 64

    @classmethod
    def tearDownClass(cls):
        unweight._gpu._runtimes, unweight._gpu._EXPAND_ABOVE = cls.before, None

    def test_the_scratch_holds_the_weights(self):
        packed = pack(weights(4096, 4096))
        runtime, at = _runtime(DEVICE), packed.arena.data_ptr()
        for m in (65, 5000):
            self.assertGreaterEqual(runtime.scratch_nbytes(at, m, (4096, 4096), False), 2 * 4096 * 4096 + (32 << 20))
        self.assertLess(runtime.scratch_nbytes(at, 64, (4096, 4096), False), 4096 * 4096)


class Seen(TorchDispatchMode):
    """Records the names of dispatched operators."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Module(Gpu):
    def test_layers_move_and_are_copied(self):
        stock = nn.Linear(512, 256).to(torch.bfloat16)
        stock.weight.data = weights(256, 512).cpu()
        packed = Linear(stock)
        self.assertTrue(packed.pack())
        x = inputs(7, 512)
        # Computed before `packed.to` moves the bias, which both layers share.
        on_cpu = stock(x.cpu())
        packed.to(DEVICE)
        expected = packed(x)
        check_product(self, expected, x, stock.weight.to(DEVICE), stock.bias.to(DEVICE))
        self.assertTrue(torch.equal(packed.unpacked().cpu(), stock.weight.cpu()))
        with torch.inference_mode():
            for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
                self.assertTrue(torch.equal(other(x), expected))
            copied = copy.deepcopy(packed)
            del packed
            gc.collect()
            self.assertTrue(torch.equal(copied(x), expected))
            self.assertTrue(torch.equal(copied.to("cpu")(x.cpu()), on_cpu))

    def test_bypassing_the_dispatcher_changes_nothing(self):
        for n, k in SHAPES:
            packed = pack(weights(n, k))
            for rows, bias in ((1, None), (5, inputs(n)), (33, None)):
                x = inputs(rows, k)
                expected = torch.ops.unweight.linear(x, packed.arena, packed.n, bias)
                with torch.no_grad():
                    self.assertTrue(torch.equal(linear(x, packed, bias), expected))
                    self.assertTrue(torch.equal(linear(torch._neg_view(-x), packed, bias), expected))
                    twice = x.expand(2, rows, k)
                    by_name = torch.ops.unweight.linear(twice, packed.arena, packed.n, bias)
                    self.assertTrue(torch.equal(linear(twice, packed, bias), by_name))
                with torch.no_grad(), Seen() as seen:
                    linear(x, packed, bias)
                self.assertIn("unweight.linear.default", seen.names)

    @unittest.skipIf(torch.cuda.device_count() < 2, "one GPU")
    def test_two_gpus(self):
        weight = weights(256, 512)
        packed, second = pack(weight), pack(weight.to("cuda:1"))
        x = inputs(7, 512)
        self.assertTrue(torch.equal(linear(x.to("cuda:1"), second).to(DEVICE), linear(x, packed)))
        self.assertEqual(torch.cuda.current_device(), 0)


class Modules(Gpu):
    """`unweight.pack_model`; `pack_gpu.py` tests it on a large module."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(256, 256)
            # Two shapes, so that arenas of different layers use one address one after another.
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(256, 512 if at % 2 else 256), nn.SiLU(), nn.Linear(512 if at % 2 else 256, 256))
                for at in range(5)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
            return x

    def made(self):
        stock = self.Blocks().to(DEVICE, torch.bfloat16)
        for seed, parameter in enumerate(stock.parameters()):
            if parameter.dim() == 2:
                parameter.data = weights(*parameter.shape, seed=seed)
        return stock

    def test_modules_move_and_are_copied(self):
        stock, x = self.made(), inputs(9, 256)
        module = copy.deepcopy(stock).cpu()
        module.blocks[2][0].weight = module.blocks[0][0].weight
        stock.blocks[2][0].weight.data.copy_(stock.blocks[0][0].weight)
        self.assertEqual(unweight.pack_model(module).kept, {})
        module.to(DEVICE)
        self.assertIs(module.blocks[2][0].weight_packed, module.blocks[0][0].weight_packed)
        with torch.no_grad():
            expected = module(x)
            torch.testing.assert_close(expected, stock(x), atol=3e-2, rtol=3e-2)
            for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.cpu().to(DEVICE)):
                self.assertTrue(torch.equal(other(x), expected))
        for name, value in stock.state_dict().items():
            self.assertTrue(torch.equal(module.state_dict()[name], value), name)

    def test_new_weights_replace_the_old_ones(self):
        module, x = self.made(), inputs(9, 256)
        unweight.pack_model(module, device=DEVICE)
        other = self.made()
        for parameter in other.parameters():
            if parameter.dim() == 2:
                parameter.data = weights(*parameter.shape, seed=77) * 4
        addresses = [layer.weight_packed.data_ptr() for layer in module.modules() if hasattr(layer, "weight_packed")]
        module.load_state_dict(other.state_dict())
        after = [layer.weight_packed.data_ptr() for layer in module.modules() if hasattr(layer, "weight_packed")]
        self.assertEqual(after, addresses)
        fresh = copy.deepcopy(other)
        unweight.pack_model(fresh, device=DEVICE)
        with torch.no_grad():
            self.assertTrue(torch.equal(module(x), fresh(x)))
        for name, value in other.state_dict().items():
            self.assertTrue(torch.equal(module.state_dict()[name], value), name)

    def test_arenas_may_have_other_memory(self):
        # As diffusers' group offloading does: the second layer gets the memory that the first had.
        first, second = nn.Linear(512, 512).to(DEVICE, torch.bfloat16), nn.Linear(512, 512).to(DEVICE, torch.bfloat16)
        first.weight.data, second.weight.data = weights(512, 512), weights(512, 512, seed=3) * 2.0**20
        stock, x = second.weight.detach().clone(), inputs(5, 512)
        unweight.pack_model(module := nn.Sequential(first, second))
        expected = second(x), module(x)
        for _ in range(3):
            on_cpu = [layer.weight_packed.cpu() for layer in module]
            for layer, arena in zip(module, on_cpu):
                layer.weight_packed.data = arena
            self.assertTrue(torch.equal(second.unpacked(), stock.cpu()))
            for layer, arena in zip(module, on_cpu):
                layer.weight_packed.data = arena.to(DEVICE)
            self.assertTrue(torch.equal(second(x), expected[0]))
            self.assertTrue(torch.equal(module(x), expected[1]))
            self.assertTrue(torch.equal(second.unpacked(), stock))
            layer = copy.deepcopy(second)
            second.weight_packed.data, first.weight_packed.data = (
                one.weight_packed.clone() for one in (second, first)
            )
            self.assertTrue(torch.equal(module(x), expected[1]))
            self.assertTrue(torch.equal(layer(x), expected[0]))
        gc.collect()

    def test_graphs_stay_valid_or_say_so(self):
        layer = nn.Linear(1024, 512).to(DEVICE, torch.bfloat16)
        layer.weight.data = weights(512, 1024)
        unweight.pack_model(layer)
        x = inputs(33, 1024)
        with torch.no_grad():
            expected, graph = layer(x), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = layer(x)
            for seed, is_valid in ((1, True), (2, True), (3, False)):
                weight = weights(512, 1024, seed=seed)
                if not is_valid:
                    # Another window, and many more escapes.
                    weight = torch.where(torch.rand_like(weight.float()) < 0.002, weight * 2.0**-60, weight * 2.0**20)
                before = layer.unpacked()
                self.assertEqual(layer.update_(weight), is_valid)
                self.assertTrue(torch.equal(layer.unpacked(), weight))
                self.assertFalse(torch.equal(before, weight))
                fresh = pack(weight)
                self.assertTrue(torch.equal(layer.weight_packed, fresh.arena))
                self.assertTrue(torch.equal(layer(x), linear(x, fresh, layer.bias)))
                if is_valid:
                    graph.replay()
                    torch.cuda.synchronize()
                    self.assertTrue(torch.equal(out, layer(x)))
                    self.assertFalse(torch.equal(out, expected))
            copied = copy.deepcopy(layer)
            self.assertTrue(torch.equal(copied(x), layer(x)))

    def test_an_interrupted_update_leaves_the_old_or_the_new_weights(self):
        layer, x = nn.Linear(256, 128, bias=False).to(DEVICE, torch.bfloat16), inputs(5, 256)
        layer.weight.data = old = weights(128, 256)
        index = torch.arange(128 * 256, device=DEVICE)
        unweight.pack_model(layer)
        with torch.no_grad():
            # The second has another window, and no escapes.
            for is_same, new in ((True, weights(128, 256, seed=1)), (False, old.sign() * 2.0**30)):
                products = [linear(x, pack(weight)) for weight in (old, new)]
                # More escapes; the second `new` leaves no room for any.
                many = new.clone()
                many.view(-1)[::1000] *= 2.0**-60
                of_many = linear(x, pack(many))
                for call in (lambda: layer.update_(new), lambda: layer.update_sparse_(index, new.view(-1))):
                    seen = set()
                    for done in interrupts.everywhere(call):
                        with self.subTest(is_same_window=is_same, done=done):
                            is_new = torch.equal(layer.unpacked(), new)
                            self.assertTrue(is_new or torch.equal(layer.unpacked(), old))
                            self.assertTrue(torch.equal(layer(x), products[is_new]))
                            self.assertTrue(torch.equal(copy.deepcopy(layer)(x), products[is_new]))
                            layer.update_(many)
                            self.assertTrue(torch.equal(layer(x), of_many))
                            self.assertTrue(layer.update_(old) or not is_same)
                            self.assertTrue(torch.equal(layer(x), products[0]))
                        seen.add((is_new, done))
                    self.assertEqual(seen, {(False, False), (True, False), (True, True)})

    def test_compiled_modules_use_new_weights(self):
        module, x = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)), inputs(4, 64)
        module.to(DEVICE, torch.bfloat16)
        for seed, at in enumerate((0, 2)):
            module[at].weight.data = weights(*module[at].weight.shape, seed=seed)
        unweight.pack_model(module)
        index, seeds = torch.arange(0, 64 * 128, 3, device=DEVICE), iter(range(50, 60))
        for mode in (None, "reduce-overhead"):
            torch._dynamo.reset()
            run = torch.compile(module, fullgraph=True, mode=mode)
            with torch.inference_mode():
                for _ in range(3):
                    before = run(x).clone()
                for seed in (next(seeds), next(seeds)):
                    valid = module[0].update_(weights(128, 64, seed=seed))
                    valid &= module[2].update_sparse_(index, weights(1, len(index), seed=seed).view(-1))
                    self.assertTrue(valid)
                    y = run(x).clone()
                    torch.testing.assert_close(y, module(x), atol=2e-2, rtol=2e-2)
                    self.assertFalse(torch.equal(y, before), mode)

    def test_layers_packed_in_inference_mode_are_updated_outside(self):
        with torch.inference_mode():
            layer = nn.Linear(256, 128, bias=False).to(DEVICE, torch.bfloat16)
            layer.weight.data = weights(128, 256)
            unweight.pack_model(layer)
        new = weights(128, 256, seed=9)
        layer.update_(new)
        new.view(-1)[:5] = 0.5
        layer.update_sparse_(torch.arange(5), torch.full((5,), 0.5).bfloat16())
        layer.cpu().to(DEVICE)
        self.assertTrue(torch.equal(layer.unpacked(), new))
        with torch.inference_mode():
            layer.update_(new * 2)
        self.assertTrue(torch.equal(copy.deepcopy(layer).unpacked(), new * 2))

    def test_moves_lose_no_memory(self):
        module, x = self.made(), inputs(5, 256)
        unweight.pack_model(module)
        with torch.no_grad():
            expected, allocated = module(x), None
            for turn in range(6):
                module.cpu()
                gc.collect()
                allocated = allocated or torch.cuda.memory_allocated()
                self.assertEqual(torch.cuda.memory_allocated(), allocated, turn)
                self.assertTrue(torch.equal(module.to(DEVICE)(x), expected))

    def test_arenas_that_are_moved_one_by_one_are_registered(self):
        # As accelerate's hooks do.
        module, x = self.made(), inputs(5, 256)
        module.blocks[2][0].weight = module.blocks[0][0].weight
        unweight.pack_model(module)
        with torch.no_grad():
            expected = module(x)
            module.cpu()
            for part in module.modules():
                for tensors in (part._parameters, part._buffers):
                    for name, tensor in tensors.items():
                        moved = tensor.to(DEVICE)
                        tensors[name] = nn.Parameter(moved, False) if isinstance(tensor, nn.Parameter) else moved
            self.assertTrue(torch.equal(module(x), expected))

    def test_offloaded_blocks_on_threads_and_streams(self):
        module = self.made()
        resident = copy.deepcopy(module)
        unweight.pack_model(resident, device=DEVICE)
        unweight.pack_model(module, device=DEVICE, offload=True)
        streams = [torch.cuda.Stream() for _ in range(2)]
        with torch.no_grad():
            operands = [inputs(33, 256, seed=seed) for seed in (1, 2)]
            expected = [resident(x) for x in operands]
            torch.cuda.synchronize()
            for _ in range(10):
                got = []
                for stream, x in zip(streams, operands):
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(20_000_000)
                        got.append(module(x))
                torch.cuda.synchronize()
                self.assertTrue(all(torch.equal(*pair) for pair in zip(got, expected)))
            raised = []

            def other() -> None:
                try:
                    module(operands[0])
                except RuntimeError as error:
                    raised.append(str(error))

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            self.assertIn("offloaded layers run on one thread, 'MainThread'", raised[0])
            self.assertTrue(torch.equal(module(operands[0]), expected[0]))

    def test_a_weight_shared_with_a_layer_outside_of_the_blocks(self):
        stock, x = self.made(), inputs(5, 256)
        stock.first.weight = stock.blocks[2][0].weight
        module, resident = copy.deepcopy(stock), copy.deepcopy(stock)
        unweight.pack_model(resident)
        unweight.pack_model(module, device=DEVICE, offload=True)
        gc.collect()
        with torch.no_grad():
            self.assertTrue(torch.equal(module(x), resident(x)))
            state = module.state_dict()
            for name, value in stock.state_dict().items():
                self.assertTrue(torch.equal(state[name].to(DEVICE), value), name)
            with self.assertRaisesRegex(NotImplementedError, "'first' shares .* with a layer that is offloaded"):
                module.first.update_(module.first.unpacked())
            self.assertTrue(torch.equal(module(x), resident(x)))

    def test_blocks_that_cannot_be_packed_stay_on_the_gpu(self):
        for odd in (1, 4):
            module, x = self.made(), inputs(5, 256)
            for block in module.blocks[:odd]:
                for layer in block[::2]:
                    # Too many zeros.
                    layer.weight.data.view(-1)[::3] = 0
            resident = copy.deepcopy(module)
            self.assertEqual(len(unweight.pack_model(resident, device=DEVICE).kept), 2 * odd)
            self.assertEqual(len(unweight.pack_model(module, device=DEVICE, offload=True).kept), 2 * odd)
            with torch.no_grad():
                for _ in range(2):
                    self.assertTrue(torch.equal(module(x), resident(x)))
        module.blocks = module.blocks[:1]
        with self.assertRaisesRegex(ValueError, "but the module has 1; omit offload"):
            unweight.pack_model(module, device=DEVICE, offload=True)

    def test_offloaded_blocks_give_the_same_bits(self):
        stock = self.made()
        resident, module = copy.deepcopy(stock), copy.deepcopy(stock).cpu()
        unweight.pack_model(resident, device=DEVICE)
        self.assertEqual(unweight.pack_model(module, device=DEVICE, offload=True).kept, {})
        with torch.no_grad():
            for rows in (1, 9, 300, 1, 9, 300):
                x = inputs(rows, 256, seed=rows)
                self.assertTrue(torch.equal(module(x), resident(x)))
            for at in (3, 0, 4, 4, 1, 3, 2, 0):
                self.assertTrue(torch.equal(module.blocks[at](x), resident.blocks[at](x)))
            for name, value in stock.state_dict().items():
                self.assertTrue(torch.equal(module.state_dict()[name].to(DEVICE), value), name)
            self.assertTrue(torch.equal(module.blocks[3][0].weight.clone(), stock.blocks[3][0].weight))
            graph = torch.cuda.CUDAGraph()
            with self.assertRaisesRegex(RuntimeError, "cannot be captured"), torch.cuda.graph(graph):
                module(x)


class Bundles(Gpu):
    """Tensors of bundles that are decoded on the GPU."""

    DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)

    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.home = pathlib.Path(folder.name)
        from safetensors.torch import save_file

        (self.home / "model").mkdir()
        # Shapes of whole tiles and others.
        self.tensors = {
            f"model.layers.{index}.mlp.{str(dtype).removeprefix('torch.')}_{n}.weight": weights(n, k, seed=index)
            .mul(20)
            .to(dtype)
            .cpu()
            for index, dtype in enumerate(self.DTYPES)
            for n, k in ((512, 1024), (333, 200))
        }
        save_file(self.tensors, self.home / "model/model.safetensors")

    def test_tensors_have_the_bits_of_the_model(self):
        encodings = set()
        for profile in ("distribution", "packed", "compact", "archive"):
            unweight.compress(self.home / "model", self.home / profile, profile=profile, scope="all")
            bundle = unweight.Bundle(self.home / profile)
            for name, expected in self.tensors.items():
                info = bundle.info(name)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    got, decoded = bundle.torch(name, device="cuda"), bundle._torch_decoded_on(info, DEVICE)
                self.assertEqual((got.dtype, got.shape, got.device), (expected.dtype, expected.shape, DEVICE))
                self.assertTrue(torch.equal(got.cpu().view(torch.uint8), expected.view(torch.uint8)), (profile, name))
                is_decoded = info.encoding in unweight._bundle._GPU_ENCODINGS
                self.assertEqual(decoded is not None, is_decoded, (name, info.encoding))
                encodings |= {(info.encoding, info.dtype)} if is_decoded else set()
        expected = {("exponents", dtype) for dtype in ("F16", "F32", "F8_E4M3", "F8_E5M2")}
        expected |= {(encoding, "BF16") for encoding in ("huffman", "packed", "compact")}
        self.assertEqual(encodings, expected)

    def test_damage_is_found(self):
        unweight.compress(self.home / "model", self.home / "bundle", scope="all")
        name = next(name for name in self.tensors if ".float16_" in name)
        self.assertEqual(unweight.Bundle(self.home / "bundle").info(name).encoding, "exponents")
        shard = self.home / "bundle/model.safetensors"
        data = bytearray(shard.read_bytes())
        for at in range(len(data) // 8, len(data), len(data) // 8):
            data[at] ^= 1
        shard.write_bytes(data)
        with self.assertRaises(unweight.DamagedError):
            bundle = unweight.Bundle(self.home / "bundle")
            for name in self.tensors:
                bundle.torch(name, device="cuda")


if __name__ == "__main__":
    unittest.main()

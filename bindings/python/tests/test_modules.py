"""Tests of `unweight.pack_model` and of CPU offload. Needs torch."""

import copy
import gc
import io
import pickle
import sys
import unittest
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import interrupts
import torch
import unweight
from torch import nn
from torch.nn.utils import parametrize
from unweight import modules
from unweight._offload import Offload, blocks_of, require_two
from unweight.modules import PackedLinear, PackedWeight
from unweight.ops import Linear


class Wrapper(torch.Tensor):
    """A tensor whose contents are elsewhere, as those of a DTensor."""

    @staticmethod
    def __new__(cls, like: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return args[0]


def drawn(module: nn.Module, seed: int = 0) -> nn.Module:
    """Converts a module to BF16 with normally distributed weights."""
    chance = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=chance).mul(0.05).to(torch.bfloat16)
    return module.eval()


def inputs(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


class Block(nn.Module):
    """A block of a transformer with a gated MLP and a modulation, as in diffusion transformers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 3 * width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.modulation(condition)[:, None].chunk(3, dim=-1)
        normed = self.norm(x) * (1 + scale) + shift
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + gate * self.down(nn.functional.gelu(self.up(x), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(64, 64), nn.Linear(64, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.single = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, condition)
        for block in self.single:
            x = x + block(x)
        return self.out(x)


def is_packed(part: nn.Module) -> bool:
    return isinstance(part, PackedLinear)


def is_linear(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear)


class Case(unittest.TestCase):
    def same(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        self.assertEqual((got.dtype, got.shape), (expected.dtype, expected.shape))
        self.assertTrue(torch.equal(got.contiguous().view(torch.int16), expected.contiguous().view(torch.int16)))

    def check_outputs(self, module: nn.Module, stock: nn.Module, *operands: torch.Tensor) -> None:
        with torch.inference_mode():
            self.same(module(*operands), stock(*operands))


class Packing(Case):
    def test_a_transformer_gives_the_same_bits_in_less_memory(self):
        stock = drawn(Transformer())
        module = copy.deepcopy(stock)
        report = unweight.pack_model(module)
        operands = inputs(2, 5, 64), inputs(2, 64, seed=2)
        self.check_outputs(module, stock, *operands)
        projections = [f"blocks.{at}.attention.out_proj" for at in range(3)]
        self.assertEqual(list(report.kept), ["out", *projections])
        self.assertIn("multiple of 64", report.kept["out"])
        self.assertIn("fused kernel", report.kept[projections[0]])
        linears = [name for name, part in stock.named_modules() if isinstance(part, nn.Linear)]
        self.assertEqual([layer.name for layer in report.layers], linears)
        for layer in report.layers:
            weight = stock.get_submodule(layer.name).weight
            self.assertEqual(layer.bytes_before, weight.nbytes)
            self.assertTrue(layer.reason or layer.bytes_after < 0.82 * layer.bytes_before, layer)
        before = sum(parameter.nbytes for parameter in stock.parameters())
        saved = sum(layer.bytes_before - layer.bytes_after for layer in report.layers)
        self.assertEqual((report.bytes_before, report.bytes_after), (before, before - saved))
        self.assertEqual(str(report).split(";")[0], f"{len(linears) - 4} layers packed, 4 kept")
        self.assertFalse(any(parameter.requires_grad for parameter in module.parameters()))
        again = unweight.pack_model(module)
        self.assertEqual((again.packed, again.bytes_before), ([], again.bytes_after))
        self.assertEqual(set(again.kept.values()), {"it is packed already", *report.kept.values()})
        self.check_outputs(module, stock, *operands)

    def test_experts_that_are_parameters_are_reported(self):
        class SomeExperts(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate_up_proj = nn.Parameter(torch.zeros(4, 128, 64, dtype=torch.bfloat16))
                self.down_proj_bias = nn.Parameter(torch.zeros(4, 64, dtype=torch.bfloat16))

        module = nn.Sequential(drawn(nn.Linear(64, 64)), SomeExperts(), SomeExperts().float())
        report = unweight.pack_model(module)
        self.assertEqual((report.packed, list(report.kept)), (["0"], ["1"]))
        self.assertIn("UnweightConfig packs most layouts", report.kept["1"])
        self.assertEqual([(one.bytes_before, one.bytes_after) for one in report.layers][1:], [(65536, 65536)])
        self.assertRegex(str(report), r"^1 layers packed, 1 kept; 0\.\d\d MiB before, 0\.\d\d MiB after$")

    def test_the_weights_are_freed(self):
        module = drawn(nn.Sequential(nn.Linear(64, 128)))
        weight = weakref.ref(module[0].weight)
        unweight.pack_model(module)
        gc.collect()
        self.assertIsNone(weight())

    def test_a_layer_stays_the_same_object(self):
        module = drawn(nn.Sequential(nn.Linear(64, 128)))
        layer, calls, stock = module[0], [], copy.deepcopy(module)
        layer.register_forward_pre_hook(lambda _, operands: calls.append("before"))
        layer.register_forward_hook(lambda *_: calls.append("after"))
        unweight.pack_model(module)
        self.assertIs(module[0], layer)
        self.assertIsInstance(layer, nn.Linear)
        self.assertEqual((layer.in_features, layer.out_features, type(layer)), (64, 128, PackedLinear))
        self.assertIn("bias=True, packed", repr(layer))
        self.check_outputs(module, stock, inputs(3, 64))
        self.assertEqual(calls, ["before", "after"])
        # The module itself may be a layer.
        self.assertEqual(unweight.pack_model(drawn(nn.Linear(64, 64))).packed, [""])

    def test_layers_that_share_a_weight_are_packed_once(self):
        module = drawn(nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64, bias=False)}))
        module["b"].weight = module["a"].weight
        module["same"] = module["a"]
        stock = copy.deepcopy(module)
        report = unweight.pack_model(module)
        self.assertEqual(report.packed, ["a", "b"])
        self.assertEqual((report.layers[1].bytes_before, report.layers[1].bytes_after), (0, 0))
        for other in (module, copy.deepcopy(module).to("cpu"), module.to(torch.bfloat16)):
            self.assertIs(other["a"].weight_packed, other["b"].weight_packed)
            for name in module:
                self.check_outputs(other[name], stock[name], inputs(3, 64))

    def test_layers_that_share_a_weight_with_an_excluded_one_stay(self):
        module = drawn(nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64), "c": nn.Linear(64, 64)}))
        module["b"].weight = module["a"].weight
        report = unweight.pack_model(module, exclude=(name for name in ["b"]))
        self.assertEqual(report.packed, ["c"])
        self.assertEqual(report.kept["a"], "it shares its weight with 'b', which is excluded")
        self.assertIs(module["a"].weight, module["b"].weight)

    def test_a_weight_shared_with_an_embedding_stays(self):
        module = nn.ModuleDict({"embed": nn.Embedding(128, 64), "head": nn.Linear(64, 128, bias=False)})
        module = drawn(module)
        module["head"].weight = module["embed"].weight
        report = unweight.pack_model(module)
        self.assertEqual(
            report.kept, {"head": "it shares its weight with 'embed', which is not a linear layer"}
        )
        self.assertIs(module["head"].weight, module["embed"].weight)

    def test_what_cannot_be_packed_stays_and_is_reported(self):
        class Quantized(nn.Parameter):
            pass

        module = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("normed", "parametrized", "wide", "own", "skip")})
        module = drawn(module)
        module["single"] = nn.Linear(64, 64)
        module["meta"] = nn.Linear(64, 64, device="meta", dtype=torch.bfloat16)
        module["lazy"] = nn.LazyLinear(64)
        torch.nn.utils.parametrizations.weight_norm(module["normed"])
        parametrize.register_parametrization(module["parametrized"], "weight", nn.Tanh())
        everything = torch.arange(64 * 64, dtype=torch.int32).mul(7919).to(torch.int16).view(torch.bfloat16)
        module["wide"].weight.data = everything.view(64, 64)
        module["own"].weight = Quantized(module["own"].weight.data, requires_grad=False)
        report = unweight.pack_model(module, exclude=["sk*"])
        self.assertEqual(report.packed, [])
        self.assertEqual(report.bytes_before, report.bytes_after)
        for name, says in {
            "normed": "computed from other parameters",
            "parametrized": "computed from other parameters",
            "wide": "% of the elements lie outside",
            "own": "its weight is a Quantized",
            "skip": "excluded",
            "single": "its weight is float32, not bfloat16",
            "meta": "its weight is on the meta device",
            "lazy": "its weight is a UninitializedParameter",
        }.items():
            self.assertIn(says, report.kept[name], name)
            self.assertNotIsInstance(module[name], PackedLinear)
        with self.assertRaisesRegex(TypeError, r"exclude is a string; give a list of patterns: \['sk\*'\]"):
            unweight.pack_model(module, exclude="sk*")
        with self.assertRaisesRegex(TypeError, "packs an nn.Module, got a dict; of a pipeline, pass a part"):
            unweight.pack_model({"transformer": module})
        with self.assertRaisesRegex(ValueError, "not on meta; omit device"):
            unweight.pack_model(module, device="meta")

    def test_non_contiguous_weights_are_packed(self):
        module = drawn(nn.Linear(128, 64))
        module.weight = nn.Parameter(inputs(128, 128, seed=5).t()[:64])
        self.assertFalse(module.weight.is_contiguous())
        stock = copy.deepcopy(module)
        unweight.pack_model(module)
        self.check_outputs(module, stock, inputs(3, 128))

    def test_subclasses_keep_their_forward(self):
        class Scaled(nn.Linear):
            factor = 3

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * self.factor

        class Transposed(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x @ self.weight.t() + self.bias

        for kind in (Scaled, Transposed):
            module = drawn(nn.Sequential(kind(64, 128)))
            stock = copy.deepcopy(module)
            self.assertEqual(unweight.pack_model(module).packed, ["0"])
            self.assertIsInstance(module[0], kind)
            self.assertEqual(type(module[0]).__name__, f"Packed{kind.__name__}")
            for other in (module, copy.deepcopy(module)):
                self.check_outputs(other, stock, inputs(3, 64))

    def test_packing_under_a_replaced_forward(self):
        # As accelerate's hooks: the bound forward of the BF16 layer is called later.
        module = drawn(nn.Linear(64, 128))
        stock = copy.deepcopy(module)
        before, products = module.forward, []
        module.forward = lambda x: before(x)
        unweight.pack_model(module)
        multiply = module._multiply
        module.__dict__["_multiply"] = lambda x, bias: products.append(x.shape) or multiply(x, bias)
        self.check_outputs(module, stock, inputs(3, 64))
        # F.linear has used the operator, and has not unpacked the weight.
        self.assertEqual(products, [(3, 64)])

    def test_a_layer_whose_attributes_disagree_with_its_weight_stays(self):
        module = drawn(nn.Linear(128, 256, bias=False))
        # As cutting a vocabulary does.
        module.weight = nn.Parameter(module.weight.detach()[:128])
        stock = copy.deepcopy(module)
        report = unweight.pack_model(module)
        self.assertEqual(report.kept, {"": "its weight is [128, 128], but the layer is [256, 128]"})
        self.check_outputs(module, stock, inputs(3, 128))

    def test_arenas_are_no_parameters(self):
        module = drawn(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64, bias=False)))
        unweight.pack_model(module)
        self.assertEqual([(name, one.dtype) for name, one in module.named_parameters()], [("0.bias", torch.bfloat16)])
        self.assertEqual([name for name, _ in module.named_buffers()], ["0.weight_packed", "1.weight_packed"])
        self.assertEqual(list(module.state_dict()), ["0.weight", "0.bias", "1.weight"])

    def test_what_cannot_be_done_changes_nothing(self):
        class Closed(nn.Linear):
            def __init_subclass__(cls) -> None:
                raise RuntimeError("this class is closed")

        module = drawn(nn.ModuleDict({"a": nn.Linear(64, 64), "closed": Closed(64, 64)}))
        report = unweight.pack_model(module)
        self.assertEqual(report.packed, ["a"])
        self.assertEqual(report.kept, {"closed": "its class cannot be changed: this class is closed"})
        module = drawn(nn.Sequential(nn.Linear(64, 64)))
        module.append(nn.Linear(64, 64, device="meta", dtype=torch.bfloat16))
        with self.assertRaisesRegex(ValueError, "'1.weight' is on the meta device and cannot be moved to cpu: load it"):
            unweight.pack_model(module, device="cpu")
        self.assertIs(type(module[0]), nn.Linear)

    def test_excluded_layers_are_named(self):
        shared = nn.Linear(64, 64)
        module = drawn(nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(64, 64)}))
        # Each of the names of a layer.
        self.assertEqual(unweight.pack_model(module, exclude=["b"]).kept, {"a": "excluded"})
        with self.assertWarnsRegex(UserWarning, "exclude='blocks.*' is the name of no linear layer"):
            unweight.pack_model(module, exclude=["a", "blocks.*"])

    def test_training_is_refused(self):
        module = drawn(nn.Linear(64, 64))
        unweight.pack_model(module)
        y = module(inputs(3, 64).requires_grad_())
        with self.assertRaisesRegex(NotImplementedError, "no backward: they cannot be trained"):
            y.float().sum().backward()


class Weight(Case):
    def setUp(self):
        self.layer = drawn(nn.Linear(128, 64))
        self.stock = copy.deepcopy(self.layer)
        unweight.pack_model(self.layer)

    def test_it_is_read_when_it_is_used(self):
        weight, expected = self.layer.weight, self.stock.weight.detach()
        self.assertIsInstance(weight, PackedWeight)
        self.assertEqual((weight.shape, weight.dtype, weight.device), (expected.shape, expected.dtype, expected.device))
        self.assertEqual((weight.data_ptr(), weight.requires_grad), (0, False))
        self.same(weight.clone(), expected)
        self.same(weight + 1, expected + 1)
        self.same(weight.t().contiguous(), expected.t().contiguous())
        x = inputs(3, 128)
        self.same(nn.functional.linear(x, weight), nn.functional.linear(x, expected))
        self.same(nn.functional.linear(expected[:5], weight), nn.functional.linear(expected[:5], expected))
        self.same(nn.functional.linear(weight, weight), nn.functional.linear(expected, expected))
        self.same(x @ weight.t(), x @ expected.t())

    def test_it_cannot_be_changed_in_place(self):
        for change in (
            lambda: self.layer.weight.zero_(),
            lambda: nn.init.normal_(self.layer.weight),
            lambda: self.layer.reset_parameters(),
            lambda: setattr(self.layer.weight, "data", self.stock.weight),
        ):
            with self.assertRaisesRegex(NotImplementedError, "weight of this layer is packed, and cannot be changed"):
                change()
        for new in (nn.Parameter(self.stock.weight.detach()), self.stock.weight.detach()):
            with self.assertRaisesRegex(AttributeError, "is packed; replace it with update_"):
                self.layer.weight = new
        self.check_outputs(self.layer, self.stock, inputs(3, 128))

    def test_collectives_do_not_lose_what_they_write(self):
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.addCleanup(torch.distributed.destroy_process_group)
        new = torch.ones_like(self.stock.weight)
        for write in (
            lambda: torch.distributed.broadcast(self.layer.weight, src=0),
            lambda: torch.distributed.scatter(self.layer.weight, [new], src=0),
            lambda: torch.distributed.all_gather_into_tensor(self.layer.weight, new),
        ):
            with self.assertRaisesRegex(NotImplementedError, "weight of this layer is packed, and cannot be changed"):
                write()

    def test_update_replaces_it(self):
        other = drawn(nn.Linear(128, 64), seed=9)
        # More weights outside of the window than before, so the escape lists grow.
        other.weight.data.view(-1)[::300] = 2.0**-60
        address = self.layer.weight_packed.data_ptr()
        self.assertTrue(self.layer.update_(other.weight))
        self.assertEqual(self.layer.weight_packed.data_ptr(), address)
        self.same(self.layer.unpacked(), other.weight.detach())
        for wrong, says in (
            (torch.full((64, 128), torch.nan, dtype=torch.bfloat16), "be packed: 100.00 %.*keeps its old weight"),
            (other.weight[:32], r"is bfloat16 \[64, 128\], got torch.bfloat16 \[32, 128\]"),
            (other.weight.float(), "is bfloat16 .* got torch.float32"),
        ):
            with self.assertRaisesRegex(ValueError, says):
                self.layer.update_(wrong)
        gc.collect()
        self.same(self.layer.unpacked(), other.weight.detach())

    def test_sparse_values_replace_elements(self):
        expected, index = self.stock.weight.detach().clone(), torch.tensor([5, 8191, 0, 77], dtype=torch.int32)
        values = torch.tensor([1.5, -0.25, 2.0**-60, 3e-5]).bfloat16()
        expected.view(-1)[index.long()] = values
        self.assertTrue(self.layer.update_sparse_(index, values))
        self.same(self.layer.unpacked(), expected)
        self.assertTrue(self.layer.update_sparse_(index[:0], values[:0]))
        for wrong, error in (
            ((index, values[:3]), ValueError),
            ((index.float(), values), ValueError),
            ((index, values.float()), ValueError),
            ((index.view(2, 2), values.view(2, 2)), ValueError),
            ((torch.tensor([0, 8192]), values[:2]), IndexError),
            ((torch.tensor([-1, 3]), values[:2]), IndexError),
            ((torch.arange(8192), torch.full((8192,), torch.nan).bfloat16()), ValueError),
        ):
            with self.assertRaises(error):
                self.layer.update_sparse_(*wrong)
        self.same(self.layer.unpacked(), expected)

    def test_the_last_value_of_a_repeated_position_counts(self):
        expected, index = self.stock.weight.detach().clone(), torch.tensor([9, 3, 9, 8000, 3, 9])
        values = torch.tensor([1.0, -0.0, 3.0, torch.nan, 0.5, -2.0]).bfloat16()
        for at, value in zip(index.tolist(), values):
            expected.view(-1)[at] = value
        self.assertTrue(self.layer.update_sparse_(index, values))
        self.same(self.layer.unpacked(), expected)

    def test_weights_of_a_module_are_updated_together(self):
        module = drawn(nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 128), "odd": nn.Linear(65, 3)}))
        stock = copy.deepcopy(module)
        unweight.pack_model(module)
        updates = {}
        for seed, (name, weight) in enumerate(stock.named_parameters()):
            index = torch.randperm(weight.numel())[: max(1, weight.numel() // 10)]
            updates[name] = index, inputs(1, len(index), seed=seed)[0]
            weight.data.view(-1)[index] = updates[name][1]
        self.assertTrue(unweight.update_sparse_(module, updates))
        state = module.state_dict()
        for name, weight in stock.state_dict().items():
            self.same(state[name], weight)
        index, values = updates["a.weight"]
        for wrong, error in (
            ({"c.weight": (index, values)}, KeyError),
            ({"a.scale": (index, values)}, KeyError),
            ({"a.weight": (index, values[1:])}, ValueError),
            ({"a.bias": (index, values.float())}, ValueError),
            ({"odd.bias": (torch.tensor([0.0]), values[:1])}, ValueError),
            ({"odd.bias": (torch.tensor([True]), values[:1])}, ValueError),
            ({"odd.bias": (torch.tensor([3]), values[:1])}, IndexError),
            ({"odd.bias": (torch.tensor([-1]), values[:1])}, IndexError),
            ({"a.weight_packed": (index, values.to(torch.uint8))}, KeyError),
            ({"b.weight": (index + 8192, values)}, IndexError),
        ):
            # Nothing changes, also in the layers that are named before.
            with self.assertRaises(error):
                unweight.update_sparse_(module, {"a.weight": (index, values + 1)} | wrong)
            for name, weight in stock.state_dict().items():
                self.same(module.state_dict()[name], weight)
        unweight.update_sparse_(module, {"odd.bias": (torch.tensor([2, 2]), torch.tensor([5.0, 7.0]).bfloat16())})
        self.assertEqual(module["odd"].bias[2].item(), 7.0)
        module["b"].weight_packed, module["b"]._held = module["a"].weight_packed, module["a"]._held
        with self.assertRaisesRegex(ValueError, "'b.weight' shares its weight with another layer"):
            unweight.update_sparse_(module, {"a.weight": (index, values), "b.weight": (index, values)})

    def test_operands_are_checked_and_read(self):
        index, values = torch.arange(4), torch.ones(4).bfloat16()
        for wrong, error in (
            ((index.to(torch.complex64), values), ValueError),
            (([0, 1], values[:2]), TypeError),
            ((index, [1.0] * 4), TypeError),
            ((index, Wrapper(values)), ValueError),
        ):
            with self.assertRaises(error):
                self.layer.update_sparse_(*wrong)
        with self.assertRaisesRegex(TypeError, "is a tensor, got list"):
            self.layer.update_([1.0])
        other = drawn(nn.Linear(128, 64), seed=3)
        expected = other.weight.detach().clone()
        unweight.pack_model(other)
        # A view of a packed weight has no memory; that of a negation has the values before it.
        self.assertTrue(self.layer.update_sparse_(torch.arange(8192), other.weight.view(-1)))
        self.same(self.layer.unpacked(), expected)
        expected.view(-1)[:4] = -values
        self.assertTrue(self.layer.update_sparse_(torch._neg_view(-index), torch._neg_view(values)))
        self.same(self.layer.unpacked(), expected)

    def test_parameters_that_are_not_contiguous_are_updated(self):
        module = drawn(nn.ModuleDict({"up": nn.Linear(64, 64), "conv": nn.Conv2d(8, 8, 3)}))
        module = module.to(memory_format=torch.channels_last)
        module.small = nn.Parameter(torch.ones(8).to(torch.float8_e4m3fn), requires_grad=False)
        with torch.inference_mode():
            module.made = nn.Parameter(torch.ones(8).bfloat16(), requires_grad=False)
        module.cast = nn.Parameter(torch.ones(1, 4).bfloat16().expand(4, 4), requires_grad=False)
        module.meta = nn.Parameter(torch.ones(8, device="meta").bfloat16(), requires_grad=False)
        expected = {name: one.detach().contiguous().clone() for name, one in module.named_parameters()}
        unweight.pack_model(module)
        index, values = torch.tensor([5, 1, 7]), torch.tensor([1.0, -2.0, 3.0]).bfloat16()
        for refused in ("cast", "meta"):
            with self.assertRaisesRegex(ValueError, f"'{refused}' is a torch.bfloat16 Tensor on .* as a whole"):
                unweight.update_sparse_(module, {"up.weight": (index, values), refused: (index, values)})
            self.same(module["up"].unpacked(), expected["up.weight"])
        names = ("up.weight", "conv.weight", "made", "small")
        updates = {name: (index, values.to(expected[name].dtype)) for name in names}
        self.assertTrue(unweight.update_sparse_(module, updates))
        for name in names:
            bits = torch.uint8 if name == "small" else torch.int16
            expected[name].view(bits).view(-1)[index] = updates[name][1].view(bits)
            got = module["up"].unpacked() if name == "up.weight" else module.get_parameter(name).data
            self.assertTrue(torch.equal(got.contiguous().view(bits), expected[name].view(bits)), name)

    def test_layers_packed_in_inference_mode_are_updated_outside(self):
        layer = drawn(nn.Linear(128, 64))
        with torch.inference_mode():
            unweight.pack_model(layer)
        self.assertTrue(layer.weight_packed.is_inference())
        other = inputs(64, 128, seed=4)
        self.assertTrue(layer.update_(other))
        other.view(-1)[:3] = 2.0
        self.assertTrue(layer.update_sparse_(torch.arange(3), torch.full((3,), 2.0).bfloat16()))
        self.same(layer.unpacked(), other)

    def test_layers_that_share_a_weight_are_updated_together(self):
        module = drawn(nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)}))
        module["b"].weight = module["a"].weight
        unweight.pack_model(module)
        other = inputs(64, 64, seed=4)
        other.view(-1)[::300] = 2.0**-60
        module["a"].update_(other)
        gc.collect()
        for name in module:
            self.same(module[name].unpacked(), other)
        copied = copy.deepcopy(module)
        self.same(copied["b"].unpacked(), other)

    def test_other_dtypes_compute_as_before(self):
        x = inputs(3, 128)
        for dtype in (torch.float16, torch.bfloat16):
            for operand in (x, x.float(), x.half()):
                with torch.autocast("cpu", dtype=dtype), torch.inference_mode():
                    y, expected = self.layer(operand), self.stock(operand)
                self.assertEqual(y.dtype, expected.dtype)
                self.assertTrue(torch.equal(y, expected))
        for wrong in (x.float(), x.double(), x.int()):
            with self.assertRaises(RuntimeError) as stock:
                self.stock(wrong)
            with self.assertRaises(RuntimeError) as packed:
                self.layer(wrong)
            self.assertEqual(str(packed.exception), str(stock.exception))

    def test_it_compiles_to_one_graph(self):
        torch._dynamo.reset()
        compiled = torch.compile(self.layer, fullgraph=True, backend="eager")
        with torch.inference_mode():
            for rows in (1, 2, 7):
                self.same(compiled(inputs(rows, 128)), self.stock(inputs(rows, 128)))


class States(Case):
    def setUp(self):
        self.stock = drawn(Transformer(blocks=1))
        self.module = copy.deepcopy(self.stock)
        unweight.pack_model(self.module)
        self.operands = inputs(2, 5, 64), inputs(2, 64, seed=2)

    def test_the_state_dict_is_that_of_the_bf16_module(self):
        expected, state = self.stock.state_dict(), self.module.state_dict()
        self.assertEqual(list(state), list(expected))
        for name in expected:
            self.same(state[name], expected[name])
        plain = Transformer(blocks=1).to(torch.bfloat16).eval()
        plain.load_state_dict(state)
        self.check_outputs(plain, self.stock, *self.operands)

    def test_loading_a_state_dict_packs_it(self):
        other = drawn(Transformer(blocks=1), seed=7)
        for assign in (False, True):
            module = copy.deepcopy(self.module)
            module.load_state_dict(other.state_dict(), assign=assign)
            self.check_outputs(module, other, *self.operands)
        state = other.state_dict()
        state["embed.weight"] = torch.full_like(state["embed.weight"], torch.nan)
        del state["blocks.0.up.weight"]
        state["embed.surplus"] = state["out.bias"]
        with self.assertRaises(RuntimeError) as refused:
            module.load_state_dict(state)
        for says in ('parameter named "embed.weight".*100.00 %', '"blocks.0.up.weight"', '"embed.surplus"'):
            self.assertRegex(str(refused.exception), says)
        self.assertEqual(module.load_state_dict({}, strict=False).unexpected_keys, [])

    def test_other_dtypes_are_rounded_as_torch_does(self):
        stock, state = self.stock, drawn(Transformer(blocks=1), seed=7).state_dict()
        for dtype in (torch.float32, torch.float16, torch.float64):
            other = {name: tensor.to(dtype).mul(1.001) for name, tensor in state.items()}
            stock.load_state_dict(other)
            self.module.load_state_dict(other)
            self.check_outputs(self.module, stock, *self.operands)
            self.same(self.module.embed.unpacked(), stock.embed.weight.detach())
        # As a parameter that is replaced: a packed one has no other dtype.
        with self.assertRaisesRegex(RuntimeError, 'named "embed.weight": .*is bfloat16 .* got torch.float64'):
            self.module.load_state_dict(other, assign=True)
        with self.assertRaisesRegex(RuntimeError, 'named "embed.weight": expected a tensor, got list'):
            self.module.load_state_dict({**state, "embed.weight": [1.0]})

    def test_tensors_of_a_state_dict_are_copies(self):
        self.module.state_dict()["embed.weight"].zero_()
        self.check_outputs(self.module, self.stock, *self.operands)

    def test_modules_packed_in_inference_mode_load_a_state_dict(self):
        other, module = drawn(Transformer(blocks=1), seed=7), drawn(Transformer(blocks=1))
        with torch.inference_mode():
            unweight.pack_model(module)
        module.load_state_dict(other.state_dict())
        self.check_outputs(module, other, *self.operands)

    def test_new_weights_may_be_lazy_but_have_memory(self):
        other = drawn(Transformer(blocks=1), seed=7)
        module = drawn(Transformer(blocks=1))
        unweight.pack_model(module)
        unweight.pack_model(other)
        layer, new = module.blocks[0].up, other.blocks[0].up
        layer.update_(new.weight)
        self.same(layer.unpacked(), new.unpacked())
        with self.assertRaisesRegex(ValueError, "a Wrapper has no memory of its own; pass a plain tensor"):
            layer.update_(Wrapper(new.unpacked()))

    def test_copies_and_files_are_the_same_module(self):
        file = io.BytesIO()
        torch.save(self.module, file)
        file.seek(0)
        copies = [copy.deepcopy(self.module), torch.load(file, weights_only=False)]
        expected = self.stock.state_dict()
        del self.module
        gc.collect()
        for other in copies:
            self.check_outputs(other, self.stock, *self.operands)
            self.same(other.state_dict()["embed.weight"], expected["embed.weight"])


    def test_copies_by_a_method_of_the_class_are_the_same_module(self):
        class Own(nn.Linear):
            def __deepcopy__(self, memo):
                made = self.__new__(type(self))
                memo[id(self)] = made
                made.__dict__ = copy.deepcopy(self.__dict__, memo)
                return made

        # A parametrization gives its class such a method.
        parametrized = drawn(nn.Linear(64, 128))
        parametrize.register_parametrization(parametrized, "bias", nn.Tanh())
        for layer in (drawn(Own(64, 128)), parametrized):
            stock = copy.deepcopy(layer)
            unweight.pack_model(layer)
            copies = [copy.deepcopy(layer) for _ in range(4)]
            del layer
            gc.collect()
            self.check_outputs(copies[0], stock, inputs(3, 64))
            self.same(copies[1].weight.clone(), stock.weight.detach())
            self.same(copies[2].state_dict()["weight"], stock.weight.detach())
            self.assertTrue(copies[3].update_(stock.weight.detach()))
            again = unweight.pack_model(nn.Sequential(copy.deepcopy(copies[0])))
            self.assertEqual(again.kept, {"0": "it is packed already"})

    def test_arenas_that_are_moved_one_by_one_are_found(self):
        # As accelerate's hooks do: tensors are replaced without `_apply`.
        def moved(layer: nn.Linear) -> None:
            layer._buffers["weight_packed"] = layer._buffers["weight_packed"].clone()

        module = drawn(nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)}))
        module["b"].weight = module["a"].weight
        stock = copy.deepcopy(module)
        unweight.pack_model(module)
        moved(module["b"])
        for name in module:
            self.check_outputs(module[name], stock[name], inputs(3, 64))
        other = inputs(64, 64, seed=4)
        module["b"].update_(other)
        self.same(module["a"].unpacked(), other)


class Interrupts(Case):
    def test_an_interrupted_update_leaves_the_old_or_the_new_weights(self):
        random = torch.Generator().manual_seed(1)
        module = drawn(nn.Sequential(nn.Linear(64, 64, bias=False)))
        unweight.pack_model(module)
        layer, seen = module[0], set()
        old, new = (torch.randn(64, 64, generator=random).bfloat16() for _ in range(2))
        # Escapes.
        old[0, 0], new[0, 0], new[0, 1] = -(2.0**-60), 2.0**-60, torch.nan
        index = torch.arange(64 * 64)
        for call in (lambda: layer.update_(new), lambda: layer.update_sparse_(index, new.view(-1))):
            layer.update_(old)
            for done in interrupts.everywhere(call):
                bits = layer.unpacked().view(torch.int16)
                is_new = torch.equal(bits, new.view(torch.int16))
                self.assertTrue(is_new or torch.equal(bits, old.view(torch.int16)))
                for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
                    self.assertTrue(torch.equal(copied.unpacked().view(torch.int16), bits))
                seen.add((is_new, done))
                layer.update_(old)
        self.assertEqual(seen, {(False, False), (True, False), (True, True)})


    def test_interrupted_packing_leaves_layers_that_work_and_can_be_packed(self):
        stock, x = drawn(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))), inputs(2, 64)
        expected, made = stock(x), []

        def pack_model() -> None:
            made.append(copy.deepcopy(stock))
            unweight.pack_model(made[-1])

        def pack() -> None:
            made.append(Linear(copy.deepcopy(stock[0])))
            made[-1].pack()

        for call, result in ((pack_model, expected), (pack, stock[0](x))):
            for _ in interrupts.everywhere(call):
                if made:
                    module = made.pop()
                    self.assertTrue(torch.equal(module(x), result))
                    if call is pack_model:
                        unweight.pack_model(module)
                        self.assertEqual(len(unweight.pack_model(module).packed), 0)
                        self.assertTrue(torch.equal(module(x), result))

    def test_interrupted_changes_of_a_class_leave_one_weight(self):
        class Interrupted(nn.Linear):
            after = False

            def __setattr__(self, name: str, value: Any) -> None:
                if name != "__class__" or self.after:
                    super().__setattr__(name, value)
                if name == "__class__":
                    raise KeyboardInterrupt

        kept, packed = (False, ["0.weight", "0.bias"], []), (True, ["0.bias"], ["0.weight_packed"])
        for after, parameters, buffers in (kept, packed):
            module, x = drawn(nn.Sequential(Interrupted(64, 64))), inputs(2, 64)
            expected, Interrupted.after = module(x), after
            with self.assertRaises(KeyboardInterrupt):
                unweight.pack_model(module)
            self.assertEqual([name for name, _ in module.named_parameters()], parameters)
            self.assertEqual([name for name, _ in module.named_buffers()], buffers)
            self.assertEqual(isinstance(module[0], PackedLinear), after)
            self.assertTrue(torch.equal(module(x), expected))

    def test_signal_handlers_may_copy_layers(self):
        module, x = drawn(nn.Sequential(nn.Linear(64, 64))), inputs(2, 64)
        unweight.pack_model(module)
        other, copied = drawn(nn.Sequential(nn.Linear(64, 64)), 5), []

        def trace(frame: Any, *_: Any) -> None:
            # The lock of the escape lists is held here.
            if frame.f_code.co_name == "setdefault" and not copied:
                copied.append(None)
                copied[0] = copy.deepcopy(module)

        sys.settrace(trace)
        try:
            unweight.pack_model(other)
        finally:
            sys.settrace(None)
        self.assertTrue(torch.equal(copied[0](x), module(x)))

    def test_arenas_may_have_other_memory(self):
        module, x = drawn(nn.Sequential(nn.Linear(64, 64))), inputs(2, 64)
        expected = module(x)
        unweight.pack_model(module)
        module[0].weight_packed.data = module[0].weight_packed.data.clone()
        self.assertTrue(torch.equal(module(x), expected))
        self.assertTrue(torch.equal(copy.deepcopy(module)(x), expected))


class LateCopies:
    """Copies as late as an event permits: when they are waited for, or when the slot gets another copy. Until then the
    slot is garbage, so a block that runs too early, or whose slot is overwritten too early, gives an error."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.in_use: set[int] = set()
        self.log: list[str] = []
        self.followed = 0

    def slot(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xA5, dtype=torch.uint8)

    def start(self, source: torch.Tensor, slot: int, to: torch.Tensor) -> None:
        if slot in self.in_use:
            raise AssertionError(f"slot {slot} is overwritten while its block runs")
        to.fill_(0xA5)
        self.pending[slot] = source, to
        self.log.append(f"start {slot}")

    def wait(self, slot: int) -> None:
        if slot in self.pending:
            source, to = self.pending.pop(slot)
            to.copy_(source)
        self.in_use.add(slot)
        self.log.append(f"wait {slot}")

    def release(self, slot: int) -> None:
        self.in_use.discard(slot)

    def follow(self) -> None:
        self.followed += 1


class Offloading(Case):
    def setUp(self):
        self.stock = drawn(Transformer())
        self.module = copy.deepcopy(self.stock)
        unweight.pack_model(self.module)
        self.copies = LateCopies()
        self.blocks = blocks_of(self.module, is_packed)
        self.offload = Offload(self.blocks, self.copies)
        self.operands = inputs(2, 5, 64), inputs(2, 64, seed=2)

    def test_blocks_are_the_elements_of_module_lists(self):
        # 3 blocks of 3 packed layers, 2 of 1; `embed` and `out` stay on the device.
        self.assertEqual([len(layers) for layers in self.blocks], [3, 3, 3, 1, 1])
        self.assertTrue(hasattr(self.module.embed, "weight_packed"))
        self.assertFalse(hasattr(self.module.blocks[0].up, "weight_packed"))
        self.assertEqual(blocks_of(nn.Sequential(nn.Linear(64, 64)), is_linear), [])
        # Offloaded layers are not offloaded again.
        self.assertEqual(blocks_of(self.module, is_packed), [])
        self.assertEqual(len(blocks_of(self.stock, is_linear)), 5)
        require_two(self.blocks)
        with self.assertRaisesRegex(ValueError, "needs two blocks, .* but the module has 1; omit"):
            require_two(self.blocks[:1])

    def test_outputs_are_the_same_and_the_next_block_is_prefetched(self):
        for _ in range(3):
            self.check_outputs(self.module, self.stock, *self.operands)
        # 5 blocks per pass, each fetched once, and one block ahead.
        self.assertEqual(self.copies.log[:5], ["start 0", "wait 0", "start 1", "wait 1", "start 0"])
        starts = [one for one in self.copies.log if one.startswith("start")]
        self.assertEqual((len(starts), len(self.copies.log) - len(starts)), (16, 15))

    def test_blocks_may_run_in_any_order(self):
        with torch.inference_mode():
            for order in ((2, 0, 1), (0, 0, 2), (1, 2, 0), (1, 2, 0)):
                for at in order:
                    self.same(self.module.blocks[at](*self.operands), self.stock.blocks[at](*self.operands))
        # The order of the last pass is predicted: of its three blocks, each is there or on its way.
        before = len(self.copies.log)
        with torch.inference_mode():
            for at in (1, 2, 0):
                self.module.blocks[at](*self.operands)
        starts = [one for one in self.copies.log[before:] if one.startswith("start")]
        self.assertEqual(len(starts), 3)

    def test_weights_are_read_from_cpu_memory(self):
        expected = self.stock.state_dict()
        state = self.module.state_dict()
        self.assertEqual(list(state), list(expected))
        for name in expected:
            self.same(state[name], expected[name])
        self.assertEqual(self.copies.log, [])
        layer = self.module.blocks[1].up
        self.same(layer.weight.clone(), self.stock.blocks[1].up.weight.detach())
        self.module.to(torch.bfloat16)
        self.check_outputs(self.module, self.stock, *self.operands)

    def test_changes_and_copies_are_refused(self):
        layer = self.module.blocks[1].up
        sparse = (torch.tensor([3]), torch.ones(1).bfloat16())
        for change in (
            lambda: layer.update_(layer.unpacked()),
            lambda: layer.update_sparse_(*sparse),
            lambda: copy.deepcopy(self.module),
        ):
            with self.assertRaisesRegex(NotImplementedError, "'blocks.1.up' is offloaded|is offloaded and cannot"):
                change()
        with self.assertRaisesRegex(RuntimeError, "is offloaded: its weight cannot be replaced"):
            self.module.load_state_dict(self.stock.state_dict())

    def test_a_copy_that_does_not_start_is_made_again(self):
        self.check_outputs(self.module, self.stock, *self.operands)
        start, left = self.copies.start, 0

        def fails_once(*operands: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            start(*operands)

        self.copies.start = fails_once
        for nth in range(1, 6):
            left = nth
            with self.assertRaises(KeyboardInterrupt):
                self.module(*self.operands)
            self.copies.in_use.clear()
            self.check_outputs(self.module, self.stock, *self.operands)
            self.check_outputs(self.module, self.stock, *self.operands)

    def test_another_thread_is_refused(self):
        self.check_outputs(self.module, self.stock, *self.operands)
        with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
            with self.assertRaisesRegex(RuntimeError, "on one thread, 'MainThread', but 'other_0' calls them; use a"):
                pool.submit(self.module, *self.operands).result()
            self.same(pool.submit(self.module.blocks[1].up.unpacked).result(), self.stock.blocks[1].up.weight.detach())
        self.check_outputs(self.module, self.stock, *self.operands)
        # The first thread that runs them, until it ends.
        module = copy.deepcopy(self.stock)
        unweight.pack_model(module)
        Offload(blocks_of(module, is_packed), LateCopies())
        with ThreadPoolExecutor(1) as pool, torch.inference_mode():
            pool.submit(module, *self.operands).result()
        self.check_outputs(module, self.stock, *self.operands)

    def test_each_use_follows_the_stream_of_the_last(self):
        self.check_outputs(self.module, self.stock, *self.operands)
        self.assertEqual(self.copies.followed, sum(len(layers) for layers in self.blocks))

    def test_a_weight_shared_with_a_layer_outside_of_the_blocks(self):
        stock = drawn(Transformer())
        stock.embed.weight = stock.single[0][1].weight
        module = copy.deepcopy(stock)
        unweight.pack_model(module)
        Offload(blocks_of(module, is_packed), LateCopies())
        for change in (
            lambda: module.embed.update_(module.embed.unpacked()),
            lambda: module.embed.update_sparse_(torch.tensor([3]), torch.ones(1).bfloat16()),
        ):
            with self.assertRaisesRegex(NotImplementedError, "'embed' shares .* with a layer that is offloaded"):
                change()
        # The escape lists of the offloaded layer are its own.
        module.embed._held.holder = None
        del module.embed._held
        gc.collect()
        self.same(module.single[0][1].unpacked(), stock.single[0][1].weight.detach())

    def test_layers_with_a_copy_method_are_not_copied(self):
        module = nn.Module()
        module.blocks = nn.ModuleList(drawn(nn.Linear(64, 64), seed=at) for at in range(2))
        for layer in module.blocks:
            parametrize.register_parametrization(layer, "bias", nn.Tanh())
        unweight.pack_model(module)
        Offload(blocks_of(module, is_packed), LateCopies())
        with self.assertRaisesRegex(NotImplementedError, "is offloaded and cannot be copied or saved"):
            copy.deepcopy(module)

    def test_blocks_that_cannot_be_packed_do_not_count(self):
        module = nn.Module()
        module.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 65), nn.Linear(64, 64)])
        drawn(module)
        with mock.patch.object(modules, "why_not", lambda _: None):
            for exclude in (["blocks.0"], ["blocks.?"]):
                with self.assertRaisesRegex(ValueError, "layers that can be packed, but the module has [01]; omit"):
                    unweight.pack_model(module, device="cuda:0", exclude=exclude, offload=True)
        self.assertEqual({type(layer) for layer in module.blocks}, {nn.Linear})

    def test_a_gpu_and_two_blocks_are_needed(self):
        for device in (None, "cpu"):
            with self.assertRaisesRegex(ValueError, "offload needs a GPU.*pass device='cuda'"):
                unweight.pack_model(drawn(Transformer()), device=device, offload=True)


if __name__ == "__main__":
    unittest.main()

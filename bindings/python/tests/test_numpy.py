"""Compares numpy arrays of bundles with those of safetensors."""

import pathlib
import sys
import tempfile
import unittest

import models
import numpy
import unweight
from safetensors import safe_open


class Numpy(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        home = pathlib.Path(folder.name)
        self.tensors = models.small(home / "model")
        unweight.compress(home / "model", home / "bundle", profile="packed")
        self.bundle, self.model = unweight.Bundle(home / "bundle"), home / "model"

    def test_bf16_is_returned_as_values_or_bits(self):
        for name in (name for name, (dtype, _, _) in self.tensors.items() if dtype == "BF16"):
            _, shape, data = self.tensors[name]
            bits = self.bundle.numpy(name, bf16="uint16")
            self.assertEqual((bits.dtype, bits.shape, bits.tobytes()), (numpy.uint16, tuple(shape), data))
            values = self.bundle.numpy(name)
            self.assertEqual((values.dtype, values.shape), (numpy.float32, tuple(shape)))
            self.assertTrue(values.flags.writeable and values.flags.c_contiguous)
            widened = numpy.zeros((*shape, 2), numpy.uint16)
            widened[..., 1] = bits
            self.assertEqual(values.tobytes(), widened.tobytes())
        with self.assertRaisesRegex(ValueError, "bf16='half'"):
            self.bundle.numpy("model.norm.weight", bf16="half")

    def test_rows_and_columns_select_a_part(self):
        name = next(name for name, (dtype, shape, _) in self.tensors.items() if dtype == "BF16" and len(shape) == 2)
        whole = self.bundle.numpy(name)
        numpy.testing.assert_array_equal(self.bundle.numpy(name, rows=(1, 5), cols=(2, 9)), whole[1:5, 2:9])
        numpy.testing.assert_array_equal(self.bundle.numpy(name, cols=(0, 1)), whole[:, :1])
        with self.assertRaisesRegex(ValueError, "rows 0..0 are empty or exceed"):
            self.bundle.numpy(name, rows=(0, 0))
        with self.assertRaisesRegex(ValueError, "not a matrix"):
            self.bundle.numpy("model.norm.weight", rows=(0, 1))

    def test_other_dtypes_equal_safetensors(self):
        with safe_open(self.model / "model.safetensors", "numpy") as stock:
            for name in ("scale", "flags"):
                expected, got = stock.get_tensor(name), self.bundle.numpy(name)
                self.assertEqual(got.dtype, expected.dtype)
                numpy.testing.assert_array_equal(got, expected)

    def test_torch_is_not_needed(self):
        self.assertNotIn("torch", sys.modules)


if __name__ == "__main__":
    unittest.main()

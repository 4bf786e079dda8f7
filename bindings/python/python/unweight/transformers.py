"""Bundles and packed weights in transformers: `import unweight.transformers`, then use transformers as usual.

    AutoModelForCausalLM.from_pretrained("bundle")                                          # a bundle, any profile
    AutoModelForCausalLM.from_pretrained("model", quantization_config=UnweightConfig())     # any BF16 model

Both pass the original BF16 weights, tensor by tensor, to transformers, which renames, merges and shards them as usual.
A linear layer, or the experts of a mixture, is packed when its shard is loaded. So renamed and merged tensors work as
without this package, and so does tensor parallelism.

transformers 4 and 5 have different loaders: `_transformers4` and `_transformers5` have the hooks for each, and
`_transformers` what they share.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Optional

from ._extras import refuse_untested, require

require("transformers", "torch", "transformers")

import transformers  # noqa: E402

# The modules below replace private functions of transformers' loader.
refuse_untested("transformers", transformers.__version__)

from transformers.quantizers import register_quantization_config, register_quantizer  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

_major = transformers.__version__.partition(".")[0]
UnweightHfQuantizer = import_module(f"._transformers{_major}", __package__).UnweightHfQuantizer

__all__ = ["UnweightConfig"]


@register_quantization_config("unweight")
class UnweightConfig(QuantizationConfigMixin):
    """The quantization config that packs weights: `quantization_config=UnweightConfig()`.

    It has no options, because packing is lossless. `weights_digest` is for the `config.json` of bundles.
    """

    def __init__(self, weights_digest: Optional[str] = None, **_: Any) -> None:
        self.quant_method = "unweight"
        self.weights_digest = weights_digest
        """The digest of the bundle's weights; `None` for a model that is not a bundle."""


register_quantizer("unweight")(UnweightHfQuantizer)

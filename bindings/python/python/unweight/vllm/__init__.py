"""Bundles and packed weights in vLLM. Installing this package is enough: vLLM finds `register` by its entry point.

    vllm serve BUNDLE                             # a bundle, any profile; LLM("BUNDLE") likewise
    vllm serve MODEL --quantization unweight      # any BF16 model, packed while it loads

Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import logging

__all__ = ["register"]


def register() -> None:
    """Tells vLLM of packed weights and of bundles. vLLM calls it in each of its processes; once more does nothing.

    A vLLM that this package does not know keeps working without it: a warning says so, and vLLM refuses bundles.
    """
    try:
        from ._plugin import install

        install()
    # Whatever it is: models in BF16 are none of our business.
    except Exception as error:
        logging.getLogger("vllm.unweight").warning(
            "unweight does not know this vLLM, and bundles cannot be served (%s); it is tested with vllm 0.26", error
        )

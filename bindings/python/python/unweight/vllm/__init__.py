"""The vLLM plugin for bundles and packed weights. Install this package; vLLM finds `register` by its entry point.

    vllm serve BUNDLE                             # a bundle, any profile; LLM("BUNDLE") likewise
    vllm serve MODEL --quantization unweight      # any BF16 model, packed while it loads

Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import logging

__all__ = ["register"]


def register() -> None:
    """Registers the quantization `unweight` and the loader of bundles. vLLM calls it in each of its processes.

    Further calls do nothing. With an unsupported version of vLLM, it logs a warning and registers nothing: BF16 models
    work as before, and vLLM refuses bundles.
    """
    try:
        from ._plugin import install

        install()
    # No error may stop vLLM from running BF16 models.
    except Exception as error:
        logging.getLogger("vllm.unweight").warning(
            "unweight does not support this vLLM, so bundles cannot be served and no weights are packed: %s", error
        )

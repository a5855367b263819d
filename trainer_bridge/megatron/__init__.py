"""The trainer in Megatron-core: `shapes.py` describes a model, `model.py` builds it, and `weights.py` fills it through
`mapping.py`. `policy.py` is one rank, `worker_group.py` all of them."""

import importlib
import logging
import sys
import warnings

# Megatron-core and torch print ten warnings at their import about packages that are optional, and that this trainer
# does not need. Each filter names one of them; all others are printed.
for _message in (r"(Transformer Engine and )?Apex (is|are) not installed\. Falling back to ",):
    warnings.filterwarnings("ignore", message=_message, module=r"megatron\.core\.")


def _has_cuda_or_another_text(record: logging.LogRecord) -> bool:
    """Whether a record of torch's build tools is worth printing; a CUDA toolkit without a GPU is not."""
    return not record.getMessage().startswith("No CUDA runtime is found")


logging.getLogger("torch.utils.cpp_extension").addFilter(_has_cuda_or_another_text)

# Megatron-core does without `flash_mla` if it is not installed. SGLang 0.5.23 installs it, and without a GPU driver its
# library cannot be loaded, which Megatron-core does not expect.
try:
    importlib.import_module("flash_mla")
except ImportError:
    pass
except OSError:
    sys.modules["flash_mla"] = None  # type: ignore[assignment]

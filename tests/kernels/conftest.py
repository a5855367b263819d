"""The device on which the kernels' cases run."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """CPU memory for Triton's interpreter, else the GPU."""
    return (
        "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else torch.device("cuda", torch.cuda.current_device()).type
    )

"""The live tests compute in float32, so that replays can be compared with them to 1e-4."""

from sglang.srt.layers.utils.multi_platform import MultiPlatformOp


def plain_layers() -> None:
    """On a GPU, let SGLang's layers run in plain torch: its kernels of norms and activations take no float32."""
    MultiPlatformOp.dispatch_forward = lambda layer: layer.forward_native  # type: ignore[method-assign]

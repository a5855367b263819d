"""The trainer's results for the reference sequences, computed by several ranks; run by test_parity."""

import multiprocessing
from pathlib import Path
from typing import Any

import torch

from tests.bridge.reference import sequences

Results = dict[str, dict[str, Any]]


def compute(folders: dict[str, Path], rank: int, world_size: int, init_method: str | None) -> Results:
    """By family: logits, logprobs, gradients by Hugging Face names, and the weights that would be pushed."""
    from megatron.core import tensor_parallel
    from megatron.core.distributed import finalize_model_grads

    from trainer_bridge.megatron import model as models
    from trainer_bridge.megatron.policy import Policy
    from trainer_bridge.trainer import TrainerSettings

    torch.set_num_threads(1)
    results: Results = {}
    for i, (family, folder) in enumerate(folders.items()):
        settings = TrainerSettings(
            hf_checkpoint=folder, dtype="float32", world_size=world_size, tensor_model_parallel_size=world_size
        )
        policy = Policy(settings, rank, None if init_method is None else f"{init_method}-{i}")
        given = sequences()
        logprobs = models.logprobs(policy._ddp, given)
        (-logprobs.mean()).backward()
        finalize_model_grads([policy._ddp])
        with torch.no_grad():
            logits = models.logits(policy.model, given)
            logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
            weights = {name: x.clone() for name, x in policy.hf_tensors()}
            for parameter in policy.model.parameters():
                parameter.copy_(parameter.main_grad)
            gradients = {name: x.clone() for name, x in policy.hf_tensors()}
        results[family] = {
            "logits": logits.numpy(),
            "logprobs": logprobs.detach().numpy(),
            "gradients": {name: x.numpy() for name, x in gradients.items()},
            "weights": {name: x.numpy() for name, x in weights.items()},
        }
        policy.close()
    return results


def _compute_on_rank(queue: Any, *args: Any) -> None:
    queue.put(compute(*args))


def compute_on_ranks(folders: dict[str, Path], world_size: int, rendezvous: Path) -> Results:
    """The results of the rank that finishes first; they are the same on all tensor-parallel ranks."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [
        context.Process(
            target=_compute_on_rank, args=(queue, folders, rank, world_size, f"file://{rendezvous}"), daemon=True
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        return queue.get(timeout=500)
    finally:
        for process in ranks:
            process.join(60)
            process.kill()

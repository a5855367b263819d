"""One rank of the trainer: its shard of the model, its optimiser, and its share of a step."""

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from sglang_april.durable import sync_folder
from trainer_bridge.batch import MicroBatch, Sequences
from trainer_bridge.loss_settings import LossSettings
from trainer_bridge.loss_stats import LossStats
from trainer_bridge.losses import LossTerms, policy_loss
from trainer_bridge.megatron import device as devices
from trainer_bridge.megatron import model as models
from trainer_bridge.megatron import weights
from trainer_bridge.megatron.offload import OffloadManager
from trainer_bridge.megatron.shapes import ModelShape
from trainer_bridge.trainer import PARTS, Part, SequenceStats, StepReport, TrainerSettings

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)


class ProcessGroups:
    """Those of this process."""

    users = 0
    """Policies that use them."""


def init_process_groups(device: torch.device, rank: int, settings: TrainerSettings, init_method: str | None) -> None:
    """Create the process groups of torch and Megatron; `init_method` is the rendezvous of several ranks.

    Trainers of one rank in one process share the groups.
    """
    ProcessGroups.users += 1
    if ProcessGroups.users > 1 and settings.world_size == 1:
        devices.initialize(device, settings.seed)
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if settings.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(
            backend, init_method=init_method, rank=rank, world_size=settings.world_size, timeout=RENDEZVOUS_TIMEOUT
        )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=settings.tensor_model_parallel_size)
    devices.initialize(device, settings.seed)


def destroy_process_groups() -> None:
    """Undo `init_process_groups`, once no policy of this process uses them."""
    ProcessGroups.users -= 1
    if ProcessGroups.users:
        return
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class Policy:
    """The policy on one rank. Methods are collectives: all ranks must call them in the same order."""

    def __init__(self, settings: TrainerSettings, rank: int = 0, init_method: str | None = None) -> None:
        self.settings, self.shape = settings, ModelShape.read(settings.hf_checkpoint)
        self.device = devices.select_device(settings.device, rank)
        init_process_groups(self.device, rank, settings, init_method)
        dtype = getattr(torch, settings.dtype)
        on_cpu, recompute = self.device.type == "cpu", settings.recompute_granularity == "full"
        self.model = models.build_model(self.shape, dtype, on_cpu, recompute).to(self.device)
        weights.load_hf(self.model, self.shape, settings.hf_checkpoint)
        self.steps = 0
        with devices.allocating_on(self.device):
            self._ddp, self._optimizer = self._ddp_and_optimizer(dtype)
        self._offloads = self.device.type == "cuda" if settings.offload == "auto" else settings.offload
        self.offload_manager = OffloadManager(self._ddp, self._optimizer, self.device)

    def _ddp_and_optimizer(self, dtype: torch.dtype) -> tuple[Any, Any]:
        s = self.settings
        module = self.model if dtype is torch.float32 else Float16Module(self.model.config, self.model)
        # Megatron's distributed optimiser: each data-parallel rank has the states of its share of the weights.
        sharded = parallel_state.get_data_parallel_world_size() > 1
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
        ddp = DistributedDataParallel(self.model.config, ddp_config, module)
        config = OptimizerConfig(
            optimizer="adam",
            lr=s.lr,
            weight_decay=s.weight_decay,
            adam_beta1=s.adam_beta1,
            adam_beta2=s.adam_beta2,
            adam_eps=s.adam_eps,
            clip_grad=s.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=sharded,
        )
        return ddp, get_megatron_optimizer(config, [ddp])

    # --- training

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[Sequences]) -> list[Tensor]:
        """log π of the response tokens of each micro-batch, float32 [T] on the CPU."""
        self.onload("weights")
        return [models.logprobs(self._ddp, each.to(self.device)).cpu() for each in sequences]

    def step(self, batches: Sequence[MicroBatch], loss: LossSettings) -> StepReport:
        """One optimiser step over the micro-batches of this data-parallel rank.

        In the report, `sequences` is about these micro-batches; all other fields are about the whole step.
        """
        self.onload(*PARTS)
        started = time.perf_counter()
        ranks = parallel_state.get_data_parallel_world_size()
        stats, sequences, total = LossStats(), list[SequenceStats](), 0.0
        with devices.allocating_on(self.device):
            self._ddp.zero_grad_buffer()
            self._optimizer.zero_grad()
            for batch in batches:
                batch = batch.to(self.device)
                value, terms = policy_loss(models.logprobs(self._ddp, batch.sequences), batch.tokens, loss)
                # Megatron averages gradients over data-parallel ranks, but the loss of a step is a sum.
                (value * ranks).backward()
                total += float(value.detach())
                stats.add(batch.tokens, terms)
                sequences.append(_sequence_stats(batch, terms))
            finalize_model_grads([self._ddp])
            lr = self._set_hyperparameters()
            norm, applied = self._apply_gradients()
        total, stats = self._reduce(total, stats)
        return StepReport(total, norm, applied, lr, stats, sequences, time.perf_counter() - started)

    def _set_hyperparameters(self) -> float:
        """Set those of the next step, of which a loaded checkpoint has the earlier ones. Returns the learning rate."""
        s = self.settings
        lr = s.lr * min(1.0, (self.steps + 1) / max(s.lr_warmup_iters, 1))
        for group in self._optimizer.param_groups:
            # Megatron excludes norms and biases from weight decay by `wd_mult`, which only its scheduler applies.
            group["weight_decay"] = s.weight_decay * group.get("wd_mult", 1.0)
            group["lr"], group["betas"], group["eps"] = lr, (s.adam_beta1, s.adam_beta2), s.adam_eps
        return lr

    def _apply_gradients(self) -> tuple[float, bool]:
        """The gradient norm, and whether the gradients were finite on all ranks and have been applied."""
        finite = torch.stack([buffer.grad_data.isfinite().all() for buffer in self._ddp.buffers]).all().int()
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        if not finite:
            return math.nan, False
        applied, norm, _ = self._optimizer.step()
        self.steps += 1
        return float(norm), bool(applied)

    def _reduce(self, total: float, stats: LossStats) -> tuple[float, LossStats]:
        """Loss and statistics over all data-parallel ranks."""
        ranks = parallel_state.get_data_parallel_world_size()
        if ranks == 1:
            return total, stats
        parts: list[Any] = [None] * ranks
        dist.all_gather_object(parts, (total, stats), group=parallel_state.get_data_parallel_group())
        merged = LossStats()
        for _, part in parts:
            merged.merge(part)
        return sum(value for value, _ in parts), merged

    # --- weights and state

    def offload(self, *parts: Part) -> None:
        """Move these parts to the host, if `TrainerSettings.offload` permits."""
        if self._offloads:
            self.offload_manager.to_host(*parts)

    def onload(self, *parts: Part) -> None:
        """Move these parts back to the device, if they are on the host."""
        self.offload_manager.to_device(*parts)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The full weights by Hugging Face names (`weights.hf_tensors`)."""
        self.onload("weights")
        return weights.hf_tensors(self.model, self.shape)

    def save(self, folder: Path) -> None:
        """Write weights, optimiser, random state and step count of this rank; durable once all ranks return."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "settings": {name: str(value) for name, value in asdict(self.settings).items()},
            "shape": asdict(self.shape),
            "steps": self.steps,
            "model": self.offload_manager.readable(self.model.state_dict()),
            "optimizer": self.offload_manager.readable(self._optimizer_state()),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
        }
        path = self._state_file(folder)
        with path.with_suffix(".part").open("wb") as out:
            torch.save(state, out)
            out.flush()
            os.fsync(out.fileno())
        path.with_suffix(".part").rename(path)
        sync_folder(folder)
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Read what `save` wrote on this rank. Raises: ValueError: the checkpoint is of another model shape."""
        self.onload(*PARTS)
        # On the CPU: a second copy of weights and optimiser state does not fit on a GPU.
        state = torch.load(self._state_file(folder), map_location="cpu", weights_only=False)
        if state["shape"] != asdict(self.shape):
            raise ValueError(f"{folder} has a different model shape from {self.settings.hf_checkpoint}")
        self.model.load_state_dict(state["model"])
        with devices.allocating_on(self.device):
            self._load_optimizer_state(state["optimizer"])
        self.offload_manager = OffloadManager(self._ddp, self._optimizer, self.device)
        self.steps = state["steps"]
        torch.set_rng_state(state["rng"].cpu())
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"].cpu())

    def _optimizer_state(self) -> list[dict[str, Any]]:
        """Optimiser state of this rank. A distributed optimiser's own `state_dict` omits what is sharded over ranks."""
        return [{"state": inner.state_dict(), "weights": _weights(inner)} for inner in self._inner_optimizers()]

    @torch.no_grad()
    def _load_optimizer_state(self, saved: list[dict[str, Any]]) -> None:
        for inner, of_inner in zip(self._inner_optimizers(), saved, strict=True):
            inner.load_state_dict(of_inner["state"])
            for weight, value in zip(_weights(inner), of_inner["weights"], strict=True):
                weight.copy_(value)

    def _inner_optimizers(self) -> list[Any]:
        """torch's optimisers inside of Megatron's."""
        chained = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        return [each.optimizer for each in chained]

    def _state_file(self, folder: Path) -> Path:
        return folder / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}.pt"

    def close(self) -> None:
        """Destroy the process groups."""
        destroy_process_groups()


def _weights(inner: Any) -> list[Tensor]:
    """What an optimiser updates: float32 copies of the model's weights, or these themselves if they are float32."""
    return [weight.detach() for group in inner.param_groups for weight in group["params"]]


def _sequence_stats(batch: MicroBatch, terms: LossTerms) -> SequenceStats:
    tokens = batch.tokens

    def per_sequence(values: Tensor) -> Tensor:
        return values.new_zeros(tokens.count).index_add_(0, tokens.sequence, values).cpu()

    masked = terms.used & (terms.weight == 0)
    pull = (tokens.weights * terms.weight * tokens.advantages).abs()
    return SequenceStats(
        tokens=per_sequence(terms.used.long()),
        clipped=per_sequence(terms.clipped.long()),
        masked=per_sequence(masked.long()),
        pull=per_sequence(torch.where(terms.used & ~terms.clipped, pull, 0.0)),
    )

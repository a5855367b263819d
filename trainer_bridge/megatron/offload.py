"""Moves the trainer's weights and optimiser states to the host while an engine on the same GPU generates.

The storages of the tensors are freed and later resized, so Megatron's gradient hooks, its views into gradient buffers
and the optimiser's references remain valid. (`tensor.data = …` across devices would drop the hooks.) Gradients are not
kept, because every step begins by zeroing them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainer_bridge.trainer import PARTS, Part


class OffloadManager:
    """Weights and optimiser of one rank, on the device or on the host."""

    def __init__(self, ddp: Any, optimizer: Any, device: torch.device) -> None:
        self._ddp, self._optimizer, self._device = ddp, optimizer, device
        self._offloaded: dict[Part, dict[int, tuple[Any, Tensor]]] = {part: {} for part in PARTS}
        """By part and address: each freed storage, and its bytes on the host."""
        self._host_buffers: dict[int, Tensor] = {}
        """Host buffers by the address of their storage, reused because allocating pinned memory is expensive."""
        self._gradients: list[tuple[Any, int]] = []
        """Freed gradient buffers, and their sizes."""

    def to_host(self, *parts: Part) -> int:
        """Move these parts to the host and free their device memory, with `optimizer` also the gradients'.

        Returns the number of bytes moved.
        """
        for part in parts:
            for storage in self._storages(part):
                self._offloaded[part][storage._cdata] = storage, self._copy_to_host(storage)
            if part == "optimizer" and not self._gradients:
                self._optimizer.zero_grad()
                self._gradients = [(s, s.nbytes()) for s in self._gradient_storages() if s.nbytes()]
        self._synchronize()
        freed = [storage for part in parts for storage, _ in self._offloaded[part].values()]
        moved = sum(storage.nbytes() for storage in freed)
        for storage in (*freed, *(storage for storage, _ in self._gradients)):
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return moved

    def to_device(self, *parts: Part) -> None:
        """Move these parts back to the device, if they are on the host."""
        for part in parts:
            for storage, host in self._offloaded[part].values():
                storage.resize_(host.numel())
                _bytes(storage).copy_(host, non_blocking=True)
            self._offloaded[part] = {}
            if part == "optimizer":
                for storage, size in self._gradients:
                    storage.resize_(size)
                self._gradients = []
        self._synchronize()

    def readable(self, state: Any) -> Any:
        """A nested state with offloaded tensors replaced by their copies on the host."""
        offloaded = {address: host for part in PARTS for address, (_, host) in self._offloaded[part].items()}

        def on_host(leaf: Any) -> Any:
            host = offloaded.get(leaf.untyped_storage()._cdata) if isinstance(leaf, Tensor) else None
            if host is None:
                return leaf
            view = torch.empty(0, dtype=leaf.dtype)
            return view.set_(host.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())

        return pytree.tree_map(on_host, state)

    def _storages(self, part: Part) -> list[Any]:
        """The distinct storages of a part. In float32 the optimiser works on the weights; they are excluded."""
        weights = {s._cdata: s for tensor in self._weights() if (s := tensor.untyped_storage()).nbytes()}
        if part == "weights":
            return [storage for storage in weights.values() if storage.resizable()]
        states = {s._cdata: s for tensor in self._states() if (s := tensor.untyped_storage()).nbytes()}
        return [storage for address, storage in states.items() if address not in weights and storage.resizable()]

    def _weights(self) -> Iterator[Tensor]:
        module = self._ddp.module
        yield from (t for t in (*module.parameters(), *module.buffers()) if t.device == self._device)

    def _states(self) -> Iterator[Tensor]:
        for chained in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            inner = chained.optimizer
            tensors = [tensor for group in inner.param_groups for tensor in group["params"]]
            tensors += [value for state in inner.state.values() for value in state.values()]
            yield from (t for t in tensors if isinstance(t, Tensor) and t.device == self._device)

    def _gradient_storages(self) -> list[Any]:
        return [buffer.grad_data.untyped_storage() for buffer in self._ddp.buffers]

    def _copy_to_host(self, storage: Any) -> Tensor:
        host = self._host_buffers.get(storage._cdata)
        if host is None or host.numel() != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._host_buffers[storage._cdata] = host
        return host.copy_(_bytes(storage), non_blocking=True)

    def _synchronize(self) -> None:
        """Wait for the copies."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def _bytes(storage: Any) -> Tensor:
    """A uint8 view of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

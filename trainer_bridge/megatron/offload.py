"""The trainer's memory while an engine on the same GPU generates: weights and optimiser states wait on the host.

What is freed is the storage behind the tensors, and it comes back behind the same tensors: Megatron's gradient hooks,
its views into gradient buffers and the optimiser's references stay as they are. (`tensor.data = …` across devices
would drop the hooks.) Gradients are not kept: every step begins by zeroing them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainer_bridge.trainer import PARTS, Part


class Offload:
    """Weights and optimiser of one rank, on the device or on the host."""

    def __init__(self, ddp: Any, optimizer: Any, device: torch.device) -> None:
        self._ddp, self._optimizer, self._device = ddp, optimizer, device
        self._away: dict[Part, dict[int, tuple[Any, Tensor]]] = {part: {} for part in PARTS}
        """By part: each freed storage by its address, and its bytes on the host."""
        self._hosts: dict[int, Tensor] = {}
        """Host memory by the address of the storage that it was for: pinned memory is too dear to take anew."""
        self._gradients: list[tuple[Any, int]] = []
        """Freed gradient buffers, and their sizes."""

    def to_host(self, *parts: Part) -> int:
        """Free these parts' memory on the device, `optimizer` with the gradients; the bytes that went to the host."""
        for part in parts:
            for storage in self._storages(part):
                self._away[part][storage._cdata] = storage, self._copy_out(storage)
            if part == "optimizer" and not self._gradients:
                self._optimizer.zero_grad()
                self._gradients = [(s, s.nbytes()) for s in self._gradient_storages() if s.nbytes()]
        self._settle()
        freed = [storage for part in parts for storage, _ in self._away[part].values()]
        moved = sum(storage.nbytes() for storage in freed)
        for storage in (*freed, *(storage for storage, _ in self._gradients)):
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return moved

    def to_device(self, *parts: Part) -> None:
        """Bring these parts back; nothing happens to what is there."""
        for part in parts:
            for storage, host in self._away[part].values():
                storage.resize_(host.numel())
                _bytes(storage).copy_(host, non_blocking=True)
            self._away[part] = {}
            if part == "optimizer":
                for storage, size in self._gradients:
                    storage.resize_(size)
                self._gradients = []
        self._settle()

    def readable(self, state: Any) -> Any:
        """A nested state whose tensors that are away are read from the host."""
        away = {address: host for part in PARTS for address, (_, host) in self._away[part].items()}

        def there(leaf: Any) -> Any:
            host = away.get(leaf.untyped_storage()._cdata) if isinstance(leaf, Tensor) else None
            if host is None:
                return leaf
            view = torch.empty(0, dtype=leaf.dtype)
            return view.set_(host.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())

        return pytree.tree_map(there, state)

    def _storages(self, part: Part) -> list[Any]:
        """Each one once. A float32 optimiser works on the weights themselves, which are no part of its own."""
        weights = {s._cdata: s for tensor in self._weights() if (s := tensor.untyped_storage()).nbytes()}
        if part == "weights":
            return [storage for storage in weights.values() if storage.resizable()]
        own = {s._cdata: s for tensor in self._states() if (s := tensor.untyped_storage()).nbytes()}
        return [storage for address, storage in own.items() if address not in weights and storage.resizable()]

    def _weights(self) -> Iterator[Tensor]:
        module = self._ddp.module
        yield from (t for t in (*module.parameters(), *module.buffers()) if t.device == self._device)

    def _states(self) -> Iterator[Tensor]:
        for each in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            inner = each.optimizer
            tensors = [tensor for group in inner.param_groups for tensor in group["params"]]
            tensors += [value for state in inner.state.values() for value in state.values()]
            yield from (t for t in tensors if isinstance(t, Tensor) and t.device == self._device)

    def _gradient_storages(self) -> list[Any]:
        return [buffer.grad_data.untyped_storage() for buffer in self._ddp.buffers]

    def _copy_out(self, storage: Any) -> Tensor:
        host = self._hosts.get(storage._cdata)
        if host is None or host.numel() != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._hosts[storage._cdata] = host
        return host.copy_(_bytes(storage), non_blocking=True)

    def _settle(self) -> None:
        """The copies have been made."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def _bytes(storage: Any) -> Tensor:
    """All of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

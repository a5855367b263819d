"""Hugging Face folders: weights read tensor by tensor, and written (steps 7 and 8 of 9)."""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30
"""Files of an export are at most about this large."""


class Checkpoint:
    """The tensors of a Hugging Face folder, read when asked for."""

    def __init__(self, folder: Path) -> None:
        if not list(folder.glob("*.safetensors")):
            raise FileNotFoundError(f"{folder} holds no safetensors")
        self._folder, self._stack, self._files = folder, ExitStack(), dict[str, Any]()

    def __enter__(self) -> "Checkpoint":
        for path in sorted(self._folder.glob("*.safetensors")):
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self._files |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def get(self, name: str) -> Tensor:
        """One tensor on the CPU; KeyError with the folder's name where it is missing."""
        if name not in self._files:
            raise KeyError(f"{self._folder} holds no tensor {name}")
        return self._files[name].get_tensor(name)


def write_hf(tensors: Iterable[tuple[str, Tensor]], source: Path, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """A Hugging Face folder: these tensors, and configuration and tokenizer as in `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".model", ".txt") and path.name != INDEX:
            shutil.copyfile(path, folder / path.name)
    files: list[list[str]] = []
    total = 0
    for batch in batches(tensors, shard_bytes):
        files.append([name for name, _ in batch])
        total += sum(x.numel() * x.element_size() for _, x in batch)
        # Clones: safetensors refuses tensors that share memory, and views of a larger one would be written whole.
        held = {name: x.detach().to("cpu", copy=True) for name, x in batch}
        save_file(held, folder / f"part-{len(files)}.safetensors", metadata={"format": "pt"})
    index: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        (folder / f"part-{number}.safetensors").rename(folder / name)
        index |= dict.fromkeys(names, name)
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1))


def batches(tensors: Iterable[tuple[str, Tensor]], most_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in order, in lists of at most so many bytes; a larger tensor is a list of its own."""
    batch: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if batch and held + size > most_bytes:
            yield batch
            batch, held = [], 0
        batch.append((name, tensor))
        held += size
    if batch:
        yield batch

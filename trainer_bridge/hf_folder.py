"""Hugging Face folders: reads weights tensor by tensor, and writes them in shards."""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30
"""Approximate maximum size of an exported file."""


class HFCheckpoint:
    """The tensors of a Hugging Face folder, read on demand."""

    def __init__(self, folder: Path) -> None:
        if not list(folder.glob("*.safetensors")):
            raise FileNotFoundError(f"{folder} contains no safetensors")
        self._folder, self._stack, self._files = folder, ExitStack(), dict[str, Any]()

    def __enter__(self) -> "HFCheckpoint":
        for path in sorted(self._folder.glob("*.safetensors")):
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self._files |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def get(self, name: str) -> Tensor:
        """One tensor on the CPU. Raises: KeyError: with the folder's name."""
        if name not in self._files:
            raise KeyError(f"{self._folder} contains no tensor {name}")
        return self._files[name].get_tensor(name)


def write_hf(tensors: Iterable[tuple[str, Tensor]], source: Path, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a Hugging Face folder with these tensors, and with configuration and tokenizer from `source`.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".model", ".txt") and path.name != INDEX:
            shutil.copyfile(path, folder / path.name)
    files: list[list[str]] = []
    total = 0
    for batch in batches(tensors, shard_bytes):
        files.append([name for name, _ in batch])
        total += sum(x.numel() * x.element_size() for _, x in batch)
        # Copies, because safetensors refuses tensors that share memory.
        copies = {name: x.detach().to("cpu", copy=True) for name, x in batch}
        try:
            save_file(copies, folder / f"part-{len(files)}.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:  # what a full disk raises
            raise OSError(f"{folder} cannot be written: {error}") from error
    index: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        (folder / f"part-{number}.safetensors").rename(folder / name)
        index |= dict.fromkeys(names, name)
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1))


def batches(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in order, in lists of at most `max_bytes`; a larger tensor gets a separate list."""
    batch: list[tuple[str, Tensor]] = []
    total = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if batch and total + size > max_bytes:
            yield batch
            batch, total = [], 0
        batch.append((name, tensor))
        total += size
    if batch:
        yield batch

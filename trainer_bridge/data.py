"""Prompt data from JSONL, parquet or a dataset folder, in epochs, with a resumable position."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_bridge.config import Config, ConfigError
from trainer_bridge.rewards import TrainingPrompt


class PromptData:
    """Prompts in epochs. `position` counts the prompts taken so far; it is the only state of a checkpoint."""

    def __init__(self, rows: list[Mapping[str, Any]], config: Config, *, shuffle: bool | None = None) -> None:
        if not rows:
            raise ConfigError("prompt_data: contains no rows")
        self._rows, self._config = rows, config
        self._shuffle = config.rollout_shuffle if shuffle is None else shuffle
        self._order: tuple[int, list[int]] = (-1, [])
        self.position = 0

    def __len__(self) -> int:
        """Number of rows in an epoch."""
        return len(self._rows)

    def take(self, count: int) -> list[TrainingPrompt]:
        """The next `count` prompts."""
        prompts = [self._at(self.position + i) for i in range(count)]
        self.position += count
        return prompts

    def find(self, prompt_id: str) -> TrainingPrompt:
        """The prompt with this id."""
        epoch, row = prompt_id.removeprefix("e").split("-")
        return self._prompt(int(epoch), int(row))

    def _at(self, position: int) -> TrainingPrompt:
        epoch, index = divmod(position, len(self._rows))
        if self._order[0] != epoch:
            order = list(range(len(self._rows)))
            if self._shuffle:
                random.Random(f"{self._config.seed}-{epoch}").shuffle(order)  # noqa: S311 - not a secret
            self._order = (epoch, order)
        return self._prompt(epoch, self._order[1][index])

    def _prompt(self, epoch: int, row: int) -> TrainingPrompt:
        fields, config = self._rows[row], self._config
        content = _column(fields, config.input_key, row)
        if config.apply_chat_template and isinstance(content, str):
            content = [{"role": "user", "content": content}]
        label = None if config.label_key is None else _column(fields, config.label_key, row)
        metadata = None if config.metadata_key is None else _column(fields, config.metadata_key, row)
        return TrainingPrompt(f"e{epoch}-{row}", content, label, metadata)


def read_rows(path: str | Path) -> list[Mapping[str, Any]]:
    """All rows of a `.jsonl` or `.parquet` file, a folder of such files, or a dataset saved with `save_to_disk`.

    Raises: ConfigError: with the path, and the line of a malformed row.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in (".jsonl", ".parquet"))
        if files:
            return [row for file in files for row in read_rows(file)]
        from datasets import DatasetDict, load_from_disk

        loaded = load_from_disk(str(path))
        if isinstance(loaded, DatasetDict):
            splits = ", ".join(str(path / name) for name in loaded)
            raise ConfigError(f"prompt_data: {path} has splits; name one: {splits}")
        return list(loaded)
    if not path.exists():
        raise ConfigError(f"prompt_data: {path} does not exist")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowException as error:
            raise ConfigError(f"prompt_data: {path} cannot be read: {error}") from error
    if path.suffix == ".jsonl":
        with path.open("rb") as lines:
            return [_parse_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    raise ConfigError(f"prompt_data: {path} is not a .jsonl or .parquet file, nor a folder of such files")


def _parse_row(line: bytes, location: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"prompt_data: {location}: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"prompt_data: {location}: must be an object")
    return row


def _column(fields: Mapping[str, Any], key: str, row: int) -> Any:
    """A column by name or dotted path (`reward_model.ground_truth`)."""
    value: Any = fields
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigError(f"prompt_data: row {row} has no {key!r}; it has {', '.join(fields)}")
        value = value[part]
    return value

"""Prompt data: formats, columns, epochs, order and position."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from trainer_bridge.config import Config, ConfigError
from trainer_bridge.data import PromptData, read_rows

ROWS: list[dict[str, Any]] = [{"input": f"q{i}", "label": str(i)} for i in range(5)]


def config(**fields: Any) -> Config:
    return Config(hf_checkpoint="m", prompt_data="d", **fields)


def test_all_formats_give_the_same_rows(tmp_path: Path) -> None:
    from datasets import Dataset

    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[2:]), tmp_path / "parts" / "1.parquet")
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "set"))
    for name in ("a.jsonl", "a.parquet", "parts", "set"):
        assert [dict(row) for row in read_rows(tmp_path / name)] == ROWS, name


def test_splits_are_refused_by_name_and_each_can_be_read(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:1])).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(ConfigError, match=r"^prompt_data: .*/set has splits; name one: .*/set/train, .*/set/test$"):
        read_rows(tmp_path / "set")
    assert [dict(row) for row in read_rows(tmp_path / "set" / "train")] == ROWS


@pytest.mark.parametrize("name", ["nothing.jsonl", "a.csv"])
def test_unreadable_path_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ConfigError, match=name):
        read_rows(tmp_path / name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"input": "q",}', r"b\.jsonl, line 3: .*property name"),
        (b"\xff\xfe\xff", r"b\.jsonl, line 3: "),
        (b"17", r"b\.jsonl, line 3: must be an object"),
    ],
)
def test_malformed_line_is_reported_with_file_and_number(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"input": "q"}\n')
    (tmp_path / "b.jsonl").write_bytes(b'{"input": "q"}\n\n' + line + b"\n")
    with pytest.raises(ConfigError, match=message):
        read_rows(tmp_path)


def test_corrupt_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("not parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read"):
        read_rows(tmp_path / "a.parquet")


def test_each_epoch_has_its_own_order_and_ids() -> None:
    data = PromptData(ROWS, config(rollout_shuffle=True, seed=3))
    taken = data.take(15)
    for epoch in range(3):
        part = taken[5 * epoch : 5 * epoch + 5]
        assert sorted(p.content for p in part) == ["q0", "q1", "q2", "q3", "q4"]
        assert all(p.id.startswith(f"e{epoch}-") for p in part)
    orders = [[p.content for p in taken[5 * e : 5 * e + 5]] for e in range(3)]
    assert len({tuple(order) for order in orders}) > 1
    assert len({p.id for p in taken}) == 15


def test_position_restores_the_data() -> None:
    first = PromptData(ROWS, config(rollout_shuffle=True))
    prompts = first.take(12)
    again = PromptData(ROWS, config(rollout_shuffle=True))
    again.position = 7
    assert again.take(5) == prompts[7:]
    assert [again.find(p.id) for p in prompts] == prompts


def test_nested_columns_are_read_and_missing_ones_are_named() -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": 4}}]
    data = PromptData(rows, config(input_key="prompt", label_key="reward_model.ground_truth"))
    prompt = data.take(1)[0]
    assert (prompt.label, prompt.body(2)["messages"], prompt.body(2)["n"]) == (4, rows[0]["prompt"], 2)
    with pytest.raises(ConfigError, match="'question'"):
        PromptData(rows, config(input_key="question")).take(1)


def test_prompts_are_text_ids_or_messages() -> None:
    rows = [{"input": "2 + 2 =", "label": 4}, {"input": [5, 6, 7], "label": 1}]
    plain = PromptData(rows, config()).take(2)
    assert [set(p.body(1)) for p in plain] == [{"id", "text", "n"}, {"id", "input_ids", "n"}]
    chat = PromptData(rows[:1], config(apply_chat_template=True)).take(1)[0]
    assert chat.body(1)["messages"] == [{"role": "user", "content": "2 + 2 ="}]


def test_empty_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rows"):
        PromptData([], config())

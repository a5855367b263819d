"""A journal belongs to one model (`restart-loses-nothing`)."""

from pathlib import Path

import pytest

from sglang_april.recovery.journal import Journal, JournalError
from sglang_april.recovery.model_identity import ModelIdentity, vocabulary_digest
from tests.unit.journal_fixtures import accept, query, read, request, written

SHAPE = {"number of layers": "2", "vocabulary size": "512", "tokenizer": vocabulary_digest({"a": 0, "b": 1})}


def claim(path: Path, model: ModelIdentity) -> None:
    journal = Journal(path)
    try:
        journal.claim(model)
    finally:
        journal.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [("number of layers", "3"), ("vocabulary size", "256"), ("tokenizer", vocabulary_digest({"a": 1, "b": 0}))],
)
def test_another_model_is_refused_by_name_and_the_journal_stays(tmp_path: Path, name: str, value: str) -> None:
    path = tmp_path / "journal"
    claim(path, ModelIdentity("models/first", SHAPE))
    written(path, accept(0, request("r", "a")))
    with pytest.raises(JournalError) as refused:
        claim(path, ModelIdentity("models/second", {**SHAPE, name: value}))
    assert f"{name} {SHAPE[name]} in models/first and {value} in models/second" in str(refused.value)
    assert [r.spec.round_id for r in read(path).rounds] == ["r"]
    claim(path, ModelIdentity("models/first", SHAPE))


def test_other_weights_of_the_shape_and_another_path_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for folder in ("step-1", "step-2", "step-1"):
        claim(path, ModelIdentity(folder, SHAPE))


def test_a_damaged_record_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    claim(path, ModelIdentity("models/first", SHAPE))
    query(path, "UPDATE meta SET value=x'00' WHERE key='model' RETURNING 1")
    claim(path, ModelIdentity("models/first", SHAPE))
    with pytest.raises(JournalError, match="belongs to another model"):
        claim(path, ModelIdentity("models/second", {**SHAPE, "number of layers": "3"}))


def test_the_digest_depends_on_tokens_and_their_ids_only() -> None:
    assert vocabulary_digest({"a": 0, "b": 1}) == vocabulary_digest({"b": 1, "a": 0})
    assert vocabulary_digest({"a": 0}) != vocabulary_digest({"a": 1}) != vocabulary_digest({"b": 1})

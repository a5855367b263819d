"""A damaged journal: damaged records are never used, and no other record is lost."""

import random
from pathlib import Path

import numpy as np
import pytest

from sglang_april.recovery import schema
from sglang_april.recovery.journal import JournalError
from sglang_april.scheduler.restore import restored_event, starting_version
from tests.unit.journal_fixtures import accept, chunk, ended, finish_both, ids, query, read, request, sample, written


def flipped(path: Path, table: str, where: str) -> None:
    """Flip the last bit of a record."""
    (body,) = query(path, f"SELECT body FROM {table} WHERE {where}")
    query(path, f"UPDATE {table} SET body=? WHERE {where}", body[:-1] + bytes([body[-1] ^ 1]))


def test_damaged_chunk_loses_the_tokens_after_it_for_good(tmp_path: Path) -> None:
    pieces = [schema.tokens(0, 0, start, chunk(10 + start, start=start)) for start in range(4)]
    path = written(tmp_path / "j", accept(0, request("a", "p")), *pieces)
    flipped(path, "chunks", "start=2")
    saved = read(path)
    kept = saved.groups[0].samples[0].chunk
    assert kept is not None
    assert (kept.output_ids, saved.corrupt) == (ids(10, 11), 1)
    # The sample draws token 2 again. The old chunk of token 3 must not join it.
    again = read(written(path, schema.tokens(0, 0, 2, chunk(99, start=2))))
    assert again.groups[0].samples[0].chunk.output_ids == ids(10, 11, 99)
    assert again.corrupt == 0


@pytest.mark.parametrize("where", ["chunks", "finished"])
def test_damaged_finished_sample_is_generated_again(tmp_path: Path, where: str) -> None:
    records = [
        accept(0, request("a", "p")),
        schema.tokens(0, 0, 0, chunk(5)),
        schema.finished(0, 1, 4, sample("p", 0, 6)),
    ]
    path = written(tmp_path / "j", *records)
    flipped(path, where, "idx=0")
    saved = read(path)
    kept = saved.groups[0].samples[0]
    assert kept.finished is None
    assert (kept.chunk.output_ids if kept.chunk else None) == (ids(5) if where == "finished" else None)
    assert saved.corrupt >= 1
    assert read(path).corrupt == 0


def test_damaged_reply_is_reported_as_gone(tmp_path: Path) -> None:
    path = written(tmp_path / "j", accept(0, request("a", "p")), *finish_both(0, "p"), schema.ended(ended("a", "p")))
    flipped(path, "finished", "idx=1")
    saved = read(path)
    assert (saved.replies, saved.gone, saved.corrupt) == ([], ["a"], 1)
    assert restored_event(saved, unnamed=False).warnings == [
        "1 journal records were damaged; their undelivered tokens are generated again",
        "kept replies with a damaged record are lost: a; submit their prompts again",
    ]
    assert not read(path).lost_replies
    left = [query(path, f"SELECT * FROM {table}") for table in ("groups", "chunks", "finished", "admitted")]
    assert not any(left), "nothing else would ever delete what belongs to a lost reply"


def test_a_damaged_version_must_be_named(tmp_path: Path) -> None:
    """Without any other record that has a version, the journal's may have been any."""
    path = written(tmp_path / "j", schema.version(12), accept(0, request("a", "p")))
    query(path, "UPDATE meta SET value=x'00112233' WHERE key='version'")
    saved = read(path)
    assert (saved.version, saved.version_damaged) == (0, True)
    assert starting_version(None, saved.version, damaged=saved.version_damaged) == (0, True)
    assert starting_version(12, saved.version, damaged=saved.version_damaged) == (12, False)


def test_damaged_round_or_prompt_loses_only_itself(tmp_path: Path) -> None:
    path = written(tmp_path / "j", accept(0, request("a", "p", "q")))
    query(path, "UPDATE rounds SET spec=x'00112233'")
    query(path, "UPDATE groups SET prompt=x'00112233' WHERE id='p'")
    query(path, "INSERT INTO chunks SELECT 0, 0, 0, x'00'")
    saved = read(path)
    assert ([g.prompt.id for g in saved.groups], saved.rounds, saved.gone, saved.corrupt) == (["q"], [], ["a"], 2)
    (warning,) = restored_event(saved, unnamed=False).warnings
    assert "1 of them were groups, which are lost" in warning
    assert read(path).corrupt == 0
    assert not query(path, "SELECT * FROM chunks"), "nothing would ever delete what belongs to a lost group"


def test_no_damage_makes_a_wrong_token(tmp_path: Path) -> None:
    """Any byte of the file, any number of them: what is read is true, or counted, or the journal is refused."""
    records = [schema.version(3)]
    for gid in range(6):
        name = f"p{gid}"
        records += [accept(gid, request(f"r{gid}", name))]
        records += [schema.tokens(gid, 0, s, chunk(*range(s, s + 10), start=s)) for s in (0, 10, 20)]
        records += finish_both(gid, name)[1:] if gid % 2 else []
        records += [*finish_both(gid, name), schema.ended(ended(f"r{gid}", name))] if gid < 3 else []
    whole = written(tmp_path / "whole", *records).read_bytes()
    outcomes = [_read_damaged(tmp_path / f"{seed}", whole, random.Random(seed)) for seed in range(400)]
    assert set(outcomes) == {"true", "counted", "refused"}


def _read_damaged(path: Path, whole: bytes, rng: random.Random) -> str:
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 3, 50))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    try:
        saved = read(path)
    except JournalError:
        return "refused"
    for group in saved.groups:
        assert [group.prompt] == request("", f"p{group.gid}").prompts
        for known in group.samples:
            if known.chunk is not None:
                got = np.frombuffer(known.chunk.output_ids, "<i4").tolist()
                assert got == list(range(len(got)))
                assert np.frombuffer(known.chunk.logprobs, "<f4").tolist() == got
            if known.finished is not None:
                assert known.finished == sample(f"p{group.gid}", known.index, 5, 1)
    for reply in saved.replies:
        assert {s.index: s for s in reply.samples} == {i: sample(reply.prompts[0].id, i, 5, 1) for i in (0, 1)}
    assert saved.version == 3 or saved.corrupt
    return "counted" if saved.corrupt else "true"

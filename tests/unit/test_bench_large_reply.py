"""The benchmark of large replies carries every sample in every encoding."""

import pytest

from bench.large_reply import ENCODINGS, GROUP, measure


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_token_arrives(encoding: str) -> None:
    row = measure(encoding, samples=2 * GROUP, tokens=2000)
    assert row["tokens"] == 2 * GROUP * 2000
    ids_and_logprobs = 8 * row["tokens"]
    assert row["body_mb"] * 2**20 > ids_and_logprobs
    assert row["peak_mb"] >= row["received_mb"] >= row["empty_mb"] > 0

"""The benchmark of large replies carries every sample in every form."""

import pytest

from bench.large_reply import FORMS, GROUP, measure


@pytest.mark.parametrize("form", FORMS)
def test_every_token_arrives(form: str) -> None:
    row = measure(form, samples=2 * GROUP, tokens=2000)
    assert row["tokens"] == 2 * GROUP * 2000
    ids_and_logprobs = 8 * row["tokens"]
    assert row["body_mb"] * 2**20 > ids_and_logprobs
    assert row["peak_mb"] >= row["received_mb"] >= row["empty_mb"] > 0

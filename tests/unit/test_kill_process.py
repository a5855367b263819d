"""A thousand kills -9 of a process that drives ledger and journal without a model (S8, design rule 1)."""

import random
from pathlib import Path

from tests.unit.lives import Client, one_life

KILLS = 1000


def test_a_thousand_kills(tmp_path: Path) -> None:
    """Moments are counted in words of the dying process, never in time."""
    client, rng = Client(), random.Random(7)
    words = sum(one_life(tmp_path / "j", client, life, rng.randint(2, 60)) for life in range(KILLS))
    one_life(tmp_path / "j", client, KILLS, None)
    assert client.restored == KILLS + 1
    assert not list(client.undelivered())
    assert not client.open
    print(f"{KILLS} kills, {words} words, {len(client.replies)} replies, {len(client.delivered)} samples delivered")
    # How many depends on how fast the machine's disk is.
    assert client.replies
    assert client.delivered

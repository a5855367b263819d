"""A thousand kills -9 of a process that drives ledger, journal and page store without a model (S8, design rule 1)."""

import random
from pathlib import Path

from tests.unit.lives import one_life
from tests.unit.lives_client import Client

KILLS = 1000


def test_a_thousand_kills(tmp_path: Path) -> None:
    """Moments are counted in words of the dying process, never in time."""
    client, rng = Client(), random.Random(7)
    words = whole = halves = 0
    for life in range(KILLS):
        words += one_life(tmp_path, client, life, rng.randint(2, 40))
        whole += len(list(tmp_path.glob("*.kv")))
        halves += len(list(tmp_path.glob("*.part")))
    one_life(tmp_path, client, KILLS, None)
    assert client.restored == KILLS + 1
    assert not list(client.undelivered())
    assert not client.open
    print(f"{KILLS} kills, {words} words, {len(client.replies)} replies, {len(client.delivered)} samples delivered")
    regained = len((tmp_path / "regained").read_text().splitlines())
    print(f"{whole} files of pages outlived a process, {halves} were killed half written, {regained} were resumed from")
    # A life is paced by what it says and hears, so that these do not depend on how fast the machine or its disk is.
    assert len(client.replies) > KILLS
    assert len(client.delivered) > 2 * KILLS
    assert regained
    assert whole > KILLS // 100

"""A prompt is prefilled once per group; the other members start on its KV."""

from typing import Any

import pytest

from tests.support.compare import by_key
from tests.support.live import LiveServer
from tests.support.server import Server
from tests.support.workload import Forwards, flush, prompt, token_ids

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95}


def groups(count: int, n: int, length: int, **params: Any) -> list[dict[str, Any]]:
    return [prompt(f"p{i}", length, ids=token_ids(9 + i, i), n=n, **params) for i in range(count)]


@pytest.mark.parametrize("tier", ["device", "host"])
def test_followers_draw_the_same_tokens_as_with_their_own_prefill(live: LiveServer, run: str, tier: str) -> None:
    """With or without stops, tokens and logprobs equal those of a plain forward with the sample's seed."""
    server = live.server
    flush(server)
    count = Forwards(server)
    first = server.rollout(run=run, prompts=groups(5, 4, 24, **SAMPLED), quota=1, tier=tier)
    assert sum(count.rows(decode=False)) == 5
    assert (first["stats"]["started"], first["stats"]["started_on_prompt_kv"]) == (20, 15)
    pieces = [*first["finished"], *server.drain(run)]
    assert len(by_key(pieces)) == 20
    assert {len(x["output_ids"]) for x in by_key(pieces).values()} == {24}
    live.check(pieces, {g["id"]: SAMPLED for g in pieces})


def test_prompts_are_prefilled_again_under_a_new_policy(normal: LiveServer, run: str) -> None:
    """KV of one version is never a prefix under another (`no-mixed-version-prefix`)."""
    server, count = normal.server, Forwards(normal.server)
    first = server.rollout(run=run, prompts=groups(1, 12, 30, **SAMPLED), quota=2, quota_unit="sample", concurrency=4)
    assert first["stats"]["started_on_prompt_kv"] >= 3
    normal.push(1, flush=False)
    rest = server.rollout(run=run, prompts=[], quota=None, kv="recompute")
    assert rest["stats"]["started_on_prompt_kv"] > 0
    begun = first["stats"]["started"]
    assert rest["stats"]["started"] == 12 - begun
    # The first leader; the partials that are recomputed; and one leader of those who had not begun.
    assert sum(count.rows(decode=False)) == 1 + rest["stats"]["resumed_recomputed"] + 1
    pieces = [*first["finished"], *rest["finished"]]
    normal.check(pieces, {"p0": SAMPLED})


def test_evicted_prompt_is_prefilled_again(server: Server, run: str) -> None:
    """A flush empties the tree while members wait for a slot."""
    first = server.rollout(run=run, prompts=groups(1, 12, 30), quota=2, quota_unit="sample", concurrency=4)
    begun = first["stats"]["started"]
    flush(server)
    count = Forwards(server)
    rest = server.rollout(run=run, prompts=[], quota=None)
    assert sum(count.rows(decode=False)) == 1
    assert rest["stats"]["started_on_prompt_kv"] == 12 - begun - 1
    assert len(by_key([*first["finished"], *rest["finished"]])) == 12


def test_members_that_cannot_share_are_prefilled(server: Server, run: str) -> None:
    """With a one-token prompt, penalties or a grammar, every member has its own prefill."""
    requested = [
        prompt("one", 4, ids=1, n=3),
        prompt("penalty", 4, n=3, presence_penalty=0.5),
        prompt("grammar", 4, n=3, regex="[ab]+"),
        prompt("shared", 4, n=3),
    ]
    count = Forwards(server)
    reply = server.rollout(run=run, prompts=requested, quota=None)
    assert sum(count.rows(decode=False)) == 3 * 3 + 1
    assert reply["stats"]["started_on_prompt_kv"] == 2

"""Output tokens of attached requests count as carry, and no attached request is refused because of it."""

from sglang_april.api import messages
from tests.unit.controller_harness import given_as, lengths
from tests.unit.leg_harness import PROMPT, LegHarness


def test_attached_requests_count_and_are_never_refused() -> None:
    w = LegHarness()
    for engine in w.engines:
        engine.controller.context.carry_cap_tokens = 20

    def carry() -> int:
        return int(w.command(messages.GetState).data["carry_tokens"])

    assert w.leg("run", "a", PROMPT, 60)
    while carry() < 20:
        w.step()
    prompts, params = given_as(lengths(1))
    spec = messages.RoundSpec("r", "rounds", 1, "group", "keep", 5)
    refused = w.command(messages.OpenRound, spec=spec, prompts=prompts, params=params)
    assert (refused.status, refused.field) == (503, "prompts")
    w.command(messages.PushBegin)
    assert carry() >= 20, "suspended ones count as well"
    w.command(messages.PushEnd)
    assert w.leg("run", "b", PROMPT, 60)
    for _ in range(200):
        w.step()
    ended = {e.rid: e.spans[-1].end for e in w.answered()}
    assert ended == {"a": 60, "b": 60}
    assert carry() == 0
    assert w.command(messages.OpenRound, spec=spec, prompts=prompts, params=params).status == 200

"""The benchmark of shared prompts counts what the scheduler's own code stores."""

import pytest

from bench.bookkeeping import PAGE
from bench.prompt_sharing import CASES, UNLIMITED, Case, measure, to_host
from bench.rollout.workload import WorkloadPrompt
from bench.simulated_engine import SimulatedGroup


def test_a_prompt_is_stored_once_per_group() -> None:
    """A prompt of 40 tokens has two whole store pages; the rest of each sample is separate."""
    first, second = (SimulatedGroup(WorkloadPrompt("p", [0] * 40, [])) for _ in range(2))
    partials = [(first, 9), (first, 25), (second, 1)]
    ends = [48, 64, 40]  # tokens with KV: the last output token has none yet
    pages = [-(-end // PAGE) * PAGE for end in ends]
    assert to_host(partials, 40, shared=False, room=UNLIMITED) == (sum(pages), 0)
    assert to_host(partials, 40, shared=True, room=UNLIMITED) == (sum(pages) - 2 * PAGE, 0)


def test_what_does_not_fit_loses_its_kv() -> None:
    group = SimulatedGroup(WorkloadPrompt("p", [0] * 40, []))
    partials = [(group, 9), (group, 25)]
    shared, lost = to_host(partials, 40, shared=True, room=UNLIMITED)
    assert lost == 0
    assert to_host(partials, 40, shared=True, room=shared) == (shared, 0)
    used, lost = to_host(partials, 40, shared=False, room=shared)
    assert (used, lost) == (64, 49), "the shorter sample is evicted"


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_saved_tokens_are_those_of_the_repeated_prompts(case: Case) -> None:
    row = measure(case)
    prompt = (row["prompt"] - 1) // PAGE * PAGE
    saved = row["host_tokens"]["separate"] - row["host_tokens"]["shared"]
    assert saved == pytest.approx(prompt * (row["partials"] - row["groups"]), rel=0.05)

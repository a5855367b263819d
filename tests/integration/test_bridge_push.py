"""The bridge's pushes: every transport delivers a complete policy to several engines, and a failed push is repaired.

The weights are those of tiny models by their seeds, so that the oracle knows every version.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch

from examples.tiny_model import weights
from tests.support.live import LiveServer, live_server
from tests.support.server import Server
from trainer_bridge.args import load
from trainer_bridge.hf_folder import batches
from trainer_bridge.push.pusher import Pusher, PushFailed, PushState, connect
from trainer_bridge.rollout_engine import RolloutEngines
from trainer_bridge.trainer import TransportName

LONG = {"ignore_eos": True, "max_new_tokens": 60}
SHORT = {"ignore_eos": True, "max_new_tokens": 4}
BUCKET = 400_000
"""Bytes: a tiny model is about 2.6 MB, so that a push takes several calls."""

Model = Callable[[str, int], Path]
Batches = list[list[tuple[str, torch.Tensor]]]

TRANSPORTS: tuple[TransportName, ...] = ("distributed", "tensor", "disk")


@pytest.fixture
def live(server: Server, models: Model) -> Iterator[LiveServer]:
    with live_server(server, lambda seed: models("qwen3", seed)) as live:
        yield live


@pytest.fixture
def pusher(request: pytest.FixtureRequest, live: LiveServer, models: Model) -> Iterator[Pusher]:
    transport: TransportName = getattr(request, "param", "distributed")
    pusher = connect([live.server.url], transport, source=models("qwen3", 0), device=torch.device("cpu"))
    yield pusher
    pusher.close()


def policy(seed: int) -> Batches:
    """The weights of one seed, in buckets."""
    tensors = {name: torch.from_numpy(array) for name, array in weights("qwen3", seed).items()}
    made = list(batches(tensors.items(), BUCKET))
    assert len(made) > 3
    return made


def with_wrong_shape(seed: int) -> Batches:
    """The weights of one seed; one tensor in the middle lacks a row."""
    made = policy(seed)
    name, tensor = made[2][0]
    made[2][0] = (name, tensor[:-1].clone())
    return made


def push(pusher: Pusher, seed: int, *servers: LiveServer) -> int:
    for live in servers:
        live.server.loaded = live.model(seed)
    version = pusher.push(policy(seed)).version
    for live in servers:
        assert live.version == version
        live.policies[version] = live.model(seed)
    return version


def leave_partials(live: LiveServer, run: str) -> None:
    """A round of one short group that leaves a long one suspended."""
    prompts = [
        {"id": "long", "input_ids": [20, 21, 22, 23], "n": 2, "sampling_params": LONG},
        {"id": "short", "input_ids": [30, 31, 32], "n": 1, "sampling_params": SHORT},
    ]
    reply = live.server.rollout(run=run, prompts=prompts, quota=1)
    assert [group["id"] for group in reply["finished"]] == ["short"]
    assert len(live.server.partials(run)) == 2


def drained(live: LiveServer, run: str, versions: list[int]) -> None:
    """Finish the partials and check their tokens and logprobs against these versions."""
    groups = live.server.drain(run)
    assert [group["id"] for group in groups] == ["long"]
    for sample in groups[0]["samples"]:
        assert [span["version"] for span in sample["spans"]] == versions
    live.check(groups, {"long": LONG})


@pytest.mark.parametrize("pusher", TRANSPORTS, indirect=True)
def test_partials_resume_under_the_pushed_policy_with_every_transport(
    pusher: Pusher, live: LiveServer, run: str
) -> None:
    """After each of two pushes, a suspended sample resumes."""
    v = live.version
    leave_partials(live, run)
    assert push(pusher, 1, live) == v + 1
    more = [{"id": "again", "input_ids": [40, 41], "n": 1, "sampling_params": SHORT}]
    live.check(live.server.rollout(run=run, prompts=more, quota=1)["finished"], {"again": SHORT})
    assert push(pusher, 2, live) == v + 2
    drained(live, run, [v, v + 1, v + 2])
    assert pusher.state is PushState.IDLE


@pytest.mark.parametrize("pusher", TRANSPORTS, indirect=True)
def test_failed_push_closes_admission_until_the_next_push(pusher: Pusher, live: LiveServer, run: str) -> None:
    v = live.version
    leave_partials(live, run)
    with pytest.raises(PushFailed):
        pusher.push(with_wrong_shape(1))
    assert pusher.state is PushState.FAILED
    assert live.version == v
    refused = live.server.rollout(run=run, prompts=[], quota=1, status=503)["error"]
    assert "push" in refused["reason"]
    assert len(live.server.partials(run)) == 2
    assert push(pusher, 2, live) == v + 1
    drained(live, run, [v, v + 1])


def test_lost_process_group_is_detected_and_rebuilt(pusher: Pusher, live: LiveServer, run: str) -> None:
    """The engine refuses the call, so the broadcast, which would block for minutes, never starts."""
    push(pusher, 1, live)
    leave_partials(live, run)
    group = pusher.transport.group_name
    assert live.server.post("/destroy_weights_update_group", {"group_name": group})["success"]
    with pytest.raises(PushFailed, match=group):
        pusher.push(policy(2))
    live.server.rollout(run=run, prompts=[], quota=1, status=503)
    v = push(pusher, 2, live)
    drained(live, run, [v - 1, v])


def test_one_push_updates_several_engines_to_one_version(
    live: LiveServer, second: LiveServer, models: Model, run: str
) -> None:
    """Also when one engine has had more pushes; after a failure on one, the next push repairs both."""
    live.push(1)
    urls = [live.server.url, second.server.url]
    pusher = connect(urls, "distributed", source=models("qwen3", 0), device=torch.device("cpu"))
    try:
        assert push(pusher, 2, live, second) > second.version - 1
        for each in (live, second):
            leave_partials(each, run)
        v = live.version
        with pytest.raises(PushFailed):
            pusher.push(with_wrong_shape(1))
        for each in (live, second):
            each.server.rollout(run=run, prompts=[], quota=1, status=503)
        assert push(pusher, 1, live, second) == v + 1
        for each in (live, second):
            drained(each, run, [v, v + 1])
    finally:
        pusher.close()


def test_dead_engine_fails_the_push_and_is_named(live: LiveServer, models: Model) -> None:
    """The remaining engine refuses rounds until a push without the dead one succeeds."""
    pusher = connect([live.server.url], "tensor", source=models("qwen3", 0), device=torch.device("cpu"))
    gone = connect([live.server.url], "tensor", source=models("qwen3", 0), device=torch.device("cpu"))
    dead = gone.engines[0]
    dead._http.close()
    dead._http = httpx.Client(base_url="http://127.0.0.1:9", timeout=5)
    try:
        with pytest.raises(PushFailed, match="update_weights_from_tensor"):
            gone.push(policy(1))
        assert live.server.state()["closed"]
        push(pusher, 1, live)
        assert not live.server.state()["closed"]
    finally:
        pusher.close()
        gone.close()


def test_the_next_trainer_wakes_a_server_that_a_killed_one_has_left_paused_and_released(
    live: LiveServer, tmp_path: Path
) -> None:
    server = live.server
    server.post("/pause_generation", {"mode": "retract"})
    server.post("/release_memory_occupation")
    fields = {"server": server.url, "server_start_timeout": 60.0, "colocate": True}
    engines = RolloutEngines(load(None, {"hf_checkpoint": "m", "prompt_data": "d", **fields}), tmp_path)
    for _ in range(2):  # the second time there is nothing to end
        engines.wait_until_ready()
    engines.close()
    state = server.state()
    assert (state["closed"], state["frozen"]) == ("", False)
    body = {"input_ids": [9, 8], "sampling_params": {"max_new_tokens": 1}}
    assert len(server.post("/generate", body)["output_ids"]) == 1

"""verl's clients and weight adapter on a live server. Run by tests/integration/test_verl.py."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from safetensors.torch import load_file
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from sglang_april.client import AprilError, PushLeftOpenError
from sglang_april.integrations.verl.agent_loop import AttachedClient
from sglang_april.integrations.verl.weights import ServerAdapter
from tests.frameworks.verl_fixtures import GREEDY, IDS, decoding, generate, push, run
from tests.support.live import LiveServer

pytest_plugins = ("tests.frameworks.verl_fixtures",)


def test_weight_adapter_is_registered() -> None:
    assert get_rollout_class("sglang") is ServerAdapter


def test_one_request_spans_two_steps_where_verl_takes_two(
    live: LiveServer, attached_client: AttachedClient, verl_client: FullyAsyncLLMServerClient, server: SGLangHttpServer,
    adapter: ServerAdapter,
) -> None:  # fmt: skip
    """verl's sequence of a push: abort (a pause), buckets, resume. Both clients deliver all tokens, with both steps."""

    async def over_a_push(client: Any, step: int) -> Any:
        with live.server.slowed(0.05):
            task = asyncio.create_task(generate(client))
            await decoding(live, task)
            await server.abort_all_requests()
            await push(adapter, live, step % 2, step)
        await server.resume_generation()
        return await task

    async def scenario() -> None:
        first = await push(adapter, live, 0, 7)
        mine = await over_a_push(attached_client, 9)
        other = await over_a_push(verl_client, 11)
        for output, steps in ((mine, (7, 9)), (other, (9, 11))):
            assert len(output.token_ids) == len(output.log_probs) == 60
            assert output.stop_reason == "length"
            fields = output.extra_fields
            assert (fields["min_global_steps"], fields["max_global_steps"], fields["global_steps"]) == (
                *steps,
                steps[1],
            )
        assert set(mine.extra_fields) >= {"num_cached_tokens"}
        assert live.server.state()["policy_version"] == first + 2

    run(scenario)


def test_tokens_and_logprobs_over_a_push_are_those_of_a_replay(
    live: LiveServer, attached_client: AttachedClient, server: SGLangHttpServer, adapter: ServerAdapter
) -> None:
    async def scenario() -> None:
        answers: list[Any] = []
        send = attached_client._send

        async def kept(*args: Any, **named: Any) -> Any:
            answers.append(await send(*args, **named))
            return answers[-1]

        attached_client._send = kept  # type: ignore[method-assign]
        await push(adapter, live, 0, 1)
        with live.server.slowed(0.05):
            task = asyncio.create_task(generate(attached_client, temperature=0.8, sampling_seed=5))
            await decoding(live, task)
            await server.abort_all_requests()
            await push(adapter, live, 1, 2)
        await server.resume_generation()
        output = await task
        spans = answers[-1]["meta_info"]["april"]["spans"]
        assert [span["kv"] for span in spans] == ["fresh", "kept"]
        assert answers[-1]["meta_info"]["april"]["run"] == "verl"
        sample = {"index": 0, "output_ids": output.token_ids, "logprobs": output.log_probs, "spans": spans, "seed": 5}
        live.check([{"id": "r", "prompt_ids": IDS, "samples": [sample]}], {"r": {"temperature": 0.8}})

    run(scenario)


def test_a_push_of_validation_has_the_step_before(
    live: LiveServer, attached_client: AttachedClient, adapter: ServerAdapter, server: SGLangHttpServer
) -> None:
    """verl pushes the same weights again after a validation, without a step: the version moves, the step does not."""

    async def scenario() -> None:
        await push(adapter, live, 0, 3)
        await push(adapter, live, 0, None)
        assert (await generate(attached_client, 4)).extra_fields["global_steps"] == 3
        await push(adapter, live, 1, 4)
        assert (await generate(attached_client, 4)).extra_fields["global_steps"] == 4

    run(scenario)


def test_sync_mode_releases_memory_without_a_pause(
    live: LiveServer, attached_client: AttachedClient, adapter: ServerAdapter
) -> None:
    """verl's sequence between two steps: release, weights, push, KV cache. A request that still runs is suspended."""

    async def scenario() -> None:
        await push(adapter, live, 0, 1)
        assert (await generate(attached_client, 4)).extra_fields["global_steps"] == 1
        with live.server.slowed(0.05):
            task = asyncio.create_task(generate(attached_client))
            await decoding(live, task)
            await adapter.release()
            assert "memory is released" in live.server.state()["closed"]
            await adapter.resume(["weights"])
            await push(adapter, live, 1, 2)
            assert not task.done()
            await adapter.resume(["kv_cache"])
        output = await task
        assert len(output.token_ids) == 60
        assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (1, 2)

    run(scenario)


def test_a_version_that_no_push_has_made_is_an_error(live: LiveServer, attached_client: AttachedClient) -> None:
    live.push(1)
    with pytest.raises(RuntimeError, match="weight adapter"):
        run(lambda: generate(attached_client, 4))


def test_a_failed_push_keeps_requests_waiting(
    live: LiveServer, attached_client: AttachedClient, adapter: ServerAdapter
) -> None:
    def broken() -> Iterator[Any]:
        yield from list(load_file(live.model(1) / "model.safetensors").items())[:3]
        raise OSError("the trainer failed")

    async def scenario() -> None:
        await push(adapter, live, 0, 1)
        with live.server.slowed(0.05):
            task = asyncio.create_task(generate(attached_client))
            await decoding(live, task)
            with pytest.raises(PushLeftOpenError):
                await adapter.update_weights(broken(), global_steps=2)
            count = len(live.server.forwards())
        await asyncio.sleep(0.5)
        assert len(live.server.forwards()) == count
        await push(adapter, live, 1, 2)
        assert len((await task).token_ids) == 60

    run(scenario)


def test_lengths_are_clamped_as_verl_clamps_them(
    live: LiveServer, attached_client: AttachedClient, verl_client: FullyAsyncLLMServerClient, adapter: ServerAdapter
) -> None:
    async def scenario() -> None:
        await push(adapter, live, 0, 1)
        prompt = list(range(6, 506)) * 4  # 2,000 tokens of a context of 2,048
        for given in ({"max_tokens": 100}, {"max_new_tokens": 100}):
            params = {**GREEDY, "ignore_eos": True, **given}
            lengths = [
                len((await client.generate("r", prompt_ids=prompt, sampling_params=dict(params))).token_ids)
                for client in (attached_client, verl_client)
            ]
            assert lengths == [46, 46]  # both ask for 47, and SGLang keeps one more position free
        default = {**GREEDY, "ignore_eos": True}
        assert len((await attached_client.generate("r", prompt_ids=IDS, sampling_params=default)).token_ids) == 300
        assert default == {**GREEDY, "ignore_eos": True}, "the caller's parameters are unchanged"
        with pytest.raises(ValueError, match="context"):
            await attached_client.generate("r", prompt_ids=prompt + prompt, sampling_params=params)
        with pytest.raises(AprilError, match="input_ids"):
            await attached_client.generate("r", prompt_ids=[10**6], sampling_params=params)

    run(scenario)

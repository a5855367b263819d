"""Requests of SGLang's Python API, in the process that has the TokenizerManager, as verl makes them.

    python -m tests.support.offline_engine MODEL TOKENS

Prints what the plugin reports and what the requests were answered, as JSON.
"""

import asyncio
import contextlib
import json
import sys
from typing import Any

import sglang
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
)

NAMED = {"x-april-run": "r", "x-april-trajectory": "t"}


def params(length: int) -> dict[str, Any]:
    return {"max_new_tokens": length, "ignore_eos": True, "custom_params": NAMED}


class Caller:
    """One streaming request without a request of HTTP."""

    def __init__(self, manager: Any, rid: str) -> None:
        given = params(int(sys.argv[2]))
        self.request = GenerateReqInput(rid=rid, input_ids=[1, 2, 3], sampling_params=given, stream=True)
        self.answers: list[dict[str, Any]] = []
        self.task = asyncio.ensure_future(self._read(manager))

    async def _read(self, manager: Any) -> None:
        async for answer in manager.generate_request(self.request, None):
            self.answers.append(answer)

    async def begun(self) -> None:
        while len(self.answers) < 3 and not self.task.done():
            await asyncio.sleep(0.01)
        assert not self.task.done(), "the request ended early"

    async def meta(self) -> dict[str, Any]:
        await self.task
        return dict(self.answers[-1]["meta_info"])


async def interruptions(manager: Any, model: str) -> dict[str, Any]:
    """A request over new weights under a pause, one that is aborted, and one whose caller goes."""
    pushed = Caller(manager, "pushed")
    await pushed.begun()
    await manager.pause_generation(PauseGenerationReqInput(mode="abort"))
    await manager.update_weights_from_disk(UpdateWeightFromDiskReqInput(model_path=model), None)
    await manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    answers = {"pushed": await pushed.meta()}

    aborted = Caller(manager, "aborted")
    await aborted.begun()
    manager.abort_request("aborted")
    answers["aborted"] = await aborted.meta()

    gone = Caller(manager, "gone")
    await gone.begun()
    gone.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await gone.task
    while (await manager.april.state())["attached"]:
        await asyncio.sleep(0.01)
    return answers


def main() -> None:
    model = sys.argv[1]
    engine = sglang.Engine(model_path=model, mem_fraction_static=0.6, max_total_tokens=4096)
    generated = engine.generate("1 2 3", params(4))["meta_info"]
    answers = engine.loop.run_until_complete(interruptions(engine.tokenizer_manager, model))
    print(json.dumps({"report": engine.get_server_info()["april"], "generated": generated, **answers}))
    engine.shutdown()


if __name__ == "__main__":
    main()

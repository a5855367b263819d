"""A scheduler small enough to read: it answers commands and finishes what a test tells it to finish."""

import asyncio
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from sglang_april.api import messages
from sglang_april.config import AprilConfig
from sglang_april.http.frontend import ServerInfo
from sglang_april.http.service import AprilService


def sglang_module(path: str) -> ModuleType:
    """A leaf module of SGLang, without the ten seconds that importing its package takes."""
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location(Path(path).stem, root / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sglang_rwlock() -> Any:
    """SGLang's own `model_update_lock`."""
    return sglang_module("srt/utils/aio_rwlock.py").RWLock()


class ScriptedEngine:
    """A `Frontend` whose tokens are characters. Nothing ends by itself: tests call `finish` and `end`."""

    def __init__(self, **server: Any) -> None:
        defaults = {"vocab_size": 256, "context_len": 100, "max_input_len": 90, "has_tokenizer": True}
        self._info = ServerInfo(**{**defaults, "priority": False, "overlap": True, **server})
        self.lock = sglang_rwlock()
        self.april: AprilService | None = None
        self.commands: list[messages.Command] = []
        self.answers: dict[type, messages.Answer] = {}
        self.silent: set[type] = set()
        self.taken: set[tuple[str, str]] = set()
        self.version = 0
        self.verdicts: dict[str, bool] = {}
        self.running = 0
        """Samples that run, as `GetState` reports them to the audit."""
        self.rescored: list[tuple[str, list[int], int, float]] = []
        """Calls of `rescore`."""
        self.rescoring: dict[str, asyncio.Future[list[float]]] = {}
        """Answers that a test sets; with `hold_rescores` only then."""
        self.hold_rescores = False

    def server_info(self) -> ServerInfo:
        return self._info

    def listen(self) -> None:
        pass

    async def send(self, payload: bytes) -> None:
        command = messages.decode_message(payload)
        self.commands.append(command)
        if type(command) not in self.silent:
            self.emit(self._answer(command))

    def _answer(self, command: messages.Command) -> messages.Answer:
        canned = self.answers.get(type(command))
        if canned is not None:
            return msgspec.structs.replace(canned, seq=command.seq)
        if isinstance(command, messages.OpenRound):
            for i, prompt in enumerate(command.prompts):
                if (command.spec.run, prompt.id) in self.taken:
                    return messages.Answer(command.seq, 409, f"prompts[{i}].id", "is still in use")
            self.taken |= {(command.spec.run, prompt.id) for prompt in command.prompts}
        if isinstance(command, messages.Drop):
            ids = [i for run, i in self.taken if run == command.run and i in (command.ids or [i])]
            self.taken -= {(command.run, i) for i in ids}
            return messages.Answer(command.seq, data={"groups": [[i, 0] for i in ids], "samples": len(ids)})
        if isinstance(command, messages.JudgeRound):
            self.verdicts |= dict.fromkeys(command.accept, True) | dict.fromkeys(command.reject, False)
            return messages.Answer(command.seq, data=messages.count_verdicts(self.verdicts.values()))
        if isinstance(command, messages.GetPartials):
            runs = {run for run, _ in self.taken} if command.run is None else {command.run}
            groups = [{"run": run, "id": i, "incarnation": 0} for run, i in sorted(self.taken) if run in runs]
            return messages.Answer(command.seq, data={"partials": [], "groups": groups, "unstarted": []})
        if isinstance(command, messages.PushEnd):
            self.version += 1
        brief = isinstance(command, messages.GetState) and command.brief
        more = {"closed": "", "frozen": False, "running": self.running} if brief else {}
        return messages.Answer(command.seq, data={"policy_version": self.version, **more})

    def emit(self, message: messages.Event) -> None:
        self.april.receive(messages.encode(message))

    def finish(self, opened: messages.OpenRound, *names: tuple[str, int], whole: bool = True, ids: str = "ab") -> None:
        """The samples `(id, index)` end in one step; the last of each id completes its group if `whole`."""
        last = dict(names)
        self.emit(
            messages.Finished([self.sample(opened, name, i, ids, whole and last[name] == i) for name, i in names])
        )

    def sample(
        self, opened: messages.OpenRound, name: str, index: int, ids: str, whole: bool
    ) -> messages.FinishedSample:
        return messages.FinishedSample(
            run=opened.spec.run,
            id=name,
            incarnation=0,
            index=index,
            output_ids=np.array([ord(c) for c in ids], "<i4").tobytes(),
            logprobs=np.linspace(-1, -0.1, len(ids), dtype="<f4").tobytes(),
            spans=[messages.Span(0, len(ids), self.version, "fresh")],
            finish_reason={"type": "length", "length": len(ids)},
            seed=7,
            whole=whole,
            round_id=opened.spec.round_id,
        )

    def end(
        self, opened: messages.OpenRound, *delivered: tuple[str, list[int]], reason: str = "quota", **more: Any
    ) -> None:
        complete, accepted = more.get("complete", True), more.get("accepted", {})
        deliver = [messages.Delivery(name, 0, indices, complete, accepted.get(name)) for name, indices in delivered]
        self.taken -= {(opened.spec.run, d.id) for d in deliver if d.complete}
        carried = {"groups": 0, "samples": 0, "tokens": 0, "bytes": {"device": 0, "host": 0}}
        stats = more.get("stats", {"tokens_after_quota": 0, "warnings": []})
        spec = opened.spec
        ended = messages.RoundEnded(spec.round_id, spec.run, self.version, reason, deliver, carried, stats)
        ended.verdicts = dict(self.verdicts)
        self.emit(ended)

    @property
    def opened(self) -> messages.OpenRound:
        """The latest request to open a round."""
        return [command for command in self.commands if isinstance(command, messages.OpenRound)][-1]

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> list[int]:
        if messages[-1]["role"] != "user":
            raise ValueError("the last message must be the user's")
        return list("|".join(message["content"] for message in messages).encode())

    def encode_params(self, params: dict[str, Any]) -> bytes:
        if params.get("regex") == "(":
            raise ValueError("regex is not a regular expression")
        return msgspec.msgpack.encode(params, order="sorted")

    async def rescore(self, rid: str, ids: list[int], start: int, temperature: float) -> list[float]:
        """The logprobs that `sample` gives, unless a test answers."""
        self.rescored.append((rid, ids, start, temperature))
        answer = self.rescoring[rid] = asyncio.get_running_loop().create_future()
        if not self.hold_rescores:
            answer.set_result(np.linspace(-1, -0.1, len(ids) - 1 - start, dtype="<f4").tolist())
        return await answer

    def abort(self, rid: str) -> None:
        self.rescoring[rid].set_exception(ValueError("aborted"))

    def decode(self, ids: list[int], skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str | None:
        return "".join(chr(i) for i in ids if i or not skip_special_tokens)


def service(engine: ScriptedEngine | None = None, **settings: Any) -> tuple[AprilService, ScriptedEngine]:
    """A service on a scripted engine."""
    engine = engine or ScriptedEngine()
    engine.april = AprilService(engine, AprilConfig(quota=1, **settings))
    return engine.april, engine


_names = (f"p{i}" for i in itertools.count())


def prompt(**fields: Any) -> dict[str, Any]:
    """A prompt with an id of its own."""
    return {"id": next(_names), "input_ids": [1, 2, 3], **fields}

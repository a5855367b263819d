"""A journal and a server with a smaller context or KV pool."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.scheduler import Scheduler

from sglang_april.adapter.core import restart as restart_module
from sglang_april.adapter.core.encoded_params import encode_params
from sglang_april.adapter.core.restart import restart
from sglang_april.api.messages import Prompt, Span
from sglang_april.api.run_keys import run_key
from sglang_april.config import AprilConfig
from sglang_april.recovery import schema
from sglang_april.recovery.model_identity import ModelIdentity
from tests.unit.fake_engine import FakeEngine
from tests.unit.journal_fixtures import chunk, ids, request, sample, written
from tests.unit.test_encoded_params import normalised

PROMPT, DRAWN, PAGE = 20, 10, 16
PARAMS = encode_params(normalised(max_new_tokens=50))
LEAST_CONTEXT = PROMPT + DRAWN + 3
LEAST_POOL = 32 + PAGE + DRAWN + 2
LARGE = 1000


def journal_of(path: Path, *more: schema.Op) -> Path:
    """Of the two samples of a prompt, one has tokens and one has not begun; those of another prompt have finished."""
    prompts = [Prompt("p0", ids(*range(PROMPT)), 2, 0, 7), Prompt("done", ids(*range(100)), 1, 0, 7)]
    opened = schema.accepted(request("r0").spec, 1, [(gid, 0, p, PARAMS) for gid, p in enumerate(prompts)])
    drawn = schema.tokens(0, 1, 0, chunk(*range(DRAWN)))
    done = msgspec.structs.replace(sample("done", 0, 5), spans=[Span(0, 1, 0, "fresh")])
    return written(path, opened, schema.admitted(0, 1, 0, 1), drawn, schema.finished(1, 0, 3, done), *more)


def server(context: int, pool: int) -> Any:
    model = SimpleNamespace(context_len=context)
    ps = SimpleNamespace(tp_rank=0, tp_size=1)
    return SimpleNamespace(ps=ps, model_config=model, max_total_num_tokens=pool, page_size=PAGE)


def start(monkeypatch: pytest.MonkeyPatch, path: Path, context: int, pool: int) -> Any:
    monkeypatch.setattr(restart_module, "_identity", lambda _: ModelIdentity("model", {}))
    controller = FakeEngine().controller
    try:
        restart(server(context, pool), controller, AprilConfig(quota=1, journal=str(path)), None)
    finally:
        controller.context.recorder.close()
    return controller


@pytest.mark.parametrize(
    ("context", "pool", "needed"),
    [
        (LEAST_CONTEXT - 1, LARGE, f"a --context-length of {LEAST_CONTEXT} or more, and the server has "),
        (
            LARGE,
            LEAST_POOL - 1,
            f"a KV pool of {LEAST_POOL} tokens or more, and the server has {LEAST_POOL - 1}; raise",
        ),
        (LEAST_CONTEXT, LEAST_POOL, ""),
    ],
)
def test_a_sample_that_no_longer_fits_refuses_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, context: int, pool: int, needed: str
) -> None:
    """It would end every start by an error, or block the queue."""
    path = journal_of(tmp_path / "journal")
    if needed:
        with pytest.raises(SystemExit) as refusal:
            start(monkeypatch, path, context, pool)
        assert str(refusal.value).startswith("sglang-april: the journal's prompt 'p0' of run 'run' has 20 tokens, ")
        assert needed in str(refusal.value)
    else:
        restored = start(monkeypatch, path, context, pool).context.ledger.runs["run"].groups["p0"].samples
        assert {x.length for x in restored.values()} == {0, DRAWN}


@pytest.mark.parametrize(("context", "pool"), [(LEAST_CONTEXT, LARGE), (LARGE, LEAST_POOL)])
@pytest.mark.parametrize("less", [0, 1])
def test_the_least_that_a_refusal_names_is_the_least_of_sglang(context: int, pool: int, less: int) -> None:
    s = server(*(size - less if size < LARGE else size for size in (context, pool)))
    s.max_req_len, s.max_new_tokens_limit = min(s.model_config.context_len, s.max_total_num_tokens) - 1, None
    s.server_args = SimpleNamespace(dcp_size=1)
    params = SimpleNamespace(max_new_tokens=50, min_new_tokens=0)
    Scheduler.init_req_max_new_tokens(s, SimpleNamespace(origin_input_ids=range(PROMPT), sampling_params=params))
    assert (params.max_new_tokens > DRAWN) == (less == 0)


@pytest.mark.parametrize(("context", "kept"), [(LARGE, True), (PROMPT + DRAWN + 13, False)])
def test_an_attached_request_that_no_longer_fits_begins_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, context: int, kept: bool
) -> None:
    """Its caller may never come back, and must not keep the server from starting."""
    asked = Prompt("0:rid", ids(*range(PROMPT)), 1, 0, 7)
    more = (
        schema.attached(run_key("requests", "run"), (2, 0, asked, PARAMS)),
        schema.tokens(2, 0, 0, chunk(*range(DRAWN + 11))),
    )
    controller = start(monkeypatch, journal_of(tmp_path / "journal", *more), context, LARGE)
    assert ((run_key("requests", "run"), "rid") in controller.context.saved_attached) == kept

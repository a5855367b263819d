"""Time from the last finish to the reply, and tokens computed after it: batch quota and client-side.

    python -m bench.stop_latency --running 16 64 256      # CPU; up to 1024 on a GPU

Half of the running samples are short and meet the quota; the others are long. `engine_ms` ends when the reply is handed
to the connection; `latency_ms` is the client's clock at the last byte minus the engine's at the quota (same machine,
same clock). The client-side variant counts, aborts once and waits for every response; its last finish is the time stamp
in SGLang's response. Its tokens after the end are those decoded after the client saw the quota met, which
underestimates them.
"""

import argparse
import asyncio
import tempfile
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import record
from bench.rollout.engine_client import EngineClient
from bench.rollout.servers import Size, both_servers
from examples import interrupt
from examples.tiny_model import make

SHORT = 24
LONG = 1000
REPLY_LENGTH = 100
"""Tokens of each sample of a big reply."""


def workload(running: int) -> list[dict[str, Any]]:
    """Prompts of one sample each; every second response is short."""
    params = [{"ignore_eos": True, "temperature": 1.0, "max_new_tokens": (SHORT, LONG)[i % 2]} for i in range(running)]
    return [
        {"id": str(i), "input_ids": [8 + (7 * i + j) % 400 for j in range(16)], "sampling_params": one}
        for i, one in enumerate(params)
    ]


async def batch_quota(engine: EngineClient, running: int, packed: bool) -> record.Row:
    """One round, whose partials are dropped afterwards."""
    run = f"stop-{uuid.uuid4().hex[:8]}"
    body = {"run": run, "prompts": workload(running), "quota": running // 2}
    stats = (await engine.rollout(body)).stats if packed else (await engine.post("/april/rollout", body))["stats"]
    end = time.time()
    await engine.post("/april/drop", {"run": run})
    return {
        "latency_ms": 1e3 * (end - stats["t_quota_met"]),
        "engine_ms": 1e3 * stats["quota_to_reply_s"],
        "tokens_after_end": stats["tokens_after_quota"],
    }


async def outside(engine: EngineClient, running: int) -> record.Row:
    """The same samples as stock requests, counted and aborted by this client."""

    async def one(prompt: dict[str, Any]) -> dict[str, Any]:
        asked = {"input_ids": prompt["input_ids"], "sampling_params": prompt["sampling_params"]}
        return await engine.post("/generate", {**asked, "return_logprob": True, "logprob_start_len": -1})

    pending = {asyncio.ensure_future(one(prompt)) for prompt in workload(running)}
    finished: list[dict[str, Any]] = []
    while len(finished) < running // 2:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        finished += [task.result() for task in done]
    counters = asyncio.ensure_future(engine.counters())
    await engine.abort_all()
    await asyncio.gather(*pending)
    end = time.time()
    stamps = sorted(answer["meta_info"]["response_sent_to_client_ts"] for answer in finished)
    at_end = (await counters).decoded
    return {
        "latency_ms": 1e3 * (end - stamps[running // 2 - 1]),
        "engine_ms": None,
        "tokens_after_end": (await engine.settled()).decoded - at_end,
    }


async def big_reply(engine: EngineClient, running: int, tokens: int) -> Iterable[record.Row]:
    """Time from the quota to the last byte of a reply with at least `tokens` tokens, in both formats."""
    length = min(REPLY_LENGTH, -(-tokens // running))
    count = -(-tokens // length)
    params = {"ignore_eos": True, "temperature": 1.0, "max_new_tokens": length}
    rows = []
    for packed in (False, True):
        run = f"big-{uuid.uuid4().hex[:8]}"
        prompts = [{"id": str(i), "input_ids": [8 + i % 400, 9]} for i in range(count)]
        body = {"run": run, "prompts": prompts, "sampling_params": params, "quota": count}
        stats = (await engine.rollout(body)).stats if packed else (await engine.post("/april/rollout", body))["stats"]
        latency = 1e3 * (time.time() - stats["t_quota_met"])
        rows.append(
            {"variant": "april", "format": _format(packed), "reply_tokens": count * length, "latency_ms": latency}
        )
    return rows


def _format(packed: bool) -> str:
    return "msgpack" if packed else "json"


async def measure(args: argparse.Namespace, urls: tuple[str, str], common: record.Row) -> None:
    """Run all cases, repetition by repetition."""

    def keep(row: record.Row) -> None:
        record.append_rows(args.out, [{**common, **row}])
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)

    async with EngineClient(urls[0], patched=False) as stock, EngineClient(urls[1], patched=True) as april:
        for repetition in range(args.repetitions):
            for running in args.running:
                case = {"running": running, "repetition": repetition}
                for packed in (False, True):
                    row = {"variant": "april", "format": _format(packed), **await batch_quota(april, running, packed)}
                    keep({**row, **case})
                keep({"variant": "outside", "format": "json", **await outside(stock, running), **case})
        if args.reply_tokens:
            for row in await big_reply(april, max(args.running), args.reply_tokens):
                keep(row)


def main(given: list[str] | None = None) -> int:
    """Append one row per case and repetition; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.stop_latency", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--running", type=int, nargs="+", default=[16, 64, 256], help="samples that run at the same time (%(default)s)"
    )
    parser.add_argument("--repetitions", type=int, default=5, help="repetitions of each case (%(default)s)")
    parser.add_argument(
        "--reply-tokens", type=int, default=0, help="also measure a reply with this many tokens, e.g. 1000000"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=record.RESULTS / "stop_latency.json",
        help="file to which rows are appended (%(default)s)",
    )
    parser.add_argument("--server", metavar="URL", help="URL of a running patched server")
    parser.add_argument(
        "--stock-server", metavar="URL", help="with --server: URL of a stock server (default: the patched one)"
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="folder of a checkpoint (default: a tiny model, which some attention backends do not support)",
    )
    parser.add_argument("--server-options", default="", help="further flags of both servers, in one string")
    args = parser.parse_args(given)
    common = {"bench": "stop_latency", "run_id": uuid.uuid4().hex[:12], **record.provenance()}
    if args.server:
        asyncio.run(measure(args, (args.stock_server or args.server, args.server), common))
        return 0
    with tempfile.TemporaryDirectory(prefix="april-bench-") as folder:
        slots = max(args.running)
        model, extra = args.model or make(Path(folder) / "v0"), tuple(args.server_options.split())
        size = Size(model, slots, LONG + 32, slots * (LONG + 100) + 20_000, extra)
        with both_servers(size, record.ROOT / "out" / "bench") as urls:
            asyncio.run(measure(args, urls, common))
    return 0


if __name__ == "__main__":
    interrupt.run(
        main, "rows that were measured are in bench/results/stop_latency.json; the same command measures again"
    )

"""Run many real starts as forks of one process that has imported SGLang.

Importing SGLang takes most of a start that is refused. Plugins are loaded, flags parsed and servers launched in the
fork by SGLang's own code; the fork is a session of its own, so that processes left behind are detected.

    python forked_starts.py < starts.json > outcomes.json
"""

import json
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 90


def main() -> None:
    starts = json.load(sys.stdin)
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler  # noqa: F401

    print(json.dumps({start["name"]: outcome(start) for start in starts}))


def outcome(start: dict[str, Any]) -> dict[str, Any]:
    """Exit code, standard error, and whether any process outlived the start."""
    with tempfile.NamedTemporaryFile() as stderr:
        began = time.monotonic()
        process = multiprocessing.get_context("fork").Process(target=run, args=(start, stderr.name))
        process.start()
        process.join(TIMEOUT_S)
        code = process.exitcode
        left = signal_session(process.pid or 0)
        return {
            "code": code,
            "stderr": Path(stderr.name).read_text(errors="replace"),
            "left_behind": left,
            "seconds": time.monotonic() - began,
        }


def signal_session(leader: int) -> bool:
    """Kill what is left of a session; return whether anything was."""
    for _ in range(20):
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    os.killpg(leader, signal.SIGKILL)
    return True


def run(start: dict[str, Any], stderr: str) -> None:
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.update(start.get("env", {}))
    sys.path[:0] = start.get("sys_path", [])
    sys.argv = ["server", *start.get("argv", [])]
    ENTRIES[start["entry"]](start)


def as_module(start: dict[str, Any]) -> None:
    runpy.run_module(start["module"], run_name="__main__", alter_sys=True)


def as_command(_: dict[str, Any]) -> None:
    from sglang.cli.serve import serve

    serve(None, sys.argv[1:])


def as_engine(start: dict[str, Any]) -> None:
    import sglang

    sglang.Engine(**start["arguments"])


def with_arguments_built_before_plugins(start: dict[str, Any]) -> None:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    launch_server(ServerArgs(**start["arguments"]))


def without_hook_target(start: dict[str, Any]) -> None:
    """A hook that cannot be applied, which SGLang's loader only logs."""
    from sglang.srt.managers.scheduler import Scheduler

    del Scheduler.get_init_info
    as_module(start)


def unreviewed_source(start: dict[str, Any]) -> None:
    """The only manifest is one in which a hooked function has another body than in the installed SGLang."""
    from sglang_april.adapter import versions

    manifest = {**json.loads(json.dumps(versions.installed())), "sglang": "0.0.1"}
    symbol = manifest["symbols"]["sglang.srt.server_args.ServerArgs.check_server_args"]
    symbol["body"] = manifest["files"][symbol["file"]] = "0123"
    versions.FINGERPRINTS = Path(tempfile.mkdtemp())
    (versions.FINGERPRINTS / "0.0.1.json").write_text(json.dumps(manifest))
    as_module(start)


def without_activation(_: dict[str, Any]) -> None:
    """An installed plugin that is not activated registers nothing."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    sources = {source.dist_name for rows in HookRegistry._hooks.values() for _, _, source in rows if source}
    raise SystemExit(17 if "sglang-april" not in sources and "sglang_april.adapter" not in sys.modules else 1)


ENTRIES = {
    "module": as_module,
    "command": as_command,
    "engine": as_engine,
    "prebuilt": with_arguments_built_before_plugins,
    "without_target": without_hook_target,
    "unreviewed_source": unreviewed_source,
    "inactive": without_activation,
}


if __name__ == "__main__":
    main()

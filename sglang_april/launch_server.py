"""`python -m sglang_april.launch_server`: SGLang's server, which starts only if the plugin is loaded."""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from sglang_april import config, interrupt
from sglang_april.launch_checks import reason_not_startable

PLUGIN = "april"
PLATFORM = "april_cpu"


def reason_not_loaded(env: Mapping[str, str]) -> str | None:
    """Why SGLang would silently skip the plugin, or None."""
    platform = env.get("SGLANG_PLATFORM")
    if platform and platform != PLATFORM:
        return f"SGLANG_PLATFORM={platform} makes SGLang skip every plugin that provides another platform"
    allowed = env.get("SGLANG_PLUGINS")
    if allowed and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        return f"SGLANG_PLUGINS={allowed} does not contain the plugin {PLUGIN}"
    return None


def status_after(error: RuntimeError) -> str | int | None:
    """What to exit with if a scheduler ended during the start; None for other errors.

    A scheduler that exits with 1 has printed why. SGLang's traceback of the launcher and its hint at a lack of memory
    would hide that sentence.
    """
    message = str(error)
    if "scheduler died during initialization" not in message:
        return None
    return 1 if "(exit code: 1)" in message else f"sglang-april: {message}"


def main(argv: Sequence[str]) -> None:
    """Launch as `python -m sglang.launch_server` does, after making sure that the hooks are in place."""
    if find_spec("sglang") is None:
        install = "pip install 'sglang-april[engine]' sglang==0.5.17"
        raise SystemExit(f"sglang-april: SGLang is not installed; {install} installs it.")
    reason = reason_not_loaded(os.environ) or reason_not_startable(argv)
    if reason is not None:
        raise SystemExit(f"sglang-april: {reason}.")
    try:
        config.publish(config.from_env(os.environ) | config.from_argv(argv))
    except config.ConfigError as error:
        raise SystemExit(f"sglang-april: {error}") from error
    interrupt.handle()

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from sglang_april.adapter import hooking

    load_plugins()
    if not hooking.hook_report():
        raise SystemExit("sglang-april: SGLang did not load the plugin, so partial rollouts would not be served.")
    server_args = prepare_server_args(list(argv))
    try:
        run_server(server_args)
    except SystemExit as end:
        # A server that fails kills itself (`kill_process_tree`). Process 1 of a container cannot, and exits with 0.
        raise SystemExit(end.code or 1) from end
    except RuntimeError as error:
        status = status_after(error)
        if status is None:
            raise
        raise SystemExit(status) from None
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])

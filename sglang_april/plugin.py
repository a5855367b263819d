"""SGLang's entry point into sglang-april: registers hooks, and nothing else.

SGLang calls `register` in every process that loads plugins. Its loader logs and swallows exceptions and would
serve without the plugin. Only SystemExit escapes it, so every error becomes one.
"""


def register() -> None:
    """Check the installed SGLang and apply the hooks; do nothing unless activated (`explicit-activation`)."""
    try:
        _register()
    except Exception as error:
        raise SystemExit(f"sglang-april: {error}") from error


def _register() -> None:
    import os
    import sys

    from sglang_april import config

    if not config.is_active():
        return

    from sglang_april.adapter import hooking, preflight

    config.publish(config.from_env(os.environ) | config.from_argv(sys.argv[1:]))
    # Every rank must see the same sampled tokens; SGLang reads this when its sampler is imported.
    os.environ["SYNC_TOKEN_IDS_ACROSS_TP"] = "1"  # noqa: S105 - no password
    preflight.check()
    hooking.apply()

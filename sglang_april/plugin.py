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

    from sglang_april.adapter import hooking, preflight, versions

    config.publish(config.from_env(os.environ) | config.from_argv(sys.argv[1:]))
    preflight.check()
    os.environ.update(versions.start().ENVIRONMENT)
    hooking.apply()

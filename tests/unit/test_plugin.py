"""The plugin's entry point."""

import os

import pytest

from sglang_april import config, plugin
from sglang_april.adapter import hooking, preflight


@pytest.mark.parametrize(("activation", "expected"), [('{"quota": 4}', "1"), (None, "0")])
def test_active_plugin_synchronizes_sampled_tokens_across_ranks(
    monkeypatch: pytest.MonkeyPatch, activation: str | None, expected: str
) -> None:
    """Without SYNC_TOKEN_IDS_ACROSS_TP, ranks could sample different tokens and decide differently."""
    monkeypatch.setattr("sys.argv", ["server"])
    monkeypatch.setenv("SYNC_TOKEN_IDS_ACROSS_TP", "0")
    monkeypatch.delenv("SGLANG_APRIL", raising=False)
    if activation:
        monkeypatch.setenv("SGLANG_APRIL", activation)
    for module, name in ((preflight, "check"), (hooking, "apply"), (config, "publish")):
        monkeypatch.setattr(module, name, lambda *_: None)
    plugin.register()
    assert os.environ["SYNC_TOKEN_IDS_ACROSS_TP"] == expected

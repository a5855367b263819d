"""The hook table of the made-up release."""

from sglang_april.adapter.hook import Hook

_ENGINE = "tests.unit.fake_adapter.engine.Engine."

HOOKS = (Hook("around", "hooks:multiply", (_ENGINE + "step",), "shows that the handler runs", "never"),)
DEPENDS_ON = (_ENGINE + "flush",)

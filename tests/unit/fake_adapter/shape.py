"""The shape of the made-up release."""

DEPENDS_ON = ()
TARGETS: dict[str, tuple[str, ...]] = {}
HOOKS = ()

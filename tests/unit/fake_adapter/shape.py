"""The shape of the made-up release."""


class MadeUp:
    """Nothing differs."""

    DEPENDS_ON = ()
    TARGETS: dict[str, tuple[str, ...]] = {}
    HOOKS = ()


SHAPE = MadeUp()

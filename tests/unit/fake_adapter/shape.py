"""The shape of the made-up release."""

from typing import ClassVar


class MadeUp:
    """Nothing differs."""

    DEPENDS_ON = ()
    TARGETS: ClassVar[dict[str, tuple[str, ...]]] = {}
    HOOKS = ()


SHAPE = MadeUp()

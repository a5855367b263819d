"""The shape of the made-up release."""

DEPENDS_ON = ()

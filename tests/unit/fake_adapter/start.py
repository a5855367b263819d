"""What the made-up release needs before hooks are applied."""

import contextlib

ENVIRONMENT = {"MADE_UP_RELEASE": "1"}
applying_hooks = contextlib.nullcontext

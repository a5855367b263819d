"""Exceptions that a server's log shows behind answers with status 500."""

import re
from collections import Counter
from typing import NamedTuple

START = re.compile(r"Exception in ASGI application|Error in request")
"""What uvicorn logs of an exception of a route, and what SGLang's OpenAI routes log of one that they answer."""
FRAME = re.compile(r'[\s|+]*File "(?P<file>.+)", line \d+, in (?P<function>\S+)')
RECORD = re.compile(r"\[20\d\d-|INFO:|ERROR:")


class Raised(NamedTuple):
    """Where an exception was raised."""

    package: str
    """`sglang`, `sglang_april`, or another top-level folder."""
    function: str


def raised(log: str) -> Counter[Raised]:
    """The innermost frame of each exception."""
    found: Counter[Raised] = Counter()
    for part in START.split(log)[1:]:
        innermost = None
        for line in part.splitlines()[1:]:
            if frame := FRAME.match(line):
                innermost = frame
            elif RECORD.match(line):
                break
        if innermost is not None:
            found[Raised(_package(innermost["file"]), innermost["function"])] += 1
    return found


def _package(file: str) -> str:
    folders = file.rpartition("site-packages/")[2].split("/")
    return "sglang_april" if "sglang_april" in folders else folders[0]

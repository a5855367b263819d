"""Records with a checksum."""

import zlib
from typing import Any

import msgspec


class CorruptRecordError(ValueError):
    """A record whose checksum does not match."""


def seal(value: Any, *key: Any) -> bytes:
    """msgpack preceded by a CRC-32 over it and over the key columns of its row."""
    body = msgspec.msgpack.encode(value)
    return _crc(body, key) + body


def unseal(blob: Any, kind: Any, *key: Any) -> Any:
    """The value that was given to `seal`.

    Raises:
        CorruptRecordError: the record was changed, or moved to another row.
    """
    if not isinstance(blob, bytes) or len(blob) < 4 or blob[:4] != _crc(body := blob[4:], key):
        raise CorruptRecordError
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptRecordError from error


def _crc(body: bytes, key: tuple[Any, ...]) -> bytes:
    return zlib.crc32(body, zlib.crc32(msgspec.msgpack.encode(key))).to_bytes(4, "little")

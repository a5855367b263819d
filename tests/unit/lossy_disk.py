"""A disk that loses unsynced data: records what SQLite writes, truncates and syncs, to simulate a loss of power.

An SQLite VFS (sqlite.org/vfs.html) around the default one, registered with ctypes in the library of Python's `sqlite3`.
Python keeps references to everything that C refers to: the name, the structures and the callbacks.
"""

import ctypes as c
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

SECTOR = 512
"""What a disk writes whole or not at all."""

_INT, _PTR, _LONG = c.c_int, c.c_void_p, c.c_int64
_XOPEN = c.CFUNCTYPE(_INT, _PTR, c.c_char_p, _PTR, _INT, _PTR)
_XDELETE = c.CFUNCTYPE(_INT, _PTR, c.c_char_p, _INT)
_XWRITE = c.CFUNCTYPE(_INT, _PTR, _PTR, _INT, _LONG)
_XTRUNCATE = c.CFUNCTYPE(_INT, _PTR, _LONG)
_XSYNC = c.CFUNCTYPE(_INT, _PTR, _INT)
OK = 0


class _Vfs(c.Structure):
    _fields_ = [
        ("version", _INT),
        ("file_size", _INT),
        ("max_path", _INT),
        ("next", _PTR),
        ("name", c.c_char_p),
        ("data", _PTR),
        ("open", _PTR),
        ("delete", _PTR),
        *[(f"rest{i}", _PTR) for i in range(14)],
    ]


class _Methods(c.Structure):
    _fields_ = [
        ("version", _INT),
        ("close", _PTR),
        ("read", _PTR),
        ("write", _PTR),
        ("truncate", _PTR),
        ("sync", _PTR),
        *[(f"rest{i}", _PTR) for i in range(13)],
    ]


class Act(NamedTuple):
    """What happened to a file; `kind` is write, truncate, sync, delete, or mark (a word of the test's own)."""

    kind: str
    file: str
    at: int = 0
    data: bytes = b""


def library() -> c.CDLL | None:
    """The SQLite library that `sqlite3` uses, if its symbols are visible."""
    found = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "sqlite3" in line}
    for path in sorted(found, key=lambda path: "libsqlite3" not in path):
        lib = c.CDLL(path)
        if hasattr(lib, "sqlite3_vfs_register"):
            lib.sqlite3_vfs_find.restype = c.POINTER(_Vfs)
            lib.sqlite3_vfs_find.argtypes = [c.c_char_p]
            lib.sqlite3_vfs_register.argtypes = [c.POINTER(_Vfs), _INT]
            lib.sqlite3_vfs_unregister.argtypes = [c.POINTER(_Vfs)]
            return lib
    return None


class Recording:
    """All operations since the start, in order."""

    def __init__(self, lib: c.CDLL) -> None:
        self.acts: list[Act] = []
        self._lib = lib
        self._stock = lib.sqlite3_vfs_find(None)
        self._files: dict[int, str] = {}
        self._methods: dict[int, _Methods] = {}
        self._stock_open = _XOPEN(self._stock.contents.open)
        self._stock_delete = _XDELETE(self._stock.contents.delete)
        self._hold: list[Any] = [_XOPEN(self._open), _XDELETE(self._delete)]
        self._name = c.create_string_buffer(b"april-power")
        self._vfs = _Vfs.from_buffer_copy(self._stock.contents)
        self._vfs.next, self._vfs.name = None, c.cast(self._name, c.c_char_p)
        self._vfs.open, self._vfs.delete = (c.cast(f, _PTR) for f in self._hold)

    def mark(self, number: int) -> None:
        """Record that this many batches are acknowledged as durable."""
        self.acts.append(Act("mark", "", number))

    def register(self) -> None:
        self._lib.sqlite3_vfs_register(c.byref(self._vfs), 1)

    def unregister(self) -> None:
        self._lib.sqlite3_vfs_unregister(c.byref(self._vfs))
        self._lib.sqlite3_vfs_register(self._stock, 1)

    # --- called by SQLite

    def _open(self, _vfs: int, name: bytes | None, file: int, flags: int, out: int | None) -> int:
        status = self._stock_open(c.cast(self._stock, _PTR), name, file, flags, out)
        if status == OK and name is not None:
            self._files[file] = Path(name.decode()).name
            slot = c.cast(file, c.POINTER(_PTR))
            stock = slot[0]
            if stock not in self._methods:
                self._methods[stock] = self._wrapped(_Methods.from_address(stock))
            slot[0] = c.addressof(self._methods[stock])
        return status

    def _wrapped(self, stock: _Methods) -> _Methods:
        write, truncate, sync = _XWRITE(stock.write), _XTRUNCATE(stock.truncate), _XSYNC(stock.sync)

        def on_write(file: int, data: int, size: int, at: int) -> int:
            self.acts.append(Act("write", self._files[file], at, c.string_at(data, size)))
            return write(file, data, size, at)

        def on_truncate(file: int, size: int) -> int:
            self.acts.append(Act("truncate", self._files[file], size))
            return truncate(file, size)

        def on_sync(file: int, flags: int) -> int:
            self.acts.append(Act("sync", self._files[file]))
            return sync(file, flags)

        callbacks = [_XWRITE(on_write), _XTRUNCATE(on_truncate), _XSYNC(on_sync)]
        self._hold += [write, truncate, sync, *callbacks]
        wrapped = _Methods.from_buffer_copy(stock)
        wrapped.write, wrapped.truncate, wrapped.sync = (c.cast(f, _PTR) for f in callbacks)
        return wrapped

    def _delete(self, _vfs: int, name: bytes, sync_folder: int) -> int:
        self.acts.append(Act("delete", Path(name.decode()).name))
        return self._stock_delete(c.cast(self._stock, _PTR), name, sync_folder)


@contextmanager
def recorded(lib: c.CDLL) -> Iterator[Recording]:
    """In this context, every database that is opened is recorded."""
    recording = Recording(lib)
    recording.register()
    try:
        yield recording
    finally:
        recording.unregister()


def after_power_loss(acts: list[Act], folder: Path, rng: random.Random) -> int:
    """Write the files as they may be on a disk that lost power after these operations; returns the last mark.

    Synced data is complete. Of every other write, any subset of its sectors is present.
    """
    safe: dict[str, list[Act]] = {}
    loose: dict[str, list[Act]] = {}
    mark = 0
    for act in acts:
        if act.kind == "mark":
            mark = act.at
        elif act.kind == "sync":
            safe.setdefault(act.file, []).extend(loose.pop(act.file, []))
        elif act.kind == "delete":
            safe.pop(act.file, None)
            loose.pop(act.file, None)
        else:
            loose.setdefault(act.file, []).append(act)
    for file in safe.keys() | loose.keys():
        content = bytearray()
        for act in safe.get(file, []):
            _apply(content, act)
        for act in (a for a in loose.get(file, []) if rng.random() < 0.5):
            _apply(content, act if act.kind == "truncate" else _torn(act, rng))
        (folder / file).write_bytes(content)
    return mark


def _apply(content: bytearray, act: Act) -> None:
    if act.kind == "truncate":
        del content[act.at :]
    else:
        content.extend(bytes(max(0, act.at - len(content))))
        content[act.at : act.at + len(act.data)] = act.data


def _torn(act: Act, rng: random.Random) -> Act:
    if rng.random() < 0.7:
        return act
    return act._replace(data=act.data[: SECTOR * rng.randint(0, len(act.data) // SECTOR)])

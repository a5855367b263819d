"""Live servers, shared over the session. At most `ALIVE` run at once; tests are ordered so that each starts once."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.tiny_model import make
from tests.support.server import Server

ALIVE = 3
"""Live servers at once: about 3.5 GB each."""

NORMAL = ["--disable-overlap-schedule", "--max-total-tokens=16000"]
OVERLAP = ["--max-total-tokens=16000"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that end a shared server come last."""
    items.sort(key=lambda item: item.get_closest_marker("ends_server") is not None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The guards, and the tests that went red without them (test_guards.py)."""
    passed = [report for report in terminalreporter.stats.get("passed", ()) if report.when == "call"]
    shown = [(dict(report.user_properties).get("guard"), report.nodeid) for report in passed]
    if any(guard for guard, _ in shown):
        terminalreporter.section("guards, and the tests that failed without them as they should")
        for guard, test in shown:
            if guard:
                terminalreporter.write_line(f"{guard:14} {test}")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """`models(family, seed)`: a tiny random float32 model; two seeds are two policies of one shape."""
    root = tmp_path_factory.mktemp("models")

    def model(family: str = "qwen3", seed: int = 0) -> Path:
        path = root / f"{family}-{seed}"
        return path if path.exists() else Path(make(path, family=family, dtype="float32", seed=seed))

    return model


class Pool:
    """Starts servers on demand; the one used longest ago makes room."""

    def __init__(self, models: Callable[[str, int], Path], folder: Path) -> None:
        self._models, self._folder = models, folder
        self._live: OrderedDict[str, Server] = OrderedDict()

    def get(self, name: str, flags: list[str], family: str = "qwen3", env: dict[str, str] | None = None) -> Server:
        """The live server of this name; started if it does not run (any more)."""
        server = self._live.pop(name, None)
        if server is None or not server.alive:
            while len(self._live) >= ALIVE:
                self._live.popitem(last=False)[1].stop()
            server = Server(name, self._models(family, 0), flags, self._folder / name, env or {})
            server.spawn()
            server.wait()
        self._live[name] = server
        return server

    def close(self) -> None:
        for server in self._live.values():
            server.stop()


@pytest.fixture(scope="session")
def pool(models: Callable[[str, int], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(models, tmp_path_factory.mktemp("servers"))
    yield pool
    pool.close()


@pytest.fixture
def server(pool: Pool) -> Server:
    """Qwen3 shape, normal loop."""
    return pool.get("normal", NORMAL)


@pytest.fixture
def overlap(pool: Pool) -> Server:
    """Llama shape, overlap loop."""
    return pool.get("overlap", OVERLAP, "llama")


_names = itertools.count()


@pytest.fixture
def run() -> str:
    """A run name that no other test has."""
    return f"run-{next(_names)}"

"""Live servers, shared over a session. At most `ALIVE` run at once; tests are ordered so that each starts once.

Each server is reset before a test. A failed test is rerun once, because tests and servers share few cores. Resets that
needed a new server and reruns (`tests/conftest.py`) are reported at the end of the output.
"""

import itertools
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.april_demo.server import has_gpu
from examples.tiny_model import make
from tests.support.fork_server import ForkServer
from tests.support.live import LiveServer, live_server
from tests.support.server import Server

ALIVE = 3 if "PYTEST_XDIST_WORKER" not in os.environ else 2
"""Live servers at once, of each worker: about 3.5 GB each."""

NORMAL = ["--disable-overlap-schedule", "--max-total-tokens=16000"]
OVERLAP = ["--max-total-tokens=16000"]
SHARED = {"server", "overlap", "normal", "live", "each_loop", "guarded"}
"""Fixtures that use the server of the normal loop or that of the overlap loop."""
SMALL = ["--max-total-tokens=400", "--max-running-requests=12", "--april-host-gb=0.00015"]
"""400 tokens on the device and 146 on the host, of 1,024 bytes each."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow live tests one rerun. Servers of few tests come first, then the shared two, then tests that end them.

    One worker runs all tests of the shared servers, so that they start only once.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.flaky(reruns=1))
            shared = SHARED & _fixtures(item)
            item.add_marker(pytest.mark.xdist_group("shared servers" if shared else "servers of few tests"))
    items.sort(key=lambda item: (item.get_closest_marker("ends_server") is not None, bool(SHARED & _fixtures(item))))


def _fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """`models(family, seed)`: a tiny random float32 model; two seeds are two policies of one shape."""
    root = tmp_path_factory.mktemp("models")

    def model(family: str = "qwen3", seed: int = 0) -> Path:
        path = root / f"{family}-{seed}"
        return path if path.exists() else Path(make(path, family=family, dtype="float32", seed=seed))

    return model


class Pool:
    """Starts servers on demand and stops the least recently used one at the limit."""

    def __init__(self, models: Callable[[str, int], Path], folder: Path) -> None:
        self._models, self.folder, self.fork_server = models, folder, ForkServer()
        self._live: OrderedDict[str, Server] = OrderedDict()
        self._started: set[str] = set()
        self._gpu = has_gpu()

    def get(
        self,
        name: str,
        flags: list[str],
        family: str = "qwen3",
        env: dict[str, str] | None = None,
        *,
        forked: bool = False,
        model: Path | None = None,
    ) -> Server:
        """Return the live server of this name after a reset; start it if it does not run.

        `forked`: start it from the fork server (tests/support/fork_server.py), which takes seconds, for servers that
        few tests use or that are killed. Others are started as users do, and forked if they are started again.
        `model`: instead of the tiny model of the family.
        """
        server = self._live.pop(name, None)
        if server is not None and server.alive and not server.reset():
            warnings.warn(f"server {name} was replaced: {server.reset_failure}", stacklevel=1)
            server.stop()
        if server is None or not server.alive:
            self.make_room()
            folder = self.folder / name
            (folder / "disk").mkdir(parents=True, exist_ok=True)
            tiers = [f"--april-disk-dir={folder / 'disk'}", "--april-disk-gb=1"]
            server = Server(name, model or self._models(family, 0), [*flags, *tiers], folder, env or {})
            again = name in self._started and server.may_be_forked
            # SGLang's models initialise CUDA when they are imported, and no fork can use it after that.
            server.fork_server = self.fork_server if (forked or again) and not self._gpu else None
            self._started.add(name)
            server.spawn()
            server.wait()
        self._live[name] = server
        return server

    def make_room(self) -> None:
        """Stop servers until another one may start."""
        while len(self._live) >= ALIVE:
            self._live.popitem(last=False)[1].stop()

    def close(self) -> None:
        for server in self._live.values():
            server.stop()
        self.fork_server.close()


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


@pytest.fixture
def normal(server: Server, models: Callable[[str, int], Path]) -> Iterator[LiveServer]:
    """The server with the normal loop, and the policies pushed to it."""
    with live_server(server, lambda seed: models("qwen3", seed)) as live:
        yield live


@pytest.fixture
def second(pool: Pool, models: Callable[[str, int], Path]) -> Iterator[LiveServer]:
    """A second server like the first."""
    with live_server(pool.get("second", NORMAL, forked=True), lambda seed: models("qwen3", seed)) as live:
        yield live


@pytest.fixture(params=["normal", "overlap"])
def live(request: pytest.FixtureRequest, models: Callable[[str, int], Path]) -> Iterator[LiveServer]:
    """Both shared servers, one after the other."""
    name, family = ("server", "qwen3") if request.param == "normal" else ("overlap", "llama")
    server: Server = request.getfixturevalue(name)
    with live_server(server, lambda seed: models(family, seed)) as live:
        yield live


@pytest.fixture
def tp2(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Two ranks, overlap loop, Llama shape, random retracts; each rank writes a digest of its decisions."""
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_APRIL_DIGEST": str(tmp_path_factory.mktemp("digests"))}
    return pool.get("tp2", ["--tp-size=2", "--max-total-tokens=4000"], "llama", env)


@pytest.fixture
def small(pool: Pool, models: Callable[[str, int], Path]) -> Iterator[LiveServer]:
    """Overlap loop, with little memory on the device and on the host."""
    with live_server(pool.get("small", SMALL, "llama", forked=True), lambda seed: models("llama", seed)) as live:
        yield live


_names = itertools.count()


@pytest.fixture
def run() -> str:
    """A unique run name."""
    return f"run-{next(_names)}"

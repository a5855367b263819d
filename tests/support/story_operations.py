"""What drawn stories do to a live server: pauses, pushes, weight calls, flushes, releases and waits."""

from hypothesis import strategies as st

from tests.support.live import LiveServer, until

SHARED_OPERATIONS = (
    st.tuples(st.just("pause"), st.sampled_from(["in_place", "retract", "abort"])),
    st.tuples(st.just("unpause")),
    st.tuples(st.just("push"), st.integers(0, 1)),
    st.tuples(st.just("load"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("flush")),
    st.tuples(st.just("release")),
    st.tuples(st.just("wait"), st.integers(1, 6)),
)
"""Strategies of the methods of `StoryOperations`: each draws a name and its arguments."""


class StoryOperations:
    """The operations that all stories share."""

    def __init__(self, live: LiveServer) -> None:
        self.live, self.paused = live, False

    def pause(self, mode: str) -> None:
        self.live.server.post("/pause_generation", {"mode": mode})
        self.paused = True
        assert self.live.running() == 0

    def unpause(self) -> None:
        self.live.server.post("/continue_generation", {})
        self.paused = False

    def push(self, seed: int) -> None:
        self.live.push(seed, flush=False)

    def load(self, seed: int, flush: bool) -> None:
        """Without begin and end: under a pause it is applied at once, else it waits for an open round."""
        assert self.live.load(seed, flush=flush)["success"]
        self.live.policies[self.live.version] = self.live.model(seed)

    def flush(self) -> None:
        self.live.server.post("/flush_cache")

    def release(self) -> None:
        if self.paused:
            for call in ("release", "resume"):
                self.live.server.post(f"/{call}_memory_occupation", {"tags": ["kv_cache"]})

    def wait(self, steps: int) -> None:
        """Until so many tokens have been drawn, if anything runs."""
        if not self.paused and self.live.running():
            before = self.live.decodes()
            until(lambda: self.live.decodes() >= before + steps or not self.live.running(), "it decodes")

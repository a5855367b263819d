"""Pushes, and the other interruptions that need all rollout samples out of the engine (`suspend-before-interrupt`)."""

from typing import Any

from sglang_april.api import messages
from sglang_april.api.errors import RequestError
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.round_end import RoundEnd
from sglang_april.scheduler.suspend import Suspender
from sglang_april.scheduler.version_clock import UNNAMED


class Interrupter:
    def __init__(self, context: Context, suspender: Suspender, round_end: RoundEnd) -> None:
        self._c = context
        self._suspender = suspender
        self._round_end = round_end
        self._of_session = False
        """The open push was opened by `session_begun`."""

    def interrupt(self) -> None:
        """End the rounds that are over, and suspend the samples of all others."""
        self._round_end.end_due()
        self._suspender.suspend_all()
        self._round_end.end_due()

    def begin(self, version: int | None) -> None:
        self._c.clock.begin(version)
        self._of_session = False
        self._c.engine.end_weight_session()  # an earlier push may have left one open
        self.interrupt()

    def session_begun(self) -> None:
        """SGLang's own bracket around weight calls is a push, unless it is inside of one."""
        if self._of_session or not self._c.clock.open:
            self._c.clock.begin(None)
            self._of_session = True

    def session_ended(self) -> str:
        """The end of that bracket; returns why the version has not moved, or an empty string."""
        if self._of_session:
            try:
                self.end(None)
            except RequestError as error:
                return str(error)
            self._of_session = False
        return ""

    def end(self, version: int | None) -> dict[str, Any]:
        self._c.engine.end_weight_session()  # also if the push has failed
        self._c.clock.end(version)
        self._suspender.suspend_all()  # attached requests that have arrived since the last step, under the old version
        self._version_moved()
        return {"policy_version": self._c.clock.version}

    def weight_call_ended(self, ok: bool, message: str, *, whole: bool, refused: bool, named: int | None) -> None:
        """One of SGLang's weight calls has been applied, has failed on some rank, or was refused unchanged."""
        c = self._c
        if c.clock.weight_call(
            ok, message, c.engine.forward_count(), whole=whole, refused=refused, named=named, paused=c.frozen
        ):
            self._version_moved()

    def _version_moved(self) -> None:
        c = self._c
        c.trace(f"version {c.clock.version}")
        c.recorder.version(c.clock.version)
        if c.clock.without_weights:
            c.clock.unnamed = c.clock.lost = False
            c.recorder.send(messages.Named(c.clock.version))
        c.engine.version = c.clock.version
        c.engine.renew_keys()
        for rnd in (*c.rounds.values(), *c.ahead.values()):
            rnd.mark_mandatory(c.clock.version)
            rnd.stats.pushes += 1
        self._round_end.mark_due()

    def weights_lost(self) -> None:
        """The weights were dropped or reset: nothing steps until a push, which may name the same version."""
        self._c.clock.lost = True
        self._c.engine.version = UNNAMED
        self._c.engine.renew_keys()  # a request that waits must not leave KV under the version of the lost weights

    def freeze(self) -> None:
        """Begin a pause: no rollout sample takes a step until `thaw`."""
        self.interrupt()
        self._c.frozen = True

    def thaw(self) -> None:
        self._c.frozen = False

    def abort_everything(self) -> None:
        """SGLang's abort of all requests ends open rounds and leaves the carry untouched (`only-drop-deletes`)."""
        self._round_end.end_due()
        for rnd in list(self._c.rounds.values()):
            self._round_end.stop(rnd, None)

"""The policy version: an integer that rises once per push and never falls (`one-version-per-push`).

Pure: no clock, no engine. `VersionClock` is replicated on every rank and receives the same messages.
"""

from dataclasses import dataclass

from sglang_april.api.errors import RequestError

UNNAMED = -1
"""In place of a version, in the cache keys of requests while the weights are those of no version."""


@dataclass(slots=True)
class VersionClock:
    version: int = 0
    open: bool = False
    failed: str = ""
    """Why the weights may be half updated; empty if they are not."""
    unnamed: bool = False
    """True after a restart with a journal until the version of the weights loaded at start is named."""
    lost: bool = False
    """True after a release of memory, or a reset, that has dropped the weights, until the next push."""
    _target: int | None = None
    _moved_at: int = -1
    """Forward count when a weight call outside begin/end last moved the version."""

    @property
    def closed(self) -> str:
        """Why no sample may take a step, or an empty string."""
        if self.failed:
            return f"the weights are updated only in part: {self.failed}; push them again"
        if self.open:
            return "a push is open: POST /april/push/end ends it"
        if self.unnamed:
            return f"the journal is at policy version {self.version}: name the version by --april-version or by a push"
        if self.lost:
            return (
                "the weights are lost: memory was released without --enable-weights-cpu-backup, or the weights checker "
                "has reset them; push them again between push/begin and push/end, or under a pause"
            )
        return ""

    @property
    def without_weights(self) -> bool:
        """Whether the weights of the version are not known to be loaded. A push may then name the same version."""
        return self.unnamed or self.lost

    def begin(self, version: int | None) -> None:
        """Open a push, or restart an open one.

        Raises:
            RequestError: 409, the version is not greater than the current one.
        """
        self._check(version)
        self.open, self.failed, self._target = True, "", version

    def end(self, version: int | None) -> int:
        """Close the push and move the version once; returns the new version.

        Raises:
            RequestError: 409, no push is open, one of its weight calls failed, or the version is not greater.
        """
        if not self.open:
            raise RequestError(409, "push", "no push is open: POST /april/push/begin opens one")
        if self.failed:
            raise RequestError(409, "push", f"a weight call of this push failed: {self.failed}; start it again")
        target = version if version is not None else self._target
        self._check(target)
        self.version = target if target is not None else self.version + 1
        self.open, self._target = False, None
        return self.version

    def refusal(self, named: int | None) -> str:
        """Why a weight call that names this version is refused before it changes anything, or an empty string."""
        if named is None:
            return ""
        if self.open and self._target not in (None, named):
            return f"weight_version is {named}, but the open push is to version {self._target}"
        if named < self.version + bool(not self.without_weights and (self.open or self.failed)):
            return f"weight_version is {named}, but the policy version is {self.version} and never decreases"
        return ""

    def weight_call(
        self,
        ok: bool,
        message: str,
        forward_count: int,
        *,
        whole: bool,
        refused: bool = False,
        named: int | None = None,
        paused: bool = False,
    ) -> bool:
        """One of SGLang's weight calls has ended; returns whether the version moved, or was named again.

        Outside begin/end the version moves at the first accepted call after any forward; further calls before the next
        forward belong to the same push. If the calls name it, it moves to what they name, at the first one. A bucket
        outside begin/end heals no earlier failure, because the last bucket of a push cannot be recognised. For the same
        reason it names no version after a restart and replaces no lost weights, unless under a pause, whose end is the
        end of the push.

        Args:
            whole: the call carries the complete policy (from disk), so it can do all of that.
            refused: the call has changed no weight. It fails only a push of which other calls may have arrived.
            named: the policy version that the call names; `refusal` accepts it.
            paused: generation is paused.
        """
        if refused and not self.open and (self._moved_at != forward_count or self.refusal(named)):
            return False
        if not ok:
            self.failed = message or "a weight call failed"
            return False
        if self.open:
            self._target = self._target if named is None else named
            return False
        if self.failed and not whole:
            return False
        if self.unnamed and not (whole or (paused and named is not None)):
            return False
        if self.lost and not (whole or paused):
            return False
        if named is not None:
            moved = named > self.version or self.without_weights
        else:
            moved = bool(self.failed) or self.lost or self._moved_at != forward_count
        self.failed = ""
        if moved:
            self._moved_at = forward_count
            self.version = self.version + 1 if named is None else named
        return moved

    def _check(self, version: int | None) -> None:
        if version is not None and version < self.version + (not self.without_weights):
            raise RequestError(409, "version", f"policy version is {self.version}; a push must name a greater one")

"""How long an engine had work."""

import time


class BusyTime:
    """Seconds in which there were unfinished requests, up to now.

    >>> busy = BusyTime()
    >>> busy.note(has_work=True)
    >>> 0 < busy.seconds < 1
    True
    """

    def __init__(self) -> None:
        self._before_s = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._before_s + (time.monotonic() - self._since if self._since is not None else 0.0)

    def note(self, has_work: bool) -> None:
        """From now on there is work, or there is none."""
        self._before_s, self._since = self.seconds, time.monotonic() if has_work else None

"""The one thing that flows back to the loop: what to do between two steps."""

from dataclasses import dataclass


@dataclass(slots=True)
class Control:
    """Requests that the loop acts on after the current step; callbacks and signal handlers set them."""

    stop: bool = False
    """End the run after this step, with everything saved."""
    save: bool = False
    """Write a checkpoint after this step."""
    validate: bool = False
    """Run validation after this step."""
    reason: str = ""
    """Why `stop` was set, in words for people."""
    interrupted: bool = False
    """Whether a signal, such as Ctrl-C, set `stop`."""

    def begin(self) -> None:
        """Forget why the training before has stopped."""
        self.stop, self.reason, self.interrupted = False, "", False

    def request_stop(self, reason: str, *, by_signal: bool = False) -> None:
        """Ask the loop to stop; the first reason given is kept."""
        if not self.stop:
            self.stop, self.reason, self.interrupted = True, reason, by_signal

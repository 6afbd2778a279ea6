"""A whole number that may change at given epochs, such as the size of batches."""

from collections.abc import Iterator, Mapping

from etude.core.arguments import as_whole
from etude.core.errors import ConfigError


class ByEpoch:
    """A number, or a schedule `{epoch: number}` that starts at epoch 0.

    >>> sizes = ByEpoch("batch_size", {0: 32, 5: 64})
    >>> sizes.at(4), sizes.at(5), list(sizes.spans(range(3, 8)))
    (32, 64, [(range(3, 5), 32), (range(5, 8), 64)])
    """

    def __init__(self, name: str, values: int | Mapping[int, int]) -> None:
        """Raise ConfigError unless all values are at least 1 and epoch 0 has one."""
        schedule = dict(values) if isinstance(values, Mapping) else {0: values}
        if 0 not in schedule or any(epoch < 0 for epoch in schedule):
            raise ConfigError(
                f"a schedule of {name} must start at epoch 0, got epochs {sorted(schedule)}; write {{0: 1, 5: 4}}"
            )
        self._steps = sorted((epoch, as_whole(name, value, least=1)) for epoch, value in schedule.items())
        self.values = [value for _, value in self._steps]

    def at(self, epoch: int) -> int:
        """Return the number in `epoch`."""
        return next(value for first, value in reversed(self._steps) if first <= epoch)

    def spans(self, epochs: range) -> Iterator[tuple[range, int]]:
        """Yield the parts of some consecutive epochs that have the same number, and the number."""
        assert epochs.step == 1
        ends = [first for first, _ in self._steps[1:]] + [epochs.stop]
        for (first, value), end in zip(self._steps, ends, strict=True):
            if span := range(max(first, epochs.start), min(end, epochs.stop)):
                yield span, value

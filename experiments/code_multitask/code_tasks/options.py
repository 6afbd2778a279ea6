"""What decides the content of the data besides the code it is made of, checked."""

from dataclasses import asdict, dataclass
from typing import Any

from code_tasks.encoding import MIN_VOCABULARY
from etude.core.errors import DataError

STREAMS = ("code", "functions", "tests", "explanations", "pairs")
DEFAULT_OUT = "data/code_multitask"


@dataclass(frozen=True, slots=True)
class Options:
    """How samples are made. The same code and options give the same bytes."""

    vocab_size: int = 4096
    """Of the tokenizer, special tokens included."""
    max_length: int = 256
    """Tokens of a sample at most, in all streams but `code`."""
    max_files: int | None = None
    """Take so many files of code and as many of tests, the first by digest: for a quick look."""
    validation: float = 0.1
    test: float = 0.1
    """Shares of the files."""

    def __post_init__(self) -> None:
        for name, lowest in (("vocab_size", MIN_VOCABULARY), ("max_length", 16), ("max_files", 1)):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise DataError(f"{name} is {value}; it must be at least {lowest}")
        if min(self.validation, self.test) < 0 or self.validation + self.test >= 1:
            raise DataError(
                f"validation {self.validation} and test {self.test} are shares that leave some for training"
            )

    def facts(self) -> dict[str, Any]:
        """Return the options by name."""
        return asdict(self)

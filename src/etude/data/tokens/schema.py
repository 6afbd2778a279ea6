"""The meaning of token ids, if a file beside the token files defines it: a base class, and known formats.

The module of a format is imported only if such a file exists. It has two functions: `read_schema(root)` returns a
`TokenSchema`, and `refuse_without_schema(file)` raises DataError if a token file needs such a schema.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from etude.core.errors import DataError
from etude.data.tokens.file import TokenFile
from etude.data.tokens.places import exists


class SchemaFormat(NamedTuple):
    """A file beside token files that defines the meaning of ids."""

    file: str
    fact: str
    """The metadata key of a token file that names its schema: a mapping."""
    module: str
    """The module that reads both."""


FORMATS = [SchemaFormat("vocab.json", "vocab", "etude.multimodal.folder")]
TYPES = "types"
"""The stream of a token file with the type of every token."""


class TokenSchema(ABC):
    """The meaning of token ids. Streams with different schemas cannot train one model."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """All ids are below this number."""

    @property
    @abstractmethod
    def num_types(self) -> int:
        """All token types are below this number."""

    @property
    @abstractmethod
    def pad_id(self) -> int:
        """The padding id."""

    @property
    @abstractmethod
    def special_ids(self) -> Mapping[str, int]:
        """Ids of special tokens, by name; MASK hides tokens."""

    @abstractmethod
    def check(self, file: TokenFile) -> None:
        """Raise DataError if the ids of a file have another meaning, or are beyond the vocabulary."""

    @abstractmethod
    def difference(self, other: "TokenSchema", here: str = "the first", there: str = "the second") -> str | None:
        """Return the first difference in the meaning of ids, as text; None if they are the same.

        `here` and `there` name this schema and the other one in the text.
        """


def find_schema(root: str | Path) -> TokenSchema | None:
    """Return the schema beside the token files of a folder or URL; None if there is none."""
    for one in FORMATS:
        if not exists(f"{folder_of(root)}/{one.file}"):
            continue
        try:
            module = import_module(one.module)
        except ModuleNotFoundError as error:
            raise DataError(f"{root} has a {one.file}, which needs {error.name}; install it") from error
        schema: TokenSchema = module.read_schema(root)
        return schema
    return None


def folder_of(root: str | Path) -> str:
    """Return a folder or URL with `~` expanded and without a trailing slash."""
    return str(root).rstrip("/") if "://" in str(root) else str(Path(root).expanduser())


def check_same_schema(schemas: Mapping[str, TokenSchema], what: str) -> None:
    """Raise DataError if ids have different meanings in streams or folders, given by name; `what` is their plural."""
    names = list(schemas)
    for name in names[1:]:
        if difference := schemas[names[0]].difference(schemas[name], f"'{names[0]}'", f"'{name}'"):
            raise DataError(
                f"{what} '{names[0]}' and '{name}' cannot train one model, their ids mean different things: "
                f"{difference}; create both with the same vocabulary and tokenizers"
            )


def check_shared_schema(roots: Mapping[str, str]) -> None:
    """Raise DataError unless all folders of a mixture have the same schema, or none has one."""
    found = {name: find_schema(root) for name, root in roots.items()}
    known = {name: schema for name, schema in found.items() if schema is not None}
    if known and (without := next((name for name in found if name not in known), None)) is not None:
        raise DataError(
            f"folders '{next(iter(known))}' and '{without}' cannot train one model: only the first has a file that "
            f"defines its ids ({' or '.join(one.file for one in FORMATS)}); copy it if they mean the same in both"
        )
    check_same_schema(known, "folders")


def token_fields(
    schema: TokenSchema | None, files: Collection[TokenFile], vocab_size: int | None = None
) -> dict[str, Any]:
    """Return the id and type counts for `DataSplits`; raises DataError if files do not fit the schema.

    vocab_size: set by the user, instead of that of files and schema.
    """
    for file in files:
        if schema is not None:
            schema.check(file)
        else:
            _refuse_without_schema(file)
    fields = {"token_schema": schema, "num_types": _num_types(files, schema)}
    if schema is None:
        sizes = [file.vocab_size for file in files if file.vocab_size is not None]
        return {"vocab_size": vocab_size if vocab_size is not None else max(sizes, default=None), **fields}
    if vocab_size is not None and vocab_size < schema.vocab_size:
        raise DataError(
            f"vocab_size is {vocab_size}, but the vocabulary has {schema.vocab_size} tokens; remove it, or increase "
            "it"
        )
    return {"vocab_size": schema.vocab_size if vocab_size is None else vocab_size, **fields}


def _refuse_without_schema(file: TokenFile) -> None:
    for one in FORMATS:
        if isinstance(file.meta.get(one.fact), Mapping):  # in any metadata: the module recognises its own
            with suppress(ModuleNotFoundError):
                import_module(one.module).refuse_without_schema(file)


def _num_types(files: Collection[TokenFile], schema: TokenSchema | None) -> int | None:
    """Return the number of types in the stream `types`: from the files, else from the schema."""
    known: list[int] = []
    for file in files:
        number: Any = file.meta.get("num_types", None if schema is None else schema.num_types)
        if TYPES in file.streams and number is not None:
            if type(number) is not int or number < 1:
                raise DataError(f"{file.path} has num_types {number!r} in its metadata; it must be at least 1")
            known.append(number)
    return max(known, default=None)

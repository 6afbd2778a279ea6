"""Reads a pickle without executing it: opcodes become plain data and inert records, nothing is imported or called.

Nothing is hashed, compared or walked through on the way, for a pickle of a few bytes can describe structures on which
that takes for ever; the number of steps is bounded.
"""

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from etude.core.errors import DataError
from etude.core.spelling import shorten
from etude.multimodal.codebooks.joblib_source import JoblibSource

MAX_STEPS = 2_000_000
"""The most opcodes and copied elements of one file; a fitted estimator has some hundreds."""
MAX_PROTOCOL = 5


@dataclass(frozen=True, eq=False, slots=True)
class Global:
    """A name that a pickle would import: here only the name."""

    module: str
    name: str

    @property
    def key(self) -> tuple[str, str]:
        """Module and name, for looking it up."""
        return self.module, self.name


@dataclass(eq=False, slots=True)
class Record:
    """What a pickle would build: a dict (`kind` is None) or an object of the class or function `kind`."""

    kind: object = None
    args: object = ()
    pairs: list[tuple[object, object]] = field(default_factory=list)
    states: list[object] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Budget:
    """The steps that are left for a file."""

    source: JoblibSource
    left: int = field(default_factory=lambda: MAX_STEPS)

    def spend(self, steps: int) -> None:
        """Take off `steps`; refuse the file when none are left."""
        self.left -= steps
        if self.left < 0:
            raise self.source.refused(f"it takes more than {MAX_STEPS} steps to read")


class Machine:
    """The stack machine of pickle over inert values: dicts are `Record`, sets are lists, objects are `Record`.

    A subclass gives meaning to calls (`call`) and to states that are set (`build`).
    """

    def __init__(self, source: JoblibSource, budget: Budget | None = None) -> None:
        self.source = source
        self.budget = budget or Budget(source)
        self._stack: list[object] = []
        self._marks: list[list[object]] = []
        self._memo: dict[int, object] = {}

    def run(self) -> object:
        """Execute up to STOP and return what is on top of the stack."""
        for name, argument in self._opcodes():
            self.budget.spend(1)
            try:
                if name in _ACTIONS:
                    _ACTIONS[name](self)
                elif name in _ACTIONS_WITH_ARGUMENT:
                    _ACTIONS_WITH_ARGUMENT[name](self, argument)
                else:
                    raise self.source.refused(f"it uses the pickle opcode {name}")
            except IndexError as error:
                raise self.broken(f"{name} without its operands") from error
            if name == "STOP":
                break
        if len(self._stack) != 1 or self._marks:
            raise self.broken(f"{len(self._stack)} objects at its end instead of one")
        return self._stack.pop()

    def call(self, function: object, args: object) -> object:
        """Return what stands for the result of a call."""
        return Record(function, args)

    def build(self, target: object, state: object) -> object:
        """Return what stands for `target` after its state was set."""
        if not isinstance(target, Record):
            raise self.broken("BUILD on plain data")
        target.states.append(state)
        return target

    def _opcodes(self) -> Iterator[tuple[str, Any]]:
        # The generator reads one opcode at a time, so that array bytes behind it can be taken in between.
        generator = pickletools.genops(self.source)  # type: ignore[arg-type]  # it needs read, readline and tell only
        while True:
            try:
                opcode, argument, _ = next(generator)
            except StopIteration:
                return
            except (ValueError, OverflowError, Warning) as error:
                if isinstance(error, DataError):
                    raise
                raise self.broken(str(error)) from error
            yield opcode.name, argument

    def broken(self, why: str) -> DataError:
        """Return the error for opcodes that make no sense; behind the end of the file, the error is about the end."""
        return (
            self.source.truncated() if self.source.ended else self.source.damaged(f"its pickle has {one_line(why)}")
        )

    # The stack

    def _nothing(self, argument: object = None) -> None:
        pass

    def _push(self, argument: object) -> None:
        self._stack.append(argument)

    def _mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[object]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _drop_mark(self) -> None:
        self._pop_mark()

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _dup(self) -> None:
        self._stack.append(self._stack[-1])

    def _proto(self, argument: int) -> None:
        if argument > MAX_PROTOCOL:
            raise self.source.refused(f"its pickle protocol is {argument}; those up to {MAX_PROTOCOL} are known")

    # The memo

    def _put(self, index: int) -> None:
        # A bound on the index keeps a file from choosing numbers that collide in the dict.
        if not 0 <= index <= MAX_STEPS:
            raise self.broken(f"the memo index {str(index)[:20]}")
        self._memo[index] = self._stack[-1]

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise self.broken("a reference to nothing")
        self._stack.append(self._memo[index])

    # Containers

    def _tuple(self) -> None:
        items = tuple(self._pop_mark())
        self._stack.append(items)

    def _list(self) -> None:
        items = self._pop_mark()
        self._stack.append(items)

    def _dict(self) -> None:
        items = self._pop_mark()
        self._stack.append(Record(pairs=self._paired(items)))

    def _append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _appends(self) -> None:
        self._extend(self._pop_mark())

    def _extend(self, items: list[object]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Record):  # a record is an object of a list class: its elements are not looked at
            raise self.broken("elements for something that is no list")

    def _setitem(self) -> None:
        value = self._stack.pop()
        key = self._stack.pop()
        self._set([key, value])

    def _setitems(self) -> None:
        self._set(self._pop_mark())

    def _set(self, items: list[object]) -> None:
        target = self._stack[-1]
        if not isinstance(target, Record):
            raise self.broken("items for something that is no dict")
        target.pairs.extend(self._paired(items))

    def _paired(self, items: list[object]) -> list[tuple[object, object]]:
        if len(items) % 2:
            raise self.broken("a dict key without a value")
        return list(zip(items[::2], items[1::2], strict=True))

    # Objects

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(Global(module, name))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise self.broken("a global whose name is no text")
        self._stack.append(Global(module, name))

    def _reduce(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        self._stack.append(self.call(function, args))

    def _newobj(self) -> None:
        args, kind = self._stack.pop(), self._stack.pop()
        self._stack.append(Record(kind, args))

    def _newobj_ex(self) -> None:
        self._stack.pop()  # the keyword arguments
        self._newobj()

    def _inst(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        args = tuple(self._pop_mark())
        self._stack.append(Record(Global(module, name), args))

    def _obj(self) -> None:
        kind, *args = self._pop_mark() or [None]
        self._stack.append(Record(kind, tuple(args)))

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack.pop()
        self._stack.append(self.build(target, state))


def one_line(text: str, longest: int = 120) -> str:
    """Return text from a file or a library so that it stays on one short line."""
    return shorten("".join(char if char.isprintable() else "?" for char in text[: longest + 1]), longest)


def _pushing(make: Callable[[], object]) -> Callable[[Machine], None]:
    return lambda machine: machine._push(make())


def _tuple_of(size: int) -> Callable[[Machine], None]:
    def action(machine: Machine) -> None:
        if len(machine._stack) < size:
            raise IndexError
        items = tuple(machine._stack[-size:])
        machine._stack[-size:] = [items]

    return action


# What is in neither table is refused: persistent ids, the extension registry and buffers outside the file.
_ACTIONS_WITH_ARGUMENT: dict[str, Callable[[Machine, Any], None]] = {
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"), Machine._push),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING", "FLOAT", "BINFLOAT"), Machine._push),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"), Machine._push),
    **dict.fromkeys(("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), Machine._push),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), Machine._put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), Machine._get),
    "PROTO": Machine._proto,
    "FRAME": Machine._nothing,
    "GLOBAL": Machine._global,
    "INST": Machine._inst,
}
_ACTIONS: dict[str, Callable[[Machine], None]] = {
    **dict.fromkeys(("LIST", "FROZENSET"), Machine._list),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), Machine._appends),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET"), _pushing(list)),
    "NONE": _pushing(lambda: None),
    "NEWTRUE": _pushing(lambda: True),
    "NEWFALSE": _pushing(lambda: False),
    "EMPTY_TUPLE": _pushing(tuple),
    "EMPTY_DICT": _pushing(Record),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "TUPLE": Machine._tuple,
    "DICT": Machine._dict,
    "APPEND": Machine._append,
    "SETITEM": Machine._setitem,
    "SETITEMS": Machine._setitems,
    "MARK": Machine._mark,
    "POP": Machine._pop,
    "POP_MARK": Machine._drop_mark,
    "DUP": Machine._dup,
    "MEMOIZE": Machine._memoize,
    "STACK_GLOBAL": Machine._stack_global,
    "REDUCE": Machine._reduce,
    "NEWOBJ": Machine._newobj,
    "NEWOBJ_EX": Machine._newobj_ex,
    "OBJ": Machine._obj,
    "BUILD": Machine._build,
    "STOP": Machine._nothing,
}

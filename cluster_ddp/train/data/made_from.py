"""Finds what samples and batches are made from, and tells if training changes it where a resume would not be exact."""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.sharedctypes import SynchronizedBase
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch import Tensor, nn

from cluster_ddp.train.data.fingerprint import fingerprint
from cluster_ddp.train.objects.contents import contents
from cluster_ddp.train.objects.inner_parts import CONTAINERS, can_be_seen, elements, has_attributes, inner_parts, length
from cluster_ddp.train.objects.kinds import is_plain
from cluster_ddp.train.objects.only_written import codes_of
from cluster_ddp.train.objects.whose_code import is_of_user
from cluster_ddp.words import listed

AtFirst = Callable[[], contextlib.AbstractContextManager[None]]  # gives the task its state from before training
_DEPTH, _WIDTH = 10, 100  # how deep is searched, and how many elements of lists one by one
_FAR = 100_000  # the most numbers and strings of a list that are compared
_WHOLE, _SAMPLE = 1 << 20, 4096  # bytes up to which an array is compared as a whole, and elements of a larger one
_SHOWN = 3  # names in the message
WORKERS_HAVE_COPIES = (
    "but workers have copies that do not change (or, in shared memory, see a change at no fixed step), and those of a "
    "resume have what the task restores: a resume is exact only if no sample depends on it. Set train.workers: 0, or "
    "let the data set return the index of each sample, and look up in loss() what training changes"
)
READ_FROM_THE_FIRST = (
    "but a resume reads the items of a pass again from the first, with what the task restores: it is exact only if "
    "neither which items there are nor their order depends on it. Choose them in a map-style data set, or in loss()"
)
NOT_PUT_BACK = (
    "but load_state_dict() of the task does not put it back: a resume makes samples from what it was before training, "
    "and is exact only if none depends on it. Change in load_state_dict() what the data set holds, such as by "
    "self.labels.copy_(state['labels']) instead of self.labels = state['labels']"
)
_CALLED = {"__getitem__", "__getitems__", "__iter__", "__next__", "__call__", "forward"}  # without being named
_PLAIN = (bool, int, float, complex, str, bytes)


class MadeFrom:
    """What samples and batches are made from, as far as the code of the data set and of `collate` reads it.

    Create it before anything is restored.

    Parameters
    ----------
    sources
        The data set, and what collates its samples.
    why
        What to tell, besides the names, if training changes it: why a resume may not be exact, and what to do.
    is_read_here
        Whether this process reads the samples, which may change things, too: then a change counts only if it was made
        by a restore, or in a step between `begin` and `end`.
    put_back_by
        The task, if training may change what its ``load_state_dict`` puts back.
    model
        The model that is trained, which a resume puts back, too.

    Attributes
    ----------
    is_changed
        Whether a step has changed any attribute or variable, to which other samples are then due; None before `end`.
    has_model
        Whether the data set may make samples by the model that is trained, if `put_back_by` is given.
    """

    def __init__(
        self,
        *sources: Any,
        why: str = "",
        is_read_here: bool = False,
        put_back_by: object = None,
        model: nn.Module | None = None,
    ) -> None:
        trained = set() if model is None else {id(module) for module in model.modules()}
        but = trained if put_back_by is not None else set[int]()
        self._sources, self._why = [Source(source, trained, but) for source in sources], why
        self._is_read_here, self._task, self._model = is_read_here, put_back_by, model
        self._held = dict(getattr(put_back_by, "__dict__", {}))
        self._first = self._marks()
        self.has_model = any(source.has_left_out for source in self._sources[:1])  # that of the data set
        self._replaced: set[str] = set()  # what load_state_dict() of the task puts another object in the place of
        self._begun: dict[str, list[int]] = {}
        self._found: set[str] = set()
        self._told: set[str] = set()
        self.is_changed: bool | None = None

    def restored(self) -> None:
        """Call after a checkpoint has been restored."""
        if self._task is None:
            self._found |= self._changed_since(self._first)
        else:
            now = vars(self._task)
            replaced = {key: value for key, value in self._held.items() if now.get(key) is not value}
            other = {key: value for key, value in replaced.items() if self._inner(value) != self._inner(now.get(key))}
            self._found |= self._names_of_replaced(other, now)
        self._held = {}

    def begin(self) -> None:
        """Call in a step after its samples have been read."""
        self._begun = self._marks() if self._is_read_here else self._first

    def end(self) -> None:
        """Call at the end of a step, or later without `begin`, which finds something only if nothing is read here."""
        begun = self._begun if self._is_read_here else self._first
        self._begun = {}
        changed = self._changed_since(begun)
        self.is_changed = bool(self.is_changed or changed)
        self._found |= changed
        if self._replaced:
            self._found |= self._changed_since(self._first) & self._replaced

    def put_back(self, before: Mapping[str, Any], copy: object) -> None:
        """Call when a copy of the task has been given the state that the task had before training, after `end`.

        Parameters
        ----------
        before
            The attributes of the copy as they were before that.
        """
        if self._task is not None:  # what the task itself holds, the copy may have replaced in itself only
            self._found &= {name for name in self._changed_since(self._first) if not name.startswith(self._of_task())}
            self._replaced = self._names_of_replaced(before, vars(copy))

    def has_told(self, name: str, others: set[str]) -> bool:
        """Whether `changed` has named something, by this name or another."""
        return name in self._told or not self._told.isdisjoint(others)

    def _tells_all_of(self, value: Any, names: list[str]) -> bool:
        """Whether these names stand for an array, or for a data set of which nothing else can change unseen."""
        parts = [found for source in self._sources for found in source.values()]
        if isinstance(value, (Tensor, np.ndarray)):
            return _memory(value) in {_memory(part) for name, part in parts if name in names}
        if not isinstance(value, torch.utils.data.Dataset) or not any(part is value for _, part in parts):
            return False
        of_set = {f"{type(value).__name__}.{key}": part for key, part in vars(value).items()}
        are_simple = all(type(part) in _PLAIN or isinstance(part, (Tensor, np.ndarray)) for part in of_set.values())
        return are_simple and of_set.keys() <= {name for name, _ in parts} and not of_set.keys().isdisjoint(names)

    def is_only_of_samples(self, name: str, others: set[str]) -> bool:
        """Whether the code of the data set uses something that the code of steps does not, such as a cache.

        Then only samples can depend on it, and those of a map-style set are checked where they are read.

        Parameters
        ----------
        name, others
            Its name as an attribute of the task, or as a variable, and other names of it.
        """
        if self._task is None or not self._sources:
            return False
        *_, key = name.split(".")
        if self._steps.mentions(key):
            return False
        held = vars(self._task).get(key) if name.startswith("task.") else None
        parts = [found for source in self._sources[:1] for found in source.values()]
        return any(other in others or (held is not None and part is held) for other, part in parts)

    @functools.cached_property
    def _steps(self) -> Source:
        return code_of_steps(self._task, self._model)

    def _of_task(self) -> tuple[str, ...]:
        return tuple(f"{kind.__name__}." for kind in type(self._task).__mro__)

    def changed(self) -> str | None:
        """What to tell about what has been found; only once."""
        names, self._found = sorted(self._found), set()
        if not names:
            return None
        own = getattr(self._task, "__dict__", {})
        self._told = {*names, *(f"task.{key}" for key, value in own.items() if self._tells_all_of(value, names))}
        self._first, self._sources = {}, []
        return f"training changes {listed(names, _SHOWN)}, from which samples or batches are made, {self._why}"

    def _names_of_replaced(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
        """The names of what was an attribute and is another object now, while the data set holds it as before."""
        memories = {_memory(value) for key, value in before.items() if now.get(key) is not value and _can_change(value)}
        names: set[str] = set()
        for source in self._sources if memories else ():
            for name, value in list(source.values()):
                if _can_change(value) and _memory(value) in memories:
                    inner = [(name, value), *((key, part) for key, part in source.values(value) if part is not value)]
                    names |= {key for key, part in inner if _mark_of(part) is not None}
        return {name for name in names if not name.startswith(self._of_task())}

    def _inner(self, value: Any) -> list[tuple[str, int | None]]:
        return [(name, _mark_of(part)) for source in self._sources for name, part in source.values(value)]

    def _changed_since(self, before: dict[str, list[int]]) -> set[str]:
        now = self._marks() if before else {}
        return {name for name in before.keys() & now.keys() if before[name] != now[name]}

    def _marks(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for source in self._sources:
            for name, value in source.values():
                with contextlib.suppress(Exception):  # such as an array of a kind that cannot be hashed
                    if (mark := _mark_of(value)) is not None:
                        found.setdefault(name, []).append(mark)
        return found


class Source:
    """A data set, or what collates its samples.

    Parameters
    ----------
    trained
        Ids of the modules of the model that is trained.
    but
        Ids of what is not looked at.
    writes
        Whether the names of what its code writes count as well.
    called
        Names of methods that are called without being named.

    Attributes
    ----------
    has_left_out
        Whether its code reads anything that is not looked at.
    """

    has_left_out = False

    def __init__(
        self, source: Any, trained: set[int], but: set[int], *, writes: bool = False, called: set[str] = _CALLED
    ) -> None:
        self._source, self._trained, self._but, self._called = source, trained, but, called
        self._names: set[str] = set()  # of the attributes and variables that its code reads
        known = -1
        while len(self._names) > known:  # until the functions mention no others
            known = len(self._names)
            self._names |= {name for _, value in list(self.values()) for name in _read_by(value, writes=writes)}

    def mentions(self, name: str) -> bool:
        """Whether its code uses something of this name."""
        return name in self._names

    def values(self, *parts: Any) -> Iterator[tuple[str, Any]]:
        """The source, or parts of it, and what its code reads of these, by name."""
        level: list[tuple[str, Any]] = [(type(part).__name__, part) for part in parts or (self._source,)]
        seen = set(self._but)
        for _ in range(_DEPTH):
            inner: list[tuple[str, Any]] = []
            for name, value in level:
                self.has_left_out |= id(value) in self._but
                if can_be_seen(value) and (type(value) in _PLAIN or id(value) not in seen):
                    seen.add(id(value))
                    yield name, value
                    with contextlib.suppress(Exception):  # it may have no attributes, although it has a class
                        epoch = _set_by_epoch(value) if value is self._source else ()
                        inner += [(key, part) for key, part in self._parts(name, value) if key not in epoch]
            level = inner

    def _parts(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        if isinstance(value, FunctionType):
            variables = value.__globals__.items() if is_of_user(str(value.__module__)) else ()
            yield from ((key, part) for key, part in list(variables) if key in self._names)
            yield from ((key, part) for key, part in inner_parts(value) if key != "keyword defaults")
        elif isinstance(value, (MethodType, functools.partial)):
            held = [value.__func__, value.__self__] if isinstance(value, MethodType) else [value.func, *value.args]
            yield from ((type(part).__name__, part) for part in held)
        elif isinstance(value, CONTAINERS):
            yield from ((name, part) for part in _some(value, _WIDTH) if type(part) not in _PLAIN)
        elif isinstance(value, (ModuleType, type)):
            of_user = is_of_user(value.__name__ if isinstance(value, ModuleType) else value.__module__)
            yield from self._read(value.__name__, vars(value)) if of_user else ()
        elif is_of_user(kind.__module__):
            own = dict(inner_parts(value))
            yield from self._read(kind.__name__, own)
            for base in kind.__mro__:
                if is_of_user(base.__module__):
                    yield from self._read(
                        kind.__name__, {key: part for key, part in vars(base).items() if key not in own}
                    )
                    own |= vars(base)
        elif isinstance(value, torch.utils.data.Dataset):
            yield from ((f"{kind.__name__}.{key}", part) for key, part in vars(value).items())
        else:  # such as a library's composition of the user's transforms; of a model, collators read only settings
            parts = [part for part in getattr(value, "__dict__", {}).values() if id(part) not in self._trained]
            yield from ((name, part) for part in parts if callable(part) or isinstance(part, (list, tuple)))
        if isinstance(value, nn.Module):
            yield from ((type(part).__name__, part) for part in value.children())

    def _read(self, name: str, held: Any) -> Iterator[tuple[str, Any]]:
        for key, part in list(held.items()):
            if key in self._names or key in self._called:
                yield f"{name}.{key}", _function_of(part)


def _set_by_epoch(data: Any) -> set[str]:
    """What ``set_epoch()`` of an iterable data set sets, which is called before each pass, also after a resume."""
    if not isinstance(data, torch.utils.data.IterableDataset):
        return set()
    codes = codes_of(getattr(data, "set_epoch", None))
    instructions = (instruction for code in codes for instruction in dis.get_instructions(code))
    return {f"{type(data).__name__}.{found.argval}" for found in instructions if found.opname == "STORE_ATTR"}


def code_of_steps(task: object, model: nn.Module | None) -> Source:
    """The code of steps and evaluations, without what only reads samples."""
    methods = [getattr(task, name, None) for name in ("loss", "evaluate")]
    return Source([*methods, model], set(), set(), writes=True, called={"__call__", "forward"})


def _function_of(part: Any) -> Any:
    if isinstance(part, property):
        return part.fget
    if isinstance(part, functools.cached_property):
        return part.func
    return part.__func__ if isinstance(part, (staticmethod, classmethod)) else part


def _read_by(value: Any, *, writes: bool) -> Iterator[str]:
    """The names that a function reads, or contains as a string, as for getattr(), or also those that it writes."""
    for code in codes_of(value) if isinstance(value, FunctionType) else ():
        yield from _names_in(code, writes)


@functools.lru_cache(maxsize=4096)  # code does not change, and is asked for again and again as training begins
def _names_in(code: CodeType, writes: bool) -> frozenset[str]:
    found = {constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier()}
    for instruction in dis.get_instructions(code):
        if isinstance(instruction.argval, str) and (writes or not instruction.opname.startswith("STORE")):
            found.add(instruction.argval)
    return frozenset(found)


def _mark_of(value: Any) -> int | None:
    """A number that changes with a value itself; None for one whose parts have marks of their own."""
    if type(value) in _PLAIN or isinstance(value, np.generic):
        return hash(repr(value))
    if isinstance(value, SynchronizedBase):
        return hash(bytes(value.get_obj()))
    if isinstance(value, Tensor):
        return contents([("", value)]).get("")
    if isinstance(value, nn.Module):
        tensors = itertools.chain(value.named_parameters(recurse=False), value.named_buffers(recurse=False))
        return hash(frozenset(contents(tensors).items()))
    if isinstance(value, np.ndarray) and not isinstance(value, np.memmap):
        return fingerprint(value if value.nbytes <= _WHOLE else value.flat[:: -(-value.size // _SAMPLE)])
    if _is_frame(value):
        return fingerprint(value[:: len(value) // _SAMPLE + 1].to_numpy())
    if isinstance(value, (list, tuple, dict, set, frozenset, collections.deque)):
        plain = filter(is_plain, _some(value, _FAR))
        return hash((length(value), frozenset(plain) if isinstance(value, (set, frozenset)) else tuple(plain)))
    return None


def _can_change(value: Any) -> bool:
    is_container = isinstance(value, (Tensor, np.ndarray, list, dict, set, collections.deque))
    return is_container or _is_frame(value) or (is_of_user(type(value).__module__) and has_attributes(value))


def _is_frame(value: Any) -> bool:
    kind = type(value)  # of pandas or polars; a single time of pandas can be an array, too
    return all(callable(getattr(kind, name, None)) for name in ("to_numpy", "__len__", "__getitem__"))


def _memory(value: Any) -> int:
    """Where the elements of a tensor or array are, whatever views it; of anything else, its id."""
    if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided:  # others may have no memory
        return value.untyped_storage().data_ptr() or id(value)
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
        value = value.base
    return int(value.__array_interface__["data"][0]) if isinstance(value, np.ndarray) else id(value)


def _some(container: Any, most: int) -> Iterator[Any]:
    """At most so many of its elements, at equal distances."""
    return itertools.islice(elements(container), 0, None, -(-length(container) // most) or 1)

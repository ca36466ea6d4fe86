"""Follows the running loops into the functions they call: what these set in objects, and what the loss is made of."""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import functools
import inspect
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from cluster_ddp.train.objects.live_variables import own_parts
from cluster_ddp.train.objects.syntax import SCOPES, added_to, assigned, is_of_clock, is_read, name_of
from cluster_ddp.train.objects.whose_code import is_library_file, is_ours, is_own_class
from cluster_ddp.train.own.program import running_frames, variables_of
from cluster_ddp.train.own.watch.bodies import Text, source_of, text_of, tree_of_object, with_parents
from cluster_ddp.train.own.watch.called import CLOSED, attribute_of, code_in, first_parameter, function_of, outside_of
from cluster_ddp.train.own.watch.matters import sets_rate_of_optimizer, updates_weights
from cluster_ddp.train.own.watch.saved import is_restored

Node = tuple[int, str]
"""A place, by the id of what holds it and the attribute, or "" for a list or dict itself; or a variable of a call."""

_MAX_CALLS = 300
_MAX_DEPTH = 8
_CONTAINERS = (list, dict, collections.deque, np.ndarray, Tensor)
_NAMESPACES = (SimpleNamespace, argparse.Namespace)
_LEAVING = (ast.Continue, ast.Break, ast.Return, ast.Raise)
_RETURNED = "return"


class Effects(NamedTuple):
    """The places that statements read before they set them, those they set, and those that they set on every path."""

    reads: frozenset[Node] = frozenset()
    sets: frozenset[Node] = frozenset()
    surely: frozenset[Node] = frozenset()

    def then(self, other: Effects) -> Effects:
        """Those of these statements and then others."""
        reads = self.reads | (other.reads - self.surely)
        return Effects(reads, self.sets | other.sets, self.surely | other.surely)


@dataclass(eq=False)
class _Call:
    """A running function, or a call of one, with what it knows of its variables."""

    number: int
    scope: Mapping[str, Any]
    parents: dict[ast.AST, ast.AST]
    same: dict[str, Node] = field(default_factory=dict)  # parameters that are a place or variable of the caller
    function: FunctionType | None = None
    above: tuple[CodeType, ...] = ()
    file: str = ""
    is_running: bool = False


class Flow:
    """What the running loops do.

    Attributes
    ----------
    carried
        The places that a pass through a running loop reads before it sets them, and sets.
    late
        Those that the code after the batches of an epoch sets, and the code before them or a batch reads.
    shuffled
        Those that are put into another order in place.
    """

    def __init__(self) -> None:
        self.carried: set[Node] = set()
        self.late: set[Node] = set()
        self.shuffled: set[Node] = set()
        self._holders: dict[Node, tuple[str, Any]] = {}
        self._sources: dict[Node, set[Node]] = {}
        self._losses: set[Node] = set()
        self._exact: set[Node] = set()  # set from run.step, say
        self._trees: dict[CodeType, ast.AST | None] = {}
        frames = [frame for frame in running_frames() if not is_library_file(frame.f_code.co_filename)]
        self._running = {frame.f_code: (-1 - number, variables_of(frame)) for number, frame in enumerate(frames)}
        self._calls = len(frames)
        inside: Effects | None = None  # what runs now, in the frame of which the statement is
        for frame in frames:  # innermost first
            with contextlib.suppress(Exception):  # there is no source, or its lines have moved
                inside = self._follow(frame, inside)

    def _follow(self, frame: FrameType, inside: Effects | None) -> Effects | None:
        """Follow the running loops of a function; returns the effects of a pass through the outermost until now."""
        text = text_of(frame)
        number, variables = self._running[frame.f_code]
        call = _Call(
            number, ChainMap(variables, frame.f_globals), text.parents, file=frame.f_code.co_filename, is_running=True
        )
        self._note_restored(text, call)
        for loop in reversed(text.loops):
            done = self._of_block(loop.body, call)
            targets = {self._node(name, call) for name in assigned(loop)}
            self.carried |= (done.reads & done.sets) - targets
            at = _running(loop.body, frame)
            if inside is None or at is None:  # it takes the next batch, maybe from a generator of the program
                inside = done
            else:
                before = self._of_block(loop.body[:at], call)
                after = self._of_block(loop.body[at + 1 :], call)
                inside = before.then(inside)
                self.late |= (inside.reads & after.sets) - targets
        return inside

    def of_loss(self) -> dict[Node, tuple[str, Any]]:
        """The places from which the loss, an update or a learning rate is computed, each with a name and its value."""
        todo, found = list(self._losses), set[Node]()
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += self._sources.get(node, ())
        return {node: self._holders[node] for node in found - self._exact if node in self._holders}

    def _note_restored(self, text: Text, call: _Call) -> None:
        for node in text.parents:
            if isinstance(node, ast.stmt) and (names := assigned(node)) and is_restored(node):
                self._exact.update(self._node(name, call) for name in names)

    # Statements.

    def _of_block(self, body: Sequence[ast.stmt], call: _Call, around: frozenset[Node] = frozenset()) -> Effects:
        done = Effects()
        for statement in body:
            done = done.then(self._of_statement(statement, call, around))
        return done

    def _of_statement(self, statement: ast.stmt, call: _Call, around: frozenset[Node]) -> Effects:
        if isinstance(statement, SCOPES):
            return Effects()
        parts = own_parts(statement)
        done, nodes = self._of_parts(parts, call)
        if updates_weights(statement, _weights(call.parents)) or sets_rate_of_optimizer(statement, call.parents):
            self._losses |= nodes | around
        if _sets_model(statement):
            self._losses |= around
        if isinstance(statement, ast.Return):
            self._add((call.number, _RETURNED), nodes | around)
        sets, surely = set[Node](), set[Node]()
        for part in [*parts, *([statement] if isinstance(statement, ast.For) else [])]:
            for name in assigned(part) | added_to(part) | _shuffled(part):
                node = self._node(name, call)
                self._add(node, nodes | around)
                sets.add(node)
                if name in assigned(part) and "[" not in name and not isinstance(part, ast.AugAssign):
                    surely.add(node)
                if name in _shuffled(part):
                    self.shuffled.add(node)
                if isinstance(part, ast.stmt) and (is_restored(part) or is_of_clock(part)):
                    self._exact.add(node)
        done = done.then(Effects(frozenset(), frozenset(sets), frozenset(surely)))
        return done.then(self._of_inner(statement, call, around | nodes))

    def _of_inner(self, statement: ast.stmt, call: _Call, around: frozenset[Node]) -> Effects:
        """Those of the blocks in a statement."""
        body, other = getattr(statement, "body", []), getattr(statement, "orelse", [])
        if not body:
            return Effects()
        if isinstance(statement, ast.If):
            holds = _holds(statement.test, call)
            if holds is not None:  # by a setting, such as `if args.use_ema:`
                return self._of_block(body if holds else other, call, around)
            ways = [self._of_block(block, call, around) for block in (body, other)]
            over = [bool(block) and isinstance(block[-1], _LEAVING) for block in (body, other)]
            certain = [way.surely for way, is_over in zip(ways, over, strict=True) if not is_over]
            surely = frozenset.intersection(*certain) if certain else frozenset()
            return Effects(ways[0].reads | ways[1].reads, ways[0].sets | ways[1].sets, surely)
        done = self._of_block(body, call, around)
        for handler in getattr(statement, "handlers", []):
            way = self._of_block(handler.body, call, around)
            done = Effects(done.reads | way.reads, done.sets | way.sets, done.surely)
        return done.then(self._of_block([*other, *getattr(statement, "finalbody", [])], call, around))

    def _of_parts(self, parts: Iterable[ast.AST], call: _Call) -> tuple[Effects, frozenset[Node]]:
        """What expressions read and set, and the nodes of which their values are computed."""
        done, nodes = Effects(), set[Node]()
        for node in (node for part in parts for node in ast.walk(part)):
            name = name_of(node)
            if isinstance(node, ast.Call):
                inner, returned = self._of_call(node, call)
                done, nodes = done.then(inner), nodes | returned
            elif isinstance(node, ast.AugAssign):
                nodes.update(self._node(name, call) for name in assigned(node))
            elif name is not None and is_read(node, name):
                found = self._node(name, call)
                nodes.add(found)
                for getter, owner in self._getters(name, call):
                    inner, returned = self._enter(getter, {first_parameter(getter): owner}, {}, call)
                    done, nodes = done.then(inner), nodes | returned
        places = frozenset(node for node in nodes if node in self._holders)
        return Effects(places).then(done), frozenset(nodes)

    # Calls.

    def _of_call(self, node: ast.Call, call: _Call) -> tuple[Effects, frozenset[Node]]:
        called = self._called(node.func, call)
        function, bound = function_of(called)
        if function is None:
            return Effects(), frozenset()
        code = function.__code__
        names = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        values: dict[str, Any] = {}
        if bound is not None and names:
            values[names.pop(0)] = bound
        given = {word.arg: word.value for word in node.keywords if word.arg is not None}
        given |= dict(zip(names, node.args, strict=False))
        return self._enter(function, values, given, call)

    def _enter(
        self, function: FunctionType, values: dict[str, Any], given: Mapping[str, ast.expr], caller: _Call
    ) -> tuple[Effects, frozenset[Node]]:
        code = function.__code__
        if code in caller.above or len(caller.above) >= _MAX_DEPTH or self._calls >= _MAX_CALLS:
            return Effects(), frozenset()
        if code not in self._trees:
            self._trees[code] = next(iter(tree_of_object(function).body), None)
        scope = self._trees[code]
        if scope is None or not isinstance(scope, SCOPES) or isinstance(scope, (ast.ClassDef, ast.Lambda)):
            return Effects(), frozenset()
        self._calls += 1
        # What a running function returns is computed from the variables it has now.
        number, variables = self._running.get(code, (-self._calls, {}))
        around = ChainMap(variables or values, outside_of(function))
        call = _Call(number, around, with_parents(scope), function=function, above=(*caller.above, code))
        call.file, call.is_running = code.co_filename, code in self._running
        stored = {name for node in call.parents for name in assigned(node)}
        for name, argument in given.items():
            if (passed := name_of(argument)) is not None and name not in stored:
                call.same[name] = self._node(passed, caller)
                with contextlib.suppress(Exception):  # neither a variable nor an attribute
                    values[name] = _resolved(passed, caller)
            else:
                self._add((call.number, name), self._of_parts([argument], caller)[1])
        return self._of_block(scope.body, call), frozenset({(call.number, _RETURNED)})

    def _called(self, function: ast.expr, call: _Call) -> Any:
        with contextlib.suppress(Exception):
            if isinstance(function, ast.Attribute) and ast.unparse(function.value) == "super()":
                assert call.function is not None
                owner = call.scope[first_parameter(call.function)]
                code, function_name = call.function.__code__, call.function.__name__
                of = next(kind for kind in type(owner).__mro__ if code_in(kind, function_name) is code)
                return getattr(super(of, owner), function.attr)
            return _resolved(name_of(function) or "", call)
        return None

    def _getters(self, name: str, call: _Call) -> Iterator[tuple[FunctionType, Any]]:
        """The property that a name means."""
        holder, _, attribute = name.partition("[")[0].rpartition(".")
        if not holder:
            return
        with contextlib.suppress(Exception):
            owner = _resolved(holder, call)
            found = inspect.getattr_static(type(owner), attribute, None) if _is_open(owner) else None
            if isinstance(found, property) and isinstance(found.fget, FunctionType):
                yield found.fget, owner

    # Nodes.

    def _node(self, name: str, call: _Call) -> Node:
        name = name.partition("[")[0]
        holder, _, attribute = name.rpartition(".")
        if not holder:
            return self._variable(name, call)
        with contextlib.suppress(Exception):
            owner = _resolved(holder, call)
            if _is_open(owner):
                kind = owner if isinstance(owner, type) else type(owner)
                value = getattr(owner, attribute, None) if attribute in getattr(owner, "__dict__", {}) else None
                return self._place((id(owner), attribute), f"{kind.__name__}.{attribute}", owner, value)
            if isinstance(owner, _CONTAINERS):  # its method
                return self._node(holder, call)
        return self._variable(name.partition(".")[0], call)

    def _variable(self, name: str, call: _Call) -> Node:
        if name in call.same:
            return call.same[name]
        value = call.scope.get(name)
        if type(value) in (int, float) and (outside := _holder_outside(name, call)) is not None:
            return self._place((id(outside), name), name, outside, value)
        if call.is_running and type(value) in (int, float):
            return self._place((call.number, name), name, call, value)
        if isinstance(value, _CONTAINERS) and not isinstance(value, nn.Parameter):
            return self._place((id(value), ""), name, value, value)
        return call.number, name

    def _place(self, node: Node, name: str, owner: Any, value: Any) -> Node:
        self._holders[node] = (name, _Held(owner, value))
        return node

    def _add(self, node: Node, sources: Iterable[Node]) -> None:
        self._sources.setdefault(node, set()).update(sources)


class _Held(NamedTuple):
    """A value, and what holds it."""

    owner: Any
    value: Any


def _resolved(name: str, call: _Call) -> Any:
    first, *inner = name.partition("[")[0].split(".")
    return functools.reduce(attribute_of, inner, call.scope[first])


def _is_open(owner: Any) -> bool:
    if isinstance(owner, CLOSED) or is_ours(owner):
        return False
    kind = owner if isinstance(owner, type) else type(owner)
    return type(owner) in _NAMESPACES or is_own_class(kind)


def _holder_outside(name: str, call: _Call) -> Any:
    """What holds a variable that several functions share: the cell, or the variables of the module."""
    function: Any = call.function
    if function is None:
        return None
    code = function.__code__
    if name in code.co_freevars:
        return function.__closure__[code.co_freevars.index(name)]
    return None if name in (*code.co_varnames, *code.co_cellvars) else function.__globals__


def _holds(test: ast.expr, call: _Call) -> bool | None:
    """Whether this holds in all steps, or in none, as far as what is set only once shows."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        holds = _holds(test.operand, call)
        return None if holds is None else not holds
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return False if any(_holds(part, call) is False for part in test.values) else None
    name = name_of(test) or ""
    with contextlib.suppress(Exception):  # neither a variable nor an attribute
        value = _resolved(name, call)
        holder, _, attribute = name.rpartition(".")
        if "[" not in name and (value is None or type(value) is bool):
            changes = bool(holder) and _times_set(call.file)[attribute] > 1
            return None if changes or _is_set(name, call) else bool(value)
    return None


@functools.lru_cache(maxsize=100)
def _times_set(file: str) -> collections.Counter[str]:
    """How often the source in a file sets an attribute or a variable of each name."""
    return collections.Counter(re.findall(r"(\w+)\s*[-+*/|&]?=(?!=)", source_of(file)))


def _is_set(name: str, call: _Call) -> bool:
    return any(name in assigned(node) for node in call.parents)


def _weights(parents: dict[ast.AST, ast.AST]) -> set[str]:
    """The variables that go over weights."""
    loops = (node for node in parents if isinstance(node, ast.For) and "parameters(" in ast.unparse(node.iter))
    return {name for node in loops for name in assigned(node)}


def _shuffled(part: ast.AST) -> set[str]:
    """What ``random.shuffle(order)`` changes."""
    call = getattr(part, "value", None)
    if isinstance(part, ast.Expr) and isinstance(call, ast.Call) and call.args:
        is_shuffle = (name_of(call.func) or "").rpartition(".")[2] == "shuffle"
        return {name_of(call.args[0]) or ""} - {""} if is_shuffle else set()
    return set()


def _sets_model(statement: ast.stmt) -> bool:
    """Whether this gives a model other weights, as ``target.load_state_dict(model.state_dict())`` does."""
    call = getattr(statement, "value", None)
    name = (name_of(call.func) or "") if isinstance(call, ast.Call) else ""
    return name.endswith((".load_state_dict", ".update_parameters"))


def _running(body: Sequence[ast.stmt], frame: FrameType) -> int | None:
    """The number of the statement that runs now; None if the loop takes its next item."""
    return next((n for n, part in enumerate(body) if part.lineno <= frame.f_lineno <= (part.end_lineno or 0)), None)

"""How long a chat template's text can become beside what the messages hold: proved, or not said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from jinja2 import nodes

from kvgate.core.counting import PLAIN_ROLES

MESSAGES: Final = "messages"

ROLE_BYTES: Final = max(map(len, PLAIN_ROLES))

STRIPPING: Final = frozenset({"trim", "string", "safe", "strip", "lstrip", "rstrip"})
"""Filters and methods whose result is never longer than what they are given."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A rendered prompt has at most so many bytes beside, and so many copies of, what the messages hold.

    Args:
        fixed_bytes: once a prompt.
        message_bytes: once a message.
        copies: how often the text of one message can appear.
    """

    fixed_bytes: int
    message_bytes: int
    copies: int

    def bound(self, chat_bytes: int, messages: int) -> int:
        """Bytes that the rendered prompt can have at most."""
        return self.fixed_bytes + self.message_bytes * messages + self.copies * chat_bytes


def growth_of(tree: nodes.Template, fixed: dict[str, str]) -> Growth | None:
    """The proof, for templates that walk over the messages once and write what each holds; None for all others.

    Args:
        tree: the template, parsed.
        fixed: texts that it is given beside the messages.
    """
    prover = _Prover(fixed)
    try:
        once = prover.body(tree.body) + prover.first
    except _Unproved:
        return None
    each = prover.each
    return Growth(once.constant, each.constant, max(once.copies + each.copies, 1))


class _Unproved(Exception):
    """Something of which no bound is known here."""


@dataclass(frozen=True, slots=True)
class _Cost:
    """A text of at most `constant` bytes and `copies` times the text of one message."""

    constant: int = 0
    copies: int = 0

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(self.constant + other.constant, self.copies + other.copies)

    def __or__(self, other: _Cost) -> _Cost:
        return _Cost(max(self.constant, other.constant), max(self.copies, other.copies))


class _Prover:
    """Walks a template with the most that each variable can cost.

    `each` is what one message costs, `first` what is written for the first of them alone.
    """

    def __init__(self, fixed: dict[str, str]) -> None:
        self.each, self.first = _Cost(), _Cost()
        self._costs = {name: _Cost(len(text.encode())) for name, text in fixed.items()}
        self._lists = {MESSAGES}
        self._message: str | None = None

    def body(self, statements: list[nodes.Node]) -> _Cost:
        total = _Cost()
        for statement in statements:
            total += self._statement(statement)
        return total

    def _statement(self, node: nodes.Node) -> _Cost:
        match node:
            case nodes.Output():
                return self._sum(node.nodes)
            case nodes.If():
                return self._branches(node)
            case nodes.For():
                self._loop(node)
            case nodes.Assign(target=nodes.Name(name=name)):
                self._assign(name, node.node)
            case nodes.ExprStmt():
                pass
            case _:
                raise _Unproved
        return _Cost()

    def _branches(self, node: nodes.If) -> _Cost:
        """The worst branch; after it, a variable costs the most that any of them left it with."""
        before, worst = dict(self._costs), dict(self._costs)
        total = _Cost()
        for body in (node.body, *(branch.body for branch in node.elif_), node.else_):
            self._costs = dict(before)
            cost = self.body(body)
            if body is node.body and self._message is not None and _is_of_the_first(node.test):
                self.first += cost
            else:
                total |= cost
            for name, cost in self._costs.items():
                worst[name] = worst.get(name, _Cost()) | cost
        self._costs = worst
        return total

    def _loop(self, node: nodes.For) -> None:
        """A loop over messages; a loop in it, and what comes from outside with a message's text, would multiply."""
        if self._message is not None or not self._is_list(node.iter) or node.recursive or node.else_:
            raise _Unproved
        if not isinstance(node.target, nodes.Name):
            raise _Unproved
        before = dict(self._costs)
        self._costs = {name: cost for name, cost in before.items() if not cost.copies}
        self._message = node.target.name
        self._costs.pop(self._message, None)
        self.each += self.body(node.body)
        # What a loop sets ends with each turn of it.
        self._message, self._costs = None, before

    def _assign(self, name: str, value: nodes.Node) -> None:
        if self._is_list(value):
            self._lists.add(name)
            self._costs.pop(name, None)
        else:
            self._costs[name] = self._expression(value)

    def _is_list(self, node: nodes.Node) -> bool:
        """Whether it is the messages, or some of them, in any order."""
        match node:
            case nodes.Name(name=name):
                return name in self._lists and name != self._message
            case nodes.Getitem(node=inner, arg=nodes.Slice()):
                return self._is_list(inner)
        return False

    def _sum(self, parts: list[nodes.Expr]) -> _Cost:
        total = _Cost()
        for part in parts:
            total += self._expression(part)
        return total

    def _expression(self, node: nodes.Node) -> _Cost:  # noqa: PLR0911 - one case a kind of node
        match node:
            case nodes.TemplateData(data=text) | nodes.Const(value=str() as text):
                return _Cost(len(text.encode()))
            case nodes.Add(left=left, right=right):
                return self._expression(left) + self._expression(right)
            case nodes.Concat(nodes=parts):
                return self._sum(parts)
            case nodes.CondExpr(expr1=then, expr2=otherwise):
                return self._expression(then) | (_Cost() if otherwise is None else self._expression(otherwise))
            case nodes.Filter(node=inner, name=name) if name in STRIPPING and inner is not None:
                return self._expression(inner)
            case nodes.Call(node=nodes.Getattr(node=inner, attr=name)) if name in STRIPPING:
                return self._expression(inner)
            case nodes.Call(node=nodes.Name(name="raise_exception")):
                return _Cost()
            case nodes.Name(name=name) if name in self._costs and name not in self._lists:
                return self._costs[name]
            case (
                nodes.Getitem(node=owner, arg=nodes.Const(value=str() as field))
                | nodes.Getattr(node=owner, attr=field)
            ):
                return self._field(owner, field)
        raise _Unproved

    def _field(self, owner: nodes.Node, field: str) -> _Cost:
        """A field of the loop's message; outside of the loop, of one that is named by its place."""
        match owner:
            case nodes.Name(name=name) if name == self._message:
                pass
            case nodes.Getitem(node=inner, arg=nodes.Const(value=int())) if self._message is None:
                if not self._is_list(inner):
                    raise _Unproved
            case _:
                raise _Unproved
        match field:
            case "role":
                return _Cost(ROLE_BYTES)
            case "content":
                return _Cost(copies=1)
        raise _Unproved


def _is_of_the_first(test: nodes.Node) -> bool:
    """Whether a condition holds in the first turn of its loop at most."""
    match test:
        case nodes.Getattr(node=nodes.Name(name="loop"), attr="first"):
            return True
        case nodes.And(left=left, right=right):
            return _is_of_the_first(left) or _is_of_the_first(right)
    return False

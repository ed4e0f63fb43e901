"""Templates of which it is proved that they write one message after the other: rendered without running them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jinja2 import nodes

from kvgate.engines.llamacpp.growth import MESSAGES

if TYPE_CHECKING:
    from collections.abc import Callable

MARK: Final = "\ue000kvgate\ue001"
"""Stands for a text where the template is run to see what it writes around one; no template has it."""

Pairs = tuple[tuple[str, str], ...]


def is_stencilled(tree: nodes.Template) -> bool:
    """Whether a message is written alike wherever it stands: by its role, its text, and the first role of all.

    True of a single loop over the messages that writes constants, roles and texts, on conditions of roles and of
    being the first. Whatever else a template does, it is run.
    """
    loops = [node for node in tree.body if isinstance(node, nodes.For)]
    others = [node for node in tree.body if not isinstance(node, nodes.For)]
    if len(loops) != 1 or not all(_is_fixed(node) for node in others):
        return False
    (loop,) = loops
    if not isinstance(loop.iter, nodes.Name) or loop.iter.name != MESSAGES or not isinstance(loop.target, nodes.Name):
        return False
    if loop.recursive or loop.else_ or loop.test is not None:
        return False
    return all(_is_turn(node, loop.target.name) for node in loop.body)


def _is_fixed(node: nodes.Node) -> bool:
    """Outside of the loop: constants, and names that are given beside the messages."""
    match node:
        case nodes.Output(nodes=parts):
            return all(isinstance(part, nodes.TemplateData | nodes.Const | nodes.Name) for part in parts) and not any(
                isinstance(part, nodes.Name) and part.name == MESSAGES for part in parts
            )
        case nodes.If(test=nodes.Name(name="add_generation_prompt"), body=body, elif_=[], else_=others):
            return all(_is_fixed(one) for one in (*body, *others))
    return False


def _is_turn(node: nodes.Node, message: str) -> bool:
    match node:
        case nodes.Output(nodes=parts):
            return all(_is_text(part, message) for part in parts)
        case nodes.If(test=test, body=body, elif_=branches, else_=others):
            inner = all(_is_turn(one, message) for one in (*body, *branches, *others))
            return inner and _is_of_roles(test, message)
    return False


def _is_text(node: nodes.Node, message: str) -> bool:
    match node:
        case nodes.TemplateData() | nodes.Const(value=str()):
            return True
        case nodes.Add(left=left, right=right):
            return _is_text(left, message) and _is_text(right, message)
        case nodes.Concat(nodes=parts):
            return all(_is_text(part, message) for part in parts)
    return _is_field(node, message, "role") or _is_field(node, message, "content")


def _is_of_roles(node: nodes.Node, message: str) -> bool:
    match node:
        case nodes.And(left=left, right=right) | nodes.Or(left=left, right=right):
            return _is_of_roles(left, message) and _is_of_roles(right, message)
        case nodes.Not(node=inner):
            return _is_of_roles(inner, message)
        case nodes.Getattr(node=nodes.Name(name="loop"), attr="first"):
            return True
        case nodes.Compare(expr=role, ops=[nodes.Operand(op="eq" | "ne", expr=nodes.Const(value=str()))]):
            return _is_field(role, message, "role") or _is_first_role(role)
    return False


def _is_first_role(node: nodes.Node) -> bool:
    match node:
        case nodes.Getitem(node=owner, arg=nodes.Const(value="role")) | nodes.Getattr(node=owner, attr="role"):
            match owner:
                case nodes.Getitem(node=nodes.Name(name="messages"), arg=nodes.Const(value=0)):
                    return True
    return False


def _is_field(node: nodes.Node, message: str, field: str) -> bool:
    match node:
        case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=found)):
            return name == message and found == field
        case nodes.Getattr(node=nodes.Name(name=name), attr=found):
            return name == message and found == field
    return False


class Stencil:
    """What such a template writes before, between and behind the texts; found by running it on marks.

    Args:
        run: runs the template.
    """

    def __init__(self, run: Callable[[Pairs], str]) -> None:
        self._run = run
        self._glue: dict[tuple[str, ...], tuple[str, str] | None] = {}

    def parts(self, messages: Pairs) -> list[str] | None:
        """The prompt in parts; None where the template does not write every text once."""
        if not messages:
            return None
        first = messages[0][0]
        parts: list[str] = []
        before: tuple[str, ...] = ()
        end = ""
        for role, text in messages:
            around = self._around(before, role)
            if around is None:
                return None
            start, end = around
            parts += (start, text)
            # Of what went before, the first and the last message are all that can matter.
            before = (first, role) if before else (first,)
        return [*parts, end]

    def _around(self, before: tuple[str, ...], role: str) -> tuple[str, str] | None:
        """What is written between the last text and this one, and behind this one where it is the last."""
        key = (*before, role)
        if key not in self._glue:
            self._glue[key] = self._found(key)
        return self._glue[key]

    def _found(self, roles: tuple[str, ...]) -> tuple[str, str] | None:
        pieces = self._run(tuple((role, MARK) for role in roles)).split(MARK)
        return (pieces[-2], pieces[-1]) if len(pieces) == len(roles) + 1 else None

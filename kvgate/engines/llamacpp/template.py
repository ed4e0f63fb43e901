"""An engine's chat template, rendered in this process: sandboxed, metered, and bounded by its own text."""

from __future__ import annotations

import functools
import json
import threading
import time
from typing import TYPE_CHECKING, Any, Final, cast

from jinja2 import TemplateError, nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from kvgate.engines.llamacpp.stencil import Stencil, is_stencilled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvgate.core.counting import PlainChat
    from kvgate.engines.llamacpp.stencil import Pairs

SOURCE_CHARS_MAX: Final = 32 * 1024
"""A longer template is not rendered here: between two looks at the clock there may be all of its text's work."""

CHARS_MAX: Final = 16 * 1024 * 1024
"""Nothing that a template makes may be longer."""

RUN_S: Final = 0.1
"""For a look at what the template writes around a text."""

INTEGER_MAX: Final = 2**31

FILTERS: Final = (
    "trim", "length", "count", "string", "lower", "upper", "first", "last", "default", "d", "list", "items", "safe",
    "int", "float", "abs", "capitalize", "title", "selectattr", "rejectattr",
)  # fmt: skip
"""What a template may do to a value: only what makes no more of it than there was, in time that its length bounds."""

FILTERS_OF_CHARACTERS: Final = (
    "length", "count", "lower", "upper", "first", "last", "list", "int", "float", "capitalize", "title"
)  # fmt: skip

METHODS: Final = frozenset(
    {
        "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "startswith", "endswith", "lower", "upper",
        "title", "capitalize", "find", "removeprefix", "removesuffix", "get", "items", "keys", "values",
    }
)  # fmt: skip
"""Likewise of strings and mappings."""


WHITESPACE: Final = " \t\n\v\f\r"
"""What llama.cpp strips: no-break spaces and the like stay, which Python takes away (measured)."""

STRIPS: Final = frozenset({"strip", "lstrip", "rstrip"})

OF_CHARACTERS: Final = frozenset({"lower", "upper", "title", "capitalize", "find", "splitlines"})
"""Methods that C++ does on bytes and Python on characters: the same for ASCII alone."""

LOOP: Final = frozenset({"first", "last", "index", "index0", "length", "previtem", "nextitem"})
"""What of a loop's state can be looked at without the sandbox's slower way."""


class TemplateUnusable(ValueError):
    """The template cannot be rendered here at all; the message says why, and quotes none of it."""


class RenderFailed(Exception):
    """The template made nothing of these messages; the engine will have to say what is wrong with them."""


class RenderTooLong(RenderFailed):
    """The template ran for longer than it may."""


class _Meter(threading.local):
    """When the rendering that this thread is at must end."""

    deadline_s = 0.0

    def step(self) -> None:
        if time.perf_counter() > self.deadline_s:
            raise RenderTooLong

    def each(self, values: Any) -> Iterator[Any]:
        for value in values:
            self.step()
            yield value


class _Metered(NodeTransformer):
    """Puts the meter into every loop, and makes of what Jinja does by itself calls that can be bounded."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - Jinja's names
        self.generic_visit(node)
        node.iter = _call("kvgate_each", cast("nodes.Expr", node.iter))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802 - likewise
        self.generic_visit(node)
        return _call("kvgate_concat", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802 - likewise
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _call("kvgate_slice", node.node, *(end or nodes.Const(None) for end in ends))

    def visit_Add(self, node: nodes.Add) -> nodes.Call:  # noqa: N802 - likewise
        terms: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            terms.append(left.right)
            left = left.left
        terms.append(left)
        return _call("kvgate_sum", *(self.visit(term) for term in reversed(terms)))


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates are written for it, without whatever one step of could take unbounded time or space."""

    intercepted_binops = frozenset({"-", "*", "/", "//", "%", "**"})

    def __init__(self, meter: _Meter) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self._meter = meter
        self.filters = {name: self.filters[name] for name in FILTERS} | {"tojson": _tojson, "trim": _trim}
        for name in FILTERS_OF_CHARACTERS:
            self.filters[name] = _for_ascii(self.filters[name])
        self.globals = {
            "namespace": self.globals["namespace"],
            "raise_exception": _raise,
            "kvgate_each": meter.each,
            "kvgate_concat": self._concat,
            "kvgate_sum": self._sum,
            "kvgate_slice": _slice,
        }
        self.concat = self._joined  # type: ignore[method-assign]  # what macros and set blocks use

    def getitem(self, obj: Any, argument: Any) -> Any:
        # Messages are what templates look into most; the sandbox's own way to the same value takes 5 x as long.
        if type(obj) is dict and type(argument) is str and argument in obj:
            return obj[argument]
        if isinstance(obj, str):
            _check_ascii(obj)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is LoopContext and attribute in LOOP:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | dict):
            return attr in METHODS
        return not isinstance(obj, list | tuple | bytes) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:  # noqa: ARG002 - Jinja's
        """`str.format` is no method that a template may call, wrapped or not."""
        return None

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._meter.step()
        if function == self._sum:  # the commonest of all, and our own
            return self._sum(*args)
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str):
            if name in STRIPS and not args:
                args = (WHITESPACE,)
            elif name in OF_CHARACTERS or (name in {"split", "rsplit"} and not args):
                _check_ascii(owner)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_numbers(left, right)
        if operator == "**":
            raise RenderFailed
        return super().call_binop(context, operator, left, right)

    def _sum(self, *terms: Any) -> Any:
        """A chain of `+`: nearly always of texts."""
        try:
            text = "".join(terms)
        except TypeError:
            return functools.reduce(self._plus, terms)
        if len(text) > CHARS_MAX:
            raise RenderTooLong
        return text

    def _plus(self, left: Any, right: Any) -> Any:
        if isinstance(left, list) and isinstance(right, list) and len(left) + len(right) <= CHARS_MAX:
            return left + right
        _check_numbers(left, right)
        return left + right

    def _concat(self, *parts: Any) -> str:
        return self._joined([str(part) for part in parts])

    def _joined(self, texts: Iterable[str]) -> str:
        """The texts as one, which is not made where it would be too long."""
        parts, chars = [], 0
        for text in texts:
            chars += len(text)
            if chars > CHARS_MAX:
                raise RenderTooLong
            parts.append(text)
        return "".join(parts)


def _trim(value: Any) -> str:
    return str(value).strip(WHITESPACE)


def _slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    _check_ascii(value)
    return value[start:stop:step]


def _check_ascii(value: Any) -> None:
    """Beyond ASCII the engine and Python may have different ideas of a character: then the engine counts."""
    if isinstance(value, str) and not value.isascii():
        raise RenderFailed


def _for_ascii(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            _check_ascii(value)
        return function(*args, **kwargs)

    return checked


def _check_numbers(left: Any, right: Any) -> None:
    """Arithmetic is for numbers of a sane size: `'x' * 10**9` takes one step and all memory."""
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    if not numbers or max(abs(left), abs(right)) > INTEGER_MAX:
        raise RenderFailed


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=None if indent is None else min(int(indent), 16))


def _raise(message: str = "") -> None:  # noqa: ARG001 - the template's own words may quote a message
    raise RenderFailed


class ChatTemplate:
    """One template, compiled.

    Args:
        source: its text, as the engine shows it.
        fixed: what it is given beside the messages: the names of BOS and EOS.

    Raises:
        TemplateUnusable: it is no Jinja, does what is not done here, or is too long.
    """

    def __init__(self, source: str, fixed: dict[str, Any]) -> None:
        if len(source) > SOURCE_CHARS_MAX:
            raise TemplateUnusable(f"the template is longer than {SOURCE_CHARS_MAX} characters")
        self._meter = _Meter()
        self._environment = _Environment(self._meter)
        self._fixed = fixed
        try:
            self.tree = self._environment.parse(source)
            self._template = self._environment.from_string(_Metered().visit(self._environment.parse(source)))
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise TemplateUnusable(f"the template cannot be used here ({type(error).__name__})") from None
        self._stencil = Stencil(self._run) if is_stencilled(self.tree) else None

    @property
    def fixed_texts(self) -> dict[str, str]:
        """The texts among what it is given beside the messages."""
        return {name: value for name, value in self._fixed.items() if isinstance(value, str)}

    def render(self, chat: PlainChat, within_s: float) -> str:
        """What the engine makes of a chat: the whole prompt as text.

        An answer at the end is gone on with: the prompt is what asks for it, and what there is of it.

        Raises:
            RenderTooLong: it takes longer than `within_s`, or grows beyond `CHARS_MAX`.
            RenderFailed: the template refuses these messages.
        """
        continued = chat.is_continued
        messages = chat.messages[:-1] if continued else chat.messages
        if self._stencil is None or (parts := self._stencil.parts(messages)) is None:
            text = self._run(messages, within_s)
        else:
            text = "".join(parts)
        if len(text) > CHARS_MAX:
            raise RenderTooLong
        return text + chat.messages[-1][1] if continued else text

    def _run(self, messages: Pairs, within_s: float = RUN_S) -> str:
        self._meter.deadline_s = time.perf_counter() + within_s
        given = [{"role": role, "content": text} for role, text in messages]
        try:
            return self._template.render(messages=given, add_generation_prompt=True, **self._fixed)
        except RenderFailed:
            raise
        except Exception as error:  # whatever a template's own mistakes raise  # noqa: BLE001
            raise RenderFailed(type(error).__name__) from None

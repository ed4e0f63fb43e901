"""An engine as counting sees it: a template, a small vocabulary and its counters' answers, without a socket."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jinja2.sandbox import SandboxedEnvironment

from kvgate.ports import Refused
from tests.unit.doubles import profile

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvgate.core.profile import EngineProfile

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Strict about roles; trims."""

FORGETFUL = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}{% else %}{% set text = m.content %}{% endif %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ text ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Renders an old answer otherwise than the latest: without its thoughts."""

SPECIALS = ("<|im_start|>", "<|im_end|>", "<s>")


def tokens_of(text: str, *, special: bool = True) -> list[int]:
    """A vocabulary of words and single characters; special tokens are cut out first."""
    pieces = re.split(f"({'|'.join(map(re.escape, SPECIALS))})", text) if special else [text]
    found: list[int] = []
    for piece in pieces:
        if special and piece in SPECIALS:
            found.append(SPECIALS.index(piece))
        else:
            found += [10 + zlib.crc32(word.encode()) for word in re.findall(r"\w+|\W", piece)]
    return found


class Vocabulary:
    """The same vocabulary, as the tokenizer library would have it; `foreign` makes it that of another model."""

    def __init__(self, *, foreign: bool = False) -> None:
        self.foreign = foreign
        self.asked: list[str] = []

    def sample(self) -> list[str]:
        return []

    def knows(self, text: str) -> bool:
        return "\u0d00" not in text

    def tokens(self, text: str) -> list[int]:
        self.asked.append(text)
        return [ord(character) for character in text] if self.foreign else tokens_of(text)

    def count(self, text: str) -> int:
        return len(self.tokens(text))


@dataclass
class CountingEngine:
    """Implements `Ask` and `Current`; every attribute may be changed while it is asked.

    `shown` is the template that `/props` tells, where that is not the one that is applied.
    """

    template: str = CHATML
    shown: str | None = None
    bos: bool = False
    vocab_type: int = 2
    now: EngineProfile = field(default_factory=profile)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    gone: Refused | None = None
    tokens: Callable[..., list[int]] = tokens_of
    before: Callable[[str], Awaitable[None]] | None = None

    async def current(self) -> EngineProfile:
        if self.gone is not None:
            raise self.gone
        return self.now

    async def ask(self, method: str, path: str, value: Any = None) -> tuple[int, Any, EngineProfile]:
        self.asked.append((path, value))
        if self.before is not None:
            await self.before(path)
        now = await self.current()
        answers = {
            "/props": self._props,
            "/v1/models": self._models,
            "/apply-template": self._applied,
            "/tokenize": self._tokenized,
            "/v1/chat/completions/input_tokens": self._counted,
        }
        try:
            return 200, answers[path](value), now
        except KeyError:
            return 404, None, now
        except ValueError:
            return 500, {"error": {"code": 500}}, now

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def count(self, messages: list[dict[str, Any]]) -> int:
        """The true count of a chat."""
        return self.bos + len(self.tokens(self.render(messages)))

    def render(self, messages: list[dict[str, Any]]) -> str:
        def refuse(_: str) -> None:
            raise ValueError

        plain = []
        for message in messages:
            content = message["content"]
            text = content if isinstance(content, str) else ""
            for part in content if isinstance(content, list) else ():
                text = f"{text}\n{part['text']}" if text else part["text"]
            plain.append({"role": message["role"], "content": text})
        tail = plain.pop()["content"] if plain[-1]["role"] == "assistant" else ""
        environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["trim"] = lambda text: text.strip(" \t\n\v\f\r")  # as C++ does
        names = {"bos_token": "" if self.bos else "<s>", "raise_exception": refuse, "add_generation_prompt": True}
        return environment.from_string(self.template).render(messages=plain, **names) + tail

    def _props(self, _: Any) -> Any:
        return {"chat_template": self.shown or self.template, "bos_token": "<s>", "model_path": "/models/small.gguf"}

    def _models(self, _: Any) -> Any:
        return {"data": [{"id": "small", "meta": {"vocab_type": self.vocab_type}}]}

    def _applied(self, value: Any) -> Any:
        return {"prompt": self.render(value["messages"])}

    def _counted(self, value: Any) -> Any:
        return {"input_tokens": self.count(value["messages"])}

    def _tokenized(self, value: Any) -> Any:
        content = value["content"]
        texts = content if isinstance(content, list) else [content]
        found = [token for text in texts for token in self.tokens(text, special=value["parse_special"])]
        if value.get("with_pieces"):
            pieces = {tokens_of(special)[0]: special for special in SPECIALS}
            return {"tokens": [{"id": token, "piece": pieces.get(token, "?")} for token in found]}
        return {"tokens": [2] * (self.bos and value["add_special"]) + found}

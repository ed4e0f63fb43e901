"""Which proofs of a prompt's size hold on one engine, probed against its own answers; why the others do not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvgate.core.counting import PlainChat, Proof
from kvgate.core.reason import Reason, refusal
from kvgate.engines.llamacpp import tokenizer
from kvgate.engines.llamacpp.growth import Growth, growth_of
from kvgate.engines.llamacpp.template import ChatTemplate, RenderFailed, TemplateUnusable
from kvgate.engines.llamacpp.vocabulary import NoVocabulary
from kvgate.ports import Refused

if TYPE_CHECKING:
    from kvgate.core.profile import EngineProfile
    from kvgate.engines.llamacpp.tokenizer import Tokenizer

BPE: Final = 2
"""llama.cpp's number of byte-level vocabularies, whose tokens each stand for a byte at least."""

PROBE_RENDER_S: Final = 0.25


class Ask(Protocol):
    """One short call to the engine: status, the JSON of its answer, and who answered."""

    async def __call__(self, method: str, path: str, value: Any = None) -> tuple[int, Any, EngineProfile]:
        """Ask.

        Raises:
            Refused: the engine is not to be had.
        """


@dataclass(slots=True)
class Proofs:
    """What is proved of one engine.

    Args:
        profile: the engine.
        added_tokens: what it puts around every prompt by itself, such as BOS.
        template: renders plain chats as the engine does.
        takes_parts, takes_continued: whether that goes for contents in parts, and for an answer to go on with.
        boundary: the text of a special token at which every message's text begins; its token's id.
        growth: what the template adds at most.
        ascii_only: whether the bound of bytes is for ASCII alone, since the vocabulary rewrites other text.
        tokenizer: the engine's vocabulary.
        off: why a proof does not hold, by proof.
    """

    profile: EngineProfile
    added_tokens: int = 0
    template: ChatTemplate | None = None
    takes_parts: bool = False
    takes_continued: bool = False
    boundary: tuple[str, int] | None = None
    growth: Growth | None = None
    ascii_only: bool = False
    tokenizer: Tokenizer | None = None
    off: dict[Proof, str] = field(default_factory=dict)

    def takes(self, chat: PlainChat) -> bool:
        """Whether the template was seen to be rendered as the engine does it for chats of this form."""
        if chat.in_parts and not self.takes_parts:
            return False
        if not chat.is_continued:
            return True
        # Of an empty answer, and of two answers in a row, engines make something of their own.
        pair = len(chat.messages) > 1 and chat.messages[-2][0] != "assistant"
        return self.takes_continued and pair and bool(chat.messages[-1][1])


def chat_of(*texts: tuple[str, str], in_parts: bool = False) -> PlainChat:
    """A plain chat."""
    return PlainChat(texts, sum(len(text) for _, text in texts), in_parts)


_S, _U, _A = "system", "user", "assistant"
_ODD: Final = " \n lead, trail and 🎉 \t\n "
_THOUGHT: Final = "<think>\nhm\n</think>\n\nSeven."

PROBES: Final = (
    chat_of((_U, "Hello.")),
    chat_of((_S, "Be brief."), (_U, "Hello.")),
    chat_of((_U, "One?"), (_A, "Two."), (_U, "Three?")),
    chat_of((_S, "Be brief."), (_U, "One?"), (_A, "Two."), (_U, "Three?"), (_A, "Four."), (_U, "Five?")),
    chat_of((_U, _ODD), (_A, _ODD), (_U, _ODD)),
    chat_of((_S, _ODD), (_U, "1 < 2 & \"3\" > '4' {{ x }} {% if %} \\n")),
    chat_of((_U, "é e\u0301 東京 עברית \u00a0"), (_A, ""), (_U, "")),
    chat_of((_U, "a <|im_start|>user\nb<|im_end|> [INST] c [/INST] <s> d </s> <|eot_id|>"), (_A, "x"), (_U, "y")),
    chat_of((_U, "Think."), (_A, _THOUGHT), (_U, "Again."), (_A, _THOUGHT), (_U, "And again.")),
    chat_of((_S, ""), (_U, "Hello.")),
    chat_of((_U, "Hello."), (_S, "Be brief."), (_U, "Go on.")),
    chat_of((_U, "Hello."), (_U, "Anybody?")),
    chat_of((_U, "One?"), (_A, "Two."), (_A, "Three."), (_U, "Four?")),
    chat_of((_A, "I begin."), (_U, "Do you?")),
    chat_of(*(((_U, "Line.\n" * 40), (_A, "Word " * 40)) * 4), (_U, "End.")),
)
"""Chats that templates treat differently; the first four are what nearly every conversation looks like."""

LONGEST: Final = PROBES[-1]

PROBES_IN_PARTS: Final = (
    chat_of((_U, "a\nb"), in_parts=True),
    chat_of((_S, "x"), (_U, " a \n\n b\n"), (_A, "c"), (_U, "d\ne"), in_parts=True),
)
PROBES_CONTINUED: Final = (
    chat_of((_U, "Hello."), (_A, "The answer is")),
    chat_of((_S, "x"), (_U, "One?"), (_A, "Two."), (_U, "Three?"), (_A, _ODD)),
)


def wire(chat: PlainChat) -> dict[str, Any]:
    """The chat as a request's body; texts of a chat in parts are cut at line ends, behind an empty part."""

    def content(text: str) -> Any:
        return [{"type": "text", "text": line} for line in ("", *text.split("\n"))] if chat.in_parts else text

    return {"messages": [{"role": role, "content": content(text)} for role, text in chat.messages]}


async def probe(ask: Ask, profile: EngineProfile, vocabulary: Path | None) -> Proofs:
    """Find out what holds on this engine, by some fifty short calls to it.

    Args:
        ask: asks it.
        profile: what it was when the probe began.
        vocabulary: the file with its vocabulary; None takes the model's own file, where this machine can read it.

    Raises:
        Refused: the engine is not to be had, or changed meanwhile.
    """
    return await _Prober(ask, profile).all(vocabulary)


class _Prober:
    def __init__(self, ask: Ask, profile: EngineProfile) -> None:
        self._ask_engine = ask
        self._found = Proofs(profile)

    async def all(self, vocabulary: Path | None) -> Proofs:
        found = self._found
        props = await self._asked("GET", "/props") or {}
        found.added_tokens = len(await self._tokens("kvgate", add_special=True)) - len(await self._tokens("kvgate"))
        specials = [text for name in ("bos_token", "eos_token") if isinstance(text := props.get(name), str) and text]
        rendered = await self._probe_template(props)
        specials += await self._probe_boundary(rendered)
        await self._probe_tokenizer(vocabulary, props, list(dict.fromkeys(specials)))
        await self._probe_bytes(rendered)
        await self._probe_counts(rendered)
        return found

    # -- the template

    async def _probe_template(self, props: dict[str, Any]) -> dict[PlainChat, str]:
        """Compare what is rendered here with what the engine renders; the texts, by chat."""
        source = props.get("chat_template")
        if not isinstance(source, str):
            return self._no_template("the engine shows no chat template")
        theirs = {chat: await self._applied(chat) for chat in (*PROBES, *PROBES_IN_PARTS, *PROBES_CONTINUED)}
        names = {name: props.get(name) or "" for name in ("bos_token", "eos_token")}
        # BOS is taken off the text where the tokenizer puts one there; `tools` is undefined, or is nothing.
        variants = [n | t for n in (names, names | {"bos_token": ""}) for t in ({}, {"tools": None})]
        problem = ""
        for fixed in variants:
            try:
                template = ChatTemplate(source, fixed)
            except TemplateUnusable as unusable:
                return self._no_template(str(unusable))
            ours = {chat: await asyncio.to_thread(_rendered, template, chat) for chat in theirs}
            differing = [at for at, chat in enumerate(PROBES) if ours[chat] not in {None, theirs[chat]}]
            if not differing and ours[PROBES[0]] is not None and ours[PROBES[2]] is not None:
                self._found.template = template
                self._found.takes_parts = all(ours[chat] == theirs[chat] for chat in PROBES_IN_PARTS)
                self._found.takes_continued = all(ours[chat] == theirs[chat] for chat in PROBES_CONTINUED)
                return {chat: text for chat, text in ours.items() if text is not None and text == theirs[chat]}
            problem = problem or f"probes {differing} differ" if differing else "it makes nothing of a plain chat"
        return self._no_template(f"the template is not rendered here as the engine renders it ({problem})")

    def _no_template(self, reason: str) -> dict[PlainChat, str]:
        self._found.off |= {Proof.SUM: reason, Proof.BOUND: reason}
        return {}

    async def _applied(self, chat: PlainChat) -> str | None:
        status, answer, _ = await self._ask_engine("POST", "/apply-template", wire(chat))
        text = answer.get("prompt") if status == 200 and isinstance(answer, dict) else None
        return text if isinstance(text, str) else None

    # -- where a text may be cut

    async def _probe_boundary(self, rendered: dict[PlainChat, str]) -> list[str]:
        """Find a special token that every message's text begins with; the special tokens of the template, as texts.

        Special tokens are cut out of a text first, so what stands before and behind one is tokenized by itself.
        """
        plain, longer = rendered.get(PROBES[2]), rendered.get(LONGEST)
        if plain is None or longer is None:
            self._found.off.setdefault(Proof.SUM, "the template makes nothing of a plain conversation")
            return []
        answer = await self._tokens_with_pieces(plain)
        pieces = {piece: token for token, piece in answer if len(piece) > 1 and piece in plain}
        specials = []
        for piece, token in pieces.items():
            if await self._tokens(piece) == [token] and await self._tokens(piece, parse_special=False) != [token]:
                specials.append(piece)
        # The more often it stands there, the smaller are the pieces.
        cuts = sorted(specials, key=lambda piece: (-longer.count(piece), longer.find(piece)))
        if cuts and longer.count(cuts[0]) > 1:
            self._found.boundary = cuts[0], pieces[cuts[0]]
        else:
            self._found.off[Proof.SUM] = "no special token of the template divides one message from the next"
        return specials

    # -- the vocabulary

    async def _probe_tokenizer(self, vocabulary: Path | None, props: dict[str, Any], specials: list[str]) -> None:
        if vocabulary is None:
            named = props.get("model_path")
            if not isinstance(named, str) or not named:
                self._found.off[Proof.TOKENIZER] = "the engine does not name its model's file"
                return
            vocabulary = Path(named)
        try:
            loaded = await asyncio.to_thread(tokenizer.load, vocabulary)
            drawn = await asyncio.to_thread(loaded.sample)
            texts = [text for text in (*tokenizer.probe_texts(specials), *drawn) if loaded.knows(text)]
            ours = await asyncio.to_thread(lambda: [token for text in texts for token in loaded.tokens(text)])
        except NoVocabulary as none:
            self._found.off[Proof.TOKENIZER] = str(none)
            return
        if ours != await self._tokens(texts):
            self._found.off[Proof.TOKENIZER] = f"{vocabulary.name} does not tokenize as the engine does"
            return
        self._found.tokenizer = loaded

    async def _probe_bytes(self, rendered: dict[PlainChat, str]) -> None:
        """Whether a prompt has at most as many tokens as bytes, and how many bytes the template can add."""
        template = self._found.template
        if template is None or not rendered:
            return
        self._found.growth = growth_of(template.tree, template.fixed_texts)
        if self._found.growth is None:
            self._found.off[Proof.BOUND] = "the template's own text cannot be bounded by reading it"
            return
        models = await self._asked("GET", "/v1/models")
        data = models.get("data") if isinstance(models, dict) else None
        meta = data[0].get("meta") if isinstance(data, list) and data and isinstance(data[0], dict) else None
        if not isinstance(meta, dict) or meta.get("vocab_type") != BPE:
            self._found.off[Proof.BOUND] = "the vocabulary is not known to be one of bytes"
            return
        # A vocabulary that normalises may make more bytes of a text than it has.
        self._found.ascii_only = await self._tokens("e\u0301 \u0958") == await self._tokens("\u00e9 \u0915\u093c")

    # -- all together

    async def _probe_counts(self, rendered: dict[PlainChat, str]) -> None:
        """Compare every proof with the engine's own counter."""
        found = self._found
        for chat, text in rendered.items():
            counted = await self._asked("POST", "/v1/chat/completions/input_tokens", wire(chat))
            truth = counted.get("input_tokens") if isinstance(counted, dict) else None
            if found.boundary is not None:
                tokens = found.added_tokens + len(await self._tokens(cut(text, found.boundary[0])))
                self._check(Proof.SUM, tokens == truth)
            if found.tokenizer is not None and found.tokenizer.knows(text):
                self._check(Proof.TOKENIZER, found.added_tokens + found.tokenizer.count(text) == truth)
            if found.growth is not None:
                chat_bytes = sum(len(text.encode()) for _, text in chat.messages)
                bound = found.added_tokens + found.growth.bound(chat_bytes, len(chat.messages))
                self._check(Proof.BOUND, isinstance(truth, int) and truth <= bound)

    def _check(self, proof: Proof, agrees: bool) -> None:
        if not agrees:
            self._found.off.setdefault(proof, "it does not agree with the engine's counter on the probe's chats")

    # -- asking

    async def _asked(self, method: str, path: str, value: Any = None) -> Any:
        status, answer, profile = await self._ask_engine(method, path, value)
        if profile != self._found.profile:
            raise Refused(refusal(Reason.ENGINE_CHANGED, retry_after_s=1))
        return answer if status == 200 else None

    async def _tokens(
        self, content: str | list[str], *, add_special: bool = False, parse_special: bool = True
    ) -> Any:
        value = {"content": content, "add_special": add_special, "parse_special": parse_special}
        answer = await self._asked("POST", "/tokenize", value)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return tokens if isinstance(tokens, list) else []

    async def _tokens_with_pieces(self, text: str) -> list[tuple[int, str]]:
        value = {"content": text, "add_special": False, "parse_special": True, "with_pieces": True}
        answer = await self._asked("POST", "/tokenize", value)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return [
            (token["id"], token["piece"])
            for token in (tokens if isinstance(tokens, list) else [])
            if isinstance(token, dict) and isinstance(token.get("id"), int) and isinstance(token.get("piece"), str)
        ]


def _rendered(template: ChatTemplate, chat: PlainChat) -> str | None:
    try:
        return template.render(chat, PROBE_RENDER_S)
    except RenderFailed:
        return None


def cut(text: str, boundary: str) -> list[str]:
    """The text in pieces, each of which but the first begins with the boundary; none is empty."""
    head, *others = text.split(boundary)
    return [piece for piece in (head, *(boundary + other for other in others)) if piece]

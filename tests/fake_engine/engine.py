"""A llama-server double: what it says of itself, how it counts, what its slots do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

from tests.fake_engine.families import FAMILIES, TOKENIZE, Said, limit_of
from tests.fake_engine.usual import usual
from tests.fake_engine.wire import Link

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from tests.fake_engine.families import Family
    from tests.fake_engine.wire import Recorded, Reply

WORDS = ("Hi", ",", " how", " can", " I", " help", " you", "?")


class FakeEngine:
    """One llama-server; as an async context manager it listens on a free port of 127.0.0.1.

    Every attribute may be changed while it runs. `script(path, reply, ...)` gives the next requests for a path
    other replies than the usual one, `always[path]` all that have none of those; `faults` makes them.
    """

    def __init__(self, *, n_ctx: int = 512, total_slots: int = 2) -> None:
        self.n_ctx = n_ctx
        self.total_slots = total_slots
        self.models_n_ctx: int | None = None
        self.slots_n_ctx: int | None = None
        self.model = "small"
        self.media_marker: str | None = _marker()
        self.build = "b0-unknown"
        self.loading = False
        self.asleep = False
        self.wakes = 0
        self.load_s = 0.0
        self.slots_shown = True
        self.words: tuple[str, ...] = WORDS
        self.cached_tokens = 0
        self.usage_drift_tokens = 0
        self.word_delay_s = 0.0
        self.embeds = False
        self.frozen = False
        self.turns_away = False
        self.slots_stick = False
        self.always: dict[str, Reply] = {}
        self.requests: list[Recorded] = []
        self.connections_made = 0
        self.busy: list[dict[str, Any]] = []
        self._at_work: dict[int, dict[str, Any]] = {}
        self._tasks = 0
        self._scripts: dict[str, deque[Reply]] = defaultdict(deque)
        self._links: set[Link] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def open_connections(self) -> int:
        return len(self._links)

    def asked(self, path: str) -> list[Recorded]:
        """The requests for one path, in order."""
        return [request for request in self.requests if request.path == path]

    def script(self, path: str, *replies: Reply) -> None:
        """Reply to the next requests for `path` with these, one each."""
        self._scripts[path].extend(replies)

    def next_reply(self, path: str) -> Reply:
        queue = self._scripts[path]
        return queue.popleft() if queue else self.always.get(path, usual)

    async def start(self) -> None:
        """Listen, on the port of the first start."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Link(self), "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the port and every connection, as the end of the process would."""
        self.refuse_connections()
        await self.hang_up()

    async def hang_up(self) -> None:
        """End every connection."""
        links = list(self._links)
        for link in links:
            link.transport.abort()
        await asyncio.gather(*(link.gone.wait() for link in links))

    async def become(self, n_ctx: int, *, spare: Link) -> None:
        """As `replace`; one connection lives until its answer is out."""
        others = self._links - {spare}
        for link in others:
            link.transport.abort()
        await asyncio.gather(*(link.gone.wait() for link in others))
        self.let_go()
        self.media_marker = _marker()
        self.n_ctx = n_ctx

    def refuse_connections(self) -> None:
        """From now on nobody listens at the port; what is open stays open until `start`."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def replace(self, *, n_ctx: int | None = None) -> None:
        """Another process takes over the port: every connection ends, a new `media_marker` is drawn."""
        await self.stop()
        self.let_go()
        self.media_marker = _marker()
        self.n_ctx = n_ctx or self.n_ctx
        await self.start()

    # -- what it says of itself

    def props(self) -> dict[str, Any]:
        marker = {} if self.media_marker is None else {"media_marker": self.media_marker}
        return {
            "default_generation_settings": {"params": {"n_predict": -1, "seed": 4294967295}, "n_ctx": self.n_ctx},
            "total_slots": self.total_slots,
            "model_alias": self.model,
            "model_ftype": "Q4_1",
            "model_path": f"/models/{self.model}.gguf",
            "modalities": {"vision": False, "video": False, "audio": False},
            **marker,
            "endpoint_slots": self.slots_shown,
            "endpoint_props": False,
            "endpoint_metrics": False,
            "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
            "build_info": self.build,
            "is_sleeping": self.asleep,
        }

    def models(self) -> dict[str, Any]:
        n_ctx = self.models_n_ctx or self.n_ctx
        meta: dict[str, Any] = {"vocab_type": 2, "n_vocab": 49152, "n_ctx": n_ctx, "n_ctx_train": 8192}
        meta |= {"n_embd": 576, "n_params": 134515008, "size": 96576768, "ftype": "Q4_1"}
        entry = {"id": self.model, "aliases": [self.model], "tags": [], "object": "model", "created": 1, "meta": meta}
        return {"object": "list", "data": [{**entry, "owned_by": "llamacpp"}]}

    def slots(self) -> list[dict[str, Any]]:
        n_ctx = self.slots_n_ctx or self.n_ctx
        idle = [
            {"id": at, "n_ctx": n_ctx, "speculative": False, "is_processing": False} for at in range(self.total_slots)
        ]
        busy = [*self.busy, *self._at_work.values()][: self.total_slots]
        return [idle[at] | entry for at, entry in enumerate(busy)] + idle[len(busy) :]

    # -- slots at work

    @contextlib.contextmanager
    def at_work(self, request: Recorded) -> Iterator[None]:
        """An inference keeps a slot busy while it is answered; with `slots_stick` also afterwards, until `let_go`.

        Who waits for a slot to be shown idle can then be told from who does not.
        """
        family = FAMILIES.get(request.path)
        if family is None:
            yield
            return
        self._tasks += 1
        task = self._tasks
        self._at_work[task] = {
            "is_processing": True,
            "id_task": task,
            "params": {"n_predict": limit_of(family, _body(request))[1]},
        }
        try:
            yield
        finally:
            if not self.slots_stick:
                self._at_work.pop(task, None)

    def let_go(self) -> None:
        """Every slot is idle, also those that stuck."""
        self._at_work.clear()

    # -- what it says to a request

    def says(self, family: Family, body: dict[str, Any]) -> Said:
        """The answer to a body whose prompt leaves room for one."""
        prompt, (_, limit) = self.prompt_tokens(family, body), limit_of(family, body)
        room = self.n_ctx - prompt if limit == -1 else min(max(limit, 1), self.n_ctx - prompt)
        words = self.words[:room]
        return Said(
            words=words,
            finish="length" if len(words) == room else "stop",
            limit=limit,
            prompt_tokens=prompt + self.usage_drift_tokens,
            cached_tokens=self.cached_tokens,
            model=self.model,
            build=self.build,
            usage_shown=bool((body.get("stream_options") or {}).get("include_usage")),
            sequences=body.get("n") or 1,
        )

    def prompt_tokens(self, family: Family, body: dict[str, Any]) -> int:
        """The prompt's size by the family's counter: where that is the tokenizer, with a BOS."""
        if family.counter == TOKENIZE:
            return len(self.tokens({"content": body["prompt"], "add_special": True}))
        return self.count(body)

    def count(self, body: dict[str, Any]) -> int:
        """This engine's counters: a template of 30 tokens, and one token a word."""
        given = [
            *_texts(body.get("messages")),
            *_texts(body.get("input")),
            body.get("system"),
            body.get("instructions"),
        ]
        return 30 + sum(len(str(text or "").split()) for text in given)

    def tokens(self, body: dict[str, Any]) -> list[int]:
        """As `count`, of a text or of token ids and texts; with `add_special` a BOS, unless ids come first."""
        content = body.get("content", [])
        pieces = content if isinstance(content, list) else [content]
        bos = [1] if body.get("add_special") and pieces and isinstance(pieces[0], str) else []
        found = [[7 for _ in piece.split()] if isinstance(piece, str) else [piece] for piece in pieces]
        return bos + [token for tokens in found for token in tokens]


def _marker() -> str:
    return f"<__media_{secrets.token_hex(16)}__>"


def _texts(given: Any) -> list[Any]:
    """The contents of messages or items; a bare text is one."""
    if not isinstance(given, list):
        return [given]
    return [item.get("content") for item in given]


def _body(request: Recorded) -> dict[str, Any]:
    try:
        found = json.loads(request.body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

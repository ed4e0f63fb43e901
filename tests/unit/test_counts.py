"""Prompts are counted by the cheapest proof that holds; one that errs is dropped at once, and the next one counts."""

from __future__ import annotations

import asyncio
import json
import logging
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.core.counting import Proof
from kvgate.core.reason import Reason, refusal
from kvgate.dialects.openai_chat import OpenAiChat
from kvgate.dialects.openai_completions import OpenAiCompletions
from kvgate.engines.llamacpp import tokenizer
from kvgate.engines.llamacpp.counting import PROBE_AGAIN_S, CountingSettings, Counts
from kvgate.engines.llamacpp.vocabulary import NoVocabulary
from kvgate.ports import Counted, Refused
from tests.unit.counting_engine import CHATML, FORGETFUL, STRICT, CountingEngine, Vocabulary, tokens_of
from tests.unit.doubles import ManualClock, forever, profile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvgate.ports import ReadRequest

COUNTER = "/v1/chat/completions/input_tokens"
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nParis."},
    {"role": "user", "content": "And of Italy?"},
]


def request(messages: list[dict[str, Any]] = TURNS, **fields: Any) -> ReadRequest:
    return OpenAiChat().read(json.dumps({"messages": messages, **fields}).encode())


@dataclass
class Bench:
    """Counts in front of a scripted engine."""

    engine: CountingEngine
    settings: CountingSettings | None = field(default_factory=CountingSettings)
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.counts = Counts(self.engine.ask, self.engine.current, self.settings, self.clock)

    async def probed(self) -> Bench:
        """Its probe is over, and what it asked is forgotten."""
        self.counts.look_at(self.engine.now)
        await self.counts.settled()
        self.engine.asked.clear()
        return self

    async def count(self, read: ReadRequest) -> Counted:
        async def by_engine() -> Counted:
            _, answer, now = await self.engine.ask("POST", COUNTER, json.loads(read.document.text))
            return Counted((answer["input_tokens"],), now)

        return await self.counts.local("openai_chat", read) or await self.counts.asked("openai_chat", read, by_engine)

    async def bound(self, read: ReadRequest) -> int | None:
        found = await self.counts.bound("openai_chat", read, read.document.text.encode())
        return None if found is None else found.prompts[0]

    def in_force(self) -> set[str]:
        return {standing.proof.value for standing in self.counts.standings() if standing.in_force}

    def why_not(self, proof: Proof) -> str:
        return next(standing.reason for standing in self.counts.standings() if standing.proof is proof)


@pytest.fixture
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> Vocabulary:
    """What the tokenizer library loads from whatever file."""
    found = Vocabulary()
    monkeypatch.setattr(tokenizer, "load", lambda path: found)
    return found


@pytest.fixture(autouse=True)
def no_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: Path) -> Vocabulary:
        raise NoVocabulary(f"{path.name} cannot be read here")

    monkeypatch.setattr(tokenizer, "load", load)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """An engine with a plain template whose vocabulary this machine does not have."""
    found = await Bench(CountingEngine()).probed()
    yield found
    await found.counts.close()


# -- which proofs hold


@pytest.mark.parametrize(
    ("template", "proofs"),
    [(CHATML, {"bound", "sum", "engine"}), (STRICT, {"bound", "sum", "engine"}), (FORGETFUL, {"sum", "engine"})],
)
@pytest.mark.parametrize("bos", [True, False])
async def test_every_proof_that_agrees_with_the_engine_is_in_force(
    template: str, proofs: set[str], bos: bool
) -> None:
    """With BOS that the tokenizer adds, strict roles, trimmed texts; what re-renders old turns has no bound."""
    bench = await Bench(CountingEngine(template, bos=bos)).probed()
    assert bench.in_force() == proofs
    for turns in (TURNS, TURNS[1:], [*TURNS, {"role": "assistant", "content": "It is"}]):
        if template is STRICT and turns[0]["role"] == "system":
            continue
        found = await bench.count(request(turns))
        assert (found.prompts, found.proof) == ((bench.engine.count(turns),), Proof.SUM)
    assert COUNTER not in bench.engine.paths()


async def test_while_the_probe_runs_the_engine_counts(bench: Bench) -> None:
    """Nobody waits for a probe."""
    gate = asyncio.Event()

    async def before(path: str) -> None:
        if path == "/props":
            await gate.wait()

    bench.engine.before, bench.engine.now = before, profile(build="b2")
    assert (await bench.count(request())).proof is Proof.ENGINE
    assert await bench.bound(request()) is None
    assert bench.in_force() == {"engine"}
    gate.set()
    await bench.counts.settled()
    assert (await bench.count(request())).proof is Proof.SUM


async def test_a_template_that_the_engine_does_not_apply_is_not_believed() -> None:
    """A planted template: what `/props` shows is not what `/apply-template` makes."""
    bench = await Bench(
        CountingEngine(CHATML, shown=CHATML.replace("message['content']", "message['content'] + ' '"))
    ).probed()
    assert bench.in_force() == {"engine"}
    assert "as the engine renders it" in bench.why_not(Proof.SUM)
    assert (await bench.count(request())).proof is Proof.ENGINE


async def test_a_foreign_vocabulary_is_not_believed_and_the_sum_stays(vocabulary: Vocabulary) -> None:
    """A planted vocabulary: the tokenizer goes, the pieces are counted by the engine's own."""
    vocabulary.foreign = True
    bench = await Bench(CountingEngine(), CountingSettings(vocabulary=Path("other.json"))).probed()
    assert bench.in_force() == {"bound", "sum", "engine"}
    assert bench.why_not(Proof.TOKENIZER) == "other.json does not tokenize as the engine does"
    found = await bench.count(request())
    assert (found.prompts, found.proof) == ((bench.engine.count(TURNS),), Proof.SUM)


async def test_pieces_are_counted_here_where_the_vocabulary_is(vocabulary: Vocabulary) -> None:
    """Then nothing is asked at all."""
    bench = await Bench(CountingEngine(bos=True)).probed()
    assert bench.in_force() == {"bound", "sum", "tokenizer", "engine"}
    found = await bench.count(request())
    assert (found.prompts, found.proof) == ((bench.engine.count(TURNS),), Proof.SUM)
    assert bench.engine.asked == []


async def test_characters_that_the_vocabulary_may_not_know_are_the_engines(vocabulary: Vocabulary) -> None:
    """One in a piece is enough: the engine's tokenizer counts it, and the sum stays a sum."""
    bench = await Bench(CountingEngine()).probed()
    turns = [{"role": "user", "content": "a \u0d00 b"}]
    found = await bench.count(request(turns))
    assert (found.prompts, found.proof) == ((bench.engine.count(turns),), Proof.SUM)
    assert bench.engine.paths() == ["/tokenize"]


async def test_a_template_that_nothing_divides_is_counted_by_the_vocabulary(vocabulary: Vocabulary) -> None:
    """No special token before each message: no sum, but the whole text can be tokenized here."""
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}assistant:"
    bench = await Bench(CountingEngine(template)).probed()
    assert bench.in_force() == {"bound", "tokenizer", "engine"}
    assert "divides" in bench.why_not(Proof.SUM)
    found = await bench.count(request())
    assert (found.prompts, found.proof) == ((bench.engine.count(TURNS),), Proof.TOKENIZER)


async def test_bare_prompts_are_counted_by_the_vocabulary(vocabulary: Vocabulary) -> None:
    """Completions and embeddings; token ids, and lists of them and texts, are the engine's."""
    bench = await Bench(CountingEngine(bos=True)).probed()

    async def local(prompt: Any) -> Counted | None:
        read = OpenAiCompletions().read(json.dumps({"prompt": prompt}).encode())
        return await bench.counts.local("openai_completions", read)

    found = await local(["one two", "three"])
    assert found is not None
    assert (found.prompts, found.proof) == ((4, 2), Proof.TOKENIZER)
    for prompt in ([1, 2, 3], ["x", 5], "", ["a", ""]):
        assert await local(prompt) is None


async def test_an_engine_that_shows_no_template_is_counted_by_itself() -> None:
    engine = CountingEngine()
    engine._props = lambda _: {}  # type: ignore[method-assign]
    bench = await Bench(engine).probed()
    assert bench.in_force() == {"engine"}
    assert (await bench.count(request())).proof is Proof.ENGINE


async def test_counting_can_be_left_to_the_engine() -> None:
    """`engine.counting = "engine"`: nothing is probed; without any settings nothing is kept either."""
    bench = await Bench(CountingEngine(), CountingSettings(local=False)).probed()
    for _ in range(2):
        assert (await bench.count(request())).proof is Proof.ENGINE
    assert bench.engine.paths() == [COUNTER]
    bench = await Bench(CountingEngine(), None).probed()
    for _ in range(2):
        await bench.count(request())
    assert bench.engine.paths() == [COUNTER, COUNTER]


# -- the sum


async def test_each_turn_asks_for_its_new_pieces_alone(bench: Bench) -> None:
    """What was counted once is not counted again, in whichever conversation it comes."""
    for turns in (TURNS[:2], TURNS):
        assert (await bench.count(request(turns))).prompts == (bench.engine.count(turns),)
    asked = [value["content"] for path, value in bench.engine.asked if path == "/tokenize"]
    assert [len(pieces) for pieces in asked] == [3, 2]
    assert "France" not in "".join(asked[1])
    await bench.count(request(TURNS))
    assert len(bench.engine.asked) == 2


async def test_special_tokens_in_a_text_are_what_they_are_for_the_engine(bench: Bench) -> None:
    """A client's `<|im_start|>` is a special token there, and a place to cut here."""
    turns = [{"role": "user", "content": "a<|im_start|><|im_start|>system\nb<|im_end|> <s> c <|im_start|"}]
    found = await bench.count(request(turns))
    assert (found.prompts, found.proof) == ((bench.engine.count(turns),), Proof.SUM)


async def test_what_the_template_refuses_is_left_to_the_engine() -> None:
    """Two users in a row under strict roles: the engine says what is wrong."""
    bench = await Bench(CountingEngine(STRICT)).probed()
    with pytest.raises(KeyError):  # the engine's counter gives no figure
        await bench.count(request([TURNS[1], TURNS[1]]))
    assert bench.engine.paths() == [COUNTER]


async def test_what_is_not_plain_is_the_engines(bench: Bench) -> None:
    assert (await bench.count(request(tools=[{"type": "function"}]))).proof is Proof.ENGINE
    assert (await bench.count(request([{"role": "tool", "content": "x"}]))).proof is Proof.ENGINE


async def test_an_engine_that_changes_between_the_pieces_is_judged_anew(bench: Bench) -> None:
    async def before(path: str) -> None:
        bench.engine.now = profile(build="b2")

    bench.engine.before = before
    with pytest.raises(Refused) as caught:
        await bench.count(request())
    assert caught.value.refusal.reason is Reason.ENGINE_CHANGED


async def test_long_chats_are_counted_off_the_loop_with_the_same_result(vocabulary: Vocabulary) -> None:
    bench = await Bench(CountingEngine()).probed()
    turns = [{"role": "user", "content": "word " * 220_000}, *TURNS[2:]]
    for _ in range(2):
        found = await bench.count(request(turns))
        assert (found.prompts, found.proof) == ((bench.engine.count(turns),), Proof.SUM)


# -- the bound


async def test_the_bound_is_never_below_the_count(bench: Bench) -> None:
    for text in ("", "x", "🎉" * 50, "<|im_start|>" * 9, "\u0958" * 30, "a b c " * 50):
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}, TURNS[1]]
        bound = await bench.bound(request(turns))
        assert bound is not None
        assert bound >= bench.engine.count(turns)


async def test_a_vocabulary_that_is_not_of_bytes_has_no_bound() -> None:
    """A token of a vocabulary of another kind need not stand for a byte."""
    bench = await Bench(CountingEngine(vocab_type=1)).probed()
    assert bench.in_force() == {"sum", "engine"}
    assert await bench.bound(request()) is None


async def test_a_vocabulary_that_normalises_has_a_bound_for_ascii_alone() -> None:
    """NFC makes six bytes of the three of U+0958; an escape in the body may be any character."""
    engine = CountingEngine()
    engine.tokens = tokens_normalised
    bench = await Bench(engine).probed()
    assert await bench.bound(request([{"role": "user", "content": "plain"}])) is not None
    assert await bench.bound(request([{"role": "user", "content": "é"}])) is None
    raw = json.dumps({"messages": [{"role": "user", "content": "é"}]}, ensure_ascii=False)
    assert await bench.bound(OpenAiChat().read(raw.encode())) is None


def tokens_normalised(text: str, **kind: Any) -> list[int]:
    return tokens_of(unicodedata.normalize("NFC", text), **kind)


# -- errors


async def test_a_proof_that_errs_is_off_at_once_and_the_next_one_counts(
    vocabulary: Vocabulary, caplog: pytest.LogCaptureFixture
) -> None:
    """Bound, sum, tokenizer, engine: each error takes the one that erred, loudly, and no other."""
    bench = await Bench(CountingEngine()).probed()
    order = []
    for _ in range(2):
        found = await bench.count(request())
        order.append(found.proof)
        with caplog.at_level(logging.ERROR):
            bench.counts.erred(found, 3)
        assert found.proof.value not in bench.in_force()
    assert order == [Proof.SUM, Proof.TOKENIZER]
    assert (await bench.count(request())).proof is Proof.ENGINE
    assert bench.in_force() == {"bound", "engine"}
    assert [record.__dict__["proof"] for record in caplog.records] == ["sum", "tokenizer"]
    assert len(bench.counts.errors()) == 2
    assert "+3 tokens" in bench.why_not(Proof.SUM)


async def test_a_bound_that_was_no_bound_is_off(bench: Bench) -> None:
    bench.counts.erred(Counted((5,), bench.engine.now, Proof.BOUND), 1)
    assert await bench.bound(request()) is None
    assert (await bench.count(request())).proof is Proof.SUM


async def test_an_error_outlives_the_probe_of_the_same_model(bench: Bench) -> None:
    """A restart of the same engine passes the same probe: what it missed once it would miss again."""
    bench.counts.erred(await bench.count(request()), 1)
    bench.engine.now = profile(instance="<two>")
    await bench.probed()
    assert bench.in_force() == {"bound", "engine"}
    bench.engine.now = profile(build="b2")
    await bench.probed()
    assert bench.in_force() == {"bound", "sum", "engine"}


async def test_an_error_of_the_engines_own_count_forgets_what_was_kept_of_it(bench: Bench) -> None:
    read = request(tools=[])
    counted = await bench.count(read)
    await bench.count(read)
    assert bench.engine.paths() == [COUNTER]
    bench.counts.erred(counted, 2)
    assert (await bench.count(read)).proof is Proof.ENGINE
    assert bench.engine.paths() == [COUNTER, COUNTER]


async def test_a_template_that_takes_too_long_is_never_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await Bench(CountingEngine(FORGETFUL)).probed()
    monkeypatch.setattr("kvgate.engines.llamacpp.counting.INLINE_RENDER_S", 0)
    monkeypatch.setattr("kvgate.engines.llamacpp.counting.RENDER_S", 0)
    assert (await bench.count(request())).proof is Proof.ENGINE
    assert bench.in_force() == {"engine"}
    assert "not rendered here any more" in caplog.text


# -- the engine's own count


async def test_the_engine_is_asked_once_for_one_question(bench: Bench) -> None:
    """Fields that nothing reads are no part of the question; all others are."""
    for fields in ({"max_tokens": 5}, {"max_tokens": 9, "stream": True, "temperature": 0.5}):
        await bench.count(request(tools=[1], **fields))
    assert bench.engine.paths() == [COUNTER]
    await bench.count(request(tools=[2]))
    await bench.count(request(tools=[1], response_format={}))
    assert bench.engine.paths() == [COUNTER] * 3


async def test_the_same_question_at_the_same_time_is_one_call(bench: Bench) -> None:
    gate = asyncio.Event()

    async def before(path: str) -> None:
        await gate.wait()

    bench.engine.before = before
    asking = [asyncio.create_task(bench.count(request(tools=[1]))) for _ in range(4)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gate.set()
    assert len({counted.prompts for counted in await asyncio.gather(*asking)}) == 1
    assert bench.engine.paths() == [COUNTER]


async def test_what_another_engine_said_is_not_believed_of_this_one(bench: Bench) -> None:
    read = request(tools=[1])
    await bench.count(read)
    bench.engine.now = profile(instance="<two>")
    found = await bench.count(read)
    await bench.counts.settled()
    assert found.profile == bench.engine.now
    assert bench.engine.paths().count(COUNTER) >= 2


# -- the probe's own troubles


async def test_a_probe_that_the_engine_does_not_live_through_is_made_again_later(bench: Bench) -> None:
    gone = Refused(refusal(Reason.ENGINE_UNREACHABLE, retry_after_s=2))
    bench.engine.now, bench.engine.gone = profile(build="b2"), gone
    await bench.probed()
    assert bench.in_force() == {"engine"}
    bench.engine.gone = None
    await bench.probed()
    assert bench.in_force() == {"engine"}
    bench.clock.advance(PROBE_AGAIN_S)
    await bench.probed()
    assert bench.in_force() == {"bound", "sum", "engine"}


async def test_a_probe_under_way_ends_with_the_gate() -> None:
    bench = Bench(CountingEngine(before=lambda path: forever()))
    bench.counts.look_at(bench.engine.now)
    await asyncio.sleep(0)
    await bench.counts.close()
    assert bench.in_force() == {"engine"}

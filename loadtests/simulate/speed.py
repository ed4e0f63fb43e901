"""How fast an engine is and what it holds: what a simulation is told of it, and its file."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.pool import KvPool

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self


class EngineFileError(Exception):
    """An engine's file is not to be read; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of one iteration: what the running sequences take, and the prompt tokens that are read beside them.

    Args:
        prefill_tokens_per_s: prompt tokens read a second, in full batches.
        step_s: (sequences, seconds) of an iteration in which so many sequences get a token each and no prompt is
            read, ascending; the entry for 0 sequences is what an iteration costs before anything is in it.
        batch_tokens: tokens in one iteration at most, prompts and outputs together (llama.cpp `-b`, 2048): the
            longest stall that one iteration's prefill is to its neighbours is this many prompt tokens.
    """

    prefill_tokens_per_s: float
    step_s: tuple[tuple[int, float], ...]
    batch_tokens: int = 2048

    def __post_init__(self) -> None:
        sequences = [at for at, _ in self.step_s]
        seconds = [s for _, s in self.step_s]
        if self.prefill_tokens_per_s <= 0 or self.batch_tokens < 1:
            raise ValueError("prefill_tokens_per_s and batch_tokens must be above 0")
        if len(sequences) < 2 or sequences[0] != 0 or any(a >= b for a, b in pairwise(sequences)):
            raise ValueError("step_s is a list of [sequences, seconds] that begins at 0 sequences and ascends")
        if seconds[0] < 0 or min(seconds[1:]) <= 0:
            raise ValueError("step_s: seconds must be above 0")

    def decode_s(self, sequences: int) -> float:
        """An iteration with so many sequences and no prompt: on the line between two entries, or on the last line."""
        at = min(max(bisect_left(self.step_s, (sequences, 0.0)), 1), len(self.step_s) - 1)
        (low, low_s), (high, high_s) = self.step_s[at - 1 : at + 1]
        return max(low_s + (high_s - low_s) * (sequences - low) / (high - low), 1e-9)

    def iteration_s(self, sequences: int, prompt_tokens: int) -> float:
        """One iteration: a token for each sequence, and so many prompt tokens read."""
        return self.decode_s(sequences) + prompt_tokens / self.prefill_tokens_per_s


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine to simulate: its KV cache, and its speed."""

    pool: KvPool
    speed: Speed

    def requests_per_s(self, prompt_tokens: float, output_tokens: float, cells: float) -> float:
        """How many requests of this mean size it serves a second with every slot busy that the pool has cells for."""
        side_by_side = max(min(self.pool.slots, int(self.pool.grantable_tokens / max(cells, 1))), 1)
        decode_s = output_tokens * self.speed.decode_s(side_by_side) / side_by_side
        return 1 / (prompt_tokens / self.speed.prefill_tokens_per_s + decode_s)

    def as_json(self) -> dict[str, Any]:
        """What its file holds."""
        pool = asdict(self.pool)
        pool["unified"] = pool.pop("prompt_shared")
        return {"pool": pool, "speed": asdict(self.speed)}

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a file that `--save` wrote, or one like it.

        Raises:
            EngineFileError: it is not there, not JSON, or not an engine.
        """
        again = "`python -m loadtests.simulate calibrate URL --save FILE` writes one"
        try:
            found = json.loads(path.read_text())
            pool, speed = dict(found["pool"]), dict(found["speed"])
            pool["prompt_shared"] = pool.pop("unified")
            speed["step_s"] = tuple((int(at), float(s)) for at, s in speed["step_s"])
            return cls(KvPool(**pool), Speed(**speed))
        except OSError as error:
            raise EngineFileError(f"{path} cannot be read ({error.strerror}); {again}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise EngineFileError(f"{path} is no engine's file: {error!r}; {again}") from None


SMALL: Final = Engine(
    KvPool(tokens=16_384, slots=8, tokens_per_slot=16_384, prompt_shared=True),
    Speed(prefill_tokens_per_s=4000, step_s=((0, 0.004), (1, 0.020), (8, 0.034))),
)
"""Shaped like one consumer GPU with a 7B model; invented, as every figure that nobody calibrated."""

LARGE: Final = Engine(
    KvPool(tokens=262_144, slots=16, tokens_per_slot=135_168, prompt_shared=True),
    Speed(prefill_tokens_per_s=12_000, step_s=((0, 0.004), (1, 0.015), (16, 0.035))),
)
"""Shaped like one data centre GPU with a long context; invented likewise."""

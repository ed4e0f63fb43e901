"""The command line of `llama-server`, for the copy of llama.cpp's server that the `xllamacpp` wheel carries."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import socket
import sys
from argparse import ArgumentTypeError, BooleanOptionalAction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvgate.die_with_parent import die_with_parent

try:
    import xllamacpp
except ImportError:
    xllamacpp = None

if TYPE_CHECKING:
    from collections.abc import Sequence

MISSING_ENGINE = "the development engine is not installed: pip install 'kvgate[engine]'"

_KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
_NO_REDUCTION = 2**32 - 1


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Serve until SIGTERM, SIGINT, or the end of the parent process; never returns.

    The process ends with 0 when asked to end, 1 when llama.cpp gave up (its log says why), 2 when the command
    cannot be run as given. While llama.cpp loads a model it holds the interpreter: a signal ends the process at
    once then too, but as a death by that signal.
    """
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = _parser().parse_args(arguments)
    if xllamacpp is None:
        _end(2, MISSING_ENGINE)
    try:
        server = xllamacpp.Server(_params(vars(options)))
    except RuntimeError as problem:
        _end(1, f"llama.cpp did not start: {problem}")
    _wait_beside(server)
    _end(0)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _end(2, f"{message} (--help lists the flags)")


def _parser() -> argparse.ArgumentParser:
    """llama-server's flags; `dest` is the field of llama.cpp's `common_params` that each sets.

    A flag that is not given leaves its field as llama.cpp has it. Exceptions, where llama-server's main sets
    another default than the struct has: `-np` -1 (four slots over one pool) and `--port` 8080.
    """
    parser = _Parser(
        prog="python -m kvgate.lab.llama_server",
        description="llama.cpp's own server, with the flags of llama-server.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-m", "--model", dest="model.path", required=True, type=_existing_file, metavar="FILE")
    add("-a", "--alias", dest="model_alias", type=lambda text: set(text.split(",")), metavar="NAMES")
    add("--host", dest="hostnames", type=lambda text: [text], default=["127.0.0.1"], metavar="ADDRESS")
    add("--port", dest="port", type=int, metavar="N", default=8080)
    add("--api-key", dest="api_keys", type=lambda text: text.split(","), metavar="KEYS")
    add("-c", "--ctx-size", dest="n_ctx", type=int, metavar="N")
    add("-np", "--parallel", dest="n_parallel", type=_slots, metavar="N", default=-1)
    add("-kvu", "--kv-unified", dest="kv_unified", action=BooleanOptionalAction)
    add("--kv-unified-per-slot", dest="kv_unified_per_slot", type=int, metavar="N")
    add("-ctk", "--cache-type-k", dest="cache_type_k", type=_kv_type, metavar="TYPE")
    add("-ctv", "--cache-type-v", dest="cache_type_v", type=_kv_type, metavar="TYPE")
    add("--cache-prompt", dest="cache_prompt", action=BooleanOptionalAction)
    add("--cache-reuse", dest="n_cache_reuse", type=int, metavar="N")
    add("-cram", "--cache-ram", dest="cache_ram_mib", type=int, metavar="N")
    add("--cache-idle-slots", dest="cache_idle_slots", action=BooleanOptionalAction)
    add("--slots", dest="endpoint_slots", action=BooleanOptionalAction)
    add("--metrics", dest="endpoint_metrics", action="store_true")
    add("--props", dest="endpoint_props", action="store_true")
    add("--embedding", "--embeddings", dest="embedding", action="store_true")
    add("--pooling", dest="pooling_type", choices=("none", "mean", "cls", "last", "rank"))
    add("--reranking", "--rerank", dest="reranking", action="store_true", help="--embedding --pooling rank")
    add("--jinja", dest="use_jinja", action=BooleanOptionalAction)
    add("--chat-template", dest="chat_template", metavar="TEMPLATE", help="a built-in's name, or Jinja text")
    add("--chat-template-file", dest="chat_template", type=_text_of, metavar="FILE")
    add("--context-shift", dest="ctx_shift", action=BooleanOptionalAction)
    add("--sleep-idle-seconds", dest="sleep_idle_seconds", type=int, metavar="N")
    add("--warmup", dest="warmup", action=BooleanOptionalAction)
    add("-n", "--predict", "--n-predict", dest="n_predict", type=int, metavar="N")
    add("-b", "--batch-size", dest="n_batch", type=int, metavar="N")
    add("-ub", "--ubatch-size", dest="n_ubatch", type=int, metavar="N")
    add("-t", "--threads", dest="cpuparams.n_threads", type=int, metavar="N")
    add("-tb", "--threads-batch", dest="cpuparams_batch.n_threads", type=int, metavar="N")
    add("--threads-http", dest="n_threads_http", type=int, metavar="N")
    add("-ngl", "--gpu-layers", "--n-gpu-layers", dest="n_gpu_layers", type=int, metavar="N")
    add("-lv", "--verbosity", "--log-verbosity", dest="verbosity", type=int, metavar="N")
    return parser


def _existing_file(text: str) -> str:
    if not Path(text).is_file():
        raise ArgumentTypeError(f"there is no model file {text}; `python -m kvgate.lab.fetch` gets a small one")
    return text


def _text_of(text: str) -> str:
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ArgumentTypeError(f"the chat template {text} cannot be read: {problem}") from None


def _slots(text: str) -> int:
    if (slots := int(text)) == 0:
        raise ArgumentTypeError("a server needs a slot; leave -np out for llama.cpp's own choice")
    return slots


def _kv_type(text: str) -> str:
    if text not in _KV_TYPES:
        raise ArgumentTypeError(f"{text} is none of {', '.join(_KV_TYPES)}")
    return text


def _params(options: dict[str, Any]) -> Any:
    params = xllamacpp.CommonParams()
    params.ui = False
    if options.pop("reranking"):
        options |= {"embedding": True, "pooling_type": "rank"}
    for path, value in options.items():
        if value is None:
            continue
        *way, field = path.split(".")
        if field in ("cache_type_k", "cache_type_v"):
            value = xllamacpp.ggml_type.__members__[f"GGML_TYPE_{value.upper()}"]  # noqa: PLW2901
        if field == "pooling_type":
            value = xllamacpp.llama_pooling_type.__members__[f"LLAMA_POOLING_TYPE_{value.upper()}"]  # noqa: PLW2901
        setattr(functools.reduce(getattr, way, params), field, value)
    if options["n_ctx"] == 0:
        params.fit_params_min_ctx = _NO_REDUCTION  # llama-server's reading of `-c 0`: all of the trained context
    return params


def _wait_beside(_server: object) -> None:
    """Hold the server, and return at SIGTERM, SIGINT or the parent's end.

    By way of a socket: the signal may come to one of llama.cpp's threads, and Python's main thread must notice.
    """
    parent = os.getppid()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    # The kernel's word also comes when only the THREAD that started this process has ended, as a pool's threads
    # do. So it gets a signal of its own, and is believed when the parent is another.
    die_with_parent(signal.SIGUSR1)
    while reader.recv(1)[0] == signal.SIGUSR1 and os.getppid() == parent:
        pass


def _end(status: int, sentence: str | None = None) -> NoReturn:
    if sentence is not None:
        print(sentence, file=sys.stderr, flush=True)
    os._exit(status)  # at once, whatever llama.cpp is doing


if __name__ == "__main__":
    main()

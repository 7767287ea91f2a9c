# SPDX-License-Identifier: Apache-2.0
"""Asks ``vllm serve`` the same with encoder graphs and without.

    python benchmarks/serve_check.py --out DIR [--architecture NAME]

Two servers start at once on one GPU, each with a sample checkpoint (released vision
configuration, random weights).  Their greedy tokens must be equal for images alone,
several together and a video, one request after another; the one with the flag must
have encoded by graph, as its ``/metrics`` say.  Random weights choose between tokens
that are as good as alike: an answer may part where neither server prefers its own token
by more than rounding explains (``TIE_NATS``), at most one in four, and is told.  Then
all are asked at once, where text is rounded by whatever happens to be batched: those
must be answered, and how many are equal is told.  DIR receives serve.json and the
servers' logs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_encoder_cg.benchmarking.programs import Program
from vllm_encoder_cg.benchmarking.scripts import (
    Attempts,
    add_time_limit,
    prepare_environment,
    write_json,
)

TOKENS = 12
TOP_LOGPROBS = 5
TIE_NATS = 0.05
"""By how much a server may prefer its own token, where the other took another one: a
few steps of logits of bfloat16, as embeddings do that differ by 1 % in rounding."""
MOST_TIES = 0.25
"""Of the answers that must be equal."""
AT_ONCE = ", at once"
"""Ends the names of requests that are batched."""
START_S = 240.0
STOP_S = 4.0
"""For each of two servers; a caller that ends this script waits 10 s for both."""
_METRIC = re.compile(r"^vllm:encoder_cudagraph_(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--architecture", default="Qwen3VLForConditionalGeneration")
    parser.add_argument("--vision", choices=("small", "released"), default="released")
    parser.add_argument("--backend", help="--mm-encoder-attn-backend")
    add_time_limit(parser)
    args = parser.parse_args()
    prepare_environment()
    args.out.mkdir(parents=True, exist_ok=True)
    attempts = Attempts(args.stop_after)
    found = attempts.run("two servers", lambda: ask_both(args))
    if found is None:
        return attempts.finish("nothing was compared")
    attempts.problems += problems(found)
    written = {
        way: {name: asdict(answer) for name, answer in found[way].items()}
        for way in ("without", "with")
    }
    written |= {"problems": attempts.problems}
    write_json(args.out / "serve.json", found | written)
    hits, items = (found["metrics"].get(name, 0) for name in ("hits", "queries"))
    compared = comparisons(found).values()
    return attempts.finish(
        f"{sum(each is None for each in compared)} of {len(compared)} answers equal, "
        f"{hits:.0f} of {items:.0f} items by graph"
        + "".join(f"; {each}" for each in compared if each is not None)
    )


def ask_both(args: argparse.Namespace) -> dict[str, Any]:
    """Answers by request, without graphs and with them, and the metrics of these."""
    from vllm_encoder_cg.samples.checkpoints import write_checkpoint

    requests = make_requests(args.architecture, small=args.vision == "small")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = write_checkpoint(args.architecture, folder, vision=args.vision)
        ports = free_ports(2)
        servers = [
            stack.enter_context(server(checkpoint, port, graphs=graphs, args=args))
            for port, graphs in zip(ports, (False, True), strict=True)
        ]
        for each in servers:
            each.wait_until_ready()
        without, given = (
            {name: ask(each.url, messages) for name, messages in requests.items()}
            for each in servers
        )
        # At once, and other pixels: vLLM keeps what it has encoded.
        more = make_requests(args.architecture, small=args.vision == "small", seed=100)
        with ThreadPoolExecutor(len(more)) as pool:
            for answers, each in zip((without, given), servers, strict=True):
                together = pool.map(lambda m, url=each.url: ask(url, m), more.values())
                names = [f"{name}{AT_ONCE}" for name in more]
                answers |= dict(zip(names, together, strict=True))
        return {
            "without": without,
            "with": given,
            "metrics": scrape(servers[1].url),
            "start_seconds": [round(each.start_s, 1) for each in servers],
        }


@dataclass(frozen=True)
class Answer:
    """Greedy tokens."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    """For each, the likeliest ones."""


@dataclass(frozen=True)
class Parting:
    """The first token that differs."""

    name: str
    token: int
    nats: float
    """By how much the two differ in what they prefer, at most; inf: by so much that a
    token is not among the likeliest of the other server."""

    def __str__(self) -> str:
        return f"{self.name}: parts at token {self.token}, by {self.nats:.3f} nats"


def part(name: str, first: Answer, second: Answer) -> Parting | None:
    """Where two answers part; None: they are equal."""
    for index, pair in enumerate(zip(first.tokens, second.tokens, strict=False)):
        if pair[0] != pair[1]:
            nats = (
                abs(
                    answer.logprobs[index].get(own, math.inf)
                    - answer.logprobs[index].get(other, -math.inf)
                )
                for answer, own, other in ((first, *pair), (second, *pair[::-1]))
            )
            # Of NaN and a number, max() may choose the number.
            return Parting(
                name, index, max(nats, key=lambda n: n if n == n else math.inf)
            )
    return None


def comparisons(found: dict[str, Any]) -> dict[str, Parting | None]:
    """By request."""
    return {
        name: part(name, answer, found["with"][name])
        for name, answer in found["without"].items()
    }


def problems(found: dict[str, Any]) -> list[str]:
    """Answers that differ, and a server that used no graph."""
    alone = {k: v for k, v in comparisons(found).items() if not k.endswith(AT_ONCE)}
    partings = [each for each in alone.values() if each is not None]
    wrong = [
        f"{each.name}: other tokens with graphs"
        for each in partings
        if not each.nats <= TIE_NATS  # nor NaN
    ]
    if not wrong and len(partings) > MOST_TIES * len(alone):
        wrong.append(f"{len(partings)} of {len(alone)} answers part, if by little")
    wrong += [
        f"{name}: {len(answer.tokens)} tokens {way} graphs instead of {TOKENS}"
        for way in ("without", "with")
        for name, answer in found[way].items()
        if len(answer.tokens) != TOKENS
    ]
    if not found["metrics"].get("hits"):
        wrong.append("no item was encoded by graph")
    return wrong


def make_requests(
    architecture: str, *, small: bool, seed: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """Chat messages by name."""
    from vllm_encoder_cg.samples.architectures import ARCHITECTURES
    from vllm_encoder_cg.samples.chat_media import ChatPrompt, chat_image, chat_video
    from vllm_encoder_cg.samples.media import make_video, random_image

    sizes = [(336, 336), (640, 480), (512, 768), (896, 448)]
    if small:
        sizes = [(width // 4, height // 4) for width, height in sizes]
    images = [
        chat_image(f"{w}x{h}", random_image(w, h, seed=seed + i))
        for i, (w, h) in enumerate(sizes)
    ]
    prompts = [
        *(ChatPrompt(image.name, (image,)) for image in images[:2]),
        ChatPrompt("four images", tuple(images)),
    ]
    if "video" in ARCHITECTURES[architecture].modalities:
        frames, _ = make_video(8, 112, 112, seed=seed + 9)
        prompts.append(ChatPrompt("a video", (chat_video("video", frames),)))
    return {prompt.name: prompt.messages for prompt in prompts}


# -- Servers --------------------------------------------------------------------------


class Server:
    """A process of ``vllm serve``."""

    def __init__(self, program: Program, port: int) -> None:
        self._program = program
        self.url = f"http://127.0.0.1:{port}"
        self.start_s = 0.0

    def wait_until_ready(self, limit_s: float = START_S) -> None:
        """Raises RuntimeError, with the end of its log, where it does not start."""
        while self._program.seconds < limit_s and not self._program.has_ended:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except OSError:  # not there yet, or not ready
                time.sleep(0.5)
            else:
                self.start_s = self._program.seconds
                return
        raise RuntimeError(f"vllm serve did not start: {self._program.log[-6000:]}")


@contextlib.contextmanager
def server(
    checkpoint: Path, port: int, *, graphs: bool, args: argparse.Namespace
) -> Iterator[Server]:
    """Starts one and, in the end, stops it."""
    options = server_options(checkpoint, port, graphs=graphs, args=args)
    log = args.out / f"serve-{'with' if graphs else 'without'}.log"
    program = Program(["-m", "vllm.entrypoints.cli.main", "serve", *options], log)
    try:
        yield Server(program, port)
    finally:
        program.stop(STOP_S)


def server_options(
    checkpoint: Path, port: int, *, graphs: bool, args: argparse.Namespace
) -> list[str]:
    """The command line of a server."""
    from vllm.platforms import current_platform

    from vllm_encoder_cg.benchmarking.engine_options import (
        as_options,
        shared_gpu_options,
    )
    from vllm_encoder_cg.samples.checkpoints import engine_kwargs

    on_gpu = bool(current_platform.is_cuda())
    options = engine_kwargs(args.architecture) | shared_gpu_options(graphs=graphs)
    options |= {
        "port": port,
        "host": "127.0.0.1",
        "dtype": "bfloat16" if on_gpu else "float32",
        "enable_prefix_caching": False,
        "seed": 0,
    }
    if args.backend:
        options["mm_encoder_attn_backend"] = args.backend
    return [str(checkpoint), *as_options(options)]


def free_ports(count: int) -> list[int]:
    """Of this machine; all at once, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


# -- Requests -------------------------------------------------------------------------


def ask(url: str, messages: Sequence[dict[str, Any]]) -> Answer:
    """A chat completion, greedy."""
    body = {
        "messages": messages,
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": TOP_LOGPROBS,
        "return_tokens_as_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            (choice,) = json.load(answer)["choices"]
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        raise RuntimeError(f"{error}: {text[:500]}") from None
    logprobs = [
        {
            int(top["token"].removeprefix("token_id:")): float(top["logprob"])
            for top in each["top_logprobs"]
        }
        for each in choice["logprobs"]["content"]
    ]
    return Answer(list(choice["token_ids"]), logprobs)


def scrape(url: str, wait_s: float = 5.0) -> dict[str, float]:
    """This package's counts at ``/metrics``, which are a second behind; summed over
    labels."""
    time.sleep(wait_s)
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return parse_metrics(answer.read().decode())


def parse_metrics(text: str) -> dict[str, float]:
    """``queries``, ``hits`` and so on, summed over labels."""
    counts: dict[str, float] = {}
    for name, _, value in _METRIC.findall(text):
        name = name.removesuffix("_total")
        counts[name] = counts.get(name, 0.0) + float(value)
    return counts


if __name__ == "__main__":
    sys.exit(main())

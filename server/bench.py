"""`rekindle bench`: what each tier costs on this machine, against a running server, beside recomputing in the same run.

One conversation is asked the same next question again and again, from the same prompt: with its pages on the device, after
a spill to the host, after a spill to storage, and after a drop (which is what a server without offload does to everybody
who comes back). Times are the server's own, from submit to first token.
"""

import asyncio
import json
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
import typer

from .client.connection import Client, connect
from .client.session import Session

WORDS = ("river", "stone", "cloud", "amber", "forest", "candle", "winter", "garden", "silver", "meadow", "harbor", "lantern", "copper", "velvet")
TIERS = ("device", "host", "storage", "recomputed")
ADMIN_KEY_FILE = "admin.key"


@dataclass
class Row:
    """One way back. Milliseconds; tokens of the prompt found, by tier, as of the last round."""

    tier: str
    ttft_ms: list[float] = field(default_factory=list)
    restore_ms: list[float] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=dict)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ttft_ms)


@dataclass
class Result:
    prompt_tokens: int
    rows: list[Row]
    tokens_per_s: float
    """Decoding, one conversation alone."""


async def measure(rk: Client, *, words: int, rounds: int, seed: int = 1) -> Result:
    """Runs the whole comparison. `words`: length of the conversation's first message."""
    dice = random.Random(seed)
    chat = await rk.session(title="bench")
    try:
        await chat.ask(" ".join(dice.choices(WORDS, k=words)), max_output_tokens=4)
        base = chat.last["id"]
        rows = {tier: Row(tier) for tier in TIERS}
        for _ in range(rounds):
            for tier in TIERS:
                await _send_to(chat, tier, base)
                await chat.ask("Say one word.", previous_response_id=base, max_output_tokens=2, temperature=0)
                rows[tier].ttft_ms.append(chat.usage["ttft_ms"])
                rows[tier].restore_ms.append(chat.usage["restore_ms"])
                rows[tier].found = chat.usage["cached_tokens_details"]
        prompt = chat.usage["input_tokens"]
        return Result(prompt, list(rows.values()), await _decode_speed(chat, base))
    finally:
        await chat.delete()


async def _send_to(chat: Session, tier: str, base: str) -> None:
    """Bring the whole conversation to where it is to be found, from a state in which all of it exists."""
    await chat.ask("Say one word.", previous_response_id=base, max_output_tokens=2, temperature=0)
    if tier in ("host", "storage"):
        receipt = await chat.spill(tier)
    elif tier == "recomputed":
        receipt = await chat.move("drop")
    else:
        return
    if receipt["outcome"] != "done":
        raise RuntimeError(f"the {receipt['verb']} was {receipt['outcome']}: {receipt['reason']}")


async def _decode_speed(chat: Session, base: str) -> float:
    loop = asyncio.get_running_loop()
    first = last = 0.0
    async for _ in chat.say("Tell me a long story about a lighthouse.", previous_response_id=base, max_output_tokens=64):
        last = loop.time()
        first = first or last
    tokens = chat.usage["output_tokens"]
    return (tokens - 1) / (last - first) if tokens > 1 and last > first else 0.0


def resident_mb(data: Path) -> dict[str, int]:
    """RSS by part, from the server's own pid files; empty where the server runs on another machine."""
    out = {}
    for record in sorted((data / "run").glob("*.pid")):
        try:
            root = psutil.Process(json.loads(record.read_text())["pid"])
            out[record.stem] = sum(p.memory_info().rss for p in [root, *root.children(recursive=True)]) >> 20
            out["server"] = root.parent().memory_info().rss >> 20
        except (psutil.Error, ValueError, AttributeError):     # it ended while we looked
            continue
    return out


def table(result: Result, memory: dict[str, int]) -> str:
    plain = next(row for row in result.rows if row.tier == "recomputed").median_ms
    lines = [f"{result.prompt_tokens} tokens of prompt; medians of {len(result.rows[0].ttft_ms)} rounds",
             f"{'':12} {'first token':>12} {'of which restore':>17} {'vs recomputing':>15}   found (device / host / storage)"]
    for row in result.rows:
        found = " / ".join(str(row.found.get(tier, 0)) for tier in TIERS[:3])
        lines.append(f"{row.tier:12} {row.median_ms:9.0f} ms {statistics.median(row.restore_ms):14.0f} ms "
                     f"{plain / row.median_ms:13.1f} x   {found}")
    lines.append(f"decoding {result.tokens_per_s:.1f} tokens/s")
    if memory:
        lines.append("RSS " + ", ".join(f"{name} {mb} MB" for name, mb in memory.items()))
    return "\n".join(lines)


def bench(words: Annotated[int, typer.Option(help="Words of the conversation's first message; about as many tokens.")] = 1000,
          rounds: Annotated[int, typer.Option(min=1)] = 3,
          url: Annotated[str, typer.Option(envvar="REKINDLE_URL")] = "http://127.0.0.1:8080",
          key: Annotated[str | None, typer.Option(envvar="REKINDLE_API_KEY")] = None,
          data: Annotated[Path, typer.Option(envvar="REKINDLE_DATA")] = Path("data")) -> None:
    """Measure a running server: first token by tier, beside recomputing in the same run."""
    file = data / ADMIN_KEY_FILE
    key = key or (file.read_text().strip() if file.exists() else None)
    typer.echo(table(asyncio.run(_run(url, key, words, rounds)), resident_mb(data)))


async def _run(url: str, key: str | None, words: int, rounds: int) -> Result:
    async with connect(url, key) as rk:
        return await measure(rk, words=words, rounds=rounds)


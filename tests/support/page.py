"""Drives the chat page as a person would: by what it shows. Every wait is for something seen, never for a time."""

import re
from dataclasses import dataclass

from playwright.async_api import Locator, Page, expect

from tests.support.browser import PATIENCE_MS, shots_folder

expect.set_options(timeout=PATIENCE_MS)

WATCH_BANNER = """() => {
  window.bannersSeen = [];
  const banner = document.querySelector("#banner");
  const note = () => { if (!banner.hidden) window.bannersSeen.push(document.querySelector("#banner-text").textContent); };
  new MutationObserver(note).observe(banner, { attributes: true, childList: true, characterData: true, subtree: true });
}"""

DROP = """({name, base64, target}) => {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const carried = new DataTransfer();
  carried.items.add(new File([bytes], name, { type: "image/png" }));
  for (const type of ["dragenter", "dragover", "drop"]) {
    document.querySelector(target).dispatchEvent(new DragEvent(type, { dataTransfer: carried, bubbles: true, cancelable: true }));
  }
}"""


@dataclass(frozen=True)
class ReceiptSeen:
    verb: str
    outcome: str
    to: str
    words: str


class ChatPage:
    """One tab with the page. `problems`: errors of its scripts and refused loads by the content policy."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.problems: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda said: self.problems.append(said.text) if "Content Security Policy" in said.text else None)

    # ---- coming in
    async def open(self, address: str) -> None:
        """`address` with its #ticket."""
        await self.page.goto(address)
        await self.connected()

    async def connected(self) -> None:
        await expect(self.page.locator("#link")).to_have_attribute("data-state", "open")
        await expect(self.page.locator("#engine")).to_have_attribute("data-state", "ready", timeout=300_000)

    # ---- sending
    async def drop(self, name: str, base64: str) -> None:
        await self.page.evaluate(DROP, {"name": name, "base64": base64, "target": "#conversation"})

    async def sample(self, number: int) -> None:
        """One of the offered pictures, from 1; waits until the server has accepted it."""
        before = await self.page.locator(".attachment").count()
        await self.page.locator("#composer .sample").nth(number - 1).click()
        await self.accepted(before + 1)

    async def accepted(self, pictures: int) -> None:
        await expect(self.page.locator(".attachment .thumb-note", has_text="tokens")).to_have_count(pictures)

    async def say(self, text: str) -> None:
        """Send; returns as soon as the turn is there."""
        before = await self.page.locator(".turn").count()
        await self.page.fill("#text", text)
        await self.page.press("#text", "Enter")
        await expect(self.page.locator(".turn")).to_have_count(before + 1)

    async def ask(self, text: str, timeout_s: float = 120) -> str:
        """Send and wait for the whole answer."""
        await self.say(text)
        return await self.answer(timeout_s=timeout_s)

    async def answer(self, index: int = -1, timeout_s: float = 120) -> str:
        turn = self.turn(index)
        await expect(turn).not_to_have_attribute("data-status", "in_progress", timeout=timeout_s * 1000)
        return (await turn.locator(".answer-text").text_content() or "").strip()

    def turn(self, index: int = -1) -> Locator:
        return self.page.locator(".turn").last if index == -1 else self.page.locator(".turn").nth(index)

    async def status(self, index: int = -1) -> str:
        return await self.turn(index).get_attribute("data-status") or ""

    async def conversation(self) -> list[tuple[str, str]]:
        """(what was said, what was answered) of every shown turn."""
        return [(await t.locator(".said").inner_text(), await t.locator(".answer-text").text_content() or "")
                for t in await self.page.locator(".turn").all()]

    # ---- memory
    async def state(self, expected: str) -> None:
        """Wait until the session's state is that one."""
        await expect(self.page.locator(".memory .state-pill")).to_have_attribute("data-state", expected)

    async def press_verb(self, button: str) -> ReceiptSeen:
        """`spill-host`, `spill-storage` or `restore`; the receipt that appears."""
        receipts = self.page.locator("#receipts .receipt")
        before = await receipts.count()
        await expect(self.page.locator(f"#{button}")).to_be_enabled()
        await self.page.click(f"#{button}")
        await expect(receipts).to_have_count(before + 1)
        return await self.receipt(0)

    async def receipt(self, index: int) -> ReceiptSeen:
        """From 0, the newest."""
        node = self.page.locator("#receipts .receipt").nth(index)
        get = node.get_attribute
        return ReceiptSeen(await get("data-verb") or "", await get("data-outcome") or "", await get("data-to") or "",
                           await node.inner_text())

    async def tier_tokens(self, tier: str) -> int:
        """Tokens that the panel says the tier holds."""
        words = await self.page.locator(f'.tier[data-tier="{tier}"] .tier-figures').inner_text()
        found = re.match(r"([\d,]+) token", words)
        return int(found[1].replace(",", "")) if found else 0

    async def sources(self) -> dict[str, int]:
        """Where the last turn's prompt came from: tier (or "computed") to tokens."""
        out = {}
        for row in await self.page.locator("#usage-legend li").all():
            out[await row.get_attribute("data-tier") or ""] = int((await row.locator("b").inner_text()).replace(",", ""))
        return out

    # ---- looking
    async def watch_banner(self) -> None:
        """From now on every banner is noted, however short it is shown."""
        await self.page.evaluate(WATCH_BANNER)

    async def banners(self) -> str:
        """What the banners said since `watch_banner`."""
        return "\n".join(await self.page.evaluate("window.bannersSeen"))

    async def overflow_px(self) -> int:
        """How far the page is wider than its window."""
        return await self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    async def shot(self, name: str) -> None:
        """A screenshot where REKINDLE_SHOTS points."""
        if (folder := shots_folder()) is not None:
            await self.page.screenshot(path=folder / f"{name}.png")

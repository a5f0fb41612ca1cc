"""The page's own modules, run in the browser without a server: the exactly-once merge, the client, the tree of turns."""

import functools
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Page

pytestmark = pytest.mark.asyncio(loop_scope="module")

WEB = Path(__file__).parents[2] / "server" / "web"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test's output stays readable."""


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(WEB)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: "BrowserContext", files: str) -> AsyncIterator["Page"]:
    page = await browser.new_page()
    await page.goto(f"{files}/icon.svg")
    yield page
    await page.close()


async def test_position_applies_each_event_once_and_in_order(page) -> None:
    """Repeats are dropped, a hole asks for a resume, and deltas laid together move the position by all they hold."""
    verdicts = await page.evaluate("""async () => {
      const { Position } = await import("/stream.js");
      const p = new Position(1, 4);
      const take = (seq, from_seq) => p.take({ type: "response.output_text.delta", seq, from_seq });
      return [take(4), take(5), take(5), take(7), take(8, 6), take(10, 8), take(9), p.seq];
    }""")
    assert verdicts == ["duplicate", "apply", "duplicate", "gap", "apply", "gap", "apply", 9]


async def test_position_waits_for_the_answer_to_its_resume(page) -> None:
    """Between asking and being answered nothing is applied; a lossless answer of another epoch is not believed;
    after a snapshot come the events since it was taken."""
    out = await page.evaluate("""async () => {
      const { Position } = await import("/stream.js");
      const p = new Position(3, 10);
      const asked = p.ask();
      const early = p.take({ type: "session.state", seq: 11 });
      const believed = p.resumed({ outcome: "lossless", epoch: 4, from_seq: 11, seq: 20 });
      const again = p.ask();
      const snapshot = p.resumed({ outcome: "snapshot", epoch: 4, from_seq: 19, seq: 20 });
      return { asked, early, believed, again, snapshot, next: p.take({ type: "session.state", seq: 19 }) };
    }""")
    assert out == {"asked": {"epoch": 3, "last_seq": 10}, "early": "duplicate", "believed": False, "again": {},
                   "snapshot": True, "next": "apply"}


CLIENT = """async () => {
  const { Client, Refused } = await import("/client.js");
  const sockets = [], events = [], states = [];
  class Socket {
    constructor() { this.readyState = 1; this.sent = []; sockets.push(this); queueMicrotask(() => this.onopen?.()); }
    send(text) { this.sent.push(JSON.parse(text)); }
    close() { this.readyState = 3; }
    say(event) { this.onmessage?.({ data: JSON.stringify(event) }); }
    greet() {
      this.say({ type: "connection.authenticated", tenant: "t", role: "user" });
      this.say({ type: "connection.ready", limits: {}, heartbeat_s: 20 });
    }
    drop(code = 1006) { this.onclose?.({ code }); }
  }
  const until = async (test) => { while (!test()) await new Promise((r) => setTimeout(r, 5)); };
  const client = new Client({ url: "ws://nowhere", ticket: async () => "t", open: () => new Socket(),
    onEvent: (e) => events.push(e), onConnection: (c) => states.push(c.state) });
  const running = client.run();
  await until(() => sockets[0]?.sent.length === 1);
  %s
}"""


async def test_client_resumes_and_repeats_only_what_is_safe(page) -> None:
    """A cut in mid-answer: the turn is sent again under its key, its events are applied once, and a request without a key fails."""
    out = await page.evaluate(CLIENT % """
      const first = sockets[0];
      first.greet();
      client.attach("s1");
      first.say({ type: "session.resumed", session_id: "s1", epoch: 1, outcome: "snapshot", from_seq: 1, seq: 0 });
      const turn = client.request({ type: "response.create", session_id: "s1", idempotency_key: "k" }, { again: true });
      const other = client.request({ type: "session.update", session_id: "s1" }).catch((e) => e instanceof Refused && e.error.code);
      first.say({ type: "response.created", session_id: "s1", seq: 1, response: { id: "r1" } });
      first.say({ type: "response.output_text.delta", session_id: "s1", seq: 2, delta: "a" });
      first.drop();
      await until(() => sockets[1]?.sent.length === 1);
      const second = sockets[1];
      second.greet();
      second.say({ type: "session.resumed", session_id: "s1", epoch: 1, outcome: "lossless", from_seq: 3, seq: 4 });
      second.say({ type: "response.output_text.delta", session_id: "s1", seq: 3, delta: "b" });
      const create = second.sent.find((f) => f.type === "response.create");
      second.say({ type: "response.created", session_id: "s1", event_id: create.event_id, response: { id: "r1" } });
      second.say({ type: "response.output_text.delta", session_id: "s1", seq: 2, delta: "a" });
      second.say({ type: "response.completed", session_id: "s1", seq: 4, response: { id: "r1" } });
      const answered = await turn;
      return { answered: answered.response.id, other: await other, key: create.idempotency_key,
        resume: second.sent.find((f) => f.type === "session.resume"),
        applied: events.filter((e) => e.seq !== undefined && e.type !== "session.resumed").map((e) => e.seq), states };
    """)
    assert out["applied"] == [1, 2, 3, 4]
    assert (out["answered"], out["other"], out["key"]) == ("r1", "connection_lost", "k")
    assert out["resume"] == {"type": "session.resume", "session_id": "s1", "epoch": 1, "last_seq": 2}
    assert out["states"] == ["connecting", "open", "waiting", "connecting", "open"]


async def test_client_asks_again_where_an_event_is_missing(page) -> None:
    """A hole in the numbers: nothing after it is applied until the resume has filled it."""
    applied = await page.evaluate(CLIENT % """
      const s = sockets[0];
      s.greet();
      client.attach("s1");
      s.say({ type: "session.resumed", session_id: "s1", epoch: 1, outcome: "snapshot", from_seq: 6, seq: 5 });
      s.say({ type: "session.state", session_id: "s1", seq: 8 });
      s.say({ type: "session.state", session_id: "s1", seq: 9 });
      const ask = s.sent.at(-1);
      s.say({ type: "session.resumed", session_id: "s1", epoch: 1, outcome: "lossless", from_seq: 6, seq: 9 });
      for (const seq of [6, 7, 8, 9]) s.say({ type: "session.state", session_id: "s1", seq });
      return [ask.last_seq, ...events.filter((e) => e.type === "session.state").map((e) => e.seq)];
    """)
    assert applied == [5, 6, 7, 8, 9]


async def test_client_stays_out_when_the_credentials_are_refused(page) -> None:
    """A close code of 4500 and above ends the client: no further socket is opened, and waiting requests fail."""
    out = await page.evaluate(CLIENT % """
      const waiting = client.request({ type: "session.create" }, { again: true }).catch((e) => e.error.code);
      sockets[0].drop(4500);
      await running;
      return [sockets.length, states.at(-1), await waiting];
    """)
    assert out == [1, "signed_out", "connection_lost"]


async def test_thread_shows_one_branch_of_the_tree(page) -> None:
    """Regenerating shows the new answer beside the old one; a failed turn gives way to the next; a reply names its place."""
    out = await page.evaluate("""async () => {
      const { Thread } = await import("/thread.js");
      const t = new Thread({ id: "s", last_response_id: null });
      t.load({ session: { id: "s", last_response_id: "b" }, items: [
        { response_id: "a", previous_response_id: null, status: "completed", input: [], output_text: "A" },
        { response_id: "b", previous_response_id: "a", status: "completed", input: [], output_text: "B" }] });
      const ids = () => t.path().map((turn) => turn.id).join("");
      const done = (id, parent, status = "completed") => {
        t.apply({ type: "response.created", response: { id, previous_response_id: parent }, input: [] });
        t.apply({ type: status === "failed" ? "response.failed" : "response.completed", response: { id, status, previous_response_id: parent,
          output: [{ content: [{ type: "output_text", text: id }] }] } });
      };
      const seen = [ids(), t.replyTo(), t.insteadOf("a"), t.insteadOf("b")];
      done("c", "a"); seen.push(ids(), t.siblings("c").length);
      t.show("b"); seen.push(ids(), t.replyTo());
      done("d", "b", "failed"); seen.push(ids(), t.replyTo());
      done("e", "b"); seen.push(ids(), t.siblings("e").length, t.replyTo());
      return seen;
    }""")
    assert out == ["ab", None, "root", "a", "ac", 2, "ab", "b", "abd", "b", "abe", 1, None]

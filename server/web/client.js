// A client of the rekindle.v1 protocol: one socket, requests by event_id, reconnect and resume without loss or repeat.
// No dependency; the way to open a socket, to wait and to get a ticket are parameters.

import { APPLY, GAP, Position } from "./stream.js";

const FIRST_DELAY_MS = 250;
const LONGEST_DELAY_MS = 5000;
const READY_WITHIN_MS = 15000;

/** A refusal by the server (or a lost connection); `error` is the protocol's ErrorObject. */
export class Refused extends Error {
  constructor(error) {
    super(error.message);
    this.error = error;
  }
}

/** Thrown by a ticket source whose credentials are no longer good: the client stops and says "signed_out". */
export class SignedOut extends Error {}

const lost = () => new Refused({
  type: "server", code: "connection_lost", retryable: true,
  message: "The connection was lost before the server answered.",
});

export class Client {
  #socket = null;
  #ready = null;
  #authenticated = null;
  #positions = new Map();
  #pending = new Map();
  #counter = 0;
  #attempt = 0;
  #stopped = false;
  #wake = () => {};

  /**
   * ticket(): promise of a one-time ticket; throws SignedOut when there is no way to get one.
   * onEvent(event): every event that counts, exactly once. onConnection({state, ...}): connecting, open, waiting, signed_out.
   */
  constructor({ url, ticket, onEvent, onConnection, open = (u, p) => new WebSocket(u, p) }) {
    Object.assign(this, { url, ticket, onEvent, onConnection, open });
  }

  /** Connect, and stay connected until `stop` or until the credentials are refused. */
  async run() {
    this.#stopped = false;
    while (!this.#stopped) {
      let code = null;
      try {
        this.onConnection({ state: "connecting", attempt: this.#attempt });
        code = await this.#connection(await this.ticket());
        if (code >= 4500 && code < 5000) throw new SignedOut("The server did not accept the sign-in.");
      } catch (problem) {
        if (problem instanceof SignedOut) {
          this.#rejectAll();
          this.onConnection({ state: "signed_out", reason: problem.message });
          return;
        }
        console.info("no connection:", problem.message);
      }
      if (this.#stopped) return;
      const delay = Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** this.#attempt) * (0.75 + Math.random() / 2);
      this.#attempt += 1;
      this.onConnection({ state: "waiting", attempt: this.#attempt, delay_ms: delay, code });
      await this.#pause(delay);
    }
  }

  stop() {
    this.#stopped = true;
    this.#wake();
    this.#socket?.close(1000);
    this.#rejectAll();
  }

  /** Do not wait for the next try. */
  hurry() {
    this.#wake();
  }

  get connected() {
    return this.#ready !== null && this.#authenticated !== null;
  }

  /** Watch a session: its events come through onEvent, first of all session.resumed. Kept over reconnects. */
  attach(sessionId) {
    if (this.#positions.has(sessionId)) return;
    this.#positions.set(sessionId, new Position());
    if (this.connected) this.#resume(sessionId);
  }

  /** Stop following a session. */
  forget(sessionId) {
    this.#positions.delete(sessionId);
  }

  /**
   * Send a frame; the promise is its answer, or a Refused. A frame that was not sent yet waits for the connection.
   * `again`: it may be sent twice (it carries an idempotency key), so a lost connection does not fail it.
   */
  request(frame, { again = false } = {}) {
    const event_id = `c${++this.#counter}`;
    return new Promise((resolve, reject) => {
      const entry = { frame: { ...frame, event_id }, again, sent: false, resolve, reject };
      this.#pending.set(event_id, entry);
      if (this.connected) this.#dispatch(entry);
    });
  }

  /** Send a frame that needs no answer; dropped when there is no connection. */
  tell(frame) {
    if (this.connected) this.#send(frame);
  }

  // ---- one connection ------------------------------------------------------------------------------------------
  /** Live through one socket. Resolves with its close code. */
  #connection(ticket) {
    return new Promise((resolve) => {
      const socket = this.open(this.url, ["rekindle.v1"]);
      this.#socket = socket;
      let heard = Date.now();
      let limit = READY_WITHIN_MS;
      const end = (code) => {
        clearInterval(watch);
        socket.onopen = socket.onmessage = socket.onclose = socket.onerror = null;
        socket.close();
        this.#closed();
        resolve(code);
      };
      // A socket whose other end vanished says nothing: what is silent for too long counts as closed.
      const watch = setInterval(() => {
        if (Date.now() - heard > limit) end(4000);
        else if (this.connected && Date.now() - heard > this.#ready.heartbeat_s * 1000) this.#send({ type: "ping" });
      }, 1000);
      socket.onopen = () => this.#send({ type: "authenticate", ticket });
      socket.onclose = (event) => end(event.code);
      socket.onmessage = (message) => {
        heard = Date.now();
        this.#receive(JSON.parse(message.data));
        if (this.connected) limit = this.#ready.heartbeat_s * 2500;
      };
    });
  }

  #receive(event) {
    if (event.type === "connection.ready") this.#ready = { heartbeat_s: 20, ...event };
    if (event.type === "connection.authenticated") this.#authenticated = event;
    const opening = event.type === "connection.ready" || event.type === "connection.authenticated";
    if (opening && this.connected) this.#opened();
    if (event.type === "session.created" && !this.#positions.has(event.session_id)) {
      this.#positions.set(event.session_id, new Position());
    }
    if (event.type === "session.resumed") {
      if (this.#positions.get(event.session_id)?.resumed(event)) this.onEvent(event);
      else this.#resume(event.session_id);
    } else if (event.seq === undefined || event.seq === null) {
      if (event.type === "error") this.#refused(event);
      // A response without a number only answers a frame that was sent twice: its events come or came by number.
      if (event.type !== "pong" && !event.type.startsWith("response.")) this.onEvent(event);
    } else {
      const position = this.#positions.get(event.session_id);
      const verdict = position?.take(event);
      if (verdict === APPLY) this.onEvent(event);
      if (verdict === GAP) this.#resume(event.session_id);
    }
    this.#answer(event);
  }

  #opened() {
    this.#attempt = 0;
    for (const id of this.#positions.keys()) this.#resume(id);
    for (const entry of this.#pending.values()) this.#dispatch(entry);
    this.onConnection({ state: "open", ready: this.#ready, authenticated: this.#authenticated });
  }

  #closed() {
    this.#socket = this.#ready = this.#authenticated = null;
    for (const [id, entry] of this.#pending) {
      if (entry.sent && !entry.again) {
        this.#pending.delete(id);
        entry.reject(lost());
      }
      entry.sent = false;
    }
  }

  #resume(sessionId) {
    const position = this.#positions.get(sessionId);
    if (position) this.#send({ type: "session.resume", session_id: sessionId, ...position.ask() });
  }

  #dispatch(entry) {
    entry.sent = true;
    this.#send(entry.frame);
  }

  #send(frame) {
    if (this.#socket?.readyState === 1) this.#socket.send(JSON.stringify(frame));
  }

  #answer(event) {
    const entry = event.event_id && this.#pending.get(event.event_id);
    if (!entry) return;
    this.#pending.delete(event.event_id);
    if (event.type === "error") entry.reject(new Refused(event.error));
    else entry.resolve(event);
  }

  #refused(event) {
    const gone = ["session_not_found", "not_found"].includes(event.error?.code);
    if (gone && event.session_id && this.#positions.get(event.session_id)?.resuming) this.forget(event.session_id);
  }

  #rejectAll() {
    for (const entry of this.#pending.values()) entry.reject(lost());
    this.#pending.clear();
  }

  #pause(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}

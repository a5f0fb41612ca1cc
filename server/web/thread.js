// Pure. One session as the page sees it: its tree of turns, the branch that is shown, its pages and its receipts.

const RECEIPTS_KEPT = 40;

/** Whether the server keeps the turn: a failed one is forgotten, and one that was stopped before its first word. */
export const committed = (turn) =>
  turn.status === "completed" || turn.status === "incomplete" || (turn.status === "cancelled" && turn.text !== "");

const textOf = (response) => (response.output ?? []).flatMap((m) => m.content ?? []).map((p) => p.text ?? "").join("");

export class Thread {
  constructor(session) {
    this.id = session.id;
    this.session = session;
    this.turns = new Map();
    this.leaf = null;
    this.receipts = [];
    this.loaded = false;
    this.changes = 0;
  }

  /** Take the session's figures as asked for; its turns come by events alone. */
  refresh({ kv, used, limits, title, status }) {
    this.session = { ...this.session, kv, used, limits, title, status };
  }

  /** Replace everything by a snapshot (session.resumed). */
  load({ session, items, in_progress: running }) {
    const shown = this.leaf;
    this.session = session;
    this.turns = new Map();
    for (const item of items ?? []) {
      this.turns.set(item.response_id, {
        id: item.response_id, parent: item.previous_response_id ?? null, status: item.status, input: item.input,
        text: item.output_text, usage: item.usage ?? null, receipt: null, error: null, stage: null,
      });
    }
    this.leaf = this.turns.has(shown) && this.#isTip(shown) ? shown : session.last_response_id ?? null;
    if (running?.response) {
      this.#start(running.response, running.input ?? []);
      this.turns.get(running.response.id).text = running.output_text ?? "";
    }
    this.loaded = true;
  }

  /** Apply one numbered event. Returns what changed: "session", "kv", "turn:<id>", "turns", "receipt". */
  apply(event) {
    this.changes += 1;
    switch (event.type) {
      case "session.created":
        this.loaded = true; // a new session has no history to fetch
        this.session = event.session;
        return "session";
      case "session.updated":
        this.session = event.session;
        return "session";
      case "session.closed":
        this.session = { ...this.session, status: "closed" };
        return "session";
      case "session.state":
        this.session = { ...this.session, kv: event.kv ?? { ...this.session.kv, state: event.state } };
        return "kv";
      case "session.spilled":
      case "session.restored":
        this.addReceipt(event.receipt);
        return "receipt";
      case "response.created":
        this.#start(event.response, event.input ?? []);
        this.session = { ...this.session, busy: true };
        return "turns";
      case "response.progress":
        return this.#change(event.response_id, (turn) => { turn.stage = event.stage; });
      case "response.output_text.delta":
        return this.#change(event.response_id, (turn) => { turn.text += event.delta; turn.stage = null; });
      case "response.completed":
      case "response.incomplete":
      case "response.failed":
        return this.#finish(event);
      default:
        return "session";
    }
  }

  /** Log a receipt once, newest first. */
  addReceipt(receipt) {
    if (!receipt || this.receipts.some((known) => known.id === receipt.id)) return;
    this.receipts = [receipt, ...this.receipts].slice(0, RECEIPTS_KEPT);
  }

  /** The turns of the shown branch, first to last. */
  path() {
    const out = [];
    for (let turn = this.turns.get(this.leaf); turn; turn = this.turns.get(turn.parent)) out.unshift(turn);
    return out;
  }

  /** The turns that share a turn's parent, itself among them, in order of creation. */
  siblings(id) {
    return this.#children(this.turns.get(id)?.parent ?? null);
  }

  /** Show the branch of that turn, down to its latest tip. */
  show(id) {
    let tip = id;
    for (;;) {
      const children = this.#children(tip);
      if (!children.length) break;
      tip = children.at(-1).id;
    }
    this.leaf = tip;
  }

  /** previous_response_id for a message under what is shown: null means "after the last". */
  replyTo() {
    const last = this.path().filter(committed).at(-1)?.id ?? null;
    if (last === (this.session.last_response_id ?? null)) return null;
    return last ?? "root";
  }

  /** previous_response_id for putting another turn in that one's place. */
  insteadOf(id) {
    return this.turns.get(id).parent ?? "root";
  }

  get running() {
    return [...this.turns.values()].find((turn) => turn.status === "in_progress") ?? null;
  }

  get lastUsage() {
    return this.path().filter((turn) => turn.usage).at(-1)?.usage ?? null;
  }

  #isTip(id) {
    return this.#children(id).length === 0;
  }

  #start(response, input) {
    const parent = response.previous_response_id ?? null;
    for (const turn of this.#children(parent)) if (!committed(turn)) this.turns.delete(turn.id);
    this.turns.set(response.id, {
      id: response.id, parent, status: "in_progress", input, text: "", usage: null, receipt: null, error: null, stage: "queued",
    });
    this.leaf = response.id;
  }

  #children(parent) {
    return [...this.turns.values()].filter((turn) => turn.parent === parent);
  }

  #change(id, change) {
    const turn = this.turns.get(id);
    if (!turn) return "turns";
    change(turn);
    return `turn:${id}`;
  }

  #finish({ response, error }) {
    if (!this.turns.has(response.id)) this.#start(response, []);
    const turn = this.turns.get(response.id);
    const text = textOf(response);
    Object.assign(turn, {
      status: response.incomplete_reason === "cancelled" ? "cancelled" : response.status,
      text: text || turn.text, usage: response.usage ?? null, error: error ?? null, stage: null,
      receipt: response.receipt ?? null, reason: response.incomplete_reason ?? null,
    });
    this.session = { ...this.session, busy: false };
    if (response.receipt) this.addReceipt(response.receipt);
    if (committed(turn)) this.session = { ...this.session, last_response_id: turn.id };
    return "turns";
  }
}

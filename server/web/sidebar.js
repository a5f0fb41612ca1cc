// The list of sessions: title, state and size of each; new, rename, delete.

import { $, el, icon, setText } from "./dom.js";
import { STATE_WORDS, bytes, plural } from "./format.js";

const sum = (kv) => (kv ? Math.max(kv.bytes?.device ?? 0, kv.bytes?.host ?? 0, kv.bytes?.storage ?? 0) : 0);

export class Sidebar {
  #rows = new Map();

  /** actions: open(id), remove(id, title). */
  constructor(actions) {
    this.actions = actions;
    this.list = $("sessions");
  }

  paint(sessions, current) {
    const nodes = sessions.map((session) => this.#row(session, session.id === current));
    for (const id of [...this.#rows.keys()]) if (!sessions.some((session) => session.id === id)) this.#rows.delete(id);
    const same = nodes.length === this.list.children.length && nodes.every((node, i) => this.list.children[i] === node);
    if (!same) this.list.replaceChildren(...nodes);
    $("no-sessions").hidden = sessions.length > 0;
  }

  #row(session, current) {
    if (!this.#rows.has(session.id)) this.#rows.set(session.id, this.#build(session.id));
    const row = this.#rows.get(session.id);
    const title = session.title || "New conversation";
    const state = session.kv?.state ?? "empty";
    setText(row.title, title);
    setText(row.detail, `${STATE_WORDS[state] ?? state} · ${plural(session.used?.turns ?? 0, "turn")} · ${bytes(sum(session.kv))}`);
    row.dot.dataset.state = session.busy ? "busy" : state;
    row.node.classList.toggle("current", current);
    row.open.setAttribute("aria-current", current ? "true" : "false");
    row.open.title = title;
    row.remove.setAttribute("aria-label", `Delete ${title}`);
    row.name = title;
    return row.node;
  }

  #build(id) {
    const row = {
      title: el("span", { class: "session-title" }), detail: el("span", { class: "session-detail" }),
      dot: el("span", { class: "dot", "aria-hidden": "true" }),
    };
    row.open = el("button", { class: "session-open", type: "button", onclick: () => this.actions.open(id) },
      row.dot, el("span", { class: "session-words" }, row.title, row.detail));
    row.remove = el("button", { class: "quiet session-remove", type: "button", onclick: () => this.actions.remove(id, row.name) },
      icon("trash"));
    row.node = el("li", { class: "session", data: { session: id } }, row.open, row.remove);
    return row;
  }
}

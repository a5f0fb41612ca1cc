// The conversation: turns of the shown branch, the streaming answer, and what can be done with each.

import { $, el, icon, setText } from "./dom.js";
import { TIER_NAMES, count, errorNote, ms, sources } from "./format.js";
import * as rest from "./rest.js";

const STAGES = {
  queued: "Waiting for its turn…", restoring: "Bringing its pages back…", prefilling: "Reading…",
};
const NEAR_END_PX = 120;

/** A picture of the history as a button that opens it large. */
function thumbnail(part) {
  const image = el("img", { alt: "", width: 96, height: 96 });
  const size = part.width ? `${part.width} × ${part.height}` : "";
  const button = el("button", { class: "thumb", type: "button", "aria-label": `Picture ${size}, open large` }, image,
    part.tokens ? el("span", { class: "thumb-note" }, `${count(part.tokens)} tokens`) : null);
  const source = part.image_url ? Promise.resolve(part.image_url) : rest.picture(part.file_id);
  source.then((url) => {
    if (url) image.src = url;
    else button.classList.add("missing");
  });
  button.addEventListener("click", () => {
    if (!image.src) return;
    $("large-picture").src = image.src;
    $("lightbox").showModal();
  });
  return button;
}

/** The bar that says from which tier the prompt's tokens came. */
export function sourceBar(usage) {
  const parts = sources(usage).filter((part) => part.tokens > 0);
  const words = parts.map((part) => `${TIER_NAMES[part.tier]} ${count(part.tokens)}`).join(", ");
  return el("div", { class: "sources", role: "img", "aria-label": `Prompt tokens by source: ${words}`, title: words },
    parts.map((part) => {
      const piece = el("span", { data: { tier: part.tier } });
      piece.style.flexGrow = part.tokens;
      return piece;
    }));
}

/** A readable refusal or failure. */
export function noteOf(error, action = null) {
  const note = errorNote(error);
  return el("div", { class: "note", role: "alert" }, icon("alert"),
    el("div", { class: "note-text" }, el("strong", {}, note.title), el("p", {}, note.text),
      note.figures ? el("p", { class: "figures" }, note.figures) : null),
    action);
}

class TurnView {
  constructor(turn, actions) {
    this.actions = actions;
    this.said = el("div", { class: "said" });
    this.text = document.createTextNode("");
    this.stage = el("p", { class: "stage" });
    this.answer = el("div", { class: "answer-text" }, this.text);
    this.end = el("div", { class: "turn-end" });
    this.node = el("article", { class: "turn", data: { turn: turn.id } }, this.said,
      el("div", { class: "answer" }, this.stage, this.answer, this.end));
    this.inputDrawn = null;
    this.endDrawn = null;
  }

  paint(turn, siblings) {
    if (this.inputDrawn !== turn.input) this.#paintInput(turn);
    const running = turn.status === "in_progress";
    this.node.dataset.status = turn.status;
    if (this.text.data !== turn.text) this.text.data = turn.text;
    this.answer.classList.toggle("streaming", running && turn.text !== "");
    this.stage.hidden = !running || turn.text !== "";
    setText(this.stage, STAGES[turn.stage] ?? STAGES.queued);
    const key = `${turn.status} ${siblings.map((s) => s.id).join()} ${turn.usage !== null}`;
    if (this.endDrawn !== key) this.#paintEnd(turn, siblings, key);
  }

  #paintInput(turn) {
    this.inputDrawn = turn.input;
    const pictures = turn.input.filter((part) => part.type === "input_image");
    const text = turn.input.filter((part) => part.type === "input_text").map((part) => part.text).join("\n");
    this.said.replaceChildren(
      ...(pictures.length ? [el("div", { class: "pictures" }, pictures.map(thumbnail))] : []),
      el("div", { class: "bubble-row" }, el("button", {
        class: "quiet edit", type: "button", title: "Edit and send again", "aria-label": "Edit and send again",
        onclick: () => this.actions.edit(turn.id),
      }, icon("edit")), text ? el("div", { class: "bubble" }, text) : null),
    );
  }

  #paintEnd(turn, siblings, key) {
    this.endDrawn = key;
    const parts = [];
    if (turn.status === "cancelled") parts.push(el("span", { class: "tag" }, "stopped"));
    if (turn.status === "incomplete") parts.push(el("span", { class: "tag" }, "cut at the length limit"));
    if (turn.usage) parts.push(this.#usage(turn.usage));
    if (turn.status === "failed") {
      parts.push(noteOf(turn.error ?? { type: "engine", message: "The answer failed. Nothing was lost." }, el("button", {
        class: "button small", type: "button", onclick: () => this.actions.again(turn.id),
      }, "Try again")));
    } else if (turn.status !== "in_progress") {
      parts.push(el("button", {
        class: "quiet again", type: "button", title: "Answer again", "aria-label": "Answer again",
        onclick: () => this.actions.again(turn.id),
      }, icon("again")));
    }
    if (siblings.length > 1) parts.push(this.#branches(turn, siblings));
    this.end.replaceChildren(...parts);
  }

  #usage(usage) {
    const kept = sources(usage).filter((part) => part.tier !== "computed").reduce((sum, part) => sum + part.tokens, 0);
    return el("span", { class: "usage" }, sourceBar(usage),
      `${count(kept)} of ${count(usage.input_tokens)} tokens remembered · first word ${ms(usage.ttft_ms)}`);
  }

  #branches(turn, siblings) {
    const at = siblings.findIndex((other) => other.id === turn.id);
    const step = (by, name, label) => el("button", {
      class: "quiet", type: "button", "aria-label": label, disabled: !siblings[at + by],
      onclick: () => this.actions.show(siblings[at + by].id),
    }, icon(name));
    return el("span", { class: "branches" }, step(-1, "left", "Earlier version"), `${at + 1} / ${siblings.length}`,
      step(1, "right", "Later version"));
  }
}

export class ChatView {
  #views = new Map();
  #session = null;

  /** actions: edit(id), again(id), show(id). */
  constructor(actions) {
    this.actions = actions;
    this.list = $("turns");
    this.scroller = $("conversation");
    this.follow = true;
    this.scroller.addEventListener("scroll", () => { this.follow = this.#atEnd(); }, { passive: true });
    new ResizeObserver(() => { if (this.follow) this.toEnd(); }).observe(this.scroller);
  }

  paint(thread) {
    if (this.#session !== thread?.id) {
      this.#views.clear();
      this.#session = thread?.id ?? null;
      this.follow = true;
    }
    const path = thread?.path() ?? [];
    const nodes = path.map((turn) => {
      if (!this.#views.has(turn.id)) this.#views.set(turn.id, new TurnView(turn, this.actions));
      const view = this.#views.get(turn.id);
      view.paint(turn, thread.siblings(turn.id));
      return view.node;
    });
    const same = nodes.length === this.list.children.length && nodes.every((node, i) => this.list.children[i] === node);
    if (!same) this.list.replaceChildren(...nodes);
    $("welcome").hidden = nodes.length > 0 || (thread !== null && !thread.loaded);
    if (this.follow) this.toEnd();
  }

  toEnd() {
    this.follow = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  /** Read the finished answer out once; the stream itself would be read in fragments. */
  announce(turn) {
    setText($("announce"), turn.status === "failed" ? "The answer failed." : `Answer: ${turn.text}`);
  }

  #atEnd() {
    return this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < NEAR_END_PX;
  }
}

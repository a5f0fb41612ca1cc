// The session's memory: its pages on three tiers, the verbs that move them, the receipts, the last turn, the limits.

import { sourceBar } from "./chat.js";
import { $, calm, el, icon, setText } from "./dom.js";
import { STATE_WORDS, TIERS, TIER_NAMES, bytes, count, ms, plural, receiptLine, residence, sources } from "./format.js";

const MOST_CELLS = 64;
const COLUMNS = 16; // of the grid in memory.css
const FLYING_PAGES = 9;
const VERB_WORDS = { spill: "Spilled", restore: "Restored", prefetch: "Prefetched", demote: "Demoted", drop: "Dropped", pin: "Pinned" };

const fromBelow = ({ cached_tokens_details: from }) => (from?.host ?? 0) + (from?.storage ?? 0) > 0;

/** One tier's copy of the conversation: a cell per page (or per run of pages), at the same place on every tier. */
class TierMap {
  #cells = [];

  constructor(tier) {
    this.tier = tier;
    this.figures = el("span", { class: "tier-figures" });
    this.grid = el("div", { class: "pages", "aria-hidden": "true" });
    this.node = el("section", { class: "tier", data: { tier }, "aria-label": TIER_NAMES[tier] },
      el("header", {}, icon(tier), el("h3", {}, TIER_NAMES[tier]), this.figures), this.grid);
  }

  paint(tokens, exclusive, kvBytes, layout) {
    setText(this.figures, tokens ? `${plural(tokens, "token")} · ${bytes(kvBytes)}` : "nothing here");
    this.node.classList.toggle("holding", tokens > 0);
    while (this.#cells.length < layout.cells) {
      const cell = el("i");
      this.#cells.push(cell);
      this.grid.append(cell);
    }
    while (this.#cells.length > layout.cells) this.#cells.pop().remove();
    const full = Math.ceil(tokens / layout.cell_tokens);
    const shared = Math.floor(Math.max(0, tokens - exclusive) / layout.cell_tokens);
    this.#cells.forEach((cell, at) => {
      cell.style.transitionDelay = calm() ? "0ms" : `${Math.round((at / layout.cells) * 350)}ms`;
      cell.classList.toggle("full", at < full);
      cell.classList.toggle("shared", at < shared);
    });
    this.node.dataset.pages = full;
  }
}

export class MemoryPanel {
  #shown = new Set(); // receipts already animated
  #session = null;
  #working = null;
  #cells = 0; // that a tier's map has

  /** actions: verb(name, body) -> promise of a receipt. */
  constructor(actions) {
    this.maps = Object.fromEntries(TIERS.map((tier) => [tier, new TierMap(tier)]));
    $("tiers").append(...TIERS.map((tier) => this.maps[tier].node));
    this.buttons = [
      ["spill-host", "spill", { to: "host" }], ["spill-storage", "spill", { to: "storage" }], ["restore", "restore", {}],
    ].map(([id, verb, body]) => {
      $(id).addEventListener("click", async () => {
        this.#working = id;
        this.#paintButtons();
        try {
          await actions.verb(verb, body);
        } finally {
          this.#working = null;
          this.#paintButtons();
        }
      });
      return $(id);
    });
  }

  paint(thread, status) {
    this.thread = thread;
    $("memory-body").hidden = !thread;
    $("memory-empty").hidden = Boolean(thread);
    this.#machine(status);
    this.#state(thread?.session.kv?.state ?? "empty");
    if (!thread) return;
    const fresh = this.#session !== thread.id;
    this.#session = thread.id;
    const kv = thread.session.kv ?? { state: "empty", tokens: 0 };
    this.#pages(kv, status?.geometry?.page_tokens ?? 16);
    this.#paintButtons();
    this.#usage(thread.lastUsage);
    this.#receipts(thread.receipts, fresh);
    this.#limits(thread.session, kv);
  }

  // ---- parts -----------------------------------------------------------------------------------------------------
  #state(state) {
    for (const pill of document.querySelectorAll(".state-pill")) {
      pill.dataset.state = state;
      setText(pill, STATE_WORDS[state] ?? state);
    }
  }

  #pages(kv, pageTokens) {
    const total = Math.max(kv.tokens ?? 0, kv.device_tokens ?? 0, kv.host_tokens ?? 0, kv.storage_tokens ?? 0);
    const pages = Math.ceil(total / pageTokens);
    const each = Math.max(1, Math.ceil(pages / MOST_CELLS));
    const layout = { cells: Math.ceil(pages / each), cell_tokens: each * pageTokens };
    setText($("residence"), this.thread.running ? "Reading and answering: its pages are being written." : residence(kv, pages));
    this.#cells = layout.cells;
    setText($("scale"), pages ? `One square is ${each === 1 ? `a page of ${pageTokens} tokens` : `${each} pages of ${pageTokens} tokens`}.` : "");
    for (const tier of TIERS) {
      const tokens = kv[`${tier}_tokens`] ?? 0;
      const exclusive = tier === "device" ? kv.device_exclusive_tokens ?? tokens : tokens;
      this.maps[tier].paint(tokens, exclusive, kv.bytes?.[tier] ?? 0, layout);
    }
  }

  #paintButtons() {
    if (!this.thread) return;
    const kv = this.thread.session.kv ?? {};
    const still = this.thread.session.busy || this.#working !== null || this.thread.session.status === "closed";
    const may = {
      "spill-host": kv.device_tokens > 0,
      "spill-storage": kv.device_tokens > 0 || kv.host_tokens > 0,
      restore: kv.tokens > 0 && kv.device_tokens < kv.tokens,
    };
    for (const button of this.buttons) {
      button.disabled = still || !may[button.id];
      button.setAttribute("aria-busy", String(this.#working === button.id));
    }
  }

  #usage(usage) {
    $("usage").hidden = !usage;
    if (!usage) return;
    $("usage-bar").replaceChildren(sourceBar(usage));
    $("usage-legend").replaceChildren(...sources(usage).filter((part) => part.tokens > 0).map((part) => el("li", { data: { tier: part.tier } },
      el("span", { class: "swatch" }), TIER_NAMES[part.tier], el("b", {}, count(part.tokens)))));
    const facts = [
      ["First word", ms(usage.ttft_ms)], ["Restore", fromBelow(usage) ? ms(usage.restore_ms) : "none needed"],
      ["Prompt", plural(usage.input_tokens, "token")], ["Answer", plural(usage.output_tokens, "token")],
      ["Pictures", usage.image_tokens ? plural(usage.image_tokens, "token") : "none"],
    ];
    $("usage-facts").replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  #receipts(receipts, fresh) {
    $("no-receipts").hidden = receipts.length > 0;
    const list = $("receipts");
    if (list.dataset.session !== this.#session) list.replaceChildren();
    list.dataset.session = this.#session;
    const drawn = new Set([...list.children].map((node) => node.dataset.receipt));
    for (const receipt of [...receipts].reverse()) {
      if (drawn.has(receipt.id)) continue;
      const { title, detail } = receiptLine(receipt);
      const ok = receipt.outcome === "done" || receipt.outcome === "partial";
      list.prepend(el("li", { class: "receipt", data: { receipt: receipt.id, verb: receipt.verb, outcome: receipt.outcome, to: receipt.to ?? "" } },
        el("div", { class: "receipt-head" }, el("b", {}, ok ? VERB_WORDS[receipt.verb] ?? receipt.verb : `${receipt.verb}: ${receipt.outcome}`),
          el("span", { class: "receipt-way" }, ok ? title : ""), el("span", { class: "receipt-ms" }, ms(receipt.ms))),
        el("div", { class: "receipt-detail" }, ok ? detail : receipt.reason || "Nothing was moved."),
        ok && receipt.reason ? el("div", { class: "receipt-detail" }, receipt.reason) : null));
      if (!fresh && !this.#shown.has(receipt.id)) this.#fly(receipt);
      this.#shown.add(receipt.id);
    }
    while (list.children.length > receipts.length) list.lastElementChild.remove();
  }

  #limits(session, kv) {
    const { limits = {}, used = {} } = session;
    const rows = [
      ["Turns", used.turns ?? 0, limits.max_turns, count], ["Tokens", used.tokens ?? 0, limits.tokens_per_session, count],
      ...TIERS.map((tier) => [TIER_NAMES[tier], kv.bytes?.[tier] ?? 0, limits[`${tier}_bytes`], bytes]),
    ].filter(([name, , limit]) => name === "Turns" || name === "Tokens" || (limit !== null && limit !== undefined));
    $("limits").replaceChildren(...rows.map(([name, use, limit, say]) => {
      const open = limit === null || limit === undefined;
      return el("li", { data: { limit: name } }, el("span", {}, name), el("span", { class: "limit-figures" }, open ? `${say(use)} · no limit` : `${say(use)} of ${say(limit)}`),
        open ? null : el("meter", { min: 0, max: limit, value: use, low: limit * 0.8, high: limit * 0.95, optimum: 0, "aria-label": name }));
    }));
  }

  #machine(status) {
    const rows = TIERS.filter((tier) => status?.tiers?.[tier]).map((tier) => {
      const { used_bytes: used = 0, capacity_bytes: all = 0 } = status.tiers[tier];
      const fill = el("span", { class: "fill" });
      fill.style.width = `${all ? Math.min(100, (100 * used) / all) : 0}%`;
      return el("li", { data: { tier } }, el("span", {}, TIER_NAMES[tier]), el("span", { class: "limit-figures" }, all ? `${bytes(used)} of ${bytes(all)}` : bytes(used)),
        el("span", { class: "track", role: "img", "aria-label": `${TIER_NAMES[tier]} in use` }, fill));
    });
    $("machine").hidden = rows.length === 0;
    $("machine-rows").replaceChildren(...rows);
  }

  /** Let a few pages travel from tier to tier, so that a move is seen as one. */
  #fly(receipt) {
    if (calm() || !receipt.to || !receipt.tokens || !this.maps[receipt.to]) return;
    const origins = Object.entries(receipt.from ?? {}).filter(([tier, tokens]) => tokens > 0 && tier !== receipt.to && this.maps[tier]);
    const home = $("tiers").getBoundingClientRect();
    const width = home.width * 0.92 * Math.min(1, this.#cells / COLUMNS);
    const to = this.maps[receipt.to].grid.getBoundingClientRect();
    for (const [tier] of origins) {
      const from = this.maps[tier].grid.getBoundingClientRect();
      for (let i = 0; i < FLYING_PAGES; i += 1) {
        const page = el("i", { class: "flying", data: { tier }, "aria-hidden": "true" });
        $("tiers").append(page);
        const x = from.left - home.left + (width * (i + 0.5)) / FLYING_PAGES;
        const at = (box) => `translate(${x}px, ${box.top - home.top + box.height / 2}px)`;
        page.animate(
          [{ transform: `${at(from)} scale(1)`, opacity: 0 }, { opacity: 1, offset: 0.2 }, { opacity: 1, offset: 0.8 }, { transform: `${at(to)} scale(1)`, opacity: 0 }],
          { duration: 750, delay: i * 55, easing: "cubic-bezier(.5,0,.2,1)", fill: "both" },
        ).finished.then(() => page.remove(), () => page.remove());
      }
    }
  }
}

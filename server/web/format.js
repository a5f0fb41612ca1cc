// Pure. Numbers and words for people.

export const TIERS = ["device", "host", "storage"];
export const TIER_NAMES = { device: "GPU", host: "Memory", storage: "Disk", computed: "Computed" };
export const STATE_WORDS = {
  hot: "hot", warm: "warm", cold: "cold", restoring: "restoring", lost: "partly lost", empty: "empty",
};

export function bytes(n) {
  if (n === null || n === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = n;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export const count = (n) => (n ?? 0).toLocaleString("en-US");
export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(1)} ms`;
  return value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(2)} s`;
}

/** Where the prompt's tokens came from: [{tier, tokens}], what was computed anew last. */
export function sources(usage) {
  const cached = usage.cached_tokens_details ?? {};
  const parts = TIERS.map((tier) => ({ tier, tokens: cached[tier] ?? 0 }));
  const known = parts.reduce((sum, part) => sum + part.tokens, 0);
  parts.push({ tier: "computed", tokens: Math.max(0, (usage.input_tokens ?? 0) - known) });
  return parts;
}

/** One sentence on where a session's pages are. */
export function residence(kv, pages) {
  switch (kv.state) {
    case "hot": return `All ${plural(pages, "page")} are on the GPU. The next word comes at once.`;
    case "warm": return "Its pages rest in memory and return before the next word.";
    case "cold": return "Its pages rest on disk and return before the next word.";
    case "restoring": return "Its pages are on their way back to the GPU.";
    case "lost": return "Some pages are gone; the next turn computes them again.";
    default: return "Nothing remembered yet. Say something.";
  }
}

/** "spill" receipts and the like as one line: title and detail. */
export function receiptLine(receipt) {
  const from = Object.entries(receipt.from ?? {}).filter(([, tokens]) => tokens > 0).map(([tier]) => TIER_NAMES[tier] ?? tier);
  const way = receipt.to ? `${from.join(" + ") || "–"} → ${TIER_NAMES[receipt.to] ?? receipt.to}` : from.join(" + ");
  const kept = receipt.shared_kept_tokens ? ` · ${count(receipt.shared_kept_tokens)} shared tokens stayed` : "";
  return {
    title: way || "–",
    detail: `${plural(receipt.tokens, "token")} · ${plural(receipt.pages, "page")} · ${bytes(receipt.bytes)}${kept}`,
  };
}

const TITLES = {
  limit_exceeded: "A limit was reached", authentication: "Not signed in", not_found: "Not found", conflict: "Not just now",
  overloaded: "The server is busy", engine: "The engine could not answer", server: "Something went wrong",
  invalid_request: "That cannot be sent",
};

/** An ErrorObject for people: title, text and the limit's figures where it has some. */
export function errorNote(error) {
  const named = error.param && error.limit !== null && error.limit !== undefined;
  const asked = error.requested !== null && error.requested !== undefined ? `, asked for ${count(error.requested)}` : "";
  return {
    title: TITLES[error.type] ?? TITLES.server,
    text: error.message,
    figures: named ? `${error.param} = ${count(error.limit)}${asked}` : null,
    retryable: Boolean(error.retryable),
  };
}

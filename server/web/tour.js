// Pure. The hint line of the first-light tour: what to try next, from what the session has been through.

const did = (thread, test) => thread.receipts.some((receipt) => test(receipt) && receipt.tokens > 0);
const cameBack = (thread, tier) => did(thread, (r) => ["restore", "prefetch"].includes(r.verb) && (r.from?.[tier] ?? 0) > 0);
const pictures = (thread) => thread.path().flatMap((turn) => turn.input).filter((part) => part.type === "input_image").length;

const STEPS = [
  { text: "Pick a sample picture, ask “What colour is the shape?”, and send.", done: (t) => t.path().length > 0 && pictures(t) > 0 },
  { text: "Ask about another picture. Watch the conversation’s pages grow on the GPU.", done: (t) => pictures(t) > 1 },
  { text: "Press “Spill to memory”: the GPU is freed, nothing is forgotten.", done: (t) => did(t, (r) => r.verb === "spill" && r.to === "host") },
  { text: "Ask “What colour was the first shape?” The pages return while you type.", done: (t) => cameBack(t, "host") },
  { text: "Press “Spill to disk”, then ask again: the same answer, from cold.", done: (t) => cameBack(t, "storage") },
];

/** {index, total, text} of the next step; null when all is done. */
export function nextStep(thread) {
  const index = STEPS.findIndex((step) => !step.done(thread));
  return index < 0 ? null : { index, total: STEPS.length, text: STEPS[index].text };
}

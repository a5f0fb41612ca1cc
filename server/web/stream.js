// Pure. Which events of a session are to be applied: each exactly once, in order, whatever the connection did.

export const APPLY = "apply";
export const DUPLICATE = "duplicate";
export const GAP = "gap";

/** Where this page stands in one session's numbered events. */
export class Position {
  constructor(epoch = null, seq = 0) {
    this.epoch = epoch;
    this.seq = seq;
    this.known = epoch !== null;
    this.resuming = false;
  }

  /** What to do with a numbered event. Only APPLY moves the position; a GAP asks the caller to resume. */
  take(event) {
    if (event.type === "session.created") {
      this.#set(event.epoch, event.seq);
      return APPLY;
    }
    if (!this.known || this.resuming) return DUPLICATE; // what the resume brings holds it already
    const first = event.from_seq ?? event.seq; // deltas that the server laid together count as first..seq
    if (event.seq <= this.seq) return DUPLICATE;
    if (first !== this.seq + 1) return GAP;
    this.seq = event.seq;
    return APPLY;
  }

  /** Fields of the session.resume frame that continues from here; marks the position as waiting for its answer. */
  ask() {
    this.resuming = true;
    return this.known ? { epoch: this.epoch, last_seq: this.seq } : {};
  }

  /** Take the answer to `ask`. False: it cannot continue from here, so ask again from nothing. */
  resumed(event) {
    this.resuming = false;
    if (event.outcome !== "lossless") {
      this.#set(event.epoch, event.from_seq - 1); // what came since the snapshot follows by number
      return true;
    }
    if (this.known && event.epoch === this.epoch && event.from_seq <= this.seq + 1) return true;
    this.known = false;
    return false;
  }

  #set(epoch, seq) {
    this.epoch = epoch;
    this.seq = seq;
    this.known = true;
    this.resuming = false;
  }
}

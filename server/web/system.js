// The top of the page: connection, engine and daemon, and the banner while one of them is not there.

import { $, setText } from "./dom.js";

const RESTART = 1012; // close code
const WORDS = { starting: "starting", ready: "ready", restarting: "restarting", failed: "failed" };

let connection = "connecting";
let engine = null;
let daemon = null;
let detail = "";
let everOpen = false;
let restarting = false; // the server said so when it closed the connection

function pill(id, name, state) {
  $(id).dataset.state = state ?? "unknown";
  $(id).hidden = !state || state === "disabled";
  setText($(`${id}-word`), `${name} ${WORDS[state] ?? state ?? ""}`);
}

/** One sentence for the banner; null: nothing to say. */
function sentence() {
  if (connection === "waiting" && everOpen) {
    const what = restarting ? "The server is restarting." : "The connection was lost.";
    return { text: `${what} Your conversations are safe; this page comes back by itself.`, retry: true };
  }
  if (connection === "waiting") return { text: "The server does not answer yet. Trying again…", retry: true };
  if (engine === "starting") return { text: "The engine is starting: the model is being loaded." };
  if (engine === "restarting") return { text: "The engine is restarting. Nothing is lost; sending works again in a moment." };
  if (engine === "failed") return { text: "The engine could not be started.", bad: true };
  if (daemon === "restarting" || daemon === "starting") return { text: "The memory and disk tiers are starting. Chatting works; moved pages wait." };
  if (daemon === "failed") return { text: "The memory and disk tiers are not available. Chatting works, from the GPU alone.", bad: true };
  return null;
}

function paint() {
  const say = sentence();
  $("banner").hidden = say === null;
  if (say) {
    setText($("banner-text"), say.text);
    setText($("banner-detail"), connection === "waiting" ? "" : detail);
    $("banner").classList.toggle("bad", Boolean(say.bad));
    $("banner-progress").hidden = Boolean(say.bad);
    $("try-now").hidden = !say.retry;
  }
  pill("engine", "Engine", engine);
  pill("daemon", "Offload", daemon);
  $("link").dataset.state = connection;
  setText($("link-word"), connection === "open" ? "connected" : connection === "signed_out" ? "signed out" : "connecting");
}

export function connectionChanged(change) {
  if (change.state === "connecting" && connection === "waiting") return; // still waiting, as a person sees it
  connection = change.state;
  everOpen ||= connection === "open";
  restarting = connection === "waiting" && (restarting || change.code === RESTART);
  setText($("connection-reason"), change.reason ?? "");
  paint();
}

/** An engine.state event, or the engine's part of connection.ready. */
export function engineChanged(event) {
  engine = event.engine ?? engine;
  daemon = event.daemon ?? daemon;
  detail = event.detail ?? "";
  if (event.model) {
    setText($("model"), event.model.split("/").filter(Boolean).at(-1));
    $("model").title = event.model;
  }
  paint();
}

export function statusChanged(status) {
  engineChanged({
    engine: status.engine?.state, daemon: status.daemon?.state, model: status.engine?.model,
    detail: status.engine?.detail,
  });
}

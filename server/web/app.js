// The page: wires the client, the views and what the person does together.

import { ChatView } from "./chat.js";
import { Client, Refused, SignedOut } from "./client.js";
import { Composer } from "./composer.js";
import { $, setText } from "./dom.js";
import { MemoryPanel } from "./memory.js";
import * as rest from "./rest.js";
import { Sidebar } from "./sidebar.js";
import { askForKey, nextTicket } from "./signin.js";
import { connectionChanged, engineChanged, statusChanged } from "./system.js";
import { Thread } from "./thread.js";
import { nextStep } from "./tour.js";

const CURRENT_KEY = "rekindle.session";
const POLL_MS = 2000;
const TITLE_CHARS = 48;

const threads = new Map();
let sessions = [];
let current = null; // session id; null: a new conversation that exists with its first message
let status = null;
let replacing = null; // the turn that the next message stands in for

const shown = () => threads.get(current) ?? null;

// ---- painting ------------------------------------------------------------------------------------------------------
let due = false;
function repaint() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    const thread = shown();
    chat.paint(thread);
    sidebar.paint(sessions.map((session) => threads.get(session.id)?.session ?? session), current);
    memory.paint(thread, status);
    composer.running(Boolean(thread?.running));
    setText($("title"), thread?.session.title || "New conversation");
    const step = nextStep(thread ?? new Thread({ id: null }));
    $("tour").hidden = step === null;
    if (step) {
      setText($("tour-step"), `First light ${step.index + 1}/${step.total}`);
      setText($("tour-text"), step.text);
    }
  });
}

// ---- events --------------------------------------------------------------------------------------------------------
function onEvent(event) {
  if (event.type === "engine.state") engineChanged(event);
  if (event.type === "error") onError(event);
  if (!event.session_id || event.type === "error") return;
  if (event.type === "session.resumed") {
    if (!threads.has(event.session_id)) threads.set(event.session_id, new Thread(event.session));
    const thread = threads.get(event.session_id);
    if (event.outcome !== "lossless") thread.load(event);
    else if (event.session) thread.session = event.session;
  } else {
    if (event.session && !threads.has(event.session_id)) threads.set(event.session_id, new Thread(event.session));
    const thread = threads.get(event.session_id);
    if (!thread) return;
    thread.apply(event);
    if (event.type === "session.created" || event.type === "session.updated") remember(event.session);
    if (["response.completed", "response.incomplete", "response.failed"].includes(event.type)) finished(event);
  }
  repaint();
}

function finished(event) {
  const turn = threads.get(event.session_id).turns.get(event.response.id);
  if (event.session_id === current && turn) chat.announce(turn);
  refreshSessions();
}

function onError(event) {
  const lostSession = ["session_not_found", "not_found"].includes(event.error.code) && event.session_id === current;
  if (lostSession && !shown()) open(null); // it was deleted elsewhere
  else if (!event.event_id) composer.note(event.error);
}

function remember(session) {
  sessions = [session, ...sessions.filter((other) => other.id !== session.id)];
}

// ---- what the person does ------------------------------------------------------------------------------------------
function open(id) {
  current = id;
  if (id === null) sessionStorage.removeItem(CURRENT_KEY);
  else {
    sessionStorage.setItem(CURRENT_KEY, id);
    client.attach(id);
  }
  replacing = null;
  composer.clear();
  document.body.dataset.drawer = "";
  repaint();
}

async function send({ text, images }) {
  if (current === null) {
    const title = text.split("\n")[0].slice(0, TITLE_CHARS) || "Pictures";
    const made = await client.request({ type: "session.create", session: { title } });
    current = made.session_id;
    sessionStorage.setItem(CURRENT_KEY, current);
  }
  const thread = shown();
  const content = [
    ...images.map((file_id) => ({ type: "input_image", file_id })), ...(text ? [{ type: "input_text", text }] : []),
  ];
  await respond(thread, content, replacing ? thread.insteadOf(replacing) : thread.replyTo());
  replacing = null;
}

async function respond(thread, content, previous_response_id) {
  chat.toEnd();
  await client.request({
    type: "response.create", session_id: thread.id, input: [{ type: "message", role: "user", content }],
    ...(previous_response_id ? { previous_response_id } : {}), idempotency_key: newKey(),
  }, { again: true });
  repaint();
}

const newKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((n) => n.toString(16).padStart(2, "0")).join("");

const contentOf = (turn) => turn.input.map((part) => (
  part.type === "input_image" ? { type: "input_image", file_id: part.file_id } : { type: "input_text", text: part.text }));

/** Run something that may be refused, and say so where the person looks. */
async function attempt(action) {
  try {
    return await action();
  } catch (problem) {
    if (problem instanceof SignedOut) client.stop();
    else if (problem instanceof Refused) composer.note(problem.error);
    else throw problem;
    return null;
  }
}

const chat = new ChatView({
  edit(id) {
    const turn = shown().turns.get(id);
    composer.edit(turn.input.filter((part) => part.type === "input_text").map((part) => part.text).join("\n"),
      turn.input.filter((part) => part.type === "input_image"));
    replacing = id;
  },
  again(id) {
    const thread = shown();
    const turn = thread.turns.get(id);
    attempt(() => respond(thread, contentOf(turn), thread.insteadOf(id)));
  },
  show(id) {
    shown().show(id);
    repaint();
  },
});

const composer = new Composer({
  send,
  stop: () => attempt(() => client.tell({ type: "response.cancel", session_id: current, response_id: shown().running?.id })),
  typing: () => { if (current !== null) client.tell({ type: "input.typing", session_id: current }); },
  leaveEdit: () => { replacing = null; },
});

const sidebar = new Sidebar({
  open,
  async remove(id, title) {
    if (!confirm(`Delete “${title}” for good?`)) return;
    await attempt(() => rest.removeSession(id));
    client.forget(id);
    threads.delete(id);
    sessions = sessions.filter((session) => session.id !== id);
    if (id === current) open(null);
    repaint();
    refreshSessions();
  },
});

const memory = new MemoryPanel({
  verb: (name, body) => attempt(async () => {
    const thread = shown();
    thread.addReceipt(await rest.verb(thread.id, name, body));
    repaint();
  }),
});

// ---- connection ----------------------------------------------------------------------------------------------------
const client = new Client({
  url: `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/v1/chat`,
  ticket: nextTicket, onEvent, onConnection,
});

function onConnection(change) {
  connectionChanged(change);
  if (change.state !== "open") return;
  if (change.authenticated.token) rest.setToken(change.authenticated.token);
  composer.limits = change.ready.limits ?? {};
  const { state, ...engine } = change.ready.engine ?? {};
  engineChanged({ engine: state, ...engine });
  refreshSessions();
  refreshStatus();
}

/** The list, and the figures that no event tells (pages that grew while the state stayed). */
async function refreshSessions() {
  const seen = new Map([...threads].map(([id, thread]) => [id, thread.changes]));
  try {
    sessions = await rest.sessions();
    for (const session of sessions) {
      const thread = threads.get(session.id);
      if (thread && thread.changes === seen.get(session.id)) thread.refresh(session); // else events know better
    }
    repaint();
  } catch (problem) {
    if (!(problem instanceof Refused || problem instanceof SignedOut)) throw problem;
  }
}

async function refreshStatus() {
  try {
    status = await rest.status();
    statusChanged(status);
    repaint();
  } catch (problem) {
    if (!(problem instanceof Refused || problem instanceof SignedOut)) throw problem;
  }
}

async function stayConnected() {
  for (;;) {
    await client.run();
    await askForKey($("connection-reason").textContent);
  }
}

$("new-session").addEventListener("click", () => {
  open(null);
  $("text").focus();
});
for (const button of document.querySelectorAll("[data-opens]")) {
  button.addEventListener("click", () => {
    document.body.dataset.drawer = document.body.dataset.drawer === button.dataset.opens ? "" : button.dataset.opens;
  });
}
$("shade").addEventListener("click", () => { document.body.dataset.drawer = ""; });
addEventListener("keydown", (event) => { if (event.key === "Escape") document.body.dataset.drawer = ""; });
$("lightbox").addEventListener("click", () => $("lightbox").close());
$("try-now").addEventListener("click", () => client.hurry());
addEventListener("online", () => client.hurry());
setInterval(() => {
  if (document.hidden || !client.connected) return;
  refreshStatus();
  refreshSessions();
}, POLL_MS);

const last = sessionStorage.getItem(CURRENT_KEY);
if (last !== null) open(last);
else repaint();
stayConnected();

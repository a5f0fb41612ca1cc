// REST calls of the page. The bearer token lives in this tab only (sessionStorage), never in the address.

import { Refused, SignedOut } from "./client.js";

const KEY = "rekindle.token";

let token = sessionStorage.getItem(KEY);

export const signedIn = () => token !== null;

export function setToken(value) {
  token = value;
  if (value === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, value);
}

/** The ErrorObject of a refused call, whatever its body looks like. */
function errorOf(status, body) {
  if (body?.error?.message) return body.error;
  const detail = typeof body?.detail === "string" ? body.detail : `The server answered with status ${status}.`;
  return { type: "server", code: `http_${status}`, message: detail, retryable: status >= 500 };
}

async function call(method, path, body) {
  const headers = { Accept: "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store" });
  } catch (problem) {
    throw new Refused({ type: "server", code: "unreachable", message: "The server cannot be reached.", retryable: true });
  }
  if (answer.status === 401) throw new SignedOut("The server did not accept the sign-in.");
  const data = answer.status === 204 ? null : await answer.json().catch(() => null);
  if (data?.verb && data?.outcome) return data; // a receipt, of a refused verb too
  if (!answer.ok) throw new Refused(errorOf(answer.status, data));
  return data;
}

/** A one-time ticket for a new socket. */
export const ticket = async () => (await call("POST", "/v1/tickets")).ticket;
export const status = () => call("GET", "/v1/status");
export const sessions = async () => (await call("GET", "/v1/sessions")).data;
export const removeSession = (id) => call("DELETE", `/v1/sessions/${encodeURIComponent(id)}`);

/** Runs a KV verb on a session; the promise is its receipt. */
export const verb = (id, name, body = {}) => call("POST", `/v1/sessions/${encodeURIComponent(id)}/${name}`, body);

/** Upload an image; onProgress gets a share from 0 to 1. The promise is the FileObject. */
export function upload(file, onProgress) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    const form = new FormData();
    form.append("file", file, file.name || "picture.png");
    request.open("POST", "/v1/files");
    request.setRequestHeader("Authorization", `Bearer ${token}`);
    request.responseType = "json";
    request.upload.onprogress = (event) => event.lengthComputable && onProgress(event.loaded / event.total);
    request.onerror = () => reject(new Refused({
      type: "server", code: "unreachable", message: "The picture could not be sent: the server cannot be reached.", retryable: true,
    }));
    request.onload = () => {
      if (request.status >= 200 && request.status < 300) resolve(request.response);
      else reject(new Refused(errorOf(request.status, request.response)));
    };
    request.send(form);
  });
}

const pictures = new Map();

/** Remember what a file looks like, so that it need not be fetched. */
export const rememberPicture = (fileId, url) => pictures.set(fileId, Promise.resolve(url));

/** An address (blob:) for a stored image; null when it cannot be had. */
export function picture(fileId) {
  if (!pictures.has(fileId)) pictures.set(fileId, fetchPicture(fileId));
  return pictures.get(fileId);
}

async function fetchPicture(fileId) {
  const answer = await fetch(`/v1/files/${encodeURIComponent(fileId)}/content`, { headers: { Authorization: `Bearer ${token}` } })
    .catch(() => null);
  if (!answer?.ok) {
    pictures.delete(fileId);
    return null;
  }
  return URL.createObjectURL(await answer.blob());
}

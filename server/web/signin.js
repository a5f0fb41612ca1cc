// Signing in: a one-time ticket from the address, a token kept for this tab, or an API key that the person pastes.

import { SignedOut } from "./client.js";
import { $, setText } from "./dom.js";
import * as rest from "./rest.js";

/** Take the ticket out of the address (and out of the history) at once; null when there is none. */
function ticketOfAddress() {
  const ticket = new URLSearchParams(location.hash.slice(1)).get("ticket");
  if (ticket !== null) history.replaceState(null, "", location.pathname + location.search);
  return ticket;
}

let first = ticketOfAddress();

/** A ticket for the next socket. Throws SignedOut when there is nothing to get one with. */
export async function nextTicket() {
  if (first !== null) {
    const ticket = first;
    first = null;
    return ticket;
  }
  if (!rest.signedIn()) throw new SignedOut("");
  return rest.ticket();
}

/** Show the form until a key is given; the promise resolves once it is set. */
export function askForKey(reason) {
  rest.setToken(null);
  setText($("signin-reason"), reason);
  $("signin-reason").hidden = !reason;
  $("signin").hidden = false;
  $("app").inert = true;
  $("key").focus();
  return new Promise((resolve) => {
    $("signin-form").addEventListener("submit", (event) => {
      event.preventDefault();
      rest.setToken($("key").value.trim());
      $("key").value = "";
      $("signin").hidden = true;
      $("app").inert = false;
      resolve();
    }, { once: true });
  });
}

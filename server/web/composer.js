// What the person is about to send: text and pictures, from typing, dropping, pasting, picking or the samples.

import { noteOf } from "./chat.js";
import { Refused } from "./client.js";
import { $, el, icon, setText } from "./dom.js";
import { bytes, count } from "./format.js";
import * as rest from "./rest.js";
import { SAMPLES, sampleCanvas, sampleFile } from "./samples.js";

const TYPING_EVERY_MS = 3000;

export class Composer {
  #pictures = []; // {key, url, file: FileObject|null, error, node, bar, note}
  #sending = false;
  #running = false;
  #typed = 0;
  #key = 0;

  /** actions: send({text, images}) -> promise, stop(), typing(), leaveEdit(). */
  constructor(actions) {
    this.actions = actions;
    this.limits = {};
    this.text = $("text");
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    $("stop").addEventListener("click", () => this.actions.stop());
    $("leave-edit").addEventListener("click", () => this.leaveEdit());
    this.text.addEventListener("input", () => this.#onInput());
    this.text.addEventListener("keydown", (event) => this.#onKey(event));
    this.text.addEventListener("paste", (event) => this.#take(event.clipboardData?.files, event));
    $("pick").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", (event) => {
      this.add([...event.target.files]);
      event.target.value = "";
    });
    this.#dropZone();
    for (const row of document.querySelectorAll(".samples")) this.#samples(row);
    this.#refresh();
  }

  /** Say why something was refused, above the text. */
  note(error, action = null) {
    const node = noteOf(error, action);
    node.append(el("button", { class: "quiet", type: "button", "aria-label": "Dismiss", onclick: () => node.remove() }, icon("close")));
    $("notes").replaceChildren(node);
  }

  clearNotes() {
    $("notes").replaceChildren();
  }

  running(yes) {
    this.#running = yes;
    this.#refresh();
  }

  /** Put text and images (parts of a sent message) back for editing. */
  edit(text, images) {
    this.clear();
    this.text.value = text;
    for (const part of images) this.#show({ name: "picture" }, rest.picture(part.file_id), part);
    $("editing").hidden = false;
    this.#onInput();
    this.text.focus();
  }

  leaveEdit() {
    if ($("editing").hidden) return;
    $("editing").hidden = true;
    this.clear();
    this.actions.leaveEdit();
  }

  clear() {
    this.text.value = "";
    this.#pictures = [];
    $("attached").replaceChildren();
    $("editing").hidden = true;
    this.clearNotes();
    this.#onInput();
  }

  /** Upload files at once, so that the price is known before sending. */
  add(files) {
    const most = this.limits.images_per_message;
    for (const file of files) {
      if (most !== undefined && most !== null && this.#pictures.length >= most) {
        this.note({
          type: "limit_exceeded", message: "A message holds no more pictures than that.", param: "images_per_message",
          limit: most, requested: this.#pictures.length + 1,
        });
        return;
      }
      if (this.limits.image_bytes && file.size > this.limits.image_bytes) {
        this.note({
          type: "limit_exceeded", param: "image_bytes", limit: this.limits.image_bytes, requested: file.size,
          message: `“${file.name}” is ${bytes(file.size)}; a picture may be ${bytes(this.limits.image_bytes)} at most.`,
        });
        continue;
      }
      this.#upload(file);
    }
  }

  async submit() {
    if (this.#sending || this.#running) return;
    const text = this.text.value.trim();
    const ready = this.#pictures.filter((picture) => picture.file !== null);
    if (!text && !ready.length) return;
    if (ready.length < this.#pictures.length) return;
    this.#sending = true;
    this.#refresh();
    this.clearNotes();
    try {
      await this.actions.send({ text, images: ready.map((picture) => picture.file.id) });
      this.clear();
    } catch (problem) {
      if (!(problem instanceof Refused)) throw problem;
      const again = problem.error.retryable
        ? el("button", { class: "button small", type: "button", onclick: () => this.submit() }, "Try again") : null;
      this.note(problem.error, again);
    } finally {
      this.#sending = false;
      this.#refresh();
    }
  }

  // ---- inside --------------------------------------------------------------------------------------------------
  async #upload(file) {
    const url = URL.createObjectURL(file);
    const picture = this.#show(file, Promise.resolve(url), null);
    try {
      const object = await rest.upload(file, (share) => { picture.bar.value = share; });
      rest.rememberPicture(object.id, url);
      this.#accepted(picture, object);
    } catch (problem) {
      this.#remove(picture);
      if (problem instanceof Refused) this.note({ ...problem.error, message: `“${file.name}”: ${problem.error.message}` });
      else throw problem;
    }
  }

  /** Draw a picture in the tray. `part`: what is known of it when it is on the server already. */
  #show(file, url, part) {
    const image = el("img", { alt: file.name, width: 64, height: 64 });
    url.then((address) => { if (address) image.src = address; });
    const bar = el("progress", { max: 1, value: 0, "aria-label": `Sending ${file.name}` });
    const note = el("span", { class: "thumb-note" }, "sending");
    const picture = { key: ++this.#key, file: null, bar, note };
    picture.node = el("div", { class: "attachment" }, image, bar, note, el("button", {
      class: "remove", type: "button", "aria-label": `Remove ${file.name}`, onclick: () => this.#remove(picture),
    }, icon("close")));
    this.#pictures.push(picture);
    $("attached").append(picture.node);
    if (part) this.#accepted(picture, { id: part.file_id, tokens: part.tokens, width: part.width, height: part.height, notes: [] });
    this.#refresh();
    return picture;
  }

  #accepted(picture, object) {
    picture.file = object;
    picture.bar.remove();
    setText(picture.note, `${count(object.tokens)} tokens`);
    picture.node.title = [`${object.width} × ${object.height}`, ...(object.notes ?? [])].join(" · ");
    this.#refresh();
  }

  #remove(picture) {
    this.#pictures = this.#pictures.filter((other) => other !== picture);
    picture.node.remove();
    this.#refresh();
  }

  #onInput() {
    this.text.style.height = "auto";
    this.text.style.height = `${Math.min(this.text.scrollHeight, 220)}px`;
    if (this.text.value && Date.now() - this.#typed > TYPING_EVERY_MS) {
      this.#typed = Date.now();
      this.actions.typing();
    }
    this.#refresh();
  }

  #onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.submit();
    }
    if (event.key === "Escape") this.leaveEdit();
  }

  #take(files, event) {
    const images = [...(files ?? [])].filter((file) => file.type.startsWith("image/"));
    if (!images.length) return;
    event.preventDefault();
    this.add(images);
  }

  #dropZone() {
    let depth = 0;
    const over = (yes) => document.body.classList.toggle("dropping", yes);
    const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
    addEventListener("dragenter", (event) => { if (carriesFiles(event)) over(++depth > 0); });
    addEventListener("dragleave", (event) => { if (carriesFiles(event)) over((depth = Math.max(0, depth - 1)) > 0); });
    addEventListener("dragover", (event) => { if (carriesFiles(event)) event.preventDefault(); });
    addEventListener("drop", (event) => {
      if (!carriesFiles(event)) return;
      event.preventDefault();
      over((depth = 0) > 0);
      this.add([...event.dataTransfer.files]);
    });
  }

  #samples(row) {
    for (const sample of SAMPLES) {
      row.append(el("button", {
        class: "sample", type: "button", title: sample.name, "aria-label": `Add the sample picture: ${sample.name}`,
        onclick: async () => {
          this.add([await sampleFile(sample)]);
          if (!this.text.value) this.text.value = "What colour is the shape?";
          this.#onInput();
          this.text.focus();
        },
      }, sampleCanvas(sample), el("span", {}, sample.name)));
    }
  }

  #refresh() {
    const uploading = this.#pictures.some((picture) => picture.file === null);
    const something = this.text.value.trim() !== "" || this.#pictures.length > 0;
    $("send").hidden = this.#running;
    $("stop").hidden = !this.#running;
    $("send").disabled = this.#sending || uploading || !something;
    $("composer").classList.toggle("busy", this.#sending);
  }
}

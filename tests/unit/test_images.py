"""Data URLs, the decoding gate, and the content-addressed folder."""

import asyncio
import base64
import io
import os
import random
import re
import stat
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from server import images
from server.gate import ByteGate, ImagesBusy
from server.images import ImageNotFound, ImageStore, parse_data_url
from server.pixels import ImageRefused, ImageRules

QWEN = ImageRules(patch=14, merge=2, min_pixels=3136, max_pixels=12_845_056)


def png(size=(56, 56), colour=(0, 128, 0), form="PNG"):
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, form)
    return out.getvalue()


# ---- data URLs -------------------------------------------------------------------------------------------------
AWKWARD = b"\xfb\xef\xbe" * 60 + b"\xff"          # holds + and / and ends in ==
PLAIN = base64.b64encode(AWKWARD).decode()
FORMS = {
    "plain": "data:image/png;base64," + PLAIN,
    "crlf": "data:image/png;base64," + "\r\n".join(re.findall(".{1,76}", PLAIN)),
    "urlsafe": "data:image/png;base64," + base64.urlsafe_b64encode(AWKWARD).decode(),
    "no padding": "data:image/png;base64," + PLAIN.rstrip("="),
    "upper": "DATA:image/PNG;charset=utf-8;BASE64," + PLAIN,
    "no type": "data:;base64," + PLAIN,
    "bare": PLAIN,
    "bare crlf": "\r\n".join(re.findall(".{1,76}", PLAIN)) + "\r\n",
    "percent": "data:image/png;base64," + PLAIN.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_data_url_gives_the_same_bytes(form):
    """Line breaks, URL-safe alphabet, missing padding, upper case, further parameters and bare base64 are all understood."""
    assert "+" in PLAIN and "/" in PLAIN and PLAIN.endswith("==")
    assert parse_data_url(FORMS[form], 1000) == AWKWARD


@pytest.mark.parametrize(("url", "code"), [
    ("https://example.org/a.png", "image_url_unsupported"), ("http://127.0.0.1/", "image_url_unsupported"),
    ("file:///etc/passwd", "image_url_unsupported"), ("data:image/png,abc", "image_url_invalid"),
    ("data:image/png;base64,a*b=", "image_url_invalid"), ("data:image/png;base64,abcde", "image_url_invalid"),
    ("data:image/png;base64,ab=c", "image_url_invalid"), ("data:image/png;base64,é", "image_url_invalid"),
    ("data:image/png;base64", "image_url_unsupported"), ("data:image/png;base64," + "A" * 4000, "image_too_many_bytes"),
])
def test_other_urls_are_refused_by_name_without_their_content(url, code):
    """Nothing is fetched, nothing is guessed, and the message repeats nothing of the URL."""
    with pytest.raises(ImageRefused) as refused:
        parse_data_url(url, 1000)
    assert refused.value.code == code
    assert "passwd" not in str(refused.value) and "AAAA" not in str(refused.value)


@given(st.binary(max_size=300))
def test_any_bytes_survive_every_form(data):
    """Whatever the bytes, each form of their data URL gives them back."""
    for text in (base64.b64encode(data), base64.urlsafe_b64encode(data), base64.encodebytes(data), base64.b64encode(data).rstrip(b"=")):
        assert parse_data_url("data:x/y;base64," + text.decode(), 1000) == data


@given(st.text(max_size=80))
def test_any_text_is_bytes_or_a_refusal(text):
    """No text raises anything but ImageRefused."""
    for url in (text, "data:image/png;base64," + text):
        try:
            assert isinstance(parse_data_url(url, 1000), bytes)
        except ImageRefused:
            pass


# ---- the gate --------------------------------------------------------------------------------------------------
async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_work_above_the_capacity_waits_its_turn_and_the_rest_is_told_busy():
    """Bytes in flight never pass the capacity; first come, first served; one too many is refused at once."""
    gate, order, go = ByteGate(100, 2), [], [asyncio.Event() for _ in range(3)]

    async def work(i, size):
        async with gate.hold(size):
            order.append(i)
            await go[i].wait()

    tasks = [asyncio.create_task(work(i, size)) for i, size in enumerate((60, 60, 30))]
    await settle()
    assert order == [0] and gate.used_bytes == 60        # 30 would fit, but stands behind 60
    with pytest.raises(ImagesBusy):
        await work(0, 1)
    go[0].set()
    await settle()
    assert order == [0, 1, 2] and gate.used_bytes == 90
    for event in go:
        event.set()
    await asyncio.gather(*tasks)
    assert gate.used_bytes == 0 and gate.peak_bytes == 90


async def test_work_larger_than_the_capacity_runs_alone():
    """One big image is not refused by the gate; it takes the whole capacity."""
    gate = ByteGate(100, 2)
    async with gate.hold(1000):
        assert gate.used_bytes == 100
    assert gate.used_bytes == 0


@given(st.lists(st.tuples(st.integers(1, 120), st.booleans()), min_size=1, max_size=12), st.randoms())
def test_cancelled_waiters_leave_nothing_behind(plan, chance):
    """Whoever is cancelled at whatever moment, all others run, and in the end nothing is held."""
    async def scene():
        gate, done = ByteGate(100, 99), []

        async def work(i, size):
            async with gate.hold(size):
                assert gate.used_bytes <= 100
                await asyncio.sleep(0)
                done.append(i)

        tasks = [asyncio.create_task(work(i, size)) for i, (size, _) in enumerate(plan)]
        for i, (_, cancelled) in enumerate(plan):
            if chance.random() < 0.5:
                await asyncio.sleep(0)
            if cancelled:
                tasks[i].cancel()
        await asyncio.wait(tasks, timeout=10)
        assert all(task.done() for task in tasks)
        assert {i for i, (_, cancelled) in enumerate(plan) if not cancelled} <= set(done)
        assert gate.used_bytes == 0
    asyncio.run(scene())


# ---- the store -------------------------------------------------------------------------------------------------
@pytest.fixture
def store(tmp_path):
    out = ImageStore(tmp_path / "images", QWEN, workers=2)
    yield out
    out.close()


async def test_an_upload_is_priced_kept_and_read_back(store):
    """The record has size, grid and tokens; the folder holds what the model sees, the upload, and the sidecar."""
    record = await store.add("t1", png((800, 600)))
    assert (record.width, record.height, record.tokens, record.media_type) == (800, 600, 609, "image/png")
    assert record.grid == QWEN.grid(800, 600)
    assert await store.get("t1", record.digest) == record
    assert await store.original("t1", record.digest) == (png((800, 600)), "image/png")
    assert Image.open(store.path(record.digest)).getpixel((0, 0)) == (0, 128, 0)
    assert sorted(p.suffix for p in store.folder.iterdir()) == [".json", ".orig", ".png"]
    assert record.to_file().id == record.digest and record.to_file().tokens == 609


async def test_the_same_picture_is_one_file_in_every_form(store):
    """Formats, labels and data URL forms of one picture share one id and one set of files."""
    text = base64.b64encode(png()).decode()
    ids = {(await store.add("t", png(form=form))).digest for form in ("PNG", "BMP", "TIFF")}
    ids |= {(await store.keep("t", await store.look_url(url))).digest for url in (
        "data:image/jpeg;base64," + text, text, "data:image/png;base64," + text.replace("+", "-").replace("/", "_").rstrip("="))}
    assert len(ids) == 1 and len(list(store.folder.iterdir())) == 3


async def test_an_id_is_useless_to_another_tenant(store):
    """Another tenant's id looks unknown on every method, until the tenant uploads the picture too."""
    digest = (await store.add("a", png())).digest
    for call in (store.get, store.original):
        with pytest.raises(ImageNotFound):
            await call("b", digest)
    assert not await store.has("b", digest)
    await store.delete("b", digest)
    assert await store.has("a", digest)
    await store.add("b", png())
    assert await store.has("b", digest)
    await store.delete("a", digest)
    assert not await store.has("a", digest) and await store.has("b", digest)
    await store.delete("b", digest)
    assert list(store.folder.iterdir()) == []


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "0" * 63, "A" * 64, "0" * 64, "x" * 9999])
async def test_a_wrong_id_is_not_found(store, digest):
    """An id that is none reaches no path and is not found."""
    with pytest.raises(ImageNotFound):
        await store.get("t", digest)


async def test_a_refusal_keeps_nothing_and_the_next_image_is_taken(store):
    """Refusals by type, damage, shape and size leave the folder empty."""
    for data in (b"", b"nothing", png()[:-30], png((2001, 10))):
        with pytest.raises(ImageRefused):
            await store.add("t", data)
    assert list(store.folder.iterdir()) == []
    assert (await store.add("t", png())).tokens == 4


async def test_a_text_model_refuses_images(tmp_path):
    """Without an image rule every upload is refused by name."""
    store = ImageStore(tmp_path / "i", None)
    with pytest.raises(ImageRefused) as refused:
        await store.add("t", png())
    assert refused.value.code == "images_unsupported"
    store.close()


async def test_images_outlive_the_store_and_leftovers_of_a_killed_writer_are_swept(store):
    """Another store on the folder sees the image; unfinished files are gone, and files without a sidecar are no image."""
    record = await store.add("t", png())
    other = "0" * 64
    (store.folder / f"{other}.png").write_bytes(b"half")
    (store.folder / f"{other}.json.tmp").write_bytes(b"{")
    again = ImageStore(store.folder, QWEN)
    assert await again.get("t", record.digest) == record
    assert not await again.has("t", other)
    assert not list(store.folder.glob("*.tmp"))
    again.close()


async def test_a_failed_write_leaves_no_image(store, monkeypatch):
    """When the disk is full in mid-write the image does not exist, and a later upload makes it whole."""
    replace, calls = os.replace, []

    def failing(source, target):
        calls.append(target)
        if str(target).endswith(".orig"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(images.os, "replace", failing)
    with pytest.raises(OSError, match="No space"):
        await store.add("t", png())
    digest = calls[0].stem
    assert not await store.has("t", digest)
    monkeypatch.undo()
    assert (await store.add("t", png())).digest == digest
    assert await store.original("t", digest) == (png(), "image/png")


async def test_uploads_of_one_picture_at_once_are_all_kept(store):
    """Twenty tenants upload the same picture at once; each sees it."""
    records = await asyncio.gather(*(store.add(f"t{i}", png()) for i in range(20)))
    assert len({r.digest for r in records}) == 1
    assert all([await store.has(f"t{i}", records[0].digest) for i in range(20)])


async def test_decoded_bytes_in_flight_stay_under_the_cap(tmp_path):
    """Many large uploads at once: the peak stays under the cap, what does not fit in line is told busy, a retry works."""
    store = ImageStore(tmp_path / "i", QWEN, workers=4, decoding_bytes=2 * 896 * 896 * 4, max_waiting=5)
    uploads = [png((896, 896), (i, 0, 0)) for i in range(30)]
    results = await asyncio.gather(*(store.add("t", data) for data in uploads), return_exceptions=True)
    busy = [r for r in results if isinstance(r, BaseException)]
    assert all(isinstance(r, ImagesBusy) for r in busy) and 0 < len(busy) <= 23
    assert 0 < store.gate.peak_bytes <= store.gate.capacity_bytes and store.gate.used_bytes == 0
    for data, result in zip(uploads, results, strict=True):
        if isinstance(result, ImagesBusy):
            assert (await store.add("t", data)).tokens == 1024
    store.close()


async def test_a_cancelled_upload_counts_until_its_thread_is_done(store, monkeypatch):
    """Cancelling an upload in mid-decode frees its bytes only when the decoding thread has ended."""
    started, go = threading.Event(), threading.Event()
    real = images.decode

    def slow(*arguments):
        started.set()
        assert go.wait(10)
        return real(*arguments)

    monkeypatch.setattr(images, "decode", slow)
    task = asyncio.create_task(store.add("t", png()))
    await asyncio.to_thread(started.wait, 10)
    task.cancel()
    await settle()
    assert store.gate.used_bytes == 56 * 56 * 4 and not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.gate.used_bytes == 0


async def test_the_folder_is_private(store):
    """Other users of the machine cannot list it."""
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


async def test_large_random_files_end_in_refusals_while_others_are_served(store):
    """Six megabytes of noise under a PNG signature is refused; a good image beside it is taken."""
    noise = b"\x89PNG\r\n\x1a\n" + random.Random(1).randbytes(6_000_000)
    bad, good = await asyncio.gather(store.add("t", noise), store.add("t", png()), return_exceptions=True)
    assert isinstance(bad, ImageRefused) and good.tokens == 4

"""Uploaded images: data URLs, the decoding pool, and the content-addressed folder that engine and server share.

An image's id is the sha256 of what the model sees, so the same picture is one file whatever format or label it came in. Files
of one image: `<id>.png` (what the model sees), `<id>.orig` (as uploaded), `<id>.json` (the sidecar; written last, so an image
exists when its sidecar does).
"""

import asyncio
import base64
import binascii
import json
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from .gate import ByteGate
from .pixels import Header, ImageRefused, ImageRules, decode, read_header
from .wire import FileObject

T = TypeVar("T")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DATA_URL = re.compile(r"data:([^,]*),", re.IGNORECASE)
_SPACE = {ord(c): None for c in " \t\r\n"}
DECODED_PIXEL_BYTES = 4
"""What Pillow holds for a pixel."""


class ImageNotFound(Exception):
    """No such image for this tenant; another tenant's looks the same."""

    code = "file_not_found"
    param: str | None = None


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """An accepted image, priced for the model in use."""

    digest: str
    width: int
    height: int
    """As the model is given it, upright, before the model's own resize."""
    grid: tuple[int, int, int]
    tokens: int
    bytes: int
    """Of the upload."""
    media_type: str
    """Of the upload, by its bytes."""
    notes: tuple[str, ...] = ()

    def to_file(self) -> FileObject:
        return FileObject(id=self.digest, width=self.width, height=self.height, tokens=self.tokens, bytes=self.bytes,
                          media_type=self.media_type, notes=self.notes)


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What the folder keeps about an image besides its pixels."""

    width: int
    height: int
    bytes: int
    media_type: str
    notes: tuple[str, ...]
    tenants: tuple[str, ...]
    """Those who uploaded it; nobody else sees it."""


@dataclass(frozen=True, slots=True)
class Upload:
    """An image that was looked at from outside only."""

    data: bytes
    header: Header
    tokens: int
    """Its price. Rotation does not change it."""


def parse_data_url(url: str, max_bytes: int) -> bytes:
    """The bytes of a base64 data URL. The label in it is ignored: the bytes decide.

    Also accepted: line breaks, the URL-safe alphabet, missing padding, further parameters, base64 without the "data:" part.
    Raises ImageRefused.
    """
    head = _DATA_URL.match(url)
    if head:
        if head[1].rpartition(";")[2].strip().lower() != "base64":
            raise ImageRefused("image_url_invalid", "a data URL must say ;base64")
    elif ":" in url[:64]:
        raise ImageRefused("image_url_unsupported", "images come as data: URLs or as uploaded files; the server fetches nothing")
    body = url[head.end() if head else 0:]
    if len(body) // 2 > max_bytes:                          # even with line breaks: decoding it could only end in a refusal
        raise ImageRefused("image_too_many_bytes", f"the image has about {len(body) * 3 // 4} bytes; the most is {max_bytes}",
                           max_bytes, len(body) * 3 // 4)
    if "%" in body[-9:] or "%" in body[:200]:
        body = re.sub("%(2b|2f|3d|0d|0a)", lambda found: chr(int(found[1], 16)), body, flags=re.IGNORECASE)
    body = body.translate(_SPACE).rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(body + "=" * (-len(body) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageRefused("image_url_invalid", "the image is not valid base64") from error


class ImageStore:
    """The image folder. Safe for concurrent use on one event loop; one process owns the folder."""

    def __init__(self, folder: Path, rules: ImageRules | None, *, workers: int = 2, max_bytes: int = 12 << 20,
                 max_pixels: int = 50_000_000, decoding_bytes: int = 256 << 20, max_waiting: int = 64) -> None:
        """`rules`: the model's; None for a text model, which refuses every image."""
        self.folder, self.rules, self.max_bytes, self.max_pixels = folder, rules, max_bytes, max_pixels
        self.gate = ByteGate(decoding_bytes, max_waiting)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="images")
        self._write = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in folder.glob("*.tmp"):                   # of a writer that was killed
            left.unlink()

    async def look_url(self, url: str) -> Upload:
        """As `look`, at the image in a data URL."""
        return await self._in_pool(lambda: self._price(parse_data_url(url, self.max_bytes)))

    async def look(self, data: bytes) -> Upload:
        """Check and price an image by its header; nothing is decoded or kept. Raises ImageRefused."""
        return await self._in_pool(lambda: self._price(data))

    async def keep(self, tenant_id: str, upload: Upload) -> ImageRecord:
        """Decode, normalise and keep an image. Durable when it returns. Raises ImageRefused, ImagesBusy."""
        header = upload.header
        async with self.gate.hold(header.width * header.height * DECODED_PIXEL_BYTES):
            return await self._in_pool(lambda: self._keep(tenant_id, upload.data, header))

    async def add(self, tenant_id: str, data: bytes) -> ImageRecord:
        """`look`, then `keep`."""
        return await self.keep(tenant_id, await self.look(data))

    async def get(self, tenant_id: str, digest: str) -> ImageRecord:
        """Raises ImageNotFound."""
        return await self._in_pool(lambda: self._record(digest, self._visible(tenant_id, digest)))

    async def has(self, tenant_id: str, digest: str) -> bool:
        try:
            await self.get(tenant_id, digest)
        except ImageNotFound:
            return False
        return True

    async def original(self, tenant_id: str, digest: str) -> tuple[bytes, str]:
        """The uploaded bytes and their media type. Raises ImageNotFound."""
        def read() -> tuple[bytes, str]:
            sidecar = self._visible(tenant_id, digest)
            return (self.folder / f"{digest}.orig").read_bytes(), sidecar.media_type
        return await self._in_pool(read)

    async def delete(self, tenant_id: str, digest: str) -> None:
        """The tenant no longer sees it; the last tenant's delete removes the files. Unknown ids are ignored."""
        def remove() -> None:
            with self._write:
                try:
                    sidecar = self._visible(tenant_id, digest)
                except ImageNotFound:
                    return
                left = tuple(tenant for tenant in sidecar.tenants if tenant != tenant_id)
                if left:
                    self._write_sidecar(digest, replace(sidecar, tenants=left))
                    return
                for suffix in ("json", "png", "orig"):      # the sidecar first: without it there is no image
                    (self.folder / f"{digest}.{suffix}").unlink(missing_ok=True)
        await self._in_pool(remove)

    def path(self, digest: str) -> Path:
        """The PNG that the engine reads."""
        return self.folder / f"{digest}.png"

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def _in_pool(self, work: Callable[[], T]) -> T:
        """A cancelled caller waits for its work: a thread cannot be stopped, and what it holds is counted until it ends."""
        job = self._pool.submit(work)
        future = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not job.cancel():
                await asyncio.wait([future])
                if not future.cancelled():
                    future.exception()                      # looked at, so that asyncio does not report it as lost
            raise

    # ---- in a worker thread -----------------------------------------------------------------------------------
    def _price(self, data: bytes) -> Upload:
        header = read_header(data, self.max_bytes, self.max_pixels)
        return Upload(data, header, self._rules().tokens(header.width, header.height))

    def _rules(self) -> ImageRules:
        if self.rules is None:
            raise ImageRefused("images_unsupported", "this model takes no images")
        return self.rules

    def _keep(self, tenant_id: str, data: bytes, header: Header) -> ImageRecord:
        picture = decode(data, self.max_bytes, self.max_pixels)
        with self._write:
            known = self._sidecar(picture.digest)
            if known is None:
                self._write_file(f"{picture.digest}.png", lambda file: picture.image.save(file, "PNG", compress_level=1))
                self._write_file(f"{picture.digest}.orig", lambda file: file.write(data))
            sidecar = known or Sidecar(picture.image.width, picture.image.height, len(data), header.media_type, picture.notes, ())
            if tenant_id not in sidecar.tenants:
                sidecar = replace(sidecar, tenants=(*sidecar.tenants, tenant_id))
                self._write_sidecar(picture.digest, sidecar)
        return self._record(picture.digest, sidecar)

    def _record(self, digest: str, sidecar: Sidecar) -> ImageRecord:
        rules = self._rules()
        return ImageRecord(digest=digest, width=sidecar.width, height=sidecar.height, grid=rules.grid(sidecar.width, sidecar.height),
                           tokens=rules.tokens(sidecar.width, sidecar.height), bytes=sidecar.bytes,
                           media_type=sidecar.media_type, notes=sidecar.notes)

    def _sidecar(self, digest: str) -> Sidecar | None:
        try:
            raw = json.loads((self.folder / f"{digest}.json").read_bytes())
        except FileNotFoundError:
            return None
        return Sidecar(raw["width"], raw["height"], raw["bytes"], raw["media_type"], tuple(raw["notes"]), tuple(raw["tenants"]))

    def _visible(self, tenant_id: str, digest: str) -> Sidecar:
        sidecar = self._sidecar(digest) if _DIGEST.fullmatch(digest) else None
        if sidecar is None or tenant_id not in sidecar.tenants:
            raise ImageNotFound(f"there is no file {digest[:64]}")
        return sidecar

    def _write_sidecar(self, digest: str, sidecar: Sidecar) -> None:
        self._write_file(f"{digest}.json", lambda file: file.write(json.dumps(asdict(sidecar)).encode()))

    def _write_file(self, name: str, write: Callable) -> None:
        """Whole or not at all, and on disk when it returns."""
        temporary = self.folder / f"{name}.tmp"
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / name)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

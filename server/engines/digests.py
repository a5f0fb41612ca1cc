"""What a receipt's digest names: this content under this fingerprint."""

import hashlib
from array import array

from .channel import Content


def content_digest(fingerprint: str, content: Content) -> str:
    """sha256 (hex, 32 digits) over fingerprint, salt, token ids and the images' digests with their places."""
    digest = hashlib.sha256(f"{fingerprint}\0{content.salt}\0".encode())
    digest.update(array("q", content.token_ids).tobytes())
    for image in content.images:
        digest.update(f"{image.start}:{image.digest}\0".encode())
    return digest.hexdigest()[:32]

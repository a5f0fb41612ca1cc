"""KV budgets and fingerprints."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.budget import Refusal, check, need
from kvstore.fingerprint import Fingerprint
from kvstore.geometry import Geometry, Tier

GEOMETRY = Geometry(page_tokens=16, token_bytes=100, device_tokens=4096)


@given(st.integers(0, 5000))
def test_need_is_whole_pages(tokens):
    """The device needs every page that is begun, the tiers below those that can be kept; never less below than can come back."""
    wanted = need(GEOMETRY, tokens)
    assert wanted[Tier.DEVICE] == -(-tokens // 16) * 1600
    assert wanted[Tier.HOST] == wanted[Tier.STORAGE] == max(0, tokens - 1) // 16 * 1600


def test_the_refusal_names_the_limit():
    """The first ceiling that is passed is named with its value and what was asked; at the ceiling it fits."""
    assert check(GEOMETRY, 33, {Tier.DEVICE: 4800, Tier.HOST: 3200, Tier.STORAGE: None}) is None
    assert check(GEOMETRY, 33, {Tier.DEVICE: 4799}) == Refusal("device_bytes", 4799, 4800)
    assert check(GEOMETRY, 33, {Tier.DEVICE: None, Tier.STORAGE: 3199}) == Refusal("storage_bytes", 3199, 3200)
    assert check(GEOMETRY, 10**6, {}) is None


FINGERPRINT = Fingerprint(model="m", weights_digest="w", kv_dtype="bf16", tensor_parallel=1, page_tokens=16,
                          tokenizer_digest="t", engine="sglang", engine_version="0.5.17")


def test_a_fingerprint_is_stable():
    """The same facts give the same 16 hex digits in every process and release: stored pages depend on it."""
    assert FINGERPRINT.hex() == replace(FINGERPRINT).hex() == "66723059ea41af4c"


@pytest.mark.parametrize("name", [f.name for f in fields(Fingerprint)])
def test_every_fact_counts(name):
    """A change of any one field is another fingerprint."""
    value = getattr(FINGERPRINT, name)
    other = replace(FINGERPRINT, **{name: value + 1 if isinstance(value, int) else value + "x"})
    assert other.hex() != FINGERPRINT.hex()

"""Admission: every ceiling refuses with its own number, and an answer's length is clamped only where the client set none."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvstore.geometry import Geometry, Tier
from server.admission import Admit, Refuse, TurnRefused, admit
from sessions.model import Limits, Totals

GEOMETRY = Geometry(page_tokens=16, token_bytes=100, device_tokens=4096)


def ask(limits=None, totals=None, reserved=None, *, prompt=100, added=50, output=None, default=256, images=0, geometry=GEOMETRY, context=2048):
    return admit(limits or Limits(), totals or Totals(), reserved or Totals(), prompt_tokens=prompt, added_tokens=added,
                 max_output_tokens=output, default_output_tokens=default, images_in_message=images, geometry=geometry, context_tokens=context)


def test_what_fits_is_admitted_with_its_bytes():
    """The default answer, and the KV of the whole sequence in whole pages: the lower tiers hold no last token and no part page."""
    assert ask() == Admit(256, {Tier.DEVICE: 368 * 100, Tier.HOST: 352 * 100, Tier.STORAGE: 352 * 100})
    assert ask(output=28).need_bytes == {Tier.DEVICE: 128 * 100, Tier.HOST: 112 * 100, Tier.STORAGE: 112 * 100}
    assert ask(geometry=None) == Admit(256, {})


@pytest.mark.parametrize(("answer", "name", "limit", "requested"), [
    (ask(Limits(max_turns=3), Totals(turns=3)), "max_turns", 3, 4),
    (ask(Limits(max_turns=3), Totals(turns=2), Totals(turns=1)), "max_turns", 3, 4),
    (ask(Limits(images_per_message=2), images=3), "images_per_message", 2, 3),
    (ask(Limits(tokens_per_turn=60), output=11), "tokens_per_turn", 60, 61),
    (ask(Limits(tokens_per_turn=50)), "tokens_per_turn", 50, 51),
    (ask(Limits(tokens_per_session=1000), Totals(tokens=900), Totals(tokens=40), output=11), "tokens_per_session", 1000, 1001),
    (ask(context=2048, prompt=2048), "context_tokens", 2048, 2049),
    (ask(context=2048, prompt=2000, output=49), "context_tokens", 2048, 2049),
    (ask(context=99999, prompt=4090, output=10), "device_tokens", 4064, 4100),
    (ask(context=99999, prompt=40_000), "device_tokens", 4064, 40_001),
    (ask(Limits(device_bytes=128 * 100), output=29), "device_bytes", 12_800, 14_400),
    (ask(Limits(host_bytes=112 * 100), output=29 + 16), "host_bytes", 11_200, 14_400),
    (ask(Limits(storage_bytes=112 * 100 - 1), output=28), "storage_bytes", 11_199, 11_200),
])
def test_each_ceiling_refuses_with_its_name_and_numbers(answer, name, limit, requested):
    """One step past each limit is refused with that limit's name, its value and what was asked."""
    assert isinstance(answer, Refuse)
    assert (answer.name, answer.limit, answer.requested) == (name, limit, requested)
    assert name in answer.message or str(limit) in answer.message
    assert str(TurnRefused(answer)) == answer.message


@pytest.mark.parametrize("answer", [
    ask(Limits(max_turns=3), Totals(turns=2)), ask(Limits(images_per_message=2), images=2), ask(Limits(tokens_per_turn=60), output=10),
    ask(Limits(tokens_per_session=1000), Totals(tokens=900), Totals(tokens=40), output=10), ask(prompt=2000, output=48),
    ask(context=99999, prompt=4058, output=6), ask(Limits(device_bytes=128 * 100), output=28), ask(Limits(host_bytes=112 * 100), output=28),
])
def test_exactly_the_limit_is_admitted(answer):
    """The neighbour of each refusal above, one step less, runs."""
    assert isinstance(answer, Admit)


@pytest.mark.parametrize(("kwargs", "output"), [
    ({"prompt": 2000}, 48), ({"prompt": 2047}, 1), ({"limits": Limits(tokens_per_turn=60)}, 10), ({"context": 99999, "prompt": 4000}, 64),
    ({"limits": Limits(tokens_per_session=1000), "totals": Totals(tokens=900)}, 50), ({"limits": Limits(device_bytes=12_800)}, 28),
    ({"limits": Limits(host_bytes=11_200)}, 28), ({"default": 7}, 7),
])
def test_an_unset_length_is_clamped_to_what_is_left(kwargs, output):
    """Where the client asks for no length, the default shrinks to the tightest limit, never below one token."""
    answer = ask(**kwargs)
    assert isinstance(answer, Admit) and answer.max_output_tokens == output
    assert ask(**kwargs, output=output) == answer


ceilings = st.none() | st.integers(1, 5000)


@given(st.builds(Limits, max_turns=st.none() | st.integers(1, 5), tokens_per_session=ceilings, tokens_per_turn=ceilings,
                 images_per_message=st.none() | st.integers(0, 3), device_bytes=st.none() | st.integers(1, 500_000),
                 host_bytes=st.none() | st.integers(1, 500_000), storage_bytes=st.none() | st.integers(1, 500_000)),
       st.builds(Totals, turns=st.integers(0, 6), tokens=st.integers(0, 4000), images=st.just(0)), st.integers(1, 3000), st.integers(1, 400),
       st.integers(0, 4))
def test_the_clamp_is_the_longest_answer_that_is_accepted(limits, totals, history, added, images):
    """For any limits: the clamped length is accepted when asked for, the next longer is refused (or the default was reached),
    and where the clamp refuses, so does every length."""
    kwargs = {"limits": limits, "totals": totals, "prompt": history + added, "added": added, "images": images}
    answer = ask(**kwargs)
    if isinstance(answer, Refuse):
        assert answer.requested > answer.limit
        assert isinstance(ask(**kwargs, output=1), Refuse)
        return
    length = answer.max_output_tokens
    assert 1 <= length <= 256
    assert ask(**kwargs, output=length) == answer
    assume(length < 256)
    assert isinstance(ask(**kwargs, output=length + 1), Refuse)

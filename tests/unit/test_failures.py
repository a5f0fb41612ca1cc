"""The table of failures: what clients are told, and that nothing is missing from it."""

import dataclasses
import inspect

import pytest

import sessions.errors
from server import admission, auth, codec, failures, gate, images, pixels, preparing, prompt, run, wire
from server.engines import base
from server.failures import FAILURES, STATUS, close_code, error_object, http_status, status


@pytest.mark.parametrize(("error", "told", "http", "close"), [
    (sessions.errors.LimitExceeded("max_turns", 50, 51),
     ("limit_exceeded", "max_turns_reached", "max_turns", 50, 51, False), 422, None),
    (sessions.errors.LimitExceeded("tokens_per_session", 10, 12),
     ("limit_exceeded", "tokens_per_session_exceeded", "tokens_per_session", 10, 12, False), 422, None),
    (admission.TurnRefused(admission.Refuse("context_tokens", 8192, 9000, "too long")),
     ("limit_exceeded", "context_tokens_exceeded", "context_tokens", 8192, 9000, False), 422, None),
    (sessions.errors.InvalidLimit("max_turns", 0, 1), ("invalid_request", "invalid_limit", "max_turns", 1, 0, False), 400, None),
    (sessions.errors.SessionNotFound("s"), ("not_found", "session_not_found", None, None, None, False), 404, None),
    (preparing.PreviousNotFound("r"), ("not_found", "previous_response_not_found", None, None, None, False), 404, None),
    (sessions.errors.TurnInFlight("busy"), ("conflict", "response_already_in_flight", None, None, None, True), 409, None),
    (sessions.errors.StoreUnavailable("x"), ("server", "store_unavailable", None, None, None, True), 503, None),
    (codec.BadFrame("unknown_field", "there is no field x", "x", "c1"), ("invalid_request", "unknown_field", "x", None, None, False), 400, None),
    (codec.BadUtf8("invalid_utf8", "no"), ("invalid_request", "invalid_utf8", None, None, None, False), 400, 1007),
    (pixels.ImageRefused("image_too_many_pixels", "big", 50, 60), ("invalid_request", "image_too_many_pixels", None, 50, 60, False), 413, None),
    (pixels.ImageRefused("image_unreadable", "cut"), ("invalid_request", "image_unreadable", None, None, None, False), 400, None),
    (gate.ImagesBusy("busy"), ("overloaded", "images_busy", None, None, None, True), 503, None),
    (images.ImageNotFound("x"), ("not_found", "file_not_found", None, None, None, False), 404, None),
    (auth.AuthError("no"), ("authentication", "unauthenticated", None, None, None, False), 401, 4500),
    (auth.Forbidden("no"), ("authentication", "forbidden", None, None, None, False), 403, None),
    (auth.OriginRefused("no"), ("authentication", "origin_refused", None, None, None, False), 403, 1008),
    (base.EngineUnavailable("starting"), ("engine", "engine_unavailable", None, None, None, True), 503, None),
    (run.EngineFailure("engine_died", "gone", True), ("engine", "engine_died", None, None, None, True), 503, None),
    (run.EngineFailure("mm_missing", "gone", False), ("engine", "mm_missing", None, None, None, False), 503, None),
    (prompt.PromptRefused("images_unsupported", "no"), ("invalid_request", "images_unsupported", None, None, None, False), 400, None),
])
def test_what_a_client_is_told(error, told, http, close):
    """Type, code, field, numbers, retryable, HTTP status and close code of each kind of failure."""
    out = error_object(error)
    assert (out.type, out.code, out.param, out.limit, out.requested, out.retryable) == told
    assert (status(error), close_code(error)) == (http, close) and http_status(out) == http
    assert out.message and (out.retry_after_ms is not None) == out.retryable


@pytest.mark.parametrize("error", [RuntimeError("secret path /root"), KeyError("token"), OSError(28, "disk"), MemoryError(), AssertionError()])
def test_an_unknown_failure_tells_nothing(error):
    """What is not in the table is internal_error, without the exception's text."""
    out = error_object(error)
    assert (out.type, out.code, out.retryable, status(error), close_code(error)) == ("server", "internal_error", False, 500, None)
    assert "secret" not in out.message and "disk" not in out.message


def test_every_error_that_a_client_can_meet_is_in_the_table():
    """Each exception class of these modules is listed, or has a listed ancestor; those left out are the server's own faults."""
    own_faults = {"SessionError", "BrokenTree", "SchemaTooNew"}
    missing = {
        kind.__name__ for module in (sessions.errors, base, codec, pixels, images, prompt, auth, admission, preparing, run)
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == module.__name__
        and not any(ancestor in FAILURES for ancestor in kind.__mro__)}
    assert missing == own_faults


def test_types_and_statuses_are_those_of_the_protocol():
    """Every type of the table has a status and is one that ErrorObject documents; every limit has a code."""
    documented = wire.ErrorObject.__doc__
    for failure in FAILURES.values():
        assert failure.type in STATUS and failure.type in documented
    names = [field.name for field in dataclasses.fields(sessions.model.Limits)]
    assert len({failures.limit_code(name) for name in names}) == len(names)

"""Every error of this package.

SessionError
├── SessionNotFound      no such session for this owner (another owner's looks the same)
├── TurnNotFound
├── IllegalEvent         a lifecycle table has no such transition; nothing was changed
├── TurnInFlight         the branch already runs a turn
├── LimitExceeded        a limit would be passed; carries its name, its value and what was asked
├── InvalidLimit         a ceiling below the least that means anything
├── Duplicate            the idempotency key was used; carries the turn it belongs to
├── Conflict             the stored state is not what the writer expected (another writer was first)
├── BrokenTree           turns that contradict each other: a missing parent, a wrong index, an image outside its turn
├── SchemaTooNew         the database was written by a later release; it was not touched
└── StoreUnavailable     the database did not answer (locked, disk full); nothing was written
"""


class SessionError(Exception):
    code = "session_error"
    retryable = False


class SessionNotFound(SessionError):
    code = "session_not_found"


class TurnNotFound(SessionError):
    code = "turn_not_found"


class IllegalEvent(SessionError):
    code = "illegal_event"


class TurnInFlight(SessionError):
    code = "response_already_in_flight"
    retryable = True


class LimitExceeded(SessionError):
    """`limit` is the value in force, `requested` what the refused step would have made of it, in the limit's unit."""

    def __init__(self, name: str, limit: int, requested: int) -> None:
        super().__init__(f"{name} is {limit}, and this asks for {requested}")
        self.name, self.limit, self.requested = name, limit, requested

    code = "limit_exceeded"


class InvalidLimit(SessionError):
    def __init__(self, name: str, value: int, least: int) -> None:
        super().__init__(f"{name} is {value}, the least is {least}")
        self.name, self.value, self.least = name, value, least

    code = "invalid_limit"


class Duplicate(SessionError):
    def __init__(self, turn_id: str) -> None:
        super().__init__(f"the idempotency key belongs to {turn_id}")
        self.turn_id = turn_id

    code = "duplicate"


class Conflict(SessionError):
    code = "conflict"
    retryable = True


class BrokenTree(SessionError):
    code = "broken_tree"


class SchemaTooNew(SessionError):
    code = "schema_too_new"


class StoreUnavailable(SessionError):
    code = "store_unavailable"
    retryable = True

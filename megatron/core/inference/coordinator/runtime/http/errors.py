"""Errors as OpenAI's API words them, and the reading of those that megatron-core's endpoints give.

Pure: the endpoints' texts and the failures of a request's futures come in, an `ApiError` goes out.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

STATUS_OF_CODE = {"overloaded": 429, "no_replica": 503, "replica_lost": 503, "fleet_paused": 503}
"""HTTP status of an inference error's `code`; for others `retryable` decides: 503 or 500."""

RETRY_AFTER_S = 1
"""What `Retry-After` says with 429 and 503, in seconds. One, because each answer frees a place, and
a fleet at its bound gives many a second; a new replica takes longer, but nobody here knows how
long. OpenAI's clients wait longer by themselves when they are refused again."""

CONTEXT_EXCEEDED = "This model's maximum context length was exceeded."
"""How every answer to an over-long prompt begins; RL clients look for this sentence."""

_BAD_REQUEST = "invalid_request_error"
_SERVER = "server_error"
_RATE_LIMIT = "rate_limit_error"

# Names of the engine's errors that say "this request can never fit".
_OVERFLOWS = ("MaxSequenceLengthOverflowError", "TokenOverflowError", "BlockOverflowError")

# What the endpoints answer with status 500 although the request is at fault.
_PROMPT_TROUBLE = {"Error tokenizing prompt": "prompt", "Error processing 'messages'": "messages"}

_CODE_OF_STATUS = {
    401: "invalid_api_key",
    404: "unknown_url",
    405: "method_not_supported",
    408: "request_timeout",
    413: "request_too_large",
    431: "headers_too_large",
}
_TEXT_OF_STATUS = {
    401: "This server asks for an API key; send one of its keys as 'Authorization: Bearer <key>'.",
    404: "There is nothing at {method} {path}; this server has /v1/chat/completions, "
    "/v1/completions, /v1/models and /v1/health.",
    405: "{path} does not take {method} requests.",
    408: "The request did not come in time.",
    413: "The request body is larger than this server accepts (--http-max-body-mib).",
    431: "The request's headers are larger than this server accepts.",
}
_HEADERS_OF_STATUS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": str(RETRY_AFTER_S)},
    503: {"Retry-After": str(RETRY_AFTER_S)},
}
_UNREAD = frozenset({401, 403, 408, 413, 415})
"""Statuses of answers to a request whose body is not, or not wholly, read: the connection cannot be
used again."""


class ApiError(Exception):
    """A request that gets an error instead of an answer.

    Attributes:
        status: HTTP status.
        message: Whose fault it is, and what to do.
        type: OpenAI's class of error.
        param: The field at fault, where there is one.
        code: What a program can tell errors apart by.
        unread: Whether the request's body is left unread, so that the connection has to end.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        unread: bool = False,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = _type_of(status)
        self.param = param
        self.code = code
        self.unread = unread or status in _UNREAD

    def __reduce__(self) -> tuple[Callable[..., "ApiError"], tuple[int, str]]:
        make = partial(ApiError, param=self.param, code=self.code, unread=self.unread)
        return make, (self.status, self.message)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to the error: what to send, when to try again."""
        closing = {"Connection": "close"} if self.unread else {}
        return _HEADERS_OF_STATUS.get(self.status, {}) | closing


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """The error of a request with a wrong field."""
    return ApiError(400, message, param=param, code=code)


def of_status(status: int, method: str, path: str, reason: str = "") -> ApiError:
    """The error of a request that reached no endpoint, or none that could read it.

    Args:
        status: HTTP status, 400 or above.
        method: The request's method.
        path: Its path.
        reason: What to say where this module has no words for the status.
    """
    template = _TEXT_OF_STATUS.get(status)
    text = template.format(method=method, path=path) if template else reason
    code = _CODE_OF_STATUS.get(status, "bad_request" if status < 500 else "internal_error")
    return ApiError(status, text or "The request failed.", code=code)


def context_exceeded(tokens: int, most: int, param: str | None = None) -> ApiError:
    """The error of a prompt that no engine can take."""
    text = f"{CONTEXT_EXCEEDED} The prompt has {tokens} tokens; at most {most} fit. Shorten it."
    return ApiError(400, text, param=param, code="context_length_exceeded")


def internal() -> ApiError:
    """The error of a fault in this server."""
    return ApiError(
        500,
        "This server failed on the request; its log says why.",
        code="internal_error",
    )


def of_failure(failure: BaseException) -> ApiError:
    """The error of a request that the coordinator or an engine gave up.

    Args:
        failure: What the inference client raised; its `code` and `retryable` are used if it has
            them.
    """
    code = str(getattr(failure, "code", None) or "inference_error")
    unlisted = 503 if getattr(failure, "retryable", False) else 500
    message = str(failure) or type(failure).__name__
    return ApiError(STATUS_OF_CODE.get(code, unlisted), message, code=code)


def of_released(
    status: int, text: str, failures: Sequence[BaseException], refusals: Sequence[str] = ()
) -> ApiError:
    """The error behind a plain-text answer of megatron-core's endpoints.

    Args:
        status: The answer's HTTP status, 400 or above.
        text: Its body.
        failures: Exceptions of the request's futures, in order of submission.
        refusals: What engines said of what they refused, to be said in the body's stead.
    """
    if failures:
        return of_failure(failures[0])
    for beginning, param in _PROMPT_TROUBLE.items():
        if text.startswith(beginning):
            return invalid(param, text)
    if any(name in text for name in _OVERFLOWS):
        return _context_exceeded(text)
    if refusals:
        text = "; ".join(dict.fromkeys(refusals))
    return ApiError(status, text, code="inference_error" if status >= 500 else "invalid_value")


def _context_exceeded(text: str) -> ApiError:
    if CONTEXT_EXCEEDED not in text:
        text = f"{CONTEXT_EXCEEDED} Shorten the prompt or ask for fewer tokens. {text}"
    return ApiError(400, text, code="context_length_exceeded")


def _type_of(status: int) -> str:
    if status == 429:
        return _RATE_LIMIT
    return _SERVER if status >= 500 else _BAD_REQUEST

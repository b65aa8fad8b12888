"""What a client is told when its request is not answered, in OpenAI's error shape."""

from __future__ import annotations

from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """An answer other than the one asked for.

    Attributes:
        status: the HTTP status.
        message: one sentence for the client.
        param: the field of the request that is meant, dotted.
        code: a word for programs.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON object that every OpenAI client parses."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


class ClientLeftError(Exception):
    """The client closed its connection: there is nobody to answer."""


def shutting_down() -> ApiError:
    """The server ends; another instance, or this one restarted, may answer."""
    return ApiError(
        503,
        "The server is shutting down: send the request again in a moment.",
        code="shutting_down",
        headers={"Retry-After": "5"},
    )


def out_of_time(seconds: float) -> ApiError:
    """The request's time is over. The client must not repeat it unasked: it would take as long again."""
    return ApiError(
        408,
        f"The answer was not finished within this server's limit of {seconds:g} seconds: ask for fewer "
        "tokens, or send the request when the server is less busy.",
        code="request_timeout",
        headers={"x-should-retry": "false"},
    )

"""Refusals and failures that a client gets to see, and their JSON body."""

from __future__ import annotations

from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        status: HTTP status code.
        message: what is wrong and what to do; safe to show to the client.
        param: dotted path of the request field at fault, if one is.
        code: machine-readable cause in the OpenAI API's words, such as `model_not_found`.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error object of the OpenAI API, which is also a superset of SGLang's on `/generate`."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

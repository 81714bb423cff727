"""Where an OpenAI-compatible server is, and which of its models is meant: `URL#model`. Loads nothing."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from qvlopt.errors import UsageError

EXAMPLE = "give one such as http://localhost:8000/v1#model-name"


@dataclass(frozen=True)
class Address:
    """Where a server's API is: `http://host:8000/v1`, and the name of a model there ("" for none)."""

    scheme: str
    host: str
    port: int
    path: str
    model: str = ""

    @classmethod
    def parse(cls, target: str) -> Address:
        """`URL` or `URL#model`. Without a path it is /v1. Raises UsageError, without repeating what may be a secret."""
        try:
            parts = urlsplit(target)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"the server's URL is wrong: {error}", EXAMPLE) from error
        if parts.username is not None or parts.password is not None or parts.query:
            raise UsageError("a server's URL holds no user, password or query", "the key is read from QVLOPT_API_KEY only")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{target} is no server's URL", EXAMPLE)
        path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
        return cls(parts.scheme, parts.hostname, port or {"http": 80, "https": 443}[parts.scheme], path, parts.fragment)

    @property
    def url(self) -> str:
        """Without the model."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def is_this_machine(self) -> bool:
        """Whether what is sent there stays here: localhost, or an address of the loopback."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost" or self.host.endswith(".localhost")

    @property
    def told(self) -> str:
        """For a plan: who gets what."""
        return f"{self.url} is asked: " + ("on this machine" if self.is_this_machine else "pictures and questions leave this machine")

"""What the command line says of the server that a command talks to, and how it is run.

Read from flags only: the environment and the JSON file describe servers, and the same words mean
something else to these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.text.conversation import json_object
from control_plane.text.template_kwargs import read_template_kwargs
from hetero_infer.config import api_token
from hetero_infer.generation_config import GenerationConfig
from planes.errors import ConfigError
from planes.settings import as_in, setting
from planes.tls_files import ClientFiles, client_files

MAX_CONCURRENCY = 4096
MAX_TOKEN_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """A server that runs already, or none."""

    target: str | None = setting(
        None, help="server that runs already, unix:PATH or HOST:PORT; default: start both planes"
    )
    tls_ca: str | None = setting(None, help="PEM file of the server's authority: TLS to --target")
    tls_cert: str | None = setting(None, help="PEM file of the certificate the server is shown")
    tls_key: str | None = setting(None, help="PEM file of that certificate's private key")
    token_file: str | None = setting(
        None,
        help="file with the token the server is shown; default: what HETERO_API_TOKEN says",
    )

    @property
    def tls(self) -> ClientFiles | None:
        """TLS to the server; None: plaintext. Raises ConfigError for a part without the rest."""
        return client_files(self.tls_ca, self.tls_cert, self.tls_key)

    @property
    def token(self) -> str | None:
        """What the server is shown. Raises ConfigError for a file that cannot be read."""
        return api_token() if self.token_file is None else _first_line(self.token_file)

    @property
    def own_flags(self) -> list[str]:
        """What a control plane that is started for the command is told besides."""
        return []

    def validate(self) -> None:
        """Raise ConfigError for what means nothing together."""
        tls = self.tls
        if self.target is not None:
            return
        for name, value in (("tls_ca", tls), ("token_file", self.token_file)):
            if value is not None:
                raise ConfigError(
                    f"{name}: the planes started here are reached over a unix socket of this "
                    "user's; it means nothing without --target",
                    field=name,
                )


def _first_line(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            data = file.read(MAX_TOKEN_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"token_file: {name} cannot be read: {why}", field="token_file") from None
    token = data.partition(b"\n")[0].strip().decode(errors="replace")
    if not token:
        raise ConfigError(f"token_file: {name} has no token in its first line", field="token_file")
    return token


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings(TargetSettings):
    """What is said of a server that runs already, or of one's own."""

    chat_template: str | None = setting(
        None, help="file with the chat template to use instead of the model's (Jinja2)"
    )
    chat_template_kwargs: str | None = setting(
        None,
        help='variables of the chat template, such as {"enable_thinking": false}',
        read=read_template_kwargs,
        metavar="JSON",
    )

    @property
    def own_flags(self) -> list[str]:
        """What a control plane that is started for the command is told besides."""
        return [] if self.chat_template is None else [f"--chat-template={self.chat_template}"]

    @property
    def template_kwargs(self) -> Mapping[str, Any]:
        """Variables that every conversation is asked with."""
        return json_object(self.chat_template_kwargs or "")

    def validate(self) -> None:
        """Raise ConfigError for what means nothing together."""
        TargetSettings.validate(self)  # no bare super(): slots=True makes a new class
        if self.target is not None and self.chat_template is not None:
            raise ConfigError(
                "chat_template: means nothing with --target: that server has its own",
                field="chat_template",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings(ClientSettings):
    """`chat`."""

    system: str | None = setting(None, help="system message at the beginning of the conversation")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatGenerationConfig(GenerationConfig):
    """One answer of a chat: longer than one short text."""

    max_tokens: int = setting(512, help="tokens of one answer at most", minimum=1, maximum=1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedSettings(TargetSettings):
    """`embed`."""

    input: str | None = setting(None, help="the text; default: one text a line of --input-file")
    input_file: str | None = setting(None, help="file with one text a line; -, the default: stdin")
    dimensions: int | None = setting(
        None, help="numbers of each embedding, the first ones; default: all", minimum=1
    )
    normalize: bool = setting(True, help="bring embeddings to a length of 1")
    adapter: str | None = as_in(GenerationConfig, "adapter")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteSettings(ClientSettings):
    """`complete`."""

    input_file: str | None = setting(
        None, help='JSON Lines, each {"id"?, "prompt" or "messages", parameters…}; -: stdin'
    )
    output: str | None = setting(
        None, help="file that gets the results, and says which are there; default: stdout"
    )
    concurrency: int = setting(
        32, help="requests under way at once", minimum=1, maximum=MAX_CONCURRENCY
    )
    ordered: bool = setting(False, help="results in the order of the input, not of their ends")
    redo_changed: bool = setting(
        False, help="answer those anew whose prompt or parameters are not those --output answers"
    )

"""What the command line says of the server that a command talks to, and how it is run.

Read from flags only: the environment and the JSON file describe servers, and the same words mean
something else to these.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero_infer.config import GenerationConfig
from planes.errors import ConfigError
from planes.settings import setting
from planes.tls_files import ClientFiles, client_files

MAX_CONCURRENCY = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """A server that runs already, or what is said of one's own."""

    target: str | None = setting(
        None, help="server that runs already, unix:PATH or HOST:PORT; default: start both planes"
    )
    tls_ca: str | None = setting(None, help="PEM file of the server's authority: TLS to --target")
    tls_cert: str | None = setting(None, help="PEM file of the certificate the server is shown")
    tls_key: str | None = setting(None, help="PEM file of that certificate's private key")
    chat_template: str | None = setting(
        None, help="file with the chat template to use instead of the model's (Jinja2)"
    )

    @property
    def tls(self) -> ClientFiles | None:
        """TLS to the server; None: plaintext. Raises ConfigError for a part without the rest."""
        return client_files(self.tls_ca, self.tls_cert, self.tls_key)

    def validate(self) -> None:
        """Raise ConfigError for what means nothing together."""
        is_tls = self.tls is not None
        if self.target is None and is_tls:
            raise ConfigError(
                "tls_ca: the planes started here are reached over a unix socket; it means nothing "
                "without --target",
                field="tls_ca",
            )
        if self.target is not None and self.chat_template is not None:
            raise ConfigError(
                "chat_template: means nothing with --target: that server has its own",
                field="chat_template",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings(TargetSettings):
    """`chat`."""

    system: str | None = setting(None, help="system message at the beginning of the conversation")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatGenerationConfig(GenerationConfig):
    """One answer of a chat: longer than one short text."""

    max_tokens: int = setting(512, help="tokens of one answer at most", minimum=1, maximum=1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteSettings(TargetSettings):
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

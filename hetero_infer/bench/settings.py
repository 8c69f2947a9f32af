"""What the benchmarks can be told on the command line.

Declared like all settings, but read from flags only: the command that a result carries says
everything about its run except the engine's own settings, which are recorded beside it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from compute_plane.config import DTYPES, KV_CACHE_DTYPES
from hetero_infer.commands.target import TargetSettings
from planes.errors import ConfigError
from planes.settings import as_in, setting

MAX_COUNT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSettings:
    """Where a benchmark's results go, besides the table on stdout."""

    json: str | None = setting(None, help="write the result with all samples to this file")
    plot: str | None = setting(None, help="draw a PNG into this file")
    output: str | None = setting(None, help="directory for both: BENCHMARK.json, BENCHMARK.png")

    def validate(self) -> None:
        """Raise ConfigError for what only the benchmark itself can read; nothing here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings(OutputSettings):
    """What benchmarks over the public API have in common."""

    prompt_tokens: int = setting(128, help="tokens of a prompt", minimum=1, maximum=MAX_COUNT)
    output_tokens: int = setting(
        128, help="tokens each stream generates", minimum=1, maximum=MAX_COUNT
    )
    repeat: int = setting(3, help="runs; figures are medians", minimum=1, maximum=1000)
    seed: int = setting(0, help="of the drawn prompts and arrivals", minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings(StreamSettings):
    """What benchmarks have in common that any server can answer, not only one started for them."""

    target: str | None = as_in(TargetSettings, "target")
    tls_ca: str | None = as_in(TargetSettings, "tls_ca")
    tls_cert: str | None = as_in(TargetSettings, "tls_cert")
    tls_key: str | None = as_in(TargetSettings, "tls_key")
    token_file: str | None = as_in(TargetSettings, "token_file")

    @property
    def server(self) -> TargetSettings:
        """The server that runs already, or none."""
        names = [field.name for field in dataclasses.fields(TargetSettings)]
        return TargetSettings(**{name: getattr(self, name) for name in names})

    def validate(self) -> None:
        """Raise ConfigError for what means nothing together."""
        self.server.validate()


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSettings(LoadSettings):
    """`bench throughput`."""

    concurrency: str = setting("1,8,32", help="numbers of streams at once, one after the other")

    @property
    def levels(self) -> list[int]:
        """The numbers of streams."""
        return positive_integers(self.concurrency, field="concurrency")

    def validate(self) -> None:
        """Raise ConfigError for a list that is none, and for what means nothing together."""
        LoadSettings.validate(self)  # no bare super(): slots=True makes a new class
        _ = self.levels


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySettings(LoadSettings):
    """`bench latency`."""

    concurrency: str = setting("1,8", help="streams that follow each other at once (closed loop)")
    rate: float | None = setting(
        None, help="requests a second that arrive whatever runs, instead of --concurrency", above=0
    )
    requests: int = setting(
        16, help="requests of each level of concurrency, or at the rate", minimum=1,
        maximum=MAX_COUNT,
    )  # fmt: skip
    long_prompt: int = setting(1024, help="tokens of the long prompt", minimum=1, maximum=MAX_COUNT)

    @property
    def levels(self) -> list[int]:
        """The numbers of streams."""
        return positive_integers(self.concurrency, field="concurrency")

    def validate(self) -> None:
        """Raise ConfigError for a list that is none, and for what means nothing together."""
        LoadSettings.validate(self)  # no bare super(): slots=True makes a new class
        _ = self.levels


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourSettings(StreamSettings):
    """`bench neighbour`."""

    neighbours: int = setting(
        1, help="processes beside the planes that never rest", minimum=1, maximum=4096
    )

    def validate(self) -> None:
        """Raise ConfigError for a stream that has no rate."""
        if self.output_tokens < 2:
            raise ConfigError(
                f"output_tokens must be at least 2 to have a rate, got {self.output_tokens}",
                field="output_tokens",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSettings(OutputSettings):
    """`bench start`."""

    repeat: int = setting(
        5, help="starts of each kind; figures are medians", minimum=1, maximum=1000
    )
    cold: bool = setting(False, help="also once with an empty kernel cache: all is compiled anew")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings(StreamSettings):
    """`bench link`."""

    streams: int = setting(
        32, help="streams while the compute plane's idle time is taken", minimum=1, maximum=4096
    )
    many_streams: int = setting(
        256, help="streams while the engine loop's delays are taken", minimum=1, maximum=4096
    )
    contexts: str = setting("64,4096", help="tokens of context whose decode rows are weighed")

    @property
    def row_contexts(self) -> list[int]:
        """The contexts."""
        return positive_integers(self.contexts, field="contexts")

    def validate(self) -> None:
        """Raise ConfigError for a list that is none."""
        _ = self.row_contexts


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings(OutputSettings):
    """`bench memory`."""

    requests: int = setting(256, help="requests of the trace", minimum=1, maximum=MAX_COUNT)
    lengths: str = setting(
        "uniform",
        help="of the trace: between --shortest and --longest, or log-normal around the medians",
        choices=("uniform", "lognormal"),
    )
    shortest: int = setting(
        64, help="prompt and output tokens together, at least", minimum=2, maximum=MAX_COUNT
    )
    longest: int = setting(
        2048, help="prompt and output tokens together, at most", minimum=2, maximum=MAX_COUNT
    )
    pairs: float = setting(
        0.1, help="share of the uniform trace's requests that have two samples", minimum=0,
        maximum=1,
    )  # fmt: skip
    prompt_tokens: int = setting(
        256, help="median length of a prompt; of the streams, the length", minimum=1,
        maximum=MAX_COUNT,
    )  # fmt: skip
    output_tokens: int = setting(
        128, help="median length of an output; of the streams, the length", minimum=1,
        maximum=MAX_COUNT,
    )  # fmt: skip
    streams: int = setting(
        32, help="streams for the resident memory of both planes; 0: do not start any", minimum=0,
        maximum=4096,
    )  # fmt: skip
    seed: int = setting(0, help="of the drawn trace", minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessSettings(OutputSettings):
    """What benchmarks that run kernels in their own process have in common."""

    num_threads: int | None = setting(
        None, help="threads; default: the CPUs this process may use", minimum=1, maximum=4096
    )
    instruction_set: str = setting("auto", help="compile for this one of the processor's sets")
    kernel_cache: str | None = setting(
        None, help="directory for compiled kernels; default: below the user's cache directory"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings(InProcessSettings):
    """`bench kernels`."""

    only: str = setting("*", help="cases to run, as a pattern such as 'product*Q4_1*'")
    sizes: str = setting("1,4,16,64,256", help="MiB whose reading is measured")
    seconds: float = setting(0.2, help="time for each sample", above=0, maximum=60)
    repeat: int = setting(5, help="samples; figures are medians", minimum=1, maximum=1000)

    @property
    def read_sizes(self) -> list[int]:
        """Sizes in bytes."""
        return [size << 20 for size in positive_integers(self.sizes, field="sizes")]

    def validate(self) -> None:
        """Raise ConfigError for a list that is none."""
        _ = self.read_sizes


class FormatPair(NamedTuple):
    """What weights and what keys and values are kept in: values of the compute plane's settings."""

    dtype: str
    kv_dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}:{self.kv_dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracySettings(InProcessSettings):
    """`bench accuracy`."""

    model: str = setting(
        "default",
        help="default (the embedded model), a GGUF file, a Hugging Face directory or a hub id",
    )
    formats: str = setting(
        "auto:bfloat16,auto:int8,bfloat16:bfloat16",
        help="what is compared with float32: formats of weights and of keys and values",
    )
    text: str | None = setting(
        None, help="file of a text the model is to foretell, UTF-8; default: one that comes along"
    )
    piece_tokens: int = setting(
        2048, help="tokens of a piece at most, into which a longer text is cut", minimum=2,
        maximum=MAX_COUNT,
    )  # fmt: skip

    @property
    def pairs(self) -> list[FormatPair]:
        """The formats."""
        return format_pairs(self.formats, field="formats")

    def validate(self) -> None:
        """Raise ConfigError for formats that are none."""
        _ = self.pairs


def format_pairs(text: str, *, field: str) -> list[FormatPair]:
    """Read a list such as `auto:bfloat16,auto:int8`; what stands there twice is one.

    Raises ConfigError naming the field for anything else.
    """
    kv_dtypes = [name for name in KV_CACHE_DTYPES if name != "auto"]
    pairs: dict[FormatPair, None] = {}
    for part in text.split(","):
        dtype, _, kv_dtype = part.strip().partition(":")
        if dtype not in DTYPES or kv_dtype not in kv_dtypes:
            raise ConfigError(
                f"{field} must be WEIGHTS:KV with commas between them, WEIGHTS one of "
                f"{', '.join(DTYPES)}, KV one of {', '.join(kv_dtypes)}, got {text!r}",
                field=field,
            )
        pairs[FormatPair(dtype, kv_dtype)] = None
    return list(pairs)


def positive_integers(text: str, *, field: str) -> list[int]:
    """Read a list such as `1,8,32`. Raises ConfigError naming the field for anything else."""
    numbers = []
    for part in text.split(","):
        word = part.strip()
        if not (word.isascii() and word.isdigit() and 1 <= int(word) <= MAX_COUNT):
            raise ConfigError(
                f"{field} must be numbers from 1 to {MAX_COUNT} with commas between them, "
                f"got {text!r}",
                field=field,
            )
        numbers.append(int(word))
    return numbers

"""From a prompt and its parameters to a request the engine can take; the caller's faults end here.

Pure but for the drawn seed, and safe in any thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import secrets
from collections.abc import Mapping, Sequence

from control_plane.core.embedding import EMBEDDINGS, NOTHING_GENERATED, Embedding, Pooling
from control_plane.core.errors import ContextLengthError
from control_plane.core.generation_params import GenerationParams
from control_plane.core.limits import RequestLimits
from control_plane.core.request import Request
from control_plane.core.request_options import PLAIN, RequestOptions
from control_plane.core.token_masks import all_but
from control_plane.engine.plane import BEAMS, CONSTRAINTS, PROMPT_LOGPROBS, SAMPLES
from control_plane.text.bounds import max_text_bytes
from control_plane.text.tokenizer import MAX_BYTES_PER_TOKEN, Tokenizer
from planes.default_int import DefaultInt
from planes.errors import EngineError, ValidationError


class Admission:
    """Tokenizes, checks, draws the seed and numbers the requests of one engine.

    `vocab_size`: width of the model's logits; every token id is below it. `features`: of the
    compute plane, in the words of Describe; None: it does everything.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        features: frozenset[str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._features = features
        self._ids = itertools.count(1)
        self._alternatives: list[Admission] = []

    @property
    def max_model_len(self) -> int:
        """Prompt and completion tokens of one request."""
        return self._limits.max_model_len

    @property
    def max_text_bytes(self) -> int:
        """Bytes of a prompt that is worth tokenizing."""
        return max_text_bytes(self._limits.max_model_len)

    def check_text(self, text: str, field: str = "prompt") -> None:
        """Raise ValidationError for a text that is not worth tokenizing; `field`: its name."""
        if not text:
            raise ValidationError(f"the {field} must not be empty", field=field)
        limit = self.max_text_bytes
        # Characters first: a text of many has at least as many bytes, and need not be encoded.
        size = len(text) if len(text) > limit else len(text.encode(errors="surrogatepass"))
        if size > limit:
            raise ContextLengthError(
                f"the {field} has at least {size} bytes, at most {limit} are taken "
                f"({MAX_BYTES_PER_TOKEN} for each of the max_model_len "
                f"{self._limits.max_model_len} tokens)",
                field=field,
            )

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a checked text. Takes about 1 ms for 2 kB. Raises EngineError."""
        self.check_text(text)
        return self._tokenizer.encode(text)

    def make_request(
        self,
        token_ids: Sequence[int],
        params: GenerationParams,
        *,
        arrival_time: float,
        options: RequestOptions = PLAIN,
        continued: Sequence[int] = (),
    ) -> Request:
        """Check tokens and parameters and return a new request with its seed drawn.

        `arrival_time`: the engine's clock. `continued`: the first tokens of the answer, which are
        known. Raises ValidationError, and RequestNeverFitsError for
        what the block pool could not hold even alone.
        """
        params.validate()
        options.validate()
        if params.logit_bias:
            params = dataclasses.replace(params, logit_bias=self._check_bias(params.logit_bias))
        input_tokens = self._check_tokens(token_ids, params)
        params = self._with_length(params, len(input_tokens))
        output_tokens = self._check_continued(continued, params) if continued else []
        self._check_stop_tokens(params.stop_token_ids)
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(64))
        request = Request(
            id=next(self._ids),
            input_tokens=input_tokens,
            params=params,
            eos_token_ids=self._eos_token_ids,
            arrival_time=arrival_time,
            output_tokens=output_tokens,
            priority=options.priority,
            cache_salt=options.cache_salt,
            uses_cache=params.num_prompt_logprobs is None,
            name=options.name,
            adapter=options.adapter,
        )
        if params.min_tokens > len(output_tokens):
            request.open_tokens = self._open_tokens(request)
        return request

    def make_embedding_request(
        self,
        token_ids: Sequence[int],
        pooling: Pooling,
        *,
        arrival_time: float,
        options: RequestOptions = PLAIN,
    ) -> Request:
        """Check tokens and return a new request that ends with its prompt, and gives its embedding.

        A mean needs all tokens computed, whatever is cached. Raises as `make_request`.
        """
        options.validate()
        return Request(
            id=next(self._ids),
            input_tokens=self._check_tokens(token_ids, NOTHING_GENERATED, embeds=True),
            params=NOTHING_GENERATED,
            arrival_time=arrival_time,
            priority=options.priority,
            cache_salt=options.cache_salt,
            uses_cache=pooling is not Pooling.MEAN,
            name=options.name,
            embedding=Embedding(pooling),
            adapter=options.adapter,
        )

    def check_room(
        self, num_prompt_tokens: int, params: GenerationParams, *, embeds: bool = False
    ) -> None:
        """Raise ValidationError or RequestNeverFitsError for what could never be computed.

        A `max_tokens` that nobody gave needs room for one. `embeds`: an embedding is wanted.
        """
        max_tokens = 1 if isinstance(params.max_tokens, DefaultInt) else params.max_tokens
        refusals: list[tuple[int, EngineError]] = []
        for one in (self, *self._alternatives):
            limits = one._limits
            try:
                one._check_search(params)
                if embeds:
                    one._check_embeds()
                limits.check(num_prompt_tokens, max_tokens, params.beam_width or 1)
            except EngineError as error:
                refusals.append((limits.num_blocks * limits.block_size, error))
            else:
                return
        raise max(refusals, key=lambda refusal: refusal[0])[1]  # what the largest pool says

    def has_room(
        self, num_prompt_tokens: int, params: GenerationParams, *, embeds: bool = False
    ) -> bool:
        """Whether a request of that size could ever be computed."""
        try:
            self.check_room(num_prompt_tokens, params, embeds=embeds)
        except EngineError:
            return False
        return True

    def add_alternative(self, other: Admission) -> None:
        """Take in also what another compute plane of the same model has room for."""
        self._alternatives.append(other)

    def _with_length(self, params: GenerationParams, num_prompt_tokens: int) -> GenerationParams:
        """Return the parameters with a `max_tokens` for which there is room, if nobody gave one."""
        if not isinstance(params.max_tokens, DefaultInt):
            return params
        num_beams = params.beam_width or 1
        everybody = (self, *self._alternatives)
        room = max(one._limits.room(num_prompt_tokens, num_beams) for one in everybody)
        if params.min_tokens > room:
            raise ContextLengthError(
                f"min_tokens must be at most {room}, for which the context has room behind "
                f"{num_prompt_tokens} prompt tokens, got {params.min_tokens}",
                field="min_tokens",
            )
        wanted = max(int(params.max_tokens), params.min_tokens)
        return dataclasses.replace(params, max_tokens=min(wanted, room))

    def _check_embeds(self) -> None:
        """Refuse embeddings where the compute plane gives none."""
        if self._features is not None and EMBEDDINGS not in self._features:
            raise ValidationError(
                f"embeddings are not made by this compute plane, which lacks {EMBEDDINGS}",
                field="prompt",
            )

    def _check_search(self, params: GenerationParams) -> None:
        """Refuse samples and beams that the compute plane, or its slots, cannot have."""
        width, features = params.beam_width, self._features
        if width is not None:
            num_end_tokens = 0 if params.ignore_eos else len(self._eos_token_ids)
            self._limits.check_beams(width, num_end_tokens)
        if features is None:
            return
        if width is not None and not features >= BEAMS:
            raise ValidationError(
                f"beam_width must be unset for this compute plane, which lacks "
                f"{', '.join(sorted(BEAMS - features))}, got {width}",
                field="beam_width",
            )
        num_logprobs = params.num_prompt_logprobs
        if num_logprobs is not None and PROMPT_LOGPROBS not in features:
            raise ValidationError(
                f"num_prompt_logprobs must be unset for this compute plane, which lacks "
                f"{PROMPT_LOGPROBS}, got {num_logprobs}",
                field="num_prompt_logprobs",
            )
        form = params.structured_outputs
        if form is not None and CONSTRAINTS not in features:
            raise ValidationError(
                f"{form.name} must be unset for this compute plane, which lacks {CONSTRAINTS}",
                field=form.name,
            )
        if params.min_tokens > 0 and CONSTRAINTS not in features:
            raise ValidationError(
                f"min_tokens must be 0 for this compute plane, which lacks {CONSTRAINTS}, "
                f"got {params.min_tokens}",
                field="min_tokens",
            )
        if params.n > 1 and not features >= SAMPLES:
            raise ValidationError(
                f"n must be 1 for this compute plane, which lacks "
                f"{', '.join(sorted(SAMPLES - features))}, got {params.n}",
                field="n",
            )

    def _open_tokens(self, request: Request) -> bytes:
        """Return the tokens that do not end a sample; empty if there are no others."""
        ends = request.end_token_ids
        opens = all_but(ends, self._vocab_size)
        if not opens:
            raise ValidationError(
                f"min_tokens must be 0 where every token is an end, got "
                f"{request.params.min_tokens}",
                field="min_tokens",
            )
        return opens if ends else b""

    def _check_bias(self, logit_bias: Mapping[int, float]) -> dict[int, float]:
        """Return a copy, which nobody changes while the request runs."""
        for token_id in logit_bias:
            if token_id >= self._vocab_size:
                raise ValidationError(
                    f"logit_bias: token ids must be 0 to {self._vocab_size - 1}, got {token_id}",
                    field="logit_bias",
                )
        return dict(logit_bias)

    def _check_stop_tokens(self, token_ids: Sequence[int]) -> None:
        """Refuse stop tokens that the model cannot write."""
        if token_ids:
            self._check_ids(token_ids, "stop_token_ids")

    def _check_continued(self, token_ids: Sequence[int], params: GenerationParams) -> list[int]:
        """Return the known tokens of an answer as plain integers."""
        for name, is_wrong, value in (
            ("n", params.n > 1, params.n),
            ("beam_width", params.beam_width is not None, params.beam_width),
            ("seed", params.seed is None and params.temperature > 0, None),
        ):
            if is_wrong:
                wanted = "given" if name == "seed" else "1" if name == "n" else "unset"
                got = "" if value is None else f", got {value}"
                raise ValidationError(
                    f"{name} must be {wanted} for an answer that is continued{got}", field=name
                )
        if len(token_ids) > params.max_tokens:
            raise ValidationError(
                f"continued has {len(token_ids)} tokens, more than max_tokens "
                f"({params.max_tokens})",
                field="continued",
            )
        try:
            tokens = [int(operator.index(token)) for token in token_ids]
        except TypeError as error:
            raise ValidationError(
                f"continued must be a sequence of token ids: {error}", field="continued"
            ) from None
        self._check_ids(tokens, "continued")
        return tokens

    def _check_ids(self, tokens: Sequence[int], field: str) -> None:
        """Raise ValidationError for a token id out of range; there is at least one."""
        vocab_size = self._vocab_size
        if max(tokens) >= vocab_size or min(tokens) < 0:
            index, bad = next((i, t) for i, t in enumerate(tokens) if not 0 <= t < vocab_size)
            raise ValidationError(
                f"{field}: token ids must be 0 to {vocab_size - 1}, got {bad} at index {index}",
                field=field,
            )

    def _check_tokens(
        self, token_ids: Sequence[int], params: GenerationParams, *, embeds: bool = False
    ) -> list[int]:
        """Return the tokens as plain integers, whatever kind a caller or a tokenizer gives."""
        try:
            if isinstance(token_ids, bytes | bytearray | memoryview):
                raise TypeError("bytes are neither")
            # First: a mistake may have millions.
            self.check_room(len(token_ids), params, embeds=embeds)
            tokens = [int(operator.index(token)) for token in token_ids]
        except TypeError as error:
            raise ValidationError(
                f"the prompt must be text or a sequence of token ids: {error}", field="prompt"
            ) from None
        self._check_ids(tokens, "token_ids")
        return tokens

"""`/v1/embeddings` on the wire."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, Field, Tag

from control_plane.core.embedding_params import MAX_INPUTS, EmbeddingParams
from control_plane.core.request_options import MAX_PRIORITY, MAX_SALT_BYTES, RequestOptions
from control_plane.engine.embedding import MAX_TOKENS
from control_plane.http.prompt_schema import KINDS, Text, TokenIds, all_of, kind_of_prompt
from control_plane.http.wire import Wire, one_of

Input: TypeAlias = Annotated[
    Annotated[Text, Tag("~text")]
    | Annotated[
        list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS), Tag("~texts")
    ]
    | Annotated[TokenIds, Tag("~tokens")]
    | Annotated[
        list[TokenIds],
        Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS),
        Tag("~token_lists"),
    ],
    one_of(kind_of_prompt, KINDS),
]


class EmbeddingsRequest(Wire):
    """Texts, of each of which an embedding is made."""

    max_tokens_of_body: ClassVar[int] = MAX_TOKENS

    model: str
    input: Input = Field(description=f"at most {MAX_TOKENS} tokens together")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="default float; base64: of float32, little-endian"
    )
    dimensions: int | None = Field(
        None, ge=1, description="the first so many numbers; default: all of the model's"
    )
    normalize: bool | None = Field(None, description="to a length of 1; default true")
    priority: int | None = Field(
        None, ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY, description="lower ones are served first"
    )
    cache_salt: str | None = Field(
        None,
        description="share cached texts only with requests of the same salt; "
        f"at most {MAX_SALT_BYTES} bytes",
    )
    user: str | None = Field(None, description="taken, changes nothing")

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """Every text."""
        return all_of(self.input)

    @property
    def params(self) -> EmbeddingParams:
        """What is made of hidden states."""
        return EmbeddingParams(self.dimensions, normalize=self.normalize is not False)

    def options(self, name: str) -> RequestOptions:
        """Return what changes no number; `name`: what the request is called where it is listed."""
        return RequestOptions(
            priority=self.priority or 0, cache_salt=self.cache_salt or "", name=name
        )


class EmbeddingObject(BaseModel):
    """The embedding of one text: numbers, or the base64 of them as float32, little-endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Tokens of all texts; nothing is generated, so both are the same."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """The embeddings of all texts, in their order."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage

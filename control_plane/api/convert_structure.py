"""Between `StructuredOutputs` and its message; for server and client."""

from __future__ import annotations

from typing import Any

from control_plane.core.structured_outputs import FIELD, MAX_CHOICES, StructuredOutputs
from control_plane.core.tool_calls import ToolCalls
from planes.errors import ValidationError
from protos.hetero.inference.v1 import inference_pb2


def structure_from_proto(message: inference_pb2.StructuredOutputs) -> StructuredOutputs:
    """Return it. It is not checked yet, but for more choices than there may be."""
    kind = message.WhichOneof("kind")
    if kind is None:
        return StructuredOutputs()
    if kind != "choice":
        return StructuredOutputs(**{kind: getattr(message, kind)})
    texts = message.choice.texts
    if len(texts) > MAX_CHOICES:
        raise ValidationError(
            f"{FIELD}.choice must have at most {MAX_CHOICES} texts, got {len(texts)}",
            field=f"{FIELD}.choice",
        )
    return StructuredOutputs(choice=tuple(texts))


def structure_to_proto(
    structure: StructuredOutputs | ToolCalls | None,
) -> inference_pb2.StructuredOutputs | None:
    """Return the message; none for calls, which the request has as its `tool_choice`.

    Raises TypeError or ValueError for what no message can hold.
    """
    if structure is None or isinstance(structure, ToolCalls):
        return None
    structure.validate()
    kind = structure.kind
    value: Any = getattr(structure, kind)
    if kind == "choice":
        value = inference_pb2.Choice(texts=value)
    return inference_pb2.StructuredOutputs(**{kind: value})

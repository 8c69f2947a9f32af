"""The bridge from LLVM IR emitters to Numba: a function that emits code becomes one to call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

Emitter = Callable[..., Any]
"""(builder, *argument values) → the result's value, or None where the result is void."""


def emitted(result: types.Type, *arguments: types.Type) -> Callable[[Emitter], Any]:
    """Make an emitter callable from compiled code, with these Numba types.

    The arguments are cast to the declared types. One emitter may be bound several times, under
    several types.
    """

    def bind(emitter: Emitter) -> Any:  # noqa: ANN401 - Numba's objects are untyped
        signature = result(*arguments)

        def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:  # noqa: ANN401
            value = emitter(builder, *values)
            return context.get_dummy_value() if value is None else value

        def typed(*_: Any) -> Any:  # noqa: ANN401
            return signature, generate

        typed.__name__ = emitter.__name__
        typed.__doc__ = emitter.__doc__
        # Numba reads the number of parameters from the signature: the typing context, then ours.
        typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(f"p{i}", inspect.Parameter.POSITIONAL_OR_KEYWORD)
                for i in range(len(arguments) + 1)
            ]
        )
        return intrinsic(typed)

    return bind

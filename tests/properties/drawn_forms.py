"""Forms of answers, drawn: schemas, regular expressions, grammars and choices of every make."""

from __future__ import annotations

from random import Random

from control_plane.core.structured_outputs import StructuredOutputs

NAMES = ["name", "names", "name_of", "äöü", "kind of", "日本", 'a"b', "back\\slash", "true", "1"]
PARTS = ["a", "the ", "abc", "[a-z]", "[0-9]", "é", "日本", '[^"]', " ", "(no|not|note)", "ing"]
SYMBOLS = ['"a"', '"ab"', '"abc "', "/[a-z]+/", "/[0-9]{1,4}/", '", "', '"("', '")"', '/"[^"]*"/']


def form(draw: Random) -> StructuredOutputs:
    """One form; some allow no text, and some are more than the library takes."""
    match draw.randrange(6):
        case 0 | 1 | 2:
            return StructuredOutputs(json=schema(draw, 0))
        case 3:
            return StructuredOutputs(regex=expression(draw, 0))
        case 4:
            return StructuredOutputs(grammar=grammar(draw))
        case _:
            return StructuredOutputs(
                choice=tuple({name(draw) + name(draw) for _ in range(draw.randint(1, 5))})
            )


def name(draw: Random) -> str:
    return draw.choice(NAMES) + draw.choice(["", "", "2", "_b"])


def schema(draw: Random, depth: int) -> dict[str, object]:
    kind = draw.random()
    if depth > 2 or kind < 0.4:
        return draw.choice(
            [
                {"type": "string", "maxLength": draw.randint(1, 12)},
                {"type": "integer", "minimum": -draw.randrange(50), "maximum": draw.randrange(500)},
                {"type": "number", "minimum": 0, "maximum": draw.randint(1, 100)},
                {"enum": [name(draw), name(draw), draw.randrange(1000), None, [1, 2]]},
                {"const": {name(draw): [name(draw)]}},
                {"type": "string", "pattern": draw.choice(["^[a-z]{2,4}$", r"^\d{3}-\d{4}$"])},
                {"type": "string", "format": draw.choice(["date", "uuid", "ipv4"])},
                {"type": ["string", "null", "boolean"]},
                {},
            ]
        )
    if kind < 0.75:
        properties = {name(draw): schema(draw, depth + 1) for _ in range(draw.randrange(5))}
        required = [each for each in properties if draw.random() < 0.7]
        more = draw.choice([{}, {"additionalProperties": False}])
        return {"type": "object", "properties": properties, "required": required, **more}
    if kind < 0.9:
        return {"type": "array", "items": schema(draw, depth + 1), "maxItems": draw.randint(1, 9)}
    return {"anyOf": [schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]}


def expression(draw: Random, depth: int) -> str:
    kind = draw.randrange(8)
    if depth > 2 or kind < 3:
        return draw.choice(PARTS)
    inner = [expression(draw, depth + 1) for _ in range(draw.randint(2, 4))]
    if kind < 5:
        return "".join(inner)
    if kind == 5:
        return f"({'|'.join(inner)})"
    return f"({inner[0]}){draw.choice(['*', '+', '?', '{1,20}', '{7}'])}"


def grammar(draw: Random) -> str:
    num_rules = draw.randint(2, 5)

    def way() -> str:
        count = draw.randint(1, 4)
        names = [f"r{draw.randrange(num_rules)}" for _ in range(count)]
        return " ".join(draw.choice(SYMBOLS) if draw.random() < 0.7 else each for each in names)

    rules = [
        f"r{rule}: {' | '.join([way() for _ in range(draw.randint(1, 3))])} | {SYMBOLS[rule]}"
        for rule in range(num_rules)
    ]
    return "\n".join(['start: r0 "."', *rules])

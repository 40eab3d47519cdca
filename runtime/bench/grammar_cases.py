"""The constraints that grammars are benchmarked with, and random texts that satisfy them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: an e-mail address whose parts have bounds
EMAIL = r"[a-zA-Z0-9._%+-]{1,64}@[a-zA-Z0-9-]{1,63}(\.[a-zA-Z0-9-]{1,63}){0,2}\.[a-zA-Z]{2,24}"

_WORDS = (
    "amber", "basket", "candle", "dinner", "engine", "forest",
    "garden", "harbor", "island", "jacket", "kettle", "ladder",
)  # fmt: skip

FLAT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string"},
        "email": {"type": "string"},
        "score": {"type": "number"},
        "active": {"type": "boolean"},
        "level": {"enum": ["low", "medium", "high"]},
    },
    "required": ["id", "name", "email", "score", "active", "level"],
    "additionalProperties": False,
}

NESTED: dict[str, Any] = {
    "$defs": {
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "city": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "city", "zip"],
            "additionalProperties": False,
        },
        "contact": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"phone": {"type": "string", "pattern": "^[0-9]{3}-[0-9]{4}$"}},
                    "required": ["phone"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {"email": {"type": "string"}},
                    "required": ["email"],
                    "additionalProperties": False,
                },
            ]
        },
    },
    "type": "object",
    "properties": {
        "customer": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "address": {"$ref": "#/$defs/address"},
                "contact": {"$ref": "#/$defs/contact"},
            },
            "required": ["name", "address", "contact"],
            "additionalProperties": False,
        },
        "status": {"enum": ["new", "paid", "shipped", "returned"]},
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                    "price": {"type": "number"},
                },
                "required": ["sku", "quantity", "price"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["customer", "status", "items"],
    "additionalProperties": False,
}

FREE: dict[str, Any] = {"type": "object"}

LIMITS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 3, "maxLength": 120},
        "summary": {"type": "string", "maxLength": 400},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{6}$"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 8},
    },
    "required": ["title", "summary", "code", "tags"],
    "additionalProperties": False,
}


#: an object with a list and an object inside, its strings bounded
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string", "maxLength": 40},
        "tags": {
            "type": "array",
            "items": {"type": "string", "enum": ["a", "b", "c", "dd", "eee"]},
            "minItems": 2,
            "maxItems": 6,
        },
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 30},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"enum": ["US", "DE", "JP", "BR"]},
            },
            "required": ["street", "zip", "country"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}

_CODE = {"type": "string", "pattern": "^[0-9]{4}$"}
_INCIDENT: dict[str, Any] = {
    "severity_level": {"enum": ["critical", "moderate", "negligible"]},
    "affected_component": {"enum": ["database", "frontend", "load_balancer", "scheduler"]},
    "incident_number": _CODE,
    "reported_by_team": {"enum": ["infrastructure", "observability", "payments"]},
    "customer_reference": _CODE,
    "requires_immediate_attention": {"enum": ["yes", "no"]},
    "estimated_minutes_to_recovery": {"type": "integer", "minimum": 0, "maximum": 999},
    "escalation_policy": {"enum": ["none", "on_call_engineer", "whole_department"]},
}

#: mostly fixed text: eight keys, whose values are of an enumeration or digits
INCIDENT: dict[str, Any] = {
    "type": "object",
    "properties": _INCIDENT,
    "required": list(_INCIDENT),
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class JsonCase:
    """A schema, and what draws a value of it."""

    name: str
    schema: dict[str, Any]
    draw: Callable[[random.Random], Any]

    def text(self, rng: random.Random) -> str:
        """Return a random text that satisfies the schema."""
        return json.dumps(self.draw(rng), ensure_ascii=False)


def _phrase(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(low, high)))


def _flat(rng: random.Random) -> Any:
    return {
        "id": rng.randint(0, 99_999),
        "name": _phrase(rng, 1, 3).title(),
        "email": f"{rng.choice(_WORDS)}@{rng.choice(_WORDS)}.com",
        "score": round(rng.random() * 100, 2),
        "active": rng.random() < 0.5,
        "level": rng.choice(("low", "medium", "high")),
    }


def _nested(rng: random.Random) -> Any:
    phone = {"phone": f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"}
    return {
        "customer": {
            "name": _phrase(rng, 1, 2).title(),
            "address": {
                "street": f"{rng.randint(1, 200)} {_phrase(rng, 1, 2).title()}",
                "city": rng.choice(_WORDS).title(),
                "zip": f"{rng.randint(0, 99_999):05}",
            },
            "contact": rng.choice((phone, {"email": f"{rng.choice(_WORDS)}@example.org"})),
        },
        "status": rng.choice(("new", "paid", "shipped", "returned")),
        "items": [
            {
                "sku": f"ABC-{rng.randint(0, 9999):04}",
                "quantity": rng.randint(1, 99),
                "price": round(rng.random() * 50, 2),
            }
            for _ in range(rng.randint(1, 3))
        ],
    }


def _free(rng: random.Random, depth: int = 0) -> Any:
    if depth == 2 or (depth and rng.random() < 0.5):
        return rng.choice((_phrase(rng, 1, 5), rng.randint(0, 9999), True, None, 0.5))
    if rng.random() < 0.3 and depth:
        return [_free(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    return {word: _free(rng, depth + 1) for word in rng.sample(_WORDS, rng.randint(2, 5))}


def _limits(rng: random.Random) -> Any:
    return {
        "title": _phrase(rng, 2, 8),
        "summary": _phrase(rng, 10, 40),
        "code": f"XY{rng.randint(0, 999_999):06}",
        "tags": [rng.choice(_WORDS) for _ in range(rng.randint(0, 5))],
    }


JSON_CASES = (
    JsonCase("flat", FLAT, _flat),
    JsonCase("nested", NESTED, _nested),
    JsonCase("free", FREE, _free),
    JsonCase("limits", LIMITS, _limits),
)

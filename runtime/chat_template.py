"""Messages to text by a model's chat template, as transformers renders it.

Templates are code of strangers: they run in Jinja's sandbox, on copies of plain data, and change none of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

REASONING = ("reasoning_content", "thinking", "reasoning")  # what templates call it; the first is the usual one


class ChatTemplate:
    """A compiled template; `special_tokens` (`bos_token`, ...) are variables in it.

    Raises `jinja2.TemplateSyntaxError` for a template that does not parse.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # no class to go on from
            "namespace": _PlainNamespace,
        }
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text up to where the answer begins. Raises whatever the template raises."""
        given = {"messages": [_plain(message) for message in messages], "tools": None, "documents": None}
        return self._template.render(**self._special_tokens, **given, add_generation_prompt=True)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it is what it holds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """Names of Python's own are kept out of it."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace has no name {name!r}")


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without empty fields, in which reasoning has the names that templates look for.

    Raises `TypeError` for anything that JSON cannot say.
    """
    given = {name: value for name, value in json.loads(json.dumps(dict(message))).items() if value is not None}
    reasoning = next((given[name] for name in REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes what HTML would."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)

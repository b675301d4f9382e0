"""Guided answers: whatever is sampled under the masks matches the guide; bad and hostile guides hurt nobody else."""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from tokenizers_for_tests import byte_fallback, byte_level, kept, token_bytes

from hybridtrt.runtime.guided import Guide, Guides
from hybridtrt.runtime.text_stream import TextStream
from hybridtrt.runtime.tokenizer import Tokenizer

BACKENDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}
CLEANED_UP = {
    "clean_up_tokenization_spaces": True,
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
}
PADDING = 13  # tokens of the model that the tokenizer does not have
kinds = st.sampled_from(sorted(BACKENDS))
seeds = st.integers(0, 10_000)


@cache
def guides(kind: str = "byte_level") -> Guides:
    backend = BACKENDS[kind]()
    return Guides(tokenizer(kind), backend.get_vocab_size() + PADDING, [end_id(kind)])


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(kept(BACKENDS[kind]()))


@cache
def vocabulary(kind: str) -> dict[int, bytes]:
    backend = BACKENDS[kind]()
    return {token: token_bytes(backend, name) for name, token in backend.get_vocab().items()}


def end_id(kind: str) -> int:
    return int(BACKENDS[kind]().token_to_id("</s>"))


def allowed(guide: Guide) -> list[int]:
    return np.flatnonzero(np.unpackbits(guide.mask().view(np.uint8), bitorder="little")).tolist()


def sample(kind: str, guide: Guide, seed: int, limit: int = 200, eager: bool = True) -> tuple[str, bool]:
    """An answer of random allowed tokens, and whether it is complete. An eager one ends as soon as it may."""
    rng = random.Random(seed)
    prompt = BACKENDS[kind]().encode("it is").ids
    stream, text = TextStream(tokenizer(kind), prompt, ()), ""
    while not guide.finished and limit:
        tokens = allowed(guide)
        assert tokens
        if eager and end_id(kind) in tokens:
            return text + stream.finish()[0], True
        token = rng.choice([token for token in tokens if token != end_id(kind)])
        guide.accept(token)
        text += stream.push(token)[0]
        limit -= 1
    return text + stream.finish()[0], guide.finished


# An instance of each schema is small, so that a random answer comes to its end.
scalars: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 4)),
    st.builds(lambda low: {"type": "integer", "minimum": low, "maximum": low + 20}, st.integers(-30, 30)),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda v: {"enum": v}, st.lists(st.sampled_from(["a", "é😀", "the quick", 1, True]), min_size=1)),
)
schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.builds(
            lambda items, low: {"type": "array", "items": items, "minItems": low, "maxItems": low + 1},
            inner,
            st.integers(0, 2),
        ),
        st.builds(
            lambda fields, n: {
                "type": "object",
                "properties": fields,
                "required": sorted(fields)[:n],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "key", "日本"]), inner, max_size=2),
            st.integers(0, 2),
        ),
    ),
    max_leaves=4,
)


def conforms(value: object, schema: dict[str, Any]) -> bool:
    """JSON Schema's rules for the keywords above."""
    if "enum" in schema:
        return any(value == option and type(value) is type(option) for option in schema["enum"])
    match schema["type"]:
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(conforms(item, schema["items"]) for item in value)
            )
    fields = schema["properties"]
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= set(value) <= set(fields)
        and all(conforms(item, fields[name]) for name, item in value.items())
    )


@settings(max_examples=80, deadline=None)
@given(kind=kinds, schema=schemas, seed=seeds)
def test_an_answer_conforms_to_its_schema(kind: str, schema: dict[str, Any], seed: int) -> None:
    text, complete = sample(kind, guides(kind).compile("json_schema", json.dumps(schema)), seed)
    if complete:
        assert conforms(json.loads(text), schema)
    else:  # cut off by its length, mostly in spaces between the fields
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)


@pytest.mark.parametrize("kind", sorted(BACKENDS))
def test_json_is_any_object(kind: str) -> None:
    backend = BACKENDS[kind]()
    for text in ('{"a": [1, {"b": null}], "é😀": -1.5e3}', "{}"):
        guide = guides(kind).compile("json", "")
        prompt = len(backend.encode(":").ids)
        for token in backend.encode(":" + text).ids[prompt:]:
            assert not guide.finished
            assert token in allowed(guide)
            guide.accept(token)
        assert guide.finished
        assert allowed(guide) == [end_id(kind)]
    assert not set(backend.encode("[").ids[-1:]) & set(allowed(guides(kind).compile("json", "")))


pieces = st.one_of(
    st.sampled_from(["a", "b", "é", "😀", "the ", "[a-c]", "[^a]", ".", "[0-9]", r"\.", "日本", "/", '"', "(?:ab|a)"]),
)
expressions = st.recursive(
    st.lists(pieces, min_size=1, max_size=3).map("".join),
    lambda inner: st.one_of(
        st.builds("(?:{}){{{},3}}".format, inner, st.integers(0, 3)),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("{}(?:{})?".format, inner, inner),
    ),
    max_leaves=4,
)


@settings(max_examples=120, deadline=None)
@example(kind="byte_fallback", expression="(?:(?:a|éé(?:ab|a))|(?:éé(?:ab|a)|éé(?:ab|a)))", seed=0, eager=False)
@given(kind=kinds, expression=expressions, seed=seeds, eager=st.booleans())
def test_an_answer_matches_its_expression_as_a_whole(kind: str, expression: str, seed: int, eager: bool) -> None:
    guide, refused = None, ""
    try:
        guide = guides(kind).compile("regex", expression)
    except ValueError as error:
        refused = str(error)
    if guide is None:  # llguidance 1.9 panics at a few that repeat a part
        assert re.fullmatch(r"the guide of guide_type='regex' does not compile: panic: [^\n]*", refused)
        reject()
    text, complete = sample(kind, guide, seed, eager=eager)
    assert complete
    assert re.fullmatch(expression, text)


@settings(max_examples=60, deadline=None)
@given(
    kind=kinds,
    words=st.lists(st.text("ab é😀", min_size=1, max_size=4), min_size=1, max_size=5, unique=True),
    seed=seeds,
)
def test_masks_allow_what_leads_to_a_match_and_nothing_else(kind: str, words: list[str], seed: int) -> None:
    """Every word can be written. llguidance may ask for one certain tokenisation of it."""
    texts = vocabulary(kind)
    prefixes = {word.encode()[:end] for word in words for end in range(17)}
    for word in map(str.encode, words):
        guide = guides(kind).compile("regex", "|".join(map(re.escape, words)))
        written = b""
        while written != word:
            tokens = [token for token in allowed(guide) if token != end_id(kind)]
            assert prefixes.issuperset(written + texts[token] for token in tokens)
            assert (end_id(kind) in allowed(guide)) == (written.decode(errors="replace") in words)
            token = random.Random(seed).choice([token for token in tokens if word.startswith(written + texts[token])])
            guide.accept(token)
            written += texts[token]
        assert end_id(kind) in allowed(guide)
        assert guide.finished == (not any(w.encode().startswith(word) for w in words if w.encode() != word))


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "(" root ")" | [a-c]{1,2}', 'start: "(" start ")" | /[a-c]{1,2}/'],
    ids=["gbnf", "lark"],
)
@pytest.mark.parametrize("kind", sorted(BACKENDS))
def test_an_answer_is_of_its_grammar(kind: str, grammar: str) -> None:
    for seed in range(10):
        text, complete = sample(kind, guides(kind).compile("ebnf_grammar", grammar), seed)
        opened = text.count("(")
        assert complete
        assert text == "(" * opened + text.strip("()") + ")" * opened
        assert re.fullmatch("[a-c]{1,2}", text.strip("()"))


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100])
def test_masks_have_the_bits_of_the_model_and_none_beyond_the_tokenizer(size: int) -> None:
    known = byte_level().get_vocab_size()
    for vocab_size in (known + size, known - size):
        guide = Guides(tokenizer("byte_level"), vocab_size, [1]).compile("regex", "(?s:.*)")
        mask = guide.mask()
        assert mask.dtype == np.uint32
        assert mask.shape == (-(-vocab_size // 32),)
        assert max(allowed(guide)) < min(vocab_size, known)
        assert len(allowed(guide)) > 100


def test_ids_may_be_missing_in_the_vocabulary() -> None:
    data = json.loads(byte_level().to_str())
    data["model"]["vocab"]["a"] = 700
    backend = Backend.from_str(json.dumps(data))
    for vocab_size, tokens in ((701, [700]), (900, [700])):
        assert allowed(Guides(Tokenizer(kept(backend)), vocab_size, [1]).compile("regex", "a")) == tokens
    assert allowed(Guides(Tokenizer(kept(backend)), 700, [1]).compile("regex", "a|b")) == [backend.token_to_id("b")]


@pytest.mark.parametrize(
    ("guide_type", "guide", "message"),
    [
        ("json_schema", "{", "does not compile: Expecting property name"),
        ("json_schema", '{"type": "objec"}', "does not compile: Invalid type: objec"),
        ("json_schema", "[1]", "does not compile: schema must be an object or boolean"),
        ("json_schema", "false", "does not compile: Unsatisfiable schema"),
        ("json_schema", '{"not": {}}', 'does not compile: Unimplemented keys: ["not"]'),
        ("json_schema", '{"$ref": "http://example.com/a"}', "Default retriever does not fetch resources"),
        ("json_schema", '{"a":' * 5000 + "1" + "}" * 5000, "does not compile: "),
        ("json_schema", '{"$ref": "#"}', "no text matches the guide of guide_type='json_schema'"),
        ("json_schema", '{}},{"lark_grammar":"start: /x/"', "does not compile: Extra data"),
        ("json_schema", "\ud800", "text is not valid UTF-8"),
        ("regex", "[a-", "does not compile: unclosed character class"),
        ("regex", "(?=a)a", "does not compile: look-around"),
        ("regex", "(" * 5000 + "a" + ")" * 5000, "does not compile: exceed the maximum number of nested parentheses"),
        ("regex", "a" * 70_000, "guide of 70000 bytes; expected at most 65536"),
        ("ebnf_grammar", "start: a", 'does not compile: at 1(8): unknown name: "a"'),
        ("ebnf_grammar", "root ::= a", "Rule 'a' not found"),
        ("ebnf_grammar", "start: start", "no text matches"),
        ("ebnf_grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "lark grammar too deeply nested"),
        ("ebnf_grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "maximum recursion depth"),
        ("xml", "<a/>", "expected json, json_schema, regex or ebnf_grammar"),
    ],
)
def test_a_bad_guide_is_refused_in_one_line(guide_type: str, guide: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        guides().compile(guide_type, guide)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 320


LINKS = 4000


@pytest.mark.parametrize(
    ("guide_type", "guide"),
    [
        ("ebnf_grammar", "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(LINKS)) + f'a{LINKS}: "x"'),
        ("ebnf_grammar", "start: A0\n" + "".join(f"A{i}: A{i + 1}\n" for i in range(LINKS)) + f'A{LINKS}: "x"'),
        (
            "json_schema",
            json.dumps({"$ref": "#/$defs/0", "$defs": {i: {"$ref": f"#/$defs/{i + 1}"} for i in range(1900)}})[:-2]
            + ', "1900": {"enum": ["x"]}}}',
        ),
    ],
    ids=["rules", "terminals", "references"],
)
def test_long_chains_of_references_do_not_end_the_process(guide_type: str, guide: str) -> None:
    """llguidance follows them by recursion, and a stack of the usual size overflows."""
    assert sample("byte_level", guides().compile(guide_type, guide), 0)[0].strip('"') == "x"


def test_a_guide_that_becomes_too_complex_ends_only_its_answer() -> None:
    hostile = guides().compile("ebnf_grammar", "start: s\ns: s s | s s s | /[a-z]/ | ")
    other = guides().compile("regex", "a{3}")
    assert hostile.error == ""
    rng, length = random.Random(0), 0
    while tokens := [token for token in allowed(hostile) if token != end_id("byte_level")]:
        length += 1
        assert length < 80
        with contextlib.suppress(RuntimeError):  # it may become so in a mask or by a token
            hostile.accept(rng.choice(tokens))
    assert re.fullmatch(r"\w.*", hostile.error)
    assert sample("byte_level", other, 0) == ("aaa", True)


def test_a_forbidden_token_is_refused_and_nothing_may_follow() -> None:
    a, b = (byte_level().token_to_id(char) for char in "ab")
    guide = guides().compile("regex", "aa")
    guide.start()
    with pytest.raises(RuntimeError, match=f"the guide does not accept token {b}: ") as error:
        guide.accept(b)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(guide.error)
    assert allowed(guide) == []
    with pytest.raises(RuntimeError):
        guide.accept(a)


def test_copies_begin_at_the_beginning_and_do_not_see_each_other() -> None:
    a, b = (byte_level().token_to_id(char) for char in "ab")
    guide = guides().compile("regex", "aa|bb")
    guide.accept(a)
    copy = guide.copy()
    assert set(allowed(copy)) >= {a, b}
    copy.accept(b)
    assert (allowed(guide), allowed(copy)) == ([a], [b])


def test_a_mask_that_was_begun_early_is_that_of_its_place() -> None:
    for seed in range(5):
        plain, early = (guides().compile("regex", "[ab]{3}(?:the )+") for _ in range(2))
        rng = random.Random(seed)
        for _ in range(10):
            early.start()
            early.start()
            token = rng.choice([token for token in allowed(plain) if token != 1])
            assert np.array_equal(plain.mask(), early.mask())
            plain.accept(token)
            early.accept(token)


def test_an_end_token_may_follow_a_finished_text() -> None:
    guide = guides().compile("regex", "a+")
    guide.accept(byte_level().token_to_id("a"))
    assert not guide.finished
    guide.accept(1)
    assert guide.finished
    assert guides().compile("regex", "").mask()[0] == 1 << 1


def test_any_thread_may_compile() -> None:
    compiled = Guides(tokenizer("byte_level"), byte_level().get_vocab_size(), [1])
    texts: list[str] = []
    before = threading.stack_size()
    threads = [
        threading.Thread(
            target=lambda i=i: texts.append(sample("byte_level", compiled.compile("regex", f"a{i}"), i)[0])
        )
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == [f"a{i}" for i in range(8)]
    assert threading.stack_size() == before
    compiled.close()


def test_closed_guides_give_no_masks() -> None:
    compiled = Guides(tokenizer("byte_level"), byte_level().get_vocab_size(), [1])
    guide = compiled.compile("regex", "a")
    compiled.close()
    for use in (guide.mask, lambda: compiled.compile("regex", "a")):
        with pytest.raises(RuntimeError):
            use()


def test_a_tokenizer_that_puts_a_space_before_texts_adds_none() -> None:
    backend = Backend.from_str(byte_level().to_str())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    compiled = Guides(Tokenizer(kept(backend)), backend.get_vocab_size(), [1])
    assert sample("byte_level", compiled.compile("json_schema", '{"enum": ["the quick"]}'), 0) == ('"the quick"', True)


def word_pieces() -> Backend:
    backend = Backend(models.WordPiece({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece()
    return backend


@pytest.mark.parametrize(
    ("make", "options", "end_ids", "message"),
    [
        (word_pieces, {}, [2], "guides cannot be used with this tokenizer: can't determine decoder type"),
        (byte_level, CLEANED_UP, [1], "guides need a fast tokenizer"),
        (byte_level, {}, [], r"guides need an end token of the tokenizer; the model's are \[\]"),
        (byte_level, {}, [900], r"guides need an end token of the tokenizer; the model's are \[900\]"),
    ],
)
def test_tokenizers_that_cannot_be_guided(
    make: Callable[[], Backend], options: dict[str, bool], end_ids: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Guides(Tokenizer(kept(make(), **options)), 1000, end_ids).compile("json", "")

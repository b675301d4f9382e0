"""Text and chat messages to token ids as transformers has them, and what is refused."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers_for_tests import byte_fallback, byte_level, kept, metaspace, with_bos, wrapped

from hybridtrt.build.hf_tokenizer import read_tokenizer, stored
from hybridtrt.runtime.chat_template import ChatTemplate
from hybridtrt.runtime.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' + m['content'] + '</s>' }}{% endfor %}{{ 'so: ' if add_generation_prompt }}"
)
BOS = 0  # of the byte-level tokenizer


def save(folder: Path, template: str | None = None, bos: bool = True) -> Path:
    """An engine folder with the tokenizer of a Hugging Face folder, which lies beside it."""
    backend = with_bos(byte_level()) if bos else byte_level()
    wrapped(backend, chat_template=template).save_pretrained(folder / "model")
    read_tokenizer(folder / "model").save(folder / "tokenizer")
    return folder


def test_round_trip(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path))
    assert tokenizer is not None
    for text in ("the quick", " 日本 😀  ", "", "a\n"):
        ids = tokenizer.encode(text)
        assert ids[0] == BOS
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text.encode()) == ids
    assert {0, 1, 2} <= tokenizer.special_ids


def test_a_folder_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "settings.json"])
def test_a_damaged_tokenizer_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    save(tmp_path)
    (tmp_path / "tokenizer" / name).write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer: the tokenizer cannot be loaded: ") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_a_damaged_tokenizer_of_a_model_is_named_in_one_line(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"model: the tokenizer cannot be loaded: ") as error:
        read_tokenizer(tmp_path / "model")
    assert "\n" not in str(error.value)


def test_files_of_transformers_in_an_engine_are_refused(tmp_path: Path) -> None:
    wrapped(byte_level()).save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match=r"tokenizer: has no settings\.json; build the engine again"):
        load_tokenizer(tmp_path)


def test_code_in_the_folder_does_not_run(tmp_path: Path) -> None:
    save(tmp_path)
    config = tmp_path / "model" / "tokenizer_config.json"
    marker = tmp_path / "ran"
    (tmp_path / "model" / "mine.py").write_text(f"open({str(marker)!r}, 'w')\nclass Mine: pass\n")
    data = json.loads(config.read_text()) | {
        "auto_map": {"AutoTokenizer": [None, "mine.Mine"]},
        "tokenizer_class": "Mine",
    }
    config.write_text(json.dumps(data))
    with contextlib.suppress(ValueError):
        read_tokenizer(tmp_path / "model")
    assert not marker.exists()


@pytest.mark.parametrize("text", [b"caf\xe9", b"\xff", b"\xed\xa0\x80", "lone \ud800 surrogate"])
def test_text_that_is_not_utf8_is_refused(text: str | bytes) -> None:
    tokenizer = Tokenizer(kept(byte_level(), TEMPLATE))
    with pytest.raises(ValueError, match="text is not valid UTF-8: "):
        tokenizer.encode(text)
    messages = text if isinstance(text, bytes) else json.dumps([{"role": "user", "content": text}])
    with pytest.raises(ValueError, match="text is not valid UTF-8: "):
        tokenizer.encode_messages(messages)


def test_bos_is_there_once() -> None:
    tokenizer = Tokenizer(kept(with_bos(byte_level())))
    assert tokenizer.encode("a") == tokenizer.encode("<s>a")
    assert tokenizer.encode("<s>a").count(BOS) == 1
    assert BOS not in Tokenizer(kept(byte_level())).encode("a")


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", [TEMPLATE, "{{ bos_token }}" + TEMPLATE])
def test_messages_go_through_the_chat_template(tmp_path: Path, template: str, adds_bos: bool) -> None:
    tokenizer = load_tokenizer(save(tmp_path, template, adds_bos))
    assert tokenizer is not None
    ids = tokenizer.encode_messages('[{"role": "user", "content": "the quick"}]')
    start = [BOS] if "bos_token" in template else []
    plain = byte_level()
    assert list(ids) == [*start, 2, *plain.encode("the quick").ids, 1, *plain.encode("so: ").ids]
    assert tokenizer.encode_messages([{"role": "user", "content": "the quick"}]) == ids


def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(ValueError, match="messages need a chat template, and the tokenizer has none"):
        Tokenizer(kept(byte_fallback())).encode_messages([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("[{", "messages are not valid JSON: "),
        ("[" * 100_000, "messages are not valid JSON: "),
        ("{}", "messages must be a non-empty list"),
        ("[]", "messages must be a non-empty list"),
        ('"text"', "messages must be a non-empty list"),
        ("[1]", r'messages\[0\] must be an object with "role"'),
        ('[{"role": "user"}]', r'messages\[0\] must be an object with "role"'),
        ('[{"role": 1, "content": "a"}]', r'messages\[0\] must be an object with "role"'),
        ('[{"role": "user", "content": {"deep": 1}}]', "the chat template refuses the messages: "),
        ('[{"role": "user", "content": "refuse"}]', "the chat template refuses the messages: TemplateError: not so"),
    ],
)
def test_bad_messages_are_refused(messages: str, message: str) -> None:
    template = "{% if messages[0]['content'] == 'refuse' %}{{ raise_exception('not so') }}{% endif %}" + TEMPLATE
    with pytest.raises(ValueError, match=message):
        Tokenizer(kept(byte_level(), template)).encode_messages(messages)


def test_settings_of_training_do_not_cut_prompts() -> None:
    backend = byte_level().from_str(byte_level().to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    tokenizer = Tokenizer(kept(backend))
    assert tokenizer.encode("a") == tuple(byte_level().encode("a").ids)
    assert len(tokenizer.encode("a,b." * 20)) > 20


def test_threads_share_a_tokenizer() -> None:
    tokenizer = Tokenizer(kept(byte_level()))
    text = "the quick 日本 " * 50
    ids = tokenizer.encode(text)
    wrong: list[object] = []

    def work() -> None:
        try:
            for _ in range(100):
                if tokenizer.encode(text) != ids or tokenizer.decode(ids) != text:
                    wrong.append("differs")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


TEXTS = ("the quick", " it's  a test , of spaces .", "日本 😀\n<|user|>naïve</s>", "")
INSISTS = {
    "clean_up_tokenization_spaces": True,
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
}


@pytest.mark.parametrize(
    "options", [{}, {"split_special_tokens": True}, {"clean_up_tokenization_spaces": True}, INSISTS], ids=str
)
@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace, lambda: with_bos(byte_level())])
def test_ids_and_text_are_those_of_transformers(
    tmp_path: Path, make: Callable[[], Any], options: dict[str, bool]
) -> None:
    oracle = wrapped(make(), **options)
    stored(oracle).save(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert (tokenizer.backend is None) == (options == INSISTS)
    for text in TEXTS:
        for add in (True, False):
            ids = oracle.encode(text, add_special_tokens=add)
            assert list(tokenizer.encode(text, add)) == ids
            assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


TEMPLATES = {
    "blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\nU {{ m.content }}\n  {% endif %}\n{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, sort_keys=true) }}",
    "loops": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "namespaces": "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = n.k + 1 %}{% endfor %}{{ n.k }}",
    "answers": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}",
    "absent": "{% for m in messages %}{{ m.tool_calls is defined }}{{ unk_token }}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}",
    "dicts": "{{ dict(a=1)['a'] }}{{ messages | map(attribute='role') | join(',') }}",
}
MESSAGES = [
    {"role": "system", "content": "<br> 日本 'quoted'", "tool_calls": None},
    {"role": "user", "content": " hello ", "reasoning": "why", "thinking": "so"},
    {"role": "assistant", "content": "hi", "thinking": "now"},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_give_the_text_that_transformers_gives(name: str) -> None:
    oracle = wrapped(byte_level(), chat_template=TEMPLATES[name])
    text = oracle.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text
    assert ChatTemplate(TEMPLATES[name], oracle.special_tokens_map).render(MESSAGES) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ dict.__globals__['sys'] }}",
        "{% set n = namespace(__init__=1) %}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{% include 'x' %}",
    ],
)
def test_templates_stay_in_the_sandbox(template: str) -> None:
    tokenizer = Tokenizer(kept(byte_level(), template))
    with pytest.raises(ValueError, match=r"the chat template refuses the messages: (SecurityError|TypeError)"):
        tokenizer.encode_messages(MESSAGES)


def test_of_several_templates_the_default_is_kept() -> None:
    templates = {"default": TEMPLATES["tokens"], "tool_use": "tools"}
    assert kept(byte_level(), templates).settings.chat_template == TEMPLATES["tokens"]

"""Text and chat messages to token ids, and what is refused."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

import pytest
from tokenizers_for_tests import byte_fallback, byte_level, with_bos, wrapped

from hybridtrt.runtime.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' + m['content'] + '</s>' }}{% endfor %}{{ 'so: ' if add_generation_prompt }}"
)
BOS = 0  # of the byte-level tokenizer


def save(folder: Path, template: str | None = None, bos: bool = True) -> Path:
    backend = with_bos(byte_level()) if bos else byte_level()
    tokenizer = wrapped(backend)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "tokenizer")
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


def test_a_damaged_tokenizer_is_named_in_one_line(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer: the tokenizer cannot be loaded: ") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_code_in_the_folder_does_not_run(tmp_path: Path) -> None:
    save(tmp_path)
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    marker = tmp_path / "ran"
    (tmp_path / "tokenizer" / "mine.py").write_text(f"open({str(marker)!r}, 'w')\nclass Mine: pass\n")
    data = json.loads(config.read_text()) | {
        "auto_map": {"AutoTokenizer": [None, "mine.Mine"]},
        "tokenizer_class": "Mine",
    }
    config.write_text(json.dumps(data))
    with contextlib.suppress(ValueError):
        load_tokenizer(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("text", [b"caf\xe9", b"\xff", b"\xed\xa0\x80", "lone \ud800 surrogate"])
def test_text_that_is_not_utf8_is_refused(text: str | bytes) -> None:
    tokenizer = wrapped(byte_level())
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(ValueError, match="text is not valid UTF-8: "):
        Tokenizer(tokenizer).encode(text)
    messages = text if isinstance(text, bytes) else json.dumps([{"role": "user", "content": text}])
    with pytest.raises(ValueError, match="text is not valid UTF-8: "):
        Tokenizer(tokenizer).encode_messages(messages)


def test_bos_is_there_once() -> None:
    tokenizer = Tokenizer(wrapped(with_bos(byte_level())))
    assert tokenizer.encode("a") == tokenizer.encode("<s>a")
    assert tokenizer.encode("<s>a").count(BOS) == 1
    assert BOS not in Tokenizer(wrapped(byte_level())).encode("a")


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
        Tokenizer(wrapped(byte_fallback())).encode_messages([{"role": "user", "content": "a"}])


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
    tokenizer = wrapped(byte_level())
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'refuse' %}{{ raise_exception('not so') }}{% endif %}" + TEMPLATE
    )
    with pytest.raises(ValueError, match=message):
        Tokenizer(tokenizer).encode_messages(messages)


def test_settings_of_training_do_not_cut_prompts() -> None:
    backend = byte_level().from_str(byte_level().to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    tokenizer = Tokenizer(wrapped(backend))
    assert tokenizer.encode("a") == tuple(byte_level().encode("a").ids)
    assert len(tokenizer.encode("a,b." * 20)) > 20


def test_threads_share_a_tokenizer() -> None:
    tokenizer = Tokenizer(wrapped(byte_level()))
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

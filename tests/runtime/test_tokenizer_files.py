from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.gguf_writer import gguf_bytes
from tests.support.plain_bpe import HARD_TEXT, SPLITS, fragments, plain_bpe, texts, visible

from umbel.lang.errors import ModelLoadError
from umbel.runtime.model_store import ModelFiles
from umbel.runtime.models.gguf_file import GGUFFile
from umbel.runtime.tokenizer import Segment, Tokenizer
from umbel.runtime.tokenizer_files import byte_alphabet

MERGES = [
    visible(a) + " " + visible(b) for a, b in [("1", "2"), ("12", "3"), (" ", "x"), ("=", ">")]
]
TOKENS = [
    *("<s>", "</s>", "<eot>"),
    *byte_alphabet(),
    *(merge.replace(" ", "") for merge in MERGES),
    *("<tool>", "<unused>"),
]
CONTROL, NORMAL, USER_DEFINED, UNUSED = 3, 1, 4, 5
TYPES = [*[CONTROL] * 3, *[NORMAL] * (len(TOKENS) - 5), USER_DEFINED, UNUSED]
TEMPLATE = "{% for m in messages %}{{ bos_token + m.role + m.content + '<eot>' }}{% endfor %}"


def gguf(path: Path, **changes: Any) -> Path:
    """Write a GGUF tokenizer; a change to None leaves a value out."""
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": TYPES,
        "merges": MERGES,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    values = {f"tokenizer.ggml.{k}": v for k, v in metadata.items() if v is not None}
    values["tokenizer.chat_template"] = TEMPLATE
    path.write_bytes(gguf_bytes(values, {}))
    return path


def read(path: Path, **changes: Any) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(gguf(path / "model.gguf", **changes)))


@pytest.fixture(scope="module")
def by_pre(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {pre: read(tmp_path_factory.mktemp(pre), pre=pre) for pre in SPLITS}


@pytest.mark.parametrize("pre", SPLITS)
@given(text=st.one_of(texts, st.text(alphabet="123 x=>'s\n½é", max_size=20)))
@example(text=HARD_TEXT)
def test_each_pre_tokenizer_splits_as_its_patterns_say(
    pre: str, text: str, by_pre: dict[str, Tokenizer]
) -> None:
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(MERGES)}
    text = text.replace("<tool>", "")
    tokenizer = by_pre[pre]
    ids = tokenizer.encode_text(text)
    if pre == "qwen2":  # which puts text into Unicode's composed form
        text = tokenizer.decode(ids)
    assert [TOKENS[i] for i in ids] == plain_bpe(text, SPLITS[pre], ranks)


@pytest.mark.parametrize("pre", SPLITS)
@given(text=texts, thens=st.lists(fragments, min_size=4, max_size=6), filler=st.booleans())
@example(text=HARD_TEXT * 3, thens=["5", "the", " ", "\n", "'s", "é"], filler=True)
@example(text="x" * 64 + " a b<to", thens=["ol>", "o", "<", "a"], filler=False)
@example(text="x e" * 30, thens=["\u0301", "a", "b", "c"], filler=False)
def test_each_pre_tokenizer_gives_many_continuations_the_ids_of_each(
    pre: str, text: str, thens: list[str], filler: bool, by_pre: dict[str, Tokenizer]
) -> None:
    run = [Segment("in the 12 a. b\n" * 5 * filler + text, False)]
    assert by_pre[pre].encode_run_then(run, thens) == [
        by_pre[pre].encode_run([*run, Segment(then, False)]) for then in thens
    ]


@pytest.mark.parametrize("pre", SPLITS)
@given(
    parts=st.lists(st.one_of(fragments, st.sampled_from([" a", "b", " I'm", "X e\u0301"]))),
    length=st.integers(1, 12),
)
@example(parts=[HARD_TEXT, " and I'LL <tool> it", HARD_TEXT], length=1)
def test_each_pre_tokenizer_gives_the_pieces_of_a_text_the_ids_of_the_whole(
    pre: str, parts: list[str], length: int, by_pre: dict[str, Tokenizer]
) -> None:
    tokenizer, text = by_pre[pre], "".join(parts)
    pieces = list(tokenizer._pieces.split(text, length))
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in tokenizer._encode_anew(piece)] == [
        *tokenizer._encode_anew(text)
    ]


@pytest.mark.parametrize("pre", SPLITS)
def test_texts_that_begin_alike_share_their_pieces(pre: str, by_pre: dict[str, Tokenizer]) -> None:
    split = by_pre[pre]._pieces.split
    text = "In the beginning there were 12 words, and no more.\n" * 100
    one, other = list(split(text + "One item")), list(split(text + "another, and longer " * 40))
    assert one[:-2] == other[: len(one) - 2]
    assert len(one) > 8


def test_a_token_that_may_reach_over_the_border_of_two_words_leaves_text_whole(
    tmp_path: Path,
) -> None:
    words = "ab x " * 600
    assert len(list(read(tmp_path)._pieces.split(words))) > 1
    tokens = [*TOKENS[:-2], "b x", "<unused>"]
    spans = read(tmp_path, tokens=tokens)
    assert spans.encode_text("ab x") != [*spans.encode_text("ab"), *spans.encode_text(" x")]
    assert list(spans._pieces.split(words)) == [words]
    assert list(Tokenizer.byte_level(300)._pieces.split(words)) == [words]  # has no words


def test_qwen2_composes_and_the_others_keep_every_byte(by_pre: dict[str, Tokenizer]) -> None:
    for pre, tokenizer in by_pre.items():
        expected = "é" if pre == "qwen2" else "e\u0301"
        assert tokenizer.decode(tokenizer.encode_text("e\u0301")) == expected


def test_user_defined_tokens_are_text_and_control_tokens_are_not(tmp_path: Path) -> None:
    tokenizer = read(tmp_path)
    assert tokenizer.encode_text("<tool>") == [TOKENS.index("<tool>")]
    assert tokenizer.token_bytes[TOKENS.index("<tool>")] == b"<tool>"
    assert tokenizer.token_bytes[TOKENS.index("<unused>")] == b""
    assert tokenizer.encode_run([Segment("<unused><s>", True)])[-1] == 0
    assert tokenizer.special_ids == {0, 1, 2}


def test_the_ends_of_a_text_are_eos_eot_and_the_templates_end_of_turn(tmp_path: Path) -> None:
    assert read(tmp_path).eos_ids == (1, 2)
    assert read(tmp_path).end_of_turn_id == 2
    assert read(tmp_path, eot_token_id=0).eos_ids == (1, 0, 2)


def test_bos_is_added_where_the_file_or_the_pre_tokenizer_says_so(tmp_path: Path) -> None:
    assert not read(tmp_path).add_bos
    assert read(tmp_path, add_bos_token=True).add_bos
    assert read(tmp_path, pre="llama-bpe").add_bos
    assert not read(tmp_path, pre="llama-bpe", add_bos_token=False).add_bos
    assert not read(tmp_path, add_bos_token=True, bos_token_id=None).add_bos


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "the kind 'llama'.*Hugging Face form"),
        ({"pre": "brand-new"}, "pre-tokenizer 'brand-new' is not known"),
        ({"pre": None}, "under 'tokenizer.ggml.pre', found nothing"),
        ({"tokens": "x"}, "expected a list under 'tokenizer.ggml.tokens', found 'x'"),
        ({"token_type": [1]}, "with 1 token types"),
        ({"merges": ["ab"]}, "'ab' is no merge"),
        ({"merges": ["q zz"]}, "can't be built"),
        ({"eos_token_id": 999}, "eos_token_id is 999 of 2"),
    ],
)
def test_a_gguf_tokenizer_that_cannot_be_honoured_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, **changes)


def added(i: int, content: str, special: bool, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": content, "special": special, **plain, **flags}


def write_folder(path: Path, document: dict[str, Any], **others: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(document))
    for name, content in others.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def document(**changes: Any) -> dict[str, Any]:
    vocab = {char: i for i, char in enumerate(byte_alphabet())} | {"<s>": 256}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "added_tokens": [
            added(256, "<s>", True),
            added(257, "<end>", True, rstrip=True),
            added(258, "<think>", False),
            added(259, "<eos>", True),
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A"}}],
            "pair": [],
            "special_tokens": {},
        },
        "decoder": {**byte_level, "use_regex": False},
        "model": {"type": "BPE", "ignore_merges": True, "vocab": vocab, "merges": []},
        **changes,
    }


NAMES = {"bos_token": "<s>", "eos_token": {"content": "<eos>"}}


def test_a_folder_names_its_tokens(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, document(), tokenizer_config=NAMES, config={"vocab_size": 300})
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (256, True, (259,))
    assert tokenizer.special_ids == {256, 257, 259}
    assert tokenizer.vocab_size == 300
    assert tokenizer.token_bytes[256:] == (b"", b"", b"<think>", b"")


def test_no_text_of_a_folders_tokenizer_is_special_even_as_a_whole_word(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, document(), tokenizer_config=NAMES))
    assert tokenizer.token_bytes[258] == b"<think>"
    assert tokenizer.encode_text("<think>") == [258]
    for text in ("<s>", "<end>", "<eos>", "<s><think>"):
        assert not tokenizer.special_ids & set(tokenizer.encode_text(text))
        assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_a_special_token_eats_the_white_space_that_its_flags_say(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, document(), tokenizer_config=NAMES))
    ids = tokenizer.encode_run([Segment(" <end>\n <s> ", True), Segment(" a", False)])
    assert ids == [*tokenizer.encode_text(" "), 257, 256, *tokenizer.encode_text("  a")]


def test_add_bos_token_of_the_settings_wins(tmp_path: Path) -> None:
    settings = {**NAMES, "add_bos_token": False}
    folder = write_folder(tmp_path, document(), tokenizer_config=settings)
    assert not Tokenizer.from_folder(folder).add_bos


def test_a_template_comes_from_its_own_file_first_then_from_the_settings(tmp_path: Path) -> None:
    ours, other = TEMPLATE.replace("<eot>", "<end>"), TEMPLATE.replace("<eot>", "<eos>")
    settings = {**NAMES, "chat_template": [{"name": "default", "template": other}]}
    folder = write_folder(tmp_path, document(), tokenizer_config=settings)
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.end_of_turn_id, tokenizer.eos_ids) == (259, (259,))
    (folder / "chat_template.jinja").write_text(ours)
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.end_of_turn_id, tokenizer.eos_ids) == (257, (259, 257))
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.start((), "user") == "<s>user"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"type": "Unigram", "vocab": []}}, "is Unigram"),
        ({"decoder": {"type": "Metaspace"}}, "the decoder Metaspace"),
        ({"decoder": None}, "the decoder None"),
        ({"model": {"type": "BPE"}}, "not the form of a tokenizer"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}, "can't be loaded"),
        ({"normalizer": {"type": "Lowercase"}, "added_tokens": []}, None),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, "every byte"),
        ({"added_tokens": []}, "names no token that ends a text"),
    ],
)
def test_a_folder_that_cannot_be_honoured_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str | None
) -> None:
    folder = write_folder(tmp_path, document(**changes), tokenizer_config=NAMES)
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.from_folder(folder)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ModelLoadError, match="can't read"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="holds no JSON object"):
        Tokenizer.from_folder(tmp_path)


def test_a_dummy_has_bytes_unless_a_tokenizer_stands_beside_it(tmp_path: Path) -> None:
    config = tmp_path / "tiny.json"
    files = ModelFiles("dummy", config, "dummy-tiny")
    config.write_text('{"vocab_size": 512}')
    assert Tokenizer.from_model(files).encode_text("ab") == [97, 98]
    assert Tokenizer.from_model(files).vocab_size == 512
    write_folder(tmp_path, document(), tokenizer_config=NAMES)
    assert Tokenizer.from_model(files).bos_id == 256
    assert Tokenizer.from_model(files).vocab_size == 512
    (tmp_path / "tokenizer.json").unlink()
    config.write_text("{}")
    with pytest.raises(ModelLoadError, match="names no vocab_size"):
        Tokenizer.from_model(files)

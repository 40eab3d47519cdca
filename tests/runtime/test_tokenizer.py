from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.plain_bpe import HARD_TEXT, SPECIALS, SPLITS, fragments, plain_bpe, texts
from tokenizers import AddedToken, models, pre_tokenizers

from umbel.lang.errors import ModelLoadError, ProgramError
from umbel.runtime.models.gguf_file import GGUFFile
from umbel.runtime.tokenizer import Segment, Tokenizer

MERGES = [("t", "h"), ("th", "e"), (" ", "the"), (" ", "t"), ("i", "n"), ("1", "2"), ("|", ">")]
TINY = Tokenizer.byte_level(300, MERGES)


@pytest.fixture(scope="module")
def metadata(smollm2_path: Path) -> dict[str, Any]:
    return GGUFFile(smollm2_path).metadata


@pytest.fixture(scope="module")
def ranks(metadata: dict[str, Any]) -> dict[tuple[str, ...], int]:
    return {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(smollm2_path))


@pytest.fixture(scope="module")
def oracle(metadata: dict[str, Any]) -> transformers.PreTrainedTokenizerFast:
    """Return transformers' tokenizer over the same vocabulary, special tokens and all."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    backend.add_special_tokens(
        [AddedToken(tokens[i], special=True) for i, kind in enumerate(types) if kind == 3]
    )
    fast: Any = transformers.PreTrainedTokenizerFast
    tokenizer: transformers.PreTrainedTokenizerFast = fast(
        tokenizer_object=backend,
        chat_template=metadata["tokenizer.chat_template"],
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )
    return tokenizer


@pytest.fixture(scope="module")
def folder(
    oracle: transformers.PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("folder")
    oracle.save_pretrained(path)
    (path / "config.json").write_text('{"vocab_size": 49280, "eos_token_id": 2}')
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    return path


@pytest.fixture(scope="module")
def from_folder(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@given(text=texts)
@example(text=HARD_TEXT)
def test_smollm2_encodes_as_its_merges_and_pre_tokenizer_say(
    text: str, smollm2: Tokenizer, metadata: dict[str, Any], ranks: dict[tuple[str, ...], int]
) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = smollm2.encode_text(text)
    assert [tokens[i] for i in ids] == plain_bpe(text, SPLITS["smollm"], ranks)


@given(number=st.integers(0))
def test_smollm2_splits_every_digit(number: int, smollm2: Tokenizer) -> None:
    pieces = [smollm2.decode([i]) for i in smollm2.encode_text(f"a{number}")]
    assert pieces == ["a", *str(number)]


@given(text=texts)
def test_decoding_gives_the_text_back(
    text: str, smollm2: Tokenizer, from_folder: Tokenizer
) -> None:
    for tokenizer in (TINY, smollm2, from_folder):
        assert tokenizer.decode(tokenizer.encode_text(text)) == text


@given(text=texts)
@example(text="".join(SPECIALS))
def test_untrusted_text_never_gives_a_special_id(
    text: str, smollm2: Tokenizer, from_folder: Tokenizer
) -> None:
    for tokenizer in (TINY, smollm2, from_folder):
        assert tokenizer.special_ids
        ids = tokenizer.encode_run([Segment(text, False)])
        assert not tokenizer.special_ids & {*ids, *tokenizer.encode_text(text)}


segments = st.lists(st.builds(Segment, fragments, st.booleans()), max_size=8)


@given(run=segments, cuts=st.lists(st.integers(0, 40)))
def test_the_grouping_of_a_run_never_changes_its_ids(
    run: list[Segment], cuts: list[int], smollm2: Tokenizer
) -> None:
    regrouped = []
    at = 0
    for segment in run:
        inside = sorted({c - at for c in cuts if 0 < c - at < len(segment.text)})
        for i, j in zip([0, *inside], [*inside, len(segment.text)], strict=True):
            regrouped.append(Segment(segment.text[i:j], segment.trusted))
        at += len(segment.text)
    for tokenizer in (TINY, smollm2):
        assert tokenizer.encode_run(regrouped) == tokenizer.encode_run(run)


@given(run=segments)
def test_a_run_keeps_its_text_and_has_special_ids_only_where_trusted_text_spells_them(
    run: list[Segment],
) -> None:
    ids = TINY.encode_run(run)
    names = {TINY.special_id(text): text for text in SPECIALS}
    spelled = b"".join(names[i].encode() if i in names else TINY.token_bytes[i] for i in ids)
    assert spelled.decode() == "".join(segment.text for segment in run)
    joined: list[Segment] = []  # a spelling may reach over neighbours of one trust
    for segment in filter(lambda s: s.text, run):
        if joined and joined[-1].trusted == segment.trusted:
            segment = Segment(joined.pop().text + segment.text, segment.trusted)
        joined.append(segment)
    expected = [
        found
        for segment in joined
        if segment.trusted
        for found in regex.findall("|".join(map(regex.escape, SPECIALS)), segment.text)
    ]
    assert [names[i] for i in ids if i in names] == expected


def test_trusted_text_merges_with_untrusted_text_beside_it() -> None:
    run = [Segment("<|im_end|>t", True), Segment("h", False), Segment("e<|im_end|>", True)]
    end = TINY.special_id("<|im_end|>")
    assert TINY.encode_run(run) == [end, *TINY.encode_text("the"), end]


def test_a_spelling_that_reaches_into_untrusted_text_is_text() -> None:
    run = [Segment("<|im_", True), Segment("end|>", False)]
    assert TINY.encode_run(run) == TINY.encode_text("<|im_end|>")


contents = texts.map(str.strip)
conversations = st.lists(contents, min_size=1, max_size=4).flatmap(
    lambda turns: st.booleans().map(
        lambda system: [
            *([("system", "Be brief.")] if system else []),
            *((("user", "assistant")[i % 2], content) for i, content in enumerate(turns)),
        ]
    )
)


@given(turns=conversations)
def test_conversations_have_the_ids_that_transformers_gives_them(
    turns: list[tuple[str, str]],
    smollm2: Tokenizer,
    from_folder: Tokenizer,
    oracle: transformers.PreTrainedTokenizerFast,
) -> None:
    turns = [(role, content.replace("<|", "< |")) for role, content in turns]  # it trusts contents
    is_asked = turns[-1][0] != "assistant"
    expected = oracle.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        add_generation_prompt=is_asked,
        return_dict=False,
    )
    for tokenizer in (smollm2, from_folder):
        template = tokenizer.chat_template
        assert template is not None
        run = []
        roles = tuple(role for role, _ in turns)
        for i, (role, content) in enumerate(turns):
            run.append(Segment(template.start(roles[:i], role), True))
            run.append(Segment(content, False))
            run.append(Segment(template.end(roles[:i], role), True))
        if is_asked:
            run.append(Segment(template.start(roles, "assistant"), True))
        assert tokenizer.encode_run(run) == expected


@given(text=texts)
def test_a_folder_and_a_gguf_file_of_one_model_agree(
    text: str, smollm2: Tokenizer, from_folder: Tokenizer
) -> None:
    assert from_folder.encode_text(text) == smollm2.encode_text(text)


def test_a_folder_and_a_gguf_file_have_the_same_tokens(
    smollm2: Tokenizer, from_folder: Tokenizer
) -> None:
    assert from_folder.token_bytes == smollm2.token_bytes
    assert from_folder.special_ids == smollm2.special_ids
    assert (from_folder.bos_id, from_folder.add_bos) == (smollm2.bos_id, smollm2.add_bos)
    assert (smollm2.eos_ids, smollm2.end_of_turn_id) == ((2,), 2)
    assert (from_folder.eos_ids, from_folder.end_of_turn_id) == ((2, 0), 2)
    assert (from_folder.vocab_size, smollm2.vocab_size) == (49_280, 49_152)


@pytest.mark.parametrize("tokenizer", [TINY, Tokenizer.byte_level(1000, add_bos=True)])
def test_the_vocabulary_is_that_of_the_tokenizer(tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.vocabulary()
    assert vocabulary is tokenizer.vocabulary()
    assert vocabulary.token_bytes == tokenizer.token_bytes
    assert vocabulary.size == tokenizer.vocab_size >= len(vocabulary.token_bytes)
    assert vocabulary.special_ids == {256, 257, 258}
    assert {*vocabulary.eos_ids} == {256, 258}
    assert [i for i, raw in enumerate(vocabulary.token_bytes) if not raw] == [256, 257, 258]
    assert vocabulary.encode("the") == tokenizer.encode_text("the")


def test_byte_level_ids_are_bytes_then_special_tokens_then_merges() -> None:
    assert TINY.token_bytes[:256] == tuple(bytes([i]) for i in range(256))
    merged = tuple((left + right).encode() for left, right in MERGES)
    assert TINY.token_bytes[259:] == merged
    assert TINY.encode_text("x the") == [ord("x"), TINY.token_bytes.index(b" the")]
    assert [TINY.special_id(text) for text in SPECIALS] == [257, 258, 256]


def test_byte_level_needs_room_for_its_ids() -> None:
    with pytest.raises(ModelLoadError, match="has 266 ids, and the model 265"):
        Tokenizer.byte_level(265, MERGES)


def test_special_and_padding_ids_have_no_text() -> None:
    assert TINY.decode([97, 256, 257, 299, 98]) == "ab"


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(ProgramError, match="lone surrogate"):
        TINY.encode_text("a\ud800")


@pytest.mark.parametrize(("char", "byte"), [("\x1d", "1d"), ("\U00040000", "f1")])
def test_a_character_that_the_vocabulary_lacks_is_refused_not_dropped(
    char: str, byte: str, smollm2: Tokenizer
) -> None:
    with pytest.raises(ProgramError, match=f"byte 0x{byte} of .*U.{ord(char):04X}"):
        smollm2.encode_text(f"a{char}b")


def test_a_template_can_be_replaced_or_switched_off() -> None:
    other = "{% for m in messages %}{{ m.role + ':' + m.content + '<|endoftext|>' }}{% endfor %}"
    assert Tokenizer.byte_level(300, template="").chat_template is None
    assert Tokenizer.byte_level(300, template="").end_of_turn_id is None
    replaced = Tokenizer.byte_level(300, template=other)
    assert replaced.chat_template is not None
    assert replaced.chat_template.start((), "user") == "user:"
    assert replaced.end_of_turn_id == 256


@given(texts, st.lists(fragments, min_size=1, max_size=6), st.sampled_from(["", "a b. c\n", "7"]))
def test_a_run_with_many_continuations_has_the_ids_of_each(
    smollm2: Tokenizer, text: str, thens: list[str], filler: str
) -> None:
    run = [Segment("<|im_start|>user\n", True), Segment(filler * 20 + text, False)]
    for segments in (run, run[1:], [*run, Segment("<|im_end|>", True)], []):
        assert smollm2.encode_run_then(segments, thens) == [
            smollm2.encode_run([*segments, Segment(then, False)]) for then in thens
        ]


def test_many_continuations_cost_their_ends_and_not_the_run(
    smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_chars = 0
    encode_text = smollm2.encode_text

    def counting(text: str) -> list[int]:
        nonlocal num_chars
        num_chars += len(text)
        return encode_text(text)

    monkeypatch.setattr(smollm2, "encode_text", counting)
    text = "The quick brown fox is 37 and jumps over the lazy dog.\n" * 60
    thens = [str(i) for i in range(2002)]
    found = smollm2.encode_run_then([Segment(text, False)], thens)
    assert len(found) == len(thens)
    assert num_chars < 8 * len(text) + 30 * len(thens), "not 2,002 times the text"


def test_a_long_beginning_is_encoded_once_for_all_texts_that_share_it(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[str] = []
    encode = Tokenizer._encode_anew

    def counting(self: Tokenizer, text: str) -> tuple[int, ...]:
        pieces.append(text)
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "_encode_anew", counting)
    tokenizer = Tokenizer.from_gguf(GGUFFile(smollm2_path))
    stem = "The quick brown fox is 37 and jumps over the lazy dog.\n" * 60
    texts = [f"{stem}Item {i} is next" for i in range(50)]
    found = [tokenizer.encode_text(text) for text in texts]
    assert len(pieces) < 100, "not seven for each text"
    assert found == [list(tokenizer._encode_anew(text)) for text in texts]


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """Counted in turns, not in time: with the lock held there would be one or none."""
    tokenizer = Tokenizer.byte_level(288, merges=[("a", "b"), ("ab", "ab")])
    text = "ab" * 100_000
    started, ended = threading.Event(), threading.Event()

    def encode() -> None:
        started.set()
        tokenizer.encode_text(text)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    started.wait()
    turns = 0
    while not ended.is_set():
        time.sleep(0)
        turns += 1
    thread.join()
    assert turns > 50


@pytest.mark.parametrize("length", [255, 256, 1025, 5000])
def test_the_length_of_a_text_changes_no_ids(smollm2: Tokenizer, length: int) -> None:
    text = ("Das ist naïve, isn't it? 12345\n" * 200)[:length]
    backend = smollm2._backend
    assert smollm2.encode_text(text) == backend.encode(text, add_special_tokens=False).ids

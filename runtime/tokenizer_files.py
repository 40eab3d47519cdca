"""Reads what a tokenizer is made of from a model's own files; never guesses by a model's name.

Every reader returns `TokenizerParts`, which hold no trace of where they came from. Only byte-exact
BPE is taken: text in, the same bytes out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from umbel.lang.errors import ModelLoadError

from .models.gguf_file import GGUFFile

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
# llama.cpp's rule for tokenizer.ggml.pre = "default": each pattern splits what the last one left
_DEFAULT_WORDS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that only trusted text may spell; it may eat white space beside it."""

    id: int
    content: str
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """All that a Tokenizer needs. `backend` knows no special tokens, so it can't produce one."""

    backend: tokenizers.Tokenizer
    token_bytes: tuple[bytes, ...]  # b"" for special and unused ids
    special_tokens: tuple[SpecialToken, ...]
    bos_id: int | None
    add_bos: bool
    eos_ids: tuple[int, ...]
    vocab_size: int  # the model's, padding included
    template_source: str | None
    template_variables: Mapping[str, str]


@cache
def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes: itself where it is visible, else from U+0100 on.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


def _visible_bytes(token: str) -> bytes:
    """Return the bytes that a byte-level token spells; foreign characters stand for themselves."""
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_chars(text: str) -> str:
    chars = {byte: char for char, byte in byte_alphabet().items()}
    return "".join(chars[byte] for byte in text.encode())


def read_gguf(file: GGUFFile) -> TokenizerParts:
    """Read the tokenizer in a GGUF file's metadata.

    Raises ModelLoadError for a tokenizer model or a pre-tokenizer that is not known by name.
    """
    meta = _GGUFMetadata(file)
    kind = meta.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise ModelLoadError(
            f"{file.path} has a tokenizer of the kind {kind!r}: umbel reads 'gpt2' (byte-level "
            "BPE) from GGUF: use the model's folder in Hugging Face form"
        )
    tokens = meta.get("tokenizer.ggml.tokens", list)
    types = meta.get("tokenizer.ggml.token_type", list)
    if len(types) != len(tokens):
        raise ModelLoadError(
            f"{file.path}: corrupt: {len(tokens):,} tokens with {len(types):,} token types"
        )
    bos_id = meta.token_id("bos", len(tokens))
    ends = [meta.token_id(name, len(tokens)) for name in ("eos", "eot", "eom")]
    eos_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
    special = {i for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)}
    special.update(eos_ids, () if bos_id is None else (bos_id,))

    usable = [i for i, kind in enumerate(types) if kind != _UNUSED and i not in special]
    pre = meta.get("tokenizer.ggml.pre", str)
    backend = tokenizers.Tokenizer(
        _bpe(
            {tokens[i]: i for i in usable},
            [_pair(merge, file.path) for merge in meta.get("tokenizer.ggml.merges", list)],
            ignore_merges=pre in ("llama-bpe", "llama-v3", "llama3"),
            where=file.path,
        )
    )
    _set_pre_tokenizer(backend, pre, file.path)
    backend.add_tokens(
        [
            AddedToken(tokens[i], normalized=False, special=False)
            for i in usable
            if types[i] == _USER_DEFINED
        ]
    )
    token_bytes = [b""] * len(tokens)
    for i in usable:
        is_plain = types[i] == _USER_DEFINED
        token_bytes[i] = tokens[i].encode() if is_plain else _visible_bytes(tokens[i])
    add_bos = file.metadata.get("tokenizer.ggml.add_bos_token", backend.model.ignore_merges)
    return TokenizerParts(
        backend=backend,
        token_bytes=tuple(token_bytes),
        special_tokens=tuple(SpecialToken(i, tokens[i]) for i in sorted(special)),
        bos_id=bos_id,
        add_bos=bool(add_bos) and bos_id is not None,
        eos_ids=eos_ids,
        vocab_size=len(tokens),
        template_source=file.metadata.get("tokenizer.chat_template"),
        template_variables={
            f"{name}_token": tokens[i]
            for name, i in (("bos", bos_id), ("eos", ends[0]))
            if i is not None
        },
    )


class _GGUFMetadata:
    def __init__(self, file: GGUFFile) -> None:
        self.file = file

    def get(self, key: str, kind: type) -> Any:
        value = self.file.metadata.get(key)
        if not isinstance(value, kind):
            found = "nothing" if value is None else repr(value)[:40]
            raise ModelLoadError(
                f"{self.file.path}: expected a {kind.__name__} under {key!r}, found {found}: "
                "convert the model again"
            )
        return value

    def token_id(self, name: str, num_tokens: int) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.file.metadata:
            return None
        value: int = self.get(key, int)
        if value >= num_tokens:
            raise ModelLoadError(
                f"{self.file.path}: corrupt: {key} is {value:,} of {num_tokens:,} tokens"
            )
        return value


def _pair(merge: Any, where: Path) -> tuple[str, str]:
    left, _, right = str(merge).partition(" ")
    if not left or not right:
        raise ModelLoadError(f"{where}: corrupt: {merge!r} is no merge of two tokens")
    return left, right


def _bpe(
    vocab: dict[str, int], merges: Sequence[tuple[str, str]], *, ignore_merges: bool, where: Path
) -> models.BPE:
    try:
        return models.BPE(vocab, list(merges), ignore_merges=ignore_merges)
    except Exception as error:  # what tokenizers raises is a plain Exception
        raise ModelLoadError(f"{where}: the tokenizer can't be built: {error}") from error


def _set_pre_tokenizer(backend: tokenizers.Tokenizer, pre: str, where: Path) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

    def split(*patterns: str) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [*(pre_tokenizers.Split(Regex(p), "isolated") for p in patterns), byte_level]
        )

    match pre:
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
        case "gpt-2":
            backend.pre_tokenizer = gpt2
        case "llama-bpe" | "llama-v3" | "llama3":
            backend.pre_tokenizer = split(_LLAMA3_WORDS)
        case "qwen2":
            backend.normalizer = normalizers.NFC()
            backend.pre_tokenizer = split(_QWEN2_WORDS)
        case "default":
            backend.pre_tokenizer = split(*_DEFAULT_WORDS)
        case _:
            raise ModelLoadError(
                f"{where}: pre-tokenizer {pre!r} is not known (known: default, gpt-2, llama-bpe, "
                "qwen2, smollm): use the model's folder in Hugging Face form"
            )
    backend.decoder = decoders.ByteLevel()


def read_folder(folder: Path, config_path: Path | None = None) -> TokenizerParts:
    """Read tokenizer.json and what stands beside it; `config_path` is config.json by default.

    Raises ModelLoadError for a missing or broken file, and for a tokenizer that is not
    byte-level BPE.
    """
    path = folder / "tokenizer.json"
    document = _read_json(path)
    if document is None:
        raise ModelLoadError(
            f"{folder} has no tokenizer.json: write it with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    settings = _read_json(folder / "tokenizer_config.json") or {}
    names = {**(_read_json(folder / "special_tokens_map.json") or {}), **settings}
    config = _read_json(config_path or folder / "config.json") or {}
    generation = _read_json(folder / "generation_config.json") or {}
    try:
        return _from_json(folder, document, settings, names, config, generation)
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} has not the form of a tokenizer: {error!r}") from error


def _from_json(
    folder: Path,
    document: dict[str, Any],
    settings: dict[str, Any],
    names: dict[str, Any],
    config: dict[str, Any],
    generation: dict[str, Any],
) -> TokenizerParts:
    model = document["model"]
    if model.get("type", "BPE") != "BPE" or not _is_byte_level(document.get("decoder")):
        raise ModelLoadError(
            f"{folder}/tokenizer.json is {model.get('type')} with the decoder "
            f"{(document.get('decoder') or {}).get('type')}: umbel reads byte-level BPE"
        )
    vocab: dict[str, int] = model["vocab"]
    added: list[dict[str, Any]] = document.get("added_tokens") or []
    ids = vocab | {token["content"]: token["id"] for token in added}

    def named(name: str) -> str | None:
        value = names.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        return text if isinstance(text, str) and text in ids else None

    bos, eos = named("bos_token"), named("eos_token")
    ends: list[int] = []
    for source in (generation.get("eos_token_id"), config.get("eos_token_id")):
        ends += source if isinstance(source, list) else [] if source is None else [source]
    if eos is not None:
        ends.append(ids[eos])
    by_id = {i: content for content, i in ids.items()}
    ends = [i for i in dict.fromkeys(ends) if i in by_id]

    special = {
        token["id"]: SpecialToken(
            token["id"], token["content"], bool(token.get("lstrip")), bool(token.get("rstrip"))
        )
        for token in added
        if token.get("special")
    }
    for i in [*ends, *([] if bos is None else [ids[bos]])]:
        special.setdefault(i, SpecialToken(i, by_id[i]))

    plain = [token for token in added if token["id"] not in special]
    size = max(by_id) + 1
    token_bytes = [b""] * size
    for content, i in vocab.items():
        token_bytes[i] = _visible_bytes(content)
    for token in plain:
        token_bytes[token["id"]] = token["content"].encode()
    for i in special:
        token_bytes[i] = b""
    bos_id = None if bos is None else ids[bos]
    return TokenizerParts(
        backend=_load_backend(folder, document, plain, special),
        token_bytes=tuple(token_bytes),
        special_tokens=tuple(special.values()),
        bos_id=bos_id,
        add_bos=bos_id is not None and _adds_bos(settings, document, bos),
        eos_ids=tuple(ends),
        vocab_size=max(size, _vocab_size(config)),
        template_source=_folder_template(folder, settings),
        template_variables={
            name: text
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (text := named(name)) is not None
        },
    )


def _load_backend(
    folder: Path,
    document: dict[str, Any],
    plain: list[dict[str, Any]],
    special: Mapping[int, SpecialToken],
) -> tokenizers.Tokenizer:
    """Load the tokenizer without its special tokens, so that no text can be encoded as one.

    Added tokens that are not special keep their ids by being in the vocabulary.
    """
    model = document["model"]
    merged = {"".join(m) if isinstance(m, list) else m.replace(" ", "", 1) for m in model["merges"]}
    vocab = {
        content: i for content, i in model["vocab"].items() if i not in special or content in merged
    }
    vocab |= {token["content"]: token["id"] for token in plain}
    changed = {
        **document,
        "model": {**model, "vocab": vocab, "unk_token": None},
        "added_tokens": plain,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(changed))
    except Exception as error:  # what tokenizers raises is a plain Exception
        raise ModelLoadError(f"{folder}/tokenizer.json can't be loaded: {error}") from error


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    parts = [] if decoder is None else decoder.get("decoders") or [decoder]
    return any(part.get("type") == "ByteLevel" for part in parts)


def _adds_bos(settings: dict[str, Any], document: dict[str, Any], bos: str | None) -> bool:
    setting = settings.get("add_bos_token")
    if isinstance(setting, bool):
        return setting
    processor = document.get("post_processor") or {}
    for part in processor.get("processors") or [processor]:
        first = (part.get("single") or [{}])[0]
        if part.get("type") == "TemplateProcessing" and "SpecialToken" in first:
            return bool(first["SpecialToken"]["id"] == bos)
    return False


def _folder_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _vocab_size(config: dict[str, Any]) -> int:
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size", 0))
    return size if isinstance(size, int) else 0


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is no such file."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"can't read {path}: {error}: download the model again") from error
    if not isinstance(document, dict):
        raise ModelLoadError(f"{path} holds no JSON object: download the model again")
    return document


_BYTE_LEVEL_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_BYTE_LEVEL_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_parts(
    vocab_size: int, merges: Sequence[tuple[str, str]], add_bos: bool
) -> TokenizerParts:
    """Make a tokenizer of bytes (ids 0 to 255), three special tokens, and one token per merge."""
    needed = 256 + len(_BYTE_LEVEL_SPECIALS) + len(merges)
    if vocab_size < needed:
        raise ModelLoadError(
            f"a byte-level tokenizer with {len(merges)} merges has {needed} ids, and the model "
            f"{vocab_size}: give it a tokenizer.json or a larger vocab_size"
        )
    vocab = dict(byte_alphabet())
    pairs = [(_byte_chars(left), _byte_chars(right)) for left, right in merges]
    for left, right in pairs:
        vocab.setdefault(left + right, len(vocab) + len(_BYTE_LEVEL_SPECIALS))
    backend = tokenizers.Tokenizer(
        _bpe(vocab, pairs, ignore_merges=False, where=Path("byte-level tokenizer"))
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    token_bytes = [b""] * (len(vocab) + len(_BYTE_LEVEL_SPECIALS))
    for token, i in vocab.items():
        token_bytes[i] = _visible_bytes(token)
    specials = [SpecialToken(256 + i, text) for i, text in enumerate(_BYTE_LEVEL_SPECIALS)]
    return TokenizerParts(
        backend=backend,
        token_bytes=tuple(token_bytes),
        special_tokens=tuple(specials),
        bos_id=256,
        add_bos=add_bos,
        eos_ids=(256,),
        vocab_size=vocab_size,
        template_source=_BYTE_LEVEL_TEMPLATE,
        template_variables={"bos_token": specials[0].content, "eos_token": specials[0].content},
    )


def read_dummy(config_path: Path) -> TokenizerParts:
    """Read the tokenizer.json beside a model's configuration, or make one of bytes."""
    if (config_path.parent / "tokenizer.json").is_file():
        return read_folder(config_path.parent, config_path)
    config = _read_json(config_path)
    if config is None or not _vocab_size(config):
        raise ModelLoadError(f"{config_path} names no vocab_size: a dummy model needs one")
    return byte_level_parts(_vocab_size(config), (), add_bos=False)

"""Tokenizers: byte-level BPE trained on the study's text, bytes, or a Hugging Face tokenizer.

Each is a JSON description of the `tokenizers` library; bytes are a byte-level BPE without merges. The library is
imported when text is first encoded, so that prepared tokens can be used without it.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from basecap.data._faster import encoder, first_difference
from basecap.data._growth import refuse_growth
from basecap.data._pieces import BYTE_LEVEL, cuts_of, last_cut, matched_tokens, pieces
from basecap.errors import ConfigError
from basecap.system.foreign import read_file
from basecap.system.hub import without_retries

#: End-of-text tokens, in order of preference.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")

#: Maximum number of bytes of a tokenizer.json, and of token ids; those of large models have 40 MB and a million.
LARGEST_FILE, LARGEST_VOCABULARY = 1 << 28, 1 << 24

#: Minimum number of characters of a piece of a text that repeats itself: less than a sentence.
REPEATED = 32

#: Vocabulary size of `byte_tokenizer`: the bytes and end-of-text.
BYTES = 257


class Tokenizer:
    """A tokenizer, built from its JSON description.

    Attributes:
        vocab_size: number of token ids.
        end_of_text: id of the token after every document; encoding text never returns it.
        fingerprint: first sixteen hex digits of the SHA-256 of the description.
        description: content of a tokenizer.json.
        faster: whether documents are encoded with gigatoken, see `use_gigatoken`.
    """

    vocab_size: int
    end_of_text: int
    fingerprint: str
    faster: bool = False

    def __init__(self, description: str):
        """Parse the content of a tokenizer.json; raises ValueError, TypeError or KeyError when it is invalid."""
        content = json.loads(description)
        refuse_growth(content)
        model = content["model"]["vocab"]
        added = {token["content"]: token["id"] for token in content["added_tokens"]}
        ids = list(model.values()) if isinstance(model, dict) else range(len(model))
        self.vocab_size = max(*ids, *added.values(), 0) + 1
        if self.vocab_size > LARGEST_VOCABULARY:
            raise ValueError(f"a token has the id {self.vocab_size - 1}")
        ends = [added[name] for name in END_TOKENS if name in added]
        if not ends:
            raise ConfigError(f"the tokenizer has no end-of-text token; it needs one of {', '.join(END_TOKENS)}.")
        self.end_of_text = ends[0]
        self.fingerprint = hashlib.sha256(description.encode()).hexdigest()[:16]
        self.description = description
        self._special = [name for name, token in added.items() if token == self.end_of_text]
        self._special += [token["content"] for token in content["added_tokens"] if token.get("special")]
        self._cuts = cuts_of(content)
        bare = self._cuts is BYTE_LEVEL and content.get("normalizer") is None and not matched_tokens(content)
        decoder = json.dumps(content.get("decoder"))
        self._byte_names = _byte_vocabulary() if '"ByteLevel"' in decoder else {}
        self._byte_names |= {f"<0x{byte:02X}>": byte for byte in range(256) if '"ByteFallback"' in decoder}
        self._sizes: dict[tuple[int, bool], int] = {}
        self._is_bytes = bare and model == _byte_vocabulary() and not content["model"]["merges"]

    @property
    def dtype(self) -> np.dtype:
        """The smallest dtype for every id: uint16 or uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    @cached_property
    def _library(self) -> Any:
        import tokenizers

        content = json.loads(self.description)
        for token in content["added_tokens"]:
            token["special"] = token.get("special") or token["id"] == self.end_of_text  # others are found in text
        with _library_errors():
            tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        for token in content["added_tokens"]:
            if tokenizer.token_to_id(token["content"]) != token["id"]:
                raise ConfigError(
                    f"the tokenizers library gives the token {token['content']!r} another id than the tokenizer.json "
                    f"({token['id']}); correct the ids of its added_tokens."
                )
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def _spelled_end(self) -> list[int]:
        """The ids of the characters of the end-of-text token, for a text that contains its name."""
        name = self._library.id_to_token(self.end_of_text)
        with _library_errors():
            return [token.id for character in name for token in self._library.model.tokenize(character)]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without an end-of-text token."""
        return self.encode_document(text).tolist()

    def encode_document(self, text: str) -> np.ndarray:
        """Return the token ids of `text`, without an end-of-text token: `dtype` [tokens].

        The library takes hundreds of bytes per token, so a long text is encoded in pieces if that changes no id.
        Raises ConfigError when the library cannot encode it.
        """
        if self._is_bytes:
            return np.frombuffer(text.encode("utf-8"), np.uint8).astype(self.dtype)
        faster = None if not self.faster or self._has_special(text) else encoder(self.description)
        if faster is not None:
            return faster(text).astype(self.dtype)
        encoded = [np.zeros(0, self.dtype)]
        for piece in pieces(text, self._cuts):
            with _library_errors():
                encoded.append(np.array(self._library.encode(piece, add_special_tokens=False).ids, self.dtype))
        ids = np.concatenate(encoded)
        if (ends := np.flatnonzero(ids == self.end_of_text)).size:  # models with the name in their vocabulary find it
            parts = np.split(ids, np.stack([ends, ends + 1], axis=1).ravel())
            spelled = np.array(self._spelled_end, self.dtype)
            ids = np.concatenate([spelled if number % 2 else part for number, part in enumerate(parts)])
        return ids

    def encode_repeated(self, text: str, known: dict[str, np.ndarray]) -> np.ndarray:
        """Return what `encode_document` does, sooner for texts that repeat the same sentences many times.

        Args:
            text: the text.
            known: the tokens of pieces that were encoded before; new ones are added.
        """
        if self._is_bytes or self._cuts is None:
            return self.encode_document(text)
        found = []
        for piece in pieces(text, self._cuts, REPEATED):
            if piece not in known:
                known[piece] = self.encode_document(piece)
            found.append(known[piece])
        return np.concatenate(found)

    def settled(self, text: str) -> tuple[list[int], str]:
        """Return the tokens of the beginning of a text that stay what they are whatever follows it, and the rest of it.

        So `encode(text + more)` is these tokens and `encode(rest + more)`.
        """
        start, rest = (text, "") if self._is_bytes else last_cut(text, self._cuts)
        return self.encode(start), rest

    def use_gigatoken(self, texts: Iterable[str]) -> str | None:
        """Encode documents with gigatoken, if it is installed, reads this tokenizer and gives the ids of `tokenizers`.

        Args:
            texts: documents whose beginnings are compared; not read if gigatoken is not used.

        Returns:
            The beginning of the first text that it encodes differently, None for another reason or if it is used.
        """
        self.faster, faster = False, None if self._is_bytes else encoder(self.description)
        if faster is None:
            return None
        compared = (text for text in texts if not self._has_special(text))
        different = first_difference(faster, self.encode_document, compared)
        self.faster = different is None
        return different

    def _has_special(self, text: str) -> bool:
        """Whether a text contains the name of a special token, which gigatoken finds and this class spells."""
        return any(name in text for name in self._special)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD."""
        with _library_errors():
            return self._library.decode(list(ids), skip_special_tokens=False)

    def continued(self, prompt: str, ids: Sequence[int]) -> str:
        """Return `prompt` and the text that token ids add to it, with the space in front of their first word.

        >>> byte_tokenizer().continued("a", [32, 98])
        'a b'
        """
        if not prompt:
            return self.decode(ids)
        return prompt + self.decode([self.end_of_text, *ids]).removeprefix(self.decode([self.end_of_text]))

    def bytes_of_first(self, count: int, ids: np.ndarray, whole: int) -> int:
        """Return how many UTF-8 bytes of a document its first tokens stand for.

        Exact, also within a character, where the tokens decode to the text. Where the tokenizer changes text, such as
        its case or white space, the bytes of the decoded text are scaled to those of the document.

        Args:
            count: number of first tokens, at least one.
            ids: tokens of the document [tokens].
            whole: bytes of the document.
        """
        known, places = np.unique(ids, return_inverse=True)
        sizes = np.array([self._size(token, first=False) for token in known.tolist()])[places]
        sizes[0] = self._size(int(ids[0]), first=True)
        return round(whole * int(sizes[:count].sum()) / max(1, int(sizes.sum())))

    def _size(self, token: int, first: bool) -> int:
        """Return the bytes that a token adds to a text, of which it is the `first` token or not."""
        if (token, first) not in self._sizes:
            name = self._library.id_to_token(token) or ""
            if name in self._byte_names or (name and all(letter in self._byte_names for letter in name)):
                size = 1 if name in self._byte_names else len(name)  # it may be a part of a character
            else:
                size = len((self.decode([token]) if first else self.continued(" ", [token])[1:]).encode())
            self._sizes[token, first] = size
        return self._sizes[token, first]

    @classmethod
    def load(cls, path: Path, remedy: str = "give one with --set data.tokenizer=FILE") -> "Tokenizer":
        """Read a tokenizer.json, or the one in a directory; raises ConfigError when it is missing or invalid.

        `remedy` says what helps where it is invalid.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            return cls(read_file(file, LARGEST_FILE).decode("utf-8"))
        except OSError as error:
            raise ConfigError(f"tokenizer {file} cannot be read ({error.strerror}); give a tokenizer.json.") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{file} is not a valid tokenizer.json; {remedy}.") from error

    @classmethod
    def from_hub(cls, name: str) -> "Tokenizer":
        """Download the tokenizer of a Hugging Face model; raises ConfigError when that fails."""
        from huggingface_hub import hf_hub_download

        refuse_missing_file(name)
        try:
            with without_retries():
                path = hf_hub_download(name, "tokenizer.json")
        except (OSError, ValueError) as error:
            raise ConfigError(  # the library's message fills a screen; --debug shows it
                f"tokenizer {name!r} is neither bpe, bytes nor a local file, and cannot be downloaded from the Hugging "
                f"Face hub ({type(error).__name__}); give a tokenizer.json with --set data.tokenizer=FILE, or check "
                "the name, the network and whether its licence must be accepted."
            ) from error
        return cls.load(Path(path))


@contextmanager
def _library_errors() -> Iterator[None]:
    """Raise ConfigError for what the tokenizers library raises, which includes panics that are no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise ConfigError(
            f"the tokenizers library cannot use this tokenizer ({error}); install the version that wrote it, or give "
            "another with --set data.tokenizer=FILE."
        ) from error


def is_path(name: str) -> bool:
    """Whether the tokenizer `name` of a study is a path, not a name on the hub."""
    return name.endswith(".json") or name.startswith((".", "/", "~"))


def refuse_missing_file(name: str) -> None:
    """Raise ConfigError when the tokenizer `name` of a study is a path and does not exist."""
    if is_path(name) and not Path(name).exists():
        raise ConfigError(f"tokenizer {name} does not exist; give the path of a tokenizer.json.")


def is_local(name: str) -> bool:
    """Whether the tokenizer `name` of a study is available without the network."""
    if name in ("bpe", "bytes") or Path(name).exists():
        return True
    from huggingface_hub import try_to_load_from_cache  # here, because it takes long to import

    try:
        return isinstance(try_to_load_from_cache(name, "tokenizer.json"), str)
    except ValueError:  # not a valid name on the hub
        return False


def known_tokenizer(name: str) -> Tokenizer | None:
    """Return the tokenizer `name` of a study if it is known before text is prepared: bytes, or a file that exists."""
    if name == "bytes":
        return byte_tokenizer()
    return Tokenizer.load(Path(name)) if name != "bpe" and Path(name).exists() else None


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer whose ids are UTF-8 bytes, and 256 for end-of-text."""
    import tokenizers

    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=_byte_vocabulary(), merges=[]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens([END_TOKENS[0]])
    return Tokenizer(library.to_str())


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al., arXiv 1508.07909) on texts.

    Args:
        texts: training texts.
        vocab: number of ids, including end-of-text and the 256 bytes; a small text may give fewer.
    """
    import tokenizers

    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_TOKENS[0]],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator((piece for text in texts for piece in pieces(text, BYTE_LEVEL)), trainer)
    return Tokenizer(library.to_str())


def _byte_vocabulary() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary.

    Printable Latin-1 characters represent themselves; the other bytes are code points from 256, in order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte) if byte in printable else chr(256 + others.index(byte)): byte for byte in range(256)}


def check_vocabulary(model_vocab: int, tokenizer: Tokenizer) -> None:
    """Raise ConfigError when a model has fewer ids than the tokenizer; more are allowed, as padding."""
    if model_vocab < tokenizer.vocab_size:
        raise ConfigError(
            f"the model has {model_vocab} token ids but the tokenizer has {tokenizer.vocab_size}; set model.vocab to "
            "at least that, or use the data that the model was trained on."
        )

"""The section `data` of a study: source of the text, tokenizer, training and test domains."""

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from basecap.data.hashes import digest
from basecap.data.sources import PLACEHOLDER, SOURCES, plugin_of
from basecap.errors import ConfigError, nearest
from basecap.plugins import plugin_digest
from basecap.system.yaml_text import read_number

#: Part of every hash; increase it when the meaning of an option or of a stored file changes.
FORMAT = 2


Count = Annotated[int, BeforeValidator(read_number)]
Number = Annotated[float, BeforeValidator(read_number)]
#: One line of text, usable in tables, figures and paths.
Line = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f]*$")]


class DataConfig(BaseModel):
    """The text that a study trains and tests on."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    source: str = Field(
        description="source of the text, see `basecap list domains`: installed, jsonl, text, hub, slimpajama, another "
        "set of the hub or a plugin's"
    )
    path: Line | None = Field(None, description="directory of the text, for sources that read a directory")
    hub: Line | None = Field(
        None,
        description="name of a Hugging Face dataset to stream instead of reading data.path; source hub takes a name "
        "with a configuration per domain, or one with {domain} in it for a dataset per domain",
    )
    max_files: Count | None = Field(
        None,
        ge=1,
        description="maximum number of files of each domain and split of a dataset of the hub, chosen by the hashes of "
        "their names (default: all)",
    )
    tokenizer: Line = Field(
        "bpe",
        description="bpe (trained on the training documents), bytes, a local tokenizer.json or its directory, "
        "or the name of a Hugging Face model",
    )
    vocab: Count = Field(4096, ge=257, le=2**20, description="vocabulary size of the trained tokenizer (bpe)")
    seq_len: Count = Field(2048, ge=2, le=2**24, description="tokens of a training sequence")
    train: tuple[str, ...] = Field(min_length=1, description="domains to train on; their held-out documents are tested")
    ood: tuple[str, ...] = Field((), description="unseen domains: only tested")
    weights: dict[str, Number] | None = Field(
        None,
        description="share of each training domain in the batches, honoured within 1 % (default: proportional to its "
        "tokens)",
    )
    max_train_tokens: Count | None = Field(
        None,
        ge=1,
        description="maximum number of training tokens per domain, chosen as whole documents by content hash, none "
        "longer than a tenth of this number (default: all)",
    )
    max_test_tokens: Count | None = Field(
        None, ge=1, description="maximum number of validation and of test tokens per domain, chosen in the same way"
    )
    min_ood_tokens: Count | None = Field(
        None, ge=1, description="minimum number of tokens of a document of an unseen domain (default: no minimum)"
    )
    cluster: Line | None = Field(
        None,
        description="groups of similar documents that the bootstrap draws together: a dotted key of the records, such "
        "as meta.repo (a key may contain dots itself); for sources of files path, the first folder of a file's path "
        "within its domain, or path/N for the first N folders (default: each document is its own group)",
    )
    overlap: Number | None = Field(
        0.5,
        ge=0,
        le=1,
        description="largest allowed share of a held-out document's tokens in passages that also occur in the "
        "training text; documents above it are left out; null keeps all",
    )
    cache: Line | None = Field(
        None,
        description="directory of the token shards, which studies can share (default: DIR/data). Prepared text is not "
        "read again unless the code of its plugin changes: remove the directory when the text has changed",
    )
    workers: Count | None = Field(
        None, ge=1, description="processes that prepare text (default: one per core that this process may use)"
    )

    @model_validator(mode="after")
    def _names_are_known(self) -> "DataConfig":
        known, reads = SOURCES.get(self.source).known_domains, SOURCES.get(self.source).reads
        for option in ("path", "hub", "max_files"):
            if getattr(self, option) is not None and option not in reads:
                raise ConfigError(f"source {self.source!r} does not use data.{option}; remove it.")
        if self.hub is not None and re.search("[{}]", self.hub.replace(PLACEHOLDER, "")):
            raise ConfigError(f"data.hub = {self.hub!r}: only {PLACEHOLDER} may stand in braces, for each domain.")
        is_path = re.fullmatch(r"path(/[1-9][0-9]?)?", self.cluster or "path")
        if not SOURCES.get(self.source).has_records and not is_path:
            raise ConfigError(
                f"documents of source {self.source!r} are files and have no key {self.cluster!r}; set data.cluster to "
                "path, or to path/N for the first N folders of a path."
            )
        named = (*self.train, *self.ood)
        for domain in named:
            if known and domain not in known:
                raise ConfigError(f"source {self.source!r} has no domain {domain!r}: {nearest(domain, known)}")
            if domain in ("", ".", "..") or "/" in domain:
                raise ConfigError(
                    f"domain {domain!r} is not the name of a file or folder; give a name without a slash."
                )
            if named.count(domain) > 1:
                raise ConfigError(f"domain {domain!r} is named twice in data.train and data.ood; remove one.")
        if self.weights is not None:
            for domain in self.weights:
                if domain not in self.train:
                    raise ConfigError(f"data.weights: {domain!r} is not in data.train: {nearest(domain, self.train)}")
            if sorted(self.weights) != sorted(self.train) or min(self.weights.values()) <= 0:
                raise ConfigError("data.weights needs a number above 0 for every domain in data.train.")
        return self

    @property
    def options_hash(self) -> str:
        """Hash (sixteen hex digits) of the options that the tokens depend on."""
        exclude = {"cache", "workers", "seq_len", "weights"}
        exclude |= {"max_files"} if self.max_files is None else set()  # an option that earlier versions did not have
        return digest([FORMAT, self.model_dump(mode="json", exclude=exclude)])

    @property
    def code(self) -> str | None:
        """SHA-256 of the plugin that defines the source, None for a built-in source."""
        return None if plugin_of(self.source) is None else plugin_digest(SOURCES.module(self.source))

    @property
    def hash(self) -> str:
        """Hash (sixteen hex digits) of everything that the tokens depend on, including a plugin's code."""
        return self.options_hash if self.code is None else digest([self.options_hash, self.code])

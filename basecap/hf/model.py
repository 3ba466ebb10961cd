"""The one language model behind the interface of `transformers`."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from basecap.errors import ConfigError
from basecap.hf.cache import DecodingCache
from basecap.models import LanguageModel, ModelConfig
from basecap.run.provenance import other_plugins


class BasecapConfig(PreTrainedConfig):
    """The config.json of an exported model.

    Attributes:
        language_model: a `ModelConfig`, as JSON.
        plugins: the plugin files and packages that the model needs, by their digests, as in `RunInfo`.
    """

    model_type = "basecap"

    language_model: dict[str, Any] | None = None
    plugins: dict[str, str] | None = None
    tie_word_embeddings: bool = False  # a tied head is one tensor of the model: there is nothing to tie
    use_cache: bool = True
    eos_token_id: int | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    max_position_embeddings: int = 0

    @classmethod
    def of(cls, model: ModelConfig, end_of_text: int, plugins: dict[str, str]) -> "BasecapConfig":
        """Return the configuration of a model whose documents end with the token `end_of_text`."""
        return cls(
            language_model=model.model_dump(mode="json"),
            plugins=plugins,
            eos_token_id=end_of_text,
            bos_token_id=end_of_text,
            pad_token_id=end_of_text,
            vocab_size=model.vocab,
            hidden_size=model.hidden,
            num_hidden_layers=model.depth,
            max_position_embeddings=model.max_length,
            architectures=[BasecapForCausalLM.__name__],
            dtype="float32",
        )


class BasecapForCausalLM(PreTrainedModel, GenerationMixin):
    """A model of any architecture. Attention masks may pad rows on the left and on the right.

    Attributes:
        model: the `LanguageModel`.
    """

    config_class = BasecapConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    accepts_loss_kwargs = True
    _is_stateful = True  # its cache cannot be cropped, which assisted generation needs
    _no_split_modules = ["Block"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    gradient_checkpointing = False  # transformers sets it

    def __init__(self, config: BasecapConfig):
        """Build the modules of `config`; raises ConfigError where a plugin that it needs is not loaded."""
        super().__init__(config)
        described = ModelConfig.model_validate(config.language_model)
        absent, other = other_plugins(config.plugins or {}, described)
        if absent:
            raise ConfigError(
                f"the model needs the plugin {absent[0]}; call basecap.plugins.load_plugin with the path of that file, "
                "a copy of which is in its folder, before you load the model."
            )
        if other is not None:
            raise ConfigError(f"the model was trained with another version of {other}; load that one.")
        self.model = LanguageModel(described)
        self.post_init()

    @classmethod
    def around(cls, trained: LanguageModel, config: BasecapConfig) -> "BasecapForCausalLM":
        """Return the interface to a model that is there already."""
        with torch.device("meta"):
            made = cls(config)
        made.model = trained
        # Greedy, as `generate` is by default, until the end of a document.
        end = config.eos_token_id
        made.generation_config = GenerationConfig(eos_token_id=end, bos_token_id=end, pad_token_id=end)
        return made

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the head, None where it is the transposed embedding."""
        return self.model.head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cache: DecodingCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        tokenizer: Any = None,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """Return logits [B, T, vocab], and with `labels` the mean loss in nats per token.

        Args:
            input_ids: int64 [B, T].
            attention_mask: [B, T], 0 where a row is padded, before or after its tokens. With a `cache` it may have
                more columns, those of tokens that were read.
            inputs_embeds: must be None.
            labels: int64 [B, T], the input itself; -100 counts for nothing.
            cache: of `generate`; logits are then those of the last position alone, [B, 1, vocab].
            use_cache: ignored, as `generate` makes the cache.
            logits_to_keep: the last positions to return, all when 0, or their indices.
            num_items_in_batch: what the sum of the losses is divided by, instead of the number of labels.
            output_attentions: must be false.
            output_hidden_states: must be false.
            return_dict: whether to return an output with names, the default, instead of a tuple.
            tokenizer: ignored; `generate` passes on what it needs for `stop_strings`.

        Raises:
            ConfigError: arguments that must not be given, no token, a mask with holes, or more tokens than learned
                positions.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ConfigError("basecap's models read input_ids; leave out inputs_embeds.")
        if input_ids.shape[-1] < 1:
            raise ConfigError(f"input_ids {tuple(input_ids.shape)} have no token; begin an empty text with bos_token.")
        if output_attentions or output_hidden_states:
            raise ConfigError("basecap's models return logits alone; leave out output_attentions and hidden states.")
        self.model.checkpointing = self.gradient_checkpointing and self.training
        if cache is not None:
            logits = cache.read(self.model, input_ids, attention_mask)[:, None]
        else:
            hidden = self.model.hidden(input_ids, _segments(attention_mask))
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = F.linear(hidden[:, kept], self.model.head_weight)
        loss = None
        if labels is not None:
            items = num_items_in_batch
            loss = self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch=items)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, cache=cast(Any, cache))
        return output if return_dict is not False else output.to_tuple()

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> bool:
        """Make the cache that `generate` passes from step to step."""
        if generation_config.use_cache is not False and model_kwargs.get("cache") is None:
            model_kwargs["cache"] = DecodingCache(max_cache_length)
        return True

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialise a new model by its recipe; raises ConfigError where a folder lacks weights."""
        parameters = dict(self.model.named_parameters())
        lacking = [name for name, held in parameters.items() if not getattr(held, "_is_hf_initialized", False)]
        if 0 < len(lacking) < len(parameters):
            raise ConfigError(f"the folder lacks the weights of {lacking[0]}; export the model again.")
        if lacking:
            self.model.initialise(0)


def _segments(mask_BT: Tensor | None) -> Tensor | None:
    """Return segments that part the tokens of each row from padding before them; None where there is no such padding.

    Padding after the tokens changes nothing before it. Raises ConfigError for a mask with holes.
    """
    if mask_BT is None:
        return None
    real = mask_BT.bool()
    started, left = real.cummax(dim=1).values, real.flip(1).cummax(dim=1).values.flip(1)
    if not torch.equal(started & left, real):
        raise ConfigError("attention_mask has a 0 between tokens of a row; pad rows before or after their tokens.")
    return None if bool(real[:, 0].all()) else started.to(torch.int64)

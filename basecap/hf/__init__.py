"""Models as `transformers` knows them: after `import basecap.hf`, exported folders load with its Auto classes.

    import basecap.hf
    model = AutoModelForCausalLM.from_pretrained(DIR)

No code of the folder runs. Needs the extra `basecap[hf]`.
"""

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as error:
    raise ImportError("basecap.hf needs the transformers library; install basecap[hf].") from error

from basecap.hf.cache import DecodingCache
from basecap.hf.model import BasecapConfig, BasecapForCausalLM

__all__ = ["BasecapConfig", "BasecapForCausalLM", "DecodingCache"]

AutoConfig.register(BasecapConfig.model_type, BasecapConfig)
AutoModelForCausalLM.register(BasecapConfig, BasecapForCausalLM)

"""basecap: does a sequence-mixing architecture keep the base capabilities of a Transformer?"""

__version__ = "0.1.0"

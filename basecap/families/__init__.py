"""Models that others trained, as models of basecap: a file for each family, with its names of weights."""

from basecap.families._contract import FAMILIES, Family, ModelFile, family
from basecap.families._folder import read_model

__all__ = ["FAMILIES", "Family", "ModelFile", "family", "read_model"]

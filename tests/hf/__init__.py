"""Tests of `basecap.hf`."""

"""Tests of `basecap.families`."""

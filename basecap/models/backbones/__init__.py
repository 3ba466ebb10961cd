"""Backbones: one file each, found by scanning."""

from basecap.models.backbones._contract import BACKBONES, Backbone, FeedForwardLayer, backbone

__all__ = ["BACKBONES", "Backbone", "FeedForwardLayer", "backbone"]

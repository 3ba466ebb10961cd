"""Language models: one `LanguageModel` for every architecture, built from a block family and sequence mixers."""
